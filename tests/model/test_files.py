"""A model's files are found, measured by their headers alone and named by what they hold; whatever was lost,
is something else or is hostile is one line, in little time and memory."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save
from transformers.utils.hub import CHAT_TEMPLATE_DIR

import flowspec
from flowspec.bench.cases import Prompt, of_each_domain, read_prompts
from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.model.damage import check_inside, read_json
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder, canonical_name
from flowspec.model.gguf.file import GgufFile
from flowspec.model.gpu import tensor_of
from flowspec.model.text import Tokenizer, recommended
from flowspec.model.weight_files import SafetensorsTensors, check_written, read_header
from flowspec.plan.tables import Table, read_toml
from flowspec.runtime.device.report import model_state
from flowspec.serve.guard import read_keys
from tests import ggufs
from tests.mutations import HUGE, mutants, one_line_at_most

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
SINGLE = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": save(TENSORS, {"format": "pt"})}
"""All tensors in one file."""
SHARDED = {
    "config.json": SINGLE["config.json"],
    INDEX: json.dumps({"metadata": {}, "weight_map": SHARDS}).encode(),
    **{file: save({name: TENSORS[name]}) for name, file in SHARDS.items()},
}
"""One tensor in each of two files, and an index."""


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
            if isinstance(node, ast.With) and ast.unparse(node.items[0]) == "importing()":
                guarded |= {id(each) for each in names(node)}
        alone += [(path.name, ast.unparse(each)) for each in names(tree) if id(each) not in guarded]
    assert guarded
    assert alone == []


def folder_of(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "single", SINGLE)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "sharded", SHARDED)


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_tensors_are_found_measured_and_read(layout: str, request: pytest.FixtureRequest) -> None:
    files = ModelFiles(str(request.getfixturevalue(layout)))
    files.check_weights()
    assert set(files.tensors()) == set(TENSORS)
    index = files.tensors()
    assert "a.weight" in index
    assert "c.weight" not in index
    assert (index.element_count("a.weight"), index.element_count("b.weight")) == (6, 4)
    for name, tensor in TENSORS.items():
        found = tensor_of(index.load(name, tuple(tensor.shape)))
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    with pytest.raises(InputError, match=r"a\.weight.*expected shape \[3, 2\] by config\.json, got \[2, 3\]"):
        index.load("a.weight", (3, 2))
    with pytest.raises(InputError, match=r"has no tensor c\.weight"):
        index.load("c.weight", (1,))


def test_names_of_models() -> None:
    files = ModelFiles(BUNDLED)
    assert files.raw_config()["num_hidden_layers"] == 8
    files.check_weights()
    for model in ("/no/such/folder", "./gone", "~/gone", "plainname", "a/b/c", "x" * 5000):
        with pytest.raises(
            InputError, match=r"expected a model folder, a GGUF file or a hub id such as Qwen/Qwen3-0\.6B"
        ):
            ModelFiles(model)


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
    path = sorted(sharded.glob("*.safetensors"))[-1]
    whole = path.read_bytes()
    path.write_bytes({-1: whole[:-1], 1: whole + b"\0"}.get(size, whole[:size]))
    with pytest.raises(InputError, match=rf"{path}.*(copy|fetch) it again"):
        ModelFiles(str(sharded)).check_weights()


def test_an_unknown_dtype_is_named(single: Path) -> None:
    entry = {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}
    (single / "model.safetensors").write_bytes(header({"a.weight": entry}, data=bytes(4)))
    files = ModelFiles(str(single))
    files.check_weights()
    with pytest.raises(InputError, match=r"a\.weight .* is F4; expected one of F64, F32, BF16, F16"):
        files.tensors().element_count("a.weight")


def test_an_index_that_is_broken_or_names_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": []}')
    with pytest.raises(InputError, match=f"{INDEX}.*: expected a weight_map"):
        ModelFiles(str(sharded)).check_weights()
    (sharded / INDEX).write_text(json.dumps({"weight_map": {**SHARDS, "c.weight": SHARDS["a.weight"]}}))
    with pytest.raises(InputError, match=r"no tensor c\.weight; .*safetensors should hold it by the index"):
        ModelFiles(str(sharded)).tensors().load("c.weight", (1,))


@pytest.mark.parametrize(
    "change",
    [
        {"mlp_bias": "yes"},
        {"num_attention_heads": 3},
        {"model_type": "gemma3", "tie_word_embeddings": None},  # whose decoder's class does not take the word
    ],
)
def test_a_config_that_transformers_refuses_is_one_line(single: Path, change: dict[str, Any]) -> None:
    (single / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(InputError, match=r"cannot read the config\.json of") as caught:
        ModelFiles(str(single)).config()
    assert len(str(caught.value).splitlines()) == 1


def test_a_field_of_a_kind_that_is_none_of_several_is_told_in_words(single: Path) -> None:
    (single / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": "x"}))
    told = "eos_token_id: expected a whole number or a list of them or null, got 'x'$"
    with pytest.raises(InputError, match=told):
        ModelFiles(str(single)).config()


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


@given(mutants({**CONFIG, "max_position_embeddings": 64, "text_config": CONFIG}))
@example({**CONFIG, "num_hidden_layers": HUGE})
@example({**CONFIG, "model_type": "gemma3"})
def test_any_config_is_read_or_refused(folder: Path, content: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(content))
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


@given(mutants({"metadata": {}, "weight_map": SHARDS}))
@example({"weight_map": [[[1]]]})
@example({"weight_map": {"a": "../x.safetensors"}})
def test_any_index_is_read_or_refused(folder: Path, content: Any) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(content))
    try:
        with one_line_at_most():
            assert all(Path(file).name == file for file in ModelFiles(str(folder)).file_map().values())
    finally:
        path.unlink()


@given(mutants({"a": ENTRY, "b": {**ENTRY, "data_offsets": [8, 16]}, "__metadata__": {"format": "pt"}}))
@example({"a": {**ENTRY, "data_offsets": [0, HUGE]}})
@example({"a": {**ENTRY, "shape": [HUGE, HUGE]}})
@example({"a": ENTRY})
def test_any_header_of_tensors_is_read_or_refused(folder: Path, content: Any) -> None:
    (folder / "model.safetensors").write_bytes(header(content, data=bytes(16)))
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


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Not found</title></head></html>"
MARK = b"\xef\xbb\xbf"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    return Path(shutil.copytree(bundled_folder("target"), tmp_path / "model"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ggufs.make(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture
def toy(checkpoint: Path, tmp_path: Path) -> Path:
    return ggufs.convert(checkpoint, tmp_path / "folder" / "toy.gguf", GGMLQuantizationType.Q8_0)


def read_model(name: str) -> None:
    files = ModelFiles(name)
    files.raw_config()
    files.check_weights()
    recommended(files, files.config())
    Tokenizer(files)


# --------------------------------------------------------------------------------- what a file is instead


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "config.json", "tokenizer.json"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (LFS, "git lfs pull"),
        (PAGE, "it is a web page"),
        (b"<html>", "it is a web page"),
        (MARK + b"<?xml version='1.0'?>", "it is a web page"),
        (b"PK\x03\x04rest of an archive", "it is a zip archive"),
        (b"\x1f\x8b\x08rest", "packed with gzip"),
        (b"", "it is empty"),
        (bytes(4096), "its download was not finished"),
        (b"other bytes, and more of them", ""),
    ],
)
def test_what_it_is_and_what_to_do_is_said(name: str, content: bytes, told: str, model: Path) -> None:
    path = model / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_model(str(path) if name.endswith(".gguf") else str(model))
    assert told in str(caught.value)
    assert str(model if name == "tokenizer.json" else path) in str(caught.value)
    assert not re.search(r"\n|codec|got it", str(caught.value))
    assert ("copy it again" in str(caught.value)) == (not told and not name.endswith(".json"))


def test_gguf_files_are_known_by_their_first_bytes_whatever_their_names(
    toy: Path, tmp_path: Path, model: Path
) -> None:
    for name in ("sha256-0123abcd", "model.gguf.bak", "MODEL.GGUF"):
        toy = toy.rename(tmp_path / "folder" / name)
        files = ModelFiles(str(toy))
        assert files.gguf == toy
        assert files.raw_config()["model_type"] == "llama"
        files.check_weights()
    assert ModelFiles(str(toy.parent)).gguf == toy, "the only one of a folder"
    (model / "model.safetensors").write_bytes(toy.read_bytes())
    with pytest.raises(
        InputError, match=r"it is a GGUF file; give it by itself: --model .*model.safetensors"
    ):
        ModelFiles(str(model)).check_weights()


def test_other_files_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(InputError, match="is no model"):
        ModelFiles(str(tmp_path / "file"))


# ----------------------------------------------------------------------------------- weights not written


def written(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    save_arrays(tensors, path)
    return path


RNG = np.random.default_rng(0)
WHOLE = {f"{name}.weight": RNG.normal(size=(64, 64)).astype(np.float32) for name in "abcdefgh"}


@pytest.mark.parametrize(("begin", "end"), [(0.5, 1.0), (0.874, 1.0), (0.25, 0.5)])
def test_a_file_of_which_a_part_was_not_written_is_refused(begin: float, end: float, tmp_path: Path) -> None:
    path = written(tmp_path / "model.safetensors", WHOLE)
    check_written(read_header(path).values())
    leave_out(path, begin, end)
    with pytest.raises(InputError, match=r"was not written to its end: .* fetch it again"):
        check_written(read_header(path).values())


def leave_out(path: Path, begin: float, end: float) -> None:
    """Zeros between these shares of a file."""
    data = bytearray(path.read_bytes())
    first, last = int(begin * len(data)), int(end * len(data))
    data[first:last] = bytes(last - first)
    path.write_bytes(data)


def test_matrices_of_zeros_that_a_merge_made_are_no_hole(tmp_path: Path) -> None:
    zeros = {
        name: np.zeros_like(tensor) if name in ("b.weight", "e.weight") else tensor
        for name, tensor in WHOLE.items()
    }
    check_written(read_header(written(tmp_path / "model.safetensors", zeros)).values())
    bias = {**WHOLE, "i.bias": np.zeros(4096, np.float32)}
    check_written(read_header(written(tmp_path / "other.safetensors", bias)).values())
    padded = {**WHOLE, "z.weight": np.concatenate([WHOLE["a.weight"], np.zeros((64, 64), np.float32)])}
    check_written(read_header(written(tmp_path / "padded.safetensors", padded)).values())


def test_a_model_with_such_a_file_is_refused(model: Path, toy: Path) -> None:
    for path, name in ((model / "model.safetensors", str(model)), (toy, str(toy))):
        ModelFiles(name).check_weights()
        leave_out(path, 0.75, 1.0)
        with pytest.raises(InputError, match="was not written to its end"):
            ModelFiles(name).check_weights()


# ------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize(
    "name",
    ["chat_template.jinja", "config.json", "tokenizer.json", "generation_config.json", "model.safetensors"],
)
def test_a_file_that_is_a_link_out_of_the_folder_is_refused(name: str, model: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes((model / name).read_bytes() if (model / name).exists() else b"a secret")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(secret)
    with pytest.raises(InputError, match=f"{name} is a link out of the model's folder, to .*secret"):
        read_model(str(model))


def test_so_is_one_that_a_library_would_read(model: Path, tmp_path: Path) -> None:
    name = f"{CHAT_TEMPLATE_DIR}/a.jinja"
    (tmp_path / "secret").write_text("{}")
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="is a link out of the model's folder"):
        Tokenizer(ModelFiles(str(model)))
    os.truncate(model / name, limits.JSON_BYTES_MAX + 1)
    with pytest.raises(InputError, match=f"{name}: expected at most"):
        Tokenizer(ModelFiles(str(model)))


def test_links_within_a_folder_and_in_the_cache_of_the_hub_are_followed(model: Path, tmp_path: Path) -> None:
    (model / "config.json").rename(model / "other.json")
    (model / "config.json").symlink_to("other.json")
    assert ModelFiles(str(model)).raw_config()
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    files = ModelFiles(str(snapshot))
    files.check_weights()
    Tokenizer(files)
    (tmp_path / "outside").write_text("{}")
    (blobs / "link").symlink_to(tmp_path / "outside")
    (snapshot / "merges.txt").symlink_to("../../blobs/link")
    with pytest.raises(InputError, match="is a link out of"):
        check_inside(snapshot / "merges.txt", snapshot)


# ---------------------------------------------------------------------------------- marks of byte order


def test_texts_and_files_of_a_model_may_begin_with_a_mark(model: Path, tmp_path: Path) -> None:
    for path in (*model.glob("*.json"), *model.glob("*.jinja")):
        path.write_bytes(MARK + path.read_bytes())
    read_model(str(model))
    assert Tokenizer(ModelFiles(str(model))).encode_chat([{"role": "user", "content": "Hi"}])
    (tmp_path / "prompts.jsonl").write_bytes(MARK + b'{"turns": ["a"]}')
    assert read_prompts(tmp_path / "prompts.jsonl")[0].turns == ("a",)
    (tmp_path / "a.toml").write_bytes(MARK + b"x = 1")
    assert read_toml(tmp_path / "a.toml", dict, "a table") == {"x": 1}
    (tmp_path / "keys").write_bytes(MARK + b"0123456789abcdef0123456789abcdef\n")
    (tmp_path / "keys").chmod(0o600)
    assert read_keys(tmp_path / "keys") == (b"0123456789abcdef0123456789abcdef",)
    (tmp_path / "a.json").write_bytes(MARK + b'{"a": 1}')
    assert read_json(tmp_path / "a.json") == {"a": 1}


# ------------------------------------------------------------------------- what a GGUF file says of sampling


def sampling_of(toy: Path, **said: Any) -> Any:
    files = ModelFiles(str(toy))
    files.gguf_file.metadata.update({f"general.sampling.{name}": value for name, value in said.items()})
    return recommended(files, files.config())


def test_what_a_gguf_file_recommends_is_taken(toy: Path) -> None:
    assert sampling_of(toy).sampling == sampling_of(toy, temp=0.0, top_k=20).sampling == {}
    found = sampling_of(toy, temp=float(np.float32(0.7)), top_k=20, top_p=float(np.float32(0.95)), min_p=0.0)
    assert found.sampling == {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
    assert not found.unsupported


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"xtc_probability": 0.5}, ("xtc_probability",)),
        ({"mirostat": 2}, ("mirostat",)),
        ({"penalty_repeat": 1.1, "penalty_last_n": 64}, ("repetition_penalty_window",)),
        ({"penalty_repeat": 1.1, "penalty_last_n": -1}, ()),
        ({"penalty_repeat": 1.0, "penalty_last_n": 64, "mirostat": 0, "xtc_probability": 0.0}, ()),
        ({"sequence": "top_k;temperature"}, ("sampler_order",)),
    ],
)
def test_what_flowspec_lacks_is_named(said: dict[str, Any], named: tuple[str, ...], toy: Path) -> None:
    assert sampling_of(toy, temp=0.7, **said).unsupported == named


@pytest.mark.parametrize("value", ["many", math.nan, math.inf, True, [1]])
def test_what_is_no_number_is_refused(value: Any, toy: Path, model: Path) -> None:
    with pytest.raises(InputError, match=r"general\.sampling.temp: expected a number"):
        sampling_of(toy, temp=value)
    (model / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(InputError, match="temperature: expected a number"):
        recommended(ModelFiles(str(model)), ModelFiles(str(model)).config())


# ---------------------------------------------------------------------------------------------- prompts files

ROW = {"turns": ["a", "b"], "question_id": 7, "category": "x", "more": {"x": 1}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prompts") / "p.jsonl"


def read_or_refused(path: Path) -> list[Prompt]:
    try:
        return read_prompts(path)
    except InputError as error:
        said = str(error)
    assert str(path) in said
    assert len(said.splitlines()) == 1
    assert len(said) < 1000
    return []


@given(st.lists(mutants(ROW), max_size=3))
@example([{"turns": ["\ud800"]}])
@example([{"turns": ["\x00"], "question_id": "\x1b[2J"}])
def test_any_rows_are_read_or_refused(path: Path, rows: list[Any]) -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    for prompt in read_or_refused(path):
        assert all(turn.strip() and turn.encode() for turn in prompt.turns)
        assert (prompt.prompt_id + prompt.domain).isprintable()


@given(st.binary(max_size=80) | st.text(max_size=12).map(str.encode))
def test_any_bytes_are_read_or_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    read_or_refused(path)
    plain = path.with_suffix(".txt")
    plain.write_bytes(content)
    read_or_refused(plain)


def test_prompts_that_nest_or_count_too_far_or_are_too_long_are_refused(path: Path) -> None:
    for line in ("[" * 100_000, '{"turns": ' * 100_000, '{"turns": [' + "1" * 5000 + "]}"):
        path.write_text('{"turns": ["a"]}\n' + line)
        with pytest.raises(InputError, match="line 2: expected"):
            read_prompts(path)
    path.write_text(json.dumps({"turns": ["x" * (limits.PROMPT_CHARS_MAX + 1)]}))
    with pytest.raises(InputError, match=r"line 1: .*a text of 1 to"):
        read_prompts(path)
    with path.open("wb") as file:
        file.truncate(limits.PROMPTS_BYTES_MAX + 1)
    with pytest.raises(InputError, match=f"at most {limits.PROMPTS_BYTES_MAX} bytes together"):
        read_prompts(path)


def test_prompts_have_their_file_s_category_and_lines_end_where_they_do(path: Path) -> None:
    path.write_text('{"turns": ["a"]}\n{"turns": ["b"], "category": ""}\n{"turns": ["c"], "category": "x"}')
    assert [prompt.domain for prompt in read_prompts(path)] == [path.stem, path.stem, "x"]
    path.write_bytes('{"turns": ["a\u2028b\x85c"]}\r\n{"turns": ["d"], "question_id": 7}\n'.encode())
    assert [prompt.turns for prompt in read_prompts(path)] == [("a\u2028b\x85c",), ("d",)]
    plain = path.with_suffix(".txt")
    plain.write_bytes(b"one\r\ntwo\n")
    assert [prompt.turns for prompt in read_prompts(plain)] == [("one",), ("two",)]


class Nothing(Table, frozen=True, kw_only=True):
    """A table that may hold nothing."""


def test_toml_that_nests_or_counts_too_far_or_is_too_large_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    brackets, digits = b"a = " + b"[" * 100_000, b"a = " + b"9" * 5000
    for content in (
        brackets,
        digits,
        b"a" * 3000 + b".b" * 3000 + b" = 1",
        b"\xff",
        b"\x00 = 1",
        b"[" * 50_000,
    ):
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            read_toml(path, Nothing, "a cluster file")
        assert len(str(caught.value).splitlines()) == 1
    with path.open("wb") as file:
        file.truncate(limits.TOML_BYTES_MAX + 1)
    with pytest.raises(InputError, match=f"a cluster file of at most {limits.TOML_BYTES_MAX} bytes"):
        read_toml(path, Nothing, "a cluster file")


def test_a_few_prompts_are_of_each_domain_in_turn() -> None:
    names = ("a1", "a2", "a3", "b1", "c1", "c2")
    prompts = [Prompt(prompt_id=name, domain=name[0], turns=(name,)) for name in names]
    for count, expected in ((3, "a1 b1 c1"), (5, "a1 b1 c1 a2 c2"), (9, "a1 b1 c1 a2 c2 a3")):
        assert [prompt.prompt_id for prompt in of_each_domain(prompts, count)] == expected.split()


# --------------------------------------------------------------------------------------- the cache of the hub


def put_into_cache(
    cache: Path, name: str, commit: str, files: dict[str, bytes], owner: str = "owner"
) -> Path:
    """Makes a cached model of these files; returns its snapshot folder."""
    repository = cache / f"models--{owner}--{name}"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for number, (file, content) in enumerate(files.items()):
        (repository / "blobs" / f"{number:040x}").write_bytes(content)
        (snapshot / file).parent.mkdir(exist_ok=True)
        (snapshot / file).symlink_to(
            os.path.relpath(repository / "blobs" / f"{number:040x}", (snapshot / file).parent)
        )
    return snapshot


def test_a_cached_hub_model_is_found_and_what_is_missing_is_named(hub_cache: Path) -> None:
    half = {file: SHARDED[file] for file in SHARDED if file != SHARDS["a.weight"]}
    models = {"one": SINGLE, "many": SHARDED, "retrained": SHARDED, "half": half}
    snapshots = {
        name: put_into_cache(hub_cache, name, str(number) * 40, files)
        for number, (name, files) in enumerate(models.items())
    }
    for name in ("one", "many"):
        files = ModelFiles(f"owner/{name}")
        assert files.path("config.json") == snapshots[name] / "config.json"
        assert files.find("generation_config.json") is None
        assert files.config().model_type == "llama"
        assert sorted(files.tensors()) == sorted(TENSORS)
        assert np.array_equal(files.tensors().load("a.weight", (2, 3)), TENSORS["a.weight"])
    revisions = {ModelFiles(f"owner/{name}").fingerprint() for name in ("many", "retrained")}
    assert len(revisions) == 2, "another revision, another fingerprint"
    for name, told in (
        ("half", f"model 'owner/half' has no {SHARDS['a.weight']}; expected "),
        ("absent", "config.json of 'owner/absent' is not in the Hugging Face cache, and HF_HUB_OFFLINE is "),
        ("bad..name", "cannot get config.json of 'owner/bad..name' from the hub: "),
    ):
        files = ModelFiles(f"owner/{name}")
        with pytest.raises(InputError, match=f"^{re.escape(told)}.*$"):
            (files.config(), files.tensors().load("a.weight", (2, 3)))


def test_a_gguf_file_of_a_cached_hub_model_is_found_in_all_its_parts(hub_cache: Path, tmp_path: Path) -> None:
    checkpoint = ggufs.make(tmp_path / "checkpoint", "llama")
    whole = ggufs.convert(checkpoint, tmp_path / "whole.gguf")
    first = ggufs.convert(checkpoint, tmp_path / "parts" / "m.gguf", part_tensors=20)
    parts = {f"F32/{path.name}": path.read_bytes() for path in sorted(first.parent.iterdir())}
    beginning = next(iter(parts))
    snapshot = put_into_cache(hub_cache, "llama", "1" * 40, {"whole.gguf": whole.read_bytes(), **parts})
    put_into_cache(hub_cache, "half", "2" * 40, dict(list(parts.items())[:2]))
    put_into_cache(hub_cache, "known", "3" * 40, {"config.json": SINGLE["config.json"]})
    for name, local in (("whole.gguf", whole), (beginning, first)):
        model = f"owner/llama/{name}"
        files = ModelFiles(model, may_fetch=False)
        assert files.gguf == snapshot / name
        assert files.config().model_type == "llama"
        assert files.fingerprint() == ModelFiles(str(local)).fingerprint()
        assert canonical_name(model) == model
        assert len(set(files.tensors())) == 39
        assert model_state(model, files.fingerprint()) == "same"
    for model, told in (
        (f"owner/half/{beginning}", "F32/m-00003-of-00003.gguf of 'owner/half' is not in the Hugging Face"),
        (
            "owner/known/m.gguf",
            "there is no file 'owner/known/m.gguf' here, and 'owner/known' on the hub has",
        ),
        ("owner/absent/m.gguf", "m.gguf of 'owner/absent' is not in the Hugging Face cache, and HF_HUB_OFF"),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(told)}.*$"):
            ModelFiles(model, may_fetch=False).fingerprint()
        assert model_state(model, "") == "none"
