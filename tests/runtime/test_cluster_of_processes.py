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
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from flowspec.bench.checkpoints import make_variant
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.weight_messages import AskModel
from flowspec.errors import ClusterError, InputError
from flowspec.model.reference import Reference
from flowspec.runtime import timeouts
from flowspec.runtime.head import Head
from flowspec.runtime.local import NO_MEMORY, LocalCluster, LocalDaemon
from tests import warm
from tests.daemons import daemon_process
from tests.runtime.clusters import PROMPT, Peer, plain, plan_for, submit, tokens_of, wait_until, whole_model


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
                assert tokens_of(submit(head, sampling=sampling)) == plain(reference, sampling=sampling)


def test_several_answers_at_once_and_a_second_turn(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    with Head(plan_for(folder, cluster.wait())) as head:
        samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(5)]
        answers = [submit(head, sampling=sampling) for sampling in samplings]
        with pytest.raises(InputError, match="context"):
            tokens_of(submit(head, prompt=[1] * 300))
        for sampling, answer in zip(samplings, answers, strict=True):
            assert tokens_of(answer) == plain(reference, sampling=sampling)
        first = submit(head)
        longer = (*PROMPT, *tokens_of(first), 7, 8)
        second = submit(head, longer, request=first.request)
        head.cancel(first)  # too late, and no harm to the answer after it
        assert tokens_of(second) == plain(reference, prompt=longer)
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
        assert found == plain(reference, 250)[: len(found)]
        assert tokens_of(submit(head, request=answer.request)) == plain(reference)


def test_a_daemon_that_dies_in_mid_answer_is_named(doomed: LocalCluster, folder: Path) -> None:
    first, victim, last = doomed.wait()
    with Head(plan_for(folder, (first, victim, last))) as head:
        answer = submit(head, count=250)
        next(iter(answer))
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match=r"local-1.*lost"):
            tokens_of(answer)
        with pytest.raises(ClusterError):
            tokens_of(submit(head))
    with Head(plan_for(folder, (first, last))) as head:
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
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    daemons = cluster.wait()
    abandon(folder, daemons)
    with Head(plan_for(folder, daemons)) as head:  # which waits for its lease
        assert tokens_of(submit(head)) == plain(reference)


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "there is not enough memory"),
        (f"os._exit({NO_MEMORY})", "there is not enough memory"),
        ("os._exit(3)", "they ended"),
    ],
)
def test_why_local_daemons_do_not_come_up(ends: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", f"import os, signal\n{ends}"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)

    monkeypatch.setattr("flowspec.runtime.local.start_pool", start)
    with LocalCluster(2) as local, pytest.raises(ClusterError, match=f"expected 2 local daemons, but {why}"):
        local.wait()


def test_how_a_local_daemon_ends_is_told_to_who_started_it() -> None:
    """By the status of the process that forked them, one of which is killed as where memory runs out."""
    script = (
        "import os, signal, sys\nfrom flowspec.runtime.fork_server import _await\n"
        "def status(*ends):\n"
        "    children = []\n"
        "    for end in ends:\n"
        "        children.append(os.fork())\n"
        "        if not children[-1]:\n"
        "            os._exit(end) if end >= 0 else os.kill(os.getpid(), -end)\n"
        "    return _await(children)\n"
        f"print(*[status(0, end) for end in (-signal.SIGKILL, {NO_MEMORY}, 3, 0)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(NO_MEMORY), str(NO_MEMORY), "3", "0"]
    assert "local-1 ended by SIGKILL" in done.stderr


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


def test_rows_that_were_trimmed_for_one_head_live_for_the_next(
    cluster: LocalCluster, folder: Path, reference: Reference
) -> None:
    """A cancelled answer's jobs are trimmed by number, and the next head's jobs have the same numbers."""
    expected = plain(reference, 60)
    for count in (3, 9):
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
            assert tokens_of(submit(head)) == plain(reference)


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
