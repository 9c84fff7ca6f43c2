"""A hub id is resolved from the Hugging Face cache when offline, and one line says what is not in it.

The cache is laid out as huggingface_hub does: blobs, and snapshots of links to them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from flowspec.model.files import ModelFiles
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
SCRIPT = """
import json, sys
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
for model in sys.argv[1:]:
    try:
        files = ModelFiles(model)
        found = [str(files.path("config.json")), files.find("generation_config.json")]
        found += [files.config().model_type, sorted(files.weight_map())]
        found += [list(files.tensors().load("a.weight", (2, 3)).shape), files.fingerprint()]
        print(json.dumps(found))
    except InputError as error:
        print(json.dumps(str(error)))
"""

GGUF_SCRIPT = """
import json, sys
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles, canonical_name
from flowspec.runtime.health.gather import model_state
for model in sys.argv[1:]:
    try:
        files = ModelFiles(model, may_fetch=False)
        found = [str(files.gguf), files.config().model_type, files.fingerprint(), canonical_name(model)]
        print(json.dumps([*found, len(set(files.tensors())), model_state(model, files.fingerprint())]))
    except InputError as error:
        print(json.dumps([str(error), model_state(model, "")]))
"""


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


def look_up(cache: Path, *models: str, script: str = SCRIPT) -> list[Any]:
    """What `script` finds of each model offline, in a process of its own: huggingface_hub reads its
    environment at import."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    done = subprocess.run(
        [sys.executable, "-c", script, *models],
        env={**kept, "HF_HOME": str(cache.parent), "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_cached_hub_model_is_found_and_what_is_missing_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    one = put_into_cache(cache, "one", "1" * 40, WHOLE)
    many = put_into_cache(cache, "many", "2" * 40, SPLIT)
    put_into_cache(cache, "retrained", "3" * 40, SPLIT)
    put_into_cache(
        cache, "half", "4" * 40, {file: SPLIT[file] for file in SPLIT if file != SHARDS["a.weight"]}
    )
    found = look_up(
        cache, *(f"owner/{name}" for name in ("one", "many", "retrained", "half", "absent", "bad..name"))
    )
    for snapshot, answer in ((one, found[0]), (many, found[1])):
        assert answer[:5] == [str(snapshot / "config.json"), None, "llama", sorted(TENSORS), [2, 3]]
    assert found[1][5] != found[2][5], "another revision, another fingerprint"
    assert found[3].startswith(f"model 'owner/half' has no {SHARDS['a.weight']}; expected ")
    assert found[4].startswith(
        "config.json of 'owner/absent' is not in the Hugging Face cache, and offline mode is on"
    )
    assert found[5].startswith("cannot get config.json of 'owner/bad..name' from the hub: ")
    assert all(len(text.splitlines()) == 1 for text in found[3:])


def test_a_gguf_file_of_a_cached_hub_model_is_found_in_all_its_parts(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "checkpoint", "llama")
    whole = convert(checkpoint, tmp_path / "whole.gguf")
    first = convert(checkpoint, tmp_path / "parts" / "m.gguf", part_tensors=20)
    parts = {f"F32/{path.name}": path.read_bytes() for path in sorted(first.parent.iterdir())}
    cache = tmp_path / "hub"
    snapshot = put_into_cache(cache, "llama", "1" * 40, {"whole.gguf": whole.read_bytes(), **parts})
    put_into_cache(cache, "half", "2" * 40, dict(list(parts.items())[:2]))
    put_into_cache(cache, "known", "3" * 40, {"config.json": WHOLE["config.json"]})
    names = [
        "llama/whole.gguf",
        f"llama/{next(iter(parts))}",
        f"half/{next(iter(parts))}",
        "known/m.gguf",
        "absent/m.gguf",
    ]
    found = look_up(cache, *(f"owner/{name}" for name in names), script=GGUF_SCRIPT)
    for answer, name, local in ((found[0], names[0], whole), (found[1], names[1], first)):
        path = snapshot / name.partition("/")[2]
        assert answer == [
            str(path),
            "llama",
            ModelFiles(str(local)).fingerprint(),
            f"owner/{name}",
            39,
            "same",
        ]
    for answer, text in (
        (
            found[2],
            "F32/m-00003-of-00003.gguf of 'owner/half' is not in the Hugging Face cache, and offline mode is "
            "on",
        ),
        (found[3], "there is no file 'owner/known/m.gguf' here, and 'owner/known' on the hub has no m.gguf"),
        (found[4], "m.gguf of 'owner/absent' is not in the Hugging Face cache, and offline mode is on"),
    ):
        assert answer[0].startswith(text)
        assert answer[1] == "none"
