"""GGUF files: slices of them compute what the checkpoint does that they were made of, or what transformers
makes of the file."""

from __future__ import annotations

import json
import re
import shutil
import struct
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec.errors import InputError
from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder, canonical_name
from flowspec.model.gguf.file import GgufFile, GgufTensor, tell_gguf_version
from flowspec.model.gguf.tensors import GgufTensors
from flowspec.model.reference import Reference
from flowspec.model.slice import Slice
from flowspec.model.spec import context_max, family_of
from flowspec.model.text import Tokenizer, recommended
from flowspec.model.weights import Span
from flowspec.plan.shape import shape_of
from flowspec.runtime.loading import slice_memory
from flowspec.runtime.plan_inputs import model_weights
from tests.checkpoints import make_checkpoint
from tests.ggufs import PLAIN, SHAPES, WIDE, convert, make
from tests.model.slices import load_stages, logits_of
from tests.nightly import NIGHT, nightly
from tests.vocabularies import bundled

DATA = json.loads((Path(__file__).parents[1] / "data/gguf_metadata.json").read_text("utf-8"))
PROMPT = tuple(range(3, 60))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def llama_file(llama: Path) -> Path:
    return convert(llama, llama / "model-f32.gguf")


def check_logits(path: Path, reference: Reference) -> None:
    """Of three slices, row by row."""
    found = logits_of(load_stages(path, 3), np.array(PROMPT))
    expected = reference.forced_logits(PROMPT[:1], list(PROMPT[1:]))
    np.testing.assert_allclose(found, expected, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("name", nightly([name for name in SHAPES if name != "gpt-oss"], SHAPES))
def test_slices_are_the_checkpoint_that_the_file_was_made_of(name: str, tmp_path: Path) -> None:
    """As is transformers' own reading of the file, by our config."""
    folder = make(tmp_path / "checkpoint", name)
    path = convert(folder, tmp_path / "model.gguf")
    reference = Reference(ModelFiles(str(folder)), "float32")
    check_logits(path, reference)
    if NIGHT or name in ("llama-rope3", "phi3-longrope", "qwen3.5-moe", "gemma4"):
        found = Reference(ModelFiles(str(path)), "float32").forced_logits(PROMPT, [7])
        np.testing.assert_allclose(found, reference.forced_logits(PROMPT, [7]), atol=1e-4)


def test_every_type_is_unpacked_as_transformers_does(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_0, Kind.Q4_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K)
    path = convert(llama, tmp_path / "model.gguf", kinds)
    files = ModelFiles(str(path))
    assert {kind.name for kind in kinds} <= {tensor.dtype for tensor in files.gguf_file.tensors.values()}
    # Of which it uses nothing.
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)
    options: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.float32}
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path, **options).state_dict()
    # A matrix in several blocks, the last one shorter.
    monkeypatch.setattr("flowspec.model.tensors.BLOCK_NUMBERS", 5000)
    tensors = files.tensors()
    assert set(tensors) == set(plain)
    for name, expected in plain.items():
        assert np.array_equal(tensors.load(name, tuple(expected.shape)), expected), name
    reference = Reference(files, "float32")
    assert all(torch.equal(values, plain[name]) for name, values in reference.model.state_dict().items())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_slice_reads_its_own_tensors_only_and_is_as_large_as_foretold(
    dtype: str, llama_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    packed = GgufTensor.packed
    monkeypatch.setattr(GgufTensor, "packed", lambda self: read.append(self.name) or packed(self))
    files = ModelFiles(str(llama_file))
    for first, end in ((0, 1), (1, 3), (3, 4)):
        span = Span(first=first, end=end, count=4)
        foretold = slice_memory(files, span, dtype, 100).weight_bytes
        assert not read, "nothing is read to count"
        assert Slice.load(files, span, dtype).weight_bytes == foretold
        own = {0: {"token_embd.weight"}, 3: {"output_norm.weight", "output.weight"}}.get(first, set())
        assert {name for name in read if not name.startswith("blk.")} == own
        assert {int(name.split(".")[1]) for name in read if name.startswith("blk.")} == set(range(first, end))
        assert len(read) == len(set(read))
        read.clear()


def test_a_file_in_parts_is_the_model_in_one(llama: Path, tmp_path: Path) -> None:
    whole = ModelFiles(str(convert(llama, tmp_path / "whole.gguf", Kind.Q8_0)))
    first = convert(llama, tmp_path / "parts" / "m.gguf", Kind.Q8_0, part_tensors=15)
    files = ModelFiles(str(first))
    names = [path.name for path in sorted(first.parent.iterdir())]
    assert names == [f"m-0000{number}-of-00004.gguf" for number in (1, 2, 3, 4)]
    assert files.raw_config() == whole.raw_config()
    assert ModelFiles(str(first.parent)).gguf == first
    one, other = whole.tensors(), files.tensors()
    assert set(one) == set(other)
    assert all(
        np.array_equal(one.load(name, one.shape(name)), other.load(name, one.shape(name))) for name in one
    )
    fingerprint = files.fingerprint()
    last = first.with_name(names[-1])
    content = last.read_bytes()
    last.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert ModelFiles(str(first)).fingerprint() != fingerprint, "another weight in another part"


def test_parts_that_do_not_belong_together_are_refused(llama: Path, tmp_path: Path) -> None:
    first = convert(llama, tmp_path / "m.gguf", part_tensors=15)
    second, third = (first.with_name(f"m-0000{number}-of-00004.gguf") for number in (2, 3))
    for path in (second, shutil.copy(first, tmp_path / "other.gguf")):
        with pytest.raises(InputError, match="is one of 4 parts, or several behind one another; give the fi"):
            ModelFiles(str(path)).check_weights()
    shutil.copy(second, third)
    with pytest.raises(InputError, match=r"m-00003-of-00004\.gguf is not part 3 of 4 by what is in it"):
        ModelFiles(str(first)).check_weights()
    third.unlink()
    with pytest.raises(InputError, match=r"there is no file .*m-00003-of-00004\.gguf; expected all parts"):
        ModelFiles(str(first)).check_weights()


def test_a_window_makes_a_llama_a_mistral(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "checkpoint", "mistral", {**WIDE, "sliding_window": 12})
    path = convert(folder, tmp_path / "m.gguf", metadata={"llama.attention.sliding_window": 12})
    reference = Reference(ModelFiles(str(folder)), "float32")
    check_logits(path, reference)
    with pytest.raises(AssertionError):  # without it the window is not known
        check_logits(convert(folder, tmp_path / "full.gguf"), reference)


def test_a_folder_with_one_file_is_that_model(llama_file: Path, tmp_path: Path) -> None:
    copy = shutil.copy(llama_file, tmp_path / "other-name.gguf")
    (tmp_path / "config.json").write_text("{}")
    alone = ModelFiles(str(llama_file))
    assert ModelFiles(str(tmp_path)).gguf == copy
    assert (
        ModelFiles(str(tmp_path)).fingerprint() == ModelFiles(str(copy)).fingerprint() == alone.fingerprint()
    )
    assert alone.raw_config()["num_hidden_layers"] == 4
    assert canonical_name(str(llama_file)) == str(llama_file.resolve())
    (tmp_path / "model.safetensors").touch()
    assert ModelFiles(str(tmp_path)).gguf is None
    whole = llama_file.read_bytes()
    at = whole.index(b"llama.attention.head_count")
    copy.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert ModelFiles(str(copy)).fingerprint() != alone.fingerprint(), "another weight"
    copy.write_bytes(whole[:at] + b"x" + whole[at + 1 :])
    assert ModelFiles(str(copy)).fingerprint() != alone.fingerprint(), "other metadata"
    with pytest.raises(InputError, match="there is no file 'models/none\\.gguf'"):
        ModelFiles("models/none.gguf")


@pytest.mark.parametrize(("metadata", "expected"), DATA["stated"])
def test_the_config_says_what_the_file_states(
    metadata: dict[str, Any], expected: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    config = ModelFiles(str(convert(llama, tmp_path / "m.gguf", metadata=metadata))).config()
    assert {name: getattr(config, name) for name in expected} == expected
    assert str(config.dtype) == "torch.float32"
    assert family_of(config, "m").prefix == "Llama"


def test_scores_of_the_largest_gemmas_and_contexts_of_longrope_are_theirs(tmp_path: Path) -> None:
    for name, layers, expected in (("gemma2", 46, 64), ("gemma3", 62, 64), ("gemma3", 7, 32)):
        stated = {"block_count": layers, "attention.key_length": 32, "attention.value_length": 32}
        path = convert(
            make(tmp_path / f"{name}-{layers}", name),
            tmp_path / f"{name}-{layers}.gguf",
            metadata={f"{name}.{key}": value for key, value in stated.items()},
        )
        assert ModelFiles(str(path)).config().query_pre_attn_scalar == expected
    folder = make(tmp_path / "checkpoint", "phi3-longrope")
    assert context_max(ModelFiles(str(convert(folder, tmp_path / "m.gguf"))).config()) == 480
    folder = make(tmp_path / "llama", "llama-rope3")
    assert context_max(ModelFiles(str(convert(folder, tmp_path / "l.gguf"))).config()) == 512


def test_a_file_that_lacks_a_layer_is_refused_by_a_tensors_name(llama: Path, tmp_path: Path) -> None:
    path = convert(llama, tmp_path / "m.gguf", metadata={"llama.block_count": 40})
    with pytest.raises(InputError, match=r"has no tensor model\.layers\.\d+"):
        Slice.load(files := ModelFiles(str(path)), Span(first=30, end=40, count=40), "gguf")
    with pytest.raises(InputError, match="block_count: expected as many layers as are in its files, got 40"):
        model_weights(files, shape_of(files.spec, "m"))


@pytest.mark.parametrize(("name", "metadata", "message"), DATA["refused"])
def test_what_is_not_supported_is_refused_before_a_weight_is_read(
    name: str,
    metadata: dict[str, Any],
    message: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = convert(request.getfixturevalue(name), tmp_path / "m.gguf", metadata=metadata)
    read, packed = set[str](), GgufTensor.packed
    monkeypatch.setattr(GgufTensor, "packed", lambda self: (read.add(self.name), packed(self))[1])
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        ModelFiles(str(path)).raw_config()
    assert read <= {"rope_freqs.weight"}, "which is a part of the config"
    assert len(str(caught.value).splitlines()) == 1


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("lfm2"), "lfm2")


@pytest.fixture(scope="module")
def qwen35(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """How fast its states fade is a number whose power is the same by torch, as the converter computes it,
    and by our definition."""
    folder = make(tmp_path_factory.mktemp("qwen"), "qwen3.5")
    numbers = torch.linspace(-2, 2.5, 400)
    numbers = numbers[torch.exp(numbers) == plain.exp(numbers)]
    tensors = load_file(folder / "model.safetensors")
    for place, name in enumerate(name for name in tensors if name.endswith("A_log")):
        tensors[name] = numbers[torch.arange(6) * 37 + place].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_linear_attention_has_the_checkpoints_bits(qwen35: Path, tmp_path: Path) -> None:
    paths, tokens = (qwen35, convert(qwen35, tmp_path / "m.gguf")), np.arange(40) * 7 % 300
    found, expected = (logits_of(load_stages(path, 1), tokens) for path in paths)
    assert np.array_equal(found, expected)


def test_which_layers_have_states(qwen35: Path, tmp_path: Path) -> None:
    linear, full = "linear_attention", "full_attention"
    for stated, expected in (
        ({}, [linear, full, linear, full]),
        ({"qwen35.full_attention_interval": None}, [linear, linear, linear, full]),
        ({"qwen35.nextn_predict_layers": 1}, [linear, full, linear]),
    ):
        files = ModelFiles(str(convert(qwen35, tmp_path / "m.gguf", metadata=stated)))
        config = files.config()
        assert config.layer_types == expected
        assert config.num_hidden_layers == len(expected)
        family_of(config, "m")
    assert not any(".layers.3." in name for name in files.tensors()), "it guesses a token further"


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("gemma4"), "gemma4")


@pytest.mark.parametrize("divisors", [None, [1.0] * 8, [1.0] * 8 + [2.0] * 24, [1e30] * 8 + [1.0] * 24])
def test_frequencies_turn_or_stand_still(divisors: Any, gemma4: Path, tmp_path: Path) -> None:
    name = "rope_freqs.weight"
    extra = None if divisors is None else {name: np.array(divisors, np.float32)}
    path = convert(gemma4, tmp_path / "m.gguf", extra=extra, drop=(name,) if divisors is None else ())
    with pytest.raises(InputError, match=r"tensor rope_freqs\.weight: expected 32 divisors"):
        ModelFiles(str(path)).raw_config()


def test_numbers_of_two_layers_that_are_packed_together_are_refused(tmp_path: Path) -> None:
    family, shape = SHAPES["gemma4"]
    folder = make_checkpoint(tmp_path / "checkpoint", family, {**shape, "hidden_size_per_layer_input": 128})
    path = convert(folder, tmp_path / "m.gguf", Kind.Q6_K, plain=(*PLAIN, ".proj."))
    tensors = ModelFiles(str(path)).tensors()
    with pytest.raises(InputError, match="to be a multiple of a block's, got 128"):
        tensors.panels("model.layers.0.layer_input.table.weight", (300, 128))


def test_a_table_of_all_layers_is_gone_through_once_for_all_of_them(
    gemma4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ModelFiles(str(convert(gemma4, tmp_path / "m.gguf", Kind.Q8_0)))
    tensors, table = files.tensors(), files.gguf_file.tensors["per_layer_token_embd.weight"]
    names = [f"model.layers.{layer}.layer_input.table.weight" for layer in (1, 2, 5)]
    rows, width = shape = tensors.shape(names[0])
    parts = np.split(table.unpack(np.array(table.packed())), 6, 1)
    expected = {name: parts[layer] for name, layer in zip(names, (1, 2, 5), strict=True)}
    monkeypatch.setattr("flowspec.model.tensors.BLOCK_NUMBERS", 64 * width)
    read: list[tuple[str, int]] = []
    packed_rows = GgufTensors._packed_rows

    def noted(tensors: GgufTensors, name: str, first: int, end: int) -> Any:
        read.append((name, first))
        return packed_rows(tensors, name, first, end)

    monkeypatch.setattr(GgufTensors, "_packed_rows", noted)
    once = [(name, first) for first in range(0, rows, 64) for name in names]
    found = {name: np.empty(shape, np.float32) for name in names}
    tensors.copy_together(found)
    assert read == once
    assert all(np.array_equal(found[name], expected[name]) for name in names)
    read.clear()
    panels = tensors.panels_together(dict.fromkeys(names, shape))
    assert read == once
    for name in names:
        assert np.array_equal(plain.packed_rows(FORMS["Q8_0"], panels[name], np.arange(rows)), expected[name])


def test_tokens_that_a_file_forbids_are_suppressed(llama: Path, tmp_path: Path) -> None:
    key = "tokenizer.ggml.suppress_tokens"
    for forbidden, expected in (([6, 5], (5, 6)), (None, ())):
        files = ModelFiles(str(convert(llama, tmp_path / "m.gguf", metadata={key: forbidden})))
        found = recommended(files, files.config())
        assert (found.suppress_tokens, found.unsupported) == (expected, ())
    files = ModelFiles(str(convert(llama, tmp_path / "m.gguf", metadata={key: "5"})))
    with pytest.raises(InputError, match=f"m.gguf: {key}: expected a list of token ids, got '5'"):
        recommended(files, files.config())


@pytest.mark.parametrize(("extra", "drop", "message"), DATA["tensors"])
def test_tensors_that_do_not_fit_are_refused(
    extra: dict[str, list[int]], drop: list[str], message: str, llama: Path, tmp_path: Path
) -> None:
    made = {name: np.ones(shape, np.float32) for name, shape in extra.items()}
    path = convert(llama, tmp_path / "m.gguf", extra=made, drop=tuple(drop))
    with pytest.raises(InputError, match=re.escape(message)):
        Slice.load(ModelFiles(str(path)), Span(first=0, end=1, count=4), "float32")


def test_a_type_that_nobody_unpacks_is_refused(llama_file: Path, tmp_path: Path) -> None:
    whole = llama_file.read_bytes()
    place = whole.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    for kind, name in ((15, "Q8_K"), (999, "of type 999")):
        (tmp_path / "m.gguf").write_bytes(whole[:place] + kind.to_bytes(4, "little") + whole[place + 4 :])
        with pytest.raises(
            InputError, match=f"tensor blk.0.ffn_up.weight is {name}, which the gguf package cannot read"
        ):
            ModelFiles(str(tmp_path / "m.gguf")).check_weights()


@pytest.fixture(scope="module")
def header(llama_file: Path) -> bytes:
    return llama_file.read_bytes()[: GgufFile.read(llama_file).headers[llama_file]]


@given(data=st.data())
def test_a_broken_header_is_an_input_error(
    data: st.DataObject, header: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "broken.gguf"
    changed = bytearray(header[: data.draw(st.integers(0, len(header)), label="length")])
    for _ in range(data.draw(st.integers(0, 2), label="changes")):
        if changed:
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    with pytest.raises(InputError, match=r"is not a GGUF file|is incomplete|cannot read") as caught:
        GgufFile.read(path)
    assert "buffer" not in str(caught.value), "no words of the library that unpacks numbers"


def test_a_text_that_says_it_is_longer_than_the_file_is_an_input_error(tmp_path: Path) -> None:
    entry = struct.pack("<Q1sIIQQ", 1, b"k", 9, 8, 2, (1 << 64) - 1)  # a list of two texts
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    with pytest.raises(InputError, match="ends within its header, after 57 bytes: it is incomplete"):
        GgufFile.read(tmp_path / "m.gguf")


def test_a_tokenizer_comes_with_the_file_or_the_file_takes_token_ids(
    tmp_path: Path, llama_file: Path
) -> None:
    own = Tokenizer(ModelFiles(BUNDLED))
    path = convert(bundled_folder("target"), tmp_path / "m.gguf", Kind.BF16, metadata=bundled())
    (tmp_path / "tokenizer_config.json").write_text("no business of the file's")
    files = ModelFiles(str(path))
    found = Tokenizer(files)
    question = [{"role": "user", "content": "What is 17 + 25? Tell me a story, please!"}]
    assert found.encode_chat(question) == own.encode_chat(question)
    assert found.decode(found.encode_chat(question)) == own.decode(own.encode_chat(question))
    assert recommended(files, files.config()).stop_ids == {2}
    with pytest.raises(InputError, match="has no tokenizer; take another GGUF file of it"):
        Tokenizer(ModelFiles(str(llama_file)))


def test_transformers_finds_the_version_of_the_gguf_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf as package

    monkeypatch.delattr(package, "__version__", raising=False)
    tell_gguf_version()
    assert package.__version__ == version("gguf")  # type: ignore[attr-defined]
