"""Worker processes of the testbed: an error, Ctrl-C or the end of their parent ends them at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Any

from flowspec.errors import FlowSpecError

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the command."""


@contextlib.contextmanager
def open_pool(
    jobs: int, prepare: Callable[..., None] | None = None, *given: Any
) -> Iterator[ProcessPoolExecutor]:
    """`jobs` new processes, each made ready by `prepare(*given)` if there is one; work is submitted within
    `interrupted_later`.

    Raises `FlowSpecError` when one of them ends before its work is done.
    """
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _start, (prepare, given))
    try:
        yield pool
    except BaseException as error:  # also Ctrl-C: no process outlives the work
        for process in list((pool._processes or {}).values()):  # before the pool forgets them
            process.terminate()
        pool.shutdown(cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise FlowSpecError(
                "a worker process ended, perhaps for want of memory; what is done is kept, try fewer --jobs"
            ) from None
        raise
    pool.shutdown()


@contextlib.contextmanager
def interrupted_later() -> Iterator[None]:
    """What would end this process comes after this; those that are started in it never see Ctrl-C, which is
    their parent's to handle."""
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda came_now, frame: came.append(came_now)) for number in ENDING
    }
    mask = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT}
    )  # is inherited; here another thread may take the signal
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def _start(prepare: Callable[..., None] | None, given: tuple[Any, ...]) -> None:
    """Makes a process ready for work; it does not outlive its parent."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare(*given)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
