"""Checkpoints that other tools quantised: read as those tools read them, computed with as they are packed."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.precision import FILED
from flowspec.errors import InputError
from flowspec.model.arithmetic.packed import FORMS, GROUP, numbers_of
from flowspec.model.files import ModelFiles
from flowspec.model.prequantised import PrequantisedTensors, scheme_of
from flowspec.model.reference import Reference
from flowspec.model.slice import Slice
from flowspec.model.spec import family_of
from flowspec.model.step_by_step import StepByStep
from flowspec.model.weight_files import LEVELS, NUMBERS, SafetensorsTensors
from flowspec.model.weights import Span
from flowspec.runtime.session import pick_dtype
from tests.checkpoints import SMALL, VARIANTS, make_checkpoint
from tests.model.slices import assert_faithful, load_foretold, rewrite
from tests.nightly import nightly
from tests.prequantised import convert

PUBLISHED = sorted((Path(__file__).parent / "prequantised").glob("*.safetensors"))
NAME = "model.layers.0.self_attn.k_proj.weight"
FORMS_OF = {
    **dict.fromkeys(
        ("ct-w4a16-sym-g32", "ct-w4a16-sym-g128", "gptq-4bit-g32-sym", "gptq-4bit-g128-sym"), "Q4_0"
    ),
    **dict.fromkeys(("ct-w4a16-asym-g32", "gptq-4bit-g32-asym", "gptq_v2-4bit-g32-asym"), "Q5_0"),
    **dict.fromkeys(("awq-4bit-g32", "awq-4bit-g128"), "Q5_0"),
    "ct-mxfp4": "MXFP4",
    **dict.fromkeys(("ct-w8a16-channel", "ct-w8a8", "gptq-8bit-g32"), "Q8_0"),
    **dict.fromkeys(("ct-fp8-block", "ct-fp8-dynamic", "fp8-block128"), "Q8_0"),
    **dict.fromkeys(("ct-w4a16-actorder", "gptq-4bit-desc-act"), "Q8_0"),
}


def published(path: Path) -> tuple[PrequantisedTensors, dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        names, said = list(file.keys()), file.metadata()
    found = scheme_of({"quantization_config": json.loads(said["quantization_config"])}, path.name)
    assert found is not None
    known = (*NUMBERS, *LEVELS)
    raw = SafetensorsTensors(path.name, dict.fromkeys(names, path.name), path.with_name, known)
    return PrequantisedTensors(path.name, found, raw), said


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_matrix_is_what_the_tool_that_wrote_it_makes_of_it(path: Path) -> None:
    assert len(PUBLISHED) == len(FORMS_OF)
    tensors, said = published(path)
    shape = tuple(json.loads(said["shape"]))
    assert list(tensors) == [NAME]
    assert tensors.shape(NAME) == shape
    numbers = tensors.load(NAME, shape)
    assert hashlib.sha256((numbers + 0.0).tobytes()).hexdigest() == said["sha256"]
    form = tensors.form(NAME)
    assert form == FORMS_OF[path.stem]
    panels = tensors.panels(NAME, shape)
    assert panels.nbytes == tensors.packed_bytes(NAME)
    held = numbers_of(FORMS[form], panels)
    if not tensors.is_rounded_anew(NAME):
        assert np.array_equal(held, numbers)
        return
    groups, off = (np.abs(each).reshape(shape[0], -1, GROUP).max(2) for each in (numbers, held - numbers))
    assert (off <= groups / 254 * 1.1).all()


REFUSED = json.loads((Path(__file__).parents[1] / "data/quantization_configs.json").read_text("utf-8"))


@pytest.mark.parametrize(("given", "expected"), REFUSED)
def test_what_is_not_computed_with_is_refused_by_name(given: Any, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        scheme_of({"quantization_config": given}, "m")
    text = str(caught.value)
    assert text.startswith("model 'm'")
    assert expected in text
    assert "\n" not in text


MADE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq": ("llama-grouped", "gptq", {}),
    "awq": ("llama-grouped", "awq", {}),
    "mxfp4": ("gpt-oss", "mxfp4", {}),
    "gptq of gemma4": ("gemma4-text", "gptq", {}),
    "awq of gemma4": ("gemma4-text", "awq", {"is_whole": False}),
    "experts apart in gptq": ("gemma4-mixture", "gptq", {}),
    "experts apart in fp8": ("qwen3-moe", "fp8", {}),
    "experts stacked in fp8": ("gemma4-mixture", "fp8", {"experts": "stacked"}),
    "more experts stacked in fp8": ("qwen3-moe-fused", "fp8", {"experts": "stacked"}),
    "experts in numbers beside awq": ("gemma4-mixture", "awq", {"experts": "plain"}),
}
"""Variant, method, and what more `convert` is told."""
EACH_WAY = ["awq", "mxfp4", "experts apart in gptq", "experts stacked in fp8"]


@pytest.fixture(scope="module")
def made(variant: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("prequantised")

    @functools.cache
    def source(name: str) -> Path:
        if not name.startswith("gemma4"):
            return variant(name)
        family, shape = VARIANTS[name]
        shape = {**SMALL, **shape, "initializer_range": 0.03}  # wider, and rounding moves much
        if name == "gemma4-text":
            return make_checkpoint(folder / name, family, {**shape, "hidden_size_per_layer_input": GROUP})
        return make_checkpoint(folder / name, family, {"text_config": shape, "tie_word_embeddings": True})

    @functools.cache
    def get(name: str) -> Path:
        of, method, options = MADE[name]
        return convert(source(of), folder / f"made {name}", method, **options)

    return get


@pytest.mark.parametrize("method", nightly(EACH_WAY, list(MADE)))
def test_a_model_runs_as_it_is_packed_and_is_faithful(method: str, made: Callable[[str], Path]) -> None:
    files = ModelFiles(str(made(method)))
    config = files.config()
    family_of(config, files.model)
    assert pick_dtype(None, files, config) == FILED
    count = config.num_hidden_layers
    for span in (Span(first=0, end=1, count=count), Span(first=1, end=count, count=count)):
        load_foretold(files, span, FILED)
    assert_faithful(made(method), FILED)
    for dtype in ("bfloat16", "int4") if method in ("awq", "experts stacked in fp8") else ():
        assert len(StepByStep.load(files, dtype).generate((5, 6, 7), Sampling(), 4, frozenset())) == 4


def test_floats_of_4_bits_are_those_of_transformers_and_stay_as_they_are(made: Callable[[str], Path]) -> None:
    files, raw = ModelFiles(str(made("mxfp4"))), load_file(made("mxfp4") / "model.safetensors")
    tensors, weights = files.tensors(), Reference(files, "float32").model.state_dict()
    for joined in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{joined}"
        expected = convert_moe_packed_tensors(
            raw[f"{name}_blocks"], raw[f"{name}_scales"], dtype=torch.float32
        )
        assert torch.equal(weights[name], expected)
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.3.{part}.weight"
        shape = tensors.shape(name)
        assert (tensors.form(name), tensors.is_rounded_anew(name)) == ("MXFP4", False)
        panels = tensors.panels(name, shape)
        assert panels.nbytes == tensors.packed_bytes(name) == math.prod(shape) * 17 // 32
        assert np.array_equal(numbers_of(FORMS["MXFP4"], panels), tensors.load(name, shape))


def damaged(folder: Path, to: Path, change: Callable[[Any], object]) -> ModelFiles:
    to.mkdir()
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    shutil.copy(folder / "model.safetensors", to)
    rewrite(to, change)
    return ModelFiles(str(to))


STEM = "model.layers.0.mlp.up_proj."
GATE_UP = "model.language_model.layers.0.experts.gate_up_proj"
MLP_GATE = "model.language_model.layers.0.mlp.gate_proj.weight"
Tensors = dict[str, torch.Tensor]


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).clone()})


def with_infinite_scale(tensors: Tensors) -> None:
    tensors[STEM + "scales"][0, 0] = math.inf


OF_GPTQ = [
    (lambda tensors: tensors.pop(STEM + "qzeros"), f"has no tensor {STEM}qzeros"),
    (lambda tensors: tensors.pop(STEM + "qweight"), f"has no tensor {STEM}weight"),
    (changed(STEM + "scales", lambda old: old[:-1]), f"tensor {STEM}scales of"),
    (changed(STEM + "qweight", lambda old: old[:-1]), f"tensor {STEM}weight of"),
    (changed(STEM + "qzeros", lambda old: old * 0), "has levels from 0 to 14, of which its config"),
    (changed(STEM + "g_idx", lambda old: old * 0 + 9), "g_idx of"),
    (changed(STEM + "g_idx", lambda old: old * 0 + 1), "g_idx of"),
    (with_infinite_scale, "has a scale that no weight has"),
    (changed(STEM + "qweight", lambda old: old[None]), f"{STEM}qweight of"),
    (changed(STEM + "qweight", lambda old: old.to(torch.int16)), f"tensor {STEM}qweight of"),
    (lambda tensors: tensors.update({STEM + "bias": torch.ones(2)}), f"the checkpoint holds {STEM}bias"),
]
OF_FP8 = [
    (lambda tensors: tensors.pop(f"{GATE_UP}_scale_inv"), "experts.0.gate_up_proj.weight of"),
    (changed(GATE_UP, lambda old: old[:-1]), f"tensor {GATE_UP} of"),
    (changed(f"{GATE_UP}_scale_inv", lambda old: torch.ones(6, 3, 5)), "0.gate_up_proj.weight_scale_inv of"),
    (
        lambda tensors: tensors.update({f"{GATE_UP}_scale": tensors.pop(f"{GATE_UP}_scale_inv")}),
        f"the checkpoint holds {GATE_UP}_scale, for which",
    ),
    (lambda tensors: tensors.pop(f"{MLP_GATE}_scale_inv"), "mlp.gate_proj.weight of"),
]
"""What is done to a checkpoint's tensors, and what is then told."""
DAMAGES = [("gptq", *each) for each in OF_GPTQ] + [("experts stacked in fp8", *each) for each in OF_FP8]


