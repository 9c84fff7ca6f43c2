"""Heads that mean harm, or are out of their minds: whatever they say, in whatever order, the daemon serves
the next one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowspec.core.protocol.cluster_messages import Error, Loading, Ready, Reset
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles
from flowspec.model.reference import Reference
from flowspec.model.tensors import Tensors
from flowspec.runtime.daemon import Daemon
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from flowspec.runtime.next_hop import NextHop
from flowspec.wire.codec import BYTES, Tensor
from lab.fuzz.samples import MESSAGES
from tests.runtime.clusters import PROMPT, Peer, plan_for, submit, tokens_of, whole_model

Start = Callable[..., LocalDaemon]
ROLES = ("head-control", "head-control", "head-data", "head-weights", "stage")


def exact(folder: Path, daemon: LocalDaemon, reference: Reference) -> None:
    with Head(plan_for(folder, [daemon])) as head:
        assert tokens_of(submit(head)) == reference.generate(PROMPT, Sampling(), 20, frozenset())


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
    plain = NextHop.read

    def broken(*args: Any) -> Any:
        monkeypatch.setattr(NextHop, "read", plain)
        raise ZeroDivisionError

    monkeypatch.setattr(NextHop, "read", broken)
    with pytest.raises(
        ClusterError,
        match=r"alone at .*unexpected error over a message of the next device: ZeroDivisionError",
    ):
        Head(plan_for(folder, daemons))
    assert any(record.exc_info for record in caplog.records)
    with Head(plan_for(folder, daemons)) as head:
        assert tokens_of(submit(head)) == reference.generate(PROMPT, Sampling(), 20, frozenset())


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


@pytest.mark.parametrize("seed", range(3))
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
