"""Records into what they say together: rates, speed-ups with intervals, what explains them, where
`continuous` stands, chains of models, and loads. How it is shown is `bench.report`.

*Answers.* A domain's rate is its tokens after the first by its time after the first token; `overall` is the
harmonic mean of the domains. A speed-up compares the prompts that both methods answered. Its interval is a
bootstrap over prompts (all answers to one are drawn together, for both methods), stratified by domain and
drawn from a fixed seed, so the same records always give the same summary. One prompt tells nothing of others,
so it has no interval, and neither has `overall` with a domain of one prompt.

*Chains.* A latency is the mean time from a question to the last token of its answer, over the prompts that
all compared setups answered.

*Loads.* Throughput is the tokens that came by the time of the load, or of a step. Latency is an answer's time
from its question to its last token, `token_s` that by its tokens. Fairness is Jain's index of the users'
rates: 1 where all are served alike, 1 by their number where one has everything. Some prompts are answered
sooner than others by anybody, so `fairness_to_alone` takes for a user's rate how fast its answers came by
what one user alone waited for the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from flowspec.bench.experiment import AR, AUTO, FIXED, OURS, Experiment
from flowspec.bench.records import EXACT, WRONG, AnyRecord, LoadRecord, Record
from flowspec.core.methods import ALL

OVERALL = "overall"
MIX = "mix"
"""All prompts, among the domains of chains."""
TUNED = " tuned"
PUBLISHED = " (published)"
REFERENCES = tuple(each.name + suffix for each in ALL if each.is_reference for suffix in (PUBLISHED, ""))
"""What speed-ups are over, beside `ar`: the first of these that was run."""
PAPER = tuple(each.name + suffix for each in ALL if each.is_forerunner for suffix in (PUBLISHED, ""))
RESAMPLES = 1000
SEED = 2507
PERCENTILES = (2.5, 97.5)
SLOWEST = 95
"""The percentile that stands for the slow answers of a load."""
INTERVAL_PROMPTS_MIN = 2
"""Of a domain, for an interval."""

Sums = dict[str, dict[str, tuple[float, float]]]
"""Tokens after the first and their seconds, by domain and prompt."""
Ratio = dict[str, Any]
"""`ratio` and the ends `low` and `high` of its 95% interval; None where there is none."""
Ratios = dict[str, Ratio]
"""By domain, and `overall`."""


def summarise(experiment: Experiment, records: Sequence[AnyRecord]) -> dict[str, Any]:
    """`summary.json`: of answers, with `chains` if some were compared, or of loads."""
    loads = [record for record in records if isinstance(record, LoadRecord)]
    answers = [record for record in records if isinstance(record, Record)]
    summary: dict[str, Any] = {"experiment": experiment.name, "world": experiment.world}
    if experiment.is_load:
        of_loads = [answer for load in loads for answer in load.answers]
        wrong = sum(answer.agreement != EXACT for answer in of_loads)
        return summary | {"answers": len(of_loads), "wrong": wrong, "tables": _load_tables(loads)}
    summary |= {"answers": len(answers), **summarise_answers(answers)}
    chains = _chain_tables(experiment, answers)
    return summary | ({"chains": chains} if chains else {})


# ------------------------------------------------------------------------------------------ rates


def counts(record: Record) -> bool:
    """Whether an answer has a rate: two tokens, and time between them."""
    return record.new_tokens > 1 and record.decode_s > 0


def sums(records: Iterable[Record]) -> Sums:
    by_domain: Sums = {}
    for record in filter(counts, records):
        prompts = by_domain.setdefault(record.domain, {})
        tokens, time_s = prompts.get(record.prompt_id, (0.0, 0.0))
        prompts[record.prompt_id] = (tokens + record.new_tokens - 1, time_s + record.decode_s)
    return by_domain


def rates(of: Sums) -> dict[str, float]:
    """Tokens per second by domain, and their harmonic mean; empty where nothing counts."""
    by_domain = {
        domain: sum(tokens for tokens, _ in of[domain].values())
        / sum(time_s for _, time_s in of[domain].values())
        for domain in sorted(of)
    }
    if not by_domain:
        return {}
    return by_domain | {OVERALL: len(by_domain) / sum(1 / rate for rate in by_domain.values())}


def paired(ours: Sums, theirs: Sums) -> Ratios:
    """Our rate by theirs on the prompts that both have, by domain and overall; empty if there are none."""
    chance = np.random.default_rng(SEED)
    ratios: Ratios = {}
    our_total, their_total = np.zeros(1 + RESAMPLES), np.zeros(1 + RESAMPLES)
    fewest = INTERVAL_PROMPTS_MIN
    for domain in sorted(ours.keys() & theirs.keys()):
        prompts = sorted(ours[domain].keys() & theirs[domain].keys())
        if not prompts:
            continue
        drawn = chance.integers(len(prompts), size=(RESAMPLES, len(prompts)))
        # [1 + resamples, prompts]; the first is the sample itself
        picks = np.vstack([np.arange(len(prompts)), drawn])
        our_s, their_s = (
            _seconds_per_token([of[domain][prompt] for prompt in prompts], picks) for of in (ours, theirs)
        )
        ratios[domain] = _ratio(their_s / our_s, len(prompts))
        our_total, their_total = our_total + our_s, their_total + their_s
        fewest = min(fewest, len(prompts))
    # The harmonic mean of rates is the number of domains by the sum of their seconds per token.
    return ratios | {OVERALL: _ratio(their_total / our_total, fewest)} if ratios else {}


def _seconds_per_token(prompts: Sequence[tuple[float, float]], picks: np.ndarray) -> np.ndarray:
    drawn = np.array(prompts)[picks]  # [1 + resamples, prompts, 2]
    return np.asarray(drawn[..., 1].sum(axis=1) / drawn[..., 0].sum(axis=1))


def _ratio(samples: np.ndarray, prompts: int) -> Ratio:
    has_interval = prompts >= INTERVAL_PROMPTS_MIN
    low, high = np.percentile(samples[1:], PERCENTILES).tolist() if has_interval else (None, None)
    return {"ratio": float(samples[0]), "low": low, "high": high}


# ------------------------------------------------------------------------------------------ answers


def summarise_answers(records: Sequence[Record]) -> dict[str, Any]:
    """A table for each testbed and temperature, how `continuous` compares in each *cell* (a domain there) and
    overall, and in which cells it is too slow."""
    methods = list(dict.fromkeys(record.method for record in records))
    tables: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    overall: list[dict[str, Any]] = []
    for testbed in dict.fromkeys(record.testbed for record in records):
        of_testbed = [record for record in records if record.testbed == testbed]
        cold: Sums = {}
        for temperature in sorted({record.temperature for record in of_testbed}):
            here = [record for record in of_testbed if record.temperature == temperature]
            by_method = {method: [record for record in here if record.method == method] for method in methods}
            measured = {method: sums(each) for method, each in by_method.items() if each}
            where = {"testbed": testbed, "temperature": temperature}
            tables.append(where | _table(measured, by_method))
            if OURS in measured:
                to_cold = paired(measured[OURS], cold) if temperature > 0 else {}
                for cell in _compared(measured, to_cold):
                    (overall if cell["domain"] == OVERALL else cells).append(where | cell)
                cold = cold if temperature > 0 else measured[OURS]
    return {
        "tables": tables,
        "cells": cells,
        "overall": overall,
        "slower_than_other": [
            _short(cell, cell["other"], cell["to_other"]) for cell in cells if _is_below_one(cell["to_other"])
        ],
        "below_ar": [_short(cell, AR, cell["to_ar"]) for cell in cells if _is_below_one(cell["to_ar"])],
    }


def _table(measured: Mapping[str, Sums], by_method: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    chunked = first_of(REFERENCES, measured)
    references = [AR] * (AR in measured) + ([chunked] if chunked else [])
    return {
        "methods": list(measured),
        "domains": sorted({domain for each in measured.values() for domain in each}),
        "references": references,
        "tokens_per_s": {method: rates(each) for method, each in measured.items()},
        "speed_up": {
            name: {method: paired(each, measured[name]) for method, each in measured.items()}
            for name in references
        },
        "statistics": {method: statistics(by_method[method]) for method in measured},
    }


def first_of(names: Iterable[str], among: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in among), None)


def statistics(records: Sequence[Record]) -> dict[str, Any]:
    """What explains a method's rate; means are over the answers that have one. None where there is nothing to
    tell from."""
    agreements = Counter(record.agreement for record in records)
    timed = [record for record in records if counts(record)]
    slotted = [record for record in timed if record.tau_s > 0]
    tokens = sum(record.new_tokens for record in records)
    rows = sum(record.rows for record in records)
    stages = max((len(record.stage_busy) for record in timed), default=0)
    busy = [
        fmean(record.stage_busy[stage] for record in timed if stage < len(record.stage_busy))
        for stage in range(stages)
    ]
    return {
        "answers": len(records),
        "tokens": tokens,
        "S": _mean(record.S for record in timed),
        "rho": _mean(record.rho for record in timed),
        "acceptance": _mean(record.acceptance for record in timed),
        "stage_busy": busy,
        "busy": _mean(busy),
        "dropped_per_100_rows": _share(100 * sum(record.dropped_rows for record in records), rows),
        "network_bytes_per_token": _share(sum(record.network_bytes for record in records), tokens),
        "energy_j_per_token": _share(sum(record.energy_j for record in records), tokens),
        "time_to_first_token_s": _mean(record.time_to_first_token_s for record in records),
        "tau_s": _mean(record.tau_s for record in slotted),
        "trip_s": _mean(record.trip_s for record in slotted),
        "agreement": {each: agreements[each] for each in (EXACT, WRONG)},
    }


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return fmean(numbers) if numbers else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _compared(measured: Mapping[str, Sums], to_cold: Ratios) -> list[dict[str, Any]]:
    """How `continuous` compares in each domain and overall; a name and a ratio are None where there is
    nothing to compare with."""
    others = {
        method: paired(measured[OURS], each)
        for method, each in measured.items()
        if not method.startswith(OURS)
    }
    tuned = {method: each for method, each in others.items() if method.endswith(TUNED)}
    paper = first_of(PAPER, others)
    cells = []
    for domain, rate in rates(measured[OURS]).items():
        other, its_tuned = _best(others, domain), _best(tuned, domain)
        cell = {
            "domain": domain,
            "tokens_per_s": rate,
            "other": other,
            "to_other": others[other][domain] if other else None,
            "tuned": its_tuned,
            "to_tuned": tuned[its_tuned][domain] if its_tuned else None,
            "paper": paper,
            "to_paper": others[paper].get(domain) if paper else None,
            "to_ar": others.get(AR, {}).get(domain),
            "to_temperature_0": to_cold.get(domain),
        }
        cells.append(cell)
    return cells


def _best(others: Mapping[str, Ratios], domain: str) -> str | None:
    """The method that ours is least ahead of."""
    return min(
        (method for method in others if domain in others[method]),
        key=lambda method: others[method][domain]["ratio"],
        default=None,
    )


def _is_below_one(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio["ratio"] < 1


def _short(cell: Mapping[str, Any], other: str, ratio: Ratio) -> dict[str, Any]:
    where = {key: cell[key] for key in ("testbed", "temperature", "domain")}
    return where | {"other": other, **ratio}


# ------------------------------------------------------------------------------------------ chains


def _chain_tables(experiment: Experiment, records: Sequence[Record]) -> list[dict[str, Any]]:
    """For each testbed and temperature the latencies of all chains by domain, and where each chosen one
    stands; none without chains.

    `to_fixed` is a latency by the least of the fixed chains, `to_two` by that of those with one model beside
    the target, `to_plain` by plain decoding's.
    """
    setups = {setup.name: setup for setup in experiment.setups if setup.chain or setup.method == AR}
    if not any(setup.chain for setup in setups.values()):
        return []
    tables = []
    for where in dict.fromkeys((record.testbed, record.temperature) for record in records):
        here = [
            record
            for record in records
            if (record.testbed, record.temperature) == where and record.method in setups
        ]
        latencies = _latencies(here)
        fixed = [name for name in latencies if setups[name].chain == FIXED]
        others = {
            "to_fixed": fixed,
            "to_two": [name for name in fixed if len(setups[name].drafters or ()) == 1],
            "to_plain": [name for name in latencies if not setups[name].drafters],
        }
        chosen = {
            name: {
                domain: {key: _to_least(latencies, name, some, domain) for key, some in others.items()}
                for domain in latencies[name]
            }
            for name in latencies
            if setups[name].chain == AUTO
        }
        table = {"testbed": where[0], "temperature": where[1], "latency_s": latencies, "chosen": chosen}
        tables.append(table)
    return tables


def _latencies(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Mean seconds by method and domain, and on the mix; of answers that all methods gave."""
    by_method: dict[str, dict[tuple[str, str, int], Record]] = {}
    for record in records:
        by_method.setdefault(record.method, {})[record.domain, record.prompt_id, record.seed] = record
    common = sorted(set.intersection(*(set(each) for each in by_method.values()))) if by_method else []
    domains = {
        domain: [key for key in common if key[0] == domain]
        for domain in dict.fromkeys(key[0] for key in common)
    }
    domains[MIX] = common
    return {
        name: {
            domain: fmean(answers[key].whole_s for key in keys) for domain, keys in domains.items() if keys
        }
        for name, answers in by_method.items()
    }


