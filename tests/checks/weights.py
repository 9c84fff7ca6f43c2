"""Do daemons without the model get their slices, whatever is killed or damaged on the way?

python -m tests.checks.weights MODEL

Starts four daemons with empty stores on this machine and asks them for an answer with `flowspec generate`,
whose model they cannot see: it lies in a hub cache of the head's own, made of links to MODEL (a folder or
GGUF file). Head and a daemon are killed in the middle, all are restarted, a stored tensor is damaged; each
time what was sent is compared with what had to be, and in the end the answers with that of one process that
has the model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowspec.bench.console import progress, show
from flowspec.child_process import python_module
from flowspec.errors import ClusterError, InputError
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.names import parts_of
from flowspec.plan.memory import mib
from tests.command import Parser, run_command

OWNER, COMMIT = "weights-check", "0" * 40
DEVICES = 4
POLL_S = 0.005
START_S = 120.0
ASKED = shlex.split(
    "--prompt-token-ids 5,6,7 --max-new-tokens 8 --temperature 0 --drafter ngram --context 256 --json"
)
FLOWSPEC = tuple(python_module("flowspec.cli.main"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One step: the bytes that each daemon got, and what was found; `is_right` when that is what had to
    be."""

    step: str
    sent_bytes: list[int]
    seen: str
    is_right: bool
    spent_s: float


class Device:
    """A daemon, and its folder of stored tensors."""

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
        nothing = {"HF_HOME": str(self.folder / "hub"), "HF_HUB_OFFLINE": "1"}
        options = f"--port {self.port} --name {self.name} --threads 1".split()
        options += ["--cache-dir", str(self.folder / "store")]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*FLOWSPEC, "daemon", *options], env={**_environment(), **nothing}, stderr=log
            )

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

    def files(self) -> dict[Path, int]:
        """What is stored, whole and in parts, and how large."""
        found = {}
        for path in (self.folder / "store").glob("tensors/*"):
            with contextlib.suppress(FileNotFoundError):  # a part that has just become whole
                found[path] = path.stat().st_size
        return found

    @property
    def stored_bytes(self) -> int:
        return sum(self.files().values())


