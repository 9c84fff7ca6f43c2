"""Devices to disturb, and how each fault strikes and ends: local processes, daemons in network namespaces."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowspec.bench.records import EXACT, WRONG
from flowspec.bench.verify import parting
from flowspec.child_process import python_module
from flowspec.errors import ClusterError, InputError
from flowspec.model.files import BUNDLED, ModelFiles, canonical_name
from flowspec.model.spec import context_max
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device, pick_context, split_layers
from flowspec.runtime.cluster_file import read_cluster
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.session import OpenCluster, Session
from lab.checks.pauses import FORMED

PROCESS_FAULTS = ("kill", "stop", "drafter", "suspend")
LINK_FAULTS = ("sever", "loss", "return", "slow", "oneway", "frames", "mtu")
FAULTS = (*PROCESS_FAULTS, *LINK_FAULTS)
STAGES = 4
DRAFTERS = ("draft", "draft-math")
NETNS = Path(__file__).parents[2] / "launch" / "netns"
BRIDGE, BESIDE = "flowspec-br", "flowspec-beside"
"""What joins the namespaces of `launch/netns`, and a second link of one of them."""
SUSPENDED_S = 20
SLOW = "100kbit"
FRAME_BYTES = 1000
"""Longer frames do not get through; a row of the bundled model's activations takes 1 KiB."""
NOBODY = "02:00:00:00:00:01"
"""A hardware address that nobody has."""

START_S = 120.0
FLOWSPEC = tuple(python_module("flowspec.cli.main"))

Act = Callable[[Session, int], None]
QUESTIONS = (
    "What is 17 + 25?",
    "What is 3 + 4?",
    "Tell me a story.",
    "What is FlowSpec?",
    "Who are you?",
    "What is 99 - 1?",
)
"""Short ones that it answers."""
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2},
)
"""Fields of `Sampling`, as a request's document has them, too."""


def agreement(expected: Sequence[int], found: Sequence[int], stop_ids: frozenset[int]) -> str:
    """`exact` or `wrong`, as in `parting`."""
    return EXACT if parting(expected, found, stop_ids) is None else WRONG


@dataclass(slots=True)
class Rig:
    """Devices to disturb: `hit` and `heal` take a target's number and what is known of it.

    `prepare` is done before the answer that is disturbed. Answers are asked for until what is named in
    `until` has happened after the fault (`FORMED` of `pauses`; empty: one answer). `check` says
    what is wrong with how a fault ended, if anything is: it is told the target's number and the notes.
    """

    cluster: OpenCluster
    hit: Act
    heal: Act
    decoding: Decoding = field(default_factory=Decoding)
    prepare: Act = lambda session, number: None
    logs: Callable[[], Sequence[Path]] = tuple
    until: str = ""
    check: Callable[[int, Sequence[str]], str] = lambda number, notes: ""

    def target(self, number: int) -> Device:
        """Whom a fault strikes: a stage's device, or a drafter's where some have devices of their own."""
        targets = self.cluster.drafter_devices or self.cluster.devices
        return targets[number % len(targets)]


def rig_of(files: ModelFiles, dtype: str, fault: str, spares: int) -> contextlib.AbstractContextManager[Rig]:
    """The devices for a fault; raises `InputError` where it cannot be brought about here."""
    is_of_links = fault in LINK_FAULTS
    return netns_rig(files, dtype, fault) if is_of_links else local_rig(files, dtype, fault, spares)


def cluster_of(files: ModelFiles, dtype: str, devices: Sequence[Device]) -> OpenCluster:
    """These devices for this model in this precision, with their layers shared out evenly."""
    config = files.config()
    plan = ClusterPlan(
        model=canonical_name(files.model),
        fingerprint=files.fingerprint(),
        dtype=dtype,
        context=pick_context(None, context_max(config)),
        stages=tuple(split_layers(devices, config.num_hidden_layers, None)),
        hidden_size=config.hidden_size,
        spec=files.spec,
    )
    return OpenCluster(files=files, config=config, plan=plan, is_local=True, devices=tuple(devices))


# ----------------------------------------------------------------------------------------- local processes


