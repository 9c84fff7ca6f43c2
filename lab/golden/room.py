"""How much room FlowSpec takes: memory of a head, a stage, a drafter and an idle daemon, the disk of an
installation, and what is in its wheel.

Memory is what a process has resident, all that it shares with others included: its part of that would move
with whatever else runs. A peak is that since a process's start, so each model has daemons of its own.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email import message_from_string
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lab.golden.daemons import Daemon, daemons
from lab.golden.limits import limited
from lab.golden.place import Place, UnavailableError, smollm2
from lab.golden.recording import Absent, Observation

LIMIT_S = 1200
"""What a round takes at most, on a machine that is busy with other things."""
STOP_S = 30.0
STAGES = 2
CONTEXT, NEW_TOKENS = 512, 32
QUESTION = "Write a function that adds two numbers."
LOADED, ANSWERED = "loaded", "answered"
RESIDENT, PEAK = "VmRSS", "VmHWM"
SHOWN = ("torch", "numpy", "transformers", "sympy", "hf-xet", "tokenizers", "networkx")
OTHERS = "other libraries"
"""Distributions whose size is told apart, 0 where an installation needs none of it; the others' is told in
one."""
NO_SOURCE = (".*", "build", "dist", "*.egg-info", "__pycache__")
MEGABYTE = 1e6


def observe(place: Place, name: str) -> Iterator[Observation | Absent]:
    """One round."""
    with limited(LIMIT_S):
        if place.wants("disk") or place.wants("wheel"):
            yield from _disk(place)
        if place.wants("toy") or place.wants("idle daemon, resident MiB"):
            yield from _memory(place, "toy", "bundled", "draft")
        if place.wants("smollm2"):
            try:
                path = str(smollm2(place))
            except UnavailableError as error:
                yield Absent(key="smollm2", why=str(error))
                return
            yield from _memory(place, "smollm2", path, path)  # no smaller model has its vocabulary


def _memory(place: Place, name: str, model: str, drafter: str) -> Iterator[Observation]:
    """Of stages and a head that also drafts, and then of a daemon that drafts for a head and these stages."""
    with daemons(place, STAGES + 1) as running:
        *stages, drafting = running
        for daemon in running:
            yield _mib(daemon.process.pid, RESIDENT, "idle daemon, resident MiB")
        with _head(place, model, stages, {}) as head:
            seen = {f"{name}/head": head.pid}
            for number, each in enumerate(stages, 1):
                seen[f"{name}/stage {number} of {STAGES}"] = each.process.pid
            yield from _loaded_and_asked(head, seen)
        with _head(place, model, running, {drafter: drafting.name}) as head:
            seen = {f"{name}/head without a drafter": head.pid, f"{name}/drafter": drafting.process.pid}
            yield from _loaded_and_asked(head, seen)


def _loaded_and_asked(head: subprocess.Popen[str], seen: Mapping[str, int]) -> Iterator[Observation]:
    assert head.stdin is not None
    _await(head, LOADED)
    for name, pid in seen.items():
        yield _mib(pid, PEAK, f"{name}, peak while loading MiB")
    head.stdin.write("\n")
    head.stdin.flush()
    _await(head, ANSWERED)
    for name, pid in seen.items():
        yield _mib(pid, RESIDENT, f"{name}, resident MiB")


def _await(head: subprocess.Popen[str], word: str) -> None:
    assert head.stdout is not None
    if (line := head.stdout.readline().strip()) != word:
        raise RuntimeError(f"expected the head to say {word!r}, got {line!r} and status {head.poll()}")


def _mib(pid: int, field: str, key: str) -> Observation:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text("utf-8"), re.MULTILINE)
    assert found is not None, "Linux tells it of every process that lives"
    return Observation(key=key, value=int(found[1]) / 1024)


@contextlib.contextmanager
def _head(
    place: Place, model: str, some: Sequence[Daemon], drafters: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process with a model on these daemons, of which some draft, by what they draft with."""
    cluster = place.home / "cluster.toml"
    tables = [f'[[device]]\nname = "{each.name}"\naddress = "{each.address}"\n' for each in some]
    tables += [f'[[drafter]]\nmodel = "{each}"\ndevice = "{at}"\n' for each, at in drafters.items()]
    cluster.write_text("\n".join(tables), "utf-8")
    command = [sys.executable, "-m", "lab.golden.room", str(cluster), model]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with place.start(command, text=True, **pipes) as process:
        try:
            yield process
            process.communicate(timeout=STOP_S)
        finally:
            process.kill()


