"""What a device says of itself: its facts, how fast it is, in which precisions it computes right.

`python -m flowspec.runtime.device.report` measures this machine for `flowspec doctor --local`, in a process
of its own: a driver may kill it. Nothing in that names a person, a host, a serial number or an address.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import subprocess
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from msgspec import structs

from flowspec.child_process import ending, python_module
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Arithmetics, AskArithmetics, Error, Loading
from flowspec.core.protocol.device_messages import AskFacts, Facts, KernelFacts, Software, Speed
from flowspec.core.protocol.precision import PRECISIONS
from flowspec.errors import FlowSpecError, InputError, first_line
from flowspec.folders import cache_folder, locked, read_own, write_own
from flowspec.host_memory import host_memory
from flowspec.model.accelerator import absence, find, has_driver
from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.compiled import threads, use_threads
from flowspec.model.engines import prepare, processor, run_trial, shown_to, torch_version
from flowspec.model.files import ModelFiles
from flowspec.plan.profile import read_profile, speed_of
from flowspec.runtime.cluster import Device
from flowspec.runtime.device.board import interface_of, read_board, read_number, read_text, run_tool
from flowspec.runtime.device.links import BRIEF, GLANCE, TRYING_S, measure_link
from flowspec.runtime.machine import Machine
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Sender, Wake
from flowspec.validation import as_dict, checked

log = logging.getLogger("flowspec.daemon")

RETRY_S = 1.0
Answer = Facts | Arithmetics | Loading | Error
Tell = Callable[[float], None]
"""Called now and then with how far kernels have been tried, from 0 to 1."""
_DRIVER = re.compile(r"\b\d{3}\.\d+(?:\.\d+)?\b")
SMI = ("--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu", "--format=csv")


class Reporter:
    """Answers a daemon's questions about the device in threads: files, tools, links and trials of kernels
    take their time, and a head must not wait for them. Questions of a kind are answered one after another.

    `ask` and `answer` belong to the poller's thread.
    """

    def __init__(self, machine: Machine, keys: Keyring | None, wake: Wake) -> None:
        self._machine, self._keys, self._wake = machine, keys, wake
        self._turns = {AskFacts: threading.Lock(), AskArithmetics: threading.Lock()}
        self._open = Counter[type]()
        self._answers: deque[tuple[Sender, type, Answer]] = deque()

    def ask(self, link: Sender, question: AskFacts | AskArithmetics, *, is_held: bool) -> None:
        """Takes a question; the answer goes out by a later `answer`."""
        kind = type(question)
        if self._open[kind] > limits.QUESTIONS_MAX:
            link.send(Error.saying("too many ask about this device; ask again in a moment", RETRY_S))
            return
        self._open[kind] += 1
        threading.Thread(
            target=self._find, args=(link, question, is_held), name="report", daemon=True
        ).start()

    def answer(self, *, is_held: bool) -> None:
        """Sends what is ready, facts stamped with this moment's clock."""
        while self._answers:
            link, kind, answer = self._answers.popleft()
            self._open[kind] -= not isinstance(answer, Loading)
            if isinstance(answer, Facts):
                answer = structs.replace(answer, clock_s=time.time(), is_held=is_held)
            link.send(answer)

    def _find(self, link: Sender, question: AskFacts | AskArithmetics, is_held: bool) -> None:
        def say(answer: Answer) -> None:
            self._answers.append((link, type(question), answer))
            self._wake.set()

        def tell(share: float) -> None:
            say(Loading(doing="trying kernels", share=share))

        with self._turns[type(question)]:
            try:
                if isinstance(question, AskFacts):
                    say(read_facts(question, self._machine, is_held=is_held, keys=self._keys, tell=tell))
                else:
                    kernel = read_kernel(question.dtype, self._machine, tell)
                    trouble = "" if kernel.arithmetics else kernel.faults
                    say(checked(Arithmetics(dtype=kernel.dtype, names=kernel.arithmetics, trouble=trouble)))
            # a device that says odd things about itself must not end its daemon
            except (OSError, ValueError, RuntimeError, FlowSpecError) as error:
                say(Error.saying(f"cannot tell about this device: {error}"))


