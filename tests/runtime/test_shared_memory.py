"""Daemons of one machine share what is free: none takes all of it for its caches, nor what another was
promised, and a limit above it is no memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from flowspec.core.head.admission import Admission
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import Submit
from flowspec.core.protocol.cluster_messages import Drafting, Ready, Reset
from flowspec.core.protocol.messages import Sampling
from flowspec.core.stage.slots import slots_in
from flowspec.errors import NoRoomError
from flowspec.folders import write_own
from flowspec.host_memory import HostMemory
from flowspec.memory_claims import MemoryClaims, claims_folder
from flowspec.model import accelerator
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.weights import Span
from flowspec.plan.memory import SliceMemory
from flowspec.runtime.loading import cache_memory, check_memory
from flowspec.runtime.machine import Machine
from tests.daemons import daemon_process
from tests.runtime.clusters import Peer, wait_until, whole_model

MIB = 1 << 20
MACHINE = Machine()
NEED = SliceMemory(weight_bytes=50 * MIB, cache_bytes=20 * MIB)
ASSIGN = structs.replace(
    whole_model("m", "f"), stages=4, end_layer=2, next_hop="127.0.0.1:7701", next_name="next"
)
NEAR = 8 * MIB
"""What a process may grow by while it is looked at."""


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    def host_memory(*, promised: Mapping[int, int]) -> HostMemory:
        return HostMemory(total=8000 * MIB, available=1000 * MIB - sum(promised.values()))

    monkeypatch.setattr(accelerator, "host_memory", host_memory)


@pytest.fixture
def alone(tmp_path: Path) -> MemoryClaims:
    return MemoryClaims(tmp_path / "flowspec" / "memory")


class Shared:
    """What is promised on this machine, where another process runs."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.claims = MemoryClaims(folder)
        self.claims.join()
        self.process = psutil.Process(process.pid)
        self.path = folder / f"{process.pid}.json"

    def promise(self, sure: int, most: int) -> None:
        """The other one was promised so much beyond what it has."""
        resident = self.process.memory_info().rss
        claim = {"began": self.process.create_time(), "sure": resident + sure, "most": resident + most}
        write_own(self.path, claim)

    def check(self) -> int:
        return check_memory(NEED, ASSIGN, "cpu", MACHINE, self.claims)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield Shared(tmp_path / "flowspec" / "memory", process)
        process.kill()


def test_the_caches_of_four_daemons_fit_together(alone: MemoryClaims) -> None:
    assert check_memory(NEED, ASSIGN, "cpu", MACHINE, alone) == 950 * MIB
    left = check_memory(NEED, ASSIGN, "cpu", Machine(sharers=4), alone)
    assert left == 200 * MIB
    assert 4 * (left + NEED.weight_bytes) <= 1000 * MIB


def test_one_conversation_always_fits_and_what_does_not_is_refused(alone: MemoryClaims) -> None:
    large = SliceMemory(weight_bytes=400 * MIB, cache_bytes=20 * MIB)
    left = check_memory(large, ASSIGN, "cpu", Machine(sharers=4), alone)
    assert slots_in(left, 1) == 20 * MIB, "with room to work beside it"
    with pytest.raises(NoRoomError, match="1000 MiB are free here;"):
        check_memory(replace(large, weight_bytes=990 * MIB), ASSIGN, "cpu", Machine(sharers=4), alone)
    assert check_memory(NEED, ASSIGN, "cpu", Machine(memory_bytes=1 << 40), alone) == 950 * MIB, (
        "allowed, and not there"
    )


def test_what_another_daemon_was_promised_is_not_free(shared: Shared) -> None:
    """One that was alone when it was given layers was promised all; it has touched next to nothing."""
    least = NEED.total_bytes - NEED.weight_bytes
    for sure, most, left in ((0, 0, 450 * MIB), (100 * MIB, 1000 * MIB, least)):
        shared.promise(sure, most)
        assert shared.check() == left
    shared.promise(900 * MIB, 900 * MIB)
    with pytest.raises(
        NoRoomError, match=r"but (9\d|10\d) MiB are free here beside (89\d|90\d) MiB that other"
    ):
        shared.check()
    shared.promise(-shared.process.memory_info().rss, 100 * MIB)
    assert shared.claims.untouched("sure") == {shared.process.pid: 0}, "not what it has touched"
    assert abs(shared.claims.untouched("most")[shared.process.pid] - 100 * MIB) < NEAR


