"""A stage that begins a request with a copy of what another one begins with."""

from __future__ import annotations

import pytest

from flowspec.core.protocol.messages import Open, Release
from flowspec.core.protocol.sliding_window import SlidingWindow
from flowspec.core.stage.events import ClearSlots, CloseCache, ControlArrived, OpenCache, StageCommand, Trim
from flowspec.core.stage.stage import StageCore
from flowspec.errors import PeerError
from tests.core.stages import arrive, commit, finish, opened, opening, run_of, segment


def copying(*, epoch: int = 0, keep: int = 2, length: int = 4, root: int = 3) -> ControlArrived:
    """Request 2 begins with what request 1 begins with."""
    return ControlArrived(
        message=opening(request=2, epoch=epoch, keep=keep, length=length, root=root, source=1)
    )


def opening_of(commands: list[StageCommand]) -> OpenCache:
    (found,) = [each for each in commands if isinstance(each, OpenCache)]
    return found


def guessed() -> StageCore:
    """One that has run a prompt of three nodes, a guess that became part of the output, and one that did
    not."""
    core = opened()
    finish(core, run_of(arrive(core, segment(1, [(3, 2, 3), (4, 2, 3)]))))
    arrive(core, segment(2, [], newest=commit(4)))
    return core


def test_a_copy_holds_the_committed_nodes_in_order() -> None:
    core = guessed()
    command = opening_of(core.handle(copying(keep=4, length=6, root=5), 0.0))
    assert (command.request, command.slots) == (2, 64)
    assert command.copied is not None
    assert (command.copied.source, command.copied.slots.tolist()) == (1, [0, 1, 2, 4])
    core.validate()
    slots = core.slot_maps()[2]
    assert slots.position[: slots.high].tolist() == [0, 1, 2, 3]
    assert slots.tokens[: slots.high].tolist() == [0, 10, 20, 40]
    assert core.fired["copied"] == 1


def test_what_follows_a_copy_sees_it_and_the_source_goes_on() -> None:
    core = guessed()
    rows = [(12, 11, 2), (13, 12, 3)]
    opening = copying().message
    assert isinstance(opening, Open)
    part = segment(3, rows, prompt=True, newest=commit(base=4, request=2), opens=opening)
    commands = arrive(core, part)
    (job,) = run_of(commands).parts
    assert job.slots.tolist() == [2, 3]
    assert job.visible.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert job.key_positions.tolist() == [0, 1, 2, 3]
    finish(core, run_of(commands))
    (own,) = run_of(arrive(core, segment(4, [(5, 4, 4)], newest=commit(4)))).parts
    assert own.visible.tolist() == [[True, True, True, True, True]], "what was not committed is gone"
    core.validate()


def test_an_open_that_comes_twice_copies_once() -> None:
    core = guessed()
    core.handle(copying(), 0.0)
    assert core.handle(copying(), 0.0) == []


def test_a_copy_outlives_its_source() -> None:
    core = guessed()
    core.handle(copying(), 0.0)
    core.handle(ControlArrived(message=Release(request=1)), 0.0)
    assert core.requests() == [2]
    core.validate()


def test_an_open_that_a_release_has_overtaken_copies_nothing() -> None:
    core = guessed()
    core.handle(ControlArrived(message=Release(request=2)), 0.0)
    core.handle(ControlArrived(message=Release(request=1)), 0.0)
    assert core.handle(copying(), 0.0) == [], "its source is gone, too"


def test_a_request_that_is_known_keeps_nothing_of_its_own() -> None:
    core = guessed()
    first = opening(request=2, length=2, root=1)
    job = run_of(
        arrive(core, segment(5, [(0, -1, 0)], prompt=True, newest=commit(base=2, request=2), opens=first))
    )
    commands = core.handle(copying(epoch=1), 0.0)
    assert [type(each) for each in commands] == [CloseCache, OpenCache]
    sent = finish(core, job)
    assert [each for each in sent if isinstance(each, Trim)] == []
    core.validate()
    assert core.slot_maps()[2].high == 2


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (copying(keep=4, length=6, root=5), None),
        (copying(keep=5, length=6, root=5), "keeps 5 tokens of 1, of which 4 have run"),
    ],
)
def test_no_more_is_copied_than_has_run(message: ControlArrived, error: str | None) -> None:
    core = guessed()
    if error is None:
        core.handle(message, 0.0)
        return
    with pytest.raises(PeerError, match=error):
        core.handle(message, 0.0)


def test_what_no_correct_head_copies_is_refused() -> None:
    core = guessed()
    unknown = opening(request=2, keep=2, length=4, root=3, source=7)
    with pytest.raises(PeerError, match="keeps 2 tokens of request 7, but nothing of that is held here"):
        core.handle(ControlArrived(message=unknown), 0.0)
    large = opening(request=2, keep=2, length=4, root=3, source=1, slots=65)
    with pytest.raises(PeerError, match="at most 64 slots"):
        core.handle(ControlArrived(message=large), 0.0)


def test_a_path_with_gaps_is_not_copied() -> None:
    core = StageCore(is_last=False, slots_max=64)
    rows = [(node, node - 1, node) for node in (0, 1, 3)]
    finish(core, run_of(arrive(core, segment(0, rows, prompt=True, opens=opening(length=5, root=4)))))
    with pytest.raises(PeerError, match="each of the first 4 positions; 3 are here"):
        core.handle(copying(keep=4, length=6, root=5), 0.0)


def windowed(run: int) -> StageCore:
    """One that has run so many positions of a prompt of twelve, whose layers with a window of 2 hold those
    from 3 before the last on."""
    core = StageCore(is_last=True, slots_max=64, sliding_window=SlidingWindow(tokens=2, back=1, step=1))
    for first in range(0, run, 2):
        rows = [(node, node - 1, node) for node in (first, first + 1)]
        finish(
            core, run_of(arrive(core, segment(first, rows, prompt=True, opens=opening(length=12, root=11))))
        )
    return core


def test_layers_with_a_window_copy_what_they_hold() -> None:
    core = windowed(8)
    commands = core.handle(copying(keep=7, length=9, root=8), 0.0)
    command = opening_of(commands)
    assert command.copied is not None
    assert command.copied.slots.tolist() == list(range(7))
    assert command.window_slots == 64
    held = core._requests[1].windowed
    assert held is not None
    copy = core._requests[2].windowed
    assert copy is not None
    first = held.held.given_back
    assert sorted(copy.slots.held[: copy.slots.high].tolist()) == list(range(first, 7))
    assert len(command.copied.window_slots) == 7 - first
    assert not [each for each in commands if isinstance(each, ClearSlots)], "nothing of it goes"
    core.validate()


def test_layers_with_a_window_copy_nothing_that_they_gave_back() -> None:
    core = windowed(12)
    with pytest.raises(PeerError, match="keeps 4 tokens, but layers with a window of 2 hold nothing before"):
        core.handle(copying(keep=4, length=9, root=8), 0.0)
