"""A pipeline in one process for tests: the real cores, in a fixed or shuffled order of events, over any layer
runner."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flowspec.core.head.events import (
    Draft,
    Drafted,
    Emit,
    FeaturesArrived,
    Finished,
    HeadEvent,
    SegmentTimed,
    SendToDrafter,
    SendToFirstStage,
    SendToStages,
    SetTimer,
    Submit,
    TakeFeatures,
    TimerFired,
    VerifiedArrived,
)
from flowspec.core.head.head import HeadCore
from flowspec.core.protocol.messages import Release, Sampling
from flowspec.core.stage.events import (
    ClearSlots,
    CloseCache,
    ControlArrived,
    LayersDone,
    OpenCache,
    RunLayers,
    SegmentArrived,
    SendFeatures,
    SendSegment,
    SendVerified,
    StageEvent,
    Trim,
)
from flowspec.core.stage.stage import StageCore
from flowspec.draft.base import CopiesFeatures, Drafter
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.world import World

Runner = Callable[[int, RunLayers, Any], tuple[Any, ...]]
"""(stage, job, payload of the job's rows) -> (surviving rows, payload, next tokens), as `Slice.run` gives
them, and what it gives beside."""
EVENTS_MAX = 200_000
SLOTS_MAX = 1 << 16
STEP_S = 0.001
"""What the clock moves with every event."""


@dataclass
class Pipeline:
    """Links are queues; with a `random.Random` control and data interleave in any legal order.

    What drafters want of rows comes from the last stage, whose payload it is. The clock moves with every
    event, and a timer fires when its instant has come or nothing else is on its way.
    """

    head: HeadCore
    run_layers: Runner
    stage_count: int
    on_cache: Callable[[int, OpenCache | ClearSlots | CloseCache], None] = lambda stage, command: None
    rng: random.Random | None = None
    drafters: Sequence[Drafter] = ()
    now_s: float = 0.0
    answers: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Finished] = field(default_factory=dict)
    trims: list[Trim] = field(default_factory=list)
    hops: list[SegmentTimed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stages = [
            StageCore(
                is_last=index == self.stage_count - 1,
                slots_max=SLOTS_MAX,
                sliding_window=self.head.sliding_window,
            )
            for index in range(self.stage_count)
        ]
        self._has_features = any(drafter.captures for drafter in self.drafters)
        if self._has_features:
            self.head.features.begin((self.stage_count - 1,))
        self._links: dict[tuple[str, int], deque[HeadEvent | StageEvent]] = {}
        self._timer_s: float | None = None

    def give(self, event: HeadEvent) -> None:
        self._to_head(event)

    def settle(self) -> None:
        """Delivers everything that is on its way, until nothing moves."""
        for _ in range(EVENTS_MAX):
            waiting = [key for key, link in self._links.items() if link]
            if self._timer_s is not None and (not waiting or self._timer_s <= self.now_s):
                self.now_s, self._timer_s = max(self.now_s, self._timer_s), None
                self._to_head(TimerFired())
                continue
            if not waiting:
                return
            self.step(self.rng.choice(waiting) if self.rng is not None else waiting[0])
        raise AssertionError("the pipeline does not come to rest")

    def step(self, key: tuple[str, int]) -> None:
        event = self._links[key].popleft()
        self.now_s += STEP_S
        if key[0] in ("head", "features"):
            self._to_head(event)  # type: ignore[arg-type]
        else:
            self._to_stage(key[1], event)  # type: ignore[arg-type]

    def _trim(self, index: int, trim: Trim) -> None:
        """The executor's choice: rows of the running job that are trimmed may leave it, or be too late to."""
        self.trims.append(trim)
        (done,) = self._links["compute", index]
        assert isinstance(done, LayersDone)
        assert done.job == trim.job
        if self.rng is not None and self.rng.random() < 0.5:
            kept = [place for place, row in enumerate(done.rows) if row not in trim.rows]
            rows = tuple(done.rows[place] for place in kept)
            tokens = tuple(done.next_tokens[place] for place in kept) if done.next_tokens else ()
            self._links["compute", index][0] = replace(
                done,
                rows=rows,
                payload=None if done.payload is None else done.payload[kept],
                next_tokens=tokens,
                captured=tuple(done.captured[place] for place in kept) if done.captured else (),
            )

    def _put(self, kind: str, index: int, event: HeadEvent | StageEvent) -> None:
        self._links.setdefault((kind, index), deque()).append(event)

    def _to_head(self, event: HeadEvent) -> None:
        for command in self.head.handle(event, self.now_s):
            if isinstance(command, SendToStages):
                for index in range(self.stage_count):
                    self._put("control", index, ControlArrived(message=command.message))
            elif isinstance(command, SendToFirstStage):
                self._put(
                    "data", 0, SegmentArrived(segment=command.segment, payload=None, received_s=self.now_s)
                )
            elif isinstance(command, Emit):
                self.answers.setdefault(command.request, []).extend(command.tokens)
            elif isinstance(command, Finished):
                self.ends[command.request] = command
            elif isinstance(command, SegmentTimed):
                self.hops.append(command)
            elif isinstance(command, SetTimer):
                self._timer_s = command.at_s
            else:
                drafter = self.drafters[command.drafter]
                message = command.message if isinstance(command, SendToDrafter) else None
                if isinstance(message, Release):
                    drafter.release(message)
                elif isinstance(message, TakeFeatures):
                    own = np.stack([row for (row,) in message.rows])
                    drafter.take_features(message.request, message.epoch, message.nodes, own)
                elif message is not None:
                    assert isinstance(drafter, CopiesFeatures), "its traits say that it copies none"
                    drafter.copy_features(message)
                else:
                    assert isinstance(command, Draft)
                    proposals = drafter.draft(command.segment, command.width)
                    ended_s = self.now_s + STEP_S
                    done = Drafted(
                        drafter=command.drafter,
                        job=command.job,
                        proposals=proposals,
                        started_s=self.now_s,
                        ended_s=ended_s,
                    )
                    self._put("head", 1, done)

    def _to_stage(self, index: int, event: StageEvent) -> None:
        for command in self.stages[index].handle(event, self.now_s):
            if isinstance(command, RunLayers):
                payload = None if command.payload is None else command.payload[list(command.rows)]
                rows, hidden, tokens, *_ = self.run_layers(index, command, payload)
                is_last = index == self.stage_count - 1
                done = LayersDone(
                    job=command.job,
                    rows=rows,
                    payload=None if is_last else hidden,
                    next_tokens=tokens,
                    started_s=self.now_s,
                    ended_s=self.now_s + STEP_S,
                    captured=tuple(hidden) if is_last and self._has_features else (),
                )
                self._put("compute", index, done)
            elif isinstance(command, SendSegment):
                payload = command.payload[list(command.rows)] if command.rows else None
                self._put(
                    "data",
                    index + 1,
                    SegmentArrived(segment=command.segment, payload=payload, received_s=self.now_s),
                )
            elif isinstance(command, SendVerified):
                self._put("head", 0, VerifiedArrived(verified=command.verified))
            elif isinstance(command, SendFeatures):
                event = FeaturesArrived(stage=index, features=command.features, rows=command.rows)
                self._put("features", index, event)
            elif isinstance(command, Trim):
                self._trim(index, command)
            else:
                self.on_cache(index, command)


def ask(request: int, prompt: Sequence[int], count: int, **extra: object) -> Submit:
    fields: dict[str, Any] = {"sampling": Sampling(), "stop_ids": frozenset(), **extra}
    return Submit(request=request, prompt=tuple(prompt), new_tokens_max=count, **fields)


@dataclass(frozen=True)
class StopAfter:
    """A stop rule that ends the answer at its n-th token."""

    count: int

    def stops_at(self, tokens: Sequence[int]) -> bool:
        return len(tokens) == self.count


def validate_at_rest(world: World) -> None:
    """Nothing moves any more: all is back and answered, and every stage holds what the head believes;
    raises `AssertionError`."""
    assert not world._checker.answering, f"requests {sorted(world._checker.answering)} never ended"
    assert world.head.in_flight == 0, f"{world.head.in_flight} segments never came back"
    assert not world.drafting, "a drafter never answered"
    holding = world.head.admission.holding
    known = {
        request.number: request for request in world.head.requests() if any(holding(request.number).stages)
    }
    for index, stage in enumerate(world.stages):
        assert world.devices[index].is_idle, f"stage {index} still computes"
        assert stage.queued == 0, f"{stage.queued} segments wait at stage {index}"
        stage.validate()
        assert sorted(stage.requests()) == sorted(known), f"stage {index} holds other requests than the head"
        world.layers.validate(index, stage)
        for number, request in known.items():
            kept = request.tree.committed_tokens()[: min(request.computed, request.known_length)]
            found = world.layers.committed_tokens(index, number, stage.slot_maps()[number])
            assert [found.get(at) for at in range(len(kept))] == kept, (
                f"stage {index} does not hold what request {number} would keep"
            )
    lost = {number for board in world.boards for number in board.lost}
    for number, drafter in enumerate(world.drafters):
        if isinstance(drafter, FakeDrafter) and number not in lost:
            assert set(drafter.requests()) <= set(known), "the drafter holds requests that are forgotten"
