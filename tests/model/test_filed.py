"""Matrices that stay as a GGUF file packs them: the weights are the file's to the last bit, products are
those of rounded rows, and memory is the file's."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGUFReader
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.precision import FILED
from flowspec.errors import InputError
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.compiled import Level
from flowspec.model.arithmetic.packed import FORMS, numbers_of, packed
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.tensors import levels_of
from flowspec.model.gpu import Gpu
from flowspec.model.layer import Linear, Packed
from flowspec.model.slice import Slice
from flowspec.model.weights import EMBEDDING, LM_HEAD, Span
from flowspec.plan.memory import stage_memory
from flowspec.plan.shape import shape_of
from flowspec.runtime.plan_inputs import counted_weights
from flowspec.runtime.session import pick_dtype
from tests.ggufs import KEPT, PLAIN, convert, make
from tests.model.defined_products import packed_product
from tests.model.functions import BUILDS, are_alike, built, multiplied
from tests.model.slices import assert_faithful, load_foretold
from tests.nightly import nightly

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where float16 lie in a block; in other types at its beginning, but MXFP4, which has an exponent there."""


def rows_of(kind: str, outputs: int, units: int, seed: int) -> np.ndarray:
    """Random rows of a file, whose scales are numbers."""
    generator = np.random.default_rng(seed)
    size = GGML_QUANT_SIZES[Kind[kind]][1]
    found = generator.integers(0, 256, (outputs, units, size), np.uint8)
    if kind == "MXFP4":
        found[..., 0] = generator.integers(118, 138, (outputs, units), np.uint8)
        return found.reshape(outputs, -1)
    for at in HALVES.get(kind, (0,)):
        scales = generator.normal(size=(outputs, units, 1)).astype(np.float16)
        found[..., at : at + 2] = scales.view(np.uint8)
    return found.reshape(outputs, -1)


def panels_with(kind: str, outputs: int, units: int, seed: int) -> np.ndarray:
    levels = levels_of(kind, rows_of(kind, outputs, units, seed), units * FORMS[kind].unit)
    found: np.ndarray = packed(FORMS[kind], levels)
    return found


def test_forms_are_numbered_in_order() -> None:
    assert FORMS.keys() <= Kind.__members__.keys()
    assert [form.number for form in FORMS.values()] == list(range(len(FORMS)))