def _to_least(
    latencies: Mapping[str, Mapping[str, float]], name: str, others: Iterable[str], domain: str
) -> dict[str, Any] | None:
    """A latency by the least of others', and whose that is."""
    best = min(others, key=lambda other: latencies[other][domain], default=None)
    if best is None:
        return None
    return {"other": best, "ratio": latencies[name][domain] / latencies[best][domain]}


# ------------------------------------------------------------------------------------------ loads


def _load_tables(records: Sequence[LoadRecord]) -> list[dict[str, Any]]:
    """A table for each testbed, temperature and seed, in which each method has its figures by number of users
    or by step.

    `to_single` of a method with several drafters is its throughput by the highest, and its latency by the
    least, that any method with one drafter has there.
    """
    tables = []
    for where in dict.fromkeys((record.testbed, record.temperature, record.seed) for record in records):
        by_load: dict[tuple[int, int], dict[str, LoadRecord]] = {}
        for record in records:
            if (record.testbed, record.temperature, record.seed) == where:
                by_load.setdefault((record.step, record.users), {})[record.method] = record
        alone = by_load.get((0, 1), {})
        loads = [_load(by_load[key], alone) for key in sorted(by_load)]
        tables.append({"testbed": where[0], "temperature": where[1], "seed": where[2], "loads": loads})
    return tables


