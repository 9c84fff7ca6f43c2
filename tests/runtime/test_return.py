"""A device that comes back as a new process: it imports and loads beside the pipeline that works, as do the
others what is new to them, and only then is it taken in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.model.files import ModelFiles
from flowspec.model.reference import Reference
from flowspec.runtime.cluster import Device
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from flowspec.runtime.pipelines import Recovery
from flowspec.runtime.replanning import replan
from tests.daemons import DaemonProcess
from tests.runtime.clusters import PROMPT, plan_for, submit, tokens_of, wait_until


def test_the_pipeline_that_works_is_given_up_when_the_device_is_ready_and_not_before(
    folder: Path, reference: Reference
) -> None:
    expected = reference.generate(PROMPT, Sampling(), 20, frozenset())
    started = [DaemonProcess(f"d{index}") for index in range(2)]
    daemons = [
        LocalDaemon(name=each.name, port=int(each.address.rpartition(":")[2]), pid=0) for each in started
    ]
    plan, notes = plan_for(folder, daemons), []
    size = ModelFiles(str(folder)).config().vocab_size
    bytes_of_all = TokenBytes(tuple(bytes([token % 256]) for token in range(size)))
    plan = replace(plan, tokens=bytes_of_all)  # the last device asks for them, in its new process, too
    devices = [Device(name=stage.name, address=stage.address) for stage in plan.stages]
    answered = 0
    try:
        with Head(
            plan, recovery=Recovery(replan=partial(replan, plan, devices), on_note=notes.append)
        ) as head:
            assert tokens_of(submit(head)) == expected
            started[1].process.kill()
            started[1].stop()
            wait_until(lambda: head.is_formed and len(head.stages) == 1, "it goes on with one")
            started.append(DaemonProcess("d1", f"--port={daemons[1].port}", is_warm=False))
            while "device d1 is back" not in notes:
                answer = submit(head)
                assert tokens_of(answer) == expected
                head.forget(answer.request)
                answered += 1
            assert tokens_of(submit(head)) == expected
            ready = [
                line.split("ready: ")[1].split(" weights")[0]
                for line in started[2].lines
                if "ready: " in line
            ]
            assert answered > 3, "answers are given while it loads"
            assert ready == ["loaded", "kept"], "once beside the pipeline that worked, and once in its place"
    finally:
        for each in started:
            if each.process.poll() is None:
                each.stop()


def test_devices_that_stay_load_their_new_layers_beside_it_too(folder: Path, reference: Reference) -> None:
    """Three with layers 0-1, 2-4 and 5-7: without the first they run 0-3 and 4-7; then 4 is new to one."""
    expected = reference.generate(PROMPT, Sampling(), 20, frozenset())
    started = [DaemonProcess(f"d{index}") for index in range(3)]
    daemons = [
        LocalDaemon(name=each.name, port=int(each.address.rpartition(":")[2]), pid=0) for each in started
    ]
    plan, notes = plan_for(folder, daemons), []
    devices = [Device(name=stage.name, address=stage.address) for stage in plan.stages]
    try:
        with Head(
            plan, recovery=Recovery(replan=partial(replan, plan, devices), on_note=notes.append)
        ) as head:
            assert tokens_of(submit(head)) == expected
            started[0].process.kill()
            started[0].stop()
            wait_until(lambda: head.is_formed and len(head.stages) == 2, "it goes on with two")
            assert tokens_of(submit(head)) == expected
            started.append(DaemonProcess("d0", f"--port={daemons[0].port}", is_warm=False))
            while "device d0 is back" not in notes:
                answer = submit(head)
                assert tokens_of(answer) == expected
                head.forget(answer.request)
            assert tokens_of(submit(head)) == expected
    finally:
        for each in started:
            if each.process.poll() is None:
                each.stop()
    for daemon in started[1:3]:
        text = "".join(daemon.lines)
        made, _, after = text.partition("made ready for another pipeline;")
        assert made.count("ready: loaded weights") == 2, "at first, and after the loss"
        assert "ready: kept weights" in after, "the switch found what was made ready"
        assert "loaded weights" not in after
