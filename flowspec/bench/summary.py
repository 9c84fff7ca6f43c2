"""Records into what they say together: rates, speed-ups with intervals, what explains them, and where
`continuous` stands.

A domain's rate is its tokens after the first by its time after the first token; `overall` is the harmonic
mean of the domains. A speed-up compares the prompts that both methods answered. Its interval is a bootstrap
over prompts (all answers to one are drawn together, for both methods), stratified by domain and drawn from a
fixed seed, so the same records always give the same summary. One prompt tells nothing of others, so it has no
interval, and neither has `overall` with a domain of one prompt. How it is shown is `bench.report`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from flowspec.bench.config import AR, OURS
from flowspec.bench.outcome import EXACT, WRONG, Record
from flowspec.core.methods import ALL

OVERALL = "overall"
TUNED = " tuned"
PUBLISHED = " (published)"
REFERENCES = tuple(each.name + suffix for each in ALL if each.is_reference for suffix in (PUBLISHED, ""))
"""What speed-ups are over, beside `ar`: the first of these that was run."""
PAPER = tuple(each.name + suffix for each in ALL if each.is_forerunner for suffix in (PUBLISHED, ""))
RESAMPLES = 1000
SEED = 2507
PERCENTILES = (2.5, 97.5)

Sums = dict[str, dict[str, tuple[float, float]]]
"""Tokens after the first and their seconds, by domain and prompt."""
INTERVAL_PROMPTS_MIN = 2
"""Of a domain, for an interval."""
Ratio = dict[str, Any]
"""`ratio` and the ends `low` and `high` of its 95% interval; None where there is none."""
Ratios = dict[str, Ratio]
"""By domain, and `overall`."""


def counts(record: Record) -> bool:
    """Whether an answer has a rate: two tokens, and time between them."""
    return record.new_tokens > 1 and record.decode_s > 0


def sums(records: Iterable[Record]) -> Sums:
    found: Sums = {}
    for record in filter(counts, records):
        prompts = found.setdefault(record.domain, {})
        tokens, time_s = prompts.get(record.prompt_id, (0.0, 0.0))
        prompts[record.prompt_id] = (tokens + record.new_tokens - 1, time_s + record.decode_s)
    return found


def rates(of: Sums) -> dict[str, float]:
    """Tokens per second by domain, and their harmonic mean; empty where nothing counts."""
    found = {
        domain: sum(tokens for tokens, _ in of[domain].values())
        / sum(time_s for _, time_s in of[domain].values())
        for domain in sorted(of)
    }
    return found | {OVERALL: len(found) / sum(1 / rate for rate in found.values())} if found else {}


def paired(ours: Sums, theirs: Sums) -> Ratios:
    """Our rate by theirs on the prompts that both have, by domain and overall; empty if there are none."""
    chance = np.random.default_rng(SEED)
    found: Ratios = {}
    our_total, their_total = np.zeros(1 + RESAMPLES), np.zeros(1 + RESAMPLES)
    fewest = INTERVAL_PROMPTS_MIN
    for domain in sorted(ours.keys() & theirs.keys()):
        prompts = sorted(ours[domain].keys() & theirs[domain].keys())
        if not prompts:
            continue
        drawn = chance.integers(len(prompts), size=(RESAMPLES, len(prompts)))
        picks = np.vstack(
            [np.arange(len(prompts)), drawn]
        )  # [1 + resamples, prompts]; the first is the sample itself
        our_s, their_s = (
            _seconds_per_token([of[domain][prompt] for prompt in prompts], picks) for of in (ours, theirs)
        )
        found[domain] = _ratio(their_s / our_s, len(prompts))
        our_total, their_total = our_total + our_s, their_total + their_s
        fewest = min(fewest, len(prompts))
    # The harmonic mean of rates is the number of domains by the sum of their seconds per token.
    return found | {OVERALL: _ratio(their_total / our_total, fewest)} if found else {}


def _seconds_per_token(prompts: Sequence[tuple[float, float]], picks: np.ndarray) -> np.ndarray:
    drawn = np.array(prompts)[picks]  # [1 + resamples, prompts, 2]
    return np.asarray(drawn[..., 1].sum(axis=1) / drawn[..., 0].sum(axis=1))


def _ratio(samples: np.ndarray, prompts: int) -> Ratio:
    has_interval = prompts >= INTERVAL_PROMPTS_MIN
    low, high = np.percentile(samples[1:], PERCENTILES).tolist() if has_interval else (None, None)
    return {"ratio": float(samples[0]), "low": low, "high": high}


Answer = tuple[str, str, float, int, int]
"""What several methods were asked alike: testbed, prompt, temperature, seed, round."""


def _answer(record: Record) -> Answer:
    return (record.testbed, record.prompt_id, record.temperature, record.seed, record.repeat)


def least_s(records: Iterable[Record]) -> dict[Answer, float]:
    """The time after the first token that an oracle would have taken for each answer, at least, with the
    guesses of whichever method's are best for it. Plain decoding, which has none, is judged by it, too."""
    found: dict[Answer, float] = {}
    for record in records:
        if record.oracle_s is not None and record.agreement == EXACT:
            answer = _answer(record)
            found[answer] = min(record.oracle_s, found.get(answer, record.oracle_s))
    return found