def read_facts(
    question: AskFacts,
    machine: Machine,
    *,
    is_held: bool = False,
    keys: Keyring | None = None,
    tell: Tell = lambda share: None,
) -> Facts:
    """The facts of this machine as they are now; `keys` are for the link that is asked for."""
    link = None
    if question.next_hop:
        next_device = Device(name=question.next_name or "the next device", address=question.next_hop)
        link = measure_link(next_device, keys, GLANCE if question.is_brief else BRIEF)
    software, memory = read_software(), host_memory()
    name, total_bytes, free_bytes = _accelerator(machine.device if software.cuda else "cpu")
    facts = Facts(
        clock_s=time.time(),
        is_held=is_held,
        software=software,
        board=read_board(),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_limit_bytes=machine.memory_bytes or 0,
        resident_bytes=psutil.Process().memory_info().rss,
        accelerator=name,
        accelerator_total_bytes=total_bytes,
        accelerator_free_bytes=free_bytes,
        threads=machine.threads or min(limits.THREADS_MAX, threads()),
        cores=min(limits.THREADS_MAX, len(os.sched_getaffinity(0))),
        interface=interface_of(question.address),
        model=model_state(question.model, question.fingerprint) if question.model else "",
        link=link,
        speed=own_speed(machine, may_probe=not is_held) if question.speed else None,
        kernel=read_kernel(question.dtype, machine, tell) if question.dtype else None,
    )
    return checked(facts)


def read_software() -> Software:
    """Versions from the packages' metadata; nothing is imported."""

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)[: limits.NAME_CHARS_MAX]
        except importlib.metadata.PackageNotFoundError:
            return ""

    return Software(
        python=platform.python_version(),
        torch=version("torch"),
        transformers=version("transformers"),
        cuda=_torch_cuda(),
    )


def model_state(model: str, fingerprint: str) -> str:
    """One of `MODEL_STATES`: whether this machine has a model, as a folder, a file or in the hub's cache.
    Nothing is fetched."""
    try:
        files = ModelFiles(model, may_fetch=False)
        if files.gguf is None and files.find("config.json") is None:
            return "none"
    except InputError:
        return "none"
    try:
        files.check_weights()
        if files.folder is None and files.gguf is None:
            for name in set(files.file_map().values()):
                files.path(name)
        return "same" if files.fingerprint() == fingerprint else "other"
    except InputError:
        return "part"


def read_kernel(dtype: str, machine: Machine, tell: Tell = lambda share: None) -> KernelFacts:
    """Which kernel computes a precision on the device that `machine` would use, tried now if it was not
    before."""
    try:
        with shown_to(lambda doing, share: tell(share)):
            prepare()
            device = find(machine.device).device if machine.device != "cpu" and _torch_cuda() else "cpu"
            trial = run_trial(dtype, device)
    except InputError as error:
        return KernelFacts(dtype=dtype, kernel="", faults=first_line(error, limits.TEXT_CHARS_MAX))
    faults = trial.slowed_by[: limits.TEXT_CHARS_MAX]
    return KernelFacts(dtype=dtype, kernel=trial.kernel, faults=faults, arithmetics=trial.arithmetics)


def _torch_cuda() -> str:
    """The CUDA version that torch was built for, from the file in which its build writes it down."""
    spec = importlib.util.find_spec("torch")
    try:
        text = Path(spec.origin or "").with_name("version.py").read_text("utf-8") if spec else ""
    except (OSError, ValueError):
        return ""
    match = re.search(r"""^cuda\b[^=]*=\s*['"]([\w.]+)['"]""", text, re.MULTILINE)
    return match[1][: limits.NAME_CHARS_MAX] if match else ""


def _accelerator(wanted: str) -> tuple[str, int, int]:
    """Name, memory and free memory of the GPU that would be used; nothing where torch can use none."""
    with contextlib.suppress(InputError):
        if not (here := find(wanted)).is_cpu:
            free_bytes = here.free_bytes() + here.taken_bytes()  # what is kept goes when another is assigned
            return here.name[: limits.NAME_CHARS_MAX], here.total_bytes(), free_bytes
    return "", 0, 0


# ------------------------------------------------------------------------------------------------------ speed


