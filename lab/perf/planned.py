"""A plan in virtual time: its devices, links and layers as a testbed, and synthetic answers on it."""

from __future__ import annotations

import math
from statistics import mean, stdev

from flowspec.bench.cases import PROMPT_TOKENS, synthetic_cases
from flowspec.bench.drafters import DrafterForEach, Synthetic
from flowspec.bench.experiment import AR, OURS, SYNTHETIC, Setup, Testbed
from flowspec.bench.simulated import Drafters, run_many
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import FlowSpecError
from flowspec.plan.partition import Partition
from flowspec.plan.planner import Plan
from flowspec.plan.sites import PlanRequest

WARM_UP_TOKENS = 16
PLAIN_TOKENS = 24
"""Of an answer without guesses, whose tokens all take the same time; times the users, who begin one after
another."""


def testbed_of(request: PlanRequest, plan: Plan) -> Testbed:
    """The plan's devices; those that share their cores are slowed as the planner supposes."""
    partition = Partition(request)
    *devices, head = (
        place.profile.slowed(partition.slowdown(plan, place)) for place in (*plan.order, plan.head)
    )
    return Testbed(
        name=request.shape.name,
        devices=tuple(devices),
        head=head,
        link=request.network.default,
        shape=request.shape,
        drafter_shape=None if request.drafter is None else request.drafter.shape,
        precision=plan.precision,
        split=plan.layers,
        hops=tuple(partition.hops(plan)),
    )


def simulated(
    request: PlanRequest, plan: Plan, *, answers: int, tokens: int, first: int
) -> tuple[float, float]:
    """Tokens per second of so many balanced answers on a plan, from case `first` on, by its method, each
    from the first token on, and of several users while all have begun and none is done; and the standard
    error as a share of that, 0 for a single answer.

    Like a session that has answered before: each answer begins with the costs that the one before it learnt.
    Prompts are as long as to have the request's typical context in the middle of an answer.
    """
    prompt, users = max(PROMPT_TOKENS, request.typical_context - tokens // 2), request.users
    testbed, guessing = testbed_of(request, plan), request.drafter if plan.guesses else None
    setup = Setup(name="planned", method=OURS if guessing else AR)
    counts = {-1: WARM_UP_TOKENS} | dict.fromkeys(range(answers), tokens)
    experience = None
    made, spent_s = [], []
    for number, count in counts.items() if guessing else [(0, min(tokens, PLAIN_TOKENS * users))]:
        cases = synthetic_cases(users, [Sampling()], count, first + (1 + number) * users, prompt)
        drafters: Drafters = {}
        if guessing:
            context, acceptance = prompt + count, guessing.acceptance
            each = [Synthetic(case, context, acceptance, balanced=True).drafter() for case in cases]
            drafters = {SYNTHETIC: DrafterForEach(each)}
        world = run_many(testbed, setup, cases, drafters, prompt + count, experience)
        experience = world.head.experience()
        given = [world.answers[user][0] for user in range(users)]
        for case, answer in zip(cases, given, strict=True):
            if answer.end is None or not case.is_answered_by(tuple(answer.tokens), answer.end.reason):
                raise FlowSpecError(
                    f"{request.shape.name} on {len(plan.stages)} devices: the answer is not the plain one"
                )
        if number >= 0:
            first_s = max(answer.times_s[0] for answer in given)
            last_s = min(answer.times_s[-1] for answer in given)
            made.append(sum(first_s <= at_s <= last_s for answer in given for at_s in answer.times_s) - 1)
            spent_s.append(last_s - first_s)
    token_s = [seconds / tokens for seconds, tokens in zip(spent_s, made, strict=True)]
    error = stdev(token_s) / mean(token_s) / math.sqrt(len(token_s)) if len(token_s) > 1 else 0.0
    return sum(made) / sum(spent_s), error
