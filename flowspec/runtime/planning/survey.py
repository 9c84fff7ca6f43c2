"""Asks a cluster's daemons what a plan needs: how fast they are, what memory is free, how far they are from
each other.

Takes some hundredths of a second for each device: links are measured at a glance, from here one after
another, and those between hosts in pairs at the same time, as long as `LINKS_S` allows. Rates and delays are
rounded, so that the same cluster gets the same plan tomorrow.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import zmq

from flowspec.core.protocol.facts import Facts, LinkFacts
from flowspec.errors import ClusterError
from flowspec.host_memory import host_memory
from flowspec.plan.memory import PROCESS_BYTES
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.sites import Network, Site
from flowspec.plan.speed import completed, profile_of, why_insane
from flowspec.plan.timing import LinkSpec
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device
from flowspec.runtime.cluster_file import LINK_DEFAULT, declared_profile, read_links
from flowspec.runtime.health.examine import PATIENCE, Examined, ExaminePatience, ask_all, explain, onward
from flowspec.runtime.health.gather import link_facts
from flowspec.runtime.health.interfaces import interface_of, resolve
from flowspec.runtime.health.own_speed import own_speed
from flowspec.runtime.links import GLANCE
from flowspec.runtime.machine import Machine
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import split_address

HERE = "this machine"
LINKS_S = 2.0
"""How long links between devices are measured; those that are left are taken for as good as the worse of both
ends' links from here."""
LOOPBACK = LinkSpec(bandwidth_mbps=10000, delay_s=0.0001)
"""Between processes of one machine."""
STEPS = 5
"""Rounding of links: so many steps to a factor of ten, of which 10, 100 and 1000 Mbit/s are some."""
MEMORY_STEP = 32 << 20
"""Free memory is rounded down to it, so that it is the same again at the next start."""
ASSUMED = "assumed"
DECLARED = "declared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found: the sites of a wish, with the head's last where no daemon is on its machine, and where
    each profile is from.

    `sources` are `declared` in the cluster file, one of `core.protocol.facts.SPEED_SOURCES`, or `assumed`.
    `head` is as in `PlanRequest`. `left_out` are devices that say of themselves what cannot be, with what
    that is. `absent` are those that did not answer, with why.
    """

    sites: tuple[Site, ...]
    network: Network
    head: str | None
    sources: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def survey(
    devices: Sequence[Device],
    cluster: Path,
    precision: str,
    keys: Keyring | None,
    *,
    head_drafts: bool,
    needs_all: bool = True,
) -> Survey:
    """Asks all; raises `ClusterError` for a device that does not answer, `InputError` for a profile or link
    that cannot be.

    Where not all are needed, those that do not answer within `timeouts.ABSENT_S` are `absent`; raises
    `ClusterError` where none does, and for one that is there, but has other keys or another version. A device
    whose facts cannot be true is left out; raises `ClusterError` where no other is there.

    `keys` are the cluster's. With `head_drafts` the head's machine must know how fast it is, too, which it
    may have to probe.
    """
    declared = [declared_profile(device, cluster) for device in devices]
    network = read_links(cluster, [device.name for device in devices])
    unknown = [device.name for device, profile in zip(devices, declared, strict=True) if profile is None]
    patience = PATIENCE if needs_all else hurried(len(devices))
    found = ask_all(devices, speed=unknown, keys=keys, patience=patience)
    absent = {}
    for each in found:
        if each.ailment is not None:
            if needs_all or each.ailment.check != "reachable":
                raise ClusterError(explain(each))
            absent[each.device.name] = f"{each.ailment.text}; {each.ailment.advice}"
    if len(absent) == len(found):
        raise ClusterError(nobody_there(found))
    declared = [each for each, device in zip(declared, devices, strict=True) if device.name not in absent]
    found = [each for each in found if each.device.name not in absent]
    devices = [each.device for each in found]
    left_out = {
        each.device.name: why for each in found if each.facts is not None and (why := why_insane(each.facts))
    }
    if len(left_out) == len(found):
        name, why = next(iter(left_out.items()))
        raise ClusterError(insane(name, why))
    declared = [each for each, device in zip(declared, devices, strict=True) if device.name not in left_out]
    found = [each for each in found if each.device.name not in left_out]
    devices = [device for device in devices if device.name not in left_out]
    hosts = {device.name: resolve(split_address(device.address)[0]) for device in devices}
    profiles, sources = _profiles(found, declared)
    memory = _memory(found, hosts)
    sites = [
        Site(name=device.name, profile=completed(profile, precision), memory_bytes=memory[device.name])
        for device, profile in zip(devices, profiles, strict=True)
    ]
    here = [device.name for device in devices if is_here(hosts[device.name])]
    if not here:
        name = next(each for each in (HERE, f"{HERE}, the head") if each not in hosts)
        sites.append(_head_site(name, sites[0].profile, precision, drafts=head_drafts))
    return Survey(
        sites=tuple(sites),
        network=network or _measured(devices, hosts, sites[-1].name if not here else None, keys),
        # With all daemons here the head is beside any of them; it may reckon with the one that suits it best.
        head=None if len(here) == len(devices) else here[0] if here else sites[-1].name,
        sources=sources,
        left_out=left_out,
        absent=absent,
    )


def hurried(devices: int) -> ExaminePatience:
    """How long absent devices are waited for at the start, all at once."""
    return ExaminePatience(hello_s=timeouts.ABSENT_S, why_s=timeouts.ABSENT_WHY_S, at_once=max(1, devices))


def insane(name: str, why: str) -> str:
    """What is said of a device whose facts cannot be."""
    advice = "look at it, or take it out of the cluster file"
    return f"device {name} says that it has {why}, which cannot be; {advice}"


def nobody_there(found: Sequence[Examined]) -> str:
    """What is said where no device answers."""
    if len(found) == 1:
        return explain(found[0])
    return f"none of the {len(found)} devices answers; the first is {explain(found[0])}"


def is_here(address: str) -> bool:
    """Whether an IP address is one of this machine's own."""
    return address.startswith("127.") or interface_of(address) is not None