@pytest.mark.parametrize(("method", "change", "expected"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_matrix_is_refused_in_one_line(
    method: str,
    change: Callable[[Tensors], object],
    expected: str,
    made: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    files = damaged(made(method), tmp_path / "damaged", change)
    with pytest.raises(InputError) as caught:
        Slice.load(files, Span(first=0, end=1, count=4), FILED)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_numbers_that_are_not_packed_have_zero_points(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
    said = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    generator, stem = np.random.default_rng(0), NAME.removesuffix("weight")
    levels, zeros = (generator.integers(-8, 8, (40, count), np.int8) for count in (3 * GROUP, 3))
    scales = generator.uniform(0.01, 0.1, (40, 3)).astype(np.float16)
    made = {"weight": levels, "weight_scale": scales, "weight_zero_point": zeros}
    path = tmp_path / "ct.safetensors"
    save_arrays(
        {stem + leaf: found for leaf, found in made.items()}, path, {"quantization_config": json.dumps(said)}
    )
    tensors, _ = published(path)
    expected = np.empty((40, 3 * GROUP), np.float32)
    for row, column in np.ndindex(expected.shape):
        group = column // GROUP
        level = int(levels[row, column]) - int(zeros[row, group])
        expected[row, column] = level * float(scales[row, group])
    assert np.array_equal(tensors.load(NAME, (40, 96)), expected)
    assert tensors.form(NAME) == "Q5_0"
    held = numbers_of(FORMS["Q5_0"], tensors.panels(NAME, (40, 96)))
    assert np.array_equal(held[:40], expected)
