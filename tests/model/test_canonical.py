"""The bits of a row depend on the rows it sees, and on nothing else: every family, every precision, whatever
runs beside it.

Each logit is compared, bit for bit, with that of one slice of all layers which is given one token at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from flowspec.bench.checkpoints import VARIANTS, make_variant
from flowspec.core.protocol.precision import CACHE_AUTO, FILED
from flowspec.model.files import ModelFiles
from lab.golden.passes import Sizes, Stages, StepByStep, play
from tests import ggufs
from tests.nightly import NIGHT, nightly

DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
NAMES = sorted(VARIANTS)
FILE = "GGUF of"
CASES = sorted(
    {(name, DTYPES[(place + NIGHT) % 5]) for place, name in enumerate(NAMES)}
    | {(f"{FILE} {name}", FILED) for name in ("llama-tied", "gemma2", "qwen3.5-moe")}
)
"""Each family in one precision, each precision in six families; and files whose matrices stay as they are
packed, in all forms. At night all pairs of them."""
if NIGHT:
    CASES = [(name, dtype) for name in NAMES for dtype in DTYPES]
    CASES += [(f"{FILE} {name}", FILED) for name in sorted(ggufs.SHAPES)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFiles]:
    made: dict[str, ModelFiles] = {}

    def get(variant: str) -> ModelFiles:
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant.replace(" ", "-"))
            if variant.startswith(FILE):
                checkpoint = ggufs.make(folder / "checkpoint", variant.removeprefix(FILE).strip())
                made[variant] = ModelFiles(str(ggufs.convert(checkpoint, folder / "m.gguf", ggufs.KEPT)))
            else:
                make_variant(folder, variant)
                made[variant] = ModelFiles(str(folder))
        return made[variant]

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
    """Plays, and compares some rows of each job with step-by-step decoding; the rows of the largest job."""
    layers = files.config().get_text_config().num_hidden_layers
    alone = StepByStep(files, dtype, layers, cache)
    cuts = (0, *sorted(rng.sample(range(1, layers), stages - 1)), layers)
    torch.set_num_threads(threads)
    try:
        compared = largest = 0
        for found in play(rng, Stages(files, dtype, cuts, cache), requests, steps=4, sizes=sizes):
            largest = max(largest, len(found))
            for path, logits in rng.sample(sorted(found.items()), min(compare, len(found))):
                assert logits == alone.logits(path), f"{len(path)} tokens, {stages} stages, {threads} threads"
                compared += 1
    finally:
        torch.set_num_threads(1)
    assert compared > compare
    return largest


@pytest.mark.parametrize(("variant", "dtype"), CASES)
def test_every_logit_is_that_of_step_by_step_decoding(
    variant: str, dtype: str, checkpoint: Callable[[str], ModelFiles]
) -> None:
    files, rng = checkpoint(variant), random.Random(f"{variant} {dtype}")
    layers = files.config().get_text_config().num_hidden_layers
    check(
        files,
        dtype,
        rng,
        stages=rng.randrange(1, layers + 1),
        threads=rng.choice((1, 2, 3)),
        requests=rng.randrange(1, 5),
        sizes=Sizes(),
        compare=8,
    )


@pytest.mark.parametrize(
    ("variant", "dtype", "cache"),
    [
        ("llama-grouped", "float32", "q8_0"),
        ("gemma2", "bfloat16", "q8_0"),
        ("qwen3-moe", "int4", "q8_0"),
        ("phi3", "int8", "float16"),
        ("lfm2", "bfloat16", "q8_0"),
    ],
)
def test_keys_and_values_in_fewer_bits(
    variant: str, dtype: str, cache: str, checkpoint: Callable[[str], ModelFiles]
) -> None:
    files, rng = checkpoint(variant), random.Random(f"{variant} {dtype} {cache}")
    layers = files.config().get_text_config().num_hidden_layers
    check(files, dtype, rng, stages=layers, threads=2, requests=3, sizes=Sizes(), compare=8, cache=cache)


@pytest.mark.parametrize(
    ("variant", "dtype", "prompt"),
    [
        ("llama-grouped", "float32", 510),
        ("qwen3-moe", "bfloat16", 60),
        ("qwen3.5-text", "int8", 60),
        (f"{FILE} llama-tied", FILED, 60),
        *nightly(
            [],
            [
                ("gemma2", "float16", 60),
                ("phi3", "int8", 60),
                ("llama-grouped", "int4", 60),
                ("lfm2", "float32", 60),
            ],
        ),
    ],
)
def test_jobs_of_hundreds_of_rows(
    variant: str, dtype: str, prompt: int, checkpoint: Callable[[str], ModelFiles]
) -> None:
    """After a long prompt only once: step by step, each of its tokens is a pass."""
    files, rng = checkpoint(variant), random.Random(f"{variant} {dtype}")
    layers = files.config().get_text_config().num_hidden_layers
    sizes = Sizes(prompt=prompt, chunks=(512,), segments=(260,))
    largest = check(files, dtype, rng, stages=layers, threads=3, requests=2, sizes=sizes, compare=3)
    assert largest > 200