# ---------------------------------------------------------------------------------------------------- devices


def _profiles(
    found: Sequence[Examined], declared: Sequence[DeviceProfile | None]
) -> tuple[list[DeviceProfile], dict[str, str]]:
    """The profile of each device, the first known: the cluster file's, the daemon's own, that of the slowest
    other one."""
    known: list[DeviceProfile | None] = []
    sources = {}
    for each, profile in zip(found, declared, strict=True):
        assert each.facts is not None
        source, speed = DECLARED, each.facts.speed
        if profile is None:
            source = ASSUMED if speed is None else speed.source
            profile = None if speed is None else profile_of(speed, each.facts.memory_total_bytes)
        known.append(profile)
        sources[each.device.name] = source
    told = [profile for profile in known if profile is not None]
    fallback = min(told, key=DeviceProfile.bytes_per_s) if told else UNKNOWN
    return [profile or fallback for profile in known], sources


UNKNOWN = DeviceProfile(
    name="unknown board",
    memory_gb=1.0,
    memory_gb_per_s=10.0,
    memory_efficiency=1.0,
    tflops={"float32": 0.05},
    compute_efficiency=1.0,
    serial=1.0,
)
"""Where no device of a cluster can tell: all are taken for alike, and layers are shared out evenly."""


def _memory(found: Sequence[Examined], hosts: dict[str, str]) -> dict[str, int]:
    """What our processes may take on each device. Daemons of one host share what is free there evenly."""
    beside = Counter(hosts.values())
    taken: Counter[str] = Counter()
    for each in found:
        assert each.facts is not None
        taken[hosts[each.device.name]] += each.facts.resident_bytes
    return {
        each.device.name: allowed_bytes(
            each.facts, each.device, taken[hosts[each.device.name]], beside[hosts[each.device.name]]
        )
        for each in found
        if each.facts is not None
    }


def allowed_bytes(facts: Facts, device: Device, taken_bytes: int, daemons: int) -> int:
    """Free memory with what our daemons there have taken already; a GPU's own holds slices, and no
    process."""
    free_bytes = (facts.memory_available_bytes + taken_bytes) // daemons
    if facts.accelerator and not facts.board.is_jetson:
        free_bytes = facts.accelerator_free_bytes // daemons + PROCESS_BYTES
    return min(
        [
            free_bytes // MEMORY_STEP * MEMORY_STEP,
            *(size for size in (facts.memory_limit_bytes, device.memory_bytes) if size),
        ]
    )


