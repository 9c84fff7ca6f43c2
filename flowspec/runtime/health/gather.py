"""Everything a daemon tells about its device (`core.protocol.device_messages`), gathered at once. Takes
seconds where torch must be asked for CUDA."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import time
from pathlib import Path

import psutil

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Arithmetics, AskArithmetics
from flowspec.core.protocol.device_messages import AskFacts, Facts, KernelFacts, LinkFacts, Software
from flowspec.errors import FlowSpecError, InputError, first_line
from flowspec.host_memory import host_memory
from flowspec.model.arithmetic.compiled import threads
from flowspec.model.files import ModelFiles
from flowspec.model.trials import prepare, run_trial, shown_to
from flowspec.runtime.cluster import Device
from flowspec.runtime.health.board import read_board
from flowspec.runtime.health.interfaces import interface_of
from flowspec.runtime.health.own_speed import own_speed
from flowspec.runtime.health.question_worker import Tell
from flowspec.runtime.links import BRIEF, GLANCE, LinkEffort, measure_links
from flowspec.runtime.machine import Machine
from flowspec.runtime.security.keyring import Keyring
from flowspec.validation import checked


def gather(
    question: AskFacts,
    machine: Machine,
    *,
    is_held: bool = False,
    root: Path = Path("/"),
    keys: Keyring | None = None,
    tell: Tell = lambda share: None,
) -> Facts:
    """The facts of this machine as they are now; `keys` are for the link that is asked for, and `tell` is
    told how far kernels have been tried where that was not done before."""
    next_device = Device(name=question.next_name or "the next device", address=question.next_hop)
    software = read_software()
    memory = host_memory(root)
    effort = GLANCE if question.is_brief else BRIEF
    name, total_bytes, free_bytes = _accelerator(machine.device if software.cuda else "cpu")
    found = Facts(
        clock_s=time.time(),
        is_held=is_held,
        software=software,
        board=read_board(root),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_limit_bytes=machine.memory_bytes or 0,
        resident_bytes=psutil.Process().memory_info().rss,
        accelerator=name,
        accelerator_total_bytes=total_bytes,
        accelerator_free_bytes=free_bytes,
        threads=machine.threads or min(limits.THREADS_MAX, threads()),
        cores=min(limits.THREADS_MAX, len(os.sched_getaffinity(0))),
        interface=interface_of(question.address, root),
        model=model_state(question.model, question.fingerprint) if question.model else "",
        link=link_facts(next_device, keys, effort) if question.next_hop else None,
        speed=own_speed(machine, may_probe=not is_held) if question.speed else None,
        kernel=kernel_facts(question.dtype, machine, tell) if question.dtype else None,
    )
    return checked(found)


def read_software() -> Software:
    """Versions from the packages' metadata; nothing is imported."""
    return Software(
        python=platform.python_version(),
        torch=_version("torch"),
        transformers=_version("transformers"),
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


def link_facts(device: Device, keys: Keyring | None, effort: LinkEffort = BRIEF) -> LinkFacts:
    """The link from here to a daemon, measured."""
    try:
        (peer,) = measure_links([device], effort=effort, keys=keys)
    except FlowSpecError as error:
        said = "".join(letter if letter.isprintable() else " " for letter in str(error))
        return LinkFacts(problem=said[:1000])
    return LinkFacts(latency_s=peer.latency_s, bandwidth_mbps=peer.bandwidth_mbps)


def kernel_facts(dtype: str, machine: Machine, tell: Tell = lambda share: None) -> KernelFacts:
    """Which kernel computes a precision on the device that `machine` would use.

    It is tried now if it was not before, and `tell` told how far that has come.
    """
    try:
        with shown_to(lambda doing, share: tell(share)):
            prepare()
            device = "cpu"
            if machine.device != "cpu" and _torch_cuda():
                from flowspec.model.accelerator import find

                device = str(find(machine.device).device)
            found = run_trial(dtype, device)
    except InputError as error:
        return KernelFacts(dtype=dtype, kernel="", faults=first_line(error, limits.TEXT_CHARS_MAX))
    faults = found.slowed_by[: limits.TEXT_CHARS_MAX]
    return KernelFacts(dtype=dtype, kernel=found.kernel, faults=faults, arithmetics=found.arithmetics)


def arithmetics(question: AskArithmetics, machine: Machine, tell: Tell) -> Arithmetics:
    """The answer to a head that asks which arithmetics this machine has."""
    found = kernel_facts(question.dtype, machine, tell)
    names = found.arithmetics
    return checked(Arithmetics(dtype=question.dtype, names=names, trouble="" if names else found.faults))


def _version(package: str) -> str:
    from importlib import metadata  # a daemon need not have it while nobody asks

    try:
        return metadata.version(package)[: limits.NAME_CHARS_MAX]
    except metadata.PackageNotFoundError:
        return ""


def _torch_cuda() -> str:
    """The CUDA version that torch was built for, from the file in which its build writes it down."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text("utf-8")
    except OSError:
        return ""
    found = re.search(r"""^cuda\b[^=]*=\s*['"]([\w.]+)['"]""", text, re.MULTILINE)
    return "" if found is None else found[1][: limits.NAME_CHARS_MAX]


def _accelerator(wanted: str) -> tuple[str, int, int]:
    """Name, memory and free memory of the GPU that would be used; nothing where torch can use none."""
    from flowspec.model.accelerator import find

    try:
        found = find(wanted)
    except InputError:
        return "", 0, 0
    if found.is_cpu:
        return "", 0, 0
    own_bytes = found.taken_bytes()  # a slice that is kept goes when another is assigned
    return found.name[: limits.NAME_CHARS_MAX], found.total_bytes(), found.free_bytes() + own_bytes
