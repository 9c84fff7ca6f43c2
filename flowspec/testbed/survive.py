"""Real daemons that are killed, stopped or cut off in the middle of an answer: `python -m flowspec.testbed.survive`.

Four stages answer one prompt, undisturbed and then once for each fault and moment; the text must be the same every time.

- `kill`: `kill -9` of one stage's process; spare ones take part in the next run.
- `stop`: SIGSTOP, and SIGCONT when the answer is there: the process returns with its old state, and is fenced.
- `drafter`: `kill -9` of the process of one of two drafters, which have daemons of their own; nothing is to be recovered from then.
- `sever`: the link of one stage goes down and up again, each daemon being in a network namespace (`launch/netns`; for root).

A run's pause is told by what it was spent on: until the loss was noticed, until another pipeline was loaded, until what was known had been
computed again and the next token came.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean

from flowspec.core.messages import Sampling
from flowspec.errors import FlowSpecError, InputError
from flowspec.model.files import BUNDLED, ModelFiles, canonical_name
from flowspec.model.reference import Reference
from flowspec.model.support import context_max
from flowspec.model.text import Tokenizer
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device, pick_context, read_cluster, split_layers
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.session import Cluster, Limits, Session, Survival
from flowspec.testbed.command import Parser, run_command, whole
from flowspec.testbed.exactness import compare
from flowspec.testbed.outcome import WRONG

FAULTS = ("kill", "stop", "drafter", "sever")
STAGES = 4
DRAFTERS = ("draft", "draft-math")
PROMPT = "Tell me a story about a lighthouse, and then explain how a lighthouse works."
NETNS = Path(__file__).parents[2] / "launch" / "netns"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One disturbed answer. `verdict` is that of `exactness.compare`; seconds are counted from the fault."""

    fault: str
    moment: int
    victim: str
    verdict: str
    recoveries: int
    noticed_s: float
    load_s: float
    prefill_s: float
    pause_s: float


@dataclass(slots=True)
class Rig:
    """Devices to disturb, and how: `hit` and `heal` take a target's number and what is known of it."""

    cluster: Cluster
    hit: Callable[[Session, int], None]
    heal: Callable[[Session, int], None]
    decoding: Decoding = field(default_factory=Decoding)

    def target(self, number: int) -> Device:
        """Whom a fault strikes: a stage's device, or a drafter's where some have devices of their own."""
        targets = self.cluster.drafter_devices or self.cluster.devices
        return targets[number % len(targets)]


def cluster_of(files: ModelFiles, devices: Sequence[Device]) -> Cluster:
    """These devices for this model, in float32, with their layers shared out evenly."""
    config = files.config()
    plan = ClusterPlan(
        model=canonical_name(files.model),
        fingerprint=files.fingerprint(),
        dtype="float32",
        context=pick_context(None, context_max(config)),
        stages=tuple(split_layers(devices, config.num_hidden_layers, None)),
    )
    return Cluster(files=files, config=config, plan=plan, is_local=True, devices=tuple(devices))


@contextlib.contextmanager
def local_rig(files: ModelFiles, fault: str, spares: int) -> Iterator[Rig]:
    """Local daemons; the dead are replaced by spare ones from run to run."""
    drafters = len(DRAFTERS) if fault == "drafter" else 0
    if drafters and files.model != BUNDLED:
        raise InputError(f"--faults drafter: expected the bundled model, for which there are drafters, got {files.model!r}")
    count = STAGES + drafters + (0 if fault == "stop" else spares)
    with LocalCluster(count, family=files.raw_config()["model_type"], log_level="CRITICAL") as local:
        devices = [Device(name=daemon.name, address=daemon.address) for daemon in local.wait()]
        left = devices[STAGES if drafters else 0 :]
        pids = {daemon.name: daemon.pid for daemon in local.wait()}

        def cluster() -> Cluster:
            if drafters:
                return replace(cluster_of(files, devices[:STAGES]), drafter_devices=tuple(left[:drafters]))
            return cluster_of(files, left[:STAGES])

        def hit(session: Session, number: int) -> None:
            os.kill(pids[rig.target(number).name], signal.SIGSTOP if fault == "stop" else signal.SIGKILL)

        def heal(session: Session, number: int) -> None:
            if fault == "stop":
                os.kill(pids[rig.target(number).name], signal.SIGCONT)
            else:
                left.remove(rig.target(number))
                if len(left) >= (drafters or STAGES):
                    rig.cluster = cluster()

        rig = Rig(cluster(), hit, heal, Decoding(drafters=DRAFTERS) if drafters else Decoding())
        yield rig


@contextlib.contextmanager
def netns_rig(files: ModelFiles) -> Iterator[Rig]:
    """Daemons in network namespaces, whose links go down and up."""
    if os.geteuid() != 0:
        raise InputError("--faults sever: expected root, for network namespaces; run it with sudo, or choose kill,stop")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        here = {**os.environ, "FLOWSPEC_VENV": sys.prefix}  # the daemons are this installation's
        if subprocess.run([str(NETNS), "up", "--devices", str(STAGES), "--file", str(file)], env=here, check=False).returncode:
            raise InputError("launch/netns did not start the daemons; see what it says above")

        def link(stage: int, state: str) -> None:
            subprocess.run(["ip", "link", "set", f"flowspec-v{stage}", state], check=True)

        try:
            devices = read_cluster(file)
            yield Rig(cluster_of(files, devices), lambda session, stage: link(stage, "down"), lambda session, stage: link(stage, "up"))
        finally:
            subprocess.run([str(NETNS), "down"], check=False)


