"""`flowspec keygen`, and the daemon's flags about keys."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowspec.cli import daemon, keygen
from flowspec.runtime.security import keyfiles
from flowspec.runtime.security.keyfiles import device_keyring, head_keyring
from tests.cli.running import Run

CLUSTER = (
    '[[device]]\nname = "pi-1"\naddress = "192.0.2.1:7700"\nssh = "me@pi"\n'
    '[[device]]\nname = "pi-2"\naddress = "192.0.2.2:7700"\n'
)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "home.toml"
    path.write_text(CLUSTER)
    return path


def secrets_of(folder: Path) -> list[str]:
    return [
        line.split('"')[1]
        for path in folder.glob("*.key")
        for line in path.read_text().splitlines()
        if line.startswith("secret")
    ]


def test_keys_for_a_cluster_file_and_what_to_copy_where(
    cluster: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(keygen.CHECKOUT)
    shown = run("keygen", f"--cluster={cluster}").out
    folder = cluster.parent / "home.keys"
    assert {path.name for path in folder.iterdir()} == {"allowed.toml", "head.key", "pi-1.key", "pi-2.key"}
    assert f"scp -p {folder}/pi-1.key {folder}/allowed.toml me@pi:.config/flowspec/keys/" in shown
    assert f"{folder}/allowed.toml 192.0.2.2:.config/flowspec/keys/" in shown
    assert f"launch/boards start {cluster}" in shown
    monkeypatch.chdir("/")
    assert f"{keygen.CHECKOUT}/launch/boards start {cluster}" in run("keygen", f"--cluster={cluster}").out
    monkeypatch.setattr(keygen, "CHECKOUT", cluster.parent)
    assert "launch/boards" not in run("keygen", f"--cluster={cluster}").out, "a wheel has none"
    elsewhere = run("keygen", f"--cluster={cluster}", f"--out={cluster.parent / 'mine'}").out
    assert f"in {cluster.with_suffix('.keys')}: move the folder there" in elsewhere
    assert not any(secret in shown for secret in secrets_of(folder))
    ignored = (Path(__file__).parents[2] / ".gitignore").read_text().splitlines()
    assert {f"*{folder.suffix}/", f"*{keyfiles.SUFFIX}"} <= {*ignored}, "nobody publishes keys by mistake"


def test_what_is_for_this_machine_is_copied_without_ssh(
    cluster: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (
        '[[device]]\nname = "one"\naddress = "127.0.0.1:7701"\n'
        '[[device]]\nname = "two"\naddress = "localhost:7702"\n'
        '[[device]]\nname = "six"\naddress = "[::1]:7703"\n'
    )
    cluster.write_text(own)
    shown = run("keygen", f"--cluster={cluster}").out
    assert not any(word in shown for word in ("ssh", "scp", "launch/boards"))
    home = cluster.parent / "user"
    monkeypatch.setenv("HOME", str(home))
    here = shown.partition("On this machine:\n")[2].partition("\nThe head")[0]
    copied, _, named = here.partition("Their keys")
    threads = max(1, (os.cpu_count() or 1) // 3)
    daemon = "flowspec daemon --host {} --port {} --name {} --threads " + str(threads)
    asked = (("127.0.0.1", 7701, "one"), ("localhost", 7702, "two"), ("::1", 7703, "six"))
    starts = [line.strip() for line in named.splitlines()[1:]]
    assert starts == [daemon.format(*each) for each in asked], "or they would find several keys"
    subprocess.run(["/bin/sh", "-ec", copied], check=True)
    keys = home / ".config/flowspec/keys"
    assert device_keyring(keys, "two").name == "two", "its modes are as keys need them"
    assert {path.name for path in keys.iterdir()} == {"allowed.toml", "one.key", "six.key", "two.key"}
    cluster.write_text(CLUSTER + own)
    shown = run("keygen", f"--cluster={cluster}").out
    assert "pi-1.key" in shown
    assert "scp" in shown
    assert "127.0.0.1" not in shown.partition("On this machine:\n")[0]


def test_json_names_what_was_made_and_kept_and_no_secret(cluster: Path, run: Run) -> None:
    folder, asked = cluster.parent / "home.keys", ("keygen", f"--cluster={cluster}", "--json")
    plain: dict[str, Any] = {"folder": str(folder), "allowed": f"{folder}/allowed.toml", "revoked": []}
    text = run(*asked).out
    publics = {}
    for name in ("head", "pi-1", "pi-2"):
        (line,) = (line for line in (folder / f"{name}.key").read_text().splitlines() if "public = " in line)
        publics[name] = line.split('"')[1]
    expected = {**plain, "heads": {"head": publics.pop("head")}, "devices": publics}
    assert json.loads(text) == {**expected, "made": ["pi-1", "pi-2", "head"], "kept": []}
    assert not any(secret in text for secret in secrets_of(folder))
    before = secrets_of(folder)
    found = run(*asked, "--device", "pi-3").json
    assert (found["made"], found["kept"]) == (["pi-3"], ["head", "pi-1", "pi-2"])
    assert set(before) < set(secrets_of(folder))
    found = run(*asked, "--revoke", "pi-3").json
    assert found == {**expected, "made": [], "kept": [], "revoked": ["pi-3"]}
    anew = run(*asked, "--force").json
    assert (sorted(anew["made"]), anew["kept"]) == (["head", "pi-1", "pi-2"], [])
    assert not set(before) & set(secrets_of(folder))
    assert not set(expected["heads"].values()) & set(anew["heads"].values())
    named = run("keygen", f"--out={folder}", "--device=pi-1", "--force", "--json").json
    assert named["made"] == ["pi-1"], "nothing but what is named"


def test_keys_for_named_devices(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "keys"
    told = run("keygen", f"--out={folder}", "--device=pi-1", "--head=laptop", "--head=desk").out
    assert "ssh pi-1 'mkdir -p -m 700 .config/flowspec/keys'" in told
    found = head_keyring(folder)
    assert (found.name, set(found.heads), set(found.devices)) == ("laptop", {"laptop", "desk"}, {"pi-1"})
    (folder / "laptop.key").unlink()
    assert head_keyring(folder).name == "desk"


def test_a_daemon_finds_its_own_key_which_others_may_not_read(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyfiles.Path, "home", lambda: tmp_path)
    folder = tmp_path / ".config/flowspec/keys"
    keyfiles.make_keys(folder, ["head"], ["pi-1", "pi-2"], force=False)
    assert "say with --name which" in refused("daemon")
    (folder / "pi-1.key").chmod(0o644)
    assert "could be read by others" in refused("daemon", "--name=pi-1")


def test_a_daemon_whose_name_has_no_key_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "keys"
    monkeypatch.setattr(daemon, "keys_folder", lambda: folder)
    assert daemon._keys(None, "pi-9") is None
    assert caplog.messages == []
    keyfiles.make_keys(folder, ["head"], ["pi-1"], force=False)
    assert daemon._keys(None, "pi-9") is None
    assert caplog.messages == [
        f"{folder} has no key of pi-9, so this daemon asks nobody for one; with another --name it would"
    ]
