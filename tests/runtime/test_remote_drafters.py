"""Drafters on daemons of their own, in real processes: answers are exact whatever becomes of them, and who is
lost comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from flowspec.bench.checkpoints import VOCABULARY_SIZE, make_variant
from flowspec.core.cluster.forming import Start
from flowspec.core.head.events import Drafted, HeadCommand, HeadEvent
from flowspec.core.methods import make_method
from flowspec.core.protocol.cluster_messages import Assign, Error, Ready
from flowspec.core.protocol.messages import (
    Commit,
    Expand,
    Open,
    Proposed,
    Release,
    Sampling,
    Segment,
    SegmentPart,
)
from flowspec.errors import ClusterError
from flowspec.model.reference import Reference
from flowspec.runtime import timeouts
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster, LocalDaemon
from flowspec.runtime.remote_drafter import PlacedDrafter, RemoteDrafter
from flowspec.runtime.token_stream import TokenStream
from tests import warm
from tests.runtime.clusters import (
    PROMPT,
    Peer,
    drafter_for,
    plan_for,
    submit,
    surviving,
    tokens_of,
    wait_until,
)

COUNT = 120
CONTEXT = 300
SEEDS = (1, 2, 3, 4)
GENERATIONS = count(10)
"""Each hold supersedes the one before."""


@pytest.fixture(scope="module")
def folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Drafters: the target itself, whose guesses come true, and two that know nothing."""
    return [folder, *(make_variant(tmp_path_factory.mktemp(name), name) for name in ("qwen2", "llama-tied"))]


@pytest.fixture
def five() -> Iterator[list[LocalDaemon]]:
    """Two for stages and three for drafters; a test may kill them."""
    with LocalCluster(5, family="llama", log_level="CRITICAL") as started:
        yield started.wait()


