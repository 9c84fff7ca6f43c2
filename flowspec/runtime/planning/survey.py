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
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import zmq

from flowspec.core.cluster.holder import Holder, head_called
from flowspec.core.protocol.device_messages import Facts, LinkFacts
from flowspec.errors import ClusterError
from flowspec.host_memory import host_memory
from flowspec.plan.memory import PROCESS_BYTES
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.sites import Network, SharedCores, Site
from flowspec.plan.speed import completed, profile_of, why_insane
from flowspec.plan.timing import LinkSpec
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device
from flowspec.runtime.cluster_file import LINK_DEFAULT, declared_profile, read_links
from flowspec.runtime.health.examine import (
    EXAMINE_TIMEOUTS,
    REACHABLE,
    Examined,
    ExamineTimeouts,
    Failure,
    ask_all,
    explain,
    greet,
    onward,
)
from flowspec.runtime.health.gather import link_facts
from flowspec.runtime.health.interfaces import interface_of, resolve
from flowspec.runtime.health.own_speed import own_speed
from flowspec.runtime.links import GLANCE
from flowspec.runtime.machine import Machine
from flowspec.runtime.pipeline_connections import Progress, told_of
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import end_context, split_address

HERE = "this machine"
LINKS_S = 2.0
"""How long links between devices are measured; those that are left are taken for as good as the worse of both
ends' links from here."""
AGAIN_S = 1.1 * timeouts.PING_EVERY_S
"""How soon a device is asked again who holds it: a head that is there has renewed its lease by then."""
LOOPBACK = LinkSpec(bandwidth_mbps=10000, delay_s=0.0001)
"""Between processes of one machine."""
STEPS = 5
"""Rounding of links: so many steps to a factor of ten, of which 10, 100 and 1000 Mbit/s are some."""
MEMORY_STEP = 32 << 20
"""Free memory is rounded down to it, so that it is the same again at the next start."""
ASKED = "telling what it can do"
"""What a device does that is asked."""
ASSUMED = "assumed"
DECLARED = "declared"
MEASURED = "measured"
MEASURED_ALONE = ("kept", "probed", ASSUMED)
"""Sources of a speed that says nothing of other daemons on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found: the sites of a request, with the head's last where no daemon is on its machine, and
    where each profile is from.

    `sources` are `declared` in the cluster file, one of `device_messages.SPEED_SOURCES`, or `assumed`.
    `head` is as in `PlanRequest`. `left_out` are devices that say of themselves what cannot be, with what
    that is. `absent` are those that cannot be had, with why: they did not answer, or others use them (those
    `in_use`, with the machine of each). On those that are `limited` the user allows less memory than is
    free. `cores` are what each would share with others of its machine. The `links` are `declared` in the
    cluster file, or `measured`, but for those within a machine.
    """

    sites: tuple[Site, ...]
    network: Network
    head: str | None
    sources: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    in_use: Mapping[str, str] = field(default_factory=dict)
    limited: tuple[str, ...] = ()
    cores: dict[str, SharedCores] = field(default_factory=dict)
    links: str = DECLARED