def run_once(
    rig: Rig, fault: str, prompt: Sequence[int], limits: Limits, moment: int, stage: int, judge: Callable[[list[int]], str]
) -> Run:
    """One answer with a fault after `moment` of its tokens."""
    notes: list[float] = []
    survival = Survival(on_note=lambda text: notes.append(time.monotonic()), wait_s=timeouts.WAIT_FOR_DEVICES_S)
    victim = rig.target(stage).name
    with rig.cluster.session(rig.decoding, lambda text, share: None, survival=survival) as session:
        hit_s = after_s = None
        found: list[int] = []
        answer = session.submit(prompt, Sampling(), limits, request=session.head.new_request())
        if moment == 0:
            hit_s = time.monotonic()
            rig.hit(session, stage)
        try:
            for batch in answer:
                if hit_s is not None and after_s is None and notes:
                    after_s = batch.at_s
                found += batch.tokens
                if hit_s is None and len(found) >= moment:
                    hit_s = time.monotonic()
                    rig.hit(session, stage)
        finally:
            rig.heal(session, stage)
        assert answer.end is not None
        assert hit_s is not None
        statistics = answer.end.statistics
        return Run(
            fault=fault,
            moment=moment,
            victim=victim,
            verdict=judge(found),
            recoveries=statistics["recoveries"],
            noticed_s=round(notes[0] - hit_s, 3) if notes else 0.0,
            load_s=round(statistics["recovery_load_s"], 3),
            prefill_s=round(statistics["recovery_prefill_s"], 3),
            pause_s=round(after_s - hit_s, 3) if after_s is not None else 0.0,
        )


def survive(files: ModelFiles, faults: Sequence[str], moments: int, count: int, tell: Callable[[Run], None]) -> list[Run]:
    """All runs, each told as it ends."""
    prompt = Tokenizer(files).encode_dialogue([{"role": "user", "content": PROMPT}], system=None, is_raw=False)
    limits = Limits(new_tokens_max=count, stop_ids=frozenset())
    reference = Reference(files, "float32")
    expected = reference.generate(tuple(prompt), Sampling(), count, frozenset())

    def judge(found: list[int]) -> str:
        return compare(reference, tuple(prompt), Sampling(), expected, found, frozenset())[0]

    runs = []
    for fault in faults:
        with netns_rig(files) if fault == "sever" else local_rig(files, fault, moments) as rig:
            with rig.cluster.session(rig.decoding, lambda text, share: None) as session:
                undisturbed = session.ask(prompt, Sampling(), limits)[1].new_tokens
            if judge(undisturbed) == WRONG:
                raise FlowSpecError("the undisturbed answer is wrong; try flowspec verify")
            for index in range(moments):
                runs.append(run_once(rig, fault, prompt, limits, count * index // moments, index % STAGES, judge))
                tell(runs[-1])
    return runs


def summary(runs: Sequence[Run], fault: str) -> str:
    """One line of what a fault cost."""
    own = [run for run in runs if run.fault == fault and (run.recoveries or (fault == "drafter" and run.noticed_s))]
    kinds = {kind: sum(run.verdict == kind for run in runs if run.fault == fault) for kind in sorted({run.verdict for run in runs})}
    if not own:
        return f"{fault}: {kinds}, none of the answers lost a device"
    parts = ", ".join(
        f"{name} {mean(getattr(run, field) for run in own):.2f} s (most {max(getattr(run, field) for run in own):.2f})"
        for name, field in (("noticed after", "noticed_s"), ("loading", "load_s"), ("prefill", "prefill_s"), ("pause", "pause_s"))
    )
    return f"{fault}: {kinds}; {parts}"


def command(args: argparse.Namespace) -> int:
    faults = args.faults.split(",")
    if not set(faults) <= set(FAULTS):
        raise InputError(f"--faults: expected some of {', '.join(FAULTS)}, got {args.faults}")

    def tell(run: Run) -> None:
        if args.json:
            print(json.dumps(asdict(run)), flush=True)
        else:
            print(
                f"{run.fault} of {run.victim} after {run.moment} tokens: {run.verdict}; noticed after {run.noticed_s:.2f} s, loading "
                f"{run.load_s:.2f}, prefill {run.prefill_s:.2f}, pause {run.pause_s:.2f}, {run.recoveries} recoveries",
                flush=True,
            )

    runs = survive(ModelFiles(args.model), faults, args.moments, args.tokens, tell)
    if not args.json:
        print("\n".join(summary(runs, fault) for fault in faults))
    return 1 if any(run.verdict == WRONG for run in runs) else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("survive", __doc__)
    parser.add_argument("--faults", default="kill,stop", help="of kill, stop, drafter and sever, with commas (default: %(default)s)")
    parser.add_argument("--moments", type=whole, default=10, metavar="N", help="moments of the answer, each a run (default: %(default)s)")
    parser.add_argument("--tokens", type=whole, default=200, metavar="N", help="length of the answer (default: %(default)s)")
    parser.add_argument("--model", "-m", default=BUNDLED, help="model (default: the bundled one)")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
