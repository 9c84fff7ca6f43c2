"""Key files: made once and for their owner's eyes, read strictly, and silent about their secrets."""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.cluster_messages import Hello
from flowspec.errors import InputError, PeerError
from flowspec.runtime.cluster import Device
from flowspec.runtime.security.cluster_keys import cluster_keys
from flowspec.runtime.security.keyfiles import (
    ALLOWED,
    device_keyring,
    head_keyring,
    make_keys,
    read_allowed,
    revoke,
)
from flowspec.runtime.security.keyring import check_hello
from flowspec.runtime.transport import bind_router, dial
from tests.mutations import mutants, one_line_at_most, toml_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEVICES = ("pi-1", "jetson.2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made, kept = make_keys(tmp_path / "keys", ["head"], DEVICES, force=False)
    assert (set(made), kept) == ({"head", *DEVICES}, [])
    return tmp_path / "keys"


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}


def test_only_the_owner_can_read_them_and_every_key_is_its_own(folder: Path) -> None:
    assert modes(folder) == {
        "keys": 0o700,
        ALLOWED: 0o600,
        "head.key": 0o600,
        "pi-1.key": 0o600,
        "jetson.2.key": 0o600,
    }
    rings = [head_keyring(folder), *(device_keyring(folder, name) for name in DEVICES)]
    assert [ring.name for ring in rings] == ["head", *DEVICES]
    assert len({key for ring in rings for key in (ring.public, ring.secret)}) == 6
    for ring in rings:
        assert ring.heads == {"head": rings[0].public}
        assert ring.devices == {each.name: each.public for each in rings[1:]}
    assert rings[0].user_of(rings[1].public) == "device:pi-1"
    assert rings[1].user_of(rings[0].public) == "head:head"
    assert rings[1].user_of(bytes(32)) is None


def test_what_is_there_stays_and_force_makes_it_anew(folder: Path) -> None:
    before = head_keyring(folder)
    assert make_keys(folder, ["head"], [*DEVICES, "pi-3"], force=False) == (
        ["pi-3"],
        ["head", "pi-1", "jetson.2"],
    )
    after = head_keyring(folder)
    assert (after.secret, set(after.devices)) == (before.secret, {*DEVICES, "pi-3"})
    assert make_keys(folder, [], ["pi-1"], force=True) == (["pi-1"], ["head", "jetson.2", "pi-3"])
    changed = head_keyring(folder)
    assert changed.secret == before.secret
    assert changed.devices["pi-1"] != before.devices["pi-1"]
    assert modes(folder)["pi-1.key"] == 0o600
    revoke(folder, ["pi-1"])
    assert set(read_allowed(folder).devices) == {"jetson.2", "pi-3"}
    assert not (folder / "pi-1.key").exists()
    with pytest.raises(InputError, match="lists no 'pi-1'"):
        revoke(folder, ["pi-1"])
    (folder / ALLOWED).unlink()
    text = (folder / "pi-3.key").read_text()
    with pytest.raises(InputError, match=r"exists, but is not listed; give --force"):
        make_keys(folder, ["boss"], ["pi-3"], force=False)
    assert (folder / "pi-3.key").read_text() == text


def test_a_name_can_name_a_file_and_is_that_of_a_head_or_a_device(tmp_path: Path, folder: Path) -> None:
    for name in ("", ".x", "-x", "a b", "../x", "a/b", "x" * 64, "ü", "a\n"):
        with pytest.raises(InputError, match="expected up to 63 letters"):
            make_keys(tmp_path / "others", ["head"], [name], force=False)
    assert not (tmp_path / "others").exists()
    for heads, devices in ((["pi-1"], []), ([], ["head"]), (["new"], ["new"])):
        with pytest.raises(InputError, match="give heads and devices different names"):
            make_keys(folder, heads, devices, force=False)


@pytest.mark.parametrize(
    ("file", "mode", "message"),
    [
        ("pi-1.key", 0o640, "pi-1.key could be read by others"),
        ("pi-1.key", 0o604, "could be read by others"),
        (ALLOWED, 0o620, "allowed.toml could be changed by others"),
        *((".", mode, "keys could be changed by others") for mode in (0o777, 0o720, 0o702)),
    ],
)
def test_files_that_others_can_get_at_are_not_used(file: str, mode: int, message: str, folder: Path) -> None:
    (folder / file).chmod(mode)
    with pytest.raises(InputError, match=message):
        device_keyring(folder, "pi-1")
    folder.chmod(0o700)
    (folder / ALLOWED).chmod(0o644)  # to read the list is no harm
    (folder / "pi-1.key").chmod(0o600)
    assert device_keyring(folder, "pi-1").name == "pi-1"