def test_a_drafter_has_room_for_an_answer_where_others_were_promised_all(
    folder: Path, shared: Shared
) -> None:
    """The head asks no drafter that lacks it: with the least that a device gives it must be enough."""
    shared.promise(100 * MIB, 1000 * MIB)
    files, span = ModelFiles(str(folder)), Span(first=0, end=8, count=8)
    assign = structs.replace(
        whole_model(str(folder), files.fingerprint(), files.spec),
        drafting=Drafting(vocabulary=100, coupled=False),
    )
    part = Slice.load(files, span, assign.dtype, "cpu")
    sizes = (assign.context, assign.nodes_max, assign.cache, assign.sliding_window)
    need = cache_memory(part.spec, span, assign.dtype, *sizes)
    left = check_memory(need, assign, "cpu", MACHINE, shared.claims)
    drafter = DrafterTraits(context=assign.context, cache_slots=slots_in(left, part.slot_bytes))
    longest = Submit(request=1, prompt=(5,), new_tokens_max=99, sampling=Sampling(), stop_ids=frozenset())
    admission = Admission(assign.context, [drafter])
    admission.ask(longest)
    assert admission.may_draft(longest.request, 0)


def test_the_dead_are_promised_nothing(shared: Shared) -> None:
    shared.promise(500 * MIB, 500 * MIB)
    claim = json.loads(shared.path.read_text())["content"]
    write_own(shared.path, {**claim, "began": claim["began"] - 5})
    assert shared.claims.untouched("most") == {}, "its id is another process's now"
    assert not shared.path.exists()
    shared.promise(900 * MIB, 900 * MIB)
    shared.process.send_signal(signal.SIGKILL)
    wait_until(lambda: shared.process.status() == psutil.STATUS_ZOMBIE, "it has ended")
    assert shared.check() == 950 * MIB
    assert not shared.path.exists()


def test_what_is_no_claim_is_nothing(shared: Shared) -> None:
    infinite = '{"began": 1, "sure": Infinity, "most": 1}'
    for text in ("", "[]", '{"began": "x"}', "{}", infinite, "[" * 100_000):
        shared.path.write_text(text)
        shared.path.with_name("name.json").write_text(text)
        assert shared.claims.untouched("sure") == {}
    for claim in (0, [], {"began": "x"}, {"began": 1, "sure": float("inf"), "most": 1}):
        write_own(shared.path, claim)
        assert shared.claims.untouched("sure") == {}
    shared.path.unlink(missing_ok=True)
    os.mkfifo(shared.path)
    assert shared.claims.untouched("sure") == {}


def test_its_own_promise_is_for_others(alone: MemoryClaims, tmp_path: Path) -> None:
    alone.join()
    check_memory(NEED, ASSIGN, "cpu", MACHINE, alone)
    assert alone.untouched("most") == {}
    code = "import json, sys; from pathlib import Path; from flowspec.memory_claims import MemoryClaims\n"
    code += "other = MemoryClaims(Path(sys.argv[1])); other.join()\n"
    code += "print(json.dumps([other.untouched(kind) for kind in sys.argv[2:]])); other.leave()"
    folder = tmp_path / "flowspec" / "memory"
    command = [sys.executable, "-c", code, str(folder), "sure", "most"]
    seen = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for told, expected in zip(json.loads(seen), (NEED.total_bytes, 1000 * MIB), strict=True):
        ((pid, size),) = told.items()
        assert pid == str(os.getpid())
        assert abs(size - expected) < NEAR
    alone.leave()
    assert list(folder.glob("*.json")) == []


def test_a_folder_of_another_user_is_not_believed(
    alone: MemoryClaims, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    alone.join()
    alone.promise(sure=1, most=1)
    assert list(tmp_path.rglob("*.json")) == []


def most_of(path: Path) -> int:
    return int(json.loads(path.read_text())["content"]["most"])


def test_two_real_daemons(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model = ModelFiles(str(folder))
    assign = whole_model(str(folder), model.fingerprint(), model.spec)
    place = claims_folder()
    available = psutil.virtual_memory().available
    with daemon_process("first") as first, daemon_process("second") as second:
        files = {each.name: place / f"{each.process.pid}.json" for each in (first, second)}
        wait_until(lambda: all(path.exists() for path in files.values()), "both are there")
        with Peer(first.address) as one, Peer(second.address) as two:
            for daemon, peer in ((first, one), (second, two)):
                peer.greet()
                assert isinstance(peer.assign(daemon.address, assign), Ready)
            promised = {name: most_of(path) for name, path in files.items()}
            assert 0.35 * available < promised["first"] < 0.65 * available
            assert promised["second"] < 0.65 * available
            one.link.send(Reset())
            wait_until(
                lambda: most_of(files["first"]) < promised["first"] / 2,
                "its head has let go of it",
            )
    assert place.is_relative_to(tmp_path)
    assert list(place.glob("*.json")) == []