def statistics(records: Sequence[Record], least: Mapping[Answer, float]) -> dict[str, Any]:
    """What explains a method's rate; means are over the answers that have one. None where there is nothing to
    tell from. `least` is that of `least_s` over all methods."""
    agreements = Counter(record.agreement for record in records)
    timed = [record for record in records if counts(record)]
    slotted = [record for record in timed if record.tau_s > 0]
    tokens = sum(record.new_tokens for record in records)
    rows = sum(record.rows for record in records)
    bounded = [record for record in timed if record.agreement == EXACT and _answer(record) in least]
    own = [record for record in bounded if record.oracle_s is not None]
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
        "dropped_per_100_rows": 100 * sum(record.dropped_rows for record in records) / rows if rows else None,
        "network_bytes_per_token": sum(record.network_bytes for record in records) / tokens
        if tokens
        else None,
        "energy_j_per_token": sum(record.energy_j for record in records) / tokens if tokens else None,
        "time_to_first_token_s": _mean(record.time_to_first_token_s for record in records),
        "tau_s": _mean(record.tau_s for record in slotted),
        "trip_s": _mean(record.trip_s for record in slotted),
        "oracle_share": _share(sum(least[_answer(each)] for each in bounded), bounded),
        "own_oracle_share": _share(sum(each.oracle_s or 0.0 for each in own), own),
        "agreement": {each: agreements[each] for each in (EXACT, WRONG)},
    }


def _share(of_s: float, records: Sequence[Record]) -> float | None:
    return of_s / sum(record.decode_s for record in records) if records else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def summarise(name: str, world: str, records: Sequence[Record]) -> dict[str, Any]:
    """`summary.json`: a table for each testbed and temperature, how `continuous` compares in each *cell* (a
    domain there) and overall, and in which cells it is too slow."""
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
            tables.append({"testbed": testbed, "temperature": temperature, **_table(measured, by_method)})
            if OURS in measured:
                to_cold = paired(measured[OURS], cold) if temperature > 0 else {}
                where = {"testbed": testbed, "temperature": temperature}
                compared = [where | each for each in _compared(measured, to_cold)]
                cells += [each for each in compared if each["domain"] != OVERALL]
                overall += [each for each in compared if each["domain"] == OVERALL]
                cold = cold if temperature > 0 else measured[OURS]
    return {
        "experiment": name,
        "world": world,
        "answers": len(records),
        "tables": tables,
        "cells": cells,
        "overall": overall,
        "slower_than_other": [
            _short(cell, cell["other"], cell["to_other"]) for cell in cells if _is_below_one(cell["to_other"])
        ],
        "below_ar": [_short(cell, AR, cell["to_ar"]) for cell in cells if _is_below_one(cell["to_ar"])],
    }


def first_of(names: Iterable[str], among: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in among), None)


def _table(measured: Mapping[str, Sums], by_method: Mapping[str, Sequence[Record]]) -> dict[str, Any]:
    chunked = first_of(REFERENCES, measured)
    references = [AR] * (AR in measured) + ([chunked] if chunked else [])
    least = least_s(record for records in by_method.values() for record in records)
    return {
        "methods": list(measured),
        "domains": sorted({domain for each in measured.values() for domain in each}),
        "references": references,
        "tokens_per_s": {method: rates(each) for method, each in measured.items()},
        "speed_up": {
            name: {method: paired(each, measured[name]) for method, each in measured.items()}
            for name in references
        },
        "statistics": {method: statistics(by_method[method], least) for method in measured},
    }


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
    found = []
    for domain, rate in rates(measured[OURS]).items():
        other, its_tuned = _best(others, domain), _best(tuned, domain)
        found.append(
            {
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
        )
    return found


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
    return {
        "testbed": cell["testbed"],
        "temperature": cell["temperature"],
        "domain": cell["domain"],
        "other": other,
        **ratio,
    }
