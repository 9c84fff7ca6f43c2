"""Real daemons that compute differently, or wrongly: one arithmetic is agreed, kept, and changed if that is
allowed; a kernel that is broken is noticed before a token is drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from flowspec.core.protocol.cluster_messages import Arithmetics, AskArithmetics, Error
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError
from flowspec.model import trials
from flowspec.model.files import ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.model.trials import NoRightKernelError
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.cluster import Device
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from flowspec.runtime.pipelines import Recovery
from flowspec.runtime.replanning import replan
from flowspec.runtime.token_stream import ArithmeticChanged
from tests.daemons import DaemonProcess, daemon_process
from tests.nightly import at_night
from tests.runtime.clusters import PROMPT, Peer, listening, plan_for, submit, tokens_of, whole_model

DRAWN = Sampling(temperature=1.0, seed=9)
COUNT = 40


def having(name: str, arithmetics: str) -> contextlib.AbstractContextManager[DaemonProcess]:
    """A daemon whose int8 has these arithmetics, the best first."""
    return daemon_process(name, run=("-m", "tests.model.other_arithmetics", arithmetics), is_warm=True)


@pytest.fixture(scope="module")
def poor() -> Iterator[DaemonProcess]:
    with having("poor", "digits") as daemon:
        yield daemon


@pytest.fixture
def rich() -> Iterator[DaemonProcess]:
    with having("rich", "fast,digits") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    step_by_step = StepByStep.load(ModelFiles(str(folder)), "int8")
    return list(step_by_step.generate(PROMPT, DRAWN, COUNT, frozenset()))


def planned(folder: Path, *daemons: LocalDaemon) -> ClusterPlan:
    return replace(plan_for(folder, daemons), dtype="int8")


def test_the_best_that_all_have_is_agreed(
    folder: Path, rich: DaemonProcess, poor: DaemonProcess, expected: list[int]
) -> None:
    for daemons, name in (((rich,), "fast"), ((poor, rich), "digits")):
        with Head(planned(folder, *map(listening, daemons))) as head:
            assert head.arithmetic == name
            answer = submit(head, sampling=DRAWN)
            assert tokens_of(answer) == expected[:20]
            assert (answer.arithmetic, answer.changes) == (name, [])


def test_a_daemon_tells_what_it_has_and_refuses_the_rest_in_a_line(folder: Path, poor: DaemonProcess) -> None:
    with Peer(poor.address) as peer:
        peer.greet()
        peer.link.send(AskArithmetics(dtype="int8"))
        assert peer.answer() == Arithmetics(dtype="int8", names=("digits",))
        assign = whole_model(str(folder), ModelFiles(str(folder)).fingerprint())
        said = peer.assign(poor.address, replace(assign, dtype="int8", arithmetic="fast"))
        assert isinstance(said, Error)
        assert said.cause == "part"
        assert said.text.startswith("expected the arithmetic fast of int8, cpu on "), said.text
        assert said.text.endswith("has digits")


def test_what_an_earlier_session_began_with_is_kept_or_refused(folder: Path, poor: DaemonProcess) -> None:
    plan = planned(folder, listening(poor))
    recovery = Recovery(replan=lambda devices, slowness: plan, arithmetic="fast")
    with pytest.raises(ClusterError, match=r"device poor at .*: it lacks the arithmetic fast, which is kept"):
        Head(plan, recovery=recovery)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("may_change", [pytest.param(False, marks=at_night), True])
def test_where_it_cannot_be_kept_the_answer_stops_or_goes_on_and_says_from_which_token_on(
    folder: Path, rich: DaemonProcess, poor: DaemonProcess, expected: list[int], may_change: bool
) -> None:
    notes: list[str] = []
    plan = planned(folder, listening(rich))
    devices = [Device(name=each.name, address=each.address) for each in (rich, poor)]
    recovery = Recovery(
        replan=partial(replan, plan, devices),
        spares={"poor": poor.address},
        on_note=notes.append,
        wait_s=60.0 if may_change else 2.0,
        may_change=may_change,
    )
    with Head(plan, recovery=recovery) as head:
        assert head.arithmetic == "fast"
        answer = submit(head, count=COUNT, sampling=DRAWN)
        found: list[int] = []
        with contextlib.nullcontext() if may_change else pytest.raises(ClusterError) as refusal:
            for batch in answer:
                found += batch.tokens
                if len(found) >= 5 and rich.process.poll() is None:
                    rich.process.kill()
                    rich.stop()
        if not may_change:
            assert refusal is not None
            told = str(refusal.value)
            assert told.startswith("poor lacks the arithmetic fast; --allow-arithmetic-change goes on")
            assert told.endswith("nothing changed within 2 s")
            return
        assert found == expected
        ((changed),) = answer.changes
        assert isinstance(changed, ArithmeticChanged)
        assert (answer.arithmetic, changed.arithmetic, head.arithmetic) == ("fast", "digits", "digits")
        assert 5 <= changed.token < COUNT
        assert f"the answer goes on with the arithmetic digits from token {changed.token + 1} on" in notes
        later = submit(head, sampling=DRAWN)
        assert tokens_of(later) == found[:20]
        assert (later.arithmetic, later.changes) == ("digits", [])


@pytest.mark.parametrize("is_all", [False, True])
def test_a_kernel_that_is_broken_is_not_used_and_where_none_is_right_the_head_says_so(
    alone: Callable[..., LocalDaemon],
    folder: Path,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_all: bool,
) -> None:
    """Which ones are found is for tests/model/test_kernels; here a daemon draws tokens, and serves on."""
    verdict, _ = trials.prepare()

    def found() -> tuple[trials.Verdict, str]:
        if is_all:
            raise NoRightKernelError("FlowSpec's kernels do not run right on it; install another gcc")
        return verdict, "kernels that were compiled with -march=native: wrong"

    monkeypatch.setattr(trials, "prepare", lambda *_: found())
    monkeypatch.setattr(trials, "_found", {})
    plan = planned(folder, alone(name="broken"))
    for _ in range(2):
        if is_all:
            with pytest.raises(ClusterError, match=r"broken .*kernels do not run right .*; install another"):
                Head(plan)
        else:
            with Head(plan) as head:
                assert tokens_of(submit(head, sampling=DRAWN)) == expected[:20]
    told = "may be slow, for kernels that were compiled with -march=native: wrong"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [told in text for text in warnings] == [True] * (not is_all), "and not again with each assignment"