class Check:
    """The steps, in their order."""

    def __init__(self, model: ModelFiles, folder: Path) -> None:
        self._folder = folder
        self.devices = [Device(number, folder) for number in range(1, DEVICES + 1)]
        self._model = model
        self._name, self._size = _make_hub(model, folder / "hub")
        lines = [
            f'[[device]]\nname = "{each.name}"\naddress = "127.0.0.1:{each.port}"\n' for each in self.devices
        ]
        (folder / "cluster.toml").write_text("\n".join(lines), "utf-8")
        self._answers: list[list[int]] = []
        self._sent: list[int] | None = None

    def steps(self) -> Iterator[tuple[str, Callable[[], tuple[str, bool]]]]:
        yield "empty daemons; the head is killed at a quarter", self._kill_head
        yield "again; a daemon is killed at a half", self._kill_daemon
        yield "that daemon started again", self._resume
        yield "all daemons started again", self._from_store
        yield "one bit of a stored tensor changed", self._damaged
        yield "one process that has the model", self._compare

    def run(self, step: str, act: Callable[[], tuple[str, bool]]) -> Outcome:
        started_s, before = time.monotonic(), [each.stored_bytes for each in self.devices]
        self._sent = None
        seen, is_right = act()
        sent = self._sent or [
            each.stored_bytes - held for each, held in zip(self.devices, before, strict=True)
        ]
        return Outcome(
            step=step, sent_bytes=sent, seen=seen, is_right=is_right, spent_s=time.monotonic() - started_s
        )

    def _kill_head(self) -> tuple[str, bool]:
        self._restart(self.devices)
        with self._asking() as head:
            self._wait_for(head, 0.25)
            head.send_signal(signal.SIGKILL)
        return f"{mib(self._stored)} of {mib(self._size)} are there", True

    def _kill_daemon(self) -> tuple[str, bool]:
        kept = self._stored
        with self._asking() as head:
            self._wait_for(head, 0.5)
            self._victim = max(
                self.devices, key=lambda device: any(path.suffix == ".part" for path in device.files())
            )
            self._victim.kill()
            _, error = head.communicate()
        told = [line for line in error.decode().splitlines() if self._victim.name in line]
        is_right = head.returncode == 1 and bool(told) and self._stored >= kept
        return told[-1] if told else f"status {head.returncode} and no word of it", is_right

    def _resume(self) -> tuple[str, bool]:
        before = [device.stored_bytes for device in self.devices]
        self._restart([self._victim])
        sent = self._ask()
        missing = [device.stored_bytes - held for device, held in zip(self.devices, before, strict=True)]
        return f"sent what was missing: {mib(sum(missing))} of {mib(self._stored)}", sent == missing

    def _from_store(self) -> tuple[str, bool]:
        self._restart(self.devices)
        return "all came from the stores", self._ask() == [0] * DEVICES

    def _damaged(self) -> tuple[str, bool]:
        device = self.devices[DEVICES // 2]
        path, size = max(device.files().items(), key=lambda item: item[1])
        with path.open("r+b") as file:
            file.seek(size // 2)
            byte = file.read(1)[0]
            file.seek(size // 2)
            file.write(bytes([byte ^ 1]))
        self._restart([device])
        wanted = [size if each is device else 0 for each in self.devices]
        is_right = self._ask() == wanted and "damaged" in device.log.read_text("utf-8", "replace")
        return f"{device.name} noticed, and got that tensor of {mib(size)} again", is_right

    def _restart(self, devices: Sequence[Device]) -> None:
        for device in devices:
            device.kill()
            device.start()
        for device in devices:
            device.wait()

    def _compare(self) -> tuple[str, bool]:
        for device in self.devices:
            device.kill()
        done = subprocess.run(
            [*FLOWSPEC, "generate", "--model", self._model.model, "--local", "1", *ASKED],
            capture_output=True,
            env=_environment(),
            check=False,
        )
        self._sent = [0] * DEVICES
        if done.returncode:
            raise ClusterError(f"one process gave no answer: {done.stderr.decode()[-300:]}")
        plain = json.loads(done.stdout)["token_ids"]
        same = sum(answer == plain for answer in self._answers)
        return f"{same} of {len(self._answers)} answers are its own", same == len(self._answers)

    @property
    def _stored(self) -> int:
        return sum(device.stored_bytes for device in self.devices)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[subprocess.Popen[bytes]]:
        """`flowspec generate` on the four; it has ended afterwards."""
        own = {
            "HF_HOME": str(self._folder),
            "HF_HUB_CACHE": str(self._folder / "hub"),
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(self._folder),
        }
        cluster = str(self._folder / "cluster.toml")
        command = [*FLOWSPEC, "generate", "--cluster", cluster, "--model", self._name, *ASKED]
        head = subprocess.Popen(
            command, env={**_environment(), **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            yield head
        finally:
            head.kill()
            head.wait()

    def _wait_for(self, head: subprocess.Popen[bytes], share: float) -> None:
        """Until so much is stored; raises when the head is done before."""
        while self._stored < share * self._size:
            if head.poll() is not None:
                _, error = head.communicate()
                why = (
                    f"the head ended: {error.decode()[-300:]}"
                    if head.returncode
                    else "all came before anything could be killed; give a larger model"
                )
                raise ClusterError(why)
            time.sleep(POLL_S)

    def _ask(self) -> list[int]:
        """A whole answer; the bytes that each daemon got for it."""
        with self._asking() as head:
            text, error = head.communicate()
        if head.returncode:
            raise ClusterError(f"no answer: {error.decode()[-300:]}")
        found: dict[str, Any] = json.loads(text)
        self._answers.append(found["token_ids"])
        self._sent = [stage["received_bytes"] for stage in found["stages"]]
        return self._sent


def _make_hub(model: ModelFiles, cache: Path) -> tuple[str, int]:
    """A hub cache that has the model; the name that it has there, and the bytes of its weights."""
    repository = cache / f"models--{OWNER}--model"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, "utf-8")
    assert model.folder is not None
    names = (
        [path.name for path in model.folder.iterdir()] if model.gguf is None else parts_of(model.gguf.name)
    )
    for name in names:
        blob = repository / "blobs" / name
        blob.parent.mkdir(exist_ok=True)
        try:
            blob.hardlink_to((model.folder / name).resolve())
        except OSError:  # on another disk
            shutil.copy(model.folder / name, blob)
        (snapshot / name).symlink_to(blob)
    size = sum(
        (model.folder / name).stat().st_size for name in names if name.endswith((".safetensors", ".gguf"))
    )
    return f"{OWNER}/model" + ("" if model.gguf is None else f"/{model.gguf.name}"), size


def _environment() -> dict[str, str]:
    """Without what would name another hub or cache."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def command(args: argparse.Namespace) -> int:
    model = ModelFiles(args.model)
    if model.folder is None:
        raise InputError(f"expected a model folder or a GGUF file, got {args.model!r}")
    model.check_weights()
    with tempfile.TemporaryDirectory(prefix="flowspec-", dir=args.scratch) as folder:
        check = Check(model, Path(folder))
        done = []
        try:
            with progress("starting", DEVICES + 2) as step:
                for text, act in check.steps():
                    step(text)
                    done.append(check.run(text, act))
        finally:
            for device in check.devices:
                device.kill()
    if args.json:
        print(json.dumps({"model": args.model, "steps": [asdict(each) for each in done]}))
    else:
        report(done)
    return 0 if all(each.is_right for each in done) else 1


def report(done: Sequence[Outcome]) -> None:
    rows = [
        [
            each.step,
            f"{each.spent_s:.1f}",
            *(f"{sent / 2**20:.1f}" for sent in each.sent_bytes),
            "yes" if each.is_right else "NO",
        ]
        for each in done
    ]
    show(
        "MiB that the head sent",
        ["step", "s", *(f"device {number}" for number in range(1, DEVICES + 1)), "right"],
        rows,
    )
    print()
    for each in done:
        print(f"{each.step}: {each.seen}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.checks.weights", __doc__)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder or GGUF file of some 100 MB or more (flowspec.bench.checkpoints FOLDER --gigabyte)",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="FOLDER",
        help="where to store what is sent, for a time (default: the system's)",
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
