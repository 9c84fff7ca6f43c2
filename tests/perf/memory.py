"""The memory of real daemons after loading and answering: each one's slice, its resident set, and the peak it
ever had.

python -m flowspec.bench.checkpoints FOLDER --gigabyte
python -m tests.perf.memory --model FOLDER [--daemons 4] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

from flowspec.child_process import python_module
from flowspec.core.head.events import Submit
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles
from flowspec.plan.memory import mib
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device, split_layers
from flowspec.runtime.head import Head
from flowspec.runtime.session import pick_dtype

PROMPT = tuple(range(10, 300))
CONTEXT = 1024


@contextlib.contextmanager
def daemon(name: str) -> Any:
    """A `flowspec daemon` of its own, as on a device; yields its port and pid."""
    command = python_module("flowspec.cli.main", "daemon", "--port", "0", "--name", name, "--threads", "1")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        found = re.search(r":(\d+) \(", first)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            if found is None:
                raise ClusterError(f"expected {name} to listen, but it says: {first.strip()}")
            yield int(found[1]), process.pid
        finally:
            process.terminate()
            try:
                process.wait(timeouts.STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def status_bytes(pid: int, field: str) -> int:
    """A field of /proc/PID/status that is in kB."""
    text = Path(f"/proc/{pid}/status").read_text("utf-8")
    match = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10


def measure(model: str, count: int) -> list[dict[str, Any]]:
    """One row per daemon, in bytes: its slice, resident set before loading, after loading, after an answer,
    and peak."""
    files = ModelFiles(model)
    config = files.config()
    rows = []
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(daemon(f"daemon-{index}")) for index in range(count)]
        idle = [status_bytes(pid, "VmRSS") for _, pid in started]
        devices = [
            Device(name=f"daemon-{index}", address=f"127.0.0.1:{port}")
            for index, (port, _) in enumerate(started)
        ]
        plan = ClusterPlan(
            model=model,
            fingerprint=files.fingerprint(),
            dtype=pick_dtype(None, files, config),
            context=CONTEXT,
            stages=tuple(split_layers(devices, config.num_hidden_layers, None)),
        )
        with Head(plan) as head:
            loaded = [stage.ready for stage in head.stages]
            submit = Submit(
                request=1, prompt=PROMPT, new_tokens_max=8, sampling=Sampling(), stop_ids=frozenset()
            )
            for _ in head.submit(submit):
                pass
            for index, (_, pid) in enumerate(started):
                ready = loaded[index]
                assert ready is not None
                rows.append(
                    {
                        "daemon": index,
                        "layers": [plan.stages[index].first, plan.stages[index].end],
                        "weight_bytes": ready.weight_bytes,
                        "idle_bytes": idle[index],
                        "loaded_bytes": ready.memory_bytes,
                        "beyond_weights_bytes": ready.memory_bytes - ready.weight_bytes,
                        "answered_bytes": status_bytes(pid, "VmRSS"),
                        "peak_bytes": status_bytes(pid, "VmHWM"),
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.perf.memory", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--daemons", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(args.model, args.daemons)
    if args.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            f"daemon {row['daemon']}: layers {row['layers'][0]} to {row['layers'][1] - 1}, weights "
            f"{mib(row['weight_bytes'])}; resident "
            f"idle {mib(row['idle_bytes'])}, loaded {mib(row['loaded_bytes'])} (weights + "
            f"{mib(row['beyond_weights_bytes'])}), "
            f"after an answer {mib(row['answered_bytes'])}, peak {mib(row['peak_bytes'])}"
        )
    print(f"the whole model: {mib(sum(row['weight_bytes'] for row in rows))}")


if __name__ == "__main__":
    main()