ONE = '[[device]]\naddress = "127.0.0.1:7700"\n'
OTHER = "expected the key of pi-1, its name and both halves fitting"


@pytest.mark.parametrize(
    ("file", "key", "line", "message"),
    [
        ("pi-1.key", "secret", 'secret = "short"', r"secret: expected a key of 40 characters \(Z85\)$"),
        ("pi-1.key", "secret", f'secret = "{"0" * 40}"', OTHER),
        ("pi-1.key", "name", 'name = "pi-2"', OTHER),
        (ALLOWED, "pi-1", f'"pi-1" = "{"0" * 40}"', "has another key of pi-1, or none, than"),
        (ALLOWED, "pi-1", "", "has another key of pi-1, or none, than"),
        (ALLOWED, "pi-1", '"../x" = "x"', "expected up to 63 letters"),
    ],
    ids=range(6),
)
def test_files_that_do_not_fit_together_are_named_and_secrets_are_not_told(
    file: str, key: str, line: str, message: str, folder: Path
) -> None:
    secret, path = device_keyring(folder, "pi-1").secret, folder / file
    path.write_text(re.sub(rf"(?m)^{key}.*$", lambda _: line, path.read_text()))
    with pytest.raises(InputError, match=message) as caught:
        device_keyring(folder, "pi-1")
    for told in ("\n", "short", repr(secret)):
        assert told not in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), file=st.sampled_from([ALLOWED, "pi-1.key"]))
def test_a_file_with_anything_wrong_is_refused_in_one_line_or_names_the_same_key(
    data: st.DataObject, file: str, folder: Path
) -> None:
    path, before, ring = folder / file, (folder / file).read_bytes(), device_keyring(folder, "pi-1")
    path.write_bytes(
        data.draw(st.binary(max_size=300) | mutants(tomllib.loads(before.decode())).map(toml_file))
    )
    with one_line_at_most():
        found = device_keyring(folder, "pi-1")
        assert (found.name, found.public, found.secret) == (ring.name, ring.public, ring.secret)
    path.write_bytes(before)


def test_secrets_are_in_no_repr_and_no_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        ring = head_keyring(folder)
    secret = next(
        line for line in (folder / "head.key").read_text().splitlines() if line.startswith("secret")
    ).split('"')[1]
    for text in (repr(ring), str(ring), caplog.text):
        assert secret not in text
        assert repr(ring.secret)[2:-1] not in text


@pytest.mark.parametrize("file", [ALLOWED, "head.key"])
def test_what_is_no_file_is_refused_and_not_waited_for(file: str, folder: Path) -> None:
    (folder / file).unlink()
    if file == "head.key":
        with pytest.raises(InputError, match=r"\(head.key\)"):
            head_keyring(folder)
    os.mkfifo(folder / file, 0o600)
    with pytest.raises(InputError, match="something that is no file"):
        head_keyring(folder)


