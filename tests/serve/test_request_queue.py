"""How many are answered at once, who waits, and who is sent away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from flowspec.serve.answers import RequestQueue
from flowspec.serve.documents import ApiError


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return lambda: asyncio.run(test())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@in_loop
async def test_first_come_first_served() -> None:
    gate, let_in = RequestQueue(2, 4), []

    async def one(name: str, count: int) -> None:
        await gate.enter(count)
        let_in.append(name)

    tasks = []
    for name, count in (("a", 1), ("b", 1), ("c", 2), ("d", 1)):
        tasks.append(asyncio.create_task(one(name, count)))
        await settle()
    assert (let_in, gate.running, gate.waiting) == (["a", "b"], 2, 3)
    gate.leave(1.0)
    await settle()
    assert let_in == ["a", "b"], "c needs both places, and d does not overtake it"
    gate.leave(1.0)
    await settle()
    assert (let_in, gate.running, gate.waiting) == (["a", "b", "c"], 2, 1)
    gate.leave(1.0)
    await settle()
    assert let_in == ["a", "b", "c", "d"]
    await asyncio.gather(*tasks)


@in_loop
async def test_who_finds_no_place_to_wait_is_told_when_to_come_again() -> None:
    gate = RequestQueue(1, 1)
    await gate.enter(1)
    waiting = asyncio.create_task(gate.enter(1))
    await settle()
    with pytest.raises(ApiError) as caught:
        await gate.enter(1)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "1")
    gate.leave(30.0)
    await waiting
    another = asyncio.create_task(gate.enter(1))
    await settle()
    with pytest.raises(ApiError) as caught:
        await gate.enter(1)
    assert caught.value.headers["Retry-After"] == "15", "half of what an answer takes"
    gate.leave(30.0)
    await another


@in_loop
async def test_who_goes_away_leaves_no_trace_also_at_the_moment_of_being_let_in() -> None:
    for is_let_in in (False, True):
        gate = RequestQueue(1, 2)
        await gate.enter(1)
        first, second = asyncio.create_task(gate.enter(1)), asyncio.create_task(gate.enter(1))
        await settle()
        if is_let_in:
            gate.leave(1.0)
            first.cancel()
        else:
            first.cancel()
            await settle()
            assert gate.waiting == 1
            gate.leave(1.0)
        await second
        assert (gate.running, gate.waiting, first.cancelled()) == (1, 0, True)


@in_loop
async def test_a_closed_gate_lets_nobody_in() -> None:
    gate, closed = RequestQueue(1, 3), ApiError(503, "closed")
    await gate.enter(1)
    tasks = [asyncio.create_task(gate.enter(1)) for _ in range(3)]
    await settle()
    gate.leave(1.0)  # the first is let in, and has not noticed
    gate.close(closed)
    tasks[2].cancel()
    assert await asyncio.gather(*tasks[:2], return_exceptions=True) == [closed] * 2
    await asyncio.wait(tasks)
    assert (tasks[2].cancelled(), gate.running, gate.waiting) == (True, 0, 0)
    with pytest.raises(ApiError, match="closed"):
        await gate.enter(1)


@in_loop
async def test_more_choices_than_there_are_places_are_refused() -> None:
    with pytest.raises(ApiError) as caught:
        await RequestQueue(2, 9).enter(3)
    assert (caught.value.status, caught.value.param) == (400, "n")
