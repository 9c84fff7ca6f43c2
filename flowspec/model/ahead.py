"""What the end of a pass needs and its beginning can tell, such as the masks of a grammar: computed while
layers run, by a thread that lives as long as the pass.

Layers and llguidance let go of the interpreter while they compute, so where a core is free the end of the
pass waits for nothing. In memory it holds what is not taken yet, of masks a quarter of what logits take.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
T = TypeVar("T")


class Ahead(Generic[KeyT, T]):
    """Computes what is `wanted`, in its order, from when it is entered; when it is left nothing of it runs
    any more. One thread enters, takes and leaves; each thing is taken once. Without anything wanted there is
    no other thread, nor where it shall not be `beside`: then a thing is computed when it is taken."""

    def __init__(self, wanted: Mapping[KeyT, Callable[[], T]], *, beside: bool = True) -> None:
        self._wanted = wanted
        self._thread = ThreadPoolExecutor(1, "ahead") if beside and wanted else None
        self._pending: dict[KeyT, Future[T]] = {}

    def __enter__(self) -> Ahead[KeyT, T]:
        if self._thread is not None:
            self._pending = {key: self._thread.submit(compute) for key, compute in self._wanted.items()}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Raises what the thread met, unless something is raised already."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        for future in self._pending.values() if kind is None else ():
            if not future.cancelled():
                future.result()

    def drop(self, keys: Collection[KeyT]) -> None:
        """What nobody will take."""
        for key in keys:
            if key in self._pending:
                self._pending[key].cancel()

    def take(self, key: KeyT) -> T | None:
        """Waits for it, and gives it away. None for what is not wanted, once the other thread has ended: what
        that used may be used then. Raises what it met."""
        if key not in self._wanted:
            if self._thread is not None:
                self._thread.shutdown()
            return None
        return self._wanted[key]() if self._thread is None else self._pending.pop(key).result()
