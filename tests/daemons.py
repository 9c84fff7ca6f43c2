"""Real `flowspec daemon` processes for tests, each on a free port of loopback; and a wire that is slow."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests import warm

CODE = (
    "import sys, flowspec.version; flowspec.version.__version__ = sys.argv.pop(1); "
    "from flowspec.cli.main import main; sys.exit(main())"
)
PLAIN = ("-m", "flowspec.cli.main")
BOARD = (
    "[memory]\ngb = 8\ngb_per_s = {rate}\nefficiency = 1.0\n[compute]\nfloat32 = {rate}\nefficiency = 1.0\n"
)
"""A device's profile."""


def cluster_file(
    folder: Path,
    addresses: Mapping[str, str],
    *,
    rates: Mapping[str, float] | None = None,
    fields: Mapping[str, str] | None = None,
) -> Path:
    """A cluster file of these addresses, by device. Where there are rates all links are fast, and a device
    with a rate has a declared board; `fields` are more lines of a device."""
    folder.mkdir(exist_ok=True)
    text = "" if rates is None else 'links = ["10000/0.05"]\n'
    for name, address in addresses.items():
        text += f'[[device]]\nname = "{name}"\naddress = "{address}"\n{(fields or {}).get(name, "")}'
        if name in (rates or {}):
            (folder / f"{name}.toml").write_text(BOARD.format(rate=(rates or {})[name]))
            text += f'profile = "{name}.toml"\n'
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def of_version(version: str) -> tuple[str, ...]:
    """Runs a daemon of another version than ours."""
    return "-c", CODE, version


class DaemonProcess:
    """A daemon, listening; ends with `stop` or the test."""

    def __init__(
        self, name: str, *flags: str, run: Sequence[str] = PLAIN, is_warm: bool | None = None
    ) -> None:
        # With a board of its own it need not probe, which takes time and writes into the user's cache folder.
        command = [
            sys.executable,
            *run,
            "daemon",
            "--port=0",
            f"--name={name}",
            "--device=cpu",
            "--profile=raspberry-pi-4",
            *flags,
        ]
        self.name = name
        self.lines: list[str] = []
        start = warm.Popen if (run == PLAIN if is_warm is None else is_warm) else subprocess.Popen
        self.process = start(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"listens on \S+:(\d+) ", line):
                self.address = f"127.0.0.1:{found[1]}"
                break
        else:
            raise AssertionError("".join(self.lines))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines += self.process.stderr

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def daemon_process(
    name: str, *flags: str, run: Sequence[str] = PLAIN, is_warm: bool | None = None
) -> Iterator[DaemonProcess]:
    """`run` is what Python is told to run as the `flowspec` command; another than usual starts cold
    unless told otherwise."""
    started = DaemonProcess(name, *flags, run=run, is_warm=is_warm)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.stop()


@contextlib.contextmanager
def slow_wire(address: str, mbps: float) -> Iterator[str]:
    """An address behind which `address` is, at no more than so many Mbit/s to it."""
    host, port = address.split(":")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        over = threading.Event()
        threads: list[threading.Thread] = []

        def carry(source: socket.socket, target: socket.socket, pace: float) -> None:
            with contextlib.suppress(OSError):
                while chunk := source.recv(16384):
                    time.sleep(len(chunk) * pace)
                    target.sendall(chunk)
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def accept() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    near = server.accept()[0]
                    near.settimeout(None)
                    far = socket.create_connection((host, int(port)))
                    for ends in ((near, far, 8e-6 / mbps), (far, near, 0.0)):
                        threads.append(threading.Thread(target=carry, args=ends, daemon=True))
                        threads[-1].start()
                    pairs.extend((near, far))

        pairs: list[socket.socket] = []
        acceptor = threading.Thread(target=accept, daemon=True)
        acceptor.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            acceptor.join()
            for end in pairs:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            for end in pairs:
                end.close()
