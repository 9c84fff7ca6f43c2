"""A slice is kept, shared and trusted by the digests of its tensors, whatever a head calls its model,
wherever its files are; those of the hub a daemon fetches from there, where it may, and as long as its head is
there."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import psutil
import pytest
from msgspec import structs
from safetensors.torch import load_file, save_file

from flowspec.core.protocol.cluster_messages import Loading, Ping, Ready, Reset
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles
from flowspec.model.tensors import Tensors
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from flowspec.runtime.weights import transfer
from flowspec.runtime.weights.transfer import Offer
from tests.caches import make_cache
from tests.checkpoints import SMALL, make_checkpoint
from tests.hub import COMMIT, MODEL, FakeHub
from tests.runtime.clusters import Peer, plan_for, whole_model
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

    monkeypatch.setattr(transfer, "ModelFiles", lambda name: Lying(str(folder)))


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


class Cached(ModelFiles):
    """The head's own: as in its cache of the hub."""

    def fingerprint(self) -> str:
        assert self.folder is not None
        return fingerprint(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Of a model in six files or so."""
    shape = {**SMALL, "num_key_value_heads": 2}
    found = FakeHub(make_checkpoint(tmp_path / "model", "llama", shape, shard="300KB"))
    monkeypatch.setenv("HF_ENDPOINT", found.address)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(transfer, "ModelFiles", lambda name: Cached(str(found.folder)))
    yield found
    found.close()


def weights_asked(hub: FakeHub) -> list[str]:
    return [name for name in hub.asked if name.endswith(".safetensors")]


def fingerprint(folder: Path) -> str:
    """What a head says that has this revision in its cache."""
    return hashlib.sha256((folder / "config.json").read_bytes() + b"blobs" + COMMIT.encode()).hexdigest()[:32]


def hub_plan(hub: FakeHub, daemon: LocalDaemon) -> ClusterPlan:
    return replace(plan_for(hub.folder, [daemon]), model=MODEL, fingerprint=fingerprint(hub.folder))


def test_the_files_of_a_slice_are_fetched_once_and_no_others_and_are_checked_by_the_hubs_own_hashes(
    alone: Start, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is not asked, for it may not have the weights."""
    monkeypatch.setattr(Offer, "answer", None)
    daemon, right = alone(), (expected(hub.folder), 0)
    whole = whole_model(MODEL, fingerprint(hub.folder), ModelFiles(str(hub.folder)).spec)
    with Peer(daemon.address) as control:
        control.greet()
        part = structs.replace(whole, stages=2, end_layer=3, next_hop=daemon.address, next_name="x")
        assert isinstance(control.assign(daemon.address, part), Ready)
        control.link.send(Reset())
    files = ModelFiles(str(hub.folder)).file_map()
    mine = {
        file
        for name, file in files.items()
        if name.startswith(("model.embed", *(f"model.layers.{n}." for n in range(3))))
    }
    assert set(weights_asked(hub)) == mine < set(files.values())
    assert answer(hub_plan(hub, daemon)) == right
    assert sorted(weights_asked(hub)) == sorted(set(files.values())), "each once"
    hub.asked.clear()
    assert answer(hub_plan(hub, alone(name="again"))) == right
    assert hub.asked == []
    (weights, *_) = tmp_path.glob("hub/models--owner--name/snapshots/*/*.safetensors")
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    said = rf"other at .*{weights.name} of 'owner/name' in the hub's cache here is damaged"
    with pytest.raises(ClusterError, match=said):
        Head(hub_plan(hub, alone(name="other")))


def test_a_daemon_that_may_not_fetch_is_sent_all_and_what_does_not_fit_is_not_fetched(
    alone: Start, hub: FakeHub
) -> None:
    tokens, received = answer(hub_plan(hub, alone(uses_hub=False)))
    assert tokens == expected(hub.folder)
    assert received > 0, "the head has sent it"
    said = r"none at .*config.json of 'owner/name' is not in the Hugging Face cache"
    with pytest.raises(ClusterError, match=said):
        Head(hub_plan(hub, alone(name="none", uses_hub=False, cache_bytes=0)))
    assert hub.asked == []
    said = r"files of 'owner/name' that hold these layers have .*but this daemon may fetch .*--cache-limit"
    with pytest.raises(ClusterError, match=f"other at .*{said}"):
        Head(hub_plan(hub, alone(name="other", store="other", cache_bytes=100_000)))
    assert weights_asked(hub) == []


def test_a_model_in_one_file_is_fetched_whole(
    alone: Start, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "folder", make_checkpoint(tmp_path / "one", "llama", SMALL))
    said = r"alone at .*files of 'owner/name' that hold these layers have .*--cache-limit"
    with pytest.raises(ClusterError, match=said):
        Head(hub_plan(hub, alone(cache_bytes=100_000)))
    assert weights_asked(hub) == []
    assert answer(hub_plan(hub, alone(name="other"))) == (expected(hub.folder), 0)
    assert weights_asked(hub) == ["model.safetensors"]


def test_a_download_ends_with_its_head(alone: Start, hub: FakeHub) -> None:
    """However slow the hub is: this one says nothing at all."""
    daemon, before = alone(), set(psutil.Process().children())
    hub.may_go.clear()
    with Peer(daemon.address) as control:
        control.greet()
        whole = whole_model(MODEL, fingerprint(hub.folder), ModelFiles(str(hub.folder)).spec)
        assert isinstance(control.assign(daemon.address, whole, until="receiving"), Loading)
        deadline_s = time.monotonic() + 30
        while not hub.asked:
            assert time.monotonic() < deadline_s
            control.link.send(Ping())
            time.sleep(0.2)
        assert set(psutil.Process().children()) - before
        control.link.send(Reset())
        left_s = time.monotonic()
        while set(psutil.Process().children()) - before:
            assert time.monotonic() < left_s + 5, "the download goes on"
            time.sleep(0.02)
    hub.may_go.set()
    assert answer(hub_plan(hub, daemon)) == (expected(hub.folder), 0)
