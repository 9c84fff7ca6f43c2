"""A hub id is resolved from the Hugging Face cache when offline, and one line says what is not in it.

The cache is laid out as huggingface_hub does: blobs, and snapshots of links to them.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from flowspec.errors import InputError
from flowspec.model.files import ModelFiles, canonical_name
from flowspec.runtime.health.gather import model_state
from tests.ggufs import convert, make

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
}
TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4)}
SHARDS = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
WHOLE = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": save(TENSORS)}
SPLIT = {
    "config.json": WHOLE["config.json"],
    "model.safetensors.index.json": json.dumps({"weight_map": SHARDS}).encode(),
    **{file: save({name: TENSORS[name]}) for name, file in SHARDS.items()},
}


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
    half = {file: SPLIT[file] for file in SPLIT if file != SHARDS["a.weight"]}
    models = {"one": WHOLE, "many": SPLIT, "retrained": SPLIT, "half": half}
    snapshots = {
        name: put_into_cache(hub_cache, name, str(number) * 40, files)
        for number, (name, files) in enumerate(models.items())
    }
    for name in ("one", "many"):
        files = ModelFiles(f"owner/{name}")
        assert files.path("config.json") == snapshots[name] / "config.json"
        assert files.find("generation_config.json") is None
        assert files.config().model_type == "llama"
        assert sorted(files.weight_map()) == sorted(TENSORS)
        assert torch.equal(files.tensors().load("a.weight", (2, 3)), TENSORS["a.weight"])
    revisions = {ModelFiles(f"owner/{name}").fingerprint() for name in ("many", "retrained")}
    assert len(revisions) == 2, "another revision, another fingerprint"
    for name, told in (
        ("half", f"model 'owner/half' has no {SHARDS['a.weight']}; expected "),
        ("absent", "config.json of 'owner/absent' is not in the Hugging Face cache, and offline mode is on"),
        ("bad..name", "cannot get config.json of 'owner/bad..name' from the hub: "),
    ):
        files = ModelFiles(f"owner/{name}")
        with pytest.raises(InputError, match=f"^{re.escape(told)}.*$"):
            (files.config(), files.tensors().load("a.weight", (2, 3)))


def test_a_gguf_file_of_a_cached_hub_model_is_found_in_all_its_parts(hub_cache: Path, tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "checkpoint", "llama")
    whole = convert(checkpoint, tmp_path / "whole.gguf")
    first = convert(checkpoint, tmp_path / "parts" / "m.gguf", part_tensors=20)
    parts = {f"F32/{path.name}": path.read_bytes() for path in sorted(first.parent.iterdir())}
    beginning = next(iter(parts))
    snapshot = put_into_cache(hub_cache, "llama", "1" * 40, {"whole.gguf": whole.read_bytes(), **parts})
    put_into_cache(hub_cache, "half", "2" * 40, dict(list(parts.items())[:2]))
    put_into_cache(hub_cache, "known", "3" * 40, {"config.json": WHOLE["config.json"]})
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
        ("owner/absent/m.gguf", "m.gguf of 'owner/absent' is not in the Hugging Face cache, and offline"),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(told)}.*$"):
            ModelFiles(model, may_fetch=False).fingerprint()
        assert model_state(model, "") == "none"