def _head_site(name: str, unused: DeviceProfile, precision: str, *, drafts: bool) -> Site:
    """This machine, which runs no stage; how fast it is counts only if it drafts."""
    speed = own_speed(Machine()) if drafts else None
    memory = host_memory()
    profile = unused if speed is None else profile_of(speed, memory.total)
    return Site(
        name=name,
        profile=completed(profile, precision),
        memory_bytes=memory.available + psutil.Process().memory_info().rss,
        runs_stages=False,
    )


# ------------------------------------------------------------------------------------------------------ links


def _measured(
    devices: Sequence[Device], hosts: dict[str, str], head: str | None, keys: Keyring | None
) -> Network:
    """Links between hosts as they are now; `head` is the site of this machine where it has no daemon."""
    seen: dict[str, Device] = {}
    for device in devices:
        seen.setdefault(hosts[device.name], device)
    remote = [device for host, device in seen.items() if not is_here(host)]
    from_here = {
        hosts[device.name]: link_of(link_facts(device, keys, GLANCE)) or LINK_DEFAULT for device in remote
    }
    between = _between(remote, hosts, from_here, keys)
    names = {device.name: hosts[device.name] for device in devices} | ({} if head is None else {head: ""})
    pairs = {}
    for one, other in combinations(names, 2):
        ends = names[one], names[other]
        away = [end for end in ends if end in from_here]
        if ends[0] == ends[1] or not away:
            pairs[frozenset((one, other))] = LOOPBACK
        elif len(away) == 1:
            pairs[frozenset((one, other))] = from_here[away[0]]
        else:
            pairs[frozenset((one, other))] = between[frozenset(ends)]
    usual = Counter(pairs.values()).most_common(1)[0][0] if pairs else LOOPBACK
    return Network(default=usual, pairs={pair: link for pair, link in pairs.items() if link != usual})


def _between(
    remote: Sequence[Device], hosts: dict[str, str], from_here: dict[str, LinkSpec], keys: Keyring | None
) -> dict[frozenset[str], LinkSpec]:
    """Links between other hosts, by both hosts: measured by one of them, else estimated from both ends' links
    from here."""
    found = {}
    for one, other in combinations(remote, 2):
        ends = (hosts[one.name], hosts[other.name])
        links = [from_here[end] for end in ends]
        found[frozenset(ends)] = LinkSpec(
            bandwidth_mbps=min(link.bandwidth_mbps for link in links),
            delay_s=max(link.delay_s for link in links),
        )
    context: zmq.Context[Any] = zmq.Context()
    until_s = time.monotonic() + LINKS_S
    try:
        with ThreadPoolExecutor(max(1, len(remote) // 2)) as threads:
            for pairs in rounds(remote):
                if time.monotonic() > until_s:
                    break
                measured = threads.map(
                    lambda pair: onward(context, pair[0], pair[1], keys, is_brief=True), pairs
                )
                for (one, other), facts in zip(pairs, measured, strict=True):
                    link = link_of(facts)
                    if link is not None:
                        found[frozenset((hosts[one.name], hosts[other.name]))] = link
    finally:
        context.destroy(linger=0)
    return found


def rounds(devices: Sequence[Device]) -> Iterator[list[tuple[Device, Device]]]:
    """Every pair once, in rounds in which each device has one partner at most (the circle method of
    tournaments)."""
    circle: list[Device | None] = [*devices, *([None] if len(devices) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        circle.insert(1, circle.pop())


def link_of(found: LinkFacts) -> LinkSpec | None:
    """A measured link on the grid; None where it could not be measured."""
    if found.problem or not found.bandwidth_mbps or not found.latency_s:
        return None
    return LinkSpec(bandwidth_mbps=on_grid(found.bandwidth_mbps), delay_s=on_grid(found.latency_s))


def on_grid(value: float) -> float:
    """The nearest of `STEPS` steps to a factor of ten, with two digits."""
    return float(f"{10 ** (round(STEPS * math.log10(value)) / STEPS):.2g}")
