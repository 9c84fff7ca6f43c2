"""A model's files are found, measured by their headers alone and named by what they hold; whatever was lost
or is hostile is one line, in little time and memory."""

from __future__ import annotations

import ast
import json
import shutil
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file

import flowspec
from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles, canonical_name
from flowspec.model.gguf.file import GgufFile
from flowspec.model.json_files import read_json
from flowspec.model.safetensors_file import SafetensorsTensors
from flowspec.model.text import recommended
from tests.mutations import one_line_at_most

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
}
TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}
SHARDS = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
INDEX = "model.safetensors.index.json"


def test_one_thread_at_a_time_takes_names_of_transformers() -> None:
    """Where two do so first at once, one may be told that there is no AutoConfig in it."""

    def names(node: ast.AST) -> list[ast.AST]:
        found = [each for each in ast.walk(node) if isinstance(each, ast.ImportFrom)]
        return [each for each in found if each.module == "transformers"]

    package = Path(flowspec.__file__).parent
    sources = {path: path.read_text("utf-8") for path in package.rglob("*.py")}
    trees = {path: ast.parse(source) for path, source in sources.items() if "from transformers" in source}
    guarded, alone = set(), []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.With) and ast.unparse(node.items[0]) == "IMPORTING":
                guarded |= {id(each) for each in names(node)}
        alone += [(path.name, ast.unparse(each)) for each in names(tree) if id(each) not in guarded]
    assert guarded
    assert alone == []


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A folder with all tensors in one file."""
    folder = tmp_path / "single"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder with one tensor in each of two files, and an index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name, file in SHARDS.items():
        save_file({name: TENSORS[name]}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": SHARDS}))
    return folder


def write_header(path: Path, header: Any, data_bytes: int = 0) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_bytes))


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_tensors_are_found_measured_and_read(layout: str, request: pytest.FixtureRequest) -> None:
    files = ModelFiles(str(request.getfixturevalue(layout)))
    files.check_weights()
    assert set(files.weight_map()) == set(TENSORS)
    index = files.tensors()
    assert "a.weight" in index
    assert "c.weight" not in index
    assert (index.element_count("a.weight"), index.element_count("b.weight")) == (6, 4)
    for name, tensor in TENSORS.items():
        found = index.load(name, tuple(tensor.shape))
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    with pytest.raises(InputError, match=r"a\.weight.*expected shape \[3, 2\] by config\.json, got \[2, 3\]"):
        index.load("a.weight", (3, 2))
    with pytest.raises(InputError, match=r"has no tensor c\.weight"):
        index.load("c.weight", (1,))
    index.close()


def test_names_of_models() -> None:
    files = ModelFiles(BUNDLED)
    assert files.raw_config()["num_hidden_layers"] == 8
    files.check_weights()
    for model in ("/no/such/folder", "./gone", "~/gone", "plainname", "a/b/c", "x" * 5000):
        with pytest.raises(
            InputError, match=r"expected a model folder, a GGUF file or a hub id such as Qwen/Qwen3-0\.6B"
        ):
            ModelFiles(model)


def test_other_devices_get_absolute_folders(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(single.parent)
    assert canonical_name("single") == str(single.resolve())
    assert canonical_name(BUNDLED) == BUNDLED
    assert canonical_name("owner/name") == "owner/name"


def test_a_half_folder_says_what_is_missing(single: Path, sharded: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        ModelFiles(str(single)).check_weights()
    (single / "config.json").unlink()
    for ask in (ModelFiles.raw_config, ModelFiles.config, ModelFiles.fingerprint):
        with pytest.raises(InputError, match=r"has no config\.json"):
            ask(ModelFiles(str(single)))
    (sharded / SHARDS["b.weight"]).unlink()
    with pytest.raises(InputError, match=f"has no {SHARDS['b.weight']}"):
        ModelFiles(str(sharded)).check_weights()


@pytest.mark.parametrize("size", [7, 40, -1, 1])
def test_weights_that_are_cut_short_or_too_long(size: int, sharded: Path) -> None:
    """`size`: cut to so many bytes; -1: without the last byte; 1: one byte more."""
    folder = sharded
    path = sorted(folder.glob("*.safetensors"))[-1]
    whole = path.read_bytes()
    path.write_bytes({-1: whole[:-1], 1: whole + b"\0"}.get(size, whole[:size]))
    with pytest.raises(InputError, match=rf"{path}.*(copy|fetch) it again"):
        ModelFiles(str(folder)).check_weights()


def test_an_unknown_dtype_is_named(single: Path) -> None:
    write_header(
        single / "model.safetensors", {"a.weight": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, 4
    )
    files = ModelFiles(str(single))
    files.check_weights()
    with pytest.raises(InputError, match=r"a\.weight .* is F4; expected one of F64, F32, BF16, F16"):
        files.tensors().element_count("a.weight")


def test_an_index_that_is_broken_or_names_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": []}')
    with pytest.raises(InputError, match=f"{INDEX}.*: expected a weight_map"):
        ModelFiles(str(sharded)).check_weights()
    (sharded / INDEX).write_text(json.dumps({"weight_map": {**SHARDS, "c.weight": SHARDS["a.weight"]}}))
    with pytest.raises(InputError, match=r"safetensors .* should hold c\.weight by its index, but does not"):
        ModelFiles(str(sharded)).tensors().load("c.weight", (1,))


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": "small"},
        {"num_attention_heads": 3},
        {"model_type": "gemma3", "tie_word_embeddings": None},  # whose decoder's class does not take the word
    ],
)
def test_a_config_that_transformers_refuses_is_one_line(single: Path, change: dict[str, Any]) -> None:
    (single / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(InputError, match=r"cannot read the config\.json of") as caught:
        ModelFiles(str(single)).config()
    assert len(str(caught.value).splitlines()) == 1


def test_the_fingerprint_names_the_content(sharded: Path, tmp_path: Path) -> None:
    own = ModelFiles(str(sharded)).fingerprint()
    copy = tmp_path / "copy"
    shutil.copytree(sharded, copy)
    assert ModelFiles(str(copy)).fingerprint() == own
    for path in sorted(copy.glob("*.safetensors")):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert ModelFiles(str(copy)).fingerprint() != own, f"one changed byte of {path.name}"
        content[-1] ^= 1
        path.write_bytes(content)
    assert ModelFiles(str(copy)).fingerprint() == own
    (copy / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-6}))
    assert ModelFiles(str(copy)).fingerprint() != own


# ------------------------------------------------------------------------------------- what means harm

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
    st.dictionaries(
        st.sampled_from(["model_type", "num_hidden_layers", "max_position_embeddings", "text_config", "x"]),
        VALUES,
        max_size=3,
    ),
    st.sampled_from(["llama", "gemma3"]),
)
@example({"num_hidden_layers": HUGE}, "llama")
def test_any_config_is_read_or_refused(folder: Path, change: dict[str, Any], family: str) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": family, **change}))
    with one_line_at_most():
        raw = ModelFiles(str(folder)).raw_config()
        assert 1 <= raw["num_hidden_layers"] <= limits.LAYERS_MAX


TOO_LARGE: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 1 << 31}, "head_dim"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"vocab_size": 1e30}, "vocab_size"),
    ({"num_labels": 10**400}, "num_labels"),
    ({"vision_config": {"num_labels": 1 << 40}}, "num_labels"),
    ({"rope_parameters": {"factor": 10**30}}, "'factor'"),
    ({"model_type": "qwen3_moe", "num_local_experts": 1 << 20}, "num_local_experts"),
    ({"model_type": "olmoe", "num_local_experts": 1 << 20}, "num_local_experts"),
    ({"num_hidden_layers": 1025}, "num_hidden_layers"),
    ({"architectures": True}, "architectures"),
    ({"architectures": [3]}, "architectures"),
    # under another name, or as a product
    ({"model_type": "olmoe", "num_hidden_layers": 1024, "num_experts": 4096}, "times num_experts"),
    ({"model_type": "phi3", "attribute_map": {"size": "hidden_size"}, "size": 1 << 30}, "hidden_size"),
]


@pytest.mark.parametrize(("change", "expected"), TOO_LARGE)
def test_a_config_that_would_make_a_daemon_build_without_end_is_refused(
    folder: Path, change: dict[str, Any], expected: str
) -> None:
    """As found by handing odd configs to transformers: each was a crash, or minutes and gigabytes."""
    small = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps({**small, "rope_scaling": None, **change}))
    with pytest.raises(InputError, match=rf"{expected}.*: expected|expected .*{expected}") as caught:
        ModelFiles(str(folder)).config()
    assert len(str(caught.value)) < 400 + len(str(folder))


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
        b"garbage, and much of it, where a header should be",
        header(b"\xff\xfe\xfd\xfc\xfb"),
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
