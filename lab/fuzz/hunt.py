"""The hunt: cases are made, tried, kept where they reach new code, and what should not happen is written down
to be replayed.

A case is either frames for the codec or the genome of a `World`. Each either passes, or is refused by
`PeerError`; everything else is a finding. Every `TRACED_EACH`-th case is tried under tracing; one that takes
a step through the code that none did before becomes a parent of later ones.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import json
import random
import sys
import time
import traceback
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

import flowspec
from flowspec.core.protocol import limits
from flowspec.errors import InputError, PeerError
from flowspec.wire.codec import decode, encode
from lab.fuzz.mutate import mutated
from lab.fuzz.samples import Frames, sample_frames
from lab.fuzz.world import Genome, World

Trace = Callable[[FrameType, str, Any], Any]
TRACED_EACH = 40
WORLDS_SHARE = 0.03
"""Of the cases; a world takes in some dozens of frames."""
GENOME_MAX = 24
PARENTS_MAX = 4096
WARM_UP_SHARE = 0.1
WATCHED_SHARE = 0.1
"""The last cases are tried with every allocation counted, which takes several times as long."""
FINDINGS_MAX = 20
RAW_MAX = 300
"""Bytes of a case that is noise."""

Case = Frames | Genome
_PACKAGE = Path(flowspec.__file__).parent


class Arcs:
    """The steps from line to line that were taken in some folders and files, by Python's own tracing."""

    def __init__(self, *places: Path) -> None:
        self._places = tuple(str(place) for place in places)
        self._known: set[tuple[str, int, int]] = set()
        self._is_ours: dict[str, bool] = {}

    def __len__(self) -> int:
        return len(self._known)

    def watch(self, call: Callable[[], None]) -> bool:
        """Runs `call`; whether it took a step that none did before. A debugger's or a coverage tool's own
        tracing stands still meanwhile."""
        before, old = len(self._known), sys.gettrace()
        sys.settrace(self._on_call)
        try:
            call()
        finally:
            sys.settrace(old)
        return len(self._known) > before

    def _on_call(self, frame: FrameType, event: str, value: Any) -> Trace | None:
        file = frame.f_code.co_filename
        is_ours = self._is_ours.get(file)
        if is_ours is None:
            is_ours = self._is_ours[file] = file.startswith(self._places)
        if not is_ours:
            return None
        last, known = 0, self._known

        def on_line(frame: FrameType, event: str, value: Any) -> Trace:
            nonlocal last
            if event == "line":
                known.add((file, last, frame.f_lineno))
                last = frame.f_lineno
            return on_line

        return on_line


@dataclass(slots=True)
class Tally:
    """What came of the cases; a world is wronged where a core raised `PeerError`. Bytes of growth are over
    the cases after the warm-up, `traced_bytes` over the last ones, where all are counted."""

    frames: int = 0
    cases: int = 0
    worlds: int = 0
    valid: int = 0
    refused: int = 0
    worlds_wronged: int = 0
    pipelines_lost: int = 0
    arcs: int = 0
    parents: int = 0
    seconds: float = 0.0
    frames_per_s: float = 0.0
    slowest_s: float = 0.0
    resident_bytes: int = 0
    resident_growth_bytes: int = 0
    traced_growth_bytes: int = 0
    traced_peak_bytes: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        return asdict(self)


