"""Simulated clusters for comparing methods: one world for each method and prompt, timed in units of a stage's pass over one node.

A stage of four layers takes `t(n) = max(1, n / knee) + .004 n` for n nodes, the drafter `.16 max(1, n / 64)`, a hop `.02`, and
`.008` more for each row of hidden states. The first hop and the last carry integers. As in a real session, a head goes from one
answer to the next with what it has learnt of costs and confidences. Every answer is compared with the plain one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowspec.core.calibration import Calibrator
from flowspec.core.costs import Costs
from flowspec.core.events import Submit
from flowspec.core.statistics import Statistics
from flowspec.draft.protocol import Drafter
from flowspec.errors import FlowSpecError
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.device import DeviceSpec
from flowspec.sim.experiment import Experiment
from flowspec.sim.language import AnswerLanguage
from flowspec.testbed.command import whole, wholes
from flowspec.testbed.plain import Case, first_of_each, make_samplings, plain_cases
from flowspec.testbed.prompts import read_prompts

KNEES = {"jetson": 32, "pi": 8}
"""Nodes that a stage of each board runs in the time of one."""
ROW = 0.004
DRAFT = Curve(base_s=0.16, row_s=0.16 / 64)
HOP = 0.02
HOP_ROW = 0.008
LAYERS = 4
ROW_BYTES = 1_000_000
"""So many that headers count for nothing."""
OVERALL = "harmonic mean"


class WrongAnswer(FlowSpecError):
    """A method gave another answer than plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A method with its parameters, by the name it is shown under."""

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The simulated cluster."""

    stages: int = 4
    board: str = "jetson"
    context: int = 1024

    def experiment(self, setup: Setup) -> Experiment:
        curve = Curve(base_s=1.0, row_s=1 / KNEES[self.board], extra_row_s=ROW)
        return Experiment(
            devices=(DeviceSpec(curve=curve, layers=LAYERS),) * self.stages,
            control=LinkSpec(delay_s=HOP),
            data=LinkSpec(delay_s=HOP, bandwidth_mbps=8e-6 * ROW_BYTES / HOP_ROW),
            row_bytes=ROW_BYTES,
            method=setup.method,
            options=setup.options,
            context=self.context,
            drafting=DRAFT,
        )

    @property
    def plain_rate(self) -> float:
        """Tokens per unit of time of `ar`: one trip each."""
        return 1 / (self.stages * (1 + ROW) + (self.stages + 1) * HOP + (self.stages - 1) * HOP_ROW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One answer in one world: its tokens after the first, a stop token counted, and the time from the first until the end."""

    case: Case
    setup: Setup
    tokens: int
    time: float
    statistics: Statistics


@dataclass(slots=True)
class Learnt:
    """What a method's head knows after the answers so far."""

    costs: Costs | None = None
    calibrator: Calibrator | None = None


def run(pipeline: Pipeline, setup: Setup, case: Case, drafter: Drafter | None, learnt: Learnt | None = None) -> Run:
    """Answers a case in a world of its own, with what is `learnt` so far; raises `WrongAnswer` if that is not the plain answer."""
    world = pipeline.experiment(setup).build(AnswerLanguage({case.prompt: case.answer}), drafter)
    if learnt is not None:
        world.head.costs = learnt.costs or world.head.costs
        world.head.calibrator = learnt.calibrator or world.head.calibrator
        learnt.costs, learnt.calibrator = world.head.costs, world.head.calibrator
    submit = Submit(request=0, prompt=case.prompt, new_tokens_max=case.new_tokens_max, sampling=case.sampling, stop_ids=case.stop_ids)
    world.at(0.0, submit)
    world.run()
    (answer,) = world.answers[0]
    reason = "nothing" if answer.end is None else answer.end.reason
    if tuple(answer.tokens) != case.new_tokens or reason != ("stop" if case.is_stopped else "length"):
        length = min(len(answer.tokens), len(case.new_tokens))
        same = next((n for n in range(length) if answer.tokens[n] != case.new_tokens[n]), length)
        raise WrongAnswer(
            f"{setup.name} {dict(setup.options)}, prompt {case.prompt_id} ({case.domain}), temperature {case.sampling.temperature:g}, seed "
            f"{case.sampling.seed}: {len(answer.tokens)} tokens and {reason}, expected {len(case.new_tokens)}; the first {same} are equal"
        )
    assert answer.end is not None
    return Run(
        case=case,
        setup=setup,
        tokens=max(0, len(case.answer) - 1),
        time=answer.ended_s - (answer.times_s[0] if answer.times_s else answer.ended_s),
        statistics=answer.end.statistics,
    )


def harmonic_mean(values: Iterable[float]) -> float:
    found = list(values)
    return len(found) / sum(1 / value for value in found) if found and min(found) > 0 else 0.0


def rates(runs: Sequence[Run]) -> dict[str, float]:
    """Tokens per unit of time for each domain (its tokens by its time), and the harmonic mean of these."""
    found = {}
    for domain in dict.fromkeys(one.case.domain for one in runs):
        tokens = sum(one.tokens for one in runs if one.case.domain == domain)
        time = sum(one.time for one in runs if one.case.domain == domain)
        if time > 0:
            found[domain] = tokens / time
    return {**found, OVERALL: harmonic_mean(found.values())}


def add_world_arguments(parser: argparse.ArgumentParser) -> None:
    """What all commands about methods in virtual time take."""
    parser.add_argument(
        "--prompts", type=Path, default=bundled_folder("prompts.jsonl"), metavar="FILE", help="jsonl with `category` (default: shipped)"
    )
    parser.add_argument("--prompts-per-domain", type=whole, metavar="N", help="only the first N of each domain")
    parser.add_argument("--tokens", type=whole, default=96, metavar="N", help="longest answer (default: %(default)s)")
    parser.add_argument("--seeds", type=wholes, default=(1,), metavar="1,2", help="seeds at temperatures above 0 (default: 1)")
    parser.add_argument("--stages", type=whole, default=4, metavar="N", help="stages of the pipeline (default: %(default)s)")
    parser.add_argument(
        "--board", choices=sorted(KNEES), default="jetson", help="where a stage's time begins to grow (default: %(default)s)"
    )
    parser.add_argument(
        "--drafter",
        default=None,
        metavar="NAME",
        help="bundled, a folder or hub id of a small model, ngram, random or none (default: bundled)",
    )
    parser.add_argument("--cache", type=Path, metavar="FILE", help="where plain answers are kept between runs")


def cases_of(args: argparse.Namespace, target: ModelFiles, temperatures: Sequence[float]) -> list[Case]:
    """The cases that the flags ask for, with their plain answers."""
    samplings = make_samplings(temperatures, args.seeds)
    prompts = first_of_each(read_prompts(args.prompts), args.prompts_per_domain)
    return plain_cases(target, prompts, samplings, args.tokens, args.cache)
