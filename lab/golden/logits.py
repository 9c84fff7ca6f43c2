"""Digests of logits: of made checkpoints of every family, in each precision and kind of cache, and of GGUF
files that stay packed.

The logits of a row depend on the rows that it sees and on nothing else. So one digest is seen several times:
tokens one by one, all in one job, in slices, by several threads. What `play` computes has trees, commits and
rows that die between layers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec.core.protocol.precision import CACHE_AUTO, FILED
from flowspec.model.arithmetic.compiled import use_threads
from flowspec.model.engines import run_trial
from flowspec.model.files import ModelFiles
from lab.golden.passes import Node, Path_, Sizes, Stages, StepByStep, play
from lab.golden.place import Place, file_digest
from lab.golden.recording import Absent, Observation
from tests import ggufs
from tests.checkpoints import VARIANTS, VOCABULARY_SIZE, make_variant

PRECISIONS = ("float32", "bfloat16", "float16", "int8", "int4")
TOKENS = 24
"""Of a short text; its logits have a digest each, so that the first position that differs is told."""
ROW_CHARS = 8
LONG = 400
"""Tokens of a long context: below the least that a made checkpoint takes."""
LONG_EVERY = 40
"""Every so many of its positions have a digest of their own."""
LONG_CASES = (
    ("llama-grouped", "float32"),
    ("llama-rope3", "int8"),
    ("mistral-sliding", "bfloat16"),
    ("gemma2", "int4"),
    ("gemma3", "bfloat16"),
    ("gemma4", "float32"),
    ("phi3", "float16"),
    ("lfm2", "bfloat16"),
    ("qwen3.5", "float32"),
    ("gpt-oss", "bfloat16"),
)
CACHES = (
    ("llama-grouped", "float32", "q8_0"),
    ("llama-grouped", "bfloat16", "q8_0"),
    ("gemma2", "bfloat16", "q8_0"),
    ("qwen3-moe", "int4", "q8_0"),
    ("gemma4", "int8", "q8_0"),
    ("lfm2", "bfloat16", "q8_0"),
    ("phi3", "int8", "float16"),
    ("qwen3.5", "float32", "float16"),
)
FILES = tuple(sorted(ggufs.SHAPES))
"""Families of which GGUF files are made, with matrices in all forms that stay packed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model in one precision; `name` begins its keys."""

    name: str
    dtype: str
    cache: str = CACHE_AUTO
    is_long: bool = False


def observe(place: Place, name: str) -> Iterator[Observation | Absent]:
    use_threads(1)
    for variant in filter(place.wants, VARIANTS):
        folder = place.home / "checkpoints" / variant
        make_variant(folder, variant)
        yield Observation(key=f"{variant}/weights", value=file_digest(folder / "model.safetensors"))
        files = ModelFiles(str(folder))
        cases = [Case(name=f"{variant}/{dtype}", dtype=dtype) for dtype in PRECISIONS]
        cases += [
            Case(name=f"{variant}/{dtype}/cache {cache}", dtype=dtype, cache=cache)
            for own, dtype, cache in CACHES
            if own == variant
        ]
        cases += [
            Case(name=f"{variant}/{dtype}/long", dtype=dtype, is_long=True)
            for own, dtype in LONG_CASES
            if own == variant
        ]
        for case in cases:
            yield from digests(files, case)
    for shape in FILES:
        if not place.wants(f"{shape}/file"):
            continue
        folder = place.home / "checkpoints" / f"gguf of {shape}"
        path = ggufs.convert(ggufs.make(folder, shape), folder / "model.gguf", ggufs.KEPT)
        yield Observation(key=f"{shape}/file/weights", value=file_digest(path))
        yield from digests(ModelFiles(str(path)), Case(name=f"{shape}/file", dtype=FILED))


def digests(files: ModelFiles, case: Case) -> Iterator[Observation]:
    """All digests of one model in one precision, each as often as it has a way to be computed."""
    rng = random.Random(case.name)
    layers = len(files.spec.layers)
    tokens = tuple(rng.randrange(3, VOCABULARY_SIZE) for _ in range(LONG if case.is_long else TOKENS))
    every = LONG_EVERY if case.is_long else 1

    def seen(at: str, rows: Mapping[Path_, bytes]) -> Observation:
        return Observation(key=f"{case.name}/text", at=at, value=rows_value(tokens, rows, every))

    yield Observation(key=f"{case.name}/arithmetic", value=run_trial(case.dtype, "cpu").arithmetics[0])
    alone = StepByStep(files, case.dtype, layers, case.cache)
    yield seen("one by one", {tokens[:end]: alone.logits(tokens[:end]) for end in range(1, len(tokens) + 1)})
    middle = rng.randrange(1, layers)
    for cuts, threads, chunk in (((0, layers), 1, len(tokens)), ((0, middle, layers), 2, 7)):
        stages = Stages(files, case.dtype, cuts, case.cache)
        use_threads(threads)
        yield seen(
            f"{chunk} rows at once, {len(cuts) - 1} stages, {threads} threads", text(stages, tokens, chunk)
        )
        use_threads(1)
    if not case.is_long:
        stages = Stages(files, case.dtype, (0, middle, layers), case.cache)
        found = list(play(rng, stages, requests=2, steps=4, sizes=Sizes()))
        yield Observation(key=f"{case.name}/trees", value=[job_value(rows) for rows in found])


def text(stages: Stages, tokens: Sequence[int], chunk: int) -> dict[Path_, bytes]:
    """The logits of each token of a text that is committed from the start, `chunk` rows a job."""
    stages.open(1)
    nodes: list[Node] = []
    for end in range(1, len(tokens) + 1):
        nodes.append(Node(tuple(tokens[:end]), nodes[-1] if nodes else None))
    found: dict[Path_, bytes] = {}
    for first in range(0, len(nodes), chunk):
        rows = nodes[first : first + chunk]
        for node in rows:
            stages.give_slots(1, node, is_committed=True)
        found |= stages.run([(1, node) for node in rows])
    return found


def rows_value(tokens: Path_, rows: Mapping[Path_, bytes], every: int) -> dict[str, Any]:
    """A digest of all logits, and short ones by position."""
    ordered = [rows[tokens[:end]] for end in range(1, len(tokens) + 1)]
    short = [hashlib.sha256(row).hexdigest()[:ROW_CHARS] for row in ordered[every - 1 :: every]]
    return {"all": hashlib.sha256(b"".join(ordered)).hexdigest(), "positions": short}


def job_value(rows: Mapping[Path_, bytes]) -> str:
    """How many rows a job had at its end, and a digest of which these are and of their logits."""
    found = hashlib.sha256()
    for path, logits in sorted(rows.items()):
        found.update(repr(path).encode())
        found.update(logits)
    return f"{len(rows)} rows {found.hexdigest()[: 2 * ROW_CHARS]}"