class Hunt:
    """Cases from one seed. Findings are written to `folder`."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.tally = Tally()
        self._chance = random.Random(seed)
        self._folder = folder
        self._frames: list[Frames] = sample_frames()
        self._genomes: list[Genome] = [()]
        self._known: set[str] = set()
        heart = [_PACKAGE / name for name in ("core", "wire", "tree.py")]
        self._arcs = Arcs(*heart)

    def run(self, frames_max: int, seconds_max: float) -> Tally:
        """Until so many frames were tried, or so much time is over."""
        tally, process = self.tally, psutil.Process()
        started_s = time.monotonic()
        resident_bytes = traced_bytes = 0
        while tally.frames < frames_max and len(tally.findings) < FINDINGS_MAX:
            spent_s = time.monotonic() - started_s
            if spent_s >= seconds_max:
                break
            done = max(tally.frames / frames_max, spent_s / seconds_max)
            if not resident_bytes and done >= WARM_UP_SHARE:
                gc.collect()
                resident_bytes = process.memory_info().rss
            if not tracemalloc.is_tracing() and done >= 1 - WATCHED_SHARE:
                gc.collect()
                tally.resident_growth_bytes = process.memory_info().rss - (
                    resident_bytes or process.memory_info().rss
                )
                tracemalloc.start()
                traced_bytes = tracemalloc.get_traced_memory()[0]
            self._one()
        tally.seconds = time.monotonic() - started_s
        if tracemalloc.is_tracing():
            gc.collect()
            now_bytes, tally.traced_peak_bytes = tracemalloc.get_traced_memory()
            tally.traced_growth_bytes = now_bytes - traced_bytes
            tracemalloc.stop()
        tally.resident_bytes = process.memory_info().rss
        tally.frames_per_s = tally.frames / max(1e-9, tally.seconds)
        tally.arcs = len(self._arcs)
        tally.parents = len(self._frames) + len(self._genomes)
        return tally

    def _one(self) -> None:
        case = self._made()
        started_s = time.perf_counter()
        if self.tally.cases % TRACED_EACH:
            self._try(case)
            self.tally.slowest_s = max(self.tally.slowest_s, time.perf_counter() - started_s)
        elif self._arcs.watch(lambda: self._try(case)):
            self._keep(case)
        self.tally.cases += 1

    def _made(self) -> Case:
        chance = self._chance
        if chance.random() < WORLDS_SHARE:
            parent = chance.choice(self._genomes)
            kept = parent[: chance.randint(0, len(parent))]
            return (
                *kept,
                *(chance.getrandbits(32) for _ in range(chance.randint(1, max(1, GENOME_MAX - len(kept))))),
            )
        if chance.random() < 0.02:
            return [chance.randbytes(chance.randrange(RAW_MAX)) for _ in range(chance.randint(0, 3))]
        return mutated(chance.choice(self._frames), chance.choice(self._frames), chance)

    def _keep(self, case: Case) -> None:
        """A case becomes a parent; where there are too many, in the place of one that did."""
        parents: list[Any] = self._genomes if isinstance(case, tuple) else self._frames
        if len(parents) < PARENTS_MAX:
            parents.append(case)
        else:
            parents[self._chance.randrange(PARENTS_MAX)] = case

    def _try(self, case: Case) -> None:
        tally = self.tally
        try:
            if isinstance(case, tuple):
                ending = World(case).run()
                tally.worlds += 1
                tally.worlds_wronged += bool(ending.error)
                tally.pipelines_lost += ending.pipelines - 1
                tally.frames += ending.frames
                tally.refused += ending.refused
                tally.valid += ending.frames - ending.refused
            else:
                tally.frames += 1
                is_valid = try_frames(case)
                tally.valid += is_valid
                tally.refused += not is_valid
        except Exception as error:  # noqa: BLE001 - that anything at all comes out is what is looked for
            self._found(case, error)

    def _found(self, case: Case, error: Exception) -> None:
        """Notes a defect, each place in the code once."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        name = hashlib.sha256(f"{type(error).__name__} {where.filename} {where.lineno}".encode()).hexdigest()[
            :12
        ]
        if name in self._known:
            return
        self._known.add(name)
        path = self._folder / f"fuzz-{name}.json"
        path.write_text(
            json.dumps({"error": f"{type(error).__name__}: {error}"[:500], **dumped(case)}) + "\n", "utf-8"
        )
        self.tally.findings.append(
            {
                "error": f"{type(error).__name__}: {error}"[:200],
                "where": f"{Path(where.filename).name}:{where.lineno}",
                "file": str(path),
            }
        )


def try_frames(frames: Sequence[bytes]) -> bool:
    """Whether the codec takes the frames; what it takes must be what it would have written."""
    try:
        envelope = decode(frames)
    except PeerError as error:
        text = str(error)
        assert len(text) <= limits.TEXT_CHARS_MAX, f"the refusal has {len(text)} characters"
        assert text.isprintable(), "a refusal is one line"
        return False
    assert decode(encode(envelope)) == envelope, "what was decoded is not what encodes to it"
    return True


def dumped(case: Case) -> dict[str, Any]:
    if isinstance(case, tuple):
        return {"genome": list(case)}
    return {"frames": [base64.b64encode(frame).decode() for frame in case]}


def replay(path: Path) -> str:
    """Tries a written case again, and tells how it went; what went wrong then is raised again."""
    try:
        found = json.loads(path.read_text("utf-8"))
        genome = tuple(int(seed) for seed in found.get("genome", ()))
        frames = [base64.b64decode(frame) for frame in found.get("frames", ())]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: expected a case written by this command, but it cannot be read ({error})"
        ) from None
    if genome:
        ending = World(genome).run()
        return (
            f"{ending.frames} frames, {ending.refused} refused; {ending.pipelines} pipelines; the last "
            f"error: {ending.error or 'none'}"
        )
    return "valid" if try_frames(frames) else "refused"
