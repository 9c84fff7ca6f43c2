"""Real daemons, sockets and model files: answers, one head after another, how processes begin and end, and
that what a head held goes when it is closed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from safetensors.torch import load_file, save_file

from flowspec.core.cluster.daemon import Caller, CallerConnected, CallerMessageArrived
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError, InputError
from flowspec.runtime import daemon as module
from flowspec.runtime import timeouts
from flowspec.runtime.daemon import Daemon
from flowspec.runtime.head import Head
from flowspec.runtime.local import NO_MEMORY, LocalCluster, LocalDaemon
from flowspec.runtime.machine import Machine
from flowspec.runtime.session import ClusterOptions, Decoding, Limits, open_cluster
from flowspec.runtime.transport import Wake
from lab.plain_model import PlainModel
from tests import warm
from tests.checkpoints import make_variant
from tests.daemons import daemon_process
from tests.runtime.clusters import PROMPT, WAIT_S, plain, plan_for, submit, tokens_of, wait_until, whole_model


def test_several_answers_at_once_and_a_second_turn(
    daemons: list[LocalDaemon], folder: Path, reference: PlainModel
) -> None:
    with Head(plan_for(folder, daemons[:3])) as head:
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
    daemons: list[LocalDaemon], folder: Path, reference: PlainModel
) -> None:
    """Also the next head's: a cancelled answer's jobs are trimmed by number, and its jobs have the same
    numbers."""
    expected = plain(reference, 60)
    plan = plan_for(folder, daemons[:3])
    with Head(plan) as head:
        for count in (0, 3):
            answer, found = submit(head, count=250), list[int]()
            for number, batch in enumerate(answer):
                found += batch.tokens
                if number == count:
                    head.cancel(answer)
            assert answer.end is not None
            assert answer.end.reason == "cancelled"
            assert found[:60] == expected[: len(found)]
            assert tokens_of(submit(head, request=answer.request)) == expected[:20]
        answer = submit(head, count=250)
        next(iter(answer))
        head.cancel(answer)
        submit(head, PROMPT[:7], request=answer.request)
    with Head(plan) as head:
        assert tokens_of(submit(head, count=60)) == expected


def test_a_daemon_that_dies_in_mid_answer_is_named(doomed: list[LocalDaemon], folder: Path) -> None:
    first, victim, last = doomed
    with Head(plan_for(folder, doomed)) as head:
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
    daemons: list[LocalDaemon], folder: Path, reference: PlainModel
) -> None:
    abandon(folder, daemons[:2])
    with Head(plan_for(folder, daemons[:2])) as head:  # which waits for its lease
        assert tokens_of(submit(head)) == plain(reference)


@pytest.mark.parametrize(
    ("ends", "why"),
    [("os.kill(os.getpid(), signal.SIGKILL)", "there is not enough memory"), ("os._exit(3)", "they ended")],
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
    done = warm.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(NO_MEMORY), str(NO_MEMORY), "3", "0"]
    assert "local-1 ended by SIGKILL" in done.stderr


def test_local_daemons_end_with_their_parent_however_it_ends() -> None:
    script = (
        "import sys, time\nfrom flowspec.runtime.local import LocalCluster\n"
        "cluster = LocalCluster(2, log_level='CRITICAL')\nprint(*[d.pid for d in cluster.wait()], "
        "cluster._pool.pid, flush=True)\ntime.sleep(60)"
    )
    with warm.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
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
    daemons: list[LocalDaemon], folder: Path
) -> None:
    head = Head(plan_for(folder, daemons[:2]))
    answer = submit(head, count=250)
    next(iter(answer))
    head.close()
    with pytest.raises(ClusterError, match="closed"):
        tokens_of(answer)


def test_an_observer_that_fails_is_told_no_more(
    daemons: list[LocalDaemon], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[object] = []

    def fail(*_: object) -> None:
        raise RuntimeError("made to fail")

    with Head(plan_for(folder, daemons[:1]), on_event=fail) as head:
        head.observe(lambda *event: told.append(event))
        assert len(tokens_of(submit(head, count=5))) == 5
        assert head.failure is None
        assert not head.observes(fail)
    assert len(told) > 5
    assert caplog.text.count("Traceback") == caplog.text.count("RuntimeError: made to fail") == 1


def test_a_daemon_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(timeouts, "CONNECT_S", 0.5)
    with pytest.raises(ClusterError, match=r"nobody at 127\.0\.0\.1:9 did not answer"):
        Head(plan_for(folder, [LocalDaemon(name="nobody", port=9, pid=0)]))


def test_a_job_that_failed_for_one_head_costs_the_next_nothing(
    daemons: list[LocalDaemon], tmp_path: Path, folder: Path, reference: PlainModel
) -> None:
    """Weights that overflow: the model computes no number, which ends the answer with advice and nothing
    else."""
    broken = make_variant(tmp_path, "llama-grouped")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] *= float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with (
        Head(plan_for(broken, daemons[:2])) as head,
        pytest.raises(ClusterError, match="the model computed"),
    ):
        tokens_of(submit(head))
    with Head(plan_for(folder, daemons[:2])) as head:
        assert tokens_of(submit(head)) == plain(reference)


def test_a_turn_that_was_held_up_does_not_end_a_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon's lease is judged by when its turn began, not by how long the turn's work took."""
    clock = SimpleNamespace(now_s=1.0)
    daemon = Daemon(host="127.0.0.1", port=0, name="slow", machine=Machine(device="cpu"))
    core, held = daemon._core, cast(Any, daemon)
    done: list[str] = []

    def hold_up(*, is_held: bool) -> None:
        assert is_held
        clock.now_s += timeouts.LEASE_S + 1

    try:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
        monkeypatch.setattr(daemon._driver, "_do", lambda command: done.append(type(command).__name__))
        held._poller = SimpleNamespace(poll=lambda timeout_ms: [])
        held._reporter = SimpleNamespace(answer=hold_up)
        head = Caller("head", "head-control", 1)
        core.handle(CallerConnected(caller=head), clock.now_s)
        core.handle(CallerMessageArrived(caller=head, message=whole_model("m", "f")), clock.now_s)
        daemon._turn()
        assert done == [], "nobody has looked yet whether the head said something meanwhile"
        daemon._turn()
        assert done == ["Log", "Send", "EndAssignment", "Log"], "now somebody has, and it did not"
        assert core.fired["lapsed"] == 1
    finally:
        daemon._compute.stop(timeouts.COMPUTE_STOP_S)
        daemon._context.destroy(linger=0)


