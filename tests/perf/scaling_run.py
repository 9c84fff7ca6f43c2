"""One run for `tests.perf.scaling`: some users at once on equal boards in virtual time, every answer compared
with the plain one.

Owns the testbed, the drafter for several requests, and the figures of a run. Knows no grid and no table.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

from flowspec.bench.config import AR, SYNTHETIC, Setup, Testbed
from flowspec.bench.drafter_for_each import DrafterForEach
from flowspec.bench.plain import PlainCase
from flowspec.bench.recording import is_plain
from flowspec.bench.simulated import run_many
from flowspec.bench.synthetic import PROMPT_TOKENS, Synthetic, synthetic_cases
from flowspec.bench.trace import Slots, Trace, slots_of
from flowspec.core.head.head import Experience
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.errors import FlowSpecError
from flowspec.plan.memory import SliceMemory, cache_bytes
from flowspec.plan.profile import find_profile
from flowspec.plan.shape import find_shape
from flowspec.plan.timing import LinkSpec
from flowspec.sim.record import HEAD
from flowspec.sim.world import Handled, World

MANY_TOKENS_MIN, MANY_STAGE_TOKENS = 24, 512
"""Several users' answers have at most so many tokens times stages, for these are what simulating costs; users
average among themselves."""
WARM_UP_TOKENS = 16
CONTEXT_HELD = 4096
"""Tokens of each user's conversation that memory is counted for."""


class WrongAnswer(FlowSpecError):
    """An answer is not the plain one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run. All figures are simulated but the last three, which are this machine's: wall-clock and
    processor time.

    `tokens_per_s` is of all users together, over the middle half of their tokens (of one user: from the first
    token to the last), `user_tokens_per_s` the mean of the users' own rates. `bound_tokens_per_s` is what one
    user's `S` and `rho` allow (`docs/methods.md`). `S` and `rho` are those of tokens after an answer's first.
    `first_token_s` is the longest wait. `stage_busy` and `link_busy` are of the busiest stage and link.
    """

    method: str
    devices: int
    users: int
    memory_gb: float
    fits: bool
    tokens: int
    tokens_per_s: float
    user_tokens_per_s: float
    first_token_s: float
    S: float
    rho: float
    window: float
    tau_s: float
    trip_s: float
    bound_tokens_per_s: float | None
    stage_busy: float
    link_busy: float
    drafter_busy: float
    head_busy: float
    events: int
    events_per_token: float
    event_us: float
    event_cpu_us: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What is asked: a testbed of any number of equal devices, and how sure of itself and right the drafter
    is."""

    shape: str
    device: str
    precision: str
    link: LinkSpec
    acceptance: float
    tokens: int

    def testbed(self, devices: int) -> Testbed:
        """Raises `InputError` for names that are not known."""
        board = find_profile(self.device)
        return Testbed(
            name=f"{devices} x {self.device}",
            devices=(board,) * devices,
            head=board,
            link=self.link,
            shape=find_shape(self.shape),
            drafter_shape=find_shape(f"eagle-{self.shape}"),
            precision=self.precision,
        )

    def tokens_of(self, devices: int, users: int) -> int:
        return (
            self.tokens
            if users == 1
            else min(self.tokens, max(MANY_TOKENS_MIN, MANY_STAGE_TOKENS // devices))
        )

    def run(self, testbed: Testbed, setup: Setup, users: int, experience: Experience | None = None) -> Point:
        """All users' answers in one world; raises `WrongAnswer`."""
        cases = synthetic_cases(users, [Sampling()], self.tokens_of(len(testbed.devices), users))
        trace = _HeadTrace()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        world = self._answer(testbed, setup, cases, deepcopy(experience), trace)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        return _point(testbed, setup, world, cases, trace, wall_s, cpu_s)

    def warm_up(self, testbed: Testbed, setup: Setup, users: int) -> Experience | None:
        """What a head knows after a short answer to somebody else than the first `users`; nothing where it
        does not draft."""
        if setup.method == AR:
            return None
        world = self._answer(
            testbed, setup, synthetic_cases(users + 1, [Sampling()], WARM_UP_TOKENS)[-1:], None, None
        )
        return world.head.experience()

    def _answer(
        self,
        testbed: Testbed,
        setup: Setup,
        cases: Sequence[PlainCase],
        experience: Experience | None,
        trace: _HeadTrace | None,
    ) -> World:
        context = PROMPT_TOKENS + cases[0].new_tokens_max
        drafters = {}
        if setup.method != AR:
            drafting = Synthetic(self.acceptance, context)
            drafters[SYNTHETIC] = DrafterForEach(
                [made for case in cases if (made := drafting.begin(case)()) is not None]
            )
        world = run_many(testbed, setup, cases, drafters, context, experience, trace)
        for request, case in enumerate(cases):
            (answer,) = world.answers[request]
            if answer.end is None or not is_plain(case, tuple(answer.tokens), answer.end.reason):
                raise WrongAnswer(
                    f"{setup.name} on {testbed.name}, user {request + 1} of {len(cases)}: the answer is not "
                    "the plain one"
                )
        return world


