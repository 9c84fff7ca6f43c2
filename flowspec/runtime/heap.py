"""Keeps glibc from holding on to memory that nobody uses: on small machines that is memory for weights.

By itself its malloc gives threads heaps of their own, of which each keeps what was once freed in it; and a
thousand answers through some sessions and recoveries had a head grow by 25 MiB, though not a byte more was in
use. And what is free between two things in use stays with the process until it is trimmed: caches that grew
and were closed again cost a daemon 20 to 50 MiB, a little more with every stretch of the heap that one came
to lie in. Elsewhere than on glibc nothing is done.
"""

from __future__ import annotations

import ctypes
import gc
import platform

_M_ARENA_MAX = -8


def share_one_heap() -> None:
    """All threads take their memory from one heap; those that have one of their own keep it, so call this
    before there are any."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def free_cycles() -> None:
    """Frees what nothing but reference cycles keeps, as a closed head.

    Python itself looks for cycles among old objects only when a quarter more of them are there, which with
    transformers' is many heads later. Only then does it also free the tuples that it holds ready for their
    next use, up to 2,000 of each length: some 3 MiB after 2,000 answers.
    """
    gc.collect()


def keep_for_good() -> None:
    """What there is now is not looked at for cycles any more: collections take a few
    milliseconds, and no daemon stops for one.

    Never with weights among it: those of a slice that is part of a cycle would stay.
    """
    free_cycles()
    gc.freeze()


def give_back() -> None:
    """Gives the system what is free in the heap; takes .1 to .3 ms with 400 MiB, so it can follow whatever
    frees much."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