@contextlib.contextmanager
def local_rig(files: ModelFiles, dtype: str, fault: str, spares: int) -> Iterator[Rig]:
    """Local daemons; the dead are replaced by spare ones from run to run."""
    drafters = len(DRAFTERS) if fault == "drafter" else 0
    if drafters and files.model != BUNDLED:
        raise InputError(f"--faults {fault}: expected the bundled model, got {files.model!r}")
    count = STAGES + drafters + (spares if fault in ("kill", "drafter") else 0)
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        local = stack.enter_context(LocalCluster(count, log_level="INFO", log_file=str(log)))
        devices = [Device(name=daemon.name, address=daemon.address) for daemon in local.wait()]
        left = devices[STAGES if drafters else 0 :]
        pids = {daemon.name: daemon.pid for daemon in local.wait()}

        def cluster() -> OpenCluster:
            if drafters:
                return replace(
                    cluster_of(files, dtype, devices[:STAGES]), drafter_devices=tuple(left[:drafters])
                )
            return cluster_of(files, dtype, left[:STAGES])

        def hit(session: Session, number: int) -> None:
            if fault == "suspend":
                suspend_this()
            else:
                os.kill(pids[rig.target(number).name], signal.SIGSTOP if fault == "stop" else signal.SIGKILL)

        def heal(session: Session, number: int) -> None:
            if fault == "stop":
                os.kill(pids[rig.target(number).name], signal.SIGCONT)
            elif fault != "suspend":
                left.remove(rig.target(number))
                if len(left) >= (drafters or STAGES):
                    rig.cluster = cluster()

        decoding = Decoding(drafters=DRAFTERS) if drafters else Decoding()
        rig = Rig(cluster(), hit, heal, decoding, logs=lambda: (log,))
        yield rig


def suspend_this() -> None:
    """Stops this process, which is the head, and has it go on; returns afterwards."""
    own = os.getpid()
    run(f"sh -c 'kill -STOP {own}; sleep {SUSPENDED_S}; kill -CONT {own}'")


# -------------------------------------------------------------------------------------- network namespaces


class Netns:
    """Daemons of `launch/netns` in their namespaces, by number, and what can be done to their links."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = devices
        self.state = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / "flowspec-netns"
        self.logs = [self.state / f"flowspec-{number}.log" for number in range(len(devices))]
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def link(self, number: int, state: str) -> None:
        run(f"ip link set flowspec-v{number} {state}")

    def kill(self, number: int) -> None:
        os.kill(int((self.state / f"flowspec-{number}.pid").read_text()), signal.SIGKILL)
        if (started := self._started.pop(number, None)) is not None:
            started.wait()

    def start(self, number: int) -> None:
        """A daemon as `launch/netns` starts it, in the place of one that was killed; does not wait for it."""
        host, port = self.devices[number].address.split(":")
        flags = f"--host {host} --port {port} --name {self.devices[number].name} --threads 1 --insecure"
        daemon = python_module("flowspec.cli.main", "daemon", *flags.split())
        command = [*self.inside(number).split(), *daemon]
        with self.logs[number].open("ab") as log:
            nothing = subprocess.DEVNULL
            process = subprocess.Popen(command, stdin=nothing, stdout=log, stderr=log, start_new_session=True)
        self._started[number] = process
        (self.state / f"flowspec-{number}.pid").write_text(f"{process.pid}\n")

    def slow_all(self, rate: str) -> None:
        """Each device's link carries so much in each direction."""
        for number in range(len(self.devices)):
            self.bucket(f"flowspec-v{number}", "", rate, 3200)
            self.bucket("eth0", self.inside(number), rate, 3200)

    def cut_frames(self, number: int, size: int) -> None:
        """Frames that are longer do not leave the device, and nobody says so."""
        self.bucket("eth0", self.inside(number), "1gbit", size)

    def cut_frames_to(self, number: int, to: int, size: int) -> None:
        """Frames that are longer do not get from the device to another one: it has a second link for that."""
        first, second = (each.address.split(":")[0] for each in (self.devices[number], self.devices[to]))
        run(f"ip link add {BESIDE} type veth peer name eth1 netns flowspec-{number}")
        run(f"ip link set {BESIDE} master {BRIDGE} up")
        run(f"ip -n flowspec-{number} link set eth1 up")
        self.bucket("eth1", self.inside(number), "1gbit", size)
        run(f"ip -n flowspec-{number} route add {second} dev eth1 src {first}")

    def join_again(self) -> None:
        """The second link goes, and its route with it."""
        run(f"ip link del {BESIDE}")

    def bucket(self, device: str, where: str, rate: str, burst: int) -> None:
        run(f"{where} tc qdisc replace dev {device} root tbf rate {rate} limit 16mb burst {burst}")

    def free(self, number: int) -> None:
        """The device's link is as it was."""
        for where, device in (("", f"flowspec-v{number}"), (self.inside(number), "eth0")):
            command = f"{where} tc qdisc del dev {device} root".split()
            subprocess.run(command, check=False, stderr=subprocess.DEVNULL)  # some have none

    def free_all(self) -> None:
        for number in range(len(self.devices)):
            self.free(number)

    def lose_the_way(self, number: int, to: int) -> None:
        """What the device sends to another one gets lost; the other direction stays."""
        host = self.devices[to].address.split(":")[0]
        run(f"ip -n flowspec-{number} neigh replace {host} lladdr {NOBODY} dev eth0 nud permanent")

    def find_the_way(self, number: int, to: int) -> None:
        host = self.devices[to].address.split(":")[0]
        run(f"ip -n flowspec-{number} neigh del {host} dev eth0")

    def inside(self, number: int) -> str:
        return f"ip netns exec flowspec-{number}"


