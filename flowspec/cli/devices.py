"""List the devices of the local network whose daemons announce themselves, and write a cluster file of them.

A daemon does so only when it was started with --announce. Exit status: 0 when some were found, else 1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowspec.cli.options import check_new_toml, write_file
from flowspec.cli.result import Result
from flowspec.cli.terminal import note
from flowspec.core.protocol.device_messages import AskFacts
from flowspec.errors import InputError
from flowspec.plan.memory import mib
from flowspec.plan.tables import toml_of
from flowspec.runtime.cluster import Device
from flowspec.runtime.device.links import ask
from flowspec.runtime.discovery import Announced, find_announced
from flowspec.runtime.security.keyfiles import head_keyring
from flowspec.runtime.security.keyring import Keyring
from flowspec.version import __version__

NOTHING_FOUND = 1
"""Exit status."""
TIMEOUT_MAX_S = 600.0
LISTENING = 0.5
"""Of the time that there is, the share in which daemons are heard of; in the rest they are asked."""


COLUMNS: dict[str, str | Callable[[Mapping[str, Any]], object]] = {
    "name": "name",
    "address": "address",
    "FlowSpec": "version",
    "memory": lambda each: mib(each["memory_bytes"]),
    "available": lambda each: None if each["available_bytes"] is None else mib(each["available_bytes"]),
    "device": lambda each: ", ".join(filter(None, (each["device"], each["board"]))),
    "state": lambda each: ": ".join(filter(None, (each["state"], each["problem"]))),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    timeout = "how long all of it may take (default: %(default)s)"
    parser.add_argument("--timeout", type=float, default=4.0, metavar="SECONDS", help=timeout)
    keys = "the cluster's keys (flowspec keygen), for daemons that ask for them (default: none)"
    parser.add_argument("--keys", type=Path, metavar="FOLDER", help=keys)
    write = "write a cluster file of those that can be used"
    parser.add_argument("--write", type=Path, metavar="FILE.toml", help=write)
    parser.add_argument("--force", action="store_true", help="overwrite that file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if not 0 < args.timeout <= TIMEOUT_MAX_S:
        raise InputError(
            f"--timeout: expected seconds above 0 and up to {TIMEOUT_MAX_S:g}, got {args.timeout:g}"
        )
    if args.write is not None:
        check_new_toml("--write", args.write, force=args.force)
    keys = None if args.keys is None else head_keyring(args.keys)
    deadline_s = time.monotonic() + args.timeout
    found = find_announced(LISTENING * args.timeout)
    seen = ask_announced(found, keys, deadline_s - time.monotonic())
    usable = [each for each in seen if each["available_bytes"] is not None]
    written = str(args.write) if args.write is not None and usable else None
    result = Result({"devices": seen, "written": written})
    if seen or args.json:
        result.table(COLUMNS, seen, texts=len(COLUMNS))
        result.print(as_json=args.json)
    if not seen:
        start = "flowspec daemon --host ADDRESS --announce (and let its firewall pass UDP port 5353)"
        none = f"no daemon announced itself within {args.timeout:g} s"
        note(f"{none}; start it with: {start}, or list the devices in a cluster file")
        return NOTHING_FOUND
    if args.write is not None:
        if not usable:
            note(f"none of them answers as FlowSpec {__version__}, so {args.write} was not written")
            return NOTHING_FOUND
        write(args.write, usable)
        if not args.json:
            print(f"\nwritten to {args.write}; check it with: flowspec doctor --cluster {args.write}")
    return 0


def ask_announced(found: Sequence[Announced], keys: Keyring | None, within_s: float) -> list[dict[str, Any]]:
    """Asks each daemon at all of its addresses, at its likeliest first; the first that answers counts. As
    `--json` shows them, memory in bytes."""
    places = [(each, each.addresses[rank]) for rank in range(8) for each in found if each.addresses[rank:]]
    devices = [Device(name=each.name, address=address) for each, address in places]
    answers = ask(devices, keys, lambda device: AskFacts(), within_s=max(0.0, within_s))
    seen: dict[int, dict[str, Any]] = {}
    for (each, address), answer in zip(places, answers, strict=True):
        facts, known = answer.facts, seen.get(id(each))
        if known is None or (known["available_bytes"] is None and facts is not None):
            seen[id(each)] = {
                "name": each.name,
                "address": address,
                "version": each.version,
                "memory_bytes": each.memory_bytes,
                "available_bytes": None if facts is None else facts.memory_available_bytes,
                "device": each.device,
                "board": "" if facts is None else facts.board.model,
                "state": "no answer" if facts is None else "busy" if facts.is_held else "free",
                "problem": "" if answer.failure is None else answer.failure.text,
            }
    return list(seen.values())


def write(path: Path, seen: Sequence[Mapping[str, Any]]) -> None:
    """A cluster file, a device for each, their names made to differ."""
    lines = ["# Found by flowspec devices; put the devices into pipeline order."]
    names: set[str] = set()
    for each in seen:
        name, number = each["name"], 2
        while name in names:
            name, number = f"{each['name']}-{number}", number + 1
        names.add(name)
        lines += ["", toml_of({"device": [{"name": name, "address": each["address"]}]}).rstrip()]
        lines.append(f"# {mib(each['memory_bytes'])}, {each['state']} when it was found")
    write_file("--write", path, "\n".join(lines) + "\n")