def survey(
    devices: Sequence[Device],
    cluster: Path,
    precision: str,
    keys: Keyring | None,
    *,
    head_drafts: bool,
    needs_all: bool = True,
    needs_free: bool = False,
    tell: Progress = lambda text, share: None,
) -> Survey:
    """Asks all; raises `ClusterError` for a device that does not answer, `InputError` for a profile or link
    that cannot be.

    Where not all are needed, those that do not answer within `timeouts.ABSENT_S` are `absent`; raises
    `ClusterError` where none does, and for one that is there, but has other keys or another version. A device
    whose facts cannot be true is left out; raises `ClusterError` where no other is there. With `needs_free`
    one that another head uses cannot be had either.

    `keys` are the cluster's; several threads `tell` whose answers are waited for. With `head_drafts` the
    head's machine must know how fast it is, too, which it may have to probe.
    """
    declared = {device.name: declared_profile(device, cluster) for device in devices}
    network = read_links(cluster, list(declared))
    unknown = [name for name, profile in declared.items() if profile is None]
    examine_timeouts = EXAMINE_TIMEOUTS if needs_all else absent_timeouts(len(devices))
    for device in devices:
        tell(told_of(device.name, ASKED), 0.0)
    found = ask_all(
        devices,
        speed=unknown,
        step=lambda name: tell(told_of(name, ASKED), 1.0),
        tell=tell,
        keys=keys,
        examine_timeouts=examine_timeouts,
    )
    absent = absent_of(found, needs_all=needs_all)
    users = users_of(_without(found, absent), absent, keys, needs_all=needs_all) if needs_free else {}
    absent |= {name: f"in use by {head_called(head)}" for name, head in users.items()}
    answered = _without(found, absent)
    left_out = left_out_of(answered)
    there = _without(answered, left_out)
    hosts = {each.device.name: resolve(split_address(each.device.address)[0]) for each in there}
    profiles, sources = _profiles(there, declared)
    machines = {each.device.name: machine_of(each.device.address) for each in there}
    sites = _sites(profiles, usable_memory(there, machines), precision)
    cores = _cores(there, hosts, sources)
    here = [name for name, host in hosts.items() if is_here(host)]
    if not here:
        name = f"{HERE}, the head" if HERE in hosts else HERE
        sites.append(_head_site(name, sites[0].profile, precision, drafts=head_drafts))
    head = here[0] if here else sites[-1].name
    links = DECLARED if network is not None else MEASURED
    if network is None:
        network = _measured([each.device for each in there], hosts, None if here else head, keys)
    return Survey(
        sites=sharing(sites, cores),
        network=network,
        # With all daemons here the head is beside any of them; it may reckon with the one that suits it best.
        head=None if len(here) == len(there) else head,
        sources=sources,
        left_out=left_out,
        absent=absent,
        in_use={each.name: machine_of(each.address) for each in devices if each.name in users},
        limited=tuple(each.device.name for each in there if _is_limited(each)),
        cores=cores,
        links=links,
    )


def _is_limited(each: Examined) -> bool:
    assert each.facts is not None
    allowed = [size for size in (each.facts.memory_limit_bytes, each.device.memory_bytes) if size]
    return bool(allowed) and min(allowed) < each.facts.memory_available_bytes


def _without(found: Sequence[Examined], names: Container[str]) -> list[Examined]:
    return [each for each in found if each.device.name not in names]


def absent_of(found: Sequence[Examined], *, needs_all: bool, hint: str = "") -> dict[str, str]:
    """Those that may be absent and are, with why. The `hint` says what to do where all are needed and one is
    absent."""
    absent = {}
    for each in found:
        if each.failure is not None:
            is_absent = each.failure.check == REACHABLE
            if needs_all or not is_absent:
                raise ClusterError(f"{explain(each)}{f'; {hint}' if hint and is_absent else ''}")
            absent[each.device.name] = f"{each.failure.text}; {each.failure.advice}"
    if len(absent) == len(found):
        first = explain(found[0])
        many = f"none of the {len(found)} devices answers ({', '.join(absent)}); the first is {first}"
        raise ClusterError(first if len(found) == 1 else many)
    return absent


def users_of(
    found: Sequence[Examined], absent: Mapping[str, str], keys: Keyring | None, *, needs_all: bool
) -> dict[str, str]:
    """The heads that use some of these devices, by name; raises `ClusterError` where all are needed, or none
    is free."""
    held = [each.device for each in found if each.welcome is not None and each.welcome.holder]
    context: zmq.Context[Any] = zmq.Context()
    try:
        with ThreadPoolExecutor(max(1, len(held))) as threads:
            heads = threads.map(lambda device: _user(context, device, keys), held)
            users = {device.name: head for device, head in zip(held, heads, strict=True) if head}
    finally:
        end_context(context)
    if users and (needs_all or len(users) == len(found)):
        devices = f"devices {', '.join(users)} are" if len(users) > 1 else f"device {next(iter(users))} is"
        who = " and ".join(map(head_called, dict.fromkeys(users.values())))
        rest = f", and {', '.join(absent)} did not answer" if absent else ""
        advice = "a device serves one head at a time: end that one, or try again when it has ended"
        raise ClusterError(f"{devices} in use by {who}{rest}; {advice}")
    return users


