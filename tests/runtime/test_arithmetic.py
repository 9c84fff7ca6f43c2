"""Real daemons that compute differently, or wrongly: one arithmetic is agreed, kept, and changed if that is
allowed; a kernel that is broken is noticed before a token is drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from flowspec.core.protocol.cluster_messages import Arithmetics, AskArithmetics, Error, Loading
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError, FlowSpecError
from flowspec.model.files import ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device
from flowspec.runtime.head import Head
from flowspec.runtime.pipelines import Recovery
from flowspec.runtime.replanning import replan
from flowspec.runtime.token_stream import ArithmeticChanged
from tests.caches import BUILT, make_cache
from tests.daemons import DaemonProcess, daemon_process
from tests.runtime.clusters import PROMPT, Peer, listening, plan_for, submit, tokens_of, whole_model

DRAWN = Sampling(temperature=1.0, seed=9)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", make_cache(folder, BUILT))
        yield folder


@pytest.fixture(scope="module")
def rich(cache: Path) -> Iterator[DaemonProcess]:
    with having("rich", "fast,digits") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def poor(cache: Path) -> Iterator[DaemonProcess]:
    with having("poor", "digits") as daemon:
        yield daemon


def having(name: str, arithmetics: str) -> contextlib.AbstractContextManager[DaemonProcess]:
    """A daemon whose int8 has these arithmetics, the best first."""
    return daemon_process(name, run=("-m", "tests.model.other_arithmetics", arithmetics))


def planned(folder: Path, *daemons: DaemonProcess) -> ClusterPlan:
    return replace(plan_for(folder, [listening(each) for each in daemons]), dtype="int8")


def expected(folder: Path, count: int) -> list[int]:
    files = ModelFiles(str(folder))
    return list(StepByStep.load(files, "int8").generate(PROMPT, DRAWN, count, frozenset()))


def test_the_best_that_all_have_is_agreed(folder: Path, rich: DaemonProcess, poor: DaemonProcess) -> None:
    for daemons, name in (((rich,), "fast"), ((rich, poor), "digits"), ((poor, rich), "digits")):
        with Head(planned(folder, *daemons)) as head:
            assert head.arithmetic == name
            answer = submit(head, sampling=DRAWN)
            assert tokens_of(answer) == expected(folder, 20)
            assert (answer.arithmetic, answer.changes) == (name, [])


def test_a_daemon_tells_what_it_has_and_refuses_the_rest_in_a_line(folder: Path, poor: DaemonProcess) -> None:
    with Peer(poor.address) as peer:
        peer.greet()
        peer.link.send(AskArithmetics(dtype="int8"))
        while isinstance(told := peer.answer(), Loading):  # it tries its kernels first, if nobody has
            assert told.doing == "trying kernels"
        assert told == Arithmetics(dtype="int8", names=("digits",))
        assign = whole_model(str(folder), ModelFiles(str(folder)).fingerprint())
        said = peer.assign(poor.address, replace(assign, dtype="int8", arithmetic="fast"))
        assert isinstance(said, Error)
        assert said.cause == "part"
        assert said.text.startswith("expected the arithmetic fast of int8, cpu with torch "), said.text
        assert said.text.endswith("has digits")


def test_what_an_earlier_session_began_with_is_kept_or_refused(folder: Path, poor: DaemonProcess) -> None:
    plan = planned(folder, poor)
    recovery = Recovery(replan=lambda devices, slowness: plan, arithmetic="fast")
    with pytest.raises(ClusterError, match=r"device poor at .*: it lacks the arithmetic fast, which is kept"):
        Head(plan, recovery=recovery)


@pytest.mark.parametrize("may_change", [False, True])
def test_where_it_cannot_be_kept_the_answer_stops_or_goes_on_and_says_from_which_token_on(
    folder: Path,
    cache: Path,
    poor: DaemonProcess,
    may_change: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeouts, "PROBE_EVERY_S", 0.5)
    monkeypatch.setattr(timeouts, "BACK_S", 0.5)
    notes: list[str] = []
    with having("doomed", "fast,digits") as doomed:
        plan = planned(folder, doomed)
        devices = [Device(name=each.name, address=each.address) for each in (doomed, poor)]
        recovery = Recovery(
            replan=partial(replan, plan, devices),
            spares={"poor": poor.address},
            on_note=notes.append,
            wait_s=60.0 if may_change else 4.0,
            may_change=may_change,
        )
        with Head(plan, recovery=recovery) as head:
            assert head.arithmetic == "fast"
            answer = submit(head, count=150, sampling=DRAWN)
            found: list[int] = []
            with contextlib.nullcontext() if may_change else pytest.raises(ClusterError) as refusal:
                for batch in answer:
                    found += batch.tokens
                    if len(found) >= 5 and doomed.process.poll() is None:
                        doomed.process.kill()
                        doomed.stop()
            if not may_change:
                assert refusal is not None
                told = str(refusal.value)
                assert told.startswith("poor lacks the arithmetic fast; --allow-arithmetic-change goes on")
                assert told.endswith("nothing changed within 4 s")
                return
            assert found == expected(folder, 150)
            ((changed),) = answer.changes
            assert isinstance(changed, ArithmeticChanged)
            assert (answer.arithmetic, changed.arithmetic, head.arithmetic) == ("fast", "digits", "digits")
            assert 5 <= changed.token < 150
            assert f"the answer goes on with the arithmetic digits from token {changed.token + 1} on" in notes
            later = submit(head, sampling=DRAWN)
            assert tokens_of(later) == found[:20]
            assert (later.arithmetic, later.changes) == ("digits", [])


def asked(folder: Path, daemon: DaemonProcess) -> list[int]:
    """An answer in int8."""
    with Head(replace(plan_for(folder, [listening(daemon)]), dtype="int8")) as head:
        return tokens_of(submit(head, sampling=Sampling(temperature=1.0, seed=9)))


@pytest.mark.parametrize(
    ("how", "answers", "told"),
    [
        ("wrong", 2, "plain is used, for wrong computes something else than it should"),
        (
            "sigill,hang",
            1,
            "plain is used, for sigill ran an instruction that this processor does not have; hang gave",
        ),
    ],
)
def test_answers_are_right_where_kernels_are_broken(
    how: str, answers: int, told: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", make_cache(tmp_path / "cache", BUILT))
    expected = StepByStep.load(ModelFiles(str(folder)), "int8").generate(
        PROMPT, Sampling(temperature=1.0, seed=9), 20, frozenset()
    )
    with daemon_process("broken", run=("-m", "tests.model.broken_kernels", how)) as daemon:
        for _ in range(answers):
            assert asked(folder, daemon) == list(expected)
        daemon.stop()
        warnings = [line for line in daemon.lines if "WARNING" in line]
        assert [told in line for line in warnings] == [True], "and not again with each assignment"


def test_where_none_is_right_the_head_says_so_and_the_daemon_serves_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", make_cache(tmp_path / "cache", BUILT))
    with daemon_process("broken", run=("-m", "tests.model.broken_kernels", "wrong,only")) as daemon:
        for _ in range(2):
            with pytest.raises(
                FlowSpecError,
                match=r"broken .*int8 does not run right on cpu .*: wrong computes .*; use another --dtype",
            ):
                asked(folder, daemon)