@contextlib.contextmanager
def netns_rig(files: ModelFiles, dtype: str, fault: str) -> Iterator[Rig]:
    """Daemons in network namespaces, whose links suffer.

    `oneway`, `frames` and `mtu` strike what a stage sends to the next: of the last stage the one before.
    """
    if os.geteuid() != 0:
        raise InputError(f"--faults {fault}: expected root, for network namespaces; or choose kill,stop")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        here = {**os.environ, "FLOWSPEC_VENV": sys.prefix}  # the daemons are this installation's
        up = [str(NETNS), "up", "--devices", str(STAGES), "--file", str(file)]
        if subprocess.run(up, env=here, check=False).returncode:
            raise InputError("launch/netns did not start the daemons; see what it says above")
        try:
            yield _netns_rig(files, dtype, fault, Netns(read_cluster(file)))
        finally:
            subprocess.run([str(NETNS), "down"], check=False)


def _netns_rig(files: ModelFiles, dtype: str, fault: str, net: Netns) -> Rig:
    def sender(number: int) -> int:
        return min(number, STAGES - 2)

    def blind(number: int) -> None:
        net.lose_the_way(sender(number), sender(number) + 1)

    def see(number: int) -> None:
        net.find_the_way(sender(number), sender(number) + 1)

    hits: dict[str, tuple[Callable[[int], None], Callable[[int], None]]] = {
        "sever": (lambda number: net.link(number, "down"), lambda number: net.link(number, "up")),
        "loss": (net.kill, net.start),
        "return": (net.start, lambda number: None),
        "slow": (lambda number: None, lambda number: net.free_all()),
        "oneway": (blind, see),
        "frames": (
            lambda number: net.cut_frames_to(sender(number), sender(number) + 1, FRAME_BYTES),
            lambda number: net.join_again(),
        ),
        "mtu": (
            lambda number: net.cut_frames(sender(number), FRAME_BYTES),
            lambda number: net.free(sender(number)),
        ),
    }
    hit, heal = hits[fault]

    def prepare(session: Session, number: int) -> None:
        """A device is away when its return is to be measured."""
        net.kill(number)
        deadline_s = time.monotonic() + timeouts.WAIT_FOR_DEVICES_S
        while len(session.head.stages) == STAGES or not session.head.is_formed:
            if time.monotonic() > deadline_s:
                raise ClusterError(f"the head did not go on without {net.devices[number].name}")
            time.sleep(0.01)

    def named(number: int, notes: Sequence[str]) -> str:
        """A note names the link, and who is at fault is lost: its far end, or the near end where all fail."""
        first, second = (net.devices[each].name for each in (sender(number), sender(number) + 1))
        if not any(f"the link from {first} to {second}" in note for note in notes):
            return f"no note names the link from {first} to {second}"
        blamed = first if fault == "mtu" else second
        if not any(note.startswith(f"device {blamed} is lost") for note in notes):
            return f"{blamed} is not suspected"
        return ""

    def waited_for(number: int, notes: Sequence[str]) -> str:
        """A note names a link, and nobody is lost."""
        if any(" is lost" in note for note in notes):
            return "a device is lost, though nothing was wrong with it"
        if not any(note.startswith("the link from ") and " carries " in note for note in notes):
            return "no note names a slow link"
        return ""

    rig = Rig(
        cluster_of(files, dtype, net.devices),
        lambda session, number: hit(number),
        lambda session, number: heal(number),
        logs=lambda: net.logs,
        until=FORMED if fault == "return" else "",
    )
    if fault == "return":
        rig.prepare = prepare
    if fault == "slow":  # from before the answer, whose prompt is the longest message
        rig.prepare = lambda session, number: net.slow_all(SLOW)
        rig.check = waited_for
    if fault in ("oneway", "frames", "mtu"):
        rig.check = named
    return rig


def run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)


# ---------------------------------------------------------------------------------------------- processes


class Daemon:
    """A daemon process of this machine, and the folder of its log and stored tensors."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"device-{number}"
        self.port = _free_port()
        self.folder = folder / self.name
        self.folder.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def start(self) -> None:
        # without what would name another hub or cache
        here = {
            key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))
        }
        here |= {"HF_HOME": str(self.folder / "hub"), "HF_HUB_OFFLINE": "1"}
        options = f"--port {self.port} --name {self.name} --threads 1".split()
        options += ["--cache-dir", str(self.folder / "store")]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen([*FLOWSPEC, "daemon", *options], env=here, stderr=log)

    def wait(self) -> None:
        """Until the daemon listens; raises `ClusterError` when it does not come up."""
        assert self._process is not None
        deadline_s = time.monotonic() + START_S
        while self._process.poll() is None and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.05)
        raise ClusterError(
            f"{self.name} did not start; its log: {self.log.read_text('utf-8', 'replace')[-300:]}"
        )

    def kill(self) -> None:
        """Ends the daemon without a warning."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
