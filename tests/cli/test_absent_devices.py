"""A device that is absent when a command starts: answers begin without it, and it is taken in when it is
there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.runtime import timeouts
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, RecoveryOptions, open_session
from lab.plain_model import PlainModel
from tests.cli.running import Run
from tests.daemons import DaemonProcess, cluster_file, daemon_process
from tests.runtime.clusters import wait_until

PROMPT = (5, 6, 7, 8, 9)
COUNT = 12
ASKED = (
    f"--prompt-token-ids={','.join(map(str, PROMPT))}",
    f"--max-new-tokens={COUNT}",
    "--ignore-eos",
    "--dtype=float32",
    "--context=200",
    "--method=ar",
    "--drafter=none",
)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for as long as the product does."""
    short = {"ABSENT_S": 0.6, "WHY_S": 0.3, "PROBE_EVERY_S": 0.3, "BACK_S": 0.3, "HELD_S": 3.0}
    for name, seconds in short.items():
        monkeypatch.setattr(timeouts, name, seconds)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return PlainModel(ModelFiles(BUNDLED), "float32").generate(PROMPT, Sampling(), COUNT, frozenset())


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


def test_answers_begin_without_those_that_are_absent(
    tmp_path: Path, here: DaemonProcess, silent: str, expected: list[int], run: Run
) -> None:
    gone = f"127.0.0.1:{free_port()}"
    file = cluster_file(tmp_path, {"gone": gone, "here": here.address, "silent": silent}, rates={})
    ended = run("generate", f"--cluster={file}", *ASKED, "--json")
    found = ended.json
    assert found["token_ids"] == expected
    assert [stage["name"] for stage in found["stages"]] == ["here"]
    assert list(found["plan"]["absent"]) == ["gone", "silent"]
    told = [line for line in ended.told if "absent" in line]
    assert [line.endswith("taking it in when it is there)") for line in told] == [True, True]
    for line, why in zip(told, (f"nothing listens at {gone}", f"{silent} takes connections"), strict=True):
        assert why in line


def test_where_none_is_there_or_the_others_do_not_do_the_command_fails(
    tmp_path: Path, here: DaemonProcess, silent: str, run: Run
) -> None:
    gone = f"127.0.0.1:{free_port()}"
    other, scarce = {"here": here.address, "gone": gone}, {"here": 'memory = "560MiB"\n'}
    for devices, flags, fields, told in (
        ({"gone": gone, "silent": silent}, (), {}, "none of the 2 devices answers (gone, silent)"),
        (other, (), scarce, "bundled does not fit the others: they lack "),
        (other, ("--layers=4,4",), {}, "given layers are for all devices"),
    ):
        file = cluster_file(tmp_path, devices, rates={}, fields=fields)
        (line,) = run("generate", f"--cluster={file}", *ASKED, *flags, status=1).told
        assert f"nothing listens at {gone}" in line
        assert told in line


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

    def ask_until_late_is_there(self) -> None:
        def is_told() -> bool:
            self.ask()
            return "device late is there now" in self.notes

        wait_until(is_told, "it is taken in")
        self.ask()
        assert self.stages == ["late"]


def test_a_device_that_another_head_uses_is_left_out_until_it_is_free_or_refused_where_it_is_needed(
    tmp_path: Path, here: DaemonProcess, expected: list[int], run: Run
) -> None:
    with daemon_process("late", "--threads=1") as late:
        theirs = cluster_file(tmp_path / "theirs", {"late": late.address}, rates={"late": 1.0})
        addresses = {"here": here.address, "late": late.address}
        file = cluster_file(tmp_path / "ours", addresses, rates={"here": 0.01, "late": 1.0})
        with contextlib.ExitStack() as other:
            other.enter_context(Asked(theirs, expected)).ask()
            (line,) = run("generate", "--layers=4,4", f"--cluster={file}", *ASKED, status=1).told
            assert "device late is in use by head " in line
            with Asked(file, expected) as session:
                assert session.stages == ["here"]
                assert any(each.startswith("device late is in use by head ") for each in session.notes)
                session.ask()
                other.close()
                session.ask_until_late_is_there()
