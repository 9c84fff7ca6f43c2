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
from pathlib import Path

import pytest

from flowspec.bench.checkpoints import VOCABULARY_SIZE, make_variant
from flowspec.core.head.events import Drafted, HeadCommand, HeadEvent
from flowspec.core.methods import make_method
from flowspec.core.protocol.cluster_messages import Error, Ready
from flowspec.core.protocol.messages import (
    Commit,
    Expand,
    Proposed,
    Release,
    Sampling,
    Segment,
)
from flowspec.model.reference import Reference
from flowspec.plan.placement import ClusterPlan, assigns_of
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster, LocalDaemon
from flowspec.runtime.remote_drafter import PlacedDrafter
from flowspec.runtime.token_stream import TokenStream
from tests import warm
from tests.runtime.clusters import (
    PROMPT,
    Peer,
    drafter_for,
    plain,
    plan_for,
    prompt_part,
    submit,
    surviving,
    tokens_of,
    wait_until,
)

COUNT = 60
CONTEXT = 300
SEEDS = (1, 2, 3, 4)


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

    with LocalCluster(4, family="llama", log_level="CRITICAL") as started:
        stage, victim, *others = started.wait()
        drafters = [
            drafter_for(each, daemon) for each, daemon in zip(folders, (victim, *others), strict=True)
        ]
        name = f"drafter {folder.name} on {victim.name}"
        with head_of(plan_for(folder, [stage], CONTEXT), drafters, notes, count_drafts) as head:
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


def test_a_daemon_proposes_what_the_model_would_say_and_refuses_all_else(
    daemons: list[LocalDaemon], folder: Path, reference: Reference
) -> None:
    (following,) = reference.generate(PROMPT, Sampling(), 1, frozenset())
    (assign,) = assigns_of(drafter_for(folder, daemons[0]).plan)
    unknown = Segment(segment=0, parts=(prompt_part(1, (5, VOCABULARY_SIZE)),))
    for generation, (message, said) in enumerate(
        (
            (Segment(segment=0, parts=()), "carries no Segment"),
            (Commit(request=1, epoch=0, base=1, path=()), "carries no Commit"),
            (Expand(segment=unknown, width=1), f"token ids below {VOCABULARY_SIZE}"),
        )
    ):  # each hold supersedes the one before
        with Peer(daemons[0].address, incarnation=10 + generation) as peer:
            peer.greet()
            assert isinstance(peer.assign(daemons[0].address, assign), Ready)
            asked = Segment(segment=3, parts=(prompt_part(1, PROMPT), prompt_part(2, PROMPT[:9])))
            peer.link.send(Expand(segment=asked, width=5))
            found = peer.answer()
            assert isinstance(found, Proposed)
            assert found.job == 3
            assert found.compute_s > 0
            places = [(each.request, each.node, len(each.tokens)) for each in found.proposals]
            assert places == [(1, len(PROMPT) - 1, 5), (2, 8, 5)]
            assert found.proposals[0].tokens[0] == following
            peer.link.send(Release(request=1))
            peer.link.send(message)
            refused = peer.answer()
            assert isinstance(refused, Error)
            assert said in refused.text
