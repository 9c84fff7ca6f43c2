"""A model's files are found in a folder, measured by their headers alone, and named by what they hold.

Everything that a copy can lose or spoil (a file, its end, its header, a shard) is an `InputError` that names
it.
"""

from __future__ import annotations

import ast
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import flowspec
from flowspec.errors import InputError
from flowspec.model.families import FAMILIES, check_family
from flowspec.model.files import BUNDLED, ModelFiles, canonical_name
from flowspec.model.support import family_of

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
    trees = {path: ast.parse(path.read_text()) for path in package.rglob("*.py")}
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


@pytest.mark.parametrize("layout", ["single", "sharded"])
@pytest.mark.parametrize("size", [0, 7, 40, -1, 1])
def test_weights_that_are_cut_short_or_too_long(
    layout: str, size: int, request: pytest.FixtureRequest
) -> None:
    """`size`: cut to so many bytes; -1: without the last byte; 1: one byte more."""
    folder = request.getfixturevalue(layout)
    path = sorted(folder.glob("*.safetensors"))[-1]
    whole = path.read_bytes()
    path.write_bytes({-1: whole[:-1], 1: whole + b"\0"}.get(size, whole[:size]))
    with pytest.raises(InputError, match=rf"{path}.*(copy|fetch) it again"):
        ModelFiles(str(folder)).check_weights()


@pytest.mark.parametrize(
    "content",
    [
        b"garbage, and much of it, where a header should be",
        struct.pack("<Q", 5) + b"\xff\xfe\xfd\xfc\xfb",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        b"html, not found, and not the beginning of a page either",
    ],
)
def test_weights_of_garbage(single: Path, content: bytes) -> None:
    (single / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors is not a safetensors file .*copy it again"):
        ModelFiles(str(single)).check_weights()


@pytest.mark.parametrize(
    "entry",
    [
        *(3, [], {}, {"dtype": "F32", "shape": [1]}, {"dtype": "F32", "shape": [1], "data_offsets": []}),
        {"dtype": "F32", "data_offsets": [0, 4]},
        {"shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
    ],
)
def test_a_header_without_what_a_header_has(single: Path, entry: Any) -> None:
    write_header(single / "model.safetensors", {"a.weight": entry}, 4)
    with pytest.raises(InputError, match="is not a safetensors file"):
        ModelFiles(str(single)).check_weights()


def test_an_unknown_dtype_is_named(single: Path) -> None:
    write_header(
        single / "model.safetensors", {"a.weight": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, 4
    )
    files = ModelFiles(str(single))
    files.check_weights()
    with pytest.raises(InputError, match=r"a\.weight .* is F4; expected one of F64, F32, BF16, F16"):
        files.tensors().element_count("a.weight")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "3"])
def test_a_broken_index_is_named(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(InputError, match=f"{INDEX}.*: expected (JSON|a JSON object|a weight_map)"):
        ModelFiles(str(sharded)).check_weights()


def test_an_index_may_name_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {**SHARDS, "c.weight": SHARDS["a.weight"]}}))
    with pytest.raises(
        InputError,
        match=r"model-00001-of-00002\.safetensors .* should hold c\.weight by its index, but does not",
    ):
        ModelFiles(str(sharded)).tensors().load("c.weight", (1,))


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "{}"),
        '{"model_type": "llama", "num_hidden_layers": "2"}',
        '{"model_type": "llama", "num_hidden_layers": null}',
    ],
)
def test_a_config_that_is_none(single: Path, content: str) -> None:
    (single / "config.json").write_text(content)
    with pytest.raises(
        InputError,
        match=(
            r"config\.json(: (num_hidden_layers: expected (1 to|a number up to)|expected JSON|expected a "
            r"JSON object)| of '.*' names no family)"
        ),
    ):
        ModelFiles(str(single)).raw_config()


@pytest.mark.parametrize(
    "change",
    [{"rms_norm_eps": "small"}, {"num_attention_heads": 3}, {"num_attention_heads": 0}, {"dtype": []}],
)
def test_a_config_that_transformers_refuses_is_one_line(single: Path, change: dict[str, Any]) -> None:
    (single / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(InputError, match=r"cannot read the config\.json of") as caught:
        ModelFiles(str(single)).config()
    assert len(str(caught.value).splitlines()) == 1


def test_only_families_with_a_parity_test_are_run(single: Path) -> None:
    for name, family in FAMILIES.items():
        assert check_family({"model_type": name}, "m") is family
    with pytest.raises(
        InputError, match=r"of the family 'gpt2', but FlowSpec runs gemma2, .*llama, mistral, .*qwen3"
    ):
        check_family({"model_type": "gpt2"}, "m")
    for change, expected in (
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic' position embeddings",
        ),
        ({"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}}, "quantised"),
    ):
        (single / "config.json").write_text(json.dumps({**CONFIG, **change}))
        with pytest.raises(InputError, match=expected):
            family_of(ModelFiles(str(single)).config(), "m")


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_the_fingerprint_names_the_content(
    layout: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(layout)
    own = ModelFiles(str(folder)).fingerprint()
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
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
