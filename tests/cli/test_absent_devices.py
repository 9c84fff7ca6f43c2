"""A device that is absent when a command starts: answers begin without it, and it is taken in when it is
there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from flowspec.cli.main import main
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.reference import Reference
from flowspec.runtime import timeouts
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, RecoveryOptions, open_session
from tests import names
from tests.daemons import DaemonProcess, daemon_process
from tests.runtime.clusters import wait_until

PROMPT = (5, 6, 7, 8, 9)
COUNT = 24
BOARD = (
    "[memory]\ngb = 8\ngb_per_s = {rate}\nefficiency = 1.0\n[compute]\nfloat32 = {rate}\nefficiency = 1.0\n"
)
ASKED = (
    f"--prompt-token-ids={','.join(map(str, PROMPT))}",
    f"--max-new-tokens={COUNT}",
    "--ignore-eos",
    "--dtype=float32",
    "--context=200",
    "--method=ar",
    "--drafter=none",
)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return Reference(ModelFiles(BUNDLED), "float32").generate(PROMPT, Sampling(), COUNT, frozenset())


@pytest.fixture(scope="module")
def here() -> Iterator[DaemonProcess]:
    with daemon_process("here", "--threads=1") as started:
        yield started


@pytest.fixture
def silent() -> Iterator[str]:
    """Somebody who takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def cluster_file(
    folder: Path, devices: dict[str, str], memory: str = "2GiB", rates: Sequence[float] = ()
) -> Path:
    """A cluster file with these addresses; a device with a rate has a declared board."""
    text = 'links = ["10000/0.05"]\n'
    for number, (name, address) in enumerate(devices.items()):
        text += f'[[device]]\nname = "{name}"\naddress = "{address}"\nmemory = "{memory}"\n'
        if number < len(rates):
            (folder / f"{name}.toml").write_text(BOARD.format(rate=rates[number]))
            text += f'profile = "{name}.toml"\n'
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def test_answers_begin_without_those_that_are_absent_after_waiting_for_all_at_once(
    tmp_path: Path, here: DaemonProcess, silent: str, expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f"127.0.0.1:{free_port()}"
    file = cluster_file(tmp_path, {"gone": gone, "here": here.address, "silent": silent})
    assert main(["generate", f"--cluster={file}", *ASKED, "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["token_ids"] == expected
    assert [stage["name"] for stage in found["stages"]] == ["here"]
    assert list(found["plan"]["absent"]) == ["gone", "silent"]
    told = [line for line in shown.err.splitlines() if "absent" in line]
    ending = "); beginning without it, and taking it in when it is there)"
    assert told[0].startswith(
        f"(device gone is absent (the machine is there, but nothing listens at {gone}; start its daemon"
    )
    assert told[1].startswith(
        f"(device silent is absent (something at {silent} takes connections, but did not answer"
    )
    assert [line.endswith(ending) for line in told] == [True, True]


def test_those_that_are_absent_are_waited_for_no_longer_than_documented(
    tmp_path: Path, silent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = {f"d{number}": f"127.0.0.1:{free_port()}" for number in range(3)} | {"silent": silent}
    file = cluster_file(tmp_path, devices)
    began_s = time.monotonic()
    assert main(["generate", f"--cluster={file}", *ASKED]) == 1
    waited_s = time.monotonic() - began_s
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "flowspec generate: none of the 4 devices answers (d0, d1, d2, silent); the first is device d0 at "
        "127.0.0.1:"
    )
    assert timeouts.ABSENT_S <= waited_s < timeouts.ABSENT_S + timeouts.ABSENT_WHY_S + 3


def test_what_does_not_fit_the_others_is_one_line(
    tmp_path: Path,
    here: DaemonProcess,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = f"127.0.0.1:{free_port()}"
    file = cluster_file(tmp_path, {"here": here.address, "gone": gone}, memory="560MiB")
    assert main(["generate", f"--cluster={file}", *ASKED]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"flowspec generate: device gone is absent (the machine is there, but nothing listens at {gone}"
    )
    assert "bundled does not fit the others: they lack " in line


def test_layers_that_are_given_need_all_devices(
    tmp_path: Path,
    here: DaemonProcess,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = f"127.0.0.1:{free_port()}"
    file = cluster_file(tmp_path, {"here": here.address, "gone": gone})
    assert main(["generate", f"--cluster={file}", *ASKED, "--layers=4,4"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"flowspec generate: device gone at {gone}: the machine is there, but nothing listens"
    )
    assert line.endswith("; given layers are for all devices: leave --layers out to begin without it")


def test_a_chat_begins_without_a_device_that_is_absent(
    tmp_path: Path,
    here: DaemonProcess,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = cluster_file(tmp_path, {"here": here.address, "gone": f"127.0.0.1:{free_port()}"})
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 17 + 25?\n"))
    assert main(["chat", f"--cluster={file}", "--json", "--no-journal", "--context=200"]) == 0
    shown = capsys.readouterr()
    assert "42" in json.loads(shown.out)["text"]
    assert [line for line in shown.err.splitlines() if "device gone is absent" in line] != []


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("PROBE_EVERY_S", 0.5), ("BACK_S", 0.5), ("HELD_S", 4.0)):
        monkeypatch.setattr(timeouts, name, seconds)


class Asked:
    """A session of a cluster file with a slow device, `here`, and a fast one, `late`, that cannot be had at
    first."""

    def __init__(self, file: Path, expected: list[int]) -> None:
        self.notes: list[str] = []
        self._expected = expected
        options = ClusterOptions(model=BUNDLED, dtype="float32", cluster=file, context=200)
        recovery_options = RecoveryOptions(on_note=self.notes.append, wait_s=60.0)
        decoding = Decoding(method="ar", drafters=("none",))
        self._opened = open_session(options, decoding, lambda *told: None, recovery_options=recovery_options)

    def __enter__(self) -> Asked:
        self._session = self._opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(None, None, None)

    @property
    def stages(self) -> list[str]:
        return [stage.plan.name for stage in self._session.head.stages]

    def ask(self) -> None:
        limits = Limits(new_tokens_max=COUNT, stop_ids=frozenset())
        request = self._session.head.new_request()
        answer = self._session.submit(PROMPT, Sampling(), limits, request=request)
        assert [token for batch in answer for token in batch.tokens] == self._expected
        self._session.head.forget(request)

    def ask_until(self, note: str) -> None:
        def is_told() -> bool:
            self.ask()
            return note in self.notes

        wait_until(is_told, note)
        self.ask()


@pytest.mark.usefixtures("hasty")
def test_a_device_that_was_absent_is_asked_and_taken_in_when_it_is_there(
    tmp_path: Path,
    here: DaemonProcess,
    expected: list[int],
) -> None:
    """It is faster than the other, which the head learns from it: then it does all of the work."""
    port = free_port()
    file = cluster_file(tmp_path, {"here": here.address, "late": f"127.0.0.1:{port}"}, rates=[0.01])
    with Asked(file, expected) as session:
        assert session.stages == ["here"]
        (note,) = session.notes
        assert note.startswith("device late is absent (")
        assert note.endswith("beginning without it, and taking it in when it is there")
        with daemon_process("late", f"--port={port}", "--threads=1"):
            session.ask_until("device late is there now")
            assert session.stages == ["late"]


@pytest.mark.usefixtures("hasty")
def test_a_device_that_is_silent_at_first_is_taken_in_when_it_goes_on(
    tmp_path: Path,
    here: DaemonProcess,
    expected: list[int],
) -> None:
    with daemon_process("late", "--threads=1") as late:
        file = cluster_file(tmp_path, {"here": here.address, "late": late.address}, rates=[0.01])
        os.kill(late.process.pid, signal.SIGSTOP)
        try:
            with Asked(file, expected) as session:
                assert session.stages == ["here"]
                session.ask()
                os.kill(late.process.pid, signal.SIGCONT)
                session.ask_until("device late is there now")
                assert session.stages == ["late"]
        finally:
            os.kill(late.process.pid, signal.SIGCONT)


@pytest.mark.usefixtures("hasty")
def test_a_device_that_another_head_uses_is_left_out_until_it_is_free(
    tmp_path: Path, here: DaemonProcess, expected: list[int]
) -> None:
    with daemon_process("late", "--threads=1") as late:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
        theirs = cluster_file(tmp_path / "first", {"late": late.address}, rates=[1.0])
        file = cluster_file(
            tmp_path / "second", {"here": here.address, "late": late.address}, rates=[0.01, 1.0]
        )
        with contextlib.ExitStack() as other:
            other.enter_context(Asked(theirs, expected)).ask()
            with Asked(file, expected) as session:
                assert session.stages == ["here"]
                (note,) = (
                    each for each in session.notes if each.startswith("device late is in use by head ")
                )
                assert note.endswith("; beginning without it, and taking it in when it is free")
                session.ask()
                other.close()
                session.ask_until("device late is there now")
                assert session.stages == ["late"]


@pytest.mark.parametrize("names_needed", ["here", "here other"])
def test_devices_that_another_head_uses_are_refused_at_once_in_one_line(
    tmp_path: Path,
    here: DaemonProcess,
    expected: list[int],
    capsys: pytest.CaptureFixture[str],
    names_needed: str,
) -> None:
    """Where all are in use, or the layers that are given need one that is."""
    with daemon_process("other", "--threads=1") as other:
        (tmp_path / "first").mkdir()
        theirs = cluster_file(tmp_path / "first", {"here": here.address})
        addresses = {"here": here.address, "other": other.address}
        needed = names_needed.split()
        file = cluster_file(tmp_path, {name: addresses[name] for name in needed})
        flags = () if len(needed) == 1 else ("--layers=4,4",)
        with Asked(theirs, expected):
            began_s = time.monotonic()
            assert main(["generate", f"--cluster={file}", *ASKED, *flags]) == 1
            assert time.monotonic() - began_s < timeouts.HELD_S
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("flowspec generate: device here is in use by head ")
    assert line.endswith("; a device serves one head at a time: end that one, or try again when it has ended")


@pytest.mark.usefixtures("hasty")
def test_a_device_whose_name_nobody_knows_at_first_is_taken_in_when_it_is_known(
    tmp_path: Path, here: DaemonProcess, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", socket.getaddrinfo)  # which puts it back
    names.install(out := tmp_path / "out")
    out.touch()
    with daemon_process("late", "--threads=1") as late:
        address = late.address.replace("127.0.0.1", f"unheard-of{names.ENDING}")
        file = cluster_file(tmp_path, {"here": here.address, "late": address}, rates=[0.01])
        file.write_text("insecure = true\n" + file.read_text())
        began_s = time.monotonic()
        with Asked(file, expected) as session:
            assert time.monotonic() - began_s < names.HANGS_S / 2, "a look-up is not waited for to its end"
            assert session.stages == ["here"]
            assert "no name service answered within 3 s" in session.notes[0]
            session.ask()
            out.unlink()
            session.ask_until("device late is there now")
            assert session.stages == ["late"]
