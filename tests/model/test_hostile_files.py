"""Model folders that mean harm or were damaged: each is read, or refused by one line, in little time and
memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.file import GgufFile
from flowspec.model.json_files import read_json
from flowspec.model.safetensors_file import SafetensorsTensors
from flowspec.model.text import recommended
from tests.mutations import one_line_at_most

DEEP = 100_000
HUGE = int("9" * 4299)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**60, 2**63, HUGE, -HUGE])
    | st.floats()
    | st.text(st.characters(), max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 64}
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def header(content: Any, size: int | None = None, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def read_weights(folder: Path) -> None:
    files = ModelFiles(str(folder))
    files.check_weights()
    tensors = files.tensors()
    assert isinstance(tensors, SafetensorsTensors)
    for name in tensors:
        tensors.element_count(name)
        tensors.extent(name)


@given(
    st.dictionaries(st.sampled_from([*CONFIG, "text_config", "x"]), VALUES, max_size=3),
    st.sampled_from(["llama", "gemma3"]),
)
@example({"num_hidden_layers": HUGE}, "llama")
def test_any_config_is_read_or_refused(folder: Path, change: dict[str, Any], family: str) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": family, **change}))
    with one_line_at_most():
        raw = ModelFiles(str(folder)).raw_config()
        assert 1 <= raw["num_hidden_layers"] <= limits.LAYERS_MAX


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"head_dim": 1 << 31}, "head_dim: expected a number up to"),
        ({"hidden_size": "64"}, "hidden_size: expected a number up to"),
        ({"vocab_size": 1e30}, "vocab_size: expected a number up to"),
        ({"num_labels": 10**400}, "num_labels: expected a number up to"),
        ({"vision_config": {"num_labels": 1 << 40}}, "num_labels: expected a number up to"),
        ({"rope_parameters": {"factor": 10**30}}, "'factor': expected a number up to"),
        (
            {"model_type": "qwen3_moe", "num_local_experts": 1 << 20},
            "num_local_experts: expected a number up to",
        ),
        ({"model_type": "olmoe", "num_local_experts": 1 << 20}, "num_local_experts: expected a number up to"),
        ({"num_hidden_layers": 1025}, "num_hidden_layers: expected a number up to 1024"),
        ({"architectures": True}, "architectures: expected a list of names"),
        ({"architectures": [3]}, "architectures: expected a list of names"),
    ],
)
def test_a_config_that_would_make_a_daemon_build_without_end_is_refused(
    folder: Path, change: dict[str, Any], expected: str
) -> None:
    """As found by handing odd configs to transformers: each of these was a crash, or minutes and
    gigabytes."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    for ask in (ModelFiles.raw_config, ModelFiles.config):
        with pytest.raises(InputError, match=expected) as caught:
            ask(ModelFiles(str(folder)))
        assert len(str(caught.value)) < 400 + len(str(folder))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"model_type": "olmoe", "num_hidden_layers": 1024, "num_experts": 4096},
            "num_hidden_layers times num_experts",
        ),
        (
            {
                "model_type": "phi3",
                "rope_scaling": None,
                "attribute_map": {"size": "hidden_size"},
                "size": 1 << 30,
            },
            "hidden_size",
        ),
    ],
)
def test_what_is_large_under_another_name_or_as_a_product_is_refused_before_layers_are_built(
    folder: Path, change: dict[str, Any], expected: str
) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(InputError, match=expected):
        ModelFiles(str(folder)).config()


def test_a_whole_model_that_says_nothing_of_ties_is_refused_in_a_line(folder: Path) -> None:
    """transformers takes it, and its class of the decoder, to which the word is passed on, does not."""
    config = {**CONFIG, "model_type": "gemma3", "tie_word_embeddings": None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"cannot read the config.json of .*tie_word_embeddings") as caught:
        ModelFiles(str(folder)).config()
    assert "\n" not in str(caught.value)


