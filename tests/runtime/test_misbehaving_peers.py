"""Peers and heads that misbehave or mean harm: whatever they say, in whatever order, the daemon says so,
drops them, and serves the next one."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error, Loading, Ping, Ready, Reset, Welcome
from flowspec.core.protocol.messages import Commit, Open, Sampling, Segment, SegmentPart
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles
from flowspec.model.reference import Reference
from flowspec.model.tensors import Tensors
from flowspec.runtime.daemon import Daemon
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster, LocalDaemon
from flowspec.runtime.next_hop import NextHop
from flowspec.wire.codec import BYTES, Envelope, Tensor, encode
from lab.fuzz.samples import MESSAGES
from tests.nightly import seeds
from tests.runtime.clusters import Peer, plain, plan_for, submit, tokens_of, whole_model


def test_malformed_frames_are_refused_and_the_daemon_keeps_serving(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    daemons = cluster.wait()
    with Head(plan_for(folder, daemons)) as head:
        answer = submit(head, count=200)
        for frames in (
            [b""],
            [b"\x93\x01"],
            [os.urandom(500)],
            [b"x"] * 5,
            [encode(Envelope(incarnation=1, sender="x", sequence=0, message=Ping()))[0]],
        ):
            with Peer(daemons[1].address) as peer:
                peer.raw(*[bytes(frame) for frame in frames])
                assert isinstance(peer.answer(), Error)
        with Peer(daemons[1].address) as peer:
            peer.greet()
            peer.raw(b"\xc1\xc1")
            assert isinstance(peer.answer(), Error)
        with Peer(daemons[1].address, version="0.0.1") as peer:
            peer.link.send(peer.hello)
            refused = peer.answer()
            assert isinstance(refused, Error)
            assert "install the same version" in refused.text
        with Peer(daemons[1].address, role="stage") as peer:
            peer.greet()
            peer.link.send(Ping())
            assert isinstance(peer.answer(), Error)
        with Peer(daemons[1].address, role="stage") as peer:  # a segment from a stranger: ignored
            peer.greet()
            peer.link.send(Segment(segment=0, parts=()), Tensor(rows=0, width=64, dtype="float32", data=b""))
        assert tokens_of(answer) == plain(reference, 200)


def test_oversized_frames_and_random_bytes_on_the_port_do_no_harm(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    daemons = cluster.wait()
    with Head(plan_for(folder, daemons)) as head:
        answer = submit(head, count=200)
        with Peer(daemons[0].address) as peer:
            peer.raw(b"x" * (limits.PAYLOAD_BYTES_MAX + 1))
        with Peer(daemons[0].address) as peer:
            peer.raw(b"x" * (limits.HEADER_BYTES_MAX + 1))
            assert isinstance(peer.answer(), Error)
        for junk in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(4096),
            b"\xff" + b"\x00" * 8 + b"\x7f\x03" + b"\x00" * 200,
        ):
            with socket.create_connection(("127.0.0.1", daemons[0].port), timeout=5) as raw:
                raw.sendall(junk)
        assert tokens_of(answer) == plain(reference, 200)
    memory = psutil.Process(daemons[0].pid).memory_info().rss
    assert memory < 1 << 30


def test_gaps_in_sequence_are_noticed(cluster: LocalCluster) -> None:
    for gap in (1, -1):
        with Peer(cluster.wait()[0].address) as peer:
            peer.link.send(peer.hello)
            welcome = peer.answer()
            assert isinstance(welcome, Welcome)
            envelope = Envelope(incarnation=5, sender="test", sequence=welcome.count + gap, message=Ping())
            peer.raw(*[bytes(frame) for frame in encode(envelope)])
            refused = peer.answer()
            assert isinstance(refused, Error)
            assert f"expected message {welcome.count} " in refused.text


def test_a_segment_that_cannot_go_on_ends_the_hold_and_what_waits_behind_it(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    """The next one in the queue would otherwise be run on caches that were closed with the assignment, and
    end the daemon."""
    daemons = cluster.wait()[:1]
    plan = plan_for(folder, daemons)
    rows = tuple(range(90))

    def prompt(request: int) -> SegmentPart:
        opening = Open(
            request=request,
            epoch=0,
            keep=0,
            length=len(rows),
            root=rows[-1],
            slots=100,
            sampling=Sampling(),
            answer_start=90,
        )
        commit = Commit(request=request, epoch=0, base=len(rows), path=())
        return SegmentPart(
            commit=commit,
            opening=opening,
            ids=rows,
            parents=(-1, *rows[:-1]),
            tokens=rows,
            positions=rows,
            committed=(True,) * 90,
        )

    with Peer(daemons[0].address) as control, Peer(daemons[0].address, role="stage") as before:
        control.greet()
        before.greet()
        assert isinstance(
            control.assign(daemons[0].address, whole_model(plan.model, plan.fingerprint)), Ready
        )
        for number in range(2):
            before.link.send(Segment(segment=number, parts=(prompt(number),)))
        lost = control.answer()  # there is no data connection on which to answer
        assert isinstance(lost, Error)
        assert "data connection" in lost.text
        again = control.assign(daemons[0].address, whole_model(plan.model, plan.fingerprint))
        assert isinstance(again, Ready), "the daemon lives, and takes the next head"
    with Head(plan) as head:
        assert tokens_of(submit(head)) == plain(reference)


Start = Callable[..., LocalDaemon]
ROLES = ("head-control", "head-control", "head-data", "head-weights", "stage")


def exact(folder: Path, daemon: LocalDaemon, reference: Reference) -> None:
    with Head(plan_for(folder, [daemon])) as head:
        assert tokens_of(submit(head)) == plain(reference)


def test_a_slice_that_is_kept_is_not_taken_for_one_of_a_model_with_fewer_layers(
    alone: Start, folder: Path, reference: Reference
) -> None:
    daemon = alone(cache_bytes=0)
    whole = whole_model(str(folder), plan_for(folder, [daemon]).fingerprint)
    first = replace(whole, stages=2, end_layer=2, next_hop=daemon.address, next_name=daemon.name)
    with Peer(daemon.address) as control:
        control.greet()
        assert isinstance(control.assign(daemon.address, first), Ready)
        control.link.send(Reset())
        refused = control.assign(daemon.address, replace(whole, end_layer=2, layer_count=2))
        assert isinstance(refused, Error)
        assert "has 8 layers, the head expects 2" in refused.text
    exact(folder, daemon, reference)


def test_a_message_that_meets_a_fault_of_ours_costs_its_sender_the_connection_and_nobody_else(
    alone: Start,
    folder: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemon = alone()
    plain = Daemon._start_assignment

    def broken(*args: Any) -> None:
        monkeypatch.setattr(Daemon, "_start_assignment", plain)
        raise ZeroDivisionError

    monkeypatch.setattr(Daemon, "_start_assignment", broken)
    with Peer(daemon.address) as control:
        control.greet()
        refused = control.assign(daemon.address, whole_model(str(folder), "0"))
        assert isinstance(refused, Error)
        assert refused.text.startswith(
            "unexpected error over this message: ZeroDivisionError; see the daemon's log"
        )
    assert any(record.exc_info for record in caplog.records)
    exact(folder, daemon, reference)


def test_a_fault_over_a_word_of_the_next_device_ends_the_hold_and_nothing_else(
    alone: Start,
    folder: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemons = [alone(), alone(name="next")]
    read = NextHop.read

    def broken(*args: Any) -> Any:
        monkeypatch.setattr(NextHop, "read", read)
        raise ZeroDivisionError

    monkeypatch.setattr(NextHop, "read", broken)
    with pytest.raises(
        ClusterError,
        match=r"alone at .*unexpected error over a message of the next device: ZeroDivisionError",
    ):
        Head(plan_for(folder, daemons))
    assert any(record.exc_info for record in caplog.records)
    with Head(plan_for(folder, daemons)) as head:
        assert tokens_of(submit(head)) == plain(reference)


def test_loading_stops_when_its_head_is_gone(
    alone: Start, folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, reads = alone(), list[str]()
    plain = Tensors.copy_into

    def slow(tensors: Tensors, name: str, part: Any) -> None:
        reads.append(name)
        time.sleep(0.02)
        plain(tensors, name, part)

    monkeypatch.setattr(Tensors, "copy_into", slow)
    whole = whole_model(str(folder), plan_for(folder, [daemon]).fingerprint)
    with Peer(daemon.address) as control:
        control.greet()
        assert isinstance(control.assign(daemon.address, whole, until="loading"), Loading)
        control.link.send(Reset())
        time.sleep(1)
    done = len(reads)
    time.sleep(0.5)
    assert len(reads) == done, "nothing is loaded any more"
    count = len(set(ModelFiles(str(folder)).extents()))
    assert 0 < done < count, "it was in the middle"
    monkeypatch.undo()
    exact(folder, daemon, reference)


@pytest.mark.parametrize("seed", seeds(2, 30))
def test_messages_of_all_kinds_in_any_order_harm_nobody_who_comes_later(
    alone: Start, folder: Path, reference: Reference, caplog: pytest.LogCaptureFixture, seed: int
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
    exact(folder, daemon, reference)
    assert not [record for record in caplog.records if record.exc_info]
