"""Drafters on real processes: on daemons of their own, where answers are exact whatever becomes of them, and
who is lost comes back; those that read the target's features, and the target's own MTP layer.
"""

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
from gguf import GGMLQuantizationType

from flowspec.bench.records import EXACT
from flowspec.bench.verify import Case, ClusterAnswer, answer_of, judge
from flowspec.core.cluster.incarnation import incarnation_of
from flowspec.core.head.events import Drafted, HeadCommand, HeadEvent
from flowspec.core.methods import make_method
from flowspec.core.protocol.cluster_messages import Error, Ready
from flowspec.core.protocol.messages import Commit, Expand, Proposed, Release, Sampling, Segment
from flowspec.core.protocol.precision import FILED
from flowspec.model.files import ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.plan.placement import ClusterPlan, assigns_of
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.drafters import PlacedDrafter
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster, LocalDaemon
from flowspec.runtime.session import ClusterOptions, Limits, open_cluster
from flowspec.runtime.token_stream import TokenStream
from lab.plain_model import PlainModel
from tests import warm
from tests.checkpoints import VOCABULARY_SIZE, make_variant
from tests.draft.assistants import make_assistant
from tests.draft.blocks import make_dspark
from tests.draft.mtp import make_mtp
from tests.ggufs import convert
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

pytestmark = pytest.mark.usefixtures("lent")
DTYPE = "bfloat16"
NEW_TOKENS = 16
METHODS = ("continuous", "tree-sd")
PROMPTS = {"short": (5, 6, 7), "long": tuple((17 * each) % VOCABULARY_SIZE for each in range(3, 50))}


@pytest.mark.parametrize(
    ("target", "make", "stages"), [("gemma4", make_assistant, 3), ("llama-grouped", make_dspark, 2)]
)
def test_answers_are_exact(target: str, make: Callable[[Path], Path], stages: int, tmp_path: Path) -> None:
    model = str(make_variant(tmp_path / "target", target))
    drafter = str(make(tmp_path / "drafter"))
    limits = Limits(new_tokens_max=NEW_TOKENS, stop_ids=frozenset())
    found: list[ClusterAnswer] = []
    guessed = 0
    with open_cluster(ClusterOptions(model=model, dtype=DTYPE, local=stages, context=200)) as cluster:
        for method in METHODS:
            decoding = Decoding(method=method, drafters=(drafter,))
            with cluster.session(decoding, lambda text, share: None) as session:
                for temperature, (name, prompt) in zip((0.0, 1.0), PROMPTS.items(), strict=True):
                    sampling = Sampling(temperature=temperature, seed=4)
                    case = Case(prompt_id=name, prompt=prompt, sampling=sampling)
                    running, timing = session.ask(prompt, sampling, limits)
                    found.append(answer_of(session, case, running, timing, limits))
                    assert running.end is not None
                    guessed += running.end.statistics["nodes_sent"] - running.end.statistics["segments"]
    plain = StepByStep.load(ModelFiles(model), DTYPE)
    verdicts = [judge(plain, one, limits.stop_ids) for one in found]
    assert [each for each in verdicts if each["verdict"] != EXACT] == []
    assert guessed > NEW_TOKENS, f"guesses took part: {guessed}"


@pytest.mark.parametrize(("variant", "dtype"), [("qwen3.5-moe-fused", "float32"), ("glm4-moe", FILED)])
def test_answers_on_processes_are_exact(variant: str, dtype: str, tmp_path: Path) -> None:
    model = make_mtp(tmp_path / "model", variant)
    if dtype == FILED:
        model = convert(model, tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    limits = Limits(new_tokens_max=12, stop_ids=frozenset())
    cases = [
        Case(prompt_id="text", prompt=tuple(range(7, 30)), sampling=Sampling(temperature=temperature, seed=1))
        for temperature in (0.0, 1.0)
    ]
    options = ClusterOptions(model=str(model), dtype=dtype, local=2, context=200)
    with (
        open_cluster(options) as cluster,
        cluster.session(Decoding(method="tree-sd", drafters=("mtp",)), lambda text, share: None) as session,
    ):
        found = [
            answer_of(session, case, *session.ask(case.prompt, case.sampling, limits), limits)
            for case in cases
        ]
    plain = StepByStep.load(ModelFiles(str(model)), dtype)
    for one in found:
        verdict = judge(plain, one, limits.stop_ids)
        assert (verdict["verdict"], verdict["new_tokens"], verdict["drafter"]) == (EXACT, 12, "mtp")


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
def expected(reference: PlainModel) -> list[list[int]]:
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

    with LocalCluster(4, log_level="CRITICAL") as started:
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
    daemons: list[LocalDaemon], folder: Path, reference: PlainModel
) -> None:
    (following,) = reference.generate(PROMPT, Sampling(), 1, frozenset())
    (assign,) = assigns_of(drafter_for(folder, daemons[0]).plan)
    unknown = Segment(segment=0, parts=(prompt_part(1, (5, VOCABULARY_SIZE)),))
    for generation, (message, said) in enumerate(
        (
            (Segment(segment=0, parts=()), "carries no Segment"),
            (Commit(request=1, epoch=0, base=1, path=()), "carries no Commit"),
            (Expand(segment=unknown, width=1), f"token ids below {VOCABULARY_SIZE}"),
        ),
        1,
    ):  # each hold supersedes the one before, and none of another test
        with Peer(daemons[0].address, incarnation=incarnation_of(1, generation)) as peer:
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