@given(VALUES)
@example({"weight_map": [[[1]]]})
@example({"weight_map": {"a": "../x.safetensors"}})
def test_any_index_is_read_or_refused(folder: Path, content: Any) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(content))
    try:
        with one_line_at_most():
            assert all(Path(file).name == file for file in ModelFiles(str(folder)).weight_map().values())
    finally:
        path.unlink()


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        VALUES | st.fixed_dictionaries({}, optional=dict.fromkeys(ENTRY, VALUES)),
    )
    | st.builds(
        lambda shape, offsets: {"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}},
        st.lists(st.sampled_from([0, 1, 2, 2**60, HUGE]), max_size=12),
        st.lists(st.sampled_from([0, 8, 2**60, HUGE, 1e308, True]), max_size=3),
    )
)
@example({"a": {**ENTRY, "data_offsets": [0, HUGE]}})
@example({"a": {**ENTRY, "shape": [HUGE, HUGE]}})
@example({"a": ENTRY})
def test_any_header_of_tensors_is_read_or_refused(folder: Path, content: Any) -> None:
    (folder / "model.safetensors").write_bytes(header(content, data=bytes(8)))
    with one_line_at_most():
        read_weights(folder)


@pytest.mark.parametrize(
    "content",
    [
        header({"a": ENTRY}, 1 << 60),
        header({"a": ENTRY}, (1 << 64) - 1),
        header({"a": ENTRY}, limits.TENSOR_HEADER_BYTES_MAX + 1),
        header(b"[" * DEEP),
        header(b'{"a":' * DEEP),
        b"",
        b"\x00" * 7,
    ],
)
def test_headers_that_claim_or_nest_too_much_take_no_memory(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="is not a safetensors file"):
            read_weights(folder)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "text",
    ["[" * DEEP, '{"a":' * DEEP, '{"a":' + "[" * 300 + "]" * 300 + "}", "1" * 5000, '"\ud800"', "\x00"],
)
def test_json_that_cannot_be_shown_or_read_is_one_line(folder: Path, text: str) -> None:
    path = folder / "generation_config.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError, match="expected JSON") as caught:
        recommended(ModelFiles(str(folder)), SimpleNamespace())
    assert "\n" not in str(caught.value)
    path.unlink()


def test_a_file_of_json_that_is_too_large_is_refused_unread(folder: Path) -> None:
    path = folder / "large.json"
    with path.open("wb") as file:
        file.truncate(limits.JSON_BYTES_MAX + 1)
    with pytest.raises(InputError, match=f"at most {limits.JSON_BYTES_MAX} bytes"):
        read_json(path)


@given(
    st.dictionaries(
        st.sampled_from(["temperature", "top_k", "top_p", "min_p", "eos_token_id", "do_sample", "num_beams"]),
        VALUES,
    )
)
def test_any_generation_config_is_read_or_refused(folder: Path, content: dict[str, Any]) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(content))
    with one_line_at_most():
        recommended(ModelFiles(str(folder)), SimpleNamespace())
    path.unlink()


def gguf(*, tensors: int = 0, entries: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + rest


KEY = struct.pack("<Q1s", 1, b"k")


@pytest.mark.parametrize(
    "content",
    [
        gguf(tensors=1 << 40),
        gguf(entries=1 << 60),
        gguf(entries=limits.GGUF_ENTRIES_MAX + 1),
        gguf(tensors=limits.TENSORS_MAX + 1),
        gguf(entries=1, rest=KEY + struct.pack("<IIQ", 9, 4, limits.VOCABULARY_MAX + 1)),
        gguf(entries=1, rest=KEY + struct.pack("<IIQ", 9, 8, 1 << 60)),
        gguf(entries=1, rest=KEY + struct.pack("<IQ", 8, limits.GGUF_TEXT_BYTES_MAX + 1)),
        gguf(entries=1, rest=struct.pack("<Q", 1 << 63)),
        gguf(entries=1, rest=KEY + struct.pack("<IIQ", 9, 9, 1) * 50),
    ],
)
def test_a_gguf_header_that_claims_too_much_takes_no_memory(folder: Path, content: bytes) -> None:
    path = folder / "m.gguf"
    path.write_bytes(content + bytes(64))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="is not a GGUF file"):
            GgufFile.read(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
        path.unlink()