def test_keys_are_not_made_behind_a_link(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    (tmp_path / "keys").symlink_to(theirs)
    with pytest.raises(InputError, match="expected a folder for the keys, got a link"):
        make_keys(tmp_path / "keys", ["head"], ["pi"], force=False)
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o755
    assert list(theirs.iterdir()) == []


def test_zeromq_without_encryption_is_one_clear_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    for attempt in (lambda: head_keyring(folder), lambda: make_keys(folder, [], ["new"], force=False)):
        with pytest.raises(InputError, match="built without CURVE encryption; install pyzmq's own build"):
            attempt()


def test_no_port_beyond_loopback_without_keys_unless_insecure() -> None:
    with zmq.Context() as context:
        for host in ("0.0.0.0", "::"):
            with pytest.raises(
                InputError, match=rf"without keys this daemon does not listen on {host}.*or say --insecure"
            ):
                bind_router(context, host, 0)
            bind_router(context, host, 0, insecure=True)[0].close(linger=0)
        bind_router(context, "127.0.0.1", 0)[0].close(linger=0)
        context.destroy(linger=0)


def test_a_head_speaks_beyond_loopback_with_keys_or_insecurely(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = Device(name="pi-1", address="127.0.0.1:7700"), Device(name="pi-1", address="192.0.2.1:7700")
    path = tmp_path / "home.toml"
    path.write_text(ONE)
    assert cluster_keys(path, [here]) is None
    with pytest.raises(
        InputError,
        match=r"home.keys is missing, .* pi-1 at 192.0.2.1:7700 .*flowspec keygen .*insecure = true",
    ):
        cluster_keys(path, [here, there])
    path.write_text(f"insecure = true\n{ONE}")
    assert cluster_keys(path, [there]) is None
    assert "whoever is in the network can read" in caplog.text
    unheard_of = Device(name="pi-2", address="no-such-host.invalid:7700")
    assert cluster_keys(path, [unheard_of]) is None, "it is absent, and no mistake"
    path.write_text(ONE)
    with pytest.raises(InputError, match=r"home.keys is missing, .* pi-2 at no-such-host.invalid:7700"):
        cluster_keys(path, [unheard_of])
    folder.rename(tmp_path / "home.keys")
    for devices in ([here], [there]):
        found = cluster_keys(path, devices)
        assert found is not None
        assert found.name == "head"
    path.write_text(f"insecure = 1\n{ONE}")
    with pytest.raises(InputError, match="insecure: expected true or false"):
        cluster_keys(path, [here])


def test_a_key_stands_for_a_name_and_a_part() -> None:
    for user, name, role in (
        ("head:head", "head", "head-control"),
        ("head:head", "head", "measure"),
        ("device:pi-1", "pi-1", "stage"),
        ("device:pi-1", "pi-1", "measure"),
    ):
        check_hello(user, Hello(name=name, version="1", role=role))
    for user, name, role, error in (
        ("device:pi-1", "pi-2", "stage", "expected pi-1 by its key, but it calls itself pi-2"),
        ("device:pi-1", "pi-1", "head-control", "pi-1 .* of a device, .* no head-control"),
        ("device:pi-1", "pi-1", "head-data", "no head-data"),
        ("device:pi-1", "pi-1", "head-weights", "no head-weights"),
        ("head:head", "head", "stage", "head .* of a head, .* no stage"),
    ):
        with pytest.raises(PeerError, match=error):
            check_hello(user, Hello(name=name, version="1", role=role))


def test_the_gate_answers_nonsense_with_no(folder: Path) -> None:
    from flowspec.runtime.security.authenticator import Authenticator

    ring = device_keyring(folder, "pi-1")
    public = head_keyring(folder).public
    with zmq.Context() as context:
        gate = Authenticator(context, ring)
        asker: Any = context.socket(zmq.REQ)
        asker.connect("inproc://zeromq.zap.01")
        for frames, status in (
            ([b"1.0", b"7", b"flowspec", b"10.0.0.1", b"", b"CURVE", public], b"200"),
            ([b"1.0", b"7", b"flowspec", b"10.0.0.1", b"", b"CURVE", bytes(32)], b"400"),
            ([b"1.0", b"7", b"flowspec", b"10.0.0.1", b"", b"NULL"], b"400"),
            ([b"1.0", b"7", b"flowspec", b"10.0.0.1", b"", b"PLAIN", b"user", b"word"], b"400"),
            ([b"2.0", b"7", b"flowspec", b"10.0.0.1", b"", b"CURVE", public], b"400"),
            ([b""], b"400"),
        ):
            asker.send_multipart(frames)
            assert gate.socket.poll(5000)
            gate.answer()
            assert asker.poll(5000)
            _, _, found, _, user, _ = asker.recv_multipart()
            assert (found, user) == (status, b"head:head" if status == b"200" else b"")
        context.destroy(linger=0)


def test_a_device_without_a_listed_key_is_not_dialled(folder: Path) -> None:
    with zmq.Context() as context:
        with pytest.raises(InputError, match="lists no key of device 'pi-9'"):
            dial(context, "127.0.0.1:7700", "pi-9", head_keyring(folder))
        context.destroy(linger=0)
