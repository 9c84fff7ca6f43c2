"""Is the model faithful: what is right passes in every precision, and one wrong scale does not."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.torch import load_file, save_file

from flowspec.bench import faithfulness
from flowspec.bench.faithfulness import PERPLEXITY_LIMIT, TOKENS, assess, check, read_windows
from flowspec.cli.verify import report
from flowspec.core.protocol.precision import OF_ANY_MODEL
from flowspec.model.arithmetic.arrays import F32
from flowspec.model.arithmetic.packed import GROUP
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.rounding import ROUNDINGS
from flowspec.model.slice import Slice
from flowspec.model.step_by_step import StepByStep
from tests.checkpoints import SMALL, VARIANTS, make_checkpoint, make_variant
from tests.nightly import nightly

pytestmark = pytest.mark.slow
KEYS, DOWN = ("self_attn.k_proj", 2.0), ("down_proj", 0.95)
RIGHT = {
    "largest": 0.1,
    "limit": 0.1,
    "typical": 0.01,
    "typical_limit": 0.01,
    "perplexity": 100.4,
    "reference": 100.0,
    "perplexity_limit": PERPLEXITY_LIMIT,
    "matrix": {"matrix": "a", "output": 3, "share": 0.01},
    "matrix_limit": 0.01,
}
TIED, MIXTURE = "llama-tied", "qwen3-moe"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_variant(tmp_path_factory.mktemp(name), name) for name in (TIED, MIXTURE)}


def damaged(folder: Path, out: Path, tensor: str, factor: float) -> Path:
    """The same checkpoint with other numbers in a group of one output of a matrix: its last group of
    weights."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    tensors[tensor][5, -GROUP:] *= factor
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize(
    ("name", "dtype"),
    nightly(
        [(TIED, "float32"), (TIED, "int8"), (MIXTURE, "bfloat16"), (MIXTURE, "int4")],
        list(itertools.product((TIED, MIXTURE), OF_ANY_MODEL)),
    ),
)
def test_the_model_itself_is_faithful(folders: dict[str, Path], name: str, dtype: str) -> None:
    files = ModelFiles(str(folders[name]))
    found = check(files, dtype, StepByStep.load(files, dtype))
    assert found["faults"] == []
    assert (found["dtype"], found["text"], found["tokens"]) == (dtype, "random tokens", TOKENS)
    assert 0 < found["typical"] < found["largest"] <= found["limit"]
    assert (found["unrounded"] is None) == (dtype not in ROUNDINGS)
    assert found["unrounded"] != found["reference"], "rounding weights moves perplexity"
    assert found["change"] == found["perplexity"] / found["reference"] - 1


