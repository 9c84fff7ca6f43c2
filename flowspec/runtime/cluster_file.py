"""Reads a cluster file: its devices, those that drafters have, and the links that it declares.

What is wrong is an `InputError` that names file, key and what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.plan.profile import DeviceProfile, find_profile
from flowspec.plan.sites import Network
from flowspec.plan.tables import Table, read_toml
from flowspec.plan.timing import LinkSpec
from flowspec.runtime.cluster import PORT_DEFAULT, Device, parse_bytes, stage_devices
from flowspec.runtime.transport import split_address

HEAD = "head"
"""Where a `[[drafter]]` runs that is not on a device."""
LINK_DEFAULT = LinkSpec(bandwidth_mbps=1000, delay_s=0.0005)
"""Of a cable between two boards that nobody measured."""


def read_cluster(path: Path) -> list[Device]:
    """The devices of a cluster file, in pipeline order, all that it says being as it must."""
    file = read_toml(path, "a cluster file")
    file.check(("device", "drafter", "links", "insecure"))
    tables = file.tables("device")
    if len(tables) > limits.STAGES_MAX:
        raise InputError(f"{path}: device: expected at most {limits.STAGES_MAX} devices, got {len(tables)}")
    devices = [_device(table) for table in tables]
    for kind in ("address", "name"):
        values = [getattr(device, kind) for device in devices]
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise InputError(f"{path}: {kind}: expected each device once, got {twice[0]!r} twice")
    devices = _with_drafters(path, devices)
    _check_stages(path, devices)
    read_links(path, [device.name for device in devices])  # a wrong one is told of before a device is asked
    for device in devices:
        declared_profile(device, path)
    return devices


def _with_drafters(path: Path, devices: Sequence[Device]) -> list[Device]:
    """The devices, each with the drafter that it runs."""
    models = {device: model for model, device in read_drafters(path).items()}
    if models and any(device.name == HEAD for device in devices):
        raise InputError(
            f"{path}: name: expected another than {HEAD!r}, which is where a drafter runs that has no device"
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
    file = read_toml(path, "a cluster file")
    tables = file.tables("drafter") if file.data.get("drafter", []) != [] else []
    if len(tables) > limits.DRAFTERS_MAX:
        raise InputError(
            f"{path}: drafter: expected at most {limits.DRAFTERS_MAX} drafters, got {len(tables)}"
        )
    found: dict[str, str] = {}
    for table in tables:
        table.check(("model", "device"))
        model = _short(table, "model", "a drafter as --drafter takes it")
        device = _short(table, "device", f'a device of this file, or "{HEAD}"')
        if model in found:
            raise InputError(f"{table.where}: model: expected each drafter once, got {model!r} twice")
        if device != HEAD and device in found.values():
            raise InputError(f"{table.where}: device: expected one drafter on a device, but {device} has two")
        found[model] = device
    return found


def _device(table: Table) -> Device:
    table.check(("name", "address", "layers", "memory", "profile", "ssh"))
    address = _short(table, "address", '"host:port"')
    table.found("address", lambda: split_address(address))
    ssh = table.data.get("ssh")
    if ssh is not None and not (isinstance(ssh, str) and is_ssh_target(ssh)):
        table.wrong("ssh", "user@host or a host")
    memory, is_rated = table.data.get("memory"), "profile" in table.data
    return Device(
        name=_short(table, "name", "a short text", name_by_address(address)),
        address=address,
        layers=_layers(table),
        memory_bytes=None if memory is None else table.found("memory", lambda: parse_bytes(str(memory))),
        profile=_short(table, "profile", "a board's name or a profile file") if is_rated else None,
        ssh=ssh,
    )


def name_by_address(address: str) -> str:
    """A name for a device without one: its host, and its port where that is not the usual one.

    Keys go by names, so that of a device must not change with the lines beside it. It can name a file, too.
    """
    host, port = split_address(address)
    name = re.sub(r"[^A-Za-z0-9._]", "-", host.strip("[]"))
    name = f"0{name}" if name.startswith("-") else name  # ::1 is 0::1
    return name if port == PORT_DEFAULT else f"{name}-{port}"


def _layers(table: Table) -> tuple[int, int] | None:
    layers = table.data.get("layers")
    if layers is None:
        return None
    is_pair = isinstance(layers, list) and len(layers) == 2 and all(type(n) is int for n in layers)
    if not is_pair or not 0 <= layers[0] < layers[1]:
        table.wrong("layers", "[first, end) such as [0, 8]")
    return layers[0], layers[1]


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
        delay_s = LINK_DEFAULT.delay_s if match[2] is None else float(match[2]) / 1000
        link = LinkSpec(bandwidth_mbps=float(match[1]), delay_s=delay_s)
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
    return find_profile(board, what=f"{cluster}: {device.name}: profile")


def is_ssh_target(text: str) -> bool:
    """Whether a text is `user@host` or `host` and nothing that ssh or a shell would take for something
    else."""
    return (
        len(text) <= limits.NAME_CHARS_MAX
        and re.fullmatch(r"(\w[\w.-]*@)?\w[\w.:-]*", text, re.ASCII) is not None
    )


def _short(table: Table, key: str, expected: str, default: str | None = None) -> str:
    """A text that fits into messages and into one line of a log."""
    text = table.data.get(key, default)
    if not (isinstance(text, str) and 0 < len(text) <= limits.NAME_CHARS_MAX and text.isprintable()):
        table.wrong(key, expected)
    return text
