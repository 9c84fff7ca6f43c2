"""Reads a cluster file: its devices, those that drafters have, and the links that it declares.

What is wrong is an `InputError` that names file, key and what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowspec.core.protocol import limits
from flowspec.errors import FlowSpecError, InputError
from flowspec.plan.profile import DeviceProfile, find_profile
from flowspec.plan.sites import Network
from flowspec.plan.tables import read_toml
from flowspec.plan.timing import LinkSpec
from flowspec.runtime.cluster import Device, parse_bytes, stage_devices
from flowspec.runtime.transport import split_address

HEAD = "head"
"""Where a `[[drafter]]` runs that is not on a device."""
LINK_DEFAULT = LinkSpec(bandwidth_mbps=1000, delay_s=0.0005)
"""Of a cable between two boards that nobody measured."""


def read_cluster(path: Path) -> list[Device]:
    """The devices of a cluster file, in pipeline order."""
    tables = _device_tables(path)
    devices = [_device(f"{path}: device {number + 1}", table, number) for number, table in enumerate(tables)]
    for kind in ("name", "address"):
        values = [getattr(device, kind) for device in devices]
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise InputError(f"{path}: {kind}: expected each device once, got {twice[0]!r} twice")
    devices = _with_drafters(path, devices)
    _check_stages(path, devices)
    return devices


def _device_tables(path: Path) -> list[dict[str, Any]]:
    data = read_toml(path, "a cluster file").data
    unknown = sorted(set(data) - {"device", "drafter", "links", "insecure"})
    if unknown:
        raise InputError(
            f"{path}: unknown key {unknown[0]!r}; expected [[device]] tables, [[drafter]] tables, links and "
            "insecure"
        )
    tables = data.get("device")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{path}: device: expected at least one [[device]] table with an address")
    if len(tables) > limits.STAGES_MAX:
        raise InputError(f"{path}: device: expected at most {limits.STAGES_MAX} devices, got {len(tables)}")
    return tables


def _with_drafters(path: Path, devices: Sequence[Device]) -> list[Device]:
    """The devices, each with the drafter that it runs."""
    models = {device: model for model, device in read_drafters(path).items()}
    if models and any(device.name == HEAD for device in devices):
        raise InputError(
            f"{path}: name: expected another than {HEAD!r}, which is where a [[drafter]] runs that has no "
            "device"
        )
    found = [replace(device, drafter=models.pop(device.name, None)) for device in devices]
    models.pop(HEAD, None)
    if models:
        names = ", ".join(device.name for device in devices)
        raise InputError(
            f"{path}: drafter: device: expected {HEAD} or one of {names}, got {next(iter(models))!r}"
        )
    return found


def _check_stages(path: Path, devices: Sequence[Device]) -> None:
    """Some device is left for stages, and layers are fixed on all of those or on none."""
    stages = stage_devices(devices)
    if not stages:
        raise InputError(
            f"{path}: drafter: expected a device that is left for the model itself, but each has a drafter"
        )
    busy = next(
        (device.name for device in devices if device.drafter is not None and device.layers is not None), None
    )
    if busy is not None:
        raise InputError(f"{path}: {busy}: expected layers or a drafter, got both")
    without = [device.name for device in stages if device.layers is None]
    if 0 < len(without) < len(stages):
        raise InputError(f"{path}: layers: expected on all devices or on none, but {without[0]} has none")


def read_drafters(path: Path) -> dict[str, str]:
    """The `[[drafter]]` tables of a cluster file: the device of each model, or `head`."""
    tables = read_toml(path, "a cluster file").data.get("drafter", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"{path}: drafter: expected [[drafter]] tables with a model and a device")
    if len(tables) > limits.DRAFTERS_MAX:
        raise InputError(
            f"{path}: drafter: expected at most {limits.DRAFTERS_MAX} drafters, got {len(tables)}"
        )
    found: dict[str, str] = {}
    for number, table in enumerate(tables):
        where = f"{path}: drafter {number + 1}"
        model, device = _drafter(where, table)
        if model in found:
            raise InputError(f"{where}: model: expected each drafter once, got {model!r} twice")
        if device != HEAD and device in found.values():
            raise InputError(f"{where}: device: expected one drafter on a device, but {device} has two")
        found[model] = device
    return found


def _drafter(where: str, table: dict[str, Any]) -> tuple[str, str]:
    """A drafter's model and device."""
    unknown = sorted(set(table) - {"model", "device"})
    if unknown:
        raise InputError(f"{where}: unknown key {unknown[0]!r}; expected model and device")
    for key, what in (
        ("model", "a drafter as --drafter takes it"),
        ("device", f'a device of this file, or "{HEAD}"'),
    ):
        if not _is_short(table.get(key)):
            raise InputError(f"{where}: {key}: expected {what}, got {table.get(key)!r:.80}")
    return table["model"], table["device"]