def head_of(
    folder: Path,
    daemons: Sequence[LocalDaemon],
    drafters: Sequence[PlacedDrafter],
    notes: list[str],
    heard: Counter[int] | None = None,
) -> Head:
    """A head with these drafters; `heard` counts what each of them answered."""
    plan = plan_for(folder, daemons, context=CONTEXT)

    def watch(event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        if heard is not None and isinstance(event, Drafted):
            heard[event.drafter] += 1

    return Head(
        plan,
        method=make_method("continuous"),
        drafters=drafters,
        recovery=surviving(plan, notes),
        on_event=watch,
    )


def disturbed(answers: Sequence[TokenStream], at: int, disturb: Callable[[], None]) -> list[list[int]]:
    """The answers' tokens; the disturbance comes after `at` of the first one's."""
    first: list[int] = []
    is_disturbed = False
    for batch in answers[0]:
        first += batch.tokens
        if not is_disturbed and len(first) >= at:
            is_disturbed = True
            disturb()
    return [first, *(tokens_of(answer) for answer in answers[1:])]


def ask_all(head: Head) -> list[TokenStream]:
    return [submit(head, count=COUNT, sampling=Sampling(temperature=0.8, seed=seed)) for seed in SEEDS]


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    return [
        reference.generate(PROMPT, Sampling(temperature=0.8, seed=seed), COUNT, frozenset()) for seed in SEEDS
    ]


@pytest.mark.usefixtures("hasty")
def test_four_at_once_with_three_drafters_one_of_which_is_killed_and_comes_back(
    five: list[LocalDaemon], folder: Path, folders: list[Path], expected: list[list[int]]
) -> None:
    notes: list[str] = []
    drafters = [drafter_for(each, daemon) for each, daemon in zip(folders, five[2:], strict=True)]
    victim, heard = five[2], Counter[int]()
    with head_of(folder, five[:2], drafters, notes, heard) as head:
        answers = ask_all(head)
        assert [tokens_of(answer) for answer in answers] == expected
        assert set(heard) == {0, 1, 2}, "all of them draft"
        assert disturbed(ask_all(head), 20, lambda: os.kill(victim.pid, signal.SIGKILL)) == expected
        name = f"drafter {folder.name} on {victim.name}"
        assert notes == [f"{name} is lost (its connection closed)", "answers go on without it"]
        with restarted(victim):
            wait_until(lambda: f"{name} is back" in notes, "the drafter is back")
            for other in five[3:]:  # with them there, whose guesses are taken is the head's choice
                os.kill(other.pid, signal.SIGKILL)
            wait_until(lambda: sum("is lost" in note for note in notes) == 3, "the others are lost")
            heard.clear()
            answers = ask_all(head)
            assert [tokens_of(answer) for answer in answers] == expected
            assert set(heard) == {0}, "it drafts again"
            assert all(
                answer.end is not None and answer.end.statistics["recoveries"] == 0 for answer in answers
            ), "no pipeline was lost"


@pytest.mark.usefixtures("hasty")
def test_answers_begin_without_a_drafter_whose_device_is_absent_and_it_is_taken_in(
    five: list[LocalDaemon], folder: Path, expected: list[list[int]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        late = LocalDaemon(name="late", port=server.getsockname()[1], pid=0)
    notes: list[str] = []
    plan = plan_for(folder, five[:2], context=CONTEXT)
    recovery = replace(surviving(plan, notes), start=Start.SHORT)
    began_s = time.monotonic()
    with Head(
        plan, method=make_method("continuous"), drafters=[drafter_for(folder, late)], recovery=recovery
    ) as head:
        assert time.monotonic() - began_s < timeouts.ABSENT_S + 4
        name = f"drafter {folder.name} on late"
        assert notes == [f"{name} is lost (no answer within 3 s)", "answers go on without it"]
        assert [tokens_of(answer) for answer in ask_all(head)] == expected
        with restarted(late):
            wait_until(lambda: f"{name} is back" in notes, "the drafter is there")
            answers = ask_all(head)
            assert [tokens_of(answer) for answer in answers] == expected
            assert all(
                answer.end is not None and answer.end.statistics["recoveries"] == 0 for answer in answers
            )


@contextlib.contextmanager
def restarted(daemon: LocalDaemon) -> Iterator[None]:
    """The daemon that died, started again where it was."""
    command = [
        sys.executable,
        "-m",
        "flowspec.cli.main",
        "daemon",
        "--port",
        str(daemon.port),
        "--name",
        daemon.name,
    ]
    with warm.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.mark.usefixtures("hasty")
def test_a_drafter_and_a_stage_lost_together(
    five: list[LocalDaemon], folder: Path, folders: list[Path], expected: list[list[int]]
) -> None:
    notes: list[str] = []

    def strike() -> None:
        os.kill(five[3].pid, signal.SIGSTOP)
        os.kill(five[1].pid, signal.SIGKILL)

    with head_of(
        folder, five[:3], [drafter_for(folder, five[3]), drafter_for(folders[1], five[4])], notes
    ) as head:
        try:
            assert disturbed(ask_all(head), 20, strike) == expected
            wait_until(
                lambda: any("local-3 is lost (no sign of life" in text for text in notes),
                "silence is noticed",
            )
        finally:
            os.kill(five[3].pid, signal.SIGCONT)
        assert "device local-1 is lost (its connection closed)" in notes
        wait_until(lambda: f"drafter {folder.name} on local-3 is back" in notes, "it is back when it goes on")
        assert tokens_of(ask_all(head)[0]) == expected[0]


def test_a_drafter_that_is_not_there_at_first_is_named(
    monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster, folder: Path, folders: list[Path]
) -> None:
    monkeypatch.setattr(timeouts, "CONNECT_S", 0.5)
    with pytest.raises(ClusterError, match=r"nobody at 127\.0\.0\.1:9 did not answer"):
        head_of(
            folder,
            cluster.wait()[:2],
            [drafter_for(folders[1], LocalDaemon(name="nobody", port=9, pid=0))],
            [],
        )
    with Head(plan_for(folder, cluster.wait())) as head:
        assert len(tokens_of(submit(head))) == 20, "the stages are free again"


def test_weights_are_sent_to_a_daemon_that_lacks_the_drafter(
    folder: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemons find no model by the head's name for it, which is relative to a folder of the head's."""
    with LocalCluster(2, family="llama", log_level="CRITICAL", cache_dir=tmp_path) as started:
        daemons = started.wait()
        monkeypatch.chdir(folder.parent)
        away = drafter_for(folder, daemons[1])
        away = PlacedDrafter(name=away.name, plan=replace(away.plan, model=folder.name))
        with head_of(folder, daemons[:1], [away], []) as head:
            (remote,) = head.drafters
            assert isinstance(remote, RemoteDrafter)
            assert remote.stage is not None
            assert remote.stage.ready is not None
            assert remote.stage.ready.received_bytes == remote.stage.ready.weight_bytes > 0
            assert tokens_of(submit(head)) == reference.generate(PROMPT, Sampling(), 20, frozenset())


def part(request: int, tokens: Sequence[int]) -> SegmentPart:
    length = len(tokens)
    opening = Open(
        request=request,
        epoch=0,
        keep=0,
        length=length,
        root=length - 1,
        slots=CONTEXT,
        sampling=Sampling(),
        answer_start=length,
    )
    return SegmentPart(
        commit=Commit(request=request, epoch=0, base=length, path=()),
        opening=opening,
        ids=tuple(range(length)),
        parents=tuple(range(-1, length - 1)),
        tokens=tuple(tokens),
        positions=tuple(range(length)),
        committed=(True,) * (length - 1) + (False,),
    )


def assigned(peer: Peer, daemon: LocalDaemon, folder: Path) -> None:
    plan = drafter_for(folder, daemon).plan
    peer.greet()
    assign = Assign(
        model=plan.model,
        fingerprint=plan.fingerprint,
        stage=0,
        stages=1,
        first_layer=0,
        end_layer=plan.layer_count,
        layer_count=plan.layer_count,
        next_hop="",
        next_name="",
        dtype=plan.dtype,
        context=plan.context,
        drafting=plan.drafting,
    )
    assert isinstance(peer.assign(daemon.address, assign), Ready)


def test_a_daemon_proposes_what_the_model_would_say(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    (following,) = reference.generate(PROMPT, Sampling(), 1, frozenset())
    daemon = cluster.wait()[0]
    with Peer(daemon.address, incarnation=next(GENERATIONS)) as peer:
        assigned(peer, daemon, folder)
        peer.link.send(
            Expand(segment=Segment(segment=3, parts=(part(1, PROMPT), part(2, PROMPT[:9]))), width=5)
        )
        found = peer.answer()
        assert isinstance(found, Proposed)
        assert found.job == 3
        assert found.compute_s > 0
        assert [(each.request, each.node, len(each.tokens)) for each in found.proposals] == [
            (1, len(PROMPT) - 1, 5),
            (2, 8, 5),
        ]
        assert found.proposals[0].tokens[0] == following
        peer.link.send(Release(request=1))
        peer.link.send(Expand(segment=Segment(segment=4, parts=(part(3, PROMPT),)), width=1))
        assert isinstance(peer.answer(), Proposed)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Segment(segment=0, parts=()), "control connection carries no Segment"),
        (Commit(request=1, epoch=0, base=1, path=()), "control connection carries no Commit"),
        (
            Expand(segment=Segment(segment=0, parts=(part(1, (5, VOCABULARY_SIZE)),)), width=1),
            f"token ids below {VOCABULARY_SIZE}",
        ),
    ],
)
def test_a_head_that_takes_a_drafter_for_something_else_is_told(
    cluster: LocalCluster, folder: Path, message: Segment | Commit | Expand, said: str
) -> None:
    daemon = cluster.wait()[0]
    with Peer(daemon.address, incarnation=next(GENERATIONS)) as peer:
        assigned(peer, daemon, folder)
        peer.link.send(message)
        refused = peer.answer()
        assert isinstance(refused, Error)
        assert said in refused.text
