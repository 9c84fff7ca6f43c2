"""Prints a cluster file for shell scripts: `python -m flowspec.runtime.cluster_list FILE`.

A line for each device: name, ssh target, host, the address to listen on, port and memory in bytes (empty
without a limit), with ASCII unit separators between them, which no field can hold.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from flowspec.core.protocol.limits import NAME_CHARS_MAX
from flowspec.errors import FlowSpecError, InputError
from flowspec.runtime.addresses import ADDRESSES
from flowspec.runtime.cluster import Device
from flowspec.runtime.cluster_file import SSH_TARGET, read_cluster
from flowspec.runtime.transport import split_address

SEPARATOR = "\x1f"


def line(device: Device) -> str:
    """A device's line. The name of its host is resolved here: a device may know itself by that name as
    127.0.1.1."""
    host, port = split_address(device.address)
    host = host.strip("[]")
    target = device.ssh or host
    if len(target) > NAME_CHARS_MAX or re.match(SSH_TARGET, target) is None:
        raise InputError(
            f"{device.name}: expected a host to log in to, got {target!r}; give it an ssh key such as "
            "user@host"
        )
    memory = "" if device.memory_bytes is None else str(device.memory_bytes)
    return SEPARATOR.join((device.name, target, host, ADDRESSES.wait_for(host), str(port), memory))


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("expected one cluster file", file=sys.stderr)
        return 2
    try:
        print("\n".join(line(device) for device in read_cluster(Path(argv[0]))))
    except FlowSpecError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
