"""Peers that misbehave: the daemon says so, drops them, and keeps serving."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error, Ping, Ready, Welcome
from flowspec.core.protocol.messages import Commit, Open, Sampling, Segment, SegmentPart
from flowspec.model.reference import Reference
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster
from flowspec.wire.codec import Envelope, Tensor, encode
from tests.runtime.clusters import PROMPT, Peer, plan_for, submit, tokens_of, whole_model


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
        assert tokens_of(answer) == reference.generate(PROMPT, Sampling(), 200, frozenset())


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
        assert tokens_of(answer) == reference.generate(PROMPT, Sampling(), 200, frozenset())
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
        assert tokens_of(submit(head)) == reference.generate(PROMPT, Sampling(), 20, frozenset())
