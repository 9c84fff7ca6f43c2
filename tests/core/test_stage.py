"""A stage alone: which rows run, what they see, what is trimmed, freed, copied and passed on, and its map of
slots; event in, commands out."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Open, Release
from flowspec.core.stage.events import (
    ClearSlots,
    CloseCache,
    LayerEnded,
    OpenCache,
    SegmentArrived,
    SendFeatures,
    SendSegment,
    SendVerified,
    StageCommand,
    Trim,
)
from flowspec.core.stage.slots import SlotMap
from flowspec.core.stage.stage import StageCore
from flowspec.errors import PeerError
from tests.core.stages import arrive, commit, finish, opened, opening, run_of, segment, tell


def test_a_prompt_row_sees_what_is_before_it_and_only_the_root_is_sampled() -> None:
    core = StageCore(is_last=True, slots_max=64)
    job = run_of(arrive(core, segment(0, [(0, -1, 0), (1, 0, 1), (2, 1, 2)], prompt=True, opens=opening())))
    assert job.parts[0].visible.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert job.parts[0].sampled.tolist() == [False, False, True]
    (sent,) = finish(core, job)
    assert isinstance(sent, SendVerified)
    assert [(part.ids, part.next_tokens) for part in sent.verified.parts] == [((2,), (1002,))]


def test_unknown_parents_mean_dead_and_an_empty_segment_passes_on() -> None:
    core = opened()
    (sent,) = arrive(core, segment(1, [(9, 8, 4), (10, 9, 5)]))
    assert isinstance(sent, SendSegment)
    assert (sent.segment.row_count, sent.rows, sent.payload) == (0, (), None)
    assert sent.segment.segment == 1
    (verified,) = arrive(opened(is_last=True), segment(1, [(9, 8, 4)]))
    assert isinstance(verified, SendVerified)
    assert (verified.verified.segment, verified.verified.parts) == (1, ())


def test_a_commit_trims_dead_rows_also_where_the_layers_were_done_already() -> None:
    core = opened()
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 2, 3), (5, 3, 4), (6, 4, 4)])))
    commands = tell(core, commit(3))
    assert commands == [ClearSlots(request=1, slots=(4, 6)), Trim(job=job.job, rows=(1, 3))]
    (sent,) = finish(core, job, rows=(0, 2))
    assert isinstance(sent, SendSegment)
    assert (sent.segment.parts[0].ids, sent.rows) == ((3, 5), (0, 1))
    core = opened()
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 2, 3), (5, 3, 4)])))
    tell(core, commit(4))
    (sent,) = finish(core, job)  # all rows came back: the executor did not get to it
    assert isinstance(sent, SendSegment)
    assert (sent.segment.parts[0].ids, sent.rows) == ((4,), (1,))


def test_how_long_a_segment_has_been_running_counts_from_its_last_layer() -> None:
    core = opened()
    job = run_of(
        core.handle(SegmentArrived(segment=segment(1, [(3, 2, 3)]), payload=None, received_s=10.0), 10.0)
    )
    assert core.running_s(14.0) == 4.0
    assert core.handle(LayerEnded(job=job.job, at_s=13.0), 14.0) == []
    assert core.running_s(14.0) == 1.0
    core.handle(LayerEnded(job=job.job - 1, at_s=13.9), 14.0)
    assert core.running_s(14.0) == 1.0, "another job's layers say nothing of this one's"
    finish(core, job)
    assert core.running_s(20.0) == 0.0
    assert core.fired["further"] == 1


def test_dead_rows_never_run_whether_their_commit_or_they_come_first() -> None:
    core = opened()
    first = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 2, 3)])))
    assert arrive(core, segment(2, [(5, 3, 4), (6, 4, 4)])) == []
    tell(core, commit(3))
    second = run_of(finish(core, first))
    assert second.parts[0].tokens.tolist() == [50]
    assert second.rows == (0,)
    core = opened()
    assert tell(core, commit(3)) == []
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 2, 3), (5, 3, 4)])))
    assert job.parts[0].tokens.tolist() == [30, 50], "node 4 is a dead sibling of the committed node 3"
    assert job.parts[0].sampled.tolist() == [True, True]


def test_commits_are_cumulative_and_repeats_change_nothing() -> None:
    core = opened()
    finish(core, run_of(arrive(core, segment(1, [(3, 2, 3), (4, 3, 4), (5, 4, 5), (6, 3, 4)]))))
    assert tell(core, commit(3, 4)) == [ClearSlots(request=1, slots=(6,))]
    assert tell(core, commit(3)) == []
    assert tell(core, commit(3, 4)) == []
    job = run_of(arrive(core, segment(2, [(7, 5, 6)], newest=commit(4, base=4))))
    assert job.parts[0].visible.tolist() == [[True, True, True, True, True, True, True]], (
        "slot 6 was freed and is taken again"
    )


def test_a_new_epoch_keeps_the_prefix_and_voids_what_runs() -> None:
    core = opened(is_last=True)
    finish(core, run_of(arrive(core, segment(1, [(3, 2, 3), (4, 3, 4)]))), drawn=(40, 50))
    tell(core, commit(3))
    cleared = tell(core, opening(epoch=1, keep=2, length=4, root=11))
    assert [sorted(command.slots) for command in cleared if isinstance(command, ClearSlots)] == [[4], [2, 3]]
    (stale,) = arrive(core, segment(2, [(5, 4, 5)], newest=commit(3)))
    assert isinstance(stale, SendVerified)
    assert stale.verified.parts == (), "a segment of the older epoch is empty here"
    job = run_of(
        arrive(core, segment(3, [(10, 1, 2), (11, 10, 3)], newest=commit(base=4, epoch=1), prompt=True))
    )
    assert job.parts[0].visible.tolist() == [[True, True, True, False], [True, True, True, True]]
    assert job.parts[0].sampled.tolist() == [False, True]
    core = opened(is_last=True)
    job = run_of(arrive(core, segment(1, [(3, 2, 3)])))
    tell(core, opening(epoch=1, keep=1, length=2, root=9))
    (sent,) = finish(core, job)
    assert isinstance(sent, SendVerified)
    assert sent.verified.parts == ()


def test_a_segment_brings_the_open_or_release_that_control_has_not() -> None:
    core = opened()
    newer = opening(epoch=1, keep=3, length=5, root=21)
    rows = [(20, 2, 3), (21, 20, 4)]
    job = run_of(arrive(core, segment(1, rows, newest=commit(base=5, epoch=1), prompt=True, opens=newer)))
    assert job.parts[0].positions.tolist() == [3, 4]
    assert tell(core, newer) == []
    core = opened()
    (other,) = arrive(core, structs.replace(segment(1, []), releases=(Release(request=1),)))[:1]
    assert other == CloseCache(request=1)
    assert core.requests() == []


def test_a_late_open_opens_nothing_and_a_late_release_closes_nothing() -> None:
    """On the control connection it comes late; the segment that makes use of the room was faster."""
    core = opened()
    arrive(core, structs.replace(segment(1, []), releases=(Release(request=1, epoch=3),)))
    for epoch in (2, 3):
        assert tell(core, opening(epoch=epoch, keep=2)) == []
    tell(core, Release(request=1, epoch=1))
    assert tell(core, opening(epoch=3, keep=2)) == [], "an older Release changes nothing"
    assert tell(core, opening(epoch=4)) == [OpenCache(request=1, slots=64)]
    core = opened()
    tell(core, opening(epoch=2))
    assert tell(core, Release(request=1, epoch=1)) == []
    assert tell(core, Release(request=1, epoch=2)) == [CloseCache(request=1)]


def test_what_no_correct_head_sends_is_refused() -> None:
    core = opened()
    finish(core, run_of(arrive(core, segment(1, [(3, 2, 3)]))))
    with pytest.raises(PeerError, match="twice"):
        arrive(core, segment(2, [(3, 2, 3)]))
    with pytest.raises(PeerError, match="reserved"):
        arrive(opened(), segment(1, [(10 + i, 2, 3) for i in range(62)]))
    with pytest.raises(PeerError, match="nothing of it is held"):
        tell(StageCore(is_last=True, slots_max=64), opening(keep=1))
    with pytest.raises(PeerError, match="as assigned"):
        tell(StageCore(is_last=True, slots_max=64), opening(slots=65))
    with pytest.raises(PeerError, match="slots"):
        tell(opened(), opening(epoch=1, slots=99))


def test_the_last_stage_drops_what_its_own_draws_show_to_be_wrong() -> None:
    core = opened(is_last=True)
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 2, 3), (5, 3, 4), (6, 3, 4), (7, 4, 4)])))
    assert job.parts[0].tokens.tolist() == [30, 50, 60], (
        "the prompt drew 30, so node 4 and what hangs below it never run"
    )
    cleared, sent = finish(core, job, drawn=(60, 1, 80))
    assert cleared == ClearSlots(request=1, slots=(4,))
    assert isinstance(sent, SendVerified)
    assert [(part.ids, part.next_tokens) for part in sent.verified.parts] == [((3, 6), (60, 80))]
    (hop,) = sent.verified.hops
    assert (hop.rows, hop.dead_in_queue, hop.dead_between_layers, hop.dead_late) == (3, 2, 0, 1)
    job = run_of(arrive(core, segment(2, [(8, 6, 5), (9, 5, 5), (10, 6, 5)])))
    assert job.parts[0].tokens.tolist() == [80], "only what the path goes on with"


def test_a_hop_counts_where_dead_rows_left() -> None:
    core = opened()
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 2, 3), (5, 2, 3), (9, 8, 4)])))
    tell(core, commit(3))
    (sent,) = finish(core, job, rows=(0, 1))
    assert isinstance(sent, SendSegment)
    (hop,) = sent.segment.hops
    assert (hop.rows, hop.dead_in_queue, hop.dead_between_layers, hop.dead_late) == (3, 1, 1, 1)


# ----------------------------------------------------------------------------------------------- features


def captured(*rows: int) -> tuple[str, ...]:
    return tuple(f"row {row}" for row in rows)


def sent_features(commands: list[StageCommand]) -> list[tuple[int, tuple[int, ...], tuple[object, ...]]]:
    """Epoch, nodes and rows of what goes to the head."""
    found = [command for command in commands if isinstance(command, SendFeatures)]
    return [(each.features.epoch, each.features.ids, each.rows) for each in found]


def test_what_was_captured_of_committed_rows_leaves_with_the_job_that_ran_them() -> None:
    core = StageCore(is_last=False, slots_max=64)
    job = run_of(arrive(core, segment(0, [(0, -1, 0), (1, 0, 1), (2, 1, 2)], prompt=True, opens=opening())))
    commands = finish(core, job, captured=captured(0, 1, 2))
    assert sent_features(commands) == [(0, (0, 1, 2), ("row 0", "row 1", "row 2"))]
    assert isinstance(commands[-1], SendSegment)
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 3, 4)])))
    tell(core, commit(3))
    assert sent_features(finish(core, job, captured=captured(3, 4))) == [(0, (3,), ("row 3",))]
    core.validate()


def test_what_was_captured_of_a_guess_waits_for_its_commit_and_no_longer_than_its_epoch() -> None:
    core = opened()
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 2, 3), (5, 4, 4), (6, 5, 5)])))
    assert sent_features(finish(core, job, captured=captured(3, 4, 5, 6))) == []
    late = tell(core, commit(4, 5))
    assert sent_features(late) == [(0, (4, 5), ("row 4", "row 5"))], "what is dead took its own along"
    assert sent_features(tell(core, commit(4, 5))) == [], "once is enough"
    assert sent_features(tell(core, commit(4, 5, 6))) == [(0, (6,), ("row 6",))]
    core.validate()
    core = opened()
    job = run_of(arrive(core, segment(1, [(3, 2, 3)])))
    finish(core, job, captured=captured(3))
    tell(core, opening(epoch=1, keep=2, root=7))
    assert sent_features(tell(core, commit(3, epoch=1))) == []
    job = run_of(arrive(core, segment(2, [(3, 2, 2)], newest=commit(3, epoch=1))))
    tell(core, Release(request=1))
    assert sent_features(finish(core, job, captured=captured(3))) == [], "the conversation is over"


def test_the_last_stage_sends_what_it_captured_of_what_it_reports_before_the_report() -> None:
    core = StageCore(is_last=True, slots_max=64)
    job = run_of(arrive(core, segment(0, [(0, -1, 0), (1, 0, 1), (2, 1, 2)], prompt=True, opens=opening())))
    first, sent = finish(core, job, drawn=(-1, -1, 30), captured=captured(0, 1, 2))
    assert sent_features([first]) == [(0, (0, 1, 2), ("row 0", "row 1", "row 2"))]
    assert isinstance(sent, SendVerified)
    assert [(part.ids, part.next_tokens) for part in sent.verified.parts] == [((2,), (30,))]
    job = run_of(arrive(core, segment(1, [(3, 2, 3), (4, 3, 4), (5, 3, 4)])))
    commands = finish(core, job, drawn=(50, 7, 8), captured=captured(3, 4, 5))
    assert sent_features(commands) == [(0, (3, 5), ("row 3", "row 5"))], "node 4 holds another token"
    assert sent_features(tell(core, commit(3, 5))) == []


def test_no_message_of_features_is_longer_than_messages_may_be() -> None:
    """A head that is not honest names a long path of guesses at once."""
    count = limits.FEATURES_ROWS_MAX + 10
    core = StageCore(is_last=False, slots_max=count + 100)
    first = [(node, node - 1, node) for node in range(3)]
    arrived = arrive(core, segment(0, first, prompt=True, opens=opening(slots=count + 100)))
    finish(core, run_of(arrived), captured=captured(0, 1, 2))
    rows = [(node, node - 1, node) for node in range(3, count + 3)]
    for number in range(2):
        part = rows[number * 70 : (number + 1) * 70]
        finish(
            core,
            run_of(arrive(core, segment(number + 1, part))),
            captured=captured(*(row[0] for row in part)),
        )
    found = sent_features(tell(core, commit(*(row[0] for row in rows))))
    assert [len(ids) for _, ids, _ in found] == [limits.FEATURES_ROWS_MAX, 10]


def test_payloads_that_wait_are_bounded_in_bytes() -> None:
    core = opened()
    half = limits.QUEUED_BYTES_MAX // 2
    rows = [(3, 2, 3)]

    def give(number: int, size: int) -> list[StageCommand]:
        return core.handle(
            SegmentArrived(segment=segment(number, rows), payload=None, received_s=0.0, payload_bytes=size),
            0.0,
        )

    job = run_of(give(1, half))
    give(2, half)
    give(3, half)
    with pytest.raises(PeerError, match=f"at most {limits.QUEUED_BYTES_MAX} bytes in the queue"):
        give(4, 1)
    core = opened()
    job = run_of(give(1, half))
    for number in range(2, 9):
        finish(core, job)
        rows = [(number + 2, 2, 3)]
        job = run_of(give(number, half))
    assert core.queued == 0, "what has run does not count"


# ------------------------------------------------------------------------------------------------------ slots


def test_a_map_grows_as_far_as_it_was_reserved_and_what_is_reserved_takes_no_memory() -> None:
    slots = SlotMap(1000)
    assert [slots.allocate(place, committed=place % 2 == 0) for place in range(1000)] == list(range(1000))
    assert slots.position.tolist() == list(range(1000))
    assert slots.committed.tolist() == [True, False] * 500
    with pytest.raises(PeerError, match="at most 1000 nodes"):
        slots.allocate(0, committed=True)
    # 256 Opens of the longest context took 180 MiB beside the budget for caches.
    tracemalloc.start()
    maps = [SlotMap(1 << 20) for _ in range(256)]
    for slots in maps:
        slots.allocate(0, committed=True)
    taken_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken_bytes < 1 << 20
    assert {slots.high for slots in maps} == {1}
    slots = SlotMap(2)
    slot = slots.allocate(0, committed=True)
    slots.free([slot])
    with pytest.raises(AssertionError, match="free already"):
        slots.free([slot])


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.booleans(), st.integers(0, 99)), max_size=60),
)
def test_any_order_of_taking_and_freeing_keeps_the_map_dense(
    capacity: int, steps: list[tuple[bool, int, bool, int]]
) -> None:
    slots, held = SlotMap(capacity), {}
    for take, position, committed, pick in steps:
        if take and len(held) == capacity:
            with pytest.raises(PeerError, match=f"at most {capacity} nodes"):
                slots.allocate(position, committed=committed)
        elif take:
            slot = slots.allocate(position, committed=committed)
            assert slot == min(set(range(capacity)) - set(held))
            held[slot] = (position, committed)
        elif held:
            slot = sorted(held)[pick % len(held)]
            slots.free([slot])
            del held[slot]
        assert slots.high == max(held, default=-1) + 1
        assert slots.position.tolist() == [held.get(s, (-1, False))[0] for s in range(len(slots.position))]
        assert slots.committed.tolist() == [held.get(s, (-1, False))[1] for s in range(len(slots.position))]
        assert slots.from_position(position) == [s for s in sorted(held) if held[s][0] >= position]


@given(st.data())
def test_the_mask_equals_its_definition(data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=12))
    slots = SlotMap(16)
    for position, committed in nodes:
        slots.allocate(position, committed=committed)
    freed = data.draw(st.sets(st.sampled_from(range(len(nodes))), max_size=len(nodes) - 1))
    slots.free(sorted(freed))
    own = st.sampled_from(sorted(set(range(len(nodes))) - freed))
    branches = data.draw(st.lists(st.lists(own, min_size=1, max_size=3), min_size=1, max_size=5))
    positions = [nodes[branch[0]][0] for branch in branches]
    expected = [
        [
            s in branch or (s not in freed and nodes[s][1] and nodes[s][0] < position)
            for s in range(slots.high)
        ]
        for position, branch in zip(positions, branches, strict=True)
    ]
    mask = slots.visible(positions, branches)
    assert mask.dtype == np.bool_
    assert mask.tolist() == expected


def copying(*, epoch: int = 0, keep: int = 2, length: int = 4, root: int = 3) -> Open:
    """Request 2 begins with what request 1 begins with."""
    return opening(request=2, epoch=epoch, keep=keep, length=length, root=root, source=1)


def guessed() -> StageCore:
    """One that has run a prompt of three nodes, a guess that became part of the output, and one that did
    not."""
    core = opened()
    finish(core, run_of(arrive(core, segment(1, [(3, 2, 3), (4, 2, 3)]))))
    arrive(core, segment(2, [], newest=commit(4)))
    return core


def test_an_open_that_a_release_has_overtaken_copies_nothing() -> None:
    core = guessed()
    tell(core, Release(request=2))
    tell(core, Release(request=1))
    assert tell(core, copying()) == [], "its source is gone, too"


def test_what_no_correct_head_copies_is_refused() -> None:
    core = guessed()
    unknown = opening(request=2, keep=2, length=4, root=3, source=7)
    with pytest.raises(PeerError, match="keeps 2 tokens of request 7, but nothing of that is held here"):
        tell(core, unknown)
    with pytest.raises(PeerError, match="keeps 5 tokens of 1, of which 4 have run"):
        tell(core, copying(keep=5, length=6, root=5))
    large = opening(request=2, keep=2, length=4, root=3, source=1, slots=65)
    with pytest.raises(PeerError, match="at most 64 slots"):
        tell(core, large)


@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("prompt", [True, False])
def test_a_row_stands_behind_its_parent(position: int, prompt: bool) -> None:
    with pytest.raises(PeerError, match=f"node 3 of request 1 at position {position}, which does not follow"):
        arrive(opened(), segment(1, [(3, 2, position)], prompt=prompt))
