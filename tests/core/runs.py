"""A head and its stages in this process, over a made-up language, in a fixed order of events or in any legal
one; the head is validated after every event."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowspec.core.cluster.membership import MembershipTimeouts
from flowspec.core.head.events import HeadCommand, HeadEvent, SendToFirstStage
from flowspec.core.head.head import HeadCore
from flowspec.core.protocol.messages import Segment
from flowspec.core.stage.events import RunLayers
from flowspec.sim.fake_layers import FakeLayers
from flowspec.sim.language import HashLanguage
from flowspec.wire.codec import Tensor
from tests.pipeline import Pipeline, ask
from tests.plain import plain_answer

LANGUAGE = HashLanguage(60, seed=3)
CONTEXT = 600


class Run:
    """`sent` is what the head said."""

    def __init__(self, head: HeadCore | None = None, seed: int | None = None) -> None:
        self.head = head or HeadCore(context=CONTEXT, stage_count=3)
        layers = FakeLayers(self.head.stage_count, LANGUAGE)

        def run(stage: int, job: RunLayers, payload: Any) -> tuple[Any, ...]:
            rows = tuple(range(sum(len(part.slots) for part in job.parts)))
            sent = None if payload is None else Tensor(rows=len(rows), width=1, dtype="float32", data=payload)
            outgoing, tokens, _ = layers.run(stage, job, sent, rows)
            assert outgoing is not None
            return rows, np.frombuffer(outgoing.data, dtype="<i4")[:, None], tokens

        self.layers = layers
        rng = None if seed is None else random.Random(seed)
        self.pipeline = Pipeline(self.head, run, self.head.stage_count, layers.change_cache, rng=rng)
        self.sent: list[HeadCommand] = []
        handle = self.head.handle

        def handled(event: HeadEvent, now_s: float) -> list[HeadCommand]:
            found = handle(event, now_s)
            self.head.validate()
            self.sent += found
            return found

        self.head.handle = handled  # type: ignore[method-assign]

    @property
    def segments(self) -> list[Segment]:
        return [each.segment for each in self.sent if isinstance(each, SendToFirstStage)]

    def ask(self, request: int, prompt: Sequence[int], count: int = 5) -> None:
        self.pipeline.answers.pop(request, None)
        self.pipeline.give(ask(request, prompt, count))

    def settle(self) -> None:
        self.pipeline.settle()

    def step(self, count: int) -> None:
        """So many of the things that are under way happen, any of them next."""
        assert self.pipeline.rng is not None
        for _ in range(count):
            if waiting := [key for key, link in self.pipeline._links.items() if link]:
                self.pipeline.step(self.pipeline.rng.choice(waiting))

    def check(self, request: int, prompt: Sequence[int], count: int = 5) -> None:
        submit = ask(request, prompt, count)
        expected = plain_answer(
            LANGUAGE, submit.prompt, submit.sampling, new_tokens_max=count, context=self.head.context
        )
        assert self.pipeline.answers[request] == expected[0]


MEMBERSHIP_TIMEOUTS = MembershipTimeouts(
    silent_s=5.0,
    loading_silent_s=15.0,
    loading_s=60.0,
    stuck_s=30.0,
    probe_s=2.0,
    back_s=4.0,
    forgive_s=300.0,
)