class _HeadTrace:
    """A trace, and how many events the head took."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.events = 0

    def __call__(self, handled: Handled) -> None:
        if handled.place == HEAD:
            self.events += 1
            self.trace.watch(handled.event, handled.commands, handled.now_s)  # type: ignore[arg-type]


def memory_of(testbed: Testbed, users: int) -> SliceMemory:
    """The largest of the stages' slices: the first holds the embedding, the last `lm_head`."""
    shape, size = testbed.shape, PRECISION_BYTES[testbed.precision]
    layers = testbed.layers
    weights = [count * shape.layer_params for count in layers]
    weights[0] += shape.head_params
    weights[-1] += shape.head_params
    held = users * cache_bytes(
        shape.held(0, max(layers)),
        context=CONTEXT_HELD,
        held="float16",
    )
    return SliceMemory(weight_bytes=int(max(weights) * size), cache_bytes=held)


def _bound_tokens_per_s(slots: Slots, S: float, rho: float) -> float:
    missed = 1 - rho
    return 1 / (missed * slots.trip_s + max(0.0, 1 / max(S, 1e-9) - missed) * slots.tau_s)


def _point(
    testbed: Testbed,
    setup: Setup,
    world: World,
    cases: Sequence[PlainCase],
    head: _HeadTrace,
    wall_s: float,
    cpu_s: float,
) -> Point:
    answers = [world.answers[request][0] for request in range(len(cases))]
    found = [answer.end.statistics for answer in answers if answer.end is not None]
    times_s = sorted(at_s for answer in answers for at_s in answer.times_s)
    slots = slots_of(head.trace.since(times_s[0], times_s[-1]))
    tokens = len(times_s)
    later = max(1, tokens - len(found))
    S = later / max(1, sum(each.walks - 1 for each in found))
    rho = sum(each.tokens_in_flight for each in found) / later
    memory = memory_of(testbed, len(cases)).total_bytes
    return Point(
        method=setup.name,
        devices=len(testbed.devices),
        users=len(cases),
        memory_gb=memory / 1e9,
        fits=memory <= testbed.devices[0].memory_gb * 1e9,
        tokens=tokens,
        tokens_per_s=answers[0].tokens_per_s if len(cases) == 1 else _middle_rate(times_s),
        user_tokens_per_s=sum(answer.tokens_per_s for answer in answers) / len(answers),
        first_token_s=max(answer.first_token_s for answer in answers),
        S=S,
        rho=rho,
        window=sum(each.windows for each in found) / max(1, sum(each.segments for each in found)),
        tau_s=slots.tau_s if slots else 0.0,
        trip_s=slots.trip_s if slots else 0.0,
        bound_tokens_per_s=_bound_tokens_per_s(slots, S, rho) if slots and len(cases) == 1 else None,
        stage_busy=max(device.busy_s for device in world.devices) / times_s[-1],
        link_busy=max(link.busy_s for link in world.data) / times_s[-1],
        drafter_busy=sum(board.busy_s for board in world.boards) / times_s[-1],
        head_busy=head.events * testbed.head_s / times_s[-1],
        events=world.events,
        events_per_token=world.events / tokens,
        event_us=1e6 * wall_s / world.events,
        event_cpu_us=1e6 * cpu_s / world.events,
        wall_s=wall_s,
    )


def _middle_rate(times_s: Sequence[float]) -> float:
    """Over the middle half of some tokens, so that neither the prompts at the beginning nor the last users
    count."""
    start_s, end_s = times_s[len(times_s) // 4], times_s[3 * len(times_s) // 4]
    return sum(start_s < at_s <= end_s for at_s in times_s) / (end_s - start_s) if end_s > start_s else 0.0
