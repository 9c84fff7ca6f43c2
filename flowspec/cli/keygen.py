"""Make a cluster's keys: a secret one for the head and each device, and the list of those that may speak
to each other.

Run again after adding a device: it makes what is missing and keeps the rest. Nothing secret is printed.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from flowspec.cli.terminal import tell
from flowspec.errors import InputError
from flowspec.runtime.cluster import Device
from flowspec.runtime.cluster_file import read_cluster
from flowspec.runtime.security.cluster_keys import keys_folder
from flowspec.runtime.security.keyfiles import ALLOWED, SUFFIX, make_keys, read_allowed, revoke
from flowspec.runtime.transport import split_address

CHECKOUT = Path(__file__).resolve().parents[2]
ON_DEVICE = ".config/flowspec/keys"
"""Where a daemon looks for them, under its user's home."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def add_names(flag: str, help: str) -> None:
        parser.add_argument(flag, action="append", default=[], metavar="NAME", help=help)

    cluster = "keys for the devices of this cluster file and a head"
    parser.add_argument("--cluster", type=Path, metavar="FILE.toml", help=cluster)
    add_names("--device", "a key for this device, too; may be repeated")
    add_names("--head", "a key for this head; may be repeated (default: head)")
    out = "where they are kept (default: FILE.keys beside FILE.toml)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=out)
    add_names("--revoke", "take this name off the list instead; may be repeated")
    force = "make these keys anew, with --cluster the heads', too; the old ones open nothing any more"
    parser.add_argument("--force", action="store_true", help=force)
    parser.add_argument("--json", action="store_true", help="print one JSON object (public keys only)")


def run(args: argparse.Namespace) -> int:
    if args.out is None and args.cluster is None:
        raise InputError("expected --cluster FILE.toml, or --out FOLDER and --device NAME for each device")
    folder = args.out or keys_folder(args.cluster)
    devices = [] if args.cluster is None else read_cluster(args.cluster)
    made, kept = list[str](), list[str]()
    if args.revoke:
        if args.device or args.head or args.force:
            raise InputError(
                "--revoke takes names off the list and makes none; leave --device, --head and --force out"
            )
        revoke(folder, args.revoke)
    else:
        known = list(read_allowed(folder).heads) if (folder / ALLOWED).exists() else []
        renews_all = args.cluster is not None and args.force  # else heads keep the keys that they have
        heads = args.head or (["head"] if not known else known if renews_all else [])
        names = [*(device.name for device in devices), *args.device]
        made, kept = make_keys(folder, heads, names, force=args.force)
    allowed = read_allowed(folder)
    if args.json:
        report = {"folder": str(folder), "allowed": str(folder / ALLOWED), "heads": allowed.heads}
        report |= {"devices": allowed.devices, "made": made, "kept": kept, "revoked": args.revoke}
        print(json.dumps(report))
        return 0
    tell(
        f"{folder / ALLOWED}: who may take part: {', '.join(allowed.heads)} (head); "
        f"{', '.join(allowed.devices) or 'no devices yet'}"
    )
    for title, changed in (("new keys", made), ("kept", kept), ("no longer allowed", args.revoke)):
        if changed:
            tell(f"{title}: {', '.join(changed)}")
    tell(
        f"\nEach device needs its own NAME{SUFFIX} and {ALLOWED} in ~/{ON_DEVICE}, and its daemon started "
        "again."
    )
    show_copying(folder, list(allowed.devices), args.cluster, devices)
    return 0


def show_copying(folder: Path, names: Sequence[str], cluster: Path | None, devices: Sequence[Device]) -> None:
    """What to copy where."""
    known = {device.name: device for device in devices}
    local = [name for name in names if name in known and _is_here(known[name])]
    remote = [name for name in names if name not in local]
    if remote:
        print("Over ssh:")
        boards = CHECKOUT / "launch/boards"  # not there where FlowSpec was installed without a checkout
        if cluster is not None and boards.is_file():
            called = "launch/boards" if Path.cwd() == CHECKOUT else shlex.quote(str(boards))
            print(f"  {called} start {shlex.quote(str(cluster))}")
            print("or by hand:")
    for name in remote:
        device = known.get(name)
        target = name if device is None else device.ssh or _host(device)
        print(f"  ssh {target} 'mkdir -p -m 700 {ON_DEVICE}' &&")
        print(f"    scp -p {_files(folder, [name])} {target}:{ON_DEVICE}/")
    if local:
        print("On this machine:")
        print(f"  install -d -m 700 ~/{ON_DEVICE} &&")
        print(f"    install -m 600 {_files(folder, local)} ~/{ON_DEVICE}/")
    if len(local) > 1:
        threads = max(1, (os.cpu_count() or 1) // len(local))
        print("Their keys lie in one folder, so each daemon has to be told which is its own:")
        for name in local:
            host, (_, port) = _host(known[name]), split_address(known[name].address)
            words = f"--host {host} --port {port} --name {shlex.quote(name)} --threads {threads}"
            print(f"  flowspec daemon {words}")
    if cluster is None:
        found = "finds its own key and the list beside the cluster file, as NAME.keys for NAME.toml"
    elif folder.absolute() == keys_folder(cluster).absolute():
        found = "finds its own key and the list here"
    else:
        found = f"looks for its own key and the list in {keys_folder(cluster)}: move the folder there"
    tell(f"The head {found}. Who has a {SUFFIX} file can speak as its name: keep them to yourself.")


def _files(folder: Path, names: Sequence[str]) -> str:
    """The keys of devices and the list, for a shell."""
    return shlex.join(str(folder / each) for each in (*(f"{name}{SUFFIX}" for name in names), ALLOWED))


def _host(device: Device) -> str:
    return split_address(device.address)[0].strip("[]")


def _is_here(device: Device) -> bool:
    """Whether a device is a daemon of this machine, by its address."""
    host = _host(device)
    try:
        is_named = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_named = host == "localhost"  # other names are not looked up for this
    return device.ssh is None and is_named
