"""A device that comes back as a new process: it imports and loads beside the pipeline that works, and only
then is taken in."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from flowspec.core.messages import Sampling
from flowspec.model.reference import Reference
from flowspec.runtime.cluster import Device
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from flowspec.runtime.pipelines import Recovery
from flowspec.runtime.session import replan
from tests.daemons import DaemonProcess
from tests.runtime.clusters import PROMPT, plan_for, submit, tokens_of, wait_until


def test_the_pipeline_that_works_is_given_up_when_the_device_is_ready_and_not_before(folder: Path, reference: Reference) -> None:
    expected = reference.generate(PROMPT, Sampling(), 20, frozenset())
    started = [DaemonProcess(f"d{index}") for index in range(2)]
    daemons = [LocalDaemon(name=each.name, port=int(each.address.rpartition(":")[2]), pid=0) for each in started]
    plan, notes = plan_for(folder, daemons), []
    devices = [Device(name=stage.name, address=stage.address) for stage in plan.stages]
    answered = 0
    try:
        with Head(plan, recovery=Recovery(replan=partial(replan, plan, devices), on_note=notes.append)) as head:
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
            ready = [line.split("ready: ")[1].split(" weights")[0] for line in started[2].lines if "ready: " in line]
            assert answered > 3, "answers are given while it loads"
            assert ready == ["loaded", "kept"], "once beside the pipeline that worked, and once in its place"
    finally:
        for each in started:
            if each.process.poll() is None:
                each.stop()
