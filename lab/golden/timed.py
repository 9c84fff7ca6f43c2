"""Parts that see seconds and bytes: each round runs from the recorded commit's tree and from this one, in
random order, and what counts is the ratio of the two best: whatever else runs only makes a number worse.

A recording holds the values with their spread for people to read; they are of the machine that it names and
are compared with nothing.
"""

from __future__ import annotations

import fnmatch
import random
import statistics
import subprocess
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.golden.parts import Part
from lab.golden.place import ROOT, Place, make_place
from lab.golden.recording import Absent, Difference, Observation, Recording, is_below

TOLERANCE = 0.10
"""A ratio that is worse by more than this is a difference, if no round has a better one than 1; a part may
have others for some keys."""
MORE_IS_BETTER = "tokens/s"
"""How keys end whose numbers are rates; of all others less is better."""

Observe = Callable[[Part, Place, str], Iterator[Observation | Absent]]
Values = dict[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of one key; `differences` is empty where it is not worse than before."""

    key: str
    value: dict[str, Any]
    differences: list[Difference] = field(default_factory=list)


def run(
    part: Part, recording: Recording | None, pattern: str, observe: Observe, tell: Callable[[int, str], None]
) -> Iterator[Measured | Absent]:
    """Measures a part; with a recording, its commit, too."""
    rng, before, now = random.Random(0), Values(), Values()
    absent: dict[str, Absent] = {}
    trees = [(ROOT, now)]
    if recording is not None:
        old = checkout(recording.origin.commit)
        if isinstance(old, Absent):
            yield old
            return
        trees.append((old, before))
    count = 0
    for number in range(part.rounds):
        for tree, values in rng.sample(trees, len(trees)):
            seen: Values = defaultdict(list)
            with make_place(tree) as place:
                for found in observe(part, place, pattern):
                    if isinstance(found, Absent):
                        absent[found.key] = found
                        continue
                    seen[found.key].append(float(found.value))
                    count += 1
                    tell(count, f"round {number + 1} of {part.rounds}, {found.key}")
            for key, each in seen.items():
                values.setdefault(key, []).append(_best(key, each))
    yield from absent.values()
    for key in sorted({*now, *before}):
        old_values = None if recording is None else before.get(key, [])
        yield _measured(key, now.get(key, []), old_values, _tolerance(part, key))
    for key in sorted(set(recording.entries) if recording is not None else ()):
        is_absent = any(is_below(key, each) for each in absent)
        if key not in now and not is_absent and fnmatch.fnmatch(key, pattern):
            lost = Difference(place=key, expected="a measurement, as is recorded", got="nothing")
            yield Measured(key=key, value={}, differences=[lost])


def _tolerance(part: Part, key: str) -> float:
    fitting = (value for pattern, value in part.tolerance.items() if fnmatch.fnmatchcase(key, pattern))
    return next(fitting, TOLERANCE)


def _measured(key: str, now: list[float], before: list[float] | None, tolerance: float) -> Measured:
    value: dict[str, Any] = _spread(now) if now else {}
    if before is None:
        return Measured(key=key, value=value)
    if len(before) != len(now) or not now:
        missing = Difference(
            place=key, expected=f"{len(before)} measurements, as from the recorded commit", got=str(len(now))
        )
        return Measured(key=key, value=value, differences=[missing])
    ratios = [_ratio(new, old) for new, old in zip(now, before, strict=True)]
    ratio = _ratio(_best(key, now), _best(key, before))
    rounded = [round(each, 4) for each in ratios]
    value |= {"before": _spread(before), "ratio": round(ratio, 4), "ratios": rounded}
    worse = [1 / each if key.endswith(MORE_IS_BETTER) else each for each in (ratio, *ratios)]
    if worse[0] <= 1 + tolerance or min(worse) <= 1:
        return Measured(key=key, value=value)
    difference = Difference(
        place=key,
        expected=f"about {_best(key, before):.6g}, as from the recorded commit in the same run",
        got=f"{_best(key, now):.6g}, {ratio:.3f} of it ({min(ratios):.3f} to {max(ratios):.3f} by round)",
    )
    return Measured(key=key, value=value, differences=[difference])


def _best(key: str, values: list[float]) -> float:
    return max(values) if key.endswith(MORE_IS_BETTER) else min(values)


def _ratio(new: float, old: float) -> float:
    return new / old if old else float(new != old) + 1.0


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": _rounded(statistics.median(values)),
        "low": _rounded(min(values)),
        "high": _rounded(max(values)),
        "n": len(values),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def checkout(commit: str) -> Path | Absent:
    """The files of a commit in a folder that stays."""
    with make_place() as place:
        folder = place.models / "trees" / commit
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as room:
        archive = Path(room, "tree.tar")
        done = subprocess.run(
            ["git", "archive", "--output", str(archive), commit],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            why = f"commit {commit[:8]} of the recording is not in this clone; fetch its history"
            return Absent(key="", why=why)
        with tarfile.open(archive) as files:
            files.extractall(Path(room, "tree"), filter="data")
        Path(room, "tree").rename(folder)
    return folder
