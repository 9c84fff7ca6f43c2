"""Real daemons that are as slow as a device that is declared, and its links: exact answers in the time that
it takes, an error where this machine is slower, and fewer layers for one that slows down while it works."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.core.head.events import (
    Drafted,
    HeadCommand,
    HeadEvent,
    VerifiedArrived,
)
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError
from flowspec.plan.placement import ClusterPlan, StagePlan, weighted_split
from flowspec.plan.timing import DIRECT, INSTANT, Curve, LinkSpec
from flowspec.runtime import timeouts
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.emulation import DeviceEmulation, Emulation
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.pipelines import Recovery
from flowspec.runtime.session import ClusterOptions, Limits, OpenCluster, open_cluster
from flowspec.runtime.transport import TIMER_EARLY_S
from lab.plain_model import PlainModel
from tests.nightly import at_night
from tests.runtime.clusters import PROMPT, plan_for, submit, tokens_of

STAGE = Curve(base_s=0.03, extra_row_s=0.0001)
SAMPLING_S = 0.005
DELAY_S = 0.02


def open_emulated(folder: Path, curve: Curve) -> contextlib.AbstractContextManager[OpenCluster]:
    link = LinkSpec(delay_s=DELAY_S, bandwidth_mbps=100.0, jitter_s=0.001)
    declared = DeviceEmulation(layers=curve, sampling=Curve(base_s=SAMPLING_S), outgoing=link, row_bytes=4096)
    emulation = Emulation(
        devices=(declared, declared), drafting=Curve(base_s=0.03), control=link, first_hop=link
    )
    return open_cluster(
        ClusterOptions(
            model=str(folder),
            dtype="float32",
            local=2,
            context=300,
            log_level="CRITICAL",
            emulation=emulation,
        )
    )


def test_an_emulated_cluster_answers_exactly_and_takes_its_time(folder: Path, reference: PlainModel) -> None:
    # So few passes that no verdict on this machine's speed is due.
    told: list[tuple[HeadEvent, Sequence[HeadCommand], float]] = []
    decoding = Decoding(method="tree-sd", drafters=("ngram",), nodes=4, depth=2)
    with (
        open_emulated(folder, STAGE) as emulated,
        emulated.session(decoding, lambda text, share: None, lambda *event: told.append(event)) as session,
    ):
        answer = session.submit(PROMPT, Sampling(), Limits(new_tokens_max=7, stop_ids=frozenset()), request=1)
        batches = list(answer)
        hops = list(session.head.hops)
    assert [token for batch in batches for token in batch.tokens] == reference.generate(
        PROMPT, Sampling(), 7, frozenset()
    )
    rows = 0
    for first, last in hops:
        rows += first.rows
        is_drawn = rows >= len(PROMPT)  # of earlier chunks of the prompt no token is asked for
        for hop, extra_s in ((first, 0.0), (last, SAMPLING_S * is_drawn)):
            if hop.rows and not hop.dead_between_layers:
                assert hop.compute_s >= STAGE.seconds(hop.rows - hop.dead_late) + extra_s * (
                    hop.dead_late == 0
                )
    trip_s = 3 * (DELAY_S - TIMER_EARLY_S) + 2 * STAGE.base_s + SAMPLING_S
    assert len(batches) > 1
    assert all(batch.at_s - answer.submitted_s >= trip * trip_s for trip, batch in enumerate(batches, 1))
    assert sum(isinstance(event, VerifiedArrived) for event, _, _ in told) >= len(hops) > 0
    assert all(event.ended_s - event.started_s >= 0.03 for event, _, _ in told if isinstance(event, Drafted))


def test_a_profile_that_no_machine_can_meet_ends_in_one_line(folder: Path) -> None:
    with (
        open_emulated(folder, INSTANT) as cluster,
        cluster.session(Decoding(method="ar"), lambda text, share: None) as session,
    ):
        answer = session.submit(
            PROMPT, Sampling(), Limits(new_tokens_max=200, stop_ids=frozenset()), request=1
        )
        with pytest.raises(
            ClusterError, match=r"^device local-\d at .*: stage 1 of 2 cannot keep up .* 0\.00 ms a pass"
        ) as caught:
            tokens_of(answer)
    assert "\n" not in str(caught.value)


LAYERS, LAYER_S = 8, 0.03
HEAT = 3.0
COUNT = 4
BEFORE, AFTER = (4, 4), (6, 2)
MOST_S = 180.0


def split_of(head: Head) -> tuple[int, ...]:
    return tuple(stage.end - stage.first for stage in head.plan.stages)


@at_night
def test_a_device_that_has_become_slower_gets_fewer_layers(
    folder: Path, reference: PlainModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take 30 ms a layer, until one has worked for two seconds."""
    monkeypatch.setattr(timeouts, "CHANGED_S", 1.0)
    monkeypatch.setattr(timeouts, "WATCH_EVERY_S", 0.1)
    board = DeviceEmulation(
        layers=Curve(base_s=LAYERS * LAYER_S), sampling=INSTANT, outgoing=DIRECT, layer_count=LAYERS
    )
    hot = replace(board, cool_s=2.0, heat=HEAT)
    expected = reference.generate(PROMPT, Sampling(), COUNT, frozenset())
    notes: list[str] = []
    splits = [BEFORE]
    with LocalCluster(2, log_level="CRITICAL", devices=(board, hot)) as started:
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
                time.sleep(0.3)  # the head looks every tenth of a second whether there is an answer
                if len(splits) > 1 or split_of(head) != BEFORE:
                    splits.append(split_of(head))
    told = r"device local-1 has slowed down to [34]\d%.*: going over to another plan, which is 1\.[23]"
    assert re.match(told, notes[0]), "to about a third, as far as a busy machine lets it be measured"
    assert [note.partition(" took")[0] for note in notes[1:]] == ["changing the pipeline"]
    assert splits == [BEFORE, AFTER, AFTER], (
        "that this is faster is for tests/sim/test_changes.py, in virtual time"
    )
