"""Judges what was found out about a cluster: findings, each with what to do. Pure: knows no sockets and no
files.

A *problem* keeps the cluster from working, or makes it so slow that it is not worth it; a *warning* costs
speed or may do harm later; a *note* is good to know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec.core.cluster.agreement import Agreement, Lack
from flowspec.core.protocol.cluster_messages import Arithmetics
from flowspec.core.protocol.facts import Facts, Interface, KernelFacts, LinkFacts, Software
from flowspec.plan.memory import PROCESS_BYTES, mib
from flowspec.plan.speed import why_insane
from flowspec.rounding import rounded
from flowspec.runtime.health.examine import Examined
from flowspec.runtime.health.finding import NOTE, PROBLEM, WARNING, Finding, untried_gpu
from flowspec.runtime.health.heat import heat_findings
from flowspec.runtime.health.needs import ModelNeeds

CLOCK_S = 2.0
"""An offset above this is told."""
SLOT_ROWS = 16
"""Nodes of a usual pipeline slot."""
SLOT_S = 0.01
"""How long their hidden states may take from a device to the next; boards compute a slot in some ten
milliseconds."""
LATENCY_S = 0.01
"""Half a round trip above this costs every token more than most boards' layers do."""
NOMINAL_SHARE = 0.5
NOMINAL_MBPS_MAX = 1000
"""Of a faster link less than its speed is expected: one connection of ours does not fill it."""
OTHERS_SHARE = 0.25
HERE = "this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """A link by name, with the interfaces at its ends; `carries_rows`: hidden states travel on it."""

    name: str
    ends: tuple[Interface | None, Interface | None]
    found: LinkFacts
    carries_rows: bool


def diagnose(
    found: Sequence[Examined],
    here: Facts,
    needs: ModelNeeds | None,
    measured: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """All findings, the worst first, else in the order of the devices; `here` are the facts of this machine,
    and `measured` is what `this_machine` measured."""
    findings = [finding for each in found for finding in _of_device(each, here, needs)]
    if needs is not None:
        findings += _of_memory(found, needs)
    findings += _of_arithmetics(found, needs)
    findings += _of_interfaces(found)
    findings += _of_links(found, needs)
    if measured is not None:
        findings += _of_this_machine(measured)
    order = (PROBLEM, WARNING, NOTE)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _of_device(each: Examined, here: Facts, needs: ModelNeeds | None) -> Iterator[Finding]:
    name = each.device.name
    if each.failure is not None:
        yield Finding(PROBLEM, name, each.failure.check, each.failure.text, each.failure.advice)
    facts = each.facts
    if facts is None:
        return
    if why := why_insane(facts):
        text = f"it says that it has {why}, which cannot be: chat leaves it out"
        yield Finding(
            PROBLEM, name, "facts", text, "start its daemon again; is it the device that you think?"
        )
    if facts.is_held:
        text = "a head holds it now, so that its memory and its links are those of a busy device"
        yield Finding(NOTE, name, "held", text, "run the doctor again when nobody uses it")
    if abs(each.clock_offset_s) > CLOCK_S:
        way = "ahead of" if each.clock_offset_s > 0 else "behind"
        text = (
            f"its clock is {abs(each.clock_offset_s):.0f} s {way} this machine's; no answer depends on it, "
            "but logs cannot be compared"
        )
        advice = "switch its time synchronisation on: timedatectl set-ntp true"
        if abs(each.clock_offset_s) > 86400:
            text += ", and certificates of the hub may count as expired"
        yield Finding(WARNING, name, "clock", text, advice)
    yield from _of_software(name, facts, here.software)
    if facts.kernel is not None:
        yield from _of_kernel(name, facts.kernel)
    yield from heat_findings(name, facts.board)
    if needs is not None:
        yield from _of_model(name, facts.model, needs)


def _of_software(name: str, facts: Facts, here: Software) -> Iterator[Finding]:
    software, install = facts.software, "launch/install on each, or launch/boards install"
    if not software.transformers:
        text = "transformers is not installed there"
        yield Finding(PROBLEM, name, "transformers", text, "launch/boards install")
    elif software.transformers != here.transformers:
        versions = f"transformers {software.transformers} there, {here.transformers} here"
        text = f"{versions}: they may read a model's config otherwise"
        yield Finding(WARNING, name, "transformers", text, install)
    mine, its = (each.torch.partition("+")[0] for each in (here, software))
    if facts.accelerator and mine and mine != its:
        text = f"torch {software.torch} there, {here.torch} here: GPUs may share no arithmetic"
        yield Finding(WARNING, name, "torch", text, install)
    if here.python.split(".")[:2] != software.python.split(".")[:2]:
        text = f"Python {software.python} there, {here.python} here: its packages may come in other versions"
        yield Finding(NOTE, name, "python", text, "nothing, while transformers is the same")
    if facts.board.is_jetson and not software.cuda:
        torch = (
            f"whose torch ({software.torch}) was built without CUDA" if software.torch else "without torch"
        )
        text, advice = f"a Jetson {torch}: its GPU idles", "install JetPack's torch (docs/devices.md, Jetson)"
        yield Finding(PROBLEM, name, "cuda", text, advice)
    elif facts.board.is_jetson and not facts.accelerator:
        text = "a Jetson whose daemon does not use its GPU"
        advice = (
            "start its daemon without --device cpu; if it is so, torch and JetPack do not fit each other "
            "(docs/devices.md, Jetson)"
        )
        yield Finding(WARNING, name, "cuda", text, advice)
    elif facts.accelerator:
        yield untried_gpu(name)


def _of_kernel(name: str, kernel: KernelFacts) -> Iterator[Finding]:
    if not kernel.kernel:
        text = f"{kernel.dtype} cannot be computed there: {kernel.faults}"
        advice = "use another --dtype, or do what is said there, on that machine"
        yield Finding(PROBLEM, name, "kernels", text, advice)
    elif kernel.faults:
        text = (
            f"{kernel.dtype} is computed by the kernel {kernel.kernel} there, which may be slow, for "
            f"{kernel.faults}"
        )
        advice = "nothing, answers are right; for speed, install another gcc or clang on that machine"
        yield Finding(WARNING, name, "kernels", text, advice)


def _of_this_machine(measured: Mapping[str, Any]) -> Iterator[Finding]:
    if "fault" in measured:
        advice = "install the versions that FlowSpec's constraints folder has for this machine"
        yield Finding(PROBLEM, HERE, "accelerator", f"measuring it failed: {measured['fault']}", advice)
    elif not measured["no_gpu"]:
        yield untried_gpu(HERE)
        for kernel in measured["kernels"]:
            if not kernel["kernel"]:
                yield from _of_kernel(HERE, KernelFacts(**kernel))


def _of_arithmetics(found: Sequence[Examined], needs: ModelNeeds | None) -> Iterator[Finding]:
    """What the devices that run stages would agree on."""
    kernels = {}
    for each in found:
        is_used = needs is None or needs.of(each.device.name) is not None
        facts = each.facts
        if is_used and facts is not None and facts.kernel is not None and facts.kernel.arithmetics:
            kernels[each.device.name] = facts.kernel
    if len(kernels) < 2:
        return
    agreement = Agreement()
    for name, kernel in kernels.items():
        agreement.hear(name, Arithmetics(dtype=kernel.dtype, names=kernel.arithmetics))
    agreed = agreement.agree(tuple(kernels))
    if isinstance(agreed, Lack):
        advice = "use CPUs alone, or GPUs alike with the same versions on all (launch/boards install)"
        yield Finding(PROBLEM, agreed.device, "arithmetic", agreed.text, advice)
        return
    for name, kernel in kernels.items():
        if (best := kernel.arithmetics[0]) != agreed:
            text = f"it would compute {kernel.dtype} best with {best}, which not all have: all use {agreed}"
            advice = "nothing, answers are right; devices of the same kind share the best"
            yield Finding(NOTE, name, "arithmetic", text, advice)


def _of_model(name: str, state: str, needs: ModelNeeds) -> Iterator[Finding]:
    """What a daemon lacks of a model comes from the hub or from the head, so that it only costs time."""
    if state in ("", "same"):
        return
    is_local = os.path.isabs(needs.model)
    what = os.path.basename(needs.model) if is_local else needs.model
    lacks = {
        "none": "is not there",
        "part": "is there without all of its weights",
        "other": "is there with other content than here",
    }[state]
    source = (
        "this machine sends it its layers"
        if is_local
        else "its layers come from the hub or from this machine"
    )
    text = f"{what} {lacks}: {source} when they are first needed, and it stores them"
    advice = (
        "nothing, or to save the time: copy it to the same place there"
        if is_local
        else f"nothing, or beforehand: hf download {what}"
    )
    yield Finding(NOTE, name, "weights", text, advice)


# ------------------------------------------------------------------------------------------------------
# memory


def _of_memory(found: Sequence[Examined], needs: ModelNeeds) -> Iterator[Finding]:
    """Daemons at the same host share what is free there, in the order of the pipeline."""
    left: dict[str, int] = {}
    for each in found:
        need, facts = needs.of(each.device.name), each.facts
        memory = needs.layer if need is None else need.memory
        if facts is None:
            continue
        limits = [size for size in (facts.memory_limit_bytes, each.device.memory_bytes) if size]
        if facts.accelerator and not facts.board.is_jetson:
            where, needed, allowed = (
                f"on {facts.accelerator}",
                memory.total_bytes,
                min(limits, default=facts.accelerator_free_bytes),
            )
            free = facts.accelerator_free_bytes
        else:
            host = each.device.address.rpartition(":")[0]
            where, needed = "there", max(0, PROCESS_BYTES + memory.total_bytes - facts.resident_bytes)
            free = left.get(host, facts.memory_available_bytes)
            allowed = min(limits, default=free + facts.resident_bytes) - facts.resident_bytes
            left[host] = max(0, free - needed) if need is not None else free
        have = max(0, min(free, allowed))
        if needed <= have and need is None:
            text = "chat leaves it out: the planner predicts more tokens/s without it"
            advice = "nothing; --all-devices uses it all the same, and flowspec plan tells what limits a plan"
            yield Finding(NOTE, each.device.name, "plan", text, advice)
        elif needed > have:
            is_limited = allowed < free
            why = f"is allowed ({mib(min(limits))})" if is_limited else f"is free {where}"
            what = (
                "a single layer and its process"
                if need is None
                else f"layers {need.first} to {need.end - 1} and their process"
            )
            text = (
                f"{what} need {mib(needed)} more (weights {mib(memory.weight_bytes)}, "
                f"cache {mib(memory.cache_bytes)} for {needs.context} tokens), {mib(have)} of that {why}: "
                f"{mib(needed - have)} short"
            )
            advice = (
                "give it fewer layers (--layers), take a smaller --context or --dtype; flowspec plan tells "
                "what fits"
            )
            if is_limited:
                advice = f"allow it more (daemon --memory, memory in the cluster file), {advice}"
            if need is None:
                text += "; chat leaves it out"
            yield Finding(WARNING if need is None else PROBLEM, each.device.name, "memory", text, advice)


# -------------------------------------------------------------------------------------------------------
# links


def _of_interfaces(found: Sequence[Examined]) -> Iterator[Finding]:
    own = {each.own.name: each.own for each in found if each.own is not None and each.facts is not None}
    ends = [(HERE, interface) for interface in own.values()]
    for each in found:
        if each.facts is None:
            continue
        if each.facts.interface is None:
            text = (
                "it is reached by an address that none of its interfaces has: through a container, a tunnel "
                "or address translation"
            )
            advice = "give its own address in the cluster file, or let the container use its host's network"
            yield Finding(WARNING, each.device.name, "interface", text, advice)
        else:
            ends.append((each.device.name, each.facts.interface))
    for name, interface in ends:
        yield from _of_interface(name, interface)
    sizes = {interface.mtu for _, interface in ends if interface.mtu and interface.kind != "loopback"}
    if len(sizes) > 1:
        text = (
            f"interfaces have different MTUs ({', '.join(map(str, sorted(sizes)))}): packets may be split "
            "or lost"
        )
        yield Finding(WARNING, "all", "mtu", text, "set the same MTU everywhere, 1500 if in doubt")


def _of_interface(name: str, interface: Interface) -> Iterator[Finding]:
    advice = {
        "wi-fi": "use a cable: Wi-Fi is slower, and its delays vary with everything around it",
        "bridge": "use the card itself, or make sure that the bridge has no slow or filtered port",
        "tunnel": "use an address of the local network: tunnels cost delay and computing",
        "virtual": "let the daemon run outside the container or virtual machine, or with its host's network",
    }.get(interface.kind)
    if advice is not None:
        what = {
            "wi-fi": "Wi-Fi",
            "bridge": "a virtual bridge",
            "tunnel": "a tunnel",
            "virtual": "a virtual interface",
        }[interface.kind]
        yield Finding(WARNING, name, "interface", f"it is reached over {what}, {interface.name}", advice)


def _of_links(found: Sequence[Examined], needs: ModelNeeds | None) -> Iterator[Finding]:
    paths = []
    for each, following in zip(found, [*found[1:], None], strict=True):
        own = each.facts.interface if each.facts is not None else None
        if each.from_head is not None:
            name = f"{HERE} -> {each.device.name}"
            paths.append(_Path(name=name, ends=(each.own, own), found=each.from_head, carries_rows=False))
        if each.onward is not None and following is not None and following.facts is not None:
            name = f"{each.device.name} -> {following.device.name}"
            paths.append(
                _Path(
                    name=name,
                    ends=(own, following.facts.interface),
                    found=each.onward,
                    carries_rows=_is_used(needs, each, following),
                )
            )
    rates = sorted(path.found.bandwidth_mbps for path in paths if not path.found.problem)
    for path in paths:
        yield from _of_link(path, rates[len(rates) // 2] if len(rates) > 2 else 0.0, needs)


def _is_used(needs: ModelNeeds | None, *ends: Examined) -> bool:
    return needs is None or all(needs.of(end.device.name) is not None for end in ends)


def _of_link(path: _Path, usual_mbps: float, needs: ModelNeeds | None) -> Iterator[Finding]:
    """At most one finding about the rate, the gravest."""
    found, name = path.found, path.name
    if found.problem:
        advice = (
            "can the one reach the other's address and port? a firewall or an address of another network "
            "are usual causes"
        )
        yield Finding(PROBLEM, name, "link", f"it could not be measured: {found.problem}", advice)
        return
    if found.latency_s > LATENCY_S:
        text = f"a message takes {1000 * found.latency_s:.0f} ms, and every token waits for every link"
        yield Finding(WARNING, name, "latency", text, "use a cable, and no device between but a switch")
    mbps = found.bandwidth_mbps
    slot_s = 0.0 if needs is None else SLOT_ROWS * needs.row_bytes * 8e-6 / max(mbps, 1e-9)
    speeds = [
        end.speed_mbps for end in path.ends if end is not None and end.kind == "wired" and end.speed_mbps
    ]
    nominal = min(NOMINAL_MBPS_MAX, *speeds) if len(speeds) == 2 else 0
    if path.carries_rows and slot_s > SLOT_S:
        text = (
            f"{rate(mbps)}: the hidden states of {SLOT_ROWS} nodes take {1000 * slot_s:.0f} ms, so that the "
            "devices wait for it"
        )
        advice = "use a gigabit cable and switch; else fewer devices, or a smaller --tree-nodes"
        yield Finding(PROBLEM, name, "link", text, advice)
    elif mbps < NOMINAL_SHARE * nominal:
        text = f"{rate(mbps)}, where both ends are wired for {nominal} Mbit/s or more"
        advice = (
            "look for other traffic, a slow switch or port between them, or a bad cable (ethtool shows "
            "errors)"
        )
        yield Finding(WARNING, name, "link", text, advice)
    elif mbps < OTHERS_SHARE * min(usual_mbps, NOMINAL_MBPS_MAX):
        text = f"{rate(mbps)}, while the others' median is {rate(usual_mbps)}"
        yield Finding(WARNING, name, "link", text, "compare its cable, port and card with the others'")


def rate(mbps: float) -> str:
    """A link's rate for people."""
    return f"{rounded(mbps)} Mbit/s"