@pytest.mark.usefixtures("lent")
def test_the_drafters_weights_go_with_the_session_and_the_rest_with_the_next_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the second one sees that it is to stop, and is through, before `close` gets to wake it,
    which closes it all the same."""
    options = ClusterOptions(model=str(folder), dtype="float32", local=1, context=300)
    with open_cluster(options) as cluster:
        gc.collect()
        gc.disable()
        try:
            with cluster.session(Decoding(drafters=(str(folder),)), lambda text, share: None) as session:
                session.ask(PROMPT, Sampling(), Limits(new_tokens_max=4, stop_ids=frozenset()))
                assert session.head.drafters
                drafter = weakref.ref(session.head.drafters[0].drafter)
                first = weakref.ref(session.head)
            del session
            assert drafter() is None
            with cluster.session(Decoding(drafters=("none",)), lambda text, share: None) as session:
                assert first() is None
                head = session.head
                wake = head._wake.set

                def too_late() -> None:
                    head._thread.join(WAIT_S)
                    wake()

                monkeypatch.setattr(head._wake, "set", too_late)
            assert not head._thread.is_alive()
        finally:
            gc.enable()


def test_a_wake_that_is_closed_writes_into_nobodys_pipe() -> None:
    wake = Wake()
    wake.close()
    read, write = os.pipe()  # of the same numbers
    try:
        wake.set()
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    finally:
        os.close(read)
        os.close(write)
