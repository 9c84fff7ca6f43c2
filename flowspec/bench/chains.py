"""Chains of models compared: the chosen ones of a method beside every fixed chain, by latency, on each domain
and on the mix of all prompts.

A latency is the mean time from a question to the last token of its answer, over the prompts that all compared
setups answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from flowspec.bench.config import AR, AUTO, FIXED, Bench, Setup
from flowspec.bench.outcome import Record

MIX = "mix"
PLAIN = "plain"


def compare(bench: Bench, records: Sequence[Record]) -> list[dict[str, Any]]:
    """For each testbed and temperature the latencies of all chains by domain, and where each chosen one
    stands; none without chains.

    `to_fixed` is a latency by the least of the fixed chains, `to_two` by that of those with one model beside
    the target, `to_plain` by plain decoding's.
    """
    found = []
    setups = {setup.name: setup for setup in bench.setups if setup.chain or setup.method == AR}
    if not any(setup.chain for setup in setups.values()):
        return []
    for testbed, temperature in dict.fromkeys((record.testbed, record.temperature) for record in records):
        here = [
            record
            for record in records
            if (record.testbed, record.temperature) == (testbed, temperature) and record.method in setups
        ]
        latencies = _latencies(here)
        fixed = [name for name in latencies if setups[name].chain == FIXED]
        two = [name for name in fixed if len(setups[name].drafters or ()) == 1]
        plain = [name for name in latencies if not setups[name].drafters]
        chosen = {
            name: {
                domain: {
                    "to_fixed": _ratio(latencies, name, fixed, domain),
                    "to_two": _ratio(latencies, name, two, domain),
                    "to_plain": _ratio(latencies, name, plain, domain),
                }
                for domain in latencies[name]
            }
            for name in latencies
            if setups[name].chain == AUTO
        }
        found.append(
            {"testbed": testbed, "temperature": temperature, "latency_s": latencies, "chosen": chosen}
        )
    return found


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


def _ratio(
    latencies: Mapping[str, Mapping[str, float]], name: str, others: Iterable[str], domain: str
) -> dict[str, Any] | None:
    """A latency by the least of others', and whose that is."""
    best = min(others, key=lambda other: latencies[other][domain], default=None)
    return (
        None if best is None else {"other": best, "ratio": latencies[name][domain] / latencies[best][domain]}
    )


def label(setup: Setup, models: Sequence[int | str]) -> str:
    """A chain in words; models are told by name, or by number among the setup's."""
    names = [model if isinstance(model, str) else (setup.drafters or ())[model] for model in models]
    return " + ".join(names) or PLAIN
