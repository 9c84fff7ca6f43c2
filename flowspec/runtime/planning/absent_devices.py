"""Asks a device that was absent at the start what a plan must know of it, beside a pipeline that works.

Only the link between it and the head is measured: those between stages carry answers. A link to another
device is taken for as good as the worse of both ends' links from here, as the survey at the start does where
there is no time to measure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from flowspec.errors import InputError
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.sites import Network, Site
from flowspec.plan.speed import completed
from flowspec.plan.timing import LinkSpec
from flowspec.runtime.cluster import Device
from flowspec.runtime.cluster_file import LINK_DEFAULT, declared_profile, read_links
from flowspec.runtime.health.examine import ask_all
from flowspec.runtime.health.gather import link_facts
from flowspec.runtime.health.interfaces import resolve
from flowspec.runtime.links import GLANCE
from flowspec.runtime.planning.survey import (
    LOOPBACK,
    Survey,
    absent_of,
    absent_timeouts,
    allowed_bytes,
    cores_of,
    is_here,
    known_profile,
    left_out_of,
    link_of,
    sharing,
)
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import split_address


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentDevices:
    """How devices that were absent are asked: all of the cluster file, its keys, and the model's
    precision."""

    devices: tuple[Device, ...]
    cluster: Path
    precision: str
    keys: Keyring | None

    def survey(self, found: Survey, name: str) -> Survey:
        """The survey with one of the absent in it; raises `ClusterError` where that tells no plan what it
        needs."""
        device = next(each for each in self.devices if each.name == name)
        declared = declared_profile(device, self.cluster)
        (examined,) = ask_all(
            [device], speed=[] if declared else [name], keys=self.keys, examine_timeouts=absent_timeouts(1)
        )
        absent_of([examined], needs_all=True)
        left_out_of([examined])
        facts = examined.facts
        assert facts is not None
        known, source = known_profile(facts, declared)
        others = [each.profile for each in found.sites if each.runs_stages]
        profile = known or min(others, key=DeviceProfile.bytes_per_s)
        host = host_of(device)
        beside = [each for each in self.devices if each.name in found.sources and host_of(each) == host]
        memory_bytes = allowed_bytes(facts, device, facts.resident_bytes, 1 + len(beside))
        site = Site(name=name, profile=completed(profile, self.precision), memory_bytes=memory_bytes)
        order = [each.name for each in self.devices]
        place = {each: number for number, each in enumerate(order)}
        sites = sorted((*found.sites, site), key=lambda each: place.get(each.name, len(order)))
        own = cores_of(facts, source, host)
        cores = found.cores if own is None else {**found.cores, name: own}
        return replace(
            found,
            sites=sharing(sites, cores),
            cores=cores,
            network=read_links(self.cluster, order) or self._estimated(found, device),
            sources={**found.sources, name: source},
            absent={each: why for each, why in found.absent.items() if each != name},
            in_use={each: machine for each, machine in found.in_use.items() if each != name},
        )

    def _estimated(self, found: Survey, device: Device) -> Network:
        """The network with links to the device, of which that from here is measured."""
        host = host_of(device)
        hosts = {each.name: host_of(each) for each in self.devices if each.name in found.sources}
        own = LOOPBACK if is_here(host) else link_of(link_facts(device, self.keys, GLANCE)) or LINK_DEFAULT
        pairs = dict(found.network.pairs)
        for site in found.sites:
            other = hosts.get(site.name, "")
            if other == host:
                link = LOOPBACK
            elif not other or is_here(other) or found.head is None:  # it, or all others, are on this machine
                link = own
            else:
                link = worse(own, found.network.between(found.head, site.name))
            pairs[frozenset((device.name, site.name))] = link
        return replace(found.network, pairs=pairs)


def worse(one: LinkSpec, other: LinkSpec) -> LinkSpec:
    """As slow and as late as the worse of two links."""
    rate = min(one.bandwidth_mbps, other.bandwidth_mbps)
    return LinkSpec(bandwidth_mbps=rate, delay_s=max(one.delay_s, other.delay_s))


def host_of(device: Device) -> str:
    """Its host's IP address, or else its name."""
    host = split_address(device.address)[0]
    try:
        return resolve(host)
    except InputError:
        return host
