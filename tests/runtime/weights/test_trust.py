"""A slice is kept, shared and trusted by the digests of its tensors, whatever a head calls its model,
wherever its files are."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from safetensors.torch import load_file, save_file

from flowspec.bench.checkpoints import SMALL, make_checkpoint
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles
from flowspec.model.tensors import Tensors
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from flowspec.runtime.weights import server
from flowspec.runtime.weights.offer import Offer
from tests.caches import make_cache
from tests.runtime.clusters import plan_for
from tests.runtime.weights.served import answer, expected

Start = Callable[..., LocalDaemon]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model large enough that its fingerprint leaves out most of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", make_cache(tmp_path / "cache"))
    return make_checkpoint(tmp_path / "model", "llama", {**SMALL, "vocab_size": 30_000})


def serve(monkeypatch: pytest.MonkeyPatch, folder: Path, fingerprint: str | None = None) -> None:
    """Has heads serve the model of that folder, whatever it is called, and under a fingerprint that is not
    its own."""

    class Lying(ModelFiles):
        def fingerprint(self) -> str:
            return super().fingerprint() if fingerprint is None else fingerprint

    monkeypatch.setattr(server, "ModelFiles", lambda name: Lying(str(folder)))


def altered(folder: Path, to: Path) -> Path:
    """The same model with other values in one layer."""
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"] *= -1
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def damage(folder: Path) -> str:
    """Zeros where no sample of the fingerprint is; the tensor that they are in."""
    path = folder / "model.safetensors"
    extents = {
        name: ModelFiles(str(folder)).extents().extent(name) for name in ModelFiles(str(folder)).extents()
    }
    size, before = path.stat().st_size, ModelFiles(str(folder)).fingerprint()
    middle = (size - 65536) * 3 // 7 + 65536 + 4096
    with path.open("r+b") as file:
        file.seek(middle)
        file.write(bytes(4096))
    assert ModelFiles(str(folder)).fingerprint() == before, "nothing shows"
    (name,) = (
        each
        for each, at in extents.items()
        if at.offset <= middle < middle + 4096 <= at.offset + at.size_bytes
    )
    return name


def test_a_folder_that_is_damaged_on_a_device_is_named_before_it_serves(
    alone: Start, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "on the device"
    shutil.copytree(folder, here)
    serve(monkeypatch, folder)
    plan = replace(plan_for(folder, [alone()]), model=str(here))
    assert answer(plan) == (expected(folder), 0)
    name = damage(here)
    daemon = alone(name="other")
    with pytest.raises(
        ClusterError, match=rf"device other at .*{name} in model.safetensors .*is not what it is at the head"
    ):
        Head(replace(plan_for(folder, [daemon]), model=str(here)))
    shutil.copy(folder / "model.safetensors", here)
    assert answer(replace(plan_for(folder, [daemon]), model=str(here))) == (expected(folder), 0)


def test_weights_under_anothers_fingerprint_are_given_to_nobody_else(
    alone: Start, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, other = alone(), altered(folder, tmp_path / "altered")
    own = ModelFiles(str(folder)).fingerprint()
    plan = replace(plan_for(folder, [daemon]), model="mine", dtype="int8")
    assert plan.fingerprint == own
    serve(monkeypatch, folder)
    right, sent = answer(plan)
    assert sent > 0
    serve(monkeypatch, other, own)
    wrong, sent = answer(plan)
    assert wrong != right, "it has what it offers"
    assert sent == 64 * 128 * 4
    serve(monkeypatch, folder)
    assert answer(plan)[0] == right


def test_the_same_slice_is_kept_whatever_the_next_head_calls_it(
    alone: Start,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    plan = plan_for(folder, [alone()])
    with caplog.at_level("INFO", logger="flowspec.daemon"):
        for model in (str(folder), str(copy), "nowhere"):
            serve(monkeypatch, copy)
            assert answer(replace(plan, model=model)) == (expected(folder), 0)
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("ready: ")]
    assert [text.split()[1] for text in told] == ["loaded", "kept", "kept"]


def test_files_that_change_while_they_are_loaded_are_not_served(
    alone: Start, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "on the device"
    shutil.copytree(folder, here)
    serve(monkeypatch, folder)
    plain = Tensors.copy_into

    def touching(tensors: Tensors, name: str, part: Any) -> None:
        plain(tensors, name, part)
        os.utime(here / "model.safetensors")

    monkeypatch.setattr(Tensors, "copy_into", touching)
    plan = replace(plan_for(folder, [alone()]), model=str(here))
    with pytest.raises(ClusterError, match=r"alone at .*changed while they were loaded; start again"):
        Head(plan)


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the hub with the model in it as `owner/name`; the snapshot's folder."""
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / ("c" * 40)
    for each in (repository / "refs", repository / "blobs", snapshot):
        each.mkdir(parents=True)
    (repository / "refs" / "main").write_text("c" * 40)
    for name in ("config.json", "model.safetensors"):
        content = (folder / name).read_bytes()
        blob = hashlib.sha256(content).hexdigest() if name.endswith("rs") else "d" * 40
        (repository / "blobs" / blob).write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(repository / "blobs" / blob, snapshot))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_model_of_the_hub_is_checked_by_the_hubs_own_hashes(
    alone: Start, folder: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is not asked, for it may not have the weights."""
    monkeypatch.setattr(Offer, "begin", None)
    daemon = alone()
    plan = replace(
        plan_for(folder, [daemon]), model="owner/name", fingerprint=ModelFiles("owner/name").fingerprint()
    )
    for _ in range(2):
        assert answer(plan) == (expected(folder), 0)
    weights = (hub / "model.safetensors").resolve()
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    other = replace(plan_for(folder, [alone(name="other")]), model="owner/name", fingerprint=plan.fingerprint)
    with pytest.raises(
        ClusterError, match=r"other at .*model.safetensors of 'owner/name' in the hub's cache here is damaged"
    ):
        Head(other)
