"""Loads of steps into what they say: throughput and latency of each method in each step, beside the best
single drafter, and how long the control takes to settle.

Throughput is the tokens that came while a step lasted by its time. Latency is that of the answers that were
asked for in it, from the question to the last token. The single drafter is that of the method with one
drafter whose throughput over all steps is the highest. Beside it, *speed* is the time that it took for
answers by the time of the same ones (user and turn of a step), so what makes prompts easy or hard is in both.

How long a method takes to settle is told twice. `lost_s`: a step's second half shows what the method gives in
it; for how long it would have had to give nothing, and this otherwise, to give what it gave in the first
half. And the speed of the first answers of a step, of each user one, beside that of the later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from flowspec.bench.config import Bench, LoadStep
from flowspec.bench.load_steps import StepAnswer, StepSpan, StepsRecord, starts_of
from flowspec.bench.outcome import EXACT
from flowspec.bench.summary import INTERVAL_PROMPTS_MIN, PERCENTILES, RESAMPLES, SEED, Ratio

SLOWEST = 95
"""The percentile that stands for the slow answers."""
BELOW = 0.97
"""A speed or a throughput beside the single drafter's that is told of."""
ALL = "all"
FIRST, LATER = "first", "later"

Pairs = Sequence[tuple[float, float]]
"""Seconds for the same answer: of the single drafter, and of another."""


def summarise(bench: Bench, records: Sequence[StepsRecord]) -> dict[str, Any]:
    """`summary.json`: a table for each testbed, temperature and seed, in which each step has the figures of
    each method.

    `to_single` of a method with several drafters is its throughput by the single one's, and its speed by
    domain, of all answers, and of first and later ones. `below` lists where one of these is below `BELOW`,
    with the interval that tells whether that is more than chance.
    """
    tables = []
    for place in dict.fromkeys((each.testbed, each.temperature, each.seed) for each in records):
        here = {
            record.method: record
            for record in records
            if (record.testbed, record.temperature, record.seed) == place
        }
        tables.append(_table(bench.steps, *place, here))
    return {
        "experiment": bench.name,
        "world": bench.world,
        "answers": sum(len(record.answers) for record in records),
        "wrong": sum(answer.agreement != EXACT for record in records for answer in record.answers),
        "silent_s": bench.silent_s,
        "tables": tables,
    }


def _table(
    steps: Sequence[LoadStep],
    testbed: str,
    temperature: float,
    seed: int,
    methods: Mapping[str, StepsRecord],
) -> dict[str, Any]:
    single = max(
        (name for name, record in methods.items() if record.drafters == 1),
        key=lambda name: sum(sum(span.tokens) for span in methods[name].spans),
        default=None,
    )
    found = [
        {
            "step": number + 1,
            "start_s": start_s,
            "seconds": step.seconds,
            "users": step.users,
            "slow": dict(step.slow),
            "lost": list(step.lost),
            "methods": {name: figures(record, step, number) for name, record in methods.items()},
            "to_single": {
                name: beside(record, methods[single], number)
                for name, record in methods.items()
                if single is not None and record.drafters > 1
            },
        }
        for number, (step, start_s) in enumerate(zip(steps, starts_of(steps), strict=False))
    ]
    return {
        "testbed": testbed,
        "temperature": temperature,
        "seed": seed,
        "single": single,
        "steps": found,
        "below": list(_below(found)),
        "curves": {name: _curves(record, steps) for name, record in methods.items()},
    }


def _curves(record: StepsRecord, steps: Sequence[LoadStep]) -> dict[str, Any]:
    """What a plot shows of one method, step by step, in each of a step's bins: tokens per second, and the
    rows that each drafter was asked about."""
    rates = [
        [tokens * len(span.tokens) / step.seconds for tokens in span.tokens]
        for span, step in zip(record.spans, steps, strict=True)
    ]
    return {"tokens_per_s": rates, "asked": [span.asked for span in record.spans]}


def figures(record: StepsRecord, step: LoadStep, number: int) -> dict[str, Any]:
    """Of one method in one step; times in seconds of its world. `drafted` is each drafter's share of all rows
    that drafters were asked about."""
    answers = [answer for answer in record.answers if answer.step == number]
    span = record.spans[number]
    rows = {name: sum(asked) for name, asked in span.asked.items()}
    whole_s = [answer.whole_s for answer in answers]
    return {
        "answers": len(answers),
        "tokens_per_s": sum(span.tokens) / step.seconds,
        "latency_s": fmean(whole_s) if whole_s else None,
        "latency_p95_s": float(np.percentile(whole_s, SLOWEST)) if whole_s else None,
        "first_token_s": fmean(answer.first_s - answer.asked_s for answer in answers) if answers else None,
        "lost_s": lost_s(span, step.seconds),
        "stage_busy": span.stage_busy,
        "drafted": {name: count / max(1, sum(rows.values())) for name, count in rows.items()},
        "wrong": sum(answer.agreement != EXACT for answer in answers),
    }


def lost_s(span: StepSpan, seconds: float) -> float | None:
    """See the module; below 0 where the first half gave more. None where the second half gave nothing."""
    half = len(span.tokens) // 2
    first, second = sum(span.tokens[:half]), sum(span.tokens[half:])
    return seconds / 2 * (1 - first / second) if second else None


def beside(record: StepsRecord, single: StepsRecord, number: int) -> dict[str, Any]:
    """A method in one step by the single drafter's: `tokens_per_s`, and the `speed`s."""
    theirs = {(each.user, each.turn): each for each in single.answers if each.step == number}
    both = [
        (theirs[answer.user, answer.turn], answer)
        for answer in record.answers
        if answer.step == number and (answer.user, answer.turn) in theirs
    ]

    def of(is_meant: Callable[[StepAnswer], bool]) -> dict[str, Any] | None:
        pairs = [(other.whole_s, own.whole_s) for other, own in both if is_meant(own)]
        return {"answers": len(pairs), **ratio(pairs)} if pairs else None

    ours, other = sum(record.spans[number].tokens), sum(single.spans[number].tokens)
    return {
        "tokens_per_s": ours / other if other else None,
        "speed": {
            ALL: of(lambda answer: True),
            **{
                domain: of(lambda answer, domain=domain: answer.domain == domain)  # type: ignore[misc]
                for domain in sorted({answer.domain for answer in record.answers})
            },
            FIRST: of(lambda answer: answer.turn == 0),
            LATER: of(lambda answer: answer.turn > 0),
        },
    }


def ratio(pairs: Pairs) -> Ratio:
    """The single drafter's seconds by the other's, with a 95% interval (a bootstrap over the answers)."""
    seconds = np.array(pairs)  # [answers, 2]
    low = high = None
    if len(pairs) >= INTERVAL_PROMPTS_MIN:
        picks = np.random.default_rng(SEED).integers(len(pairs), size=(RESAMPLES, len(pairs)))
        sums = seconds[picks].sum(axis=1)
        low, high = np.percentile(sums[:, 0] / sums[:, 1], PERCENTILES).tolist()
    return {"ratio": float(seconds[:, 0].sum() / seconds[:, 1].sum()), "low": low, "high": high}


def _point(value: float) -> Ratio:
    return {"ratio": value, "low": None, "high": None}


def _below(steps: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    for step in steps:
        for method, found in step["to_single"].items():
            rate = found["tokens_per_s"]
            if rate is not None and rate < BELOW:
                yield {"step": step["step"], "method": method, "of": "tokens/s", **_point(rate)}
            for name, speed in found["speed"].items():
                if speed is not None and speed["ratio"] < BELOW:
                    yield {"step": step["step"], "method": method, "of": name, **speed}
