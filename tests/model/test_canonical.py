"""The bits of a row depend on the rows it sees, and on nothing else: every family, every precision, whatever
runs beside it.

Each logit is compared, bit for bit, with that of one slice of all layers which is given one token at a time.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from flowspec.core.protocol.precision import CACHE_AUTO, FILED, Q8_0
from flowspec.model.files import ModelFiles
from lab.golden.passes import Sizes, Stages, StepByStep, play
from tests import ggufs
from tests.checkpoints import VARIANTS
from tests.model.slices import threads_of
from tests.nightly import NIGHT, nightly

DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
NAMES = sorted(VARIANTS)
FILE = "GGUF of"
FEWER_BITS = [
    ("llama-grouped", "float32", Q8_0),
    ("gemma2", "bfloat16", Q8_0),
    ("qwen3-moe", "int4", Q8_0),
    ("phi3", "int8", "float16"),
    ("lfm2", "bfloat16", Q8_0),
]
"""Keys and values."""
CASES = [
    *((name, DTYPES[place % 5], CACHE_AUTO) for place, name in enumerate(NAMES)),
    *((f"{FILE} {name}", FILED, CACHE_AUTO) for name in ("llama-tied", "gemma2", "qwen3.5-moe")),
]
"""Each family in one precision, each precision in six families; and files whose matrices stay as they are
packed, in all forms. At night all pairs of them."""
if NIGHT:
    CASES = [(name, dtype, CACHE_AUTO) for name in NAMES for dtype in DTYPES]
    CASES += [(f"{FILE} {name}", FILED, CACHE_AUTO) for name in sorted(ggufs.SHAPES)]


@pytest.fixture(scope="module")
def checkpoint(
    variant: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], ModelFiles]:
    @functools.cache
    def get(name: str) -> ModelFiles:
        if not name.startswith(FILE):
            return ModelFiles(str(variant(name)))
        folder = tmp_path_factory.mktemp("gguf")
        made = ggufs.make(folder / "checkpoint", name.removeprefix(FILE).strip())
        return ModelFiles(str(ggufs.convert(made, folder / "m.gguf", ggufs.KEPT)))

    return get


def check(
    files: ModelFiles,
    dtype: str,
    rng: random.Random,
    *,
    stages: int,
    threads: int,
    requests: int,
    sizes: Sizes,
    compare: int,
    cache: str = CACHE_AUTO,
) -> int:
    """Plays with so many threads, and compares some rows of each job with step-by-step decoding by one; how
    many rows the largest job has."""
    layers = len(files.spec.layers)
    alone = StepByStep(files, dtype, layers, cache)
    cuts = (0, *sorted(rng.sample(range(1, layers), stages - 1)), layers)
    with threads_of(threads):
        jobs = list(play(rng, Stages(files, dtype, cuts, cache), requests, steps=nightly(2, 4), sizes=sizes))
    for found in jobs:
        for path, logits in rng.sample(sorted(found.items()), min(compare, len(found))):
            assert logits == alone.logits(path), f"{len(path)} tokens, {stages} stages, {threads} threads"
    assert sum(map(len, jobs)) > compare
    return max(map(len, jobs))


@pytest.mark.parametrize(("name", "dtype", "cache"), [*CASES, *FEWER_BITS])
def test_every_logit_is_that_of_step_by_step_decoding(
    name: str, dtype: str, cache: str, checkpoint: Callable[[str], ModelFiles]
) -> None:
    files, rng = checkpoint(name), random.Random(f"{name} {dtype} {cache} {NIGHT}")
    check(
        files,
        dtype,
        rng,
        stages=rng.randrange(1, len(files.spec.layers) + 1),
        threads=rng.choice(nightly((1, 2), (1, 2, 3))) if dtype == "float32" or NIGHT else 1,
        requests=rng.randrange(1, nightly(3, 5)),
        sizes=nightly(Sizes(prompt=8, chunks=(1, 3, 40), segments=(2, 9, 20)), Sizes()),
        compare=nightly(2, 8),
        cache=cache,
    )


@pytest.mark.parametrize(
    ("name", "dtype", "prompt"),
    [
        ("llama-grouped", "float32", nightly(30, 510)),
        ("qwen3.5-text", "bfloat16", nightly(20, 60)),
        *nightly(
            [],
            [
                ("qwen3.5-text", "int8", 60),
                (f"{FILE} llama-tied", FILED, 60),
                ("qwen3-moe", "bfloat16", 60),
                ("gemma2", "float16", 60),
                ("phi3", "int8", 60),
                ("llama-grouped", "int4", 60),
                ("lfm2", "float32", 60),
            ],
        ),
    ],
)
def test_jobs_of_hundreds_of_rows(
    name: str, dtype: str, prompt: int, checkpoint: Callable[[str], ModelFiles]
) -> None:
    """After a long prompt only once: step by step, each of its tokens is a pass."""
    files, rng = checkpoint(name), random.Random(f"{name} {dtype}")
    layers = len(files.spec.layers)
    sizes = Sizes(prompt=prompt, chunks=(512,), segments=(260,))
    largest = check(
        files,
        dtype,
        rng,
        stages=layers,
        threads=2,
        requests=nightly(1, 2),
        sizes=sizes,
        compare=nightly(2, 3),
    )
    assert largest > 200