def _user(context: zmq.Context[Any], device: Device, keys: Keyring | None) -> str:
    """The head that uses a device that is held; empty where that died, which holds it until its lease is
    over, or the device does not answer any more."""
    holder, until_s = Holder(), time.monotonic() + timeouts.HELD_S
    while time.monotonic() < until_s:
        welcome = greet(context, device, keys)
        if isinstance(welcome, Failure) or not welcome.holder:
            return ""
        if holder.is_there(welcome.lease_s, time.monotonic()):
            return welcome.holder
        time.sleep(AGAIN_S)
    return ""


def left_out_of(found: Sequence[Examined]) -> dict[str, str]:
    """Those that say of themselves what cannot be, with what that is."""
    left_out = {
        each.device.name: why for each in found if each.facts is not None and (why := why_insane(each.facts))
    }
    if len(left_out) == len(found):
        name, why = next(iter(left_out.items()))
        advice = "look at it, or take it out of the cluster file"
        raise ClusterError(f"device {name} says that it has {why}, which cannot be; {advice}")
    return left_out


def absent_timeouts(devices: int) -> ExamineTimeouts:
    """How long absent devices are waited for at the start, all at once."""
    return ExamineTimeouts(hello_s=timeouts.ABSENT_S, why_s=timeouts.ABSENT_WHY_S, at_once=max(1, devices))


def is_here(address: str) -> bool:
    """Whether an IP address is one of this machine's own."""
    return address.startswith("127.") or interface_of(address) is not None


def machine_of(address: str) -> str:
    """Where a device is: its host, `HERE` for any name of this machine."""
    host = split_address(address)[0]
    return HERE if is_here(host) else host


# ---------------------------------------------------------------------------------------------------- devices


def _profiles(
    found: Sequence[Examined], declared: Mapping[str, DeviceProfile | None]
) -> tuple[dict[str, DeviceProfile], dict[str, str]]:
    """The profile of each device, the first known: the cluster file's, the daemon's own, that of the slowest
    other one; and where each is from."""
    known: dict[str, DeviceProfile | None] = {}
    sources = {}
    for each in found:
        assert each.facts is not None
        name = each.device.name
        known[name], sources[name] = known_profile(each.facts, declared[name])
    told = [profile for profile in known.values() if profile is not None]
    fallback = min(told, key=DeviceProfile.bytes_per_s) if told else UNKNOWN
    return {name: profile or fallback for name, profile in known.items()}, sources


def known_profile(facts: Facts, declared: DeviceProfile | None) -> tuple[DeviceProfile | None, str]:
    """A device's profile as the cluster file or else its daemon has it, and which of them that was."""
    if declared is not None:
        return declared, DECLARED
    if facts.speed is None:
        return None, ASSUMED
    return profile_of(facts.speed, facts.memory_total_bytes), facts.speed.source


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


def usable_memory(found: Sequence[Examined], hosts: Mapping[str, str]) -> dict[str, int]:
    """What our processes may take on each device that told its facts. Daemons of one host share what is free
    there evenly."""
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


def _cores(
    found: Sequence[Examined], hosts: Mapping[str, str], sources: Mapping[str, str]
) -> dict[str, SharedCores]:
    told = {}
    for each in found:
        name = each.device.name
        assert each.facts is not None
        if (own := cores_of(each.facts, sources[name], hosts[name])) is not None:
            told[name] = own
    return told


def cores_of(facts: Facts, source: str, host: str) -> SharedCores | None:
    """The cores that a daemon would share with others of its host, or a drafter. None where its speed is the
    user's word, which is of a daemon as it is, and for a GPU."""
    if source not in MEASURED_ALONE or facts.accelerator:
        return None
    machine = HERE if is_here(host) else host
    return SharedCores(host=machine, cores=facts.cores, threads=min(facts.threads, facts.cores))


def sharing(sites: Sequence[Site], cores: Mapping[str, SharedCores]) -> tuple[Site, ...]:
    """The sites with what they share: with others of their machine, or the head's drafter. One that is alone
    is reckoned as where others stand by, so that leaving these out of the file changes no forecast."""
    return tuple(replace(each, shared=cores.get(each.name)) for each in sites)


def _sites(profiles: dict[str, DeviceProfile], memory: dict[str, int], precision: str) -> list[Site]:
    return [
        Site(name=name, profile=completed(profile, precision), memory_bytes=memory[name])
        for name, profile in profiles.items()
    ]


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
        end_context(context)
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