def run_head(cluster: str, model: str) -> None:
    """A program that asks a model once, and tells how far it is; it goes on when it gets a line."""
    from flowspec import LLM  # here: who only looks on needs none of it

    with LLM(model, cluster=cluster, all_devices=True, context=CONTEXT, keep_learnt=False) as llm:
        print(LOADED, flush=True)
        sys.stdin.readline()
        llm.generate(QUESTION, temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        print(ANSWERED, flush=True)
        sys.stdin.readline()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """FlowSpec's own: `files` are sizes by name, unpacked; `requirements` are those without extras."""

    packed_bytes: int
    files: Mapping[str, int]
    requirements: Sequence[str]


def _disk(place: Place) -> Iterator[Observation | Absent]:
    """Of an installation without extras, whose libraries are those that this environment has."""
    wheel = _wheel(place)
    code = sum(size for name, size in wheel.files.items() if name.endswith((".py", ".c", ".cu")))
    contents = sum(wheel.files.values())
    yield _mb("wheel/file MB", wheel.packed_bytes)
    yield _mb("wheel/code MB", code)
    yield _mb("wheel/data MB", contents - code)
    try:
        sizes = {name: _size(each) for name, each in _closure(wheel.requirements).items()}
    except PackageNotFoundError as error:
        yield Absent(key="disk", why=f"{error.name} is not installed here")
        return
    told = dict.fromkeys((*SHOWN, OTHERS), 0)
    for name, size in sizes.items():
        told[name if name in SHOWN else OTHERS] += size
    for name, size in told.items():
        yield _mb(f"disk/{name} MB", size)
    yield _mb("disk/installation MB", sum(told.values()) + contents)


def _mb(key: str, size: int) -> Observation:
    return Observation(key=key, value=size / MEGABYTE)


def _wheel(place: Place) -> Wheel:
    """Built from a copy, since setuptools writes into the tree that it builds."""
    with tempfile.TemporaryDirectory(dir=place.home) as folder:
        source = shutil.copytree(
            place.tree, Path(folder, "source"), ignore=shutil.ignore_patterns(*NO_SOURCE)
        )
        words = ["wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words, "--wheel-dir", folder, str(source)],
            capture_output=True,
            text=True,
            env=place.environment(),
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"expected a wheel, got status {done.returncode}: {done.stderr.strip()[-500:]}"
            )
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as archive:
            files = {each.filename: each.file_size for each in archive.infolist()}
            (about,) = (each for each in files if each.endswith(".dist-info/METADATA"))
            headers = message_from_string(archive.read(about).decode("utf-8"))
        requirements = [str(each) for each in headers.get_all("Requires-Dist", [])]
        return Wheel(packed_bytes=path.stat().st_size, files=files, requirements=requirements)


def _closure(requirements: Sequence[str]) -> dict[str, Distribution]:
    """All that is installed for these, by name; raises `PackageNotFoundError`."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(each), "") for each in requirements]
    while waiting:
        wanted, of_extra = waiting.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(wanted.name)
        found.setdefault(name, distribution(name))
        for extra in {"", *wanted.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(Requirement(each), extra) for each in found[name].requires or ()]
    return found


def _size(installed: Distribution) -> int:
    """Of its files but those that Python compiles when it uses them."""
    paths = [Path(str(each.locate())) for each in installed.files or () if each.suffix != ".pyc"]
    return sum(path.stat().st_size for path in paths if path.is_file())


if __name__ == "__main__":
    run_head(*sys.argv[1:])
