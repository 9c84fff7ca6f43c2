"""Files of models that are something else, lead out of their folder or were never written to their end."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from flowspec.errors import InputError
from flowspec.model.damage import check_inside, check_written
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.json_files import read_json
from flowspec.model.prompts import read_prompts
from flowspec.model.safetensors_file import written_extents
from flowspec.model.text import Tokenizer, recommended
from flowspec.plan.tables import read_toml
from flowspec.serve.guard import read_keys
from tests import ggufs

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
PAGE = b"\n<!DOCTYPE html>\n<html><head><title>Not found</title></head></html>"
MARK = b"\xef\xbb\xbf"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in bundled_folder("target").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ggufs.make(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture
def gguf(checkpoint: Path, tmp_path: Path) -> Path:
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
    assert "\n" not in str(caught.value)
    assert ("copy it again" in str(caught.value)) == (not told and not name.endswith(".json"))


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_an_answer_of_a_server_is_no_model(name: str, model: Path) -> None:
    (model / name).write_text('{"error": "Entry not found"}')
    with pytest.raises(InputError, match="it is JSON, such as a server's answer"):
        read_model(str(model / name) if name.endswith(".gguf") else str(model))


def test_a_gguf_file_under_another_name_says_how_to_give_it(model: Path, gguf: Path) -> None:
    (model / "model.safetensors").write_bytes(gguf.read_bytes())
    with pytest.raises(
        InputError, match=r"it is a GGUF file; give it by itself: --model .*model.safetensors"
    ):
        ModelFiles(str(model)).check_weights()


def test_a_gguf_file_is_known_by_its_first_bytes(gguf: Path, tmp_path: Path) -> None:
    for name in ("sha256-0123abcd", "model.gguf.bak", "MODEL.GGUF"):
        gguf = gguf.rename(tmp_path / "folder" / name)
        files = ModelFiles(str(gguf))
        assert files.gguf == gguf
        assert files.raw_config()["model_type"] == "llama"
        files.check_weights()
    assert ModelFiles(str(gguf.parent)).gguf == gguf, "the only one of a folder"


def test_another_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(InputError, match="is no model"):
        ModelFiles(str(tmp_path / "file"))


def test_parts_behind_one_another_are_no_file(checkpoint: Path, tmp_path: Path) -> None:
    first = ggufs.convert(checkpoint, tmp_path / "parts" / "m.gguf", part_tensors=20)
    path = tmp_path / first.name
    path.write_bytes(b"".join(part.read_bytes() for part in sorted(first.parent.iterdir())))
    told = r"several parts of a GGUF model one behind another.*llama-gguf-split"
    with pytest.raises(InputError, match=told):
        ModelFiles(str(path)).check_weights()


# ----------------------------------------------------------------------------------- weights not written


def written(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    data = b"".join(tensor.tobytes() for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


RNG = np.random.default_rng(0)
WHOLE = {f"{name}.weight": RNG.normal(size=(64, 64)).astype(np.float32) for name in "abcdefgh"}


@pytest.mark.parametrize(("begin", "end"), [(0.5, 1.0), (0.874, 1.0), (0.25, 0.5)])
def test_a_file_of_which_a_part_was_not_written_is_refused(begin: float, end: float, tmp_path: Path) -> None:
    path = written(tmp_path / "model.safetensors", WHOLE)
    check_written(written_extents(path))
    leave_out(path, begin, end)
    with pytest.raises(InputError, match=r"was not written to its end: .* fetch it again"):
        check_written(written_extents(path))


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
    check_written(written_extents(written(tmp_path / "model.safetensors", zeros)))
    bias = {**WHOLE, "i.bias": np.zeros(4096, np.float32)}
    check_written(written_extents(written(tmp_path / "other.safetensors", bias)))
    padded = {**WHOLE, "z.weight": np.concatenate([WHOLE["a.weight"], np.zeros((64, 64), np.float32)])}
    check_written(written_extents(written(tmp_path / "padded.safetensors", padded)))


def test_a_model_with_such_a_file_is_refused(model: Path, gguf: Path) -> None:
    for path, name in ((model / "model.safetensors", str(model)), (gguf, str(gguf))):
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
    name = "chat_templates/tool_use.jinja"
    (tmp_path / "secret").write_text("{}")
    (model / name).parent.mkdir()
    (model / name).symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="is a link out of the model's folder"):
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


def test_texts_may_begin_with_a_mark(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(MARK + b'{"turns": ["a"]}')
    assert read_prompts(tmp_path / "prompts.jsonl")[0].turns == ("a",)
    (tmp_path / "a.toml").write_bytes(MARK + b"x = 1")
    assert read_toml(tmp_path / "a.toml", "a table").data == {"x": 1}
    (tmp_path / "keys").write_bytes(MARK + b"0123456789abcdef0123456789abcdef\n")
    (tmp_path / "keys").chmod(0o600)
    assert read_keys(tmp_path / "keys") == (b"0123456789abcdef0123456789abcdef",)
    (tmp_path / "a.json").write_bytes(MARK + b'{"a": 1}')
    assert read_json(tmp_path / "a.json") == {"a": 1}


def test_so_may_all_files_of_a_model(model: Path) -> None:
    plain = ModelFiles(str(model))
    chat = [{"role": "user", "content": "What is 1 + 2?"}]
    expected = (
        Tokenizer(plain).encode_chat(chat),
        plain.config().to_dict(),
        recommended(plain, plain.config()),
    )
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja", ".txt"):
            path.write_bytes(MARK + path.read_bytes())
    marked = ModelFiles(str(model))
    assert (
        Tokenizer(marked).encode_chat(chat),
        marked.config().to_dict(),
        recommended(marked, marked.config()),
    ) == expected


# ------------------------------------------------------------------------- what a GGUF file says of sampling


def sampling_of(gguf: Path, **said: Any) -> Any:
    files = ModelFiles(str(gguf))
    files.gguf_file.metadata.update({f"general.sampling.{name}": value for name, value in said.items()})
    return recommended(files, files.config())


def test_what_a_gguf_file_recommends_is_taken(gguf: Path) -> None:
    assert sampling_of(gguf).sampling == sampling_of(gguf, temp=0.0, top_k=20).sampling == {}
    found = sampling_of(gguf, temp=float(np.float32(0.7)), top_k=20, top_p=float(np.float32(0.95)), min_p=0.0)
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
def test_what_flowspec_lacks_is_named(said: dict[str, Any], named: tuple[str, ...], gguf: Path) -> None:
    assert sampling_of(gguf, temp=0.7, **said).unsupported == named


@pytest.mark.parametrize("value", ["many", math.nan, math.inf, True, [1]])
def test_what_is_no_number_is_refused(value: Any, gguf: Path, model: Path) -> None:
    with pytest.raises(InputError, match=r"general\.sampling.temp: expected a number"):
        sampling_of(gguf, temp=value)
    (model / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(InputError, match="temperature: expected a number"):
        recommended(ModelFiles(str(model)), ModelFiles(str(model)).config())
