"""Real daemons that compute differently, or wrongly: one arithmetic is agreed and kept; a kernel that is
broken is noticed before a token is drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from flowspec.core.protocol.cluster_messages import Arithmetics, AskArithmetics, Error
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError
from flowspec.model import engines
from flowspec.model.arithmetic import compiled
from flowspec.model.files import ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.cluster import Device
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from flowspec.runtime.pipelines import Recovery
from flowspec.runtime.planning import Replanner
from tests.daemons import DaemonProcess, daemon_process
from tests.runtime.clusters import PROMPT, Peer, listening, plan_for, submit, tokens_of, whole_model

DRAWN = Sampling(temperature=1.0, seed=9)
COUNT = 40


def having(name: str, arithmetics: str) -> contextlib.AbstractContextManager[DaemonProcess]:
    """A daemon whose int8 has these arithmetics, the best first."""
    return daemon_process(name, run=("-m", "tests.model.other_arithmetics", arithmetics), is_warm=True)


@pytest.fixture(scope="module")
def poor() -> Iterator[DaemonProcess]:
    with having("poor", "groups32") as daemon:
        yield daemon


@pytest.fixture
def rich() -> Iterator[DaemonProcess]:
    with having("rich", "fast,groups32") as daemon:
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
    for daemons, name in (((rich,), "fast"), ((poor, rich), "groups32")):
        with Head(planned(folder, *map(listening, daemons))) as head:
            assert head.arithmetic == name
            assert tokens_of(submit(head, sampling=DRAWN)) == expected[:20]


def test_a_daemon_tells_what_it_has_and_refuses_the_rest_in_a_line(folder: Path, poor: DaemonProcess) -> None:
    with Peer(poor.address) as peer:
        peer.greet()
        peer.link.send(AskArithmetics(dtype="int8"))
        assert peer.answer() == Arithmetics(dtype="int8", names=("groups32",))
        assign = whole_model(str(folder), ModelFiles(str(folder)).fingerprint())
        said = peer.assign(poor.address, structs.replace(assign, dtype="int8", arithmetic="fast"))
        assert isinstance(said, Error)
        assert said.cause == "part"
        assert said.text.startswith("expected the arithmetic fast of int8, cpu on "), said.text
        assert said.text.endswith("has groups32")


def test_what_an_earlier_session_began_with_is_kept_or_refused(folder: Path, poor: DaemonProcess) -> None:
    plan = planned(folder, listening(poor))
    recovery = Recovery(replan=lambda devices, slowness: plan, arithmetic="fast")
    with pytest.raises(ClusterError, match=r"device poor at .*: expected the arithmetic fast, .* groups32; "):
        Head(plan, recovery=recovery)


@pytest.mark.usefixtures("hasty")
def test_where_it_cannot_be_kept_the_answer_stops(
    folder: Path, rich: DaemonProcess, poor: DaemonProcess, expected: list[int]
) -> None:
    notes: list[str] = []
    plan = planned(folder, listening(rich))
    devices = [Device(name=each.name, address=each.address) for each in (rich, poor)]
    recovery = Recovery(
        replan=Replanner(plan, devices).plan_of,
        spares={"poor": poor.address},
        on_note=notes.append,
        wait_s=2.0,
    )
    with Head(plan, recovery=recovery) as head:
        assert head.arithmetic == "fast"
        answer = iter(submit(head, count=COUNT, sampling=DRAWN))
        found: list[int] = []
        while len(found) < 5:
            found += next(answer).tokens
        rich.process.kill()
        rich.stop()
        with pytest.raises(ClusterError, match=r"no device that is left can do its part; .* within 2 s"):
            found.extend(token for batch in answer for token in batch.tokens)
    assert found == expected[: len(found)]
    told = "device poor cannot do its part (expected the arithmetic fast, "
    assert any(note.startswith(told) for note in notes)


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
    wrong, path = engines.Verdict(fault="wrong"), compiled.build()
    found = iter([wrong, engines.Verdict(fault="")])
    monkeypatch.setattr(compiled, "levels", lambda: (("-march=native",), ("-march=x86-64",)))
    monkeypatch.setattr(compiled, "build", lambda *_: path)
    monkeypatch.setattr(engines, "_verdict", lambda *_: wrong if is_all else next(found))
    monkeypatch.setattr(engines, "_slowed_by", None)
    monkeypatch.setattr(engines, "_found", {})
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
