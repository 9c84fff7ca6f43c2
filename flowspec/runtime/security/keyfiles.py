"""Key files: one secret per head and device, and the list of all public keys, in a folder that only its owner
can enter.

`NAME.key` holds one pair, `allowed.toml` the public keys by name; both are TOML, keys in Z85 (ZeroMQ RFC 32).
A device needs its own `.key` and the list, no more. A secret that others could read, or a list that others
could change, is not used.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import zmq
from msgspec import Meta, field
from zmq.utils import z85

from flowspec.core.protocol.limits import STAGES_MAX
from flowspec.errors import InputError
from flowspec.folders import write_whole
from flowspec.plan.tables import Table, Text, at, read_toml, toml_of
from flowspec.runtime.security.keyring import DEVICE, HEAD, KEY_BYTES, Keyring, check_name, need_curve

ALLOWED = "allowed.toml"
SUFFIX = ".key"
_KEY_CHARS = KEY_BYTES * 5 // 4
_SECRET_NOTE = (
    "# FlowSpec: the secret key of {kind} {name}. Whoever has this file can speak as {name}. Keep it there "
    "only."
)
_ALLOWED_NOTE = (
    "# FlowSpec: the public keys of a cluster. Every head and device has a copy; a daemon lets in nobody "
    "else."
)


# ---------------------------------------------------------------------------------------------------- reading


class Allowed(Table, frozen=True, kw_only=True):
    """`allowed.toml`: public keys by name."""

    heads: Annotated[dict[str, str], Meta(max_length=STAGES_MAX)] = field(default_factory=dict)
    devices: Annotated[dict[str, str], Meta(max_length=STAGES_MAX)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, listed in ((f"{HEAD}s", self.heads), (f"{DEVICE}s", self.devices)):
            for name, text in listed.items():
                with at(kind), at(check_name(name)):
                    _key(text)
        keys = [*self.heads.values(), *self.devices.values()]
        twice = self.heads.keys() & self.devices.keys()
        if twice or len(set(keys)) < len(keys):
            told = min(twice) if twice else "a key"
            raise InputError(f"expected each name and each key once, but {told} is there twice")


class KeyFile(Table, frozen=True, kw_only=True):
    name: Text
    public: str
    secret: Any = None
    """Of which no error tells."""


def head_keyring(folder: Path) -> Keyring:
    """The keys of the head here: of the first one listed whose secret is in the folder. Raises
    `InputError`."""
    allowed = read_allowed(folder)
    for name in allowed.heads:
        if (folder / f"{name}{SUFFIX}").exists():
            return _keyring(folder, name, allowed, allowed.heads)
    names = ", ".join(f"{name}{SUFFIX}" for name in allowed.heads) or "none is listed"
    raise InputError(
        f"{folder}: expected the secret key of a head ({names}); copy it from where flowspec keygen made it"
    )


def device_keyring(folder: Path, name: str) -> Keyring:
    """The keys of a device. Raises `InputError`."""
    allowed = read_allowed(folder)
    return _keyring(folder, check_name(name), allowed, allowed.devices)


def device_name(folder: Path, name: str | None, host: str) -> str | None:
    """Which device the folder makes of a machine: `name` if that is given, else its `host` name, else the
    only one with a key.

    None where the folder has no key for it; raises `InputError` where it has several and nothing says which.
    """
    if not folder.is_dir():
        return None
    names = sorted(set(read_allowed(folder).devices) & {path.stem for path in folder.glob(f"*{SUFFIX}")})
    likely = host if name is None else name
    if likely in names:
        return likely
    if name is not None or not names:
        return None
    if len(names) == 1:
        return names[0]
    raise InputError(
        f"{folder} holds the keys of {', '.join(names)[:200]}; say with --name which of them this daemon is"
    )


def read_allowed(folder: Path) -> Allowed:
    """The list of a folder; raises `InputError` for one that is missing, broken, or could be changed by
    others."""
    _check_folder(folder)
    path = folder / ALLOWED
    _check_modes(path, stat.S_IWGRP | stat.S_IWOTH, "changed", "go-w")
    return read_toml(path, Allowed, "the list of a cluster's keys")


def _keyring(folder: Path, name: str, allowed: Allowed, listed: Mapping[str, str]) -> Keyring:
    need_curve()
    path = folder / f"{name}{SUFFIX}"
    _check_modes(path, stat.S_IRWXG | stat.S_IRWXO, "read", "600")
    kept = read_toml(path, KeyFile, "a secret key")
    with at(path), at("public"):
        public = _key(kept.public)
    with at(path), at("secret"):
        secret = _key(kept.secret, shown=False)
    if kept.name != name or zmq.curve_public(z85.encode(secret)) != z85.encode(public):
        raise InputError(
            f"{path}: expected the key of {name}, its name and both halves fitting; make a new one with "
            "flowspec keygen --force"
        )
    if listed.get(name) != kept.public:
        raise InputError(
            f"{folder / ALLOWED} has another key of {name}, or none, than {path}; copy both again from where "
            "they were made"
        )
    return Keyring(
        name=name,
        public=public,
        secret=secret,
        heads={head: _key(text) for head, text in allowed.heads.items()},
        devices={device: _key(text) for device, text in allowed.devices.items()},
        where=str(folder / ALLOWED),
    )


def _key(text: object, *, shown: bool = True) -> bytes:
    if isinstance(text, str) and len(text) == _KEY_CHARS:
        with contextlib.suppress(ValueError, KeyError, OverflowError):
            found = bytes(z85.decode(text))
            if z85.encode(found).decode() == text:
                return found
    got = f", got {text!r:.60}" if shown else ""  # what is wrong with a secret is not told
    raise InputError(f"expected a key of {_KEY_CHARS} characters (Z85){got}")


def _check_folder(folder: Path) -> None:
    """Raises `InputError` for a folder in which others could put files of theirs in the place of these."""
    with contextlib.suppress(OSError):  # what is not there is told of by its files
        found = folder.stat()
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InputError(
                f"{folder} could be changed by others, and with it the keys; make it yours alone: chmod 700 "
                f"{folder}"
            )


def _check_modes(path: Path, forbidden: int, verb: str, mode: str) -> None:
    """Raises `InputError` for what is no file, that somebody else owns or that gives others more than they
    may have."""
    try:
        found = path.stat()
    except OSError as error:
        raise InputError(
            f"{path}: expected a key file, but it cannot be read ({error.strerror}); see flowspec keygen "
            "--help"
        ) from None
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"{path}: expected a key file, got something that is no file")
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & forbidden:
        raise InputError(f"{path} could be {verb} by others; make it yours alone: chmod {mode} {path}")


# ---------------------------------------------------------------------------------------------------- writing


def make_keys(
    folder: Path, heads: Collection[str], devices: Collection[str], *, force: bool
) -> tuple[list[str], list[str]]:
    """Makes the keys that are missing (with `force`: all of those named) and lists them; (names made, names
    kept).

    Keys that were made earlier are kept, also those of others than the named. Raises `InputError`.
    """
    need_curve()
    if folder.is_symlink():  # what it points to has a mode of its own, for a reason of its own
        raise InputError(
            f"{folder}: expected a folder for the keys, got a link; name the folder that it points to"
        )
    wanted = {**{check_name(name): DEVICE for name in devices}, **{check_name(name): HEAD for name in heads}}
    listed = _listed(folder)
    for name, kind in wanted.items():
        if name in listed[DEVICE if kind == HEAD else HEAD] or (kind == HEAD and name in devices):
            raise InputError(
                f"{folder / ALLOWED}: {name} is a {HEAD if kind == DEVICE else DEVICE} already; give heads "
                "and devices different names"
            )
    made = [name for name, kind in wanted.items() if force or name not in listed[kind]]
    kept = [name for names in listed.values() for name in names if name not in made]
    for name in made:
        path = folder / f"{name}{SUFFIX}"
        if path.exists() and not force:
            raise InputError(
                f"{path} exists, but is not listed; give --force to overwrite it, or move it away"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        for name in made:
            public, secret = (part.decode() for part in zmq.curve_keypair())
            note = _SECRET_NOTE.format(kind=wanted[name], name=name)
            text = toml_of({"name": name, "public": public, "secret": secret})
            write_whole(folder / f"{name}{SUFFIX}", f"{note}\n{text}".encode())
            listed[wanted[name]][name] = public
        _write_allowed(folder, listed)
    except OSError as error:
        raise InputError(f"{folder}: expected a folder that can be written ({error.strerror})") from None
    return made, kept


def revoke(folder: Path, names: Iterable[str]) -> None:
    """Takes names off the list and deletes their secrets here. Raises `InputError` for a name that is not
    listed."""
    listed = _listed(folder)
    for name in names:
        kind = next((kind for kind in listed if name in listed[kind]), None)
        if kind is None:
            raise InputError(
                f"{folder / ALLOWED} lists no {name!r:.80}; it has "
                f"{', '.join([*listed[HEAD], *listed[DEVICE]])}"
            )
        del listed[kind][name]
        (folder / f"{name}{SUFFIX}").unlink(missing_ok=True)
    _write_allowed(folder, listed)


def _listed(folder: Path) -> dict[str, dict[str, str]]:
    if not (folder / ALLOWED).exists():
        return {HEAD: {}, DEVICE: {}}
    allowed = read_allowed(folder)
    return {HEAD: allowed.heads, DEVICE: allowed.devices}


def _write_allowed(folder: Path, listed: Mapping[str, Mapping[str, str]]) -> None:
    text = toml_of({f"{kind}s": keys for kind, keys in listed.items()})
    write_whole(folder / ALLOWED, f"{_ALLOWED_NOTE}\n\n{text}".encode())
