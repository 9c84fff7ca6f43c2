"""`flowspec keygen`, and the daemon's flags about keys."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flowspec.cli import keygen
from flowspec.cli.main import main
from flowspec.runtime.security import keyfiles
from flowspec.runtime.security.cluster_keys import keys_folder
from flowspec.runtime.security.keyfiles import device_keyring, head_keyring
from tests.cli.pseudo_terminal import shown

CLUSTER = (
    '[[device]]\nname = "pi-1"\naddress = "192.0.2.1:7700"\nssh = "me@pi"\n'
    '[[device]]\nname = "pi-2"\naddress = "192.0.2.2:7700"\n'
)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "home.toml"
    path.write_text(CLUSTER)
    return path


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(list(args)) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert shown.out == ""
    return line


def secrets_of(folder: Path) -> list[str]:
    lines = [
        line
        for path in folder.glob("*.key")
        for line in path.read_text().splitlines()
        if line.startswith("secret")
    ]
    return [line.split('"')[1] for line in lines]


def test_keys_for_a_cluster_file_and_what_to_copy_where(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keygen", f"--cluster={cluster}"]) == 0
    shown = capsys.readouterr().out
    folder = cluster.parent / "home.keys"
    assert {path.name for path in folder.iterdir()} == {"allowed.toml", "head.key", "pi-1.key", "pi-2.key"}
    assert f"scp -p {folder}/pi-1.key {folder}/allowed.toml me@pi:.config/flowspec/keys/" in shown
    assert f"{folder}/allowed.toml 192.0.2.2:.config/flowspec/keys/" in shown
    assert f"launch/boards start {cluster}" in shown
    assert not any(secret in shown for secret in secrets_of(folder))


def test_what_is_for_this_machine_is_copied_without_ssh(
    cluster: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (
        '[[device]]\nname = "one"\naddress = "127.0.0.1:7701"\n'
        '[[device]]\nname = "two"\naddress = "localhost:7702"\n'
        '[[device]]\nname = "six"\naddress = "[::1]:7703"\n'
    )
    cluster.write_text(own)
    assert main(["keygen", f"--cluster={cluster}"]) == 0
    shown = capsys.readouterr().out
    assert not any(word in shown for word in ("ssh", "scp", "launch/boards"))
    home = cluster.parent / "user"
    monkeypatch.setenv("HOME", str(home))
    copied, _, named = (
        shown.partition("On this machine:\n")[2].partition("\nThe head")[0].partition("Their keys")
    )
    threads = max(1, (os.cpu_count() or 1) // 3)
    assert [line.strip() for line in named.splitlines()[1:]] == [
        f"flowspec daemon --host 127.0.0.1 --port 7701 --name one --threads {threads}",
        f"flowspec daemon --host localhost --port 7702 --name two --threads {threads}",
        f"flowspec daemon --host ::1 --port 7703 --name six --threads {threads}",
    ], "or they would find several keys in one folder"
    subprocess.run(["/bin/sh", "-ec", copied], check=True)
    keys = home / ".config/flowspec/keys"
    assert device_keyring(keys, "two").name == "two", "its modes are as keys need them"
    assert {path.name for path in keys.iterdir()} == {"allowed.toml", "one.key", "six.key", "two.key"}
    cluster.write_text(CLUSTER + own)
    assert main(["keygen", f"--cluster={cluster}"]) == 0
    shown = capsys.readouterr().out
    assert "pi-1.key" in shown
    assert "scp" in shown
    assert "127.0.0.1" not in shown.partition("On this machine:\n")[0]


def test_launch_boards_is_named_as_it_can_be_called(
    cluster: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, expected in ((keygen.CHECKOUT, "launch/boards"), ("/", f"{keygen.CHECKOUT}/launch/boards")):
        monkeypatch.chdir(folder)
        assert main(["keygen", f"--cluster={cluster}"]) == 0
        assert f"\n  {expected} start {cluster}\n" in capsys.readouterr().out
    monkeypatch.setattr(keygen, "CHECKOUT", cluster.parent)
    assert main(["keygen", f"--cluster={cluster}"]) == 0
    assert "launch/boards" not in capsys.readouterr().out, "a wheel has none"


def test_a_terminal_gets_whole_words(cluster: Path) -> None:
    lines = shown("keygen", f"--cluster={cluster}")
    assert max(len(line) for line in lines if "/" not in line and "ssh " not in line) <= 80
    assert {"daemon", "started", "finds", "yourself."} <= set(" ".join(lines).split())


def test_git_ignores_keys() -> None:
    ignored = (keygen.CHECKOUT / ".gitignore").read_text().splitlines()
    assert f"*{keys_folder(Path('home.toml')).suffix}/" in ignored
    assert f"*{keyfiles.SUFFIX}" in ignored


def test_json_names_what_was_made_and_kept_and_no_secret(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cluster.parent / "home.keys"
    expected: dict[str, Any] = {
        "folder": str(folder),
        "allowed": f"{folder}/allowed.toml",
        "revoked": [],
    }
    assert main(["keygen", f"--cluster={cluster}", "--json"]) == 0
    text = capsys.readouterr().out
    publics = {}
    for name in ("head", "pi-1", "pi-2"):
        (line,) = (line for line in (folder / f"{name}.key").read_text().splitlines() if "public = " in line)
        publics[name] = line.split('"')[1]
    expected["heads"] = {"head": publics.pop("head")}
    expected["devices"] = publics
    assert json.loads(text) == {**expected, "made": ["pi-1", "pi-2", "head"], "kept": []}
    assert not any(secret in text for secret in secrets_of(folder))
    before = secrets_of(folder)
    assert main(["keygen", f"--cluster={cluster}", "--json", "--device", "pi-3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["made"], found["kept"]) == (["pi-3"], ["head", "pi-1", "pi-2"])
    assert set(before) < set(secrets_of(folder))
    assert main(["keygen", f"--cluster={cluster}", "--json", "--revoke", "pi-3"]) == 0
    assert json.loads(capsys.readouterr().out) == {**expected, "made": [], "kept": [], "revoked": ["pi-3"]}
    assert main(["keygen", f"--cluster={cluster}", "--force", "--json"]) == 0
    anew = json.loads(capsys.readouterr().out)
    assert (sorted(anew["made"]), anew["kept"]) == (["head", "pi-1", "pi-2"], [])
    assert not set(before) & set(secrets_of(folder))
    assert not set(expected["heads"].values()) & set(anew["heads"].values())
    assert main(["keygen", f"--out={folder}", "--device=pi-1", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["made"] == ["pi-1"], "nothing but what is named"


def test_keys_for_named_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert main(["keygen", f"--out={folder}", "--device=pi-1", "--head=laptop", "--head=desk"]) == 0
    assert "ssh pi-1 'mkdir -p -m 700 .config/flowspec/keys'" in capsys.readouterr().out
    found = head_keyring(folder)
    assert (found.name, set(found.heads), set(found.devices)) == ("laptop", {"laptop", "desk"}, {"pi-1"})
    (folder / "laptop.key").unlink()
    assert head_keyring(folder).name == "desk"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "expected --cluster FILE.toml, or --out FOLDER"),
        (["--cluster=none.toml"], "none.toml: expected a cluster file, but it cannot be read"),
        (
            ["--out=x", "--device=a b"],
            "expected up to 63 letters, digits, dots, dashes and underscores, got 'a b'; rename it",
        ),
        (["--out=x", "--device=a", "--head=a"], "give heads and devices different names"),
        (["--out=x", "--revoke=a"], "lists no 'a'"),
        (["--out=x", "--revoke=a", "--force"], "--revoke takes names off the list and makes none"),
    ],
)
def test_wrong_wishes_are_one_line(
    flags: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in refusal(capsys, "keygen", *flags)
    assert not (tmp_path / "x").exists()


def test_a_daemon_needs_keys_beyond_loopback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyfiles.Path, "home", lambda: tmp_path)
    line = refusal(capsys, "daemon", "--host=0.0.0.0", "--port=0")
    assert "without keys this daemon does not listen on 0.0.0.0" in line
    assert line.endswith("or say --insecure")
    assert "expected a folder with allowed.toml and the key of this device" in refusal(
        capsys, "daemon", f"--keys={tmp_path / 'none'}"
    )
    keyfiles.make_keys(tmp_path / ".config/flowspec/keys", ["head"], ["pi-1", "pi-2"], force=False)
    assert "say with --name which of them this daemon is" in refusal(capsys, "daemon")
    assert "could be read by others" in _readable(capsys, tmp_path / ".config/flowspec/keys/pi-1.key")


def _readable(capsys: pytest.CaptureFixture[str], path: Path) -> str:
    path.chmod(0o644)
    return refusal(capsys, "daemon", "--name=pi-1")
