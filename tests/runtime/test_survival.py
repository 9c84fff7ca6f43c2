"""Real devices and links that are lost, come back, take another's place or are very slow: the answer is the
undisturbed one, and nobody waits for ever."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.model.files import ModelFiles
from flowspec.runtime import timeouts
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster, LocalDaemon
from flowspec.runtime.security.cluster_keys import keys_folder
from flowspec.runtime.security.keyfiles import make_keys
from flowspec.runtime.session import ClusterOptions, RecoveryOptions, open_session
from flowspec.runtime.token_stream import TokenStream
from lab.plain_model import PlainModel
from tests.daemons import DaemonProcess, cluster_file, slow_wire
from tests.nightly import at_night
from tests.runtime.clusters import listening, plain, plan_for, submit, surviving, tokens_of, wait_until

COUNT = 80


def disturbed(answer: TokenStream, disturb: Callable[[], None]) -> list[int]:
    """The answer's tokens; the disturbance comes after five of them or so."""
    found: list[int] = []
    is_disturbed = False
    for batch in answer:
        found += batch.tokens
        if not is_disturbed and len(found) >= 5:
            is_disturbed = True
            disturb()
    return found


def test_a_daemon_that_is_killed_costs_a_pause_and_not_the_answer(
    doomed: list[LocalDaemon], folder: Path, reference: PlainModel
) -> None:
    """What stands in the text counts as before, where that is looked at: the prompt is the same."""
    notes: list[str] = []
    sampling = Sampling(temperature=1.0, seed=7, frequency_penalty=0.8, repetition_penalty=1.2)
    plan = plan_for(folder, doomed)
    with Head(plan, recovery=surviving(plan, notes)) as head:
        answer = submit(head, count=COUNT, sampling=sampling)
        found = disturbed(answer, lambda: os.kill(doomed[0].pid, signal.SIGKILL))
        assert found == plain(reference, COUNT, sampling)
        assert answer.end is not None
        assert answer.end.statistics["recoveries"] == 1, notes
        assert [stage.plan.name for stage in head.stages] == ["local-1", "local-2"]
        assert notes == ["device local-0 is lost (its connection closed)", "going on with 2 devices"]
        assert tokens_of(submit(head)) == plain(reference)


def test_a_corrupted_control_frame_costs_a_pause_and_not_the_answer(
    daemons: list[LocalDaemon], folder: Path, reference: PlainModel
) -> None:
    """Without keys nothing below the protocol notices it."""
    notes: list[str] = []
    plan = plan_for(folder, daemons[:3])
    with Head(plan, recovery=surviving(plan, notes)) as head:
        answer = submit(head, count=COUNT)
        socket = head.stages[0].connection.socket
        found = disturbed(answer, lambda: socket.send_multipart([b"\xc1\xc1"]))
        assert found == plain(reference, COUNT)
        assert answer.end is not None
        assert answer.end.statistics["recoveries"] == 1, notes
        assert [text for text in notes if "lost" in text] == [], "the devices are the same"


def test_an_answer_that_waits_for_devices_can_be_cancelled(doomed: list[LocalDaemon], folder: Path) -> None:
    notes: list[str] = []
    plan = plan_for(folder, doomed[:1])
    with Head(plan, recovery=surviving(plan, notes, wait_s=None)) as head:
        answer = submit(head, count=COUNT)

        def disturb() -> None:
            os.kill(doomed[0].pid, signal.SIGKILL)
            wait_until(lambda: any("no device is left" in text for text in notes), "the head knows")
            head.cancel(answer)

        disturbed(answer, disturb)
        assert answer.end is not None
        assert answer.end.reason == "cancelled"


