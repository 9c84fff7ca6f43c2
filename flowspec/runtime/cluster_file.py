"""Reads a cluster file: its devices, those that drafters have, and the links that it declares.

What is wrong is an `InputError` that names file, key and what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.plan.profile import DeviceProfile, find_profile
from flowspec.plan.sites import Network
from flowspec.plan.tables import Table, Texts, at, read_toml
from flowspec.plan.timing import GIGABIT, LinkSpec
from flowspec.runtime.cluster import PORT_DEFAULT, Device, parse_bytes, stage_devices
from flowspec.runtime.transport import split_address
from flowspec.validation import PRINTABLE, Misfit, Told, expect

HEAD = "head"
"""Where a `[[drafter]]` runs that is not on a device."""
LINK_DEFAULT = GIGABIT
"""Of a cable between two boards that nobody measured."""
SSH_TARGET = r"(?a)\A(\w[\w.-]*@)?\w[\w.:-]*\Z"
"""`user@host` or `host` and nothing that ssh or a shell would take for something else."""


def _short(expected: str, pattern: str = rf"\A{PRINTABLE}+\Z") -> Meta:
    """Of a text that fits into messages and into one line of a log."""
    return Meta(max_length=limits.NAME_CHARS_MAX, pattern=pattern, description=expected)


class DeviceTable(Table, frozen=True, kw_only=True):
    """A table [[device]]: what the user fixed about a device, as in `Device`."""

    address: Annotated[str, _short('"host:port"')]
    name: Annotated[str, _short("a short text")] | None = None
    layers: (
        Annotated[tuple[Annotated[int, Meta(ge=0)], int], Meta(description="[first, end) such as [0, 8]")]
        | None
    ) = None
    memory: Annotated[str | int | float, Meta(description="a size such as 4GiB")] | None = None
    profile: Annotated[str, _short("a board's name or a profile file")] | None = None
    ssh: Annotated[str, _short("user@host or a host", SSH_TARGET)] | None = None

    def __post_init__(self) -> None:
        if self.layers is not None:
            first, end = self.layers
            expect(first < end, "layers", self.layers, "[first, end) such as [0, 8]")


class DrafterTable(Table, frozen=True, kw_only=True):
    """A table [[drafter]]: which model runs where."""

    model: Annotated[str, _short("a drafter as --drafter takes it")]
    device: Annotated[str, _short(f'a device of this file, or "{HEAD}"')]


class ClusterFile(Table, frozen=True, kw_only=True):
    device: Annotated[
        tuple[DeviceTable, ...],
        Meta(
            min_length=1,
            max_length=limits.STAGES_MAX,
            description=f"1 to {limits.STAGES_MAX} tables, in device = [...] or as [[device]]",
        ),
    ]
    drafter: Annotated[tuple[DrafterTable, ...], Meta(max_length=limits.DRAFTERS_MAX)] = ()
    links: Texts | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        for number, each in enumerate(self.drafter):
            before = self.drafter[:number]
            if each.model in [other.model for other in before]:
                raise Misfit(("drafter", number, "model"), "each drafter once", each.model)
            if each.device != HEAD and each.device in [other.device for other in before]:
                raise Misfit(("drafter", number, "device"), "one drafter on a device", each.device)


def read_cluster_file(path: Path) -> ClusterFile:
    return read_toml(path, ClusterFile, "a cluster file")


def read_cluster(path: Path) -> list[Device]:
    """The devices of a cluster file, in pipeline order, all that it says being as it must."""
    file = read_cluster_file(path)
    models = {each.device: each.model for each in file.drafter}
    devices = [_device(path, number, table, models) for number, table in enumerate(file.device, 1)]
    names = [device.name for device in devices]
    with at(path):
        for kind, values in (("address", [device.address for device in devices]), ("name", names)):
            for value in values:
                expect(values.count(value) == 1, kind, Told(f"{value!r} twice"), "each device once")
        expect(not models or HEAD not in names, "name", HEAD, "another, for it is where drafters run, too")
        for name in models.keys() - {HEAD, *names}:
            raise Misfit(("drafter", "device"), f"{HEAD} or one of {', '.join(names)}", name)
        _check_stages(devices)
    read_links(path, names)  # a wrong one is told of before a device is asked
    for device in devices:
        declared_profile(device, path)
    return devices


def _device(path: Path, number: int, table: DeviceTable, models: Mapping[str, str]) -> Device:
    with at(path), at(f"device {number}"):
        with at("address"):
            split_address(table.address)
        with at("memory"):
            memory_bytes = None if table.memory is None else parse_bytes(str(table.memory))
    name = table.name or name_by_address(table.address)
    return Device(
        name=name,
        address=table.address,
        layers=table.layers,
        memory_bytes=memory_bytes,
        profile=table.profile,
        ssh=table.ssh,
        drafter=models.get(name),
    )


def _check_stages(devices: Sequence[Device]) -> None:
    """Some device is left for stages, and layers are fixed on all of those or on none."""
    stages = stage_devices(devices)
    if not stages:
        raise InputError(
            "drafter: expected a device that is left for the model itself, but each has a drafter"
        )
    for device in devices:
        if device.drafter is not None and device.layers is not None:
            raise InputError(f"{device.name}: expected layers or a drafter, got both")
    without = [device.name for device in stages if device.layers is None]
    if 0 < len(without) < len(stages):
        raise InputError(f"layers: expected on all devices or on none, but {without[0]} has none")


def read_drafters(path: Path) -> dict[str, str]:
    """The `[[drafter]]` tables of a cluster file: the device of each model, or `head`."""
    return {each.model: each.device for each in read_cluster_file(path).drafter}


def name_by_address(address: str) -> str:
    """A name for a device without one: its host, and its port where that is not the usual one.

    Keys go by names, so that of a device must not change with the lines beside it. It can name a file, too.
    """
    host, port = split_address(address)
    name = re.sub(r"[^A-Za-z0-9._]", "-", host.strip("[]"))
    name = f"0{name}" if name.startswith("-") else name  # ::1 is 0::1
    return name if port == PORT_DEFAULT else f"{name}-{port}"


def read_links(path: Path, names: Collection[str]) -> Network | None:
    """The links that a cluster file declares, `links = ["1000/0.5", "a:b=100/2"]`, for devices of these
    names; None where it declares none.

    Those that drafters have may have links, too, of which nothing is made.
    """
    file = read_cluster_file(path)
    if file.links is None:
        return None
    others = {each.device for each in file.drafter} - {HEAD}
    return parse_links(file.links, [*names, *sorted(others)], f"{path}: links")


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
