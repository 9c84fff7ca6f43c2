"""What the end of a pass needs and its beginning can tell, such as the masks of a grammar: computed while
layers run, by a thread that lives as long as the pass.

Layers and llguidance let go of the interpreter while they compute, so where a core is free the end of the
pass waits for nothing. In memory it holds what is not taken yet, of masks a quarter of what logits take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from types import TracebackType
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
T = TypeVar("T")


class Ahead(Generic[KeyT, T]):
    """Computes what is `wanted`, in its order, from when it is entered; when it is left nothing of it runs
    any more. One thread enters, takes and leaves; each thing is taken once. Without anything wanted there is
    no other thread, nor where it shall not be `beside`: then a thing is computed when it is taken."""

    def __init__(self, wanted: Mapping[KeyT, Callable[[], T]], *, beside: bool = True) -> None:
        self._wanted = wanted
        self._is_beside = beside and bool(wanted)
        self._found: dict[KeyT, T] = {}
        self._dropped: Collection[KeyT] = frozenset()
        self._is_left = False
        self._error: BaseException | None = None
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ahead", daemon=True)

    def __enter__(self) -> Ahead[KeyT, T]:
        if self._is_beside:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises what the thread met, unless something is raised already."""
        self._is_left = True
        if self._is_beside:
            self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def drop(self, keys: Collection[KeyT]) -> None:
        """All that nobody will take, what was named before among it."""
        self._dropped = keys

    def take(self, key: KeyT) -> T | None:
        """Waits for it, and gives it away. None for what is not wanted, once the other thread has ended: what
        that used may be used then. Raises what it met."""
        if key not in self._wanted:
            if self._is_beside:
                self._thread.join()
            return None
        if not self._is_beside:
            return self._wanted[key]()
        with self._news:
            self._news.wait_for(lambda: key in self._found or self._error is not None)
            if key in self._found:
                return self._found.pop(key)
        assert self._error is not None
        raise self._error

    def _run(self) -> None:
        try:
            for key, compute in self._wanted.items():
                if self._is_left:
                    return
                if key not in self._dropped:
                    found = compute()
                    with self._news:
                        self._found[key] = found
                        self._news.notify()
        except BaseException as error:  # noqa: BLE001 - whoever takes or leaves raises it
            with self._news:
                self._error = error
                self._news.notify()