def _device(where: str, table: dict[str, Any], number: int) -> Device:
    unknown = sorted(set(table) - {"name", "address", "layers", "memory", "profile", "ssh"})
    if unknown:
        raise InputError(
            f"{where}: unknown key {unknown[0]!r}; expected address, name, layers, memory, profile or ssh"
        )
    address = _address(where, table)
    name = table.get("name", f"device-{number}")
    if not _is_short(name):
        raise InputError(f"{where}: name: expected a short text, got {name!r:.80}")
    layers, memory_bytes = _layers(where, table.get("layers")), _memory_bytes(where, table.get("memory"))
    profile, ssh = table.get("profile"), table.get("ssh")
    if profile is not None and not _is_short(profile):
        raise InputError(f"{where}: profile: expected a board's name or a profile file, got {profile!r:.80}")
    if ssh is not None and not (isinstance(ssh, str) and is_ssh_target(ssh)):
        raise InputError(f"{where}: ssh: expected user@host or a host, got {ssh!r:.80}")
    return Device(
        name=name, address=address, layers=layers, memory_bytes=memory_bytes, profile=profile, ssh=ssh
    )


def _address(where: str, table: dict[str, Any]) -> str:
    if "address" not in table:
        raise InputError(f'{where}: address: expected "host:port", but it is missing')
    address = table["address"]
    if not _is_short(address):
        raise InputError(f'{where}: address: expected "host:port", got {address!r:.80}')
    try:
        split_address(address)
    except FlowSpecError as error:
        raise InputError(f"{where}: address: {error}") from None
    return str(address)


def _layers(where: str, layers: Any) -> tuple[int, int] | None:
    if layers is None:
        return None
    is_pair = isinstance(layers, list) and len(layers) == 2 and all(type(n) is int for n in layers)
    if not is_pair or not 0 <= layers[0] < layers[1]:
        raise InputError(f"{where}: layers: expected [first, end) such as [0, 8], got {layers!r:.80}")
    return layers[0], layers[1]


def _memory_bytes(where: str, memory: Any) -> int | None:
    if memory is None:
        return None
    try:
        return parse_bytes(str(memory))
    except InputError as error:
        raise InputError(f"{where}: memory: {error}") from None


def read_links(path: Path, names: Collection[str]) -> Network | None:
    """The links that a cluster file declares, `links = ["1000/0.5", "a:b=100/2"]`, for devices of these
    names; None where it declares none.

    Those that drafters have may have links, too, of which nothing is made.
    """
    table = read_toml(path, "a cluster file")
    if "links" not in table.data:
        return None
    others = set(read_drafters(path).values()) - {HEAD}
    return parse_links(table.texts("links"), [*names, *sorted(others)], f"{path}: links")


def parse_links(texts: Sequence[str], names: Collection[str], where: str) -> Network:
    """`1000/0.5` for all links, `A:B=100/2` for one: Mbit/s and milliseconds; raises `InputError` that begins
    with `where`."""
    default, pairs = LINK_DEFAULT, dict[frozenset[str], LinkSpec]()
    for text in texts:
        pair, has_pair, speed = text.rpartition("=")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?))?", speed)
        if match is None or float(match[1]) <= 0:
            raise InputError(
                f"{where}: expected Mbit/s and ms such as 1000/0.5, or for one link A:B=100/2, got "
                f"{text!r:.80}"
            )
        link = LinkSpec(bandwidth_mbps=float(match[1]), delay_s=float(match[2] or 0.5) / 1000)
        if not has_pair:
            default = link
            continue
        ends = pair.split(":")
        wrong = [end for end in ends if end not in names]
        if len(ends) != 2 or wrong or ends[0] == ends[1]:
            raise InputError(f"{where}: expected two of {', '.join(names)} as A:B, got {pair!r:.80}")
        pairs[frozenset(ends)] = link
    return Network(default=default, pairs=pairs)


def declared_profile(device: Device, cluster: Path) -> DeviceProfile | None:
    """The board that a cluster file names for a device, a file's path being relative to it; raises
    `InputError` that says where."""
    board = device.profile
    if board is None:
        return None
    if board.endswith(".toml") and not Path(board).is_absolute() and (cluster.parent / board).is_file():
        board = str(cluster.parent / board)
    try:
        return find_profile(board)
    except InputError as error:
        raise InputError(
            f"{cluster}: {device.name}: profile: {str(error).removeprefix('device: ')}"
        ) from None


def is_ssh_target(text: str) -> bool:
    """Whether a text is `user@host` or `host` and nothing that ssh or a shell would take for something
    else."""
    return (
        len(text) <= limits.NAME_CHARS_MAX
        and re.fullmatch(r"(\w[\w.-]*@)?\w[\w.:-]*", text, re.ASCII) is not None
    )


def _is_short(text: Any) -> bool:
    """Whether it is a text that fits into messages and into one line of a log."""
    return isinstance(text, str) and 0 < len(text) <= limits.NAME_CHARS_MAX and text.isprintable()
