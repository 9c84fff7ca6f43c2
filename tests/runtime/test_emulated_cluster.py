"""A local cluster that emulates devices and links: exact answers, as slow as declared, or an error where this
machine is slower."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from flowspec.core.head.events import (
    Drafted,
    HeadCommand,
    HeadEvent,
    Submit,
    VerifiedArrived,
)
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError
from flowspec.model.reference import Reference
from flowspec.plan.timing import INSTANT, Curve, LinkSpec
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.emulation import DeviceEmulation, Emulation
from flowspec.runtime.session import ClusterOptions, Limits, OpenCluster, open_cluster
from flowspec.runtime.transport import TIMER_EARLY_S
from tests.runtime.clusters import PROMPT, tokens_of

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


@pytest.fixture(scope="module")
def emulated(folder: Path) -> Iterator[OpenCluster]:
    with open_emulated(folder, STAGE) as opened:
        yield opened


@pytest.mark.parametrize(
    "decoding",
    [Decoding(method="ar"), Decoding(method="tree-sd", drafters=("ngram",), nodes=4, depth=2)],
    ids=lambda decoding: decoding.method,
)
def test_an_emulated_cluster_answers_exactly_and_takes_its_time(
    emulated: OpenCluster, reference: Reference, decoding: Decoding
) -> None:
    # So few passes that no verdict on this machine's speed is due.
    told: list[tuple[HeadEvent, Sequence[HeadCommand], float]] = []
    with emulated.session(decoding, lambda text, share: None, lambda *event: told.append(event)) as session:
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
    assert len(batches) == 7 if decoding.method == "ar" else len(batches) > 1
    assert all(batch.at_s - answer.submitted_s >= trip * trip_s for trip, batch in enumerate(batches, 1))
    assert isinstance(told[0][0], Submit)
    assert sum(isinstance(event, VerifiedArrived) for event, _, _ in told) >= len(hops) > 0
    assert [now_s for _, _, now_s in told] == sorted(now_s for _, _, now_s in told)
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