@pytest.mark.arm
@pytest.mark.parametrize("kind", FORMS)
@settings(max_examples=nightly(20, 500))
@given(outputs=st.integers(1, 40), units=st.integers(1, 3), seed=st.integers(0, 99))
def test_panels_hold_the_files_weights_in_as_many_bytes(
    kind: str, outputs: int, units: int, seed: int
) -> None:
    form, rows = FORMS[kind], rows_of(kind, outputs, units, seed)
    panels = packed(form, levels_of(kind, rows, units * form.unit))
    assert panels.size * outputs == rows.nbytes * -(-outputs // 16) * 16
    assert panels.size == form.panel_bytes(units * form.unit, outputs)
    ids = np.random.default_rng(seed).integers(0, outputs, 9)
    found = plain.packed_rows(form, panels, ids)
    assert np.array_equal(found, dequantize(rows, Kind[kind])[ids])
    assert not numbers_of(form, panels)[outputs:].any(), "what fills up the last panel"


@pytest.mark.arm
@pytest.mark.parametrize("kind", FORMS)
def test_products_are_those_of_the_files_weights_with_rows_that_are_near(kind: str) -> None:
    """An error in an unpacked scale or minimum moves an output by far more than rounding rows does."""
    form = FORMS[kind]
    for outputs, units in ((33, 1), (48, 4)):
        matrix = Packed(kind, panels_with(kind, outputs, units, 5), outputs)
        weights = dequantize(rows_of(kind, outputs, units, 5), Kind[kind]).astype(np.float64)
        generator, noise = np.random.default_rng(7), list[float]()
        for count in (1, 2, 7, 16):
            rows = generator.standard_normal((count, units * form.unit), np.float32)
            off = np.abs(multiplied(rows, matrix) - rows.astype(np.float64) @ weights.T)
            groups = np.abs(rows).reshape(count, -1, 32).max(axis=2)  # largest of each group
            sizes = np.abs(weights).reshape(outputs, -1, 32).sum(axis=2)
            assert (off <= 1e-4 * sizes.sum(axis=1) + groups @ sizes.T / 254).all()
            noise.extend((off**2).tolist())
        # of all rows: what rounding one row does goes the same way in all outputs
        assert np.sqrt(np.mean(noise) / (weights**2).sum(axis=1).mean()) < 0.012


@pytest.mark.arm
@pytest.mark.parametrize("level", BUILDS, ids="".join)
@pytest.mark.parametrize("is_fine", [False, True])
def test_products_are_their_definition_whatever_rows_are(is_fine: bool, level: Level) -> None:
    """Rows of zeros, next to nothing, huge, between levels, or no numbers, rounded once or finely."""
    for kind, form in FORMS.items():
        for inputs, count in ((2 * form.unit, 17), (3 * form.unit - (form.unit == 32) * 21, 9)):
            panels = panels_with(kind, 37, -(-inputs // form.unit), 4)
            rows = np.random.default_rng(inputs).standard_normal((count, inputs), np.float32)
            rows *= np.float32(10) ** (np.arange(inputs) // 32 % 9 - 4)
            rows[0], rows[1, 40], rows[2, 3], rows[3, 35:37] = 0, np.nan, np.inf, (-np.inf, 1)
            rows[4], rows[5] = 1e-30, np.nextafter(np.float32(1e-30), np.float32(1))
            rows[6], rows[7] = rows[7] * 1e25, np.arange(inputs) % 255 / 2 - 63.5
            rows[8] = np.where(np.arange(inputs) % 32 == 0, 127, np.arange(inputs) * 17 % 8191 / 256 - 16)
            expected = packed_product(rows, form, panels, 37, is_fine)
            with built(level):
                found = multiplied(rows, Packed(kind, panels, 37), are_logits=is_fine)
            assert are_alike(found, expected), kind
            assert np.isnan(found[1:4]).all(), "what overflowed must show, not turn into numbers"
            assert np.isfinite(found[4:]).all()
            assert not found[0].any()


def test_a_gpu_takes_rows_as_they_are() -> None:
    engine = Gpu("float32", "plain", "weights", "cpu")
    for kind, form in FORMS.items():
        matrix = Packed(kind, engine.array(panels_with(kind, 21, 2, 3)), 21)
        weights = dequantize(rows_of(kind, 21, 2, 3), Kind[kind]).astype(np.float64)
        rows = np.random.default_rng(2).standard_normal((5, 2 * form.unit), np.float32)
        linear = Linear(inputs=rows.shape[1], matrices=(matrix,))
        found = engine.numpy(engine.rows(linear=linear)(engine.array(rows)))
        expected = rows.astype(np.float64) @ weights.T
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(weights).max())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("filed")


def test_a_model_is_faithful_in_every_form(tmp_path: Path) -> None:
    """Each matrix is looked at."""
    path = convert(make(tmp_path / "llama", "llama"), tmp_path / "m.gguf", KEPT)
    files = ModelFiles(str(path))
    assert {kind.name for kind in KEPT} <= {each.dtype for each in files.gguf_file.tensors.values()}
    assert pick_dtype(None, files, files.config()) == FILED
    assert_faithful(path, FILED)


@pytest.mark.parametrize(
    ("name", "kind", "plain"),
    [
        ("qwen3.5-moe", Kind.Q4_K, (".ssm_alpha.", ".ssm_beta.")),
        ("gemma4", Kind.Q4_K, ()),
        *nightly([], [("qwen3.5-moe", Kind.Q4_0, ()), ("gemma4-mixture", Kind.Q6_K, ())]),
    ],
)
def test_uneven_layers_are_faithful(name: str, kind: Kind, plain: tuple[str, ...], folder: Path) -> None:
    """A block of Q4_K has numbers of two heads of Qwen3.5, whose inputs are in another order in the file; a
    file may have small matrices in float32."""
    if not (folder / name).exists():
        make(folder / name, name)
    path = convert(folder / name, folder / f"{name}-{kind.name}.gguf", kind, plain=(*PLAIN, *plain))
    files = ModelFiles(str(path))
    assert pick_dtype(None, files, files.config()) == FILED
    assert_faithful(path, FILED)


@pytest.mark.parametrize("name", ["llama-tied", "gemma4", *nightly([], ["qwen3-moe", "gemma4-mixture"])])
def test_slices_take_the_files_bytes_as_foretold_and_planned(name: str, tmp_path: Path) -> None:
    path = convert(make(tmp_path / "checkpoint", name), tmp_path / "m.gguf", KEPT)
    files = ModelFiles(str(path))
    count = len(files.spec.layers)
    sizes = {each.name: int(each.n_bytes) for each in GGUFReader(path).tensors}
    shape, span = shape_of(files.spec, name, files.filed_bytes), Span(first=0, end=count, count=count)
    rounded = sizes.get("per_layer_model_proj.weight", 0) * (1 - 34 / 128)  # of float32, to Q8_0
    assert load_foretold(files, span, FILED).weight_bytes == pytest.approx(
        sum(sizes.values()) - rounded, rel=0.02
    )
    for first, end in ((0, 1), (1, count), (0, count)):
        span = Span(first=first, end=end, count=count)
        foretold = load_foretold(files, span, FILED).weight_bytes
        own = shape, counted_weights(files, shape), FILED, end - first
        planned = stage_memory(*own, first=span.is_first, last=span.is_last, context=100, users=1)
        assert foretold <= planned.weight_bytes * 1.01, "a plan that is too small is refused by its devices"
        assert planned.weight_bytes < (1.6 if name == "gemma4" else 1.4) * foretold, (
            "all as its largest layer"
        )


def test_tied_embeddings_are_there_once_and_weights_given_back_to_the_file(tmp_path: Path) -> None:
    path = convert(make(tmp_path / "checkpoint", "llama-tied"), tmp_path / "m.gguf", KEPT)
    part = Slice.load(ModelFiles(str(path)), Span(first=0, end=4, count=4), FILED)
    assert part.parts[EMBEDDING].panels is part.parts[LM_HEAD].matrices[0].panels
    # One copy: what was read of the file is not kept in memory beside the panels.
    path = convert(make(tmp_path / "checkpoint", "llama"), tmp_path / "m.gguf", Kind.Q8_0)
    files = ModelFiles(str(path))
    tensors = files.tensors()
    tensors.panels("model.layers.0.mlp.gate_proj.weight", (512, 256))
    with open(f"/proc/{os.getpid()}/maps") as maps:
        assert str(path) not in maps.read()


def test_what_is_not_packed_throughout_runs_in_another_precision(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "checkpoint", "llama")
    for kinds, why in (((Kind.Q4_0, Kind.F16), ""), ((Kind.F16,), "float16"), ((Kind.F32,), "float32")):
        files = ModelFiles(str(convert(checkpoint, tmp_path / f"{len(kinds)}{why}.gguf", kinds)))
        assert not files.is_packed
        assert pick_dtype(None, files, files.config()) == (why or "bfloat16")
        assert files.precision_beside(FILED) == "bfloat16"
        with pytest.raises(InputError, match="--dtype gguf: expected a GGUF file or a checkpoint"):
            pick_dtype(FILED, files, files.config())
    mixed = ModelFiles(str(tmp_path / "2.gguf"))
    with pytest.raises(InputError, match=r"^blk\.0\..*weight is not packed in a form that layers "):
        Slice.load(mixed, Span(first=0, end=4, count=4), FILED)
    files = ModelFiles(str(make(tmp_path / "checkpoint", "llama")))
    with pytest.raises(InputError, match="leave --dtype out"):
        pick_dtype(FILED, files, files.config())
    assert files.filed_bytes == 0
