"""A device that is absent when a command starts: answers begin without it, and it is taken in when it is there."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from flowspec.cli.main import main
from flowspec.core.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.reference import Reference
from flowspec.runtime import timeouts
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, Survival, open_session
from tests.daemons import DaemonProcess, daemon_process
from tests.runtime.clusters import wait_until

PROMPT = (5, 6, 7, 8, 9)
COUNT = 24
BOARD = "[memory]\ngb = 8\ngb_per_s = {rate}\nefficiency = 1.0\n[compute]\nfloat32 = {rate}\nefficiency = 1.0\n"
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


def cluster_file(folder: Path, devices: dict[str, str], memory: str = "2GiB", rates: Sequence[float] = ()) -> Path:
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
    assert told[0].startswith(f"(device gone is absent (the device answers, but nothing listens at {gone}; start its daemon")
    assert told[1].startswith(f"(device silent is absent (something at {silent} takes connections, but did not answer")
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
    assert line.startswith("flowspec generate: none of the 4 devices answers; the first is device d0 at 127.0.0.1:")
    assert timeouts.ABSENT_S <= waited_s < timeouts.ABSENT_S + timeouts.ABSENT_WHY_S + 3


def test_what_does_not_fit_the_others_is_one_line(tmp_path: Path, here: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    gone = f"127.0.0.1:{free_port()}"
    file = cluster_file(tmp_path, {"here": here.address, "gone": gone}, memory="560MiB")
    assert main(["generate", f"--cluster={file}", *ASKED]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flowspec generate: device gone is absent (the device answers, but nothing listens at {gone}")
    assert "bundled does not fit the others: they lack " in line


def test_layers_that_are_given_need_all_devices(tmp_path: Path, here: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    gone = f"127.0.0.1:{free_port()}"
    file = cluster_file(tmp_path, {"here": here.address, "gone": gone})
    assert main(["generate", f"--cluster={file}", *ASKED, "--layers=4,4"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flowspec generate: device gone at {gone}: the device answers, but nothing listens")


def test_a_device_that_was_absent_is_asked_and_taken_in_when_it_is_there(
    tmp_path: Path, here: DaemonProcess, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is faster than the other, which the head learns from it: then it does all of the work."""
    for name, seconds in (("PROBE_EVERY_S", 0.5), ("BACK_S", 0.5)):
        monkeypatch.setattr(timeouts, name, seconds)
    port, notes = free_port(), list[str]()
    file = cluster_file(tmp_path, {"here": here.address, "late": f"127.0.0.1:{port}"}, rates=[0.01])
    options = ClusterOptions(model=BUNDLED, dtype="float32", cluster=file, context=200)
    limits = Limits(new_tokens_max=COUNT, stop_ids=frozenset())
    survival = Survival(on_note=notes.append, wait_s=60.0)
    with open_session(options, Decoding(method="ar", drafters=("none",)), lambda *told: None, survival=survival) as session:
        assert [stage.plan.name for stage in session.head.stages] == ["here"]
        (note,) = notes
        assert note.startswith("device late is absent (")
        assert note.endswith("beginning without it, and taking it in when it is there")
        with daemon_process("late", f"--port={port}", "--threads=1"):

            def answers_while_it_comes() -> bool:
                assert session.ask(PROMPT, Sampling(), limits)[0].end is not None
                return notes[1:2] == ["device late is there now"]

            wait_until(answers_while_it_comes, "the device is taken in")
            assert [stage.plan.name for stage in session.head.stages] == ["late"]
            answer = session.submit(PROMPT, Sampling(), limits, request=session.head.new_request())
            assert [token for batch in answer for token in batch.tokens] == expected
