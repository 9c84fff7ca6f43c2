"""Real processes that are killed, stopped and come back: the answer is the undisturbed one, and nobody waits
for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.core.cluster.forming import Start
from flowspec.core.protocol.cluster_messages import Ping, Ready, Reset
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError
from flowspec.model.reference import Reference
from flowspec.runtime import timeouts
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.token_stream import TokenStream
from tests.runtime.clusters import (
    PROMPT,
    Peer,
    plan_for,
    submit,
    surviving,
    tokens_of,
    wait_until,
    whole_model,
)

COUNT = 150


def disturbed(answer: TokenStream, at: int, disturb: Callable[[], None]) -> list[int]:
    """The answer's tokens; the disturbance comes after `at` of them."""
    found: list[int] = []
    is_disturbed = False
    for batch in answer:
        found += batch.tokens
        if not is_disturbed and len(found) >= at:
            is_disturbed = True
            disturb()
    return found


@pytest.mark.parametrize(
    ("victim", "penalties"), [(0, {}), (1, {}), (2, {"frequency_penalty": 0.8, "repetition_penalty": 1.2})]
)
def test_a_daemon_that_is_killed_costs_a_pause_and_not_the_answer(
    doomed: LocalCluster, folder: Path, reference: Reference, victim: int, penalties: dict[str, float]
) -> None:
    """What stands in the text counts as before, where that is looked at: the prompt is the same."""
    daemons, notes = doomed.wait(), []
    sampling = Sampling(temperature=1.0, seed=7, **penalties)
    plan = plan_for(folder, daemons)
    with Head(plan, recovery=surviving(plan, notes)) as head:
        answer = submit(head, count=COUNT, sampling=sampling)
        found = disturbed(answer, 5, lambda: os.kill(daemons[victim].pid, signal.SIGKILL))
        assert found == reference.generate(PROMPT, sampling, COUNT, frozenset())
        assert answer.end is not None
        assert answer.end.statistics["recoveries"] == 1, notes
        assert [stage.plan.name for stage in head.stages] == [
            d.name for d in daemons if d is not daemons[victim]
        ]
        assert notes == [f"device local-{victim} is lost (its connection closed)", "going on with 2 devices"]
        assert tokens_of(submit(head)) == reference.generate(PROMPT, Sampling(), 20, frozenset())


@pytest.mark.parametrize("victim", [0, 2])
def test_a_corrupted_control_frame_costs_a_pause_and_not_the_answer(
    doomed: LocalCluster, folder: Path, reference: Reference, victim: int
) -> None:
    """Without keys nothing below the protocol notices it."""
    daemons, notes = doomed.wait(), []
    plan = plan_for(folder, daemons)
    with Head(plan, recovery=surviving(plan, notes)) as head:
        answer = submit(head, count=COUNT)
        socket = head.stages[victim].connection.socket
        found = disturbed(answer, 5, lambda: socket.send_multipart([b"\xc1\xc1"]))
        assert found == reference.generate(PROMPT, Sampling(), COUNT, frozenset())
        assert answer.end is not None
        assert answer.end.statistics["recoveries"] == 1, notes
        assert [text for text in notes if "lost" in text] == [], "the devices are the same"


@pytest.mark.usefixtures("hasty")
def test_a_daemon_that_is_stopped_is_fenced_and_returns(
    doomed: LocalCluster, folder: Path, reference: Reference
) -> None:
    daemons, notes = doomed.wait(), []
    expected = reference.generate(PROMPT, Sampling(), COUNT, frozenset())
    with Head(plan_for(folder, daemons), recovery=surviving(plan_for(folder, daemons), notes)) as head:
        answer = submit(head, count=COUNT)
        try:
            assert disturbed(answer, 5, lambda: os.kill(daemons[1].pid, signal.SIGSTOP)) == expected
            assert any("local-1 is lost (no sign of life" in text for text in notes), notes
        finally:
            os.kill(daemons[1].pid, signal.SIGCONT)
        wait_until(lambda: "device local-1 is back" in notes, "the device is taken in again")
        assert tokens_of(submit(head, count=COUNT)) == expected


