"""What a daemon fetches from the hub for a head: a slice's files, if they fit and are allowed, and nothing
for a head that is gone."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import psutil
import pytest

from flowspec.bench.checkpoints import SMALL, make_checkpoint
from flowspec.core.protocol.cluster_messages import Loading, Ping, Ready, Reset
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from flowspec.runtime.weights import server
from flowspec.runtime.weights.offer import Offer
from tests.runtime.clusters import Peer, plan_for, whole_model
from tests.runtime.weights.served import answer, expected

Start = Callable[..., LocalDaemon]
COMMIT = "c" * 40
MODEL = "owner/name"


class FakeHub:
    """A hub that has the files of one folder as `owner/name`. `asked` are the files that were fetched;
    weights wait for `may_go`."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        self.may_go = threading.Event()
        self.may_go.set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.give(has_body=False)

            def do_GET(self) -> None:
                self.give(has_body=True)

            def give(self, *, has_body: bool) -> None:
                path = folder / self.path.rpartition("/")[2]
                if f"/{MODEL}/resolve/" not in self.path or not path.is_file():
                    self.send_response(404)
                    self.send_header("X-Error-Code", "EntryNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                content = path.read_bytes()
                self.send_response(200)
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if has_body:
                    hub.asked.append(path.name)
                    hub.may_go.wait(60)
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def weights_asked(self) -> list[str]:
        return [name for name in self.asked if name.endswith(".safetensors")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """In six files or so."""
    return make_checkpoint(tmp_path / "model", "llama", {**SMALL, "num_key_value_heads": 2}, shard="300KB")


class Cached(ModelFiles):
    """The head's own: as in its cache of the hub."""

    def fingerprint(self) -> str:
        assert self.folder is not None
        return fingerprint(self.folder)


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    found = FakeHub(folder)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{found.server.server_address[1]}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(server, "ModelFiles", lambda name: Cached(str(folder)))
    yield found
    found.may_go.set()
    found.server.shutdown()
    found.server.server_close()


def fingerprint(folder: Path) -> str:
    """What a head says that has this revision in its cache."""
    return hashlib.sha256((folder / "config.json").read_bytes() + b"blobs" + COMMIT.encode()).hexdigest()[:32]


def hub_plan(folder: Path, daemon: LocalDaemon) -> ClusterPlan:
    return replace(plan_for(folder, [daemon]), model=MODEL, fingerprint=fingerprint(folder))


def when_free(plan: ClusterPlan) -> tuple[list[int], int]:
    """`answer`, once the daemon has noticed that the head before is gone."""
    deadline_s = time.monotonic() + 30
    while True:
        try:
            return answer(plan)
        except ClusterError as error:
            if "in use by" not in str(error) or time.monotonic() > deadline_s:
                raise


def test_the_files_of_a_slice_are_fetched_once_and_no_others(
    alone: Start, folder: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Offer, "begin", None)  # the head is not asked
    daemon = alone()
    whole = replace(
        whole_model(MODEL, fingerprint(folder)), stages=2, end_layer=3, next_hop=daemon.address, next_name="x"
    )
    with Peer(daemon.address) as control:
        control.greet()
        assert isinstance(control.assign(daemon.address, whole), Ready)
    files = ModelFiles(str(folder))
    mine = {
        file
        for name, file in files.weight_map().items()
        if name.startswith(("model.embed", *(f"model.layers.{n}." for n in range(3))))
    }
    assert set(hub.weights_asked) == mine < set(files.weight_map().values())
    assert when_free(hub_plan(folder, daemon)) == (expected(folder), 0)
    assert sorted(hub.weights_asked) == sorted(set(files.weight_map().values())), "each once"
    hub.asked.clear()
    assert answer(hub_plan(folder, alone(name="again"))) == (expected(folder), 0)
    assert hub.asked == []


def test_what_does_not_fit_is_not_fetched(alone: Start, folder: Path, hub: FakeHub) -> None:
    said = r"files of 'owner/name' that hold these layers have .*but this daemon may fetch .*--cache-limit"
    with pytest.raises(ClusterError, match=f"alone at .*{said}"):
        Head(hub_plan(folder, alone(cache_bytes=100_000)))
    assert hub.weights_asked == []


def test_a_daemon_may_be_told_to_fetch_nothing(alone: Start, folder: Path, hub: FakeHub) -> None:
    daemon = alone(uses_hub=False)
    tokens, received = answer(hub_plan(folder, daemon))
    assert tokens == expected(folder)
    assert received > 0, "the head has sent it"
    with pytest.raises(
        ClusterError, match=r"none at .*config.json of 'owner/name' is not in the Hugging Face cache"
    ):
        Head(hub_plan(folder, alone(name="none", cache_bytes=0)))
    assert hub.asked == []


def test_a_download_ends_with_its_head(alone: Start, folder: Path, hub: FakeHub) -> None:
    """However slow the hub is: this one says nothing at all."""
    daemon, before = alone(), set(psutil.Process().children())
    hub.may_go.clear()
    with Peer(daemon.address) as control:
        control.greet()
        assert isinstance(
            control.assign(daemon.address, whole_model(MODEL, fingerprint(folder)), until="receiving"),
            Loading,
        )
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
    assert answer(hub_plan(folder, daemon)) == (expected(folder), 0)
