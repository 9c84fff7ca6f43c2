"""A plan in virtual time: its devices, links and layers as a testbed, and synthetic answers on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowspec.core.messages import Sampling
from flowspec.errors import FlowSpecError
from flowspec.plan.partition import SHARED_SLOWDOWN, Partition
from flowspec.plan.planner import Plan
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.shape import eagle_shape
from flowspec.plan.sites import Site, Wish
from flowspec.testbed.config import Setup, Testbed
from flowspec.testbed.plain import Case
from flowspec.testbed.recording import is_plain
from flowspec.testbed.scaling_run import DrafterForEach
from flowspec.testbed.simulated import Learnt, run_many
from flowspec.testbed.synthetic import PROMPT_TOKENS, Synthetic, synthetic_cases

WARM_UP_TOKENS = 16
PLAIN_TOKENS = 24
"""Of an answer without guesses, whose tokens all take the same time."""


def testbed_of(wish: Wish, plan: Plan) -> Testbed:
    """The plan's devices; one that a stage shares with the drafter is slowed as the planner supposes."""
    arrangement = plan.split.arrangement
    shared = plan.guesses and not plan.is_head_free

    def profile(place: Site) -> DeviceProfile:
        return slowed(place.profile, SHARED_SLOWDOWN) if shared and place.name == arrangement.head.name else place.profile

    drafter = wish.drafter.shape if wish.drafter is not None else None
    return Testbed(
        name=wish.shape.name,
        devices=tuple(profile(place) for place in arrangement.order),
        head=profile(arrangement.head),
        link=wish.network.default,
        shape=wish.shape,
        drafter_shape=drafter or eagle_shape(wish.shape),
        precision=arrangement.precision,
        split=plan.split.layers,
        hops=tuple(Partition(wish).hops(arrangement)),
    )


def slowed(profile: DeviceProfile, factor: float) -> DeviceProfile:
    """A device that takes `factor` times as long for everything."""
    return replace(
        profile,
        memory_gb_per_s=profile.memory_gb_per_s / factor,
        tflops={name: value / factor for name, value in profile.tflops.items()},
        layer_us=profile.layer_us * factor,
        pass_us=profile.pass_us * factor,
    )


def simulated_rate(wish: Wish, plan: Plan, *, answers: int, tokens: int, first: int) -> float:
    """Tokens per second after the first token, of all users together, over so many answers from case `first` on.

    Like a session that has answered before: each answer begins with the costs that the one before it learnt.
    """
    testbed = testbed_of(wish, plan)
    setup = Setup(name="planned", method="ar")
    if plan.guesses:
        setup = Setup(name="planned", method="continuous", options={"segment_nodes": plan.tree_nodes})
    else:
        answers, tokens = 1, min(tokens, PLAIN_TOKENS)
    learnt, made, spent_s = None, 0, 0.0
    for number in range(-1 if plan.guesses else 0, answers):
        count = WARM_UP_TOKENS if number < 0 else tokens
        cases = synthetic_cases(wish.users, [Sampling()], count, first + (1 + number) * wish.users)
        world = run_many(testbed, setup, cases, _drafter(wish, plan, cases), PROMPT_TOKENS + count, learnt)
        learnt = Learnt(costs=world.head.costs, calibrator=world.head.calibrator) if plan.guesses else None
        given = [world.answers[request][0] for request in range(len(cases))]
        for case, answer in zip(cases, given, strict=True):
            if answer.end is None or not is_plain(case, tuple(answer.tokens), answer.end.reason):
                raise FlowSpecError(f"{wish.shape.name} on {len(plan.stages)} devices: the answer is not the plain one")
        if number >= 0:
            made += sum(len(answer.times_s) - 1 for answer in given)
            spent_s += max(answer.times_s[-1] for answer in given) - max(answer.times_s[0] for answer in given)
    return made / spent_s


def _drafter(wish: Wish, plan: Plan, cases: Sequence[Case]) -> DrafterForEach | None:
    if not plan.guesses:
        return None
    assert wish.drafter is not None, "a plan with guesses without a drafter"
    drafting = Synthetic(wish.drafter.acceptance, PROMPT_TOKENS + cases[0].new_tokens_max)
    return DrafterForEach([made for case in cases if (made := drafting.begin(case)()) is not None])
