"""Asks a cluster's daemons what a plan needs: how fast they are, what memory is free, how far they are from
each other.

Takes some hundredths of a second for each device: links are measured at a glance, from here one after
another, and those between machines in pairs at the same time, as long as `LINKS_S` allows. Rates and delays
are rounded, so that the same cluster gets the same plan tomorrow.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import psutil

from flowspec.core.cluster.holder import Holder, head_called
from flowspec.core.protocol.device_messages import AskFacts, Facts, LinkFacts
from flowspec.errors import ClusterError
from flowspec.host_memory import host_memory
from flowspec.plan.memory import PROCESS_BYTES
from flowspec.plan.profile import DeviceProfile, completed, profile_of, why_insane
from flowspec.plan.sites import Network, SharedCores, Site
from flowspec.plan.timing import LinkSpec
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device
from flowspec.runtime.cluster_file import LINK_DEFAULT, declared_profile, read_links
from flowspec.runtime.device.links import (
    GLANCE,
    HERE,
    REACHABLE,
    DeviceReport,
    Question,
    Tell,
    ask,
    machine_of,
    measure_link,
    measure_onward,
)
from flowspec.runtime.device.report import own_speed
from flowspec.runtime.machine import Machine
from flowspec.runtime.pipeline_connections import Progress, told_of
from flowspec.runtime.security.keyring import Keyring

LOOK_S = 1.0
"""For an answer before anything slow is imported; who takes longer is asked as ever."""
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
ASSUMED, DECLARED, MEASURED = "assumed", "declared", "measured"
MEASURED_ALONE = ("kept", "probed", ASSUMED)
"""Sources of a speed that says nothing of other daemons on the machine."""
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
Links = dict[frozenset[str], LinkSpec]
"""Between machines (`machine_of`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found: the sites of a request, with the head's last where no daemon is on its machine, and
    where each profile is from: `declared` in the cluster file, one of `SPEED_SOURCES`, or `assumed`.

    `head` is as in `PlanRequest`. `left_out` are devices that say of themselves what cannot be, with what
    that is, `absent` those that cannot be had, with why: they did not answer, or others use them (those
    `in_use`, with the machine of each). On those that are `limited` the user allows less memory than is free.
    The `links` are `declared` in the cluster file, or `measured` between machines. `reports` are what the
    devices of the sites said.
    """

    sites: tuple[Site, ...]
    network: Network
    head: str | None
    sources: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    in_use: Mapping[str, str] = field(default_factory=dict)
    limited: tuple[str, ...] = ()
    links: str = DECLARED
    measured: Links = field(default_factory=dict)
    reports: tuple[DeviceReport, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Surveyor:
    """Asks the `devices` of a cluster file, by its `keys`, for a model in a `precision`."""

    devices: tuple[Device, ...]
    cluster: Path
    precision: str
    keys: Keyring | None

    def survey(
        self,
        *,
        head_drafts: bool,
        needs_all: bool = True,
        needs_free: bool = False,
        tell: Progress = lambda text, share: None,
    ) -> Survey:
        """Asks all; raises `ClusterError` for a device that does not answer, `InputError` for a profile or
        link that cannot be.

        Where not all are needed, those that do not answer within `timeouts.ABSENT_S` are `absent`; raises
        `ClusterError` where none does, and for one that is there, but has other keys or another version. A
        device whose facts cannot be true is left out; raises `ClusterError` where no other is there. With
        `needs_free` one that another head uses cannot be had either.

        Several threads `tell` whose answers are waited for. With `head_drafts` the head's machine must know
        how fast it is, too, which it may have to probe.
        """
        network = self._declared_links()
        reports, absent = self._ask(self.devices, needs_all=needs_all, tell=tell)
        left_out = _left_out_of(reports)
        reports = [each for each in reports if each.device.name not in left_out]
        users = _users_of(reports, absent, self.keys, needs_all=needs_all) if needs_free else {}
        absent |= {name: f"in use by {head_called(head)}" for name, head in users.items()}
        in_use = {each.device.name: each.machine for each in reports if each.device.name in users}
        reports = [each for each in reports if each.device.name not in users]
        measured = {} if network is not None else self._measure_links(reports)
        survey = self._compose(reports, measured, network, drafts=head_drafts)
        return replace(survey, left_out=left_out, absent=absent, in_use=in_use)

    def join(self, survey: Survey, name: str) -> Survey:
        """The survey with one of the absent in it; raises `ClusterError` where that tells no plan what it
        needs. Only the link between it and the head is measured: those between stages carry answers."""
        network = self._declared_links()
        reports, _ = self._ask([each for each in self.devices if each.name == name], needs_all=False)
        _left_out_of(reports)
        measured = {**survey.measured, **({} if network is not None else self._measure_from_here(reports))}
        reports = sorted([*survey.reports, *reports], key=lambda each: self.devices.index(each.device))
        head = next((each for each in survey.sites if not each.runs_stages), None)
        return replace(
            self._compose(reports, measured, network, head),
            left_out=survey.left_out,
            absent={each: why for each, why in survey.absent.items() if each != name},
            in_use={each: machine for each, machine in survey.in_use.items() if each != name},
        )

    def _declared_links(self) -> Network | None:
        return read_links(self.cluster, [device.name for device in self.devices])

    def _ask(
        self, devices: Sequence[Device], *, needs_all: bool, tell: Progress = lambda text, share: None
    ) -> tuple[list[DeviceReport], dict[str, str]]:
        declared = {device.name for device in devices if declared_profile(device, self.cluster) is not None}
        return ask_present(
            devices,
            self.keys,
            lambda device: AskFacts(speed=device.name not in declared),
            needs_all=needs_all,
            tell=lambda name, doing, share: tell(told_of(name, doing), share),
        )

    def _compose(
        self,
        reports: Sequence[DeviceReport],
        measured: Links,
        network: Network | None,
        head: Site | None = None,
        *,
        drafts: bool = False,
    ) -> Survey:
        """What reports come to. The profile of a device is the first known: the cluster file's, the daemon's
        own, that of the slowest other one."""
        profiles, sources, machines = dict[str, DeviceProfile | None](), dict[str, str](), dict[str, str]()
        for each in reports:
            name, facts = each.device.name, facts_of(each)
            machines[name], profiles[name] = each.machine, declared_profile(each.device, self.cluster)
            sources[name] = ASSUMED if profiles[name] is None else DECLARED
            if profiles[name] is None and facts.speed is not None:
                profiles[name] = profile_of(facts.speed, facts.memory_total_bytes)
                sources[name] = facts.speed.source
        known = [profile for profile in profiles.values() if profile is not None]
        slowest, usable = min(known, key=DeviceProfile.bytes_per_s, default=UNKNOWN), usable_memory(reports)
        sites = [
            Site(
                name=name,
                profile=completed(profiles[name] or slowest, self.precision),
                memory_bytes=usable[name],
                shared=_cores_of(facts_of(each), sources[name], each.machine),
            )
            for name, each in zip(profiles, reports, strict=True)
        ]
        here = [name for name, machine in machines.items() if machine == HERE]
        if head is not None or not here:
            sites.append(head or self._head_site(sites, drafts))
            here, machines[sites[-1].name] = [sites[-1].name], HERE
        return Survey(
            sites=tuple(sites),
            network=network or _network_of(machines, measured),
            # With all daemons here the head shares a machine with any of them: the plan takes the best one.
            head=None if len(here) == len(sites) else here[0],
            sources=sources,
            limited=tuple(each.device.name for each in reports if _is_limited(each)),
            links=MEASURED if network is None else DECLARED,
            measured=measured,
            reports=tuple(reports),
        )

    def _head_site(self, sites: Sequence[Site], drafts: bool) -> Site:
        """This machine, which runs no stage; how fast it is counts only if it drafts."""
        speed, memory = own_speed(Machine()) if drafts else None, host_memory()
        profile = sites[0].profile if speed is None else profile_of(speed, memory.total)
        return Site(
            name=f"{HERE}, the head" if HERE in (each.name for each in sites) else HERE,
            profile=completed(profile, self.precision),
            memory_bytes=memory.available + psutil.Process().memory_info().rss,
            runs_stages=False,
        )

    def _measure_from_here(self, reports: Sequence[DeviceReport]) -> Links:
        """Links to other machines as they are now."""
        return {
            frozenset((HERE, machine)): _link_of(measure_link(device, self.keys, GLANCE)) or LINK_DEFAULT
            for machine, device in _away(reports).items()
        }

    def _measure_links(self, reports: Sequence[DeviceReport]) -> Links:
        """Links from here, and between other machines, as one of both measures them while there is time."""
        links, until_s = self._measure_from_here(reports), time.monotonic() + LINKS_S
        for pairs in rounds(list(_away(reports).values())):
            if time.monotonic() > until_s:
                break
            measured = measure_onward(pairs, self.keys, is_brief=True)
            for (one, other), link in zip(pairs, measured, strict=True):
                if (spec := _link_of(link)) is not None:
                    links[frozenset((machine_of(one.address), machine_of(other.address)))] = spec
        return links


# ----------------------------------------------------------------------------------------------- who is there


def refuse_silent(
    devices: Sequence[Device], keys: Keyring | None, *, needs_all: bool, hint: str = ""
) -> None:
    """Raises the survey's `ClusterError` where no device answers, where one does not of which all are needed,
    and where one refuses us, as for its keys; the `hint` then says what else to do.

    This comes before a head imports what it works with, which takes seconds, and many on a board: the most
    common mistake is that no daemon runs. Whoever answers is left to the survey.
    """
    silent = [each.failure for each in ask(devices, keys, within_s=LOOK_S) if each.failure]
    is_refused = any(failure.check != REACHABLE for failure in silent)
    if is_refused or (silent and (needs_all or len(silent) == len(devices))):
        ask_present(devices, keys, needs_all=needs_all, hint=hint)


def ask_present(
    devices: Sequence[Device],
    keys: Keyring | None,
    question: Question | None = None,
    *,
    needs_all: bool,
    hint: str = "",
    tell: Tell = lambda device, doing, share: None,
) -> tuple[list[DeviceReport], dict[str, str]]:
    """Those that are there, and why others are absent; raises `ClusterError` where none is there, one is not
    of which all are needed, with the `hint` what to do then, and where one refuses us."""
    present, absent = list[DeviceReport](), dict[str, str]()
    hello_s = timeouts.CONNECT_S if needs_all else timeouts.ABSENT_S
    reports = ask(devices, keys, question, hello_s=hello_s, tell=tell)
    for each in reports:
        if each.failure is None:
            present.append(each)
        elif needs_all or each.failure.check != REACHABLE:
            ending = f"; {hint}" if hint and each.failure.check == REACHABLE else ""
            raise ClusterError(f"{_explain(each)}{ending}")
        else:
            absent[each.device.name] = str(each.failure)
    if not present:
        first = _explain(reports[0])
        many = f"none of the {len(reports)} devices answers ({', '.join(absent)}); the first is {first}"
        raise ClusterError(first if len(reports) == 1 else many)
    return present, absent


def _explain(report: DeviceReport) -> str:
    return f"device {report.device.name} at {report.device.address}: {report.failure}"


def _users_of(
    reports: Sequence[DeviceReport], absent: Mapping[str, str], keys: Keyring | None, *, needs_all: bool
) -> dict[str, str]:
    """The heads that use some of these devices, by name; raises `ClusterError` where all are needed, or none
    is free.

    None uses a device whose head died, which holds it until its lease is over.
    """
    held = [each.device for each in reports if each.welcome is not None and each.welcome.holder]
    holders, users = {device.name: Holder() for device in held}, dict[str, str]()
    until_s = time.monotonic() + timeouts.HELD_S
    while held and time.monotonic() < until_s:
        answers, held = ask(held, keys), []
        for name, device, welcome in ((each.device.name, each.device, each.welcome) for each in answers):
            if welcome is not None and welcome.holder:
                if holders[name].is_there(welcome.lease_s, time.monotonic()):
                    users[name] = welcome.holder
                else:
                    held.append(device)
        if held:
            time.sleep(AGAIN_S)
    if users and (needs_all or len(users) == len(reports)):
        devices = f"devices {', '.join(users)} are" if len(users) > 1 else f"device {next(iter(users))} is"
        who = " and ".join(map(head_called, dict.fromkeys(users.values())))
        rest = f", and {', '.join(absent)} did not answer" if absent else ""
        advice = "a device serves one head at a time: end that one, or try again when it has ended"
        raise ClusterError(f"{devices} in use by {who}{rest}; {advice}")
    return users


def _left_out_of(reports: Sequence[DeviceReport]) -> dict[str, str]:
    """Those that say of themselves what cannot be, with what that is."""
    left_out = {each.device.name: why for each in reports if (why := why_insane(facts_of(each)))}
    if len(left_out) == len(reports):
        name, why = next(iter(left_out.items()))
        advice = "look at it, or take it out of the cluster file"
        raise ClusterError(f"device {name} says that it has {why}, which cannot be; {advice}")
    return left_out


def facts_of(report: DeviceReport) -> Facts:
    assert report.facts is not None, "a device without facts has a failure"
    return report.facts


# ------------------------------------------------------------------------------------ where, memory and cores


def usable_memory(reports: Sequence[DeviceReport]) -> dict[str, int]:
    """What our processes may take on each device that told its facts, with what they have taken already.
    Daemons of one machine share what is free there; a GPU's own memory holds slices, and no process."""
    beside, taken, usable = Counter[str](), Counter[str](), dict[str, int]()
    there = [(each, each.machine, each.facts) for each in reports if each.facts is not None]
    for _, machine, facts in there:
        beside[machine] += 1
        taken[machine] += facts.resident_bytes
    for each, machine, facts in there:
        free_bytes = (facts.memory_available_bytes + taken[machine]) // beside[machine]
        if facts.accelerator and not facts.board.is_jetson:
            free_bytes = facts.accelerator_free_bytes // beside[machine] + PROCESS_BYTES
        usable[each.device.name] = min([free_bytes // MEMORY_STEP * MEMORY_STEP, *limits_of(each)])
    return usable


def limits_of(report: DeviceReport) -> list[int]:
    """What the user allows us of a device's memory, in bytes."""
    return [size for size in (facts_of(report).memory_limit_bytes, report.device.memory_bytes) if size]


def _is_limited(report: DeviceReport) -> bool:
    return min(limits_of(report), default=math.inf) < facts_of(report).memory_available_bytes


def _cores_of(facts: Facts, source: str, machine: str) -> SharedCores | None:
    """The cores that a daemon would share with others of its machine, or the head's drafter, also where it is
    alone there: leaving others out of the file changes no forecast. None where its speed is the user's word,
    which is of a daemon as it is, and for a GPU."""
    if source not in MEASURED_ALONE or facts.accelerator:
        return None
    return SharedCores(host=machine, cores=facts.cores, threads=min(facts.threads, facts.cores))


# ------------------------------------------------------------------------------------------------------ links


def rounds(devices: Sequence[Device]) -> Iterator[list[tuple[Device, Device]]]:
    """Every pair once, in rounds in which each device has one partner at most (the circle method of
    tournaments)."""
    circle: list[Device | None] = [*devices, *([None] if len(devices) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        circle.insert(1, circle.pop())


def _network_of(machines: Mapping[str, str], links: Links) -> Network:
    """The links between devices on these machines; one that is not known is as slow and as late as the worse
    of both ends' links from here."""
    pairs = {}
    for one, other in combinations(machines, 2):
        ends = frozenset((machines[one], machines[other]))
        worse = [links[frozenset((HERE, end))] for end in ends if end != HERE]
        pairs[frozenset((one, other))] = links.get(ends) or (
            LOOPBACK
            if len(ends) == 1
            else LinkSpec(
                bandwidth_mbps=min(link.bandwidth_mbps for link in worse),
                delay_s=max(link.delay_s for link in worse),
            )
        )
    usual = Counter(pairs.values()).most_common(1)[0][0] if pairs else LOOPBACK
    return Network(default=usual, pairs={pair: link for pair, link in pairs.items() if link != usual})


def _away(reports: Sequence[DeviceReport]) -> dict[str, Device]:
    """A device on each other machine, the first there."""
    away = dict[str, Device]()
    for each in reports:
        if each.machine != HERE:
            away.setdefault(each.machine, each.device)
    return away


def _link_of(facts: LinkFacts) -> LinkSpec | None:
    """A measured link on the grid; None where it could not be measured."""
    if facts.problem or not facts.bandwidth_mbps or not facts.latency_s:
        return None
    return LinkSpec(bandwidth_mbps=_on_grid(facts.bandwidth_mbps), delay_s=_on_grid(facts.latency_s))


def _on_grid(value: float) -> float:
    """The nearest of `STEPS` steps to a factor of ten, with two digits."""
    return float(f"{10 ** (round(STEPS * math.log10(value)) / STEPS):.2g}")
