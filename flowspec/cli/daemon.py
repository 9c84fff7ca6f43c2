"""Run this device's part: wait for a head, load the layers it assigns, run them.

One daemon per device. It is idle until a head assigns it layers, serves one head after another, and ends with
Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flowspec.cli.parser import Rare
from flowspec.core.protocol.limits import NAME_CHARS_MAX
from flowspec.errors import InputError
from flowspec.folders import keys_folder
from flowspec.runtime.cluster import PORT_DEFAULT, parse_bytes

if TYPE_CHECKING:  # what a daemon is made of is imported when it starts, not for its flags
    from flowspec.runtime.security.keyring import Keyring


log = logging.getLogger("flowspec.daemon")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    text = "port to listen on, 0 for a free one (default: %(default)s)"
    add("--port", type=int, default=PORT_DEFAULT, help=text)
    text = (
        "name in its log, and of its key (default: that of its only key, else the host's); a head calls it "
        "as its cluster file does"
    )
    add("--name", help=text)
    trust = parser.add_mutually_exclusive_group()
    text = f"this device's key and the list (default: {keys_folder()}, if there)"
    trust.add_argument("--keys", type=Path, metavar="FOLDER", help=text)
    text = "no keys: whoever reaches the port may use this device and read along"
    trust.add_argument("--insecure", action="store_true", help=text)
    text = Rare("where to compute (default: %(default)s)")
    add("--device", default="auto", metavar="auto|cpu|cuda:N", help=text)
    add("--memory", metavar="SIZE", help="most memory to use, such as 4GiB (default: what is free)")
    place = "(default: in the user's cache folder)"
    text = Rare(f"where to store weights that a head sends or that were quantised {place}")
    add("--cache-dir", type=Path, metavar="FOLDER", help=text)
    text = Rare(
        "most disk to store them on, and most to fetch from the hub at once; 0 takes none (default: half of "
        "what is free)"
    )
    add("--cache-limit", metavar="SIZE", help=text)
    what = "(default: fetch a slice's files)"
    text = Rare(f"fetch nothing from the hub: use what is in its cache, else what the head sends {what}")
    add("--no-hub", action="store_true", help=text)
    text = "let `flowspec devices` find it in the local network (default: it is announced nowhere)"
    add("--announce", action="store_true", help=text)
    text = "threads that compute (default: one on each core, or OMP_NUM_THREADS)"
    add("--threads", type=int, metavar="N", help=text)
    source = "(default: what profile --keep wrote, else a probe)"
    text = Rare(f"how fast it is: a board's name or a profile file {source}")
    add("--profile", metavar="BOARD", help=text)


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.port < 65536:
        raise InputError(f"--port: expected 0 to 65535, got {args.port}")
    if args.threads is not None and args.threads < 1:
        raise InputError(f"--threads: expected 1 or more, got {args.threads}")
    if not re.fullmatch(r"auto|cpu|cuda:\d+", args.device):
        raise InputError(f"--device: expected auto, cpu or cuda:N, got {args.device!r}")
    if not args.host:
        raise InputError("--host: expected an address of this machine, got an empty one")
    if args.name is not None and not 0 < len(args.name) <= NAME_CHARS_MAX:
        raise InputError(f"--name: expected 1 to {NAME_CHARS_MAX} characters, got {len(args.name)}")
    if args.device.startswith("cuda"):
        # It imports torch, which the daemon of a GPU otherwise does on its first assignment.
        from flowspec.model.accelerator import find

        find(args.device)
    if args.cache_dir is not None and args.cache_dir.exists() and not args.cache_dir.is_dir():
        raise InputError(f"--cache-dir: expected a folder, got the file {args.cache_dir}")
    from flowspec.plan.profile import find_profile
    from flowspec.runtime.daemon import Daemon
    from flowspec.runtime.machine import Machine
    from flowspec.runtime.transport import check_own

    machine = Machine(
        device=args.device,
        memory_bytes=_size("--memory", args.memory),
        threads=args.threads,
        cache_dir=args.cache_dir,
        cache_bytes=0 if args.cache_limit == "0" else _size("--cache-limit", args.cache_limit),
        uses_hub=not args.no_hub,
        profile=None if args.profile is None else find_profile(args.profile, what="--profile"),
    )
    check_own(args.host)  # before the keys: a wrong address is wrong with any
    keys = None if args.insecure else _keys(args.keys, args.name)
    name = args.name or (socket.gethostname() if keys is None else keys.name)
    daemon = Daemon(
        host=args.host, port=args.port, name=name, machine=machine, keys=keys, insecure=args.insecure
    )
    if args.insecure:
        log.warning(
            "insecure: whoever reaches this port may use the device, and can read and change what it computes"
        )
    daemon.stop_on_signals()
    faulthandler.enable(sys.stderr)  # what ends the process at once, as SIGILL does, leaves a trace
    announced: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if args.announce:
        from flowspec.host_memory import host_memory
        from flowspec.runtime.discovery import announcing

        announced = announcing(
            name=daemon.name,
            host=daemon.host,
            port=daemon.port,
            memory_bytes=machine.memory_bytes or host_memory().total,
            device=machine.device,
        )
    with announced:
        daemon.run()
    return 0


def _keys(folder: Path | None, name: str | None) -> Keyring | None:
    """The keys that were asked for, else those in their usual place; None where there are none of this
    device."""
    from flowspec.runtime.security.keyfiles import device_keyring, device_name

    place = folder or keys_folder()
    found = device_name(place, name, socket.gethostname())
    if found is not None:
        return device_keyring(place, found)
    if folder is not None:
        raise InputError(
            f"--keys: expected a folder with allowed.toml and the key of {name or 'this device'}, got "
            f"{folder}"
        )
    if place.is_dir():
        told = "%s has no key of %s, so this daemon asks nobody for one; with another --name it would"
        log.warning(told, place, name or "this device")
    return None


def _size(flag: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except InputError as error:
        raise InputError(f"{flag}: {error}") from None
