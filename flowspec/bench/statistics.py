"""Records into what they say together: rates, speed-ups with intervals, what explains them, where
`continuous` stands, chains of models, and loads. How it is shown is `bench.report`.

*Answers.* A domain's rate is its tokens after the first by its time after the first token; `overall` is the
harmonic mean of the domains. A speed-up compares the prompts that both methods answered. Its interval is a
bootstrap over prompts (all answers to one are drawn together, for both methods), stratified by domain and
drawn from a fixed seed. One prompt tells nothing of others, so it has no interval, and neither has `overall`
with a domain of one prompt.

*Loads.* Throughput is the tokens that came by the time of the load, or of a step. `token_s` is an answer's
latency by its tokens. Fairness is Jain's index of the users' rates: 1 where all are served alike, 1 by their
number where one has everything. Some prompts are answered sooner than others by anybody, so
`fairness_to_alone` takes for a user's rate how fast its answers came by what one user alone waited for the
same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

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
"""What speed-ups are over, in addition to `ar`: the first of these that was run."""
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
Each = TypeVar("Each")
Key = TypeVar("Key")


def summarise(experiment: Experiment, records: Sequence[AnyRecord]) -> dict[str, Any]:
    """`summary.json`: of answers, with `chains` if some were compared, or of loads."""
    loads = [record for record in records if isinstance(record, LoadRecord)]
    answers = [record for record in records if isinstance(record, Record)]
    summary: dict[str, Any] = {"experiment": experiment.name, "world": experiment.world}
    if experiment.is_load:
        of_loads = [answer for load in loads for answer in load.answers]
        wrong = sum(answer.agreement != EXACT for answer in of_loads)
        return summary | {"answers": len(of_loads), "wrong": wrong, "tables": _load_tables(loads)}
    summary |= {"answers": len(answers), **_answer_tables(answers)}
    chains = _chain_tables(experiment, answers)
    return summary | ({"chains": chains} if chains else {})


def _group(each_of: Iterable[Each], key: Callable[[Each], Key]) -> dict[Key, list[Each]]:
    """By what `key` says of each, in the order in which that first comes."""
    groups: dict[Key, list[Each]] = {}
    for each in each_of:
        groups.setdefault(key(each), []).append(each)
    return groups


def first_of(names: Iterable[str], among: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in among), None)


def _least(values: Mapping[str, float]) -> str | None:
    """Whose is least."""
    return min(values, key=lambda name: values[name], default=None)


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return fmean(numbers) if numbers else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


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
        domain: sum(tokens for tokens, _ in prompts.values()) / sum(time_s for _, time_s in prompts.values())
        for domain, prompts in sorted(of.items())
    }
    if not by_domain:
        return {}
    return by_domain | {OVERALL: len(by_domain) / sum(1 / rate for rate in by_domain.values())}


def paired(ours: Sums, theirs: Sums) -> Ratios:
    """Our rate by theirs on the prompts that both have, by domain and overall; empty if there are none."""
    chance = np.random.default_rng(SEED)
    ratios: Ratios = {}
    total_s, fewest = np.zeros((2, 1 + RESAMPLES)), INTERVAL_PROMPTS_MIN
    for domain in sorted(ours.keys() & theirs.keys()):
        prompts = sorted(ours[domain].keys() & theirs[domain].keys())
        if not prompts:
            continue
        resamples = chance.integers(len(prompts), size=(RESAMPLES, len(prompts)))
        picks = np.vstack([np.arange(len(prompts)), resamples])  # the first is the sample itself
        drawn = [np.array([of[domain][prompt] for prompt in prompts])[picks] for of in (ours, theirs)]
        by_token_s = np.array([each[..., 1].sum(axis=1) / each[..., 0].sum(axis=1) for each in drawn])
        ratios[domain] = _ratio(by_token_s, len(prompts))
        total_s, fewest = total_s + by_token_s, min(fewest, len(prompts))
    # The harmonic mean of rates is the number of domains by the sum of their seconds per token.
    return ratios | {OVERALL: _ratio(total_s, fewest)} if ratios else {}


def _ratio(by_token_s: np.ndarray, prompts: int) -> Ratio:
    samples = by_token_s[1] / by_token_s[0]
    has_interval = prompts >= INTERVAL_PROMPTS_MIN
    low, high = np.percentile(samples[1:], PERCENTILES).tolist() if has_interval else (None, None)
    return {"ratio": float(samples[0]), "low": low, "high": high}


# ------------------------------------------------------------------------------------------ answers


def _answer_tables(records: Sequence[Record]) -> dict[str, Any]:
    """A table for each testbed and temperature, how `continuous` compares in each *cell* (a domain there) and
    overall, and in which cells it is too slow."""
    tables: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []
    for testbed, of_testbed in _group(records, lambda record: record.testbed).items():
        cold: Sums = {}
        for temperature, here in sorted(_group(of_testbed, lambda record: record.temperature).items()):
            by_method = _group(here, lambda record: record.method)
            measured = {method: sums(each) for method, each in by_method.items()}
            where = {"testbed": testbed, "temperature": temperature}
            tables.append(where | _table(measured, by_method))
            if OURS in measured:
                compared += [where | cell for cell in _compare(measured, cold)]
                cold = cold if temperature > 0 else measured[OURS]
    cells = [cell for cell in compared if cell["domain"] != OVERALL]
    return {
        "tables": tables,
        "cells": cells,
        "overall": [cell for cell in compared if cell["domain"] == OVERALL],
        "slower_than_other": _slower(cells, "to_other"),
        "below_ar": _slower([cell | {"other": AR} for cell in cells], "to_ar"),
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
        "statistics": {method: statistics(each) for method, each in by_method.items()},
    }


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


def _compare(measured: Mapping[str, Sums], cold: Sums) -> list[dict[str, Any]]:
    """How `continuous` compares in each domain and overall, with itself at temperature 0, too; a name and a
    ratio are None where there is nothing to compare with."""
    ours = measured[OURS]
    others = {name: paired(ours, each) for name, each in measured.items() if not name.startswith(OURS)}
    to_cold, paper = paired(ours, cold), first_of(PAPER, others)
    cells = []
    for domain, rate in rates(ours).items():
        ratios = {name: each[domain] for name, each in others.items() if domain in each}
        numbers = {name: ratio["ratio"] for name, ratio in ratios.items()}
        other = _least(numbers)
        tuned = _least({name: number for name, number in numbers.items() if name.endswith(TUNED)})
        cell = {
            "domain": domain,
            "tokens_per_s": rate,
            "other": other,
            "to_other": ratios.get(other or ""),
            "tuned": tuned,
            "to_tuned": ratios.get(tuned or ""),
            "paper": paper,
            "to_paper": ratios.get(paper or ""),
            "to_ar": ratios.get(AR),
            "to_temperature_0": to_cold.get(domain),
        }
        cells.append(cell)
    return cells


def _slower(cells: Sequence[Mapping[str, Any]], ratio: str) -> list[dict[str, Any]]:
    """The cells in which that is below 1, and what it is."""
    return [
        {key: cell[key] for key in ("testbed", "temperature", "domain", "other")} | cell[ratio]
        for cell in cells
        if cell[ratio] is not None and cell[ratio]["ratio"] < 1
    ]


# ------------------------------------------------------------------------------------------ chains


def _chain_tables(experiment: Experiment, records: Sequence[Record]) -> list[dict[str, Any]]:
    """For each testbed and temperature the latencies of all chains by domain, which are means over the
    prompts that all of them answered, and where each chosen one stands; none without chains.

    `to_fixed` is a latency by the least of the fixed chains, `to_two` by that of those with one model beside
    the target, `to_plain` by plain decoding's.
    """
    setups = {setup.name: setup for setup in experiment.setups if setup.chain or setup.method == AR}
    if not any(setup.chain for setup in setups.values()):
        return []
    tables = []
    of_chains = [record for record in records if record.method in setups]
    by_table = _group(of_chains, lambda each: (each.testbed, each.temperature))
    for (testbed, temperature), here in by_table.items():
        by_method = {
            name: {(each.domain, each.prompt_id, each.seed): each.whole_s for each in some}
            for name, some in _group(here, lambda each: each.method).items()
        }
        common = sorted(set.intersection(*map(set, by_method.values())))
        domains = _group(common, lambda key: key[0]) | ({MIX: common} if common else {})
        latencies = {
            name: {domain: fmean(answers[key] for key in keys) for domain, keys in domains.items()}
            for name, answers in by_method.items()
        }
        fixed = [name for name in latencies if setups[name].chain == FIXED]
        others = {
            "to_fixed": fixed,
            "to_two": [name for name in fixed if len(setups[name].drafters or ()) == 1],
            "to_plain": [name for name in latencies if not setups[name].drafters],
        }
        chosen = {name: dict[str, Any]() for name in latencies if setups[name].chain == AUTO}
        for name, by_domain in chosen.items():
            for domain, latency_s in latencies[name].items():
                cell = by_domain[domain] = dict[str, Any]()
                for key, some in others.items():
                    best = _least({other: latencies[other][domain] for other in some})
                    ratio = latency_s / latencies[best][domain] if best else None
                    cell[key] = {"other": best, "ratio": ratio} if best else None
        where = {"testbed": testbed, "temperature": temperature}
        tables.append(where | {"latency_s": latencies, "chosen": chosen})
    return tables


# ------------------------------------------------------------------------------------------ loads


def _load_tables(records: Sequence[LoadRecord]) -> list[dict[str, Any]]:
    """A table for each testbed, temperature and seed, in which each method has its figures by number of users
    or by step.

    `to_single` of a method with several drafters is its throughput by the highest, and its latency by the
    least, that any method with one drafter has there.
    """
    tables = []
    by_table = _group(records, lambda each: (each.testbed, each.temperature, each.seed))
    for (testbed, temperature, seed), here in by_table.items():
        by_load = _group(here, lambda each: (each.step, each.users))
        alone = {record.method: record for record in by_load.get((0, 1), ())}
        loads = [_load(by_load[key], alone) for key in sorted(by_load)]
        tables.append({"testbed": testbed, "temperature": temperature, "seed": seed, "loads": loads})
    return tables


def _load(records: Sequence[LoadRecord], alone: Mapping[str, LoadRecord]) -> dict[str, Any]:
    figures = {each.method: load_figures(each, alone.get(each.method)) for each in records}
    single = [figures[each.method] for each in records if each.drafters == 1]
    several = {each.method: figures[each.method] for each in records if each.drafters > 1}
    plain = [figures[AR]] if AR in figures else []
    return {
        "users": records[0].users,
        "step": records[0].step,
        "label": records[0].label,
        "methods": figures,
        "to_single": _by_best(several, single),
        "to_ar": _by_best({name: each for name, each in figures.items() if name != AR}, plain),
    }


def _by_best(
    figures: Mapping[str, Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float | None]]:
    """By the highest throughput and the least latency; None in a step in which nobody asked."""
    if not others:
        return {}
    most = max(each["tokens_per_s"] for each in others)
    least_s = min((each["latency_s"] for each in others if each["latency_s"] is not None), default=0.0)
    return {
        name: {
            "tokens_per_s": _share(each["tokens_per_s"], most),
            "latency_s": _share(each["latency_s"] or 0.0, least_s),
        }
        for name, each in figures.items()
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
