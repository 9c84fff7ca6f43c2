"""`launch/boards` on devices that are folders: an `ssh` that runs its command here in a home of its own, and
real daemons there."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowspec.core.protocol.cluster_messages import Welcome
from flowspec.runtime.security.keyfiles import head_keyring, make_keys
from tests.launch.scripts import ROOT, fake_program, program, ran
from tests.runtime.clusters import Peer

EVIL = "pi $(touch $HOME/pwned); `id` '\\\" | & \u00e9"

SSH = fake_program("ssh")

PYTHON = fake_program("python-of-boards")

NO_SYSTEMD = "#!/bin/bash\nexit 1\n"

SYSTEMD = fake_program("systemctl")


class Boards:
    """The devices, and launch/boards for them."""

    def __init__(self, folder: Path, systemctl: str) -> None:
        self.homes = folder / "homes"
        self.homes.mkdir()
        tools = folder / "tools"
        fakes = {
            "ssh": SSH,
            "python3": PYTHON.replace("REAL", sys.executable),
            "systemctl": systemctl,
            "loginctl": NO_SYSTEMD,
        }
        for name, text in fakes.items():
            program(tools / name, text)
        self.environment = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOMES": str(self.homes),
            "PYTHON": sys.executable,
        }
        self.file = folder / "cluster.toml"
        self.addresses: list[str] = []

    def write(self, devices: dict[str, str]) -> None:
        """A cluster file of ssh targets by name."""
        text = ""
        for name, target in devices.items():
            with socket.create_server(("127.0.0.1", 0)) as server:
                self.addresses.append(f"127.0.0.1:{server.getsockname()[1]}")
            quoted = name.replace("\\", "\\\\").replace('"', '\\"')
            text += f'[[device]]\nname = "{quoted}"\naddress = "{self.addresses[-1]}"\n'
            text += f'ssh = "{target}"\nmemory = "3GiB"\n'
        self.file.write_text(text, "utf-8")

    def ran(self, *words: str) -> tuple[int, list[str], str]:
        done = ran([ROOT / "launch/boards", *words], self.environment, 150)
        return done.returncode, done.stdout.splitlines(), done.stderr

    def run(self, action: str, *flags: str) -> tuple[int, list[str], str]:
        return self.ran(action, str(self.file), *flags)


@pytest.fixture
def boards(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Boards]:
    found = Boards(tmp_path, getattr(request, "param", NO_SYSTEMD))
    yield found
    if found.file.exists():
        found.run("stop")
    shutil.rmtree(found.homes)  # copies of the bundled models


def test_what_a_device_says_does_nothing_to_a_terminal(boards: Boards) -> None:
    boards.write({"it": "evil"})
    assert boards.run("status") == (0, ["it: \x1b]52;c;aGk=\x07said\udc9b"], ""), "a pipe gets it as it is"
    for action, status, expected in (
        ("logs", 0, r"  \x1b]52;c;aGk=\x07said\x9b"),
        ("status", 1, r"it: FAILED: why\x1b[2J"),
    ):
        ours, theirs = os.openpty()
        environment = {**boards.environment, "EVIL_STATUS": str(status)}
        command = [str(ROOT / "launch/boards"), action, str(boards.file)]
        done = subprocess.run(command, env=environment, stdout=theirs, stderr=theirs, timeout=60, check=False)
        os.close(theirs)
        assert done.returncode == status
        assert os.read(ours, 65536).decode().splitlines()[-1] == expected
        os.close(ours)


@pytest.mark.parametrize("boards", [SYSTEMD], indirect=True, ids=["with systemd"])
def test_devices_are_installed_started_watched_and_stopped(boards: Boards) -> None:
    boards.write({"jetson": "me@board-1", EVIL: "board-2"})
    status, lines, error = boards.run("install")
    assert (status, error) == (0, "")
    assert lines == ["jetson: installed FlowSpec 0.1.0", f"{EVIL}: installed FlowSpec 0.1.0"]
    for home in ("me@board-1", "board-2"):
        assert (boards.homes / home / "flowspec/source/flowspec/cli/main.py").is_file()
        assert (boards.homes / home / ".config/systemd/user/flowspec-daemon.service").is_file()
    status, lines, _ = boards.run("status")
    assert (status, lines[0]) == (1, "jetson: FAILED: does not run: never started")
    for _ in range(2):  # it starts what runs again
        status, lines, error = boards.run("start", "--", "--threads", "1")
        assert (status, error) == (0, ""), lines
    for address, line, name in zip(boards.addresses, lines, ("jetson", EVIL), strict=True):
        assert line.startswith(f"{name}: listens on {address}")
        assert "sudo loginctl enable-linger" in line  # which fails here
    with Peer(boards.addresses[1]) as peer:
        peer.link.send(peer.hello)
        welcome = peer.answer()
    assert isinstance(welcome, Welcome)
    assert welcome.memory_bytes == 3 << 30
    assert set(welcome.name) <= set("abcdefghijklmnopqrstuvwxyzHOME0123456789-.")
    status, lines, _ = boards.run("status")
    assert (status, [": runs as process " in line for line in lines]) == (0, [True] * 2)
    status, lines, _ = boards.run("logs", "--lines", "1")
    assert (status, lines[0], " listens on " in lines[1]) == (0, "jetson:", True)
    for told in ("stopped", "was not running"):
        assert boards.run("stop")[:2] == (0, [f"jetson: {told}", f"{EVIL}: {told}"])
    assert not list(boards.homes.rglob("pwned"))
    commands = {*(boards.homes / "commands").read_text().splitlines()} - {"bash -s"}
    assert all(each.startswith("mkdir -p flowspec && rm -rf flowspec/source.new ") for each in commands), (
        "only constant ones reach a shell"
    )
    assert {"BatchMode=yes", "ConnectTimeout=10"} <= set((boards.homes / "options").read_text().split())


def test_each_device_gets_its_own_key_and_the_list(boards: Boards) -> None:
    boards.write({"jetson": "me@board-1", "pi": "board-2"})
    keys = boards.file.with_suffix(".keys")
    make_keys(keys, ["head"], ["jetson"], force=False)
    status, lines, _ = boards.run("install")
    assert status == 1
    assert lines[0].startswith("jetson: installed")
    assert lines[1] == f"pi: FAILED: {keys} has no key of pi; run flowspec keygen --cluster {boards.file}"
    make_keys(keys, ["head"], ["pi"], force=False)
    boards.run("install")
    status, lines, error = boards.run("start")
    assert (status, error) == (0, ""), lines
    for home, name in (("me@board-1", "jetson"), ("board-2", "pi")):
        folder = boards.homes / home / ".config/flowspec/keys"
        assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
            f"{name}.key": 0o600,
            "allowed.toml": 0o600,
        }
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        secret = (folder / f"{name}.key").read_text().split('secret = "')[1][:40]
        assert secret not in (boards.homes / "commands").read_text()
    with Peer(boards.addresses[1], name="head", keys=head_keyring(keys), device="pi") as peer:
        peer.greet()
    for told in ("stopped", "was not running"):
        assert boards.run("stop")[:2] == (0, [f"jetson: {told}", f"pi: {told}"])


def test_a_device_that_is_gone_fails_alone_and_others_get_a_stage_without_torch(boards: Boards) -> None:
    boards.write({"gone": "gone", "it": "it"})
    gone = "gone: FAILED: cannot log in to gone: ssh: connect to host gone port 22: No route to host"
    lacks = "FAILED: FlowSpec is not installed here; run launch/boards install first"
    assert boards.run("start") == (1, [gone, f"it: {lacks}"], "")
    assert boards.run("install") == (1, [gone, "it: installed FlowSpec 0.1.0"], "")
    home = boards.homes / "it"
    (installed,) = (home / "pip").read_text().splitlines()
    assert installed.endswith("/source[discovery,grammars,hub]")
    assert not (home / "flowspec/source.new").exists()


def test_a_target_that_is_none_is_refused_before_anything_is_run(boards: Boards) -> None:
    keys = [f"ssh = {value}" for value in ('"-oProxyCommand=x"', '"me@host;id"')] + ['user = "me"']
    files = [f'[[device]]\naddress = "127.0.0.1:7700"\n{key}\n' for key in keys]
    files.append('[[device]]\nname = "x"\naddress = "-oProxyCommand=id:7700"\n')
    twice = '[[device]]\naddress = "127.0.0.1:{}"\nssh = "board"\n'
    files.append(twice.format(7700) + twice.format(7701))
    for text in files:
        boards.file.write_text(text)
        status, lines, error = boards.run("status")
        assert (status, lines, error.count("\n")) == (2, [], 1), text
    assert not (boards.homes / "commands").exists()


def test_wrong_usage_is_one_line(boards: Boards) -> None:
    for args, named in (
        (["fly"], "'fly'"),
        (["start"], "a cluster file"),
        (["logs", "x.toml", "--lines", "0"], "--lines"),
        (["start", "x.toml", "--", "--name=$(id)"], "'--name=$(id)'"),
        (["stop", "x.toml", "--", "--announce"], "daemon flags"),
        (["stop", "x.toml", "--all"], "--all"),
        (["stop", "none.toml"], "none.toml"),
    ):
        status, lines, error = boards.ran(*args)
        assert (status, lines) == (2, [])
        (line,) = error.splitlines()
        assert named in line
