"""Virtual time: when frames arrive, how long jobs take, also of drafters, and that one seed is one run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from flowspec.core.head.events import Cancel, Draft, Drafted, Forget
from flowspec.core.protocol.cluster_messages import Ping
from flowspec.core.protocol.messages import Proposal, Release, Sampling, Segment
from flowspec.core.stage.events import ControlArrived, JobPart, LayersDone, RunLayers, Trim
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.clock import Clock
from flowspec.sim.device import DeviceSpec, SimulatedDevice
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.drafter_device import (
    ANSWER_BYTES,
    GUESS_BYTES,
    PROPOSAL_BYTES,
    DrafterDevice,
    DrafterDeviceSpec,
)
from flowspec.sim.language import HashLanguage
from flowspec.sim.link import SimulatedLink
from flowspec.sim.world import Cluster, Handled, World
from flowspec.wire.codec import Envelope, Tensor, encode
from tests.core.stages import segment
from tests.pipeline import ask
from tests.plain import plain_answer

LANGUAGE = HashLanguage(40, seed=5)
PROMPT = (3, 1, 4, 1, 5)


def test_what_is_due_at_one_instant_happens_in_the_order_of_asking() -> None:
    clock, seen = Clock(), []
    for name, time_s in (("c", 2.0), ("a", 1.0), ("d", 2.0), ("b", 1.0)):
        clock.at(time_s, lambda name=name: seen.append((clock.now_s, name)))  # type: ignore[misc]
    clock.at(1.5, lambda: seen.append((clock.now_s, "never"))).cancel()
    while clock.step():
        pass
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]


def arrivals(spec: LinkSpec, sends: Sequence[float], seed: int = 0) -> list[float]:
    clock = Clock()
    seen: list[float] = []

    def arrived(*_: object) -> None:
        seen.append(clock.now_s)

    link = SimulatedLink(clock, spec, "a", arrived, chance=random.Random(seed))
    for time_s in sends:
        clock.at(time_s, lambda: link.send(Ping()))
    while clock.step():
        pass
    return seen


def test_frames_leave_one_after_another_by_their_size_and_jitter_never_reorders() -> None:
    size = len(encode(Envelope(incarnation=1, sender="a", sequence=0, message=Ping()))[0])
    transfer_s = size * 8 / 1e3  # at a kilobit a second
    seen = arrivals(LinkSpec(delay_s=1.0, bandwidth_mbps=1e-3), [0.0, 0.0, 10.0])
    assert seen == pytest.approx([1 + transfer_s, 1 + 2 * transfer_s, 11 + transfer_s])
    sends = [0.01 * index for index in range(200)]
    seen = arrivals(LinkSpec(delay_s=0.5, jitter_s=0.2), sends)
    late = [at - sent for at, sent in zip(seen, sends, strict=True)]
    assert seen == sorted(seen)
    assert min(late) >= 0.5
    assert 0.6 < max(late) <= 0.7
    assert seen == arrivals(LinkSpec(delay_s=0.5, jitter_s=0.2), sends)
    assert seen != arrivals(LinkSpec(delay_s=0.5, jitter_s=0.2), sends, 1)


class Silent:
    """Layers that compute nothing."""

    def run(
        self, stage: int, job: RunLayers, payload: Tensor | None, rows: tuple[int, ...]
    ) -> tuple[None, tuple[()], tuple[()]]:
        return None, (), ()

    def change_cache(self, stage: int, command: object) -> None: ...


def job_of(count: int, asked: Sequence[int]) -> RunLayers:
    """Rows of which the next tokens of those `asked` for are drawn."""
    none = np.zeros(count, dtype=np.int64)
    part = JobPart(
        request=0,
        slots=none,
        tokens=none,
        positions=none,
        key_positions=np.zeros(0, dtype=np.int32),
        visible=np.zeros((count, 0), dtype=bool),
        sampled=np.isin(np.arange(count), asked),
        sampling=Sampling(),
    )
    return RunLayers(job=1, parts=(part,), payload=None, rows=tuple(range(count)))


def end_of(
    spec: DeviceSpec,
    rows: int,
    trims: Sequence[tuple[float, tuple[int, ...]]],
    *,
    is_last: bool = False,
    asked: Sequence[int] | None = None,
) -> tuple[float, tuple[int, ...]]:
    """When a job of so many rows ends, and which are left, if rows are trimmed at these instants."""
    clock, done = Clock(), []
    device = SimulatedDevice(clock, spec, 0, Silent(), is_last, done.append)
    device.run(job_of(rows, range(rows) if asked is None else asked))
    for time_s, dead in trims:
        clock.at(time_s, lambda dead=dead: device.trim(Trim(job=1, rows=dead)))  # type: ignore[misc]
    while clock.step():
        pass
    (ended,) = done
    assert isinstance(ended, LayersDone)
    assert ended.ended_s == clock.now_s == device.busy_s
    return ended.ended_s, ended.rows


FOUR = DeviceSpec(curve=Curve(base_s=4.0, row_s=1.0), layers=4)
"""A second a layer up to the knee of 4 rows; with 8 rows two seconds a layer."""


@pytest.mark.parametrize(
    ("trims", "end_s", "left"),
    [
        ([], 8.0, 8),
        ([(0.0, (4, 5, 6, 7))], 4.0, 4),
        ([(0.5, (4, 5, 6, 7))], 5.0, 4),
        ([(2.0, (4, 5, 6, 7))], 5.0, 4),
        ([(2.1, (4, 5, 6, 7))], 6.0, 4),
        ([(0.5, (4, 5)), (1.5, (6, 7))], 5.0, 4),
        ([(0.5, (4, 5)), (2.5, (6, 7))], 2 + 1.5 + 2 * 1.0, 4),
        ([(4.1, tuple(range(8)))], 6.0, 0),
        ([(6.5, (0, 1))], 8.0, 8),
    ],
)
def test_dead_rows_leave_at_the_next_layer_and_shorten_the_job(
    trims: list[tuple[float, tuple[int, ...]]], end_s: float, left: int
) -> None:
    ended_s, rows = end_of(FOUR, 8, trims)
    assert (ended_s, len(rows)) == (pytest.approx(end_s), left)
    assert rows == tuple(row for row in range(8) if left == 8 or all(row not in dead for _, dead in trims))


def test_sampling_comes_after_the_layers_of_the_last_stage_and_is_spared_too() -> None:
    spec = replace(FOUR, sampling=Curve(row_s=0.5))
    assert end_of(spec, 8, []) == (8.0, tuple(range(8))), "only the last stage samples"
    assert end_of(spec, 8, [], is_last=True)[0] == pytest.approx(12.0)
    assert end_of(spec, 8, [(7.5, (1, 2, 3, 4))], is_last=True) == (pytest.approx(10.0), (0, 5, 6, 7))
    assert end_of(spec, 8, [(8.5, (1, 2, 3, 4))], is_last=True) == (pytest.approx(12.0), tuple(range(8)))
    assert end_of(spec, 8, [(7.5, tuple(range(8)))], is_last=True) == (pytest.approx(8.0), ())
    assert end_of(spec, 8, [], is_last=True, asked=(7,))[0] == pytest.approx(8.5), "of a prompt one is drawn"
    assert end_of(spec, 8, [(7.5, (7,))], is_last=True, asked=(7,)) == (pytest.approx(8.0), tuple(range(7)))


def small(**fields: object) -> Cluster:
    spec = DeviceSpec(curve=Curve(base_s=0.05, row_s=0.005), layers=5)
    defaults: dict[str, object] = {
        "devices": (spec,) * 3,
        "control": LinkSpec(delay_s=0.001),
        "data": LinkSpec(delay_s=0.002),
    }
    return Cluster(**{**defaults, "context": 200, **fields})  # type: ignore[arg-type]


def test_a_token_takes_one_trip() -> None:
    cluster = small(row_bytes=1000, data=LinkSpec(delay_s=0.002, bandwidth_mbps=10.0), head_s=0.003)
    world = World(cluster, LANGUAGE)
    world.at(1.0, ask(1, PROMPT, 20))
    world.run()
    (answer,) = world.answers[1]
    assert answer.tokens == plain_answer(LANGUAGE, PROMPT, Sampling(), new_tokens_max=20, context=200)[0]
    assert answer.submitted_s == pytest.approx(1.003)
    gaps = np.diff(answer.times_s)
    wire_s = (1000 * 2 + 4 * 150) * 8 / 10e6  # two payloads, and four headers of about 150 bytes
    assert gaps == pytest.approx(np.full(19, 3 * 0.05 + 4 * 0.002 + 0.003 + wire_s), abs=4 * 100 * 8 / 10e6)
    assert world.devices[0].busy_s == pytest.approx(20 * 0.05)
    assert world.data[1].messages == 20
    assert world.data[1].bytes > 20 * 1000


def test_one_seed_is_one_run_and_another_is_not() -> None:
    def digest(seed: int) -> tuple[str, list[int]]:
        cluster = small(
            method="continuous",
            seed=seed,
            data=LinkSpec(delay_s=0.002, jitter_s=0.1),
            drafting=Curve(base_s=0.01),
        )
        world = World(cluster, LANGUAGE, [FakeDrafter(LANGUAGE, 0.8, seed=1)])
        for request in range(3):
            world.at(
                0.03 * request,
                ask(request, (*PROMPT, request), 12, sampling=Sampling(temperature=1.0, seed=request)),
            )
        world.at(0.5, Cancel(request=1))
        world.at(0.6, Forget(request=1))
        world.run()
        assert all(answer.end is not None for answers in world.answers.values() for answer in answers)
        return world.digest.hex(), world.answers[2][0].tokens

    (first, tokens), (again, _), (other, others) = digest(1), digest(1), digest(2)
    assert first == again
    assert first != other
    assert tokens == others, "another seed is another run with the same answers"


def test_control_overtakes_data_and_shortens_what_runs() -> None:
    """Commits that overtake the data shorten the jobs that run; late ones do not, and cost nothing but
    time."""

    def run(control_s: float) -> tuple[int, float]:
        trimmed = 0

        def look(handled: Handled) -> None:
            nonlocal trimmed
            if isinstance(handled.event, ControlArrived):
                trimmed += sum(len(command.rows) for command in handled.commands if isinstance(command, Trim))

        data = LinkSpec(delay_s=0.03)
        cluster = small(
            method="continuous", control=LinkSpec(delay_s=control_s), data=data, drafting=Curve(base_s=0.002)
        )
        world = World(cluster, LANGUAGE, [FakeDrafter(LANGUAGE, 0.5, seed=2)], look)
        world.at(0.0, ask(1, PROMPT, 60))
        world.run()
        assert (
            world.answers[1][0].tokens
            == plain_answer(LANGUAGE, PROMPT, Sampling(), new_tokens_max=60, context=200)[0]
        )
        return trimmed, sum(device.busy_s for device in world.devices)

    trimmed, busy_s = run(0.0005)
    trimmed_late, busy_late_s = run(5.0)
    assert trimmed > 0 == trimmed_late
    assert busy_s < busy_late_s


def drafts(
    *boards: DrafterDeviceSpec, drafting: Curve, count: int = 2
) -> tuple[World, list[tuple[float, Drafted]]]:
    """An answer with so many drafters, and the instants at which the head heard of their jobs."""
    seen: list[tuple[float, Drafted]] = []

    def look(handled: Handled) -> None:
        if isinstance(handled.event, Drafted):
            seen.append((handled.now_s, handled.event))

    cluster = small(method="continuous", drafting=drafting, boards=boards)
    world = World(cluster, LANGUAGE, [FakeDrafter(LANGUAGE, 0.7, seed=seed) for seed in range(count)], look)
    world.at(0.0, ask(1, PROMPT, 30))
    world.run()
    (answer,) = world.answers[1]
    assert answer.tokens == plain_answer(LANGUAGE, PROMPT, Sampling(), new_tokens_max=30, context=200)[0]
    return world, seen


def overlap(seen: Sequence[tuple[float, Drafted]]) -> bool:
    spans = sorted((each.started_s, each.ended_s) for _, each in seen)
    return any(later < end for (_, end), (later, _) in itertools.pairwise(spans))


def test_drafters_of_one_board_wait_for_each_other() -> None:
    job = Curve(base_s=0.03)
    _, apart = drafts(drafting=job)
    world, shared = drafts(DrafterDeviceSpec(drafters=(0, 1)), drafting=job)
    assert overlap(apart)
    assert not overlap(shared)
    assert {each.drafter for _, each in shared} == {0, 1}
    assert len(world.boards) == 1
    assert world.boards[0].busy_s == pytest.approx(0.03 * world.drafts)
    assert world.boards[0].bytes_sent == 0


def test_jobs_and_proposals_of_another_board_travel() -> None:
    link = LinkSpec(delay_s=0.01, bandwidth_mbps=1.0)
    near, far = DrafterDeviceSpec(drafters=(0,)), DrafterDeviceSpec(drafters=(1,), link=link)
    world, seen = drafts(near, far, drafting=Curve(base_s=0.004))
    assert all(now_s == each.ended_s for now_s, each in seen if each.drafter == 0)
    there = [(now_s, each) for now_s, each in seen if each.drafter == 1]
    for now_s, each in there:
        guesses = sum(len(proposal.tokens) for proposal in each.proposals)
        size = ANSWER_BYTES + PROPOSAL_BYTES * len(each.proposals) + GUESS_BYTES * guesses
        assert now_s == pytest.approx(each.ended_s + 0.01 + link.transfer_s(size))
    board = world.boards[1]
    assert board.out is not None
    assert board.back is not None
    assert board.out.messages == board.back.messages == len(there)
    assert board.out.bytes > 50 * len(there)
    assert world.bytes_sent == sum(
        line.bytes for line in (*world.control, *world.data, board.out, board.back)
    )


def test_a_plain_answer_stops_where_it_must() -> None:
    whole, reason = plain_answer(LANGUAGE, PROMPT, Sampling(), new_tokens_max=9, context=100)
    assert (len(whole), reason) == (9, "length")
    stop = whole[4]
    assert plain_answer(LANGUAGE, PROMPT, Sampling(), new_tokens_max=9, context=100, stop_ids=[stop]) == (
        whole[: whole.index(stop)],
        "stop",
    )
    assert plain_answer(LANGUAGE, PROMPT, Sampling(), new_tokens_max=9, context=8) == (whole[:3], "length")


# --------------------------------------------------------------------------------------------- drafters' jobs

PASS, RANKING = Curve(fixed_s=1.0, extra_row_s=0.1), Curve(fixed_s=0.01, extra_row_s=0.001)


class SilentDrafter:
    """Proposes nothing, and says as much of its last job as it is told to."""

    captures: tuple[int, ...] = ()
    context = 100
    weight_bytes = cache_slots = 0

    def __init__(self, said: dict[str, object]) -> None:
        vars(self).update(said)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        return ()

    def release(self, message: Release) -> None: ...

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: object) -> None: ...


class Bench:
    """A device with one drafter, and what it has done."""

    def __init__(self, said: dict[str, object] | None = None, link: LinkSpec | None = None) -> None:
        self.clock, self.done = Clock(), list[Drafted]()
        spec = DrafterDeviceSpec(drafters=(0,), link=link)
        chance, drafters = random.Random(1), [SilentDrafter(said or {})]
        self.device = DrafterDevice(
            self.clock, spec, drafters, [PASS], [RANKING], self.done.append, chance=chance
        )

    def give(self, job: int) -> None:
        """A job of three rows."""
        rows = segment(0, [(1, 0, 1), (2, 1, 2), (3, 2, 3)])
        self.device.give(Draft(job=job, segment=rows, width=4))

    def settle(self) -> None:
        while self.clock.step():
            pass


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ({}, 1.3),
        ({"pass_rows": [5, 2], "ranked_rows": 9}, 2.7),
        ({"pass_rows": [], "ranked_rows": 9}, 0.019),
        ({"pass_rows": [], "ranked_rows": 0}, 0.0),
    ],
)
def test_a_job_takes_its_passes_or_lm_head_alone_and_longer_while_the_device_is_slow(
    said: dict[str, object], seconds: float
) -> None:
    """A block that was guessed before is ranked again without a pass of the layers."""
    bench = Bench(said)
    for number, times in enumerate((1.0, 3.0, 1.0)):
        bench.device.slow(0, times)
        bench.give(number)
        bench.settle()
    took_s = [each.ended_s - each.started_s for each in bench.done]
    assert took_s == pytest.approx([seconds, 3 * seconds, seconds])


@pytest.mark.parametrize("link", [None, LinkSpec(bandwidth_mbps=100, delay_s=0.5)])
def test_what_it_was_at_when_it_was_lost_is_never_told_though_it_comes_back(link: LinkSpec | None) -> None:
    bench = Bench(link=link)
    bench.give(1)
    bench.clock.at(0.6, lambda: bench.device.lose(0))
    bench.clock.at(0.7, lambda: bench.device.bring_back(0))
    bench.clock.at(0.8, lambda: bench.give(2))
    bench.settle()
    assert [each.job for each in bench.done] == [2]