def kept_profile() -> Path:
    """Where `flowspec profile --keep` writes: `$XDG_CONFIG_HOME/flowspec/profile.toml`, else under
    `~/.config`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "flowspec" / "profile.toml"


def own_speed(machine: Machine, *, may_probe: bool = True) -> Speed | None:
    """How fast this device is: given by the user, measured by `flowspec profile --keep`, or probed once and
    remembered. None where that would take a probe, which `may_probe` forbids while the device works."""
    if machine.profile is not None:
        return speed_of(machine.profile, "given")
    if (kept := kept_profile()).is_file():
        try:
            return speed_of(read_profile(kept), "kept")
        except InputError as error:
            log.warning("%s; measure again with flowspec profile --keep", error)
    path = cache_folder() / "speed.json"
    kernels = hashlib.sha256(compiled.SOURCE.read_bytes()).hexdigest()[:12]
    key = f"{platform.node()}, {platform.machine()}, {machine.device}, "  # home folders may be shared
    key += f"{machine.threads} of " if machine.threads else ""
    key += f"{os.cpu_count()} threads, torch {torch_version()}, kernels {kernels}"
    known = read_own(path, dict[str, Speed]) or {}
    if key not in known and may_probe:
        with locked(path):  # one process at a time probes, for daemons of one machine are asked together
            known = read_own(path, dict[str, Speed]) or {}
            if key not in known:
                known[key] = _probe(machine)
                with contextlib.suppress(OSError):  # it is probed again next time
                    write_own(path, known)
    return known.get(key)


def _probe(machine: Machine) -> Speed:
    from flowspec.runtime.device.probe import probe  # what computes, which a daemon needs for its first slice

    prepare()
    use_threads(machine.threads)
    started_s = time.perf_counter()
    speed = speed_of(probe(find(machine.device).device), "probed")
    spent_s, gflops = time.perf_counter() - started_s, 1e3 * speed.float32
    log.info("probed in %.1f s: reads %.3g GB/s, computes %.3g GFLOP/s", spent_s, speed.gb_per_s, gflops)
    return speed


# ----------------------------------------------------------------------------------------------- this machine


def measure_apart() -> dict[str, Any]:
    """The system, and what `measure` returns, or a `fault` if its process fails."""
    measured: dict[str, Any] = {"system": read_system()}
    nothing, pipe, command = subprocess.DEVNULL, subprocess.PIPE, python_module(__name__)
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(command, stdin=nothing, stdout=pipe, stderr=errors, timeout=TRYING_S)
        except subprocess.TimeoutExpired:
            return measured | {"fault": f"it did not end in {TRYING_S:.0f} s"}
        if done.returncode:
            return measured | {"fault": ending(done.returncode, errors)}
    measured.update(json.loads(done.stdout.splitlines()[-1]))
    return measured


def measure() -> dict[str, Any]:
    """The GPU that would be used, or why there is none and then the CPU; its memory, speed and kernels."""
    machine = Machine()  # as a daemon's without flags, whose probe and trials are remembered
    here, kernels = find(machine.device), [read_kernel(dtype, machine) for dtype in PRECISIONS]
    return {
        "device": here.device,
        "no_gpu": (absence() if has_driver() else "there is no driver of one") if here.is_cpu else "",
        "facts": here.facts(),
        "free_bytes": here.free_bytes(),
        "speed": as_dict(own_speed(machine)) if any(each.kernel for each in kernels) else None,
        "kernels": as_dict(kernels),
    }


def read_system(root: Path = Path("/")) -> dict[str, Any]:
    """Names and versions, empty where unknown; clocks of devices, as a Jetson's GPU, in Hz: now, at most."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    driver = _DRIVER.search(read_text(root / "proc/driver/nvidia/version"))
    return {
        "name": name,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": processor(),
        "l4t": read_text(root / "etc/nv_tegra_release"),
        "driver": driver[0] if driver else "",
        "clocks": {
            folder.name: [read_number(folder / "cur_freq"), read_number(folder / "max_freq")]
            for folder in sorted((root / "sys/class/devfreq").glob("*"))
        },
        "nvidia_smi": run_tool("nvidia-smi", *SMI).splitlines(),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
