"""Peers and heads that misbehave or mean harm, and errors that nobody foresaw.

Whatever peers say, in whatever order, the daemon says so, drops them, and serves the next one. Of an error in
a compute thread the head gets one line, the daemon's log the traceback, and the next head is served.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowspec.core.methods import make_method
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error, Loading, Ping, Ready, Reset, Welcome
from flowspec.core.protocol.messages import Segment
from flowspec.draft.language import LanguageModelDrafter
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.tensors import Tensors
from flowspec.runtime import loading
from flowspec.runtime.daemon import Daemon
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from flowspec.runtime.next_hop import NextHop
from flowspec.wire.codec import BYTES, Envelope, Tensor, encode
from lab.fuzz.samples import MESSAGES
from lab.plain_model import PlainModel
from tests.daemons import DaemonProcess
from tests.nightly import seeds
from tests.runtime.clusters import (
    Peer,
    drafter_for,
    listening,
    plain,
    plan_for,
    prompt_part,
    submit,
    surviving,
    tokens_of,
    wait_until,
    whole_model,
)


def test_malformed_frames_are_refused_and_the_daemon_keeps_serving(
    daemons: list[LocalDaemon], folder: Path, reference: PlainModel
) -> None:
    there = daemons[1]
    with Head(plan_for(folder, daemons[:3])) as head:
        answer = submit(head, count=200)
        for frames in (
            [b""],
            [b"\x93\x01"],
            [os.urandom(500)],
            [b"x"] * 5,
            [b"x" * (limits.HEADER_BYTES_MAX + 1)],
            [encode(Envelope(incarnation=1, sender="x", sequence=0, message=Ping()))[0]],
        ):
            with Peer(there.address) as peer:
                peer.raw(*[bytes(frame) for frame in frames])
                assert isinstance(peer.answer(), Error)
        with Peer(there.address) as peer:
            peer.greet()
            peer.raw(b"\xc1\xc1")
            assert isinstance(peer.answer(), Error)
        with Peer(there.address, version="0.0.1") as peer:
            peer.link.send(peer.hello)
            refused = peer.answer()
            assert isinstance(refused, Error)
            assert "install the same version" in refused.text
        with Peer(there.address, role="stage") as peer:
            peer.greet()
            peer.link.send(Ping())
            assert isinstance(peer.answer(), Error)
        with Peer(there.address, role="stage") as peer:  # a segment from a stranger: ignored
            peer.greet()
            peer.link.send(Segment(segment=0, parts=()), Tensor(rows=0, width=64, dtype="float32", data=b""))
        with Peer(there.address) as peer:
            peer.raw(b"x" * (limits.PAYLOAD_BYTES_MAX + 1))
        for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f\x03"):
            with socket.create_connection(("127.0.0.1", there.port), timeout=5) as raw:
                raw.sendall(junk)
        assert tokens_of(answer) == plain(reference, 200)
    assert psutil.Process(there.pid).memory_info().rss < 1 << 30


def test_gaps_in_sequence_are_noticed(daemons: list[LocalDaemon]) -> None:
    for gap in (1, -1):
        with Peer(daemons[0].address) as peer:
            peer.link.send(peer.hello)
            welcome = peer.answer()
            assert isinstance(welcome, Welcome)
            envelope = Envelope(incarnation=5, sender="test", sequence=welcome.count + gap, message=Ping())
            peer.raw(*[bytes(frame) for frame in encode(envelope)])
            refused = peer.answer()
            assert isinstance(refused, Error)
            assert f"expected message {welcome.count} " in refused.text


def test_a_segment_that_cannot_go_on_ends_the_hold_and_what_waits_behind_it(
    daemons: list[LocalDaemon], folder: Path, reference: PlainModel
) -> None:
    """The next one in the queue would otherwise be run on caches that were closed with the assignment, and
    end the daemon."""
    there = daemons[0]
    plan = plan_for(folder, [there])
    with Peer(there.address) as control, Peer(there.address, role="stage") as before:
        control.greet()
        before.greet()
        assert isinstance(control.assign(there.address, whole_model(plan.model, plan.fingerprint)), Ready)
        for number in range(2):
            before.link.send(Segment(segment=number, parts=(prompt_part(number, range(90), slots=100),)))
        lost = control.answer()  # there is no data connection on which to answer
        assert isinstance(lost, Error)
        assert "data connection" in lost.text
    with Head(plan) as head:
        assert tokens_of(submit(head)) == plain(reference), "the daemon lives"


Start = Callable[..., LocalDaemon]
ROLES = ("head-control", "head-control", "head-data", "head-weights", "stage")


def exact(folder: Path, reference: PlainModel, *daemons: LocalDaemon) -> None:
    with Head(plan_for(folder, daemons)) as head:
        assert tokens_of(submit(head)) == plain(reference)


def test_a_message_that_meets_a_fault_of_ours_costs_its_sender_the_connection_and_nobody_else(
    alone: Start,
    folder: Path,
    reference: PlainModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A head's message, or a word of the next device, which ends the hold."""
    daemons = [alone(), alone(name="next")]

    def fail(place: type, name: str) -> None:
        plain = getattr(place, name)

        def broken(*args: Any) -> None:
            monkeypatch.setattr(place, name, plain)
            raise ZeroDivisionError

        monkeypatch.setattr(place, name, broken)

    fail(Daemon, "_start_assignment")
    with Peer(daemons[0].address) as control:
        control.greet()
        refused = control.assign(daemons[0].address, whole_model(str(folder), "0"))
        assert isinstance(refused, Error)
        assert refused.text.startswith(
            "unexpected error over this message: ZeroDivisionError; see the daemon's log"
        )
    assert any(record.exc_info for record in caplog.records)
    caplog.clear()
    fail(NextHop, "read")
    with pytest.raises(
        ClusterError,
        match=r"alone at .*unexpected error over a message of the next device: ZeroDivisionError",
    ):
        Head(plan_for(folder, daemons))
    assert any(record.exc_info for record in caplog.records)
    exact(folder, reference, *daemons)


