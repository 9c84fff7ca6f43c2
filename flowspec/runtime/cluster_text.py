"""A cluster as a program describes it, and the cluster file that says the same."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowspec.errors import InputError
from flowspec.plan.tables import toml_of
from flowspec.runtime.cluster import Device
from flowspec.runtime.cluster_file import read_cluster
from flowspec.runtime.security.cluster_keys import keys_folder


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices that a model shall run on, in pipeline order, instead of a cluster file.

    `devices`: the addresses of their daemons, `host:port`, or a `Device` of each, which can also hold its
    name, layers, memory (bytes) and board. `drafters`: the device's name, or `head`, of each model
    that drafts, as in the file's `[[drafter]]` tables. `links`: Mbit/s and milliseconds, `1000/0.5` for all
    or `a:b=100/2` for one. `keys`: the folder that `flowspec keygen` made for the head; without one only
    devices on this machine are spoken to, unless it is `insecure`.

    >>> print(Cluster(["192.168.1.21:7700", "192.168.1.22:7700"]).text())
    insecure = false
    <BLANKLINE>
    [[device]]
    address = "192.168.1.21:7700"
    <BLANKLINE>
    [[device]]
    address = "192.168.1.22:7700"
    <BLANKLINE>
    """

    devices: Sequence[str | Device]
    drafters: Mapping[str, str] = field(default_factory=dict)
    links: Sequence[str] = ()
    keys: str | Path | None = None
    insecure: bool = False

    def text(self) -> str:
        """As a cluster file."""
        known = [each if isinstance(each, Device) else Device(name="", address=each) for each in self.devices]
        keys = ("address", "name", "profile", "ssh", "layers")
        tables = [
            {**{key: getattr(each, key) or None for key in keys}, "memory": each.memory_bytes}
            for each in known
        ]
        drafters = [{"model": model, "device": place} for model, place in self.drafters.items()]
        whole = {"insecure": self.insecure, "links": self.links, "device": tables, "drafter": drafters}
        return toml_of(whole)

    @contextlib.contextmanager
    def file(self) -> Iterator[Path]:
        """The file, with its keys beside it, for as long as it is needed; raises `InputError`."""
        if self.keys is not None and not Path(self.keys).is_dir():
            raise InputError(f"keys: expected the folder that flowspec keygen made, got {self.keys}")
        with tempfile.TemporaryDirectory(prefix="flowspec-cluster-") as folder:
            path = Path(folder) / "cluster.toml"
            path.write_text(self.text(), "utf-8")
            if self.keys is not None:
                keys_folder(path).symlink_to(Path(self.keys).resolve())
            read_cluster(path)
            yield path
