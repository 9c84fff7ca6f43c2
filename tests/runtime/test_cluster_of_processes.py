"""Real daemons, sockets and model files: answers, one head after another, lost processes, peers that
misbehave.

Longer than most files, for all of it shares one set of daemons, which take seconds to start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from flowspec.bench.checkpoints import make_variant
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Assign, Error
from flowspec.core.protocol.messages import Message, Sampling
from flowspec.core.protocol.weight_messages import AskModel
from flowspec.errors import ClusterError, InputError
from flowspec.model.reference import Reference
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime import timeouts
from flowspec.runtime.head import Head
from flowspec.runtime.local import NO_MEMORY, LocalCluster, LocalDaemon
from flowspec.runtime.pipeline_connections import PipelineConnections
from tests import warm
from tests.daemons import daemon_process
from tests.runtime.clusters import PROMPT, Peer, plan_for, submit, tokens_of, wait_until, whole_model


def test_answers_are_exact_and_heads_follow_one_another(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    daemons = cluster.wait()
    for stages in (3, 1, 2):
        with Head(plan_for(folder, daemons[:stages])) as head:
            for sampling in (
                Sampling(),
                Sampling(temperature=1.0, seed=9),
                Sampling(temperature=0.6, top_p=0.8, seed=10),
            ):
                assert tokens_of(submit(head, sampling=sampling)) == reference.generate(
                    PROMPT, sampling, 20, frozenset()
                )


def test_every_device_is_shown_from_the_first_moment_until_it_is_ready(
    cluster: LocalCluster, folder: Path
) -> None:
    daemons, shown = cluster.wait(), dict[str, list[tuple[str, float]]]()

    def progress(text: str, share: float) -> None:
        device, _, doing = text.partition(": ")
        shown.setdefault(device, []).append((doing, share))

    with Head(plan_for(folder, daemons), progress) as head:
        assert shown.keys() == {daemon.name for daemon in daemons}
        for steps in shown.values():
            assert [steps[0], steps[-1]] == [("connecting", 0.0), ("ready", 1.0)]
            assert ("starting", 0.0) in steps
        assert head.loading == {}
        assert head.returning == []


def test_several_answers_at_once_and_a_second_turn(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    with Head(plan_for(folder, cluster.wait())) as head:
        answers = {seed: submit(head, sampling=Sampling(temperature=1.0, seed=seed)) for seed in range(5)}
        for seed, answer in answers.items():
            assert tokens_of(answer) == reference.generate(
                PROMPT, Sampling(temperature=1.0, seed=seed), 20, frozenset()
            )
        first = submit(head)
        longer = (*PROMPT, *tokens_of(first), 7, 8)
        second = submit(head, longer, request=first.request)
        assert tokens_of(second) == reference.generate(longer, Sampling(), 20, frozenset())
        assert second.end is not None
        assert second.end.reused == len(PROMPT) + 20 - 1


def test_a_cancelled_answer_ends_and_the_next_one_is_exact(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    with Head(plan_for(folder, cluster.wait())) as head:
        answer = submit(head, count=250)
        begun = next(iter(answer)).tokens
        head.cancel(answer)
        found = [*begun, *tokens_of(answer)]
        assert answer.end is not None
        assert answer.end.reason == "cancelled"
        assert found == reference.generate(PROMPT, Sampling(), 250, frozenset())[: len(found)]
        assert tokens_of(submit(head, request=answer.request)) == reference.generate(
            PROMPT, Sampling(), 20, frozenset()
        )


def test_a_late_cancel_leaves_the_next_answer_whole(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    with Head(plan_for(folder, cluster.wait())) as head:
        first = submit(head)
        longer = (*PROMPT, *tokens_of(first), 7, 8)
        second = submit(head, longer, request=first.request)
        head.cancel(first)
        assert tokens_of(second) == reference.generate(longer, Sampling(), 20, frozenset())


def test_a_prompt_that_cannot_be_answered_harms_no_other(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    with Head(plan_for(folder, cluster.wait())) as head:
        good = submit(head)
        with pytest.raises(InputError, match="context"):
            tokens_of(submit(head, prompt=[1] * 300))
        assert tokens_of(good) == reference.generate(PROMPT, Sampling(), 20, frozenset())


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_daemon_that_dies_in_mid_answer_is_named(doomed: LocalCluster, folder: Path, victim: int) -> None:
    daemons = doomed.wait()
    with Head(plan_for(folder, daemons)) as head:
        answer = submit(head, count=250)
        next(iter(answer))
        os.kill(daemons[victim].pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match=f"local-{victim}.*lost"):
            tokens_of(answer)
        with pytest.raises(ClusterError):
            tokens_of(submit(head))
    rest = [daemon for daemon in daemons if daemon is not daemons[victim]]
    with Head(plan_for(folder, rest)) as head:
        assert len(tokens_of(submit(head))) == 20, "the daemons that are left serve the next head"


def abandon(folder: Path, daemons: Sequence[LocalDaemon]) -> None:
    """Connects a head in a process of its own and kills it."""
    script = (
        "import os, pathlib, signal, sys\n"
        "from tests.runtime.clusters import Peer, LocalDaemon, plan_for\nfrom flowspec.runtime.head import "
        "Head\n"
        "daemons = [LocalDaemon(name=f'local-{i}', port=int(port), pid=0) for i, port in "
        "enumerate(sys.argv[2:])]\n"
        "head = Head(plan_for(pathlib.Path(sys.argv[1]), daemons))\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", script, str(folder), *(str(daemon.port) for daemon in daemons)]
    assert warm.run(command).returncode == -signal.SIGKILL


def test_a_daemon_is_free_again_when_its_head_dies_without_a_word(
    cluster: LocalCluster, folder: Path, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    daemons = cluster.wait()
    abandon(folder, daemons)
    with Head(plan_for(folder, daemons)) as head:
        assert "whose head seems to have died: in use by head" in caplog.text, "its lease is waited for"
        assert tokens_of(submit(head)) == reference.generate(PROMPT, Sampling(), 20, frozenset())


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"there is not enough memory for them: .* or use fewer"),
        (f"os._exit({NO_MEMORY})", "there is not enough memory for them"),
        ("os._exit(3)", "they ended; run again with -v"),
    ],
)
def test_why_local_daemons_do_not_come_up(ends: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", f"import os, signal\n{ends}"]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    monkeypatch.setattr("flowspec.runtime.local.start_pool", start)
    with LocalCluster(2) as local, pytest.raises(ClusterError, match=f"expected 2 local daemons, but {why}"):
        local.wait()


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", NO_MEMORY, "local-1 ended by SIGKILL, as where memory runs"),
        (f"os._exit({NO_MEMORY})", NO_MEMORY, ""),
        ("os._exit(3)", 3, ""),
        ("os._exit(0)", 0, ""),
    ],
)
def test_how_a_local_daemon_ends_is_told_to_who_started_it(ends: str, status: int, said: str) -> None:
    script = (
        "import os, signal, sys\nfrom flowspec.runtime.fork_server import _await\nchildren = []\n"
        f"for ends in ('os._exit(0)', {ends!r}):\n    children.append(os.fork())\n"
        "    if not children[-1]:\n        exec(ends)\nsys.exit(_await(children))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert said in done.stderr


def test_local_daemons_end_with_their_parent_however_it_ends(folder: Path) -> None:
    script = (
        "import sys, time\nfrom flowspec.runtime.local import LocalCluster\n"
        "cluster = LocalCluster(2, log_level='CRITICAL')\nprint(*[d.pid for d in cluster.wait()], "
        "cluster._pool.pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        parent.kill()
    wait_until(lambda: not any(_is_running(pid) for pid in pids), "all daemons have ended")


def test_local_daemons_whose_parent_is_killed_while_they_start_say_nothing() -> None:
    script = (
        "import sys\nfrom flowspec.runtime.local import start_pool\n"
        "pool = start_pool(['--count', '2'])\nprint(pool.pid, flush=True)\nsys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        assert parent.stderr.read() == b""  # to the end of all that hold it
    wait_until(lambda: not _is_running(pid), "the pool has ended")


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -------------------------------------------------------------------------------------- what cannot be loaded


def test_a_slice_that_does_not_fit_is_refused_before_it_is_loaded(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "flowspec.cli.main",
        "daemon",
        "--port",
        "0",
        "--memory",
        "64MiB",
        "--name",
        "tiny",
    ]
    with warm.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        port = int(line.split("127.0.0.1:")[1].split()[0])
        drained = threading.Thread(target=process.stderr.read)
        drained.start()
        try:
            with pytest.raises(ClusterError, match=r"tiny.*layers 0 to 7 need .* free here"):
                Head(plan_for(folder, [LocalDaemon(name="tiny", port=port, pid=process.pid)]))
        finally:
            process.send_signal(signal.SIGTERM)
            drained.join()
    assert process.returncode == 0, "SIGTERM is a clean end"


def test_a_daemon_hears_a_signal_that_another_thread_gets() -> None:
    """Python runs its handler in the main thread only, and that one waits in a poll."""
    with daemon_process("waits") as daemon:
        pid = daemon.process.pid
        others = [int(task) for task in os.listdir(f"/proc/{pid}/task") if int(task) != pid]
        computes = next(
            task for task in others if "ZMQ" not in Path(f"/proc/{pid}/task/{task}/comm").read_text()
        )  # those block signals
        assert ctypes.CDLL(None).tgkill(pid, computes, signal.SIGTERM) == 0
        assert daemon.process.wait(30) == 0
        daemon.stop()
        assert daemon.lines[-1].endswith("waits stopped (SIGTERM)\n")


def test_a_model_that_is_not_what_the_head_says_is_refused(
    cluster: LocalCluster, folder: Path, tmp_path: Path
) -> None:
    other = make_variant(tmp_path, "llama-tied")
    plan = plan_for(folder, cluster.wait())
    wrong = ClusterPlan(
        model=str(other), fingerprint=plan.fingerprint, dtype="bfloat16", context=300, stages=plan.stages
    )
    with pytest.raises(ClusterError, match="changed on the head since it connected"):
        Head(wrong)
    with Head(plan) as head:
        assert len(tokens_of(submit(head))) == 20


def test_a_daemon_that_dies_while_loading_is_named(
    doomed: LocalCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemons = doomed.wait()
    killer = threading.Timer(0.5, lambda: os.kill(daemons[1].pid, signal.SIGKILL))
    say = PipelineConnections.say

    def stops_one_before_it_loads(self: PipelineConnections, device: str, message: Message) -> None:
        """Freezes local-1 when it has been welcomed, so that it dies with its assignment open."""
        if device == "local-1" and isinstance(message, Assign):
            os.kill(daemons[1].pid, signal.SIGSTOP)
            killer.start()
        say(self, device, message)

    monkeypatch.setattr(PipelineConnections, "say", stops_one_before_it_loads)
    with pytest.raises(ClusterError, match=r"local-1 .* was lost while loading"):
        Head(plan_for(folder, daemons))
    killer.join()


def test_answers_that_are_open_when_the_head_closes_end_with_an_error(
    cluster: LocalCluster, folder: Path
) -> None:
    head = Head(plan_for(folder, cluster.wait()))
    answer = submit(head, count=250)
    next(iter(answer))
    head.close()
    with pytest.raises(ClusterError, match="closed"):
        tokens_of(answer)


def test_a_daemon_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(timeouts, "CONNECT_S", 0.5)
    with pytest.raises(ClusterError, match=r"nobody at 127\.0\.0\.1:9 did not answer"):
        Head(plan_for(folder, [LocalDaemon(name="nobody", port=9, pid=0)]))


def test_an_assignment_to_a_daemon_that_is_held_says_by_whom(cluster: LocalCluster, folder: Path) -> None:
    daemons = cluster.wait()
    plan = plan_for(folder, daemons)
    with Head(plan), Peer(daemons[0].address) as peer:
        peer.greet()
        peer.link.send(whole_model(plan.model, plan.fingerprint))
        refused = peer.answer()
        assert isinstance(refused, Error)
        assert "in use by head" in refused.text
        assert refused.retry_after_s > 0


# ------------------------------------------------------------------------- nothing of one head reaches the
# next


def test_rows_that_were_trimmed_for_one_head_live_for_the_next(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    """A cancelled answer's jobs are trimmed by number, and the next head's jobs have the same numbers."""
    expected = reference.generate(PROMPT, Sampling(), 60, frozenset())
    for count in (3, 9, 17):
        with Head(plan_for(folder, cluster.wait())) as head:
            answer = submit(head, count=250)
            for number, _ in enumerate(answer):
                if number == count:
                    head.cancel(answer)
                    submit(head, PROMPT[:7], request=answer.request)
        with Head(plan_for(folder, cluster.wait())) as head:
            assert tokens_of(submit(head, count=60)) == expected


def test_a_job_that_failed_for_one_head_costs_the_next_nothing(
    cluster: LocalCluster, tmp_path: Path, folder: Path, reference: Reference
) -> None:
    """Weights that overflow: the model computes no number, which ends the answer with advice and nothing
    else."""
    broken = make_variant(tmp_path, "llama-grouped")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] *= float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    for _ in range(2):
        with (
            Head(plan_for(broken, cluster.wait())) as head,
            pytest.raises(ClusterError, match="the model computed"),
        ):
            tokens_of(submit(head))
        with Head(plan_for(folder, cluster.wait())) as head:
            assert tokens_of(submit(head)) == reference.generate(PROMPT, Sampling(), 20, frozenset())


def test_a_head_that_breaks_its_own_limits_does_not_stop_the_daemon(
    cluster: LocalCluster, folder: Path
) -> None:
    daemons = cluster.wait()
    plan = plan_for(folder, daemons[:1])
    with Peer(daemons[0].address) as peer, Peer(daemons[0].address, "head-weights") as weights:
        peer.greet()
        peer.link.send(whole_model("nowhere", plan.fingerprint))
        peer.until(AskModel)
        weights.greet()
        weights.link.send(Error(text="x" * limits.TEXT_CHARS_MAX))
        refused = peer.until(Error)
        assert refused.text.startswith("the head cannot send the weights: xxx")
        assert len(refused.text) <= limits.TEXT_CHARS_MAX
    with Head(plan) as head:
        assert len(tokens_of(submit(head))) == 20
