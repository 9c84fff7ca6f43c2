"""Figures of experiments in virtual time: of each answer, and the tables that are made of them.

They are the same on every machine and in each run. Each experiment has a few prompts, testbeds and tokens of
those that `docs/benchmarks.md` is about, but all its methods.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lab.golden.place import Place
from lab.golden.recording import Absent, Observation

RUNS: Mapping[str, tuple[str, ...]] = {
    "paper-bundled": ("--limit", "2", "--temperatures", "0,1", "--max-new-tokens", "40"),
    "matrix": (
        *("--limit", "1", "--temperatures", "0", "--max-new-tokens", "32", "--testbeds"),
        "2 x Jetson at 1 Gbit/s,8 x Jetson at 50 Mbit/s and 20 ms,8 x Pi at 150 Mbit/s",
    ),
    "acceptance": (
        *("--limit", "1", "--max-new-tokens", "48", "--testbeds"),
        "2 x Jetson at 150 Mbit/s,8 x Jetson at 1 Gbit/s,2 x Pi at 1 Gbit/s",
    ),
    "teams": ("--limit", "1", "--temperatures", "0", "--max-new-tokens", "40"),
    "specrouter": ("--limit", "1", "--max-new-tokens", "32"),
    "floor": ("--limit", "1", "--temperatures", "0", "--max-new-tokens", "32"),
}
"""Experiments, and the flags that make them small enough to be run each time."""
KEY = {"experiment", "world", "testbed", "method", "prompt_id", "domain", "temperature", "seed", "repeat"}
LEFT_OUT = KEY | {"events", "digest"}
"""Of an answer's record: all events are the program's own affair."""
DIGITS = 9
RUN_S = 600.0


def observe(place: Place, name: str) -> Iterator[Observation | Absent]:
    for experiment, flags in RUNS.items():
        if not place.wants(experiment):
            continue
        out = place.home / "results" / experiment
        words = ["bench", "--experiment", experiment, "--out", str(out), "--no-plots", "--json", *flags]
        done = place.run(*words, timeout_s=RUN_S, OMP_NUM_THREADS="1")
        yield Observation(key=f"{experiment}/status", value=done.returncode)
        if done.returncode:
            yield Observation(key=f"{experiment}/error", value=done.stderr.splitlines())
            continue
        for line in (out / "results.jsonl").read_text("utf-8").splitlines():
            record = json.loads(line)
            which = (record["testbed"], f"T={record['temperature']}", record["method"], record["prompt_id"])
            figures = {name: round_numbers(value) for name, value in record.items() if name not in LEFT_OUT}
            yield Observation(key="/".join((experiment, *which)), value=figures)
        summary = json.loads(done.stdout.replace(str(place.home), "#home"))
        for of_machine in ("machine", "versions"):
            del summary["setting"][of_machine]
        yield Observation(key=f"{experiment}/summary", value=round_numbers(summary))


def round_numbers(value: Any) -> Any:
    """The same value, its real numbers to `DIGITS` digits: sums may be taken in another order."""
    if isinstance(value, dict):
        return {key: round_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [round_numbers(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