@pytest.mark.parametrize(
    ("model", "place", "factor", "dtype"),
    nightly(
        [(TIED, *KEYS, "bfloat16"), (MIXTURE, *DOWN, "float32"), (MIXTURE, *DOWN, "int4")],
        [
            (*each, dtype)
            for each in ((TIED, *KEYS), (TIED, *DOWN), (MIXTURE, *DOWN))
            for dtype in OF_ANY_MODEL
        ],
    ),
)
def test_one_wrong_scale_is_found(
    folders: dict[str, Path],
    model: str,
    place: str,
    factor: float,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One scale of one group in int4, and as much in the others; of a mixture's experts, too."""
    monkeypatch.setattr(faithfulness, "TOKENS", 37)
    folder = folders[model]
    names = load_file(folder / "model.safetensors")
    name = next(
        each for each in names if each.startswith("model.layers.2.") and each.endswith(f"{place}.weight")
    )
    wrong = StepByStep.load(ModelFiles(str(damaged(folder, tmp_path / "damaged", name, factor))), dtype)
    found = check(ModelFiles(str(folder)), dtype, wrong)
    worst = found["matrix"]
    assert worst["output"] == 5
    assert worst["matrix"].startswith("layers.2.")
    assert place.rpartition(".")[2] in worst["matrix"]
    assert [fault for fault in found["faults"] if f"output 5 of {worst['matrix']} is off by" in fault]


@pytest.mark.parametrize("dtype", nightly(["int4"], ["bfloat16", "int4"]))
def test_a_kernel_that_is_wrong_for_one_row_only_is_found(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_variant(tmp_path, "llama-grouped")
    files, right = ModelFiles(str(folder)), Slice.logits

    def garbage(self: Slice, hidden: npt.NDArray[Any]) -> F32:
        logits = right(self, hidden)
        return np.roll(logits, 1, axis=1) if len(hidden) == 1 else logits

    whole = StepByStep.load(files, dtype)
    monkeypatch.setattr(Slice, "logits", garbage)
    found = check(files, dtype, whole)
    assert found["largest"] > 2 * found["limit"]
    assert found["matrix"]["share"] <= found["matrix_limit"]
    assert found["faults"][0].startswith("a logit is off by")


def test_what_logits_hide_perplexity_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of a logit less is within what bfloat16 explains of one, but all tokens of the text have it."""
    files, right = ModelFiles(BUNDLED), Slice.logits
    seen = sorted({token for window in read_windows(files)[1] for token in window})

    def shifted(self: Slice, hidden: npt.NDArray[Any]) -> F32:
        logits = right(self, hidden)
        logits[:, seen] -= 0.2
        return logits

    monkeypatch.setattr(Slice, "logits", shifted)
    found = check(files, "bfloat16", StepByStep.load(files, "bfloat16"))
    assert found["text"] == "the shipped text"
    assert found["largest"] <= found["limit"]
    assert found["change"] > found["perplexity_limit"] == PERPLEXITY_LIMIT, "no error of ours makes it wider"
    typical, perplexity = (fault.partition(",")[0] for fault in found["faults"])
    assert typical == f"logits are off by {found['typical']:.3g} typically"
    assert perplexity == f"perplexity is {found['perplexity']:.5g}"


def test_chance_makes_no_untrained_model_unfaithful(tmp_path: Path) -> None:
    """Rounding moves the states of this one far: perplexity is off by more than half a percent, and by less
    than chance makes of as much rounding."""
    family, shape = VARIANTS["qwen3.5-text"]
    files = ModelFiles(str(make_checkpoint(tmp_path, family, {**SMALL, **shape, "vocab_size": 4096}, seed=1)))
    found = check(files, "int8", StepByStep.load(files, "int8"))
    assert PERPLEXITY_LIMIT < found["perplexity_limit"] < 2 * PERPLEXITY_LIMIT
    assert found["faults"] == []


def test_each_figure_has_its_limit() -> None:
    assert assess(RIGHT)["is_faithful"]
    nan, inf = float("nan"), float("inf")
    changes: list[dict[str, Any]] = [{name: each} for name in ("largest", "typical") for each in (0.11, nan)]
    changes += [{"perplexity": each} for each in (100.6, 99.4, inf, nan)]
    changes += [{"matrix": {"matrix": "a", "output": 3, "share": share}} for share in (0.02, nan)]
    for change in changes:
        found = assess({**RIGHT, **change})
        assert len(found["faults"]) == 1, found
        json.dumps(report([], found, "")["faithful"], allow_nan=False)


def test_the_text_is_read_in_equal_windows_within_the_context(tmp_path: Path) -> None:
    name, windows = read_windows(ModelFiles(BUNDLED))
    assert (name, [len(window) for window in windows]) == ("the shipped text", [500] * 4)
    files = ModelFiles(str(make_variant(tmp_path, "phi3-longrope")))
    name, windows = read_windows(files)
    assert (name, [len(window) for window in windows]) == ("random tokens", [400] * 5)
    assert all(3 <= token < files.config().vocab_size for window in windows for token in window)
    assert read_windows(files)[1] == windows, "the same every time"
    whole = StepByStep.load(files, "float32")
    assert [len(rows) for rows in whole.logits(range(3, 13), (2, 3))] == [2, 3, 2, 3]
    assert [len(rows) for rows in whole.logits(range(3, 10), (2, 3))] == [2, 3, 2]