def _load(methods: Mapping[str, LoadRecord], alone: Mapping[str, LoadRecord]) -> dict[str, Any]:
    figures = {name: load_figures(record, alone.get(name)) for name, record in methods.items()}
    single = [figures[name] for name, record in methods.items() if record.drafters == 1]
    several = [name for name, record in methods.items() if record.drafters > 1]
    first = next(iter(methods.values()))
    return {
        "users": first.users,
        "step": first.step,
        "label": first.label,
        "methods": figures,
        "to_single": _to_best(figures, several, single),
        "to_ar": _to_best(figures, [name for name in methods if name != AR], [figures[AR]])
        if AR in figures
        else {},
    }


def _to_best(
    figures: Mapping[str, Mapping[str, Any]], names: Sequence[str], others: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float | None]]:
    """By the highest throughput and the least latency; None in a step in which nobody asked."""
    if not others:
        return {}
    most = max(each["tokens_per_s"] for each in others)
    least_s = min((each["latency_s"] for each in others if each["latency_s"] is not None), default=0.0)
    return {
        name: {
            "tokens_per_s": _share(figures[name]["tokens_per_s"], most),
            "latency_s": _share(figures[name]["latency_s"] or 0.0, least_s),
        }
        for name in names
    }


def load_figures(record: LoadRecord, alone: LoadRecord | None = None) -> dict[str, Any]:
    """Of one load, or step; times in seconds of its world. `alone` is that of one user with the same method
    and prompts, if there was one."""
    answers = record.answers
    whole_s = [answer.whole_s for answer in answers]
    token_s = [answer.whole_s / answer.new_tokens for answer in answers if answer.new_tokens]
    return {
        "users": record.users,
        "answers": len(answers),
        "tokens": record.tokens,
        "tokens_per_s": record.tokens / record.seconds,
        "latency_s": _mean(whole_s),
        "latency_p95_s": _slowest(whole_s),
        "token_s": _mean(token_s),
        "token_p95_s": _slowest(token_s),
        "first_token_s": _mean(answer.first_s - answer.asked_s for answer in answers),
        "fairness": jain(_user_rates(record, [answer.new_tokens for answer in answers])),
        "fairness_to_alone": None
        if alone is None
        else jain(_user_rates(record, [answer.whole_s for answer in alone.answers])),
        "stage_busy": record.stage_busy,
        "board_busy": record.board_busy,
        "energy_j_per_token": _share(record.energy_j, record.tokens),
        "network_bytes_per_token": _share(record.network_bytes, record.tokens),
        "wrong": sum(answer.agreement != EXACT for answer in answers),
    }


def _slowest(values: Sequence[float]) -> float | None:
    return float(np.percentile(values, SLOWEST)) if values else None


def jain(values: Sequence[float]) -> float:
    """`(sum x)^2 / (n sum x^2)` (Jain, Chiu and Hawe, 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _user_rates(record: LoadRecord, worth: Sequence[float]) -> list[float]:
    """What each user's answers were worth, by the time that the user waited for them."""
    had: dict[int, float] = {}
    waited_s: dict[int, float] = {}
    for answer, each in zip(record.answers, worth, strict=True):
        had[answer.user] = had.get(answer.user, 0.0) + each
        waited_s[answer.user] = waited_s.get(answer.user, 0.0) + answer.whole_s
    return [had[user] / waited_s[user] for user in had]
