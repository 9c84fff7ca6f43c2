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

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
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
        found = [str(files.path("config.json")), files.find("generation_config.json"), files.config().model_type]
        found += [sorted(files.weight_map()), list(files.tensors().load("a.weight", (2, 3)).shape), files.fingerprint()]
        print(json.dumps(found))
    except InputError as error:
        print(json.dumps(str(error)))
"""


def put_into_cache(cache: Path, name: str, commit: str, files: dict[str, bytes]) -> Path:
    """Makes a cached model of these files; returns its snapshot folder."""
    repository = cache / f"models--owner--{name}"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for number, (file, content) in enumerate(files.items()):
        (repository / "blobs" / f"{number:040x}").write_bytes(content)
        (snapshot / file).symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


def look_up(cache: Path, *models: str) -> list[Any]:
    """What each model gives offline, in a process of its own: huggingface_hub reads its environment at import."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *models],
        env={**kept, "HF_HOME": str(cache.parent), "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_cached_hub_model_is_found_and_what_is_missing_is_named(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    one = put_into_cache(cache, "one", "1" * 40, WHOLE)
    many = put_into_cache(cache, "many", "2" * 40, SPLIT)
    put_into_cache(cache, "retrained", "3" * 40, SPLIT)
    put_into_cache(cache, "half", "4" * 40, {file: SPLIT[file] for file in SPLIT if file != SHARDS["a.weight"]})
    found = look_up(cache, *(f"owner/{name}" for name in ("one", "many", "retrained", "half", "absent", "bad..name")))
    for snapshot, answer in ((one, found[0]), (many, found[1])):
        assert answer[:5] == [str(snapshot / "config.json"), None, "llama", sorted(TENSORS), [2, 3]]
    assert found[1][5] != found[2][5], "another revision, another fingerprint"
    assert found[3].startswith(f"model 'owner/half' has no {SHARDS['a.weight']}; expected ")
    assert found[4].startswith("config.json of 'owner/absent' is not in the Hugging Face cache, and offline mode is on")
    assert found[5].startswith("cannot get config.json of 'owner/bad..name' from the hub: ")
    assert all(len(text.splitlines()) == 1 for text in found[3:])