def test_the_last_device_is_waited_for_no_longer_than_asked(doomed: LocalCluster, folder: Path) -> None:
    daemons, notes = doomed.wait()[:1], []
    with Head(
        plan_for(folder, daemons), recovery=surviving(plan_for(folder, daemons), notes, wait_s=1.0)
    ) as head:
        answer = submit(head, count=COUNT)
        with pytest.raises(ClusterError, match="no device is left"):
            disturbed(answer, 5, lambda: os.kill(daemons[0].pid, signal.SIGKILL))


def test_an_answer_that_waits_for_devices_can_be_cancelled(doomed: LocalCluster, folder: Path) -> None:
    daemons, notes = doomed.wait()[:1], []
    with Head(
        plan_for(folder, daemons), recovery=surviving(plan_for(folder, daemons), notes, wait_s=None)
    ) as head:
        answer = submit(head, count=COUNT)

        def disturb() -> None:
            os.kill(daemons[0].pid, signal.SIGKILL)
            wait_until(lambda: any("no device is left" in text for text in notes), "the head knows")
            head.cancel(answer)

        disturbed(answer, 5, disturb)
        assert answer.end is not None
        assert answer.end.reason == "cancelled"


def test_a_daemon_that_dies_while_the_first_pipeline_loads_costs_one_more_and_no_third(
    doomed: LocalCluster, folder: Path, reference: Reference
) -> None:
    daemons, notes = doomed.wait(), []
    plan = plan_for(folder, daemons)
    dying = [daemons[1].pid]

    def progress(text: str, share: float) -> None:
        if dying:
            os.kill(dying.pop(), signal.SIGKILL)

    with Head(plan, progress, recovery=replace(surviving(plan, notes), start=Start.SHORT)) as head:
        assert tokens_of(submit(head)) == reference.generate(PROMPT, Sampling(), 20, frozenset())
        assert [stage.plan.name for stage in head.stages] == ["local-0", "local-2"]
        assert [note.partition(" (")[0] for note in notes] == [
            "device local-1 is lost",
            "going on with 2 devices",
        ]


def test_two_daemons_that_die_one_after_the_other(
    doomed: LocalCluster, folder: Path, reference: Reference
) -> None:
    """The second one dies while the first one is being replaced."""
    daemons, notes = doomed.wait(), []

    def note(text: str) -> None:
        notes.append(text)
        if len(notes) == 1:
            os.kill(daemons[2].pid, signal.SIGKILL)

    plan = plan_for(folder, daemons)
    recovery = replace(surviving(plan, notes), on_note=note)
    with Head(plan, recovery=recovery) as head:
        answer = submit(head, count=COUNT)
        found = disturbed(answer, 5, lambda: os.kill(daemons[0].pid, signal.SIGKILL))
        assert found == reference.generate(PROMPT, Sampling(), COUNT, frozenset())
        assert [stage.plan.name for stage in head.stages] == ["local-1"]


@pytest.mark.usefixtures("hasty")
def test_a_lost_device_that_another_head_has_is_not_back_until_it_is_free(
    doomed: LocalCluster, folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "BACK_S", 10.0)  # the other head is faster
    daemons, notes = doomed.wait()[:2], []
    plan = plan_for(folder, daemons)
    expected = reference.generate(PROMPT, Sampling(), 20, frozenset())
    with Head(plan, recovery=surviving(plan, notes)) as head, Peer(daemons[1].address) as other:
        os.kill(daemons[1].pid, signal.SIGSTOP)
        try:
            wait_until(lambda: any("local-1 is lost" in text for text in notes), "the head knows")
            wait_until(lambda: head.is_formed, "it goes on with the other")
        finally:
            os.kill(daemons[1].pid, signal.SIGCONT)
        other.greet()
        assign = whole_model(plan.model, plan.fingerprint)
        wait_until(
            lambda: isinstance(other.assign(daemons[1].address, assign), Ready),
            "it has heard that its head let go of it",
        )
        for _ in range(24):
            assert tokens_of(submit(head, count=2)) == expected[:2]
            other.link.send(Ping())
            time.sleep(0.5)
        assert "device local-1 is back" not in notes
        assert sum("is lost" in text for text in notes) == 1, notes
        other.link.send(Reset())
        wait_until(lambda: "device local-1 is back" in notes, "it is free, and taken in")
        assert tokens_of(submit(head)) == expected
