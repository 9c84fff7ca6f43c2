"""Which keys the head of a cluster file uses: those in the folder beside it, `NAME.keys` for `NAME.toml`.

Without them nothing leaves this machine, unless the file says `insecure = true`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from flowspec.errors import InputError
from flowspec.runtime.addresses import ADDRESSES
from flowspec.runtime.cluster import Device
from flowspec.runtime.cluster_file import read_cluster_file
from flowspec.runtime.security.keyfiles import head_keyring
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import is_loopback, split_address

log = logging.getLogger("flowspec.head")


def keys_folder(cluster: Path) -> Path:
    """Where `flowspec keygen` puts the keys of a cluster file, and where they are looked for."""
    return cluster.with_name(cluster.name.removesuffix(".toml") + ".keys")  # launch/boards does the same


def cluster_keys(cluster: Path, devices: Sequence[Device]) -> Keyring | None:
    """The keys for a cluster file and its devices, None where it does without; raises `InputError` if it must
    not."""
    is_insecure = read_cluster_file(cluster).insecure
    folder = keys_folder(cluster)
    if folder.is_dir() and not is_insecure:
        return head_keyring(folder)
    ADDRESSES.prepare(split_address(device.address)[0] for device in devices)
    beyond = next((device for device in devices if is_beyond(split_address(device.address)[0])), None)
    if beyond is None:
        return None
    if not is_insecure:
        raise InputError(
            f"{folder} is missing, so what is said to {beyond.name} at {beyond.address} could be read and "
            "changed by others: make keys with "
            f"flowspec keygen --cluster {cluster}, or write insecure = true at the top of {cluster}"
        )
    log.warning("%s is insecure: whoever is in the network can read and change prompts and answers", cluster)
    return None


def is_beyond(host: str) -> bool:
    """Whether a host may be another machine; one that cannot be found now may be anywhere later."""
    try:
        ADDRESSES.wait_for(host)  # which does not hang where the name service does
        return not is_loopback(host)
    except InputError:
        return True