@at_night
@pytest.mark.usefixtures("hasty")
def test_all_load_beside_the_pipeline_that_works_and_then_the_device_is_taken_in(
    folder: Path, reference: PlainModel
) -> None:
    """Three with layers 0-1, 2-4 and 5-7: without the first they run 0-3 and 4-7; then 4 is new to one."""
    started = [DaemonProcess(f"d{index}") for index in range(3)]
    size = ModelFiles(str(folder)).config().vocab_size
    bytes_of_all = TokenBytes(tuple(bytes([token % 256]) for token in range(size)))
    plan = plan_for(folder, [listening(each) for each in started])
    plan = replace(plan, tokens=bytes_of_all)  # the last device asks for them, in its new process, too
    answered, notes = 0, list[str]()
    try:
        with Head(plan, recovery=surviving(plan, notes)) as head:
            assert tokens_of(submit(head)) == plain(reference)
            port = listening(started[0]).port
            started[0].process.kill()
            started[0].stop()
            wait_until(lambda: head.is_formed and len(head.stages) == 2, "it goes on with two")
            started.append(DaemonProcess("d0", f"--port={port}"))
            while "device d0 is back" not in notes:
                answer = submit(head)
                assert tokens_of(answer) == plain(reference)
                head.forget(answer.request)
                answered += 1
            assert tokens_of(submit(head)) == plain(reference)
    finally:
        for each in started:
            if each.process.poll() is None:
                each.stop()
    assert answered, "answers are given while it loads"
    ready = [line.split("ready: ")[1].split()[0] for line in started[3].lines if "ready: " in line]
    assert ready == ["loaded", "kept"], "once beside the pipeline that worked, and once in its place"
    for daemon in started[1:3]:
        made, _, after = "".join(daemon.lines).partition("made ready for another pipeline;")
        assert made.count("ready: loaded weights") == 2, "at first, and after the loss"
        assert "ready: kept weights" in after, "the switch found what was made ready"
        assert "loaded weights" not in after


DECODING = Decoding(method="ar")


@pytest.mark.usefixtures("hasty")
def test_a_device_that_stood_by_takes_the_place_of_a_lost_one_and_gives_it_back(
    tmp_path: Path, folder: Path, reference: PlainModel
) -> None:
    """The keys are the cluster file's: those of the survey, of both pipelines, and of the question whether
    the lost one is back."""
    keys = keys_folder(tmp_path / "cluster.toml")
    make_keys(keys, ["head"], [f"local-{index}" for index in range(3)], force=False)
    expected = plain(reference, COUNT)
    notes: list[str] = []
    recovery_options = RecoveryOptions(on_note=notes.append, wait_s=60.0)
    with LocalCluster(3, log_level="CRITICAL", keys=keys) as started:
        daemons = started.wait()
        addresses = {daemon.name: daemon.address for daemon in daemons}
        rates = {"local-0": 0.001, "local-1": 1.0, "local-2": 0.1}
        path = cluster_file(tmp_path, addresses, rates=rates)
        options = ClusterOptions(model=str(folder), dtype="float32", cluster=path, context=300)
        with open_session(
            options, DECODING, lambda text, share: None, recovery_options=recovery_options
        ) as session:
            head = session.head
            assert [stage.plan.name for stage in head.stages] == ["local-1"]
            answer = submit(head, count=COUNT)
            found = list(next(iter(answer)).tokens)
            os.kill(daemons[1].pid, signal.SIGSTOP)
            try:
                assert found + tokens_of(answer) == expected
                assert any("local-1 is lost (no sign of life" in text for text in notes), notes
                assert [stage.plan.name for stage in head.stages] == ["local-2"]
            finally:
                os.kill(daemons[1].pid, signal.SIGCONT)
            wait_until(lambda: "device local-1 is back" in notes, "the device is taken in again")
            assert tokens_of(submit(head, count=COUNT)) == expected
            assert [stage.plan.name for stage in head.stages] == ["local-1"]
            assert head.plan.layer_count == ModelFiles(str(folder)).config().num_hidden_layers


@at_night
def test_a_link_on_which_a_segment_takes_very_long_is_named_and_costs_nobody(
    daemons: list[LocalDaemon], folder: Path, reference: PlainModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first portion of the prompt, 8 KiB of activations, takes 1.8 seconds where 1.2 count as long; of a
    link that is not broken it may take 2.4."""
    monkeypatch.setattr(timeouts, "STUCK_S", 1.2)
    notes: list[str] = []
    whole = replace(plan_for(folder, daemons[:2]), hidden_size=64)
    with Head(whole):
        pass  # as below
    with slow_wire(daemons[1].address, 0.035) as address:
        plan = replace(whole, stages=(whole.stages[0], replace(whole.stages[1], address=address)))
        with Head(plan, recovery=surviving(plan, notes)) as head:
            for _ in range(20):  # on a busy machine the second note comes later
                assert tokens_of(submit(head, count=3)) == plain(reference, 3)
                if len(notes) == 2:
                    break
            assert len(head.stages) == 2, notes
    note, other = notes
    found = re.fullmatch(
        r"the link from local-0 to local-1 carries about (\d+) kbit/s, and holds answers up", other
    )
    assert found is not None
    assert 20 < int(found[1]) < 53, "35 with headers"
    told = r"the link from local-0 to local-1 carries less than \d+ kbit/s: 8 KiB have been .* for \d s"
    assert re.fullmatch(told, note)
