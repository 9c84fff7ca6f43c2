"""Drafters on daemons of their own, in real processes: answers are exact whatever becomes of them, and who is
lost comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from flowspec.bench.checkpoints import VOCABULARY_SIZE, make_variant
from flowspec.core.head.events import Drafted, HeadCommand, HeadEvent
from flowspec.core.methods import make_method
from flowspec.core.protocol.cluster_messages import Error, Ready
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
from flowspec.model.reference import Reference
from flowspec.plan.placement import ClusterPlan, assigns_of
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster, LocalDaemon
from flowspec.runtime.remote_drafter import PlacedDrafter, RemoteDrafter
from flowspec.runtime.token_stream import TokenStream
from tests import warm
from tests.runtime.clusters import (
    PROMPT,
    Peer,
    drafter_for,
    plain,
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


def head_of(
    plan: ClusterPlan,
    drafters: Sequence[PlacedDrafter],
    notes: list[str] | None = None,
    on_event: Callable[[HeadEvent, Sequence[HeadCommand], float], None] | None = None,
) -> Head:
    return Head(
        plan,
        method=make_method("continuous"),
        drafters=drafters,
        recovery=surviving(plan, [] if notes is None else notes),
        on_event=on_event,
    )


def ask_all(head: Head) -> list[TokenStream]:
    return [submit(head, count=COUNT, sampling=Sampling(temperature=0.8, seed=seed)) for seed in SEEDS]


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    return [plain(reference, COUNT, Sampling(temperature=0.8, seed=seed)) for seed in SEEDS]


@contextlib.contextmanager
def restarted(daemon: LocalDaemon) -> Iterator[None]:
    """The daemon that died, started again where it was."""
    flags = ("--port", str(daemon.port), "--name", daemon.name)
    command = [sys.executable, "-m", "flowspec.cli.main", "daemon", *flags]
    with warm.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.mark.usefixtures("hasty")
def test_four_at_once_with_three_drafters_one_of_which_is_killed_and_comes_back(
    folder: Path, folders: list[Path], expected: list[list[int]]
) -> None:
    notes, heard = list[str](), Counter[int]()

    def count_drafts(event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        if isinstance(event, Drafted):
            heard[event.drafter] += 1

    with LocalCluster(5, family="llama", log_level="CRITICAL") as started:
        daemons = started.wait()
        victim, *others = daemons[2:]
        drafters = [drafter_for(each, daemon) for each, daemon in zip(folders, daemons[2:], strict=True)]
        name = f"drafter {folder.name} on {victim.name}"
        with head_of(plan_for(folder, daemons[:2], CONTEXT), drafters, notes, count_drafts) as head:
            assert [tokens_of(answer) for answer in ask_all(head)] == expected
            assert set(heard) == {0, 1, 2}, "all of them draft"
            answers = ask_all(head)
            begun = [list(next(iter(answer)).tokens) for answer in answers]
            os.kill(victim.pid, signal.SIGKILL)
            assert [
                [*one, *tokens_of(answer)] for one, answer in zip(begun, answers, strict=True)
            ] == expected
            wait_until(lambda: len(notes) == 2, "the head knows")
            assert notes == [f"{name} is lost (its connection closed)", "answers go on without it"]
            with restarted(victim):
                wait_until(lambda: f"{name} is back" in notes, "the drafter is back")
                for other in others:  # with them there, whose guesses are taken is the head's choice
                    os.kill(other.pid, signal.SIGKILL)
                wait_until(lambda: sum("is lost" in note for note in notes) == 3, "the others are lost")
                heard.clear()
                answers = ask_all(head)
                assert [tokens_of(answer) for answer in answers] == expected
                assert set(heard) == {0}, "it drafts again"
                ends = [answer.end for answer in answers]
                assert [end.statistics["recoveries"] for end in ends if end is not None] == [0] * 4


def test_weights_are_sent_to_a_daemon_that_lacks_the_drafter(
    folder: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemons find no model by the head's name for it, which is relative to a folder of the head's."""
    with LocalCluster(2, family="llama", log_level="CRITICAL", cache_dir=tmp_path) as started:
        daemons = started.wait()
        monkeypatch.chdir(folder.parent)
        away = drafter_for(folder, daemons[1])
        away = PlacedDrafter(name=away.name, plan=replace(away.plan, model=folder.name))
        with head_of(plan_for(folder, daemons[:1]), [away]) as head:
            (remote,) = head.drafters
            assert isinstance(remote, RemoteDrafter)
            assert remote.stage is not None
            assert remote.stage.ready is not None
            assert remote.stage.ready.received_bytes == remote.stage.ready.weight_bytes > 0
            assert tokens_of(submit(head)) == plain(reference)


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
    (assign,) = assigns_of(plan)
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


def test_a_head_that_takes_a_drafter_for_something_else_is_told(cluster: LocalCluster, folder: Path) -> None:
    daemon = cluster.wait()[0]
    unknown = Segment(segment=0, parts=(part(1, (5, VOCABULARY_SIZE)),))
    for message, said in (
        (Segment(segment=0, parts=()), "carries no Segment"),
        (Commit(request=1, epoch=0, base=1, path=()), "carries no Commit"),
        (Expand(segment=unknown, width=1), f"token ids below {VOCABULARY_SIZE}"),
    ):
        with Peer(daemon.address, incarnation=next(GENERATIONS)) as peer:
            assigned(peer, daemon, folder)
            peer.link.send(message)
            refused = peer.answer()
            assert isinstance(refused, Error)
            assert said in refused.text
