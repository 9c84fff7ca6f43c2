"""A real daemon that becomes slow while it works: fewer layers between two answers, faster from then on, and the same tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.core.messages import Sampling
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


def test_a_device_that_has_become_slower_gets_fewer_layers(folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take 40 ms a layer, until one has worked for four seconds."""
    monkeypatch.setattr(timeouts, "CHANGED_S", 3.0)
    board = DeviceEmulation(layers=Curve(base_s=LAYERS * LAYER_S), sampling=INSTANT, outgoing=DIRECT, layer_count=LAYERS)
    hot = replace(board, cool_s=4.0, heat=HEAT)
    expected = reference.generate(PROMPT, Sampling(), COUNT, frozenset())
    notes: list[str] = []
    taken_s: dict[tuple[int, ...], list[float]] = {}
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
            while len(taken_s.get(AFTER, [])) < 2:
                assert time.monotonic() - began_s < MOST_S, notes
                split, answer_s = split_of(head), time.monotonic()
                assert tokens_of(submit(head, count=COUNT)) == expected
                took_s = time.monotonic() - answer_s
                time.sleep(1.0)  # the head looks every half a second whether there is an answer
                if split_of(head) == split:
                    taken_s.setdefault(split, []).append(took_s)
    assert notes[0].startswith("device local-1 has slowed down to 3")
    assert ": going over to another plan, which is 1.3" in notes[0]
    assert [note.partition(" took")[0] for note in notes[1:]] == ["the switch"]
    assert list(taken_s) == [BEFORE, AFTER]
    assert min(taken_s[AFTER]) < 0.9 * taken_s[BEFORE][-1], "faster than it was when it was hot"