def test_loading_stops_when_its_head_is_gone(
    alone: Start, folder: Path, reference: PlainModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, reads, is_gone = alone(), list[str](), list[bool]()
    plain = Tensors.copy_into

    def slow(tensors: Tensors, name: str, part: Any) -> None:
        reads.append(name)
        if len(reads) == 3:
            wait_until(lambda: is_gone, "the head is gone")
            time.sleep(0.2)  # the daemon hears of it meanwhile
        plain(tensors, name, part)

    monkeypatch.setattr(Tensors, "copy_into", slow)
    whole = whole_model(str(folder), plan_for(folder, [daemon]).fingerprint)
    with Peer(daemon.address) as control:
        control.greet()
        assert isinstance(control.assign(daemon.address, whole, until="loading"), Loading)
        wait_until(lambda: len(reads) == 3, "it is in the middle")
        control.link.send(Reset())
        is_gone.append(True)
        time.sleep(1)
    assert len(reads) < len(set(ModelFiles(str(folder)).extents())), "it stopped there"
    monkeypatch.undo()
    exact(folder, reference, daemon)


@pytest.mark.parametrize("seed", seeds(1, 30))
def test_messages_of_all_kinds_in_any_order_harm_nobody_who_comes_later(
    alone: Start, folder: Path, reference: PlainModel, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    daemon, draw = alone(), random.Random(seed)
    whole = whole_model(str(folder), plan_for(folder, [daemon]).fingerprint)
    for _ in range(12):
        with Peer(daemon.address, draw.choice(ROLES), incarnation=draw.randrange(3)) as peer:
            peer.greet()
            for _ in range(draw.randrange(1, 12)):
                message = draw.choice([whole, *MESSAGES])
                data = Tensor(rows=1, width=3, dtype=BYTES, data=b"abc") if draw.random() < 0.2 else None
                if not peer.link.send(message, data):
                    break
    exact(folder, reference, daemon)
    assert not [record for record in caplog.records if record.exc_info]


COUNT = 40
WHAT_TO_DO = "see the daemon's log there, and report it"


def break_once(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, after: int = 0) -> Callable[[], bool]:
    """Has a function fail with an odd error at one of its calls; what is returned tells whether it has."""
    right, calls, lock = getattr(place, name), 0, threading.Lock()

    def broken(*args: Any, **others: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            number = calls
        if number == after + 1:
            raise KeyError("odd\nand on a second line")
        return right(*args, **others)

    monkeypatch.setattr(place, name, broken)
    return lambda: calls > after


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """What the daemon wrote about it, with the traceback."""
    return "".join(record.exc_text or "" for record in caplog.records)


def test_while_a_slice_is_loaded(
    alone: Start,
    folder: Path,
    reference: PlainModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemon = alone()
    break_once(monkeypatch, loading, "check_memory")
    with pytest.raises(ClusterError) as caught:
        Head(plan_for(folder, [daemon]))
    what = "unexpected error while loading layers 0 to 7 in float32: KeyError: 'odd"
    assert str(caught.value).startswith(f"device alone at {daemon.address}: {what}")
    assert str(caught.value).endswith(WHAT_TO_DO)
    assert "\n" not in str(caught.value)
    assert "in _load" in logged(caplog)
    exact(folder, reference, daemon)


def test_while_layers_run_an_answer_goes_on_without_the_stage_that_met_it(
    alone: Start,
    folder: Path,
    reference: PlainModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan, notes = plan_for(folder, [alone(name=name) for name in ("one", "two")]), list[str]()
    has_failed = break_once(monkeypatch, Slice, "run", after=20)
    with Head(plan, recovery=surviving(plan, notes)) as head:
        assert tokens_of(submit(head, count=COUNT)) == plain(reference, COUNT)
    assert has_failed()
    assert "in _run_layers" in logged(caplog)
    assert notes[0].partition(" (")[0] in ("device one is lost", "device two is lost")
    assert "unexpected error while running layers: KeyError" in notes[0]
    assert notes[0].endswith(f"{WHAT_TO_DO})")


@pytest.mark.usefixtures("hasty")
def test_answers_go_on_without_the_drafter_that_met_it_and_it_comes_back(
    alone: Start, folder: Path, reference: PlainModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, notes = plan_for(folder, [alone()]), list[str]()
    break_once(monkeypatch, LanguageModelDrafter, "draft", after=3)
    drafters, recovery = [drafter_for(folder, alone(name="beside"))], surviving(plan, notes)
    with Head(plan, method=make_method("continuous"), drafters=drafters, recovery=recovery) as head:
        name = f"drafter {folder.name} on beside"

        def is_lost() -> bool:
            """No token waits for a drafter: answers can end before it has drafted so often."""
            assert tokens_of(submit(head, count=COUNT)) == plain(reference, COUNT)
            return bool(notes)

        wait_until(is_lost, "the drafter is lost")
        assert notes[0].startswith(f"{name} is lost (unexpected error while drafting: KeyError")
        wait_until(lambda: f"{name} is back" in notes, "the drafter is back")
        assert tokens_of(submit(head, count=COUNT)) == plain(reference, COUNT)


def test_a_broken_process_leaves_in_its_log_where_it_was(folder: Path) -> None:
    """What no Python code can catch: SIGILL of a kernel that this processor lacks, torch's abort."""
    daemon = DaemonProcess("broken")
    head = Head(plan_for(folder, [listening(daemon)]))
    os.kill(daemon.process.pid, signal.SIGILL)
    assert daemon.process.wait(30) == -signal.SIGILL
    with (
        head,
        pytest.raises(
            ClusterError, match=r"broken .*was lost.*: its connection closed; see the daemon's log there"
        ),
    ):
        tokens_of(submit(head))
    daemon.stop()
    text = "".join(daemon.lines)
    assert "Fatal Python error: Illegal instruction" in text
    assert "in _turn" in text


def test_an_answer_that_is_asked_for_as_the_head_ends_gets_an_error(
    alone: Callable[..., LocalDaemon], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Head(plan_for(folder, [alone()])) as head:
        monkeypatch.setattr(head, "_meanwhile", lambda: True)  # nobody looks at what is asked
        asked = submit(head)
    with pytest.raises(ClusterError, match="the head is closed"):
        tokens_of(asked)
