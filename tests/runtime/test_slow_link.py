"""A link on which one message takes longer than ZeroMQ waits for a sign of life: it is waited for, and nobody
is lost."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import zmq

from flowspec.core.protocol.messages import Sampling
from flowspec.model.reference import Reference
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.pipelines import Recovery
from flowspec.runtime.replanning import replan
from flowspec.runtime.transport import dealer
from tests.daemons import slow_wire
from tests.runtime.clusters import PROMPT, plan_for, submit, tokens_of

MBPS = 0.008
"""The prompt's activations, 40 rows of 64 numbers, take ten seconds."""


def test_a_connection_has_heartbeats_or_waits_for_acknowledgements() -> None:
    """Which links it closes is tried in network namespaces: `survive --faults frames,slow`."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with dealer(context, "d", None) as control, dealer(context, "d", None, has_pulse=False) as data:
            assert (control.getsockopt(zmq.HEARTBEAT_IVL), control.getsockopt(zmq.TCP_MAXRT)) == (2000, 0)
            assert (data.getsockopt(zmq.HEARTBEAT_IVL), data.getsockopt(zmq.TCP_MAXRT)) == (0, 20_000)
    finally:
        context.destroy(linger=0)


def test_a_link_on_which_a_segment_takes_very_long_is_named_and_costs_nobody(
    cluster: LocalCluster, folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first portion of the prompt, 8 KiB of activations, takes 3 seconds where 2 count as long; of a link
    that is not broken it may take 4."""
    monkeypatch.setattr(timeouts, "STUCK_S", 2.0)
    daemons, notes = cluster.wait()[:2], []
    whole = replace(plan_for(folder, daemons), hidden_size=64)
    with Head(whole):
        pass  # as below
    with slow_wire(daemons[1].address, 0.021) as address:
        plan = replace(whole, stages=(whole.stages[0], replace(whole.stages[1], address=address)))
        devices = [Device(name=stage.name, address=stage.address) for stage in plan.stages]
        with Head(
            plan, recovery=Recovery(replan=partial(replan, plan, devices), on_note=notes.append)
        ) as head:
            for _ in range(2):
                assert tokens_of(submit(head, count=3)) == reference.generate(
                    PROMPT, Sampling(), 3, frozenset()
                )
            assert len(head.stages) == 2, notes
    note, other = notes
    found = re.fullmatch(
        r"the link from local-0 to local-1 carries about (\d+) kbit/s, and holds answers up", other
    )
    assert found is not None
    assert 12 < int(found[1]) < 32, "21 with headers"
    told = r"the link from local-0 to local-1 carries less than \d+ kbit/s: 8 KiB have been .* for \d s"
    assert re.fullmatch(told, note)


def test_a_segment_that_takes_long_on_its_way_costs_nobody(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    daemons, notes = cluster.wait()[:2], []
    whole = plan_for(folder, daemons)
    with Head(whole):
        pass  # the layers are there before the wire is slow: this is about segments
    with slow_wire(daemons[1].address, MBPS) as address:
        plan = replace(whole, stages=(whole.stages[0], replace(whole.stages[1], address=address)))
        devices = [Device(name=stage.name, address=stage.address) for stage in plan.stages]
        with Head(
            plan, recovery=Recovery(replan=partial(replan, plan, devices), on_note=notes.append)
        ) as head:
            assert tokens_of(submit(head, count=3)) == reference.generate(PROMPT, Sampling(), 3, frozenset())
            assert notes == []
            assert len(head.stages) == 2
