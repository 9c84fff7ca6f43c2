"""A real daemon that becomes slow while it works: fewer layers between two answers, and the same tokens."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.core.protocol.messages import Sampling
from flowspec.model.reference import Reference
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.plan.split import weighted_split
from flowspec.plan.timing import DIRECT, INSTANT, Curve
from flowspec.runtime import timeouts
from flowspec.runtime.emulation import DeviceEmulation
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.pipelines import Recovery
from tests.runtime.clusters import PROMPT, plan_for, submit, tokens_of

LAYERS, LAYER_S = 8, 0.04
HEAT = 3.0
COUNT = 6
BEFORE, AFTER = (4, 4), (6, 2)
MOST_S = 120.0


def split_of(head: Head) -> tuple[int, ...]:
    return tuple(stage.end - stage.first for stage in head.plan.stages)


def test_a_device_that_has_become_slower_gets_fewer_layers(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take 40 ms a layer, until one has worked for four seconds."""
    monkeypatch.setattr(timeouts, "CHANGED_S", 3.0)
    board = DeviceEmulation(
        layers=Curve(base_s=LAYERS * LAYER_S), sampling=INSTANT, outgoing=DIRECT, layer_count=LAYERS
    )
    hot = replace(board, cool_s=4.0, heat=HEAT)
    expected = reference.generate(PROMPT, Sampling(), COUNT, frozenset())
    notes: list[str] = []
    splits = [BEFORE]
    with LocalCluster(2, family="llama", log_level="CRITICAL", devices=(board, hot)) as started:
        plan = plan_for(folder, started.wait())

        def replan(names: Sequence[str], slowness: Mapping[str, float]) -> ClusterPlan:
            left = [stage for stage in plan.stages if stage.name in names]
            counts = weighted_split(LAYERS, [1 / slowness.get(stage.name, 1.0) for stage in left])
            ends = [sum(counts[: at + 1]) for at in range(len(counts))]
            stages = [
                StagePlan(name=stage.name, address=stage.address, first=end - count, end=end)
                for stage, count, end in zip(left, counts, ends, strict=True)
            ]
            return replace(plan, stages=tuple(stages))

        def rate(plan: ClusterPlan, slowness: Mapping[str, float]) -> float:
            return 1 / sum(slowness.get(stage.name, 1.0) * (stage.end - stage.first) for stage in plan.stages)

        with Head(plan, recovery=Recovery(replan=replan, rate=rate, on_note=notes.append)) as head:
            began_s = time.monotonic()
            while len(splits) < 3:
                assert time.monotonic() - began_s < MOST_S, notes
                assert tokens_of(submit(head, count=COUNT)) == expected
                time.sleep(1.0)  # the head looks every half a second whether there is an answer
                if len(splits) > 1 or split_of(head) != BEFORE:
                    splits.append(split_of(head))
    told = r"device local-1 has slowed down to [34]\d%.*: going over to another plan, which is 1\.[23]"
    assert re.match(told, notes[0]), "to about a third, as far as a busy machine lets it be measured"
    assert [note.partition(" took")[0] for note in notes[1:]] == ["changing the pipeline"]
    assert splits == [BEFORE, AFTER, AFTER], (
        "that this is faster is for tests/sim/test_heat.py, in virtual time"
    )
