"""What is computed beside a pass: in order, only while the pass runs, and never swallowed."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from flowspec.model.ahead import Ahead


class _OddError(Exception):
    pass


def test_what_is_taken_is_what_was_computed_whatever_the_order_of_taking() -> None:
    with Ahead({key: partial(pow, key, 2) for key in range(20)}) as ahead:
        assert [ahead.take(key) for key in reversed(range(20))] == [key**2 for key in reversed(range(20))]
        assert ahead.take(20) is None


def test_it_runs_beside_whoever_entered() -> None:
    """The second waits for what this thread does only after the first is computed."""
    first, second = threading.Event(), threading.Event()

    def begin() -> int:
        first.set()
        assert second.wait(60)
        return threading.get_ident()

    with Ahead({0: begin}) as ahead:
        assert first.wait(60)
        second.set()
        assert ahead.take(0) != threading.get_ident()


def test_who_takes_what_is_not_wanted_has_the_other_thread_s_end_behind_it() -> None:
    """So that what one thread at a time may use is free for it."""
    computed: list[int] = []

    def compute(key: int) -> int:
        threading.Event().wait(0.01)
        computed.append(key)
        return key

    with Ahead({key: partial(compute, key) for key in range(3)}) as ahead:
        assert ahead.take(7) is None
        assert computed == [0, 1, 2]
        assert ahead.take(1) == 1


def test_what_is_dropped_is_not_computed_any_more() -> None:
    computed: list[int] = []
    gate = threading.Event()

    def compute(key: int) -> int:
        assert gate.wait(60)
        computed.append(key)
        return key

    with Ahead({key: partial(compute, key) for key in range(5)}) as ahead:
        ahead.drop({1})
        ahead.drop({1, 3})
        gate.set()
        assert ahead.take(4) == 4
    assert computed == [0, 2, 4]


def test_nothing_runs_on_when_it_is_left() -> None:
    computed: list[int] = []
    begun, gate = threading.Event(), threading.Event()

    def compute(key: int) -> None:
        begun.set()
        assert gate.wait(60)
        computed.append(key)

    def leave() -> None:
        with Ahead({key: partial(compute, key) for key in range(9)}):
            assert begun.wait(60)
            raise _OddError

    before = threading.active_count()
    timer = threading.Timer(0.05, gate.set)
    timer.start()
    with pytest.raises(_OddError):
        leave()
    timer.join()
    assert threading.active_count() == before
    assert computed == [0], "what was begun is ended, and no more"


def test_what_is_not_to_run_beside_is_computed_when_it_is_taken() -> None:
    computed: list[int] = []

    def compute(key: int) -> int:
        computed.append(key)
        return threading.get_ident()

    before = threading.active_count()
    with Ahead({key: partial(compute, key) for key in range(4)}, beside=False) as ahead:
        assert threading.active_count() == before
        assert [ahead.take(3), ahead.take(1), ahead.take(9)] == [threading.get_ident()] * 2 + [None]
    assert computed == [3, 1]


def test_without_anything_wanted_there_is_no_thread() -> None:
    before = threading.active_count()
    with Ahead[int, int]({}) as ahead:
        assert threading.active_count() == before
        assert ahead.take(0) is None


def _fail() -> int:
    raise _OddError


@pytest.mark.parametrize("taken", [0, 1, None])
def test_an_error_reaches_whoever_takes_or_leaves(taken: int | None) -> None:
    def take() -> None:
        with Ahead({0: _fail, 1: lambda: 1}) as ahead:
            if taken is not None:
                ahead.take(taken)

    with pytest.raises(_OddError):
        take()
