"""Judges what was found out about a cluster: findings, each with what to do. Pure: knows no sockets and no
files.

A *problem* keeps the cluster from working, or makes it so slow that it is not worth it; a *warning* costs
speed or may do harm later; a *note* is good to know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flowspec.core.cluster.agreement import Agreement, Lack
from flowspec.core.protocol.cluster_messages import Arithmetics
from flowspec.core.protocol.device_messages import Board, Facts, Interface, KernelFacts, LinkFacts, Software
from flowspec.plan.memory import PROCESS_BYTES, mib
from flowspec.plan.speed import why_insane
from flowspec.rounding import rounded
from flowspec.runtime.health.examine import Examined
from flowspec.runtime.health.needs import ModelNeeds

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
HERE = "this machine"
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
CAP_SHARE = 0.95
"""A cap on the processor's clock above this share of what it can do is not told."""
PI_BITS = {0: "under-voltage", 1: "a capped clock", 2: "throttling", 3: "the soft temperature limit"}
"""Of the Raspberry Pi's `get_throttled`: now, and 16 bits higher since it was started."""
POWER, COOLING = "use its maker's power supply and a short cable", "give it a heat sink and a fan"
INSTALL = "launch/install on each, or launch/boards install"
KINDS = {
    "wi-fi": ("Wi-Fi", "use a cable: Wi-Fi is slower, and its delays vary with everything around it"),
    "bridge": (
        "a virtual bridge",
        "use the card itself, or make sure that the bridge has no slow or filtered port",
    ),
    "tunnel": ("a tunnel", "use an address of the local network: tunnels cost delay and computing"),
    "virtual": (
        "a virtual interface",
        "let the daemon run outside the container or virtual machine, or with its host's network",
    ),
}
"""Of interfaces that cost speed: what people call them, and what to do."""
LACKS = {
    "none": "is not there",
    "part": "is there without all of its weights",
    "other": "is there with other content than here",
}
"""What a device lacks of a model, by `MODEL_STATES`."""


class Finding(NamedTuple):
    """`check` names what was looked at, `device` a device or a link, `text` says what is, `advice` what to
    do."""

    severity: str
    device: str
    check: str
    text: str
    advice: str


def diagnose(
    found: Sequence[Examined], here: Software, needs: ModelNeeds, measured: Mapping[str, Any]
) -> list[Finding]:
    """All findings, the worst first, else in the order of the devices; `here` is the software of this
    machine, and `measured` what `this_machine` measured, if it did."""
    findings = [
        *(finding for each in found for finding in _of_device(each, here, needs)),
        *_of_memory(found, needs),
        *_of_arithmetics(found, needs),
        *_of_interfaces(found),
        *_of_links(found, needs),
        *_of_this_machine(measured),
    ]
    order = (PROBLEM, WARNING, NOTE)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _of_device(each: Examined, here: Software, needs: ModelNeeds) -> Iterator[Finding]:
    name, facts = each.device.name, each.facts
    if each.failure is not None:
        yield Finding(PROBLEM, name, *each.failure)
    if facts is None:
        return
    if why := why_insane(facts):
        text = f"it says that it has {why}, which cannot be: chat leaves it out"
        advice = "start its daemon again; is it the device that you think?"
        yield Finding(PROBLEM, name, "facts", text, advice)
    if facts.is_held:
        text = "a head holds it now, so that its memory and its links are those of a busy device"
        yield Finding(NOTE, name, "held", text, "run the doctor again when nobody uses it")
    if (offset_s := abs(each.clock_offset_s)) > CLOCK_S:
        way = "ahead of" if each.clock_offset_s > 0 else "behind"
        harm = "no answer depends on it, but logs cannot be compared"
        if offset_s > 86400:
            harm += ", and certificates of the hub may count as expired"
        text = f"its clock is {offset_s:.0f} s {way} this machine's; {harm}"
        advice = "switch its time synchronisation on: timedatectl set-ntp true"
        yield Finding(WARNING, name, "clock", text, advice)
    yield from _of_software(name, facts, here)
    if facts.kernel is not None:
        yield from _of_kernel(name, facts.kernel)
    yield from _of_board(name, facts.board)
    if facts.model in LACKS:
        yield _of_model(name, facts.model, needs.model)


def _of_software(name: str, facts: Facts, here: Software) -> Iterator[Finding]:
    there = facts.software
    if not there.transformers:
        text = "transformers is not installed there"
        yield Finding(PROBLEM, name, "transformers", text, "launch/boards install")
    elif there.transformers != here.transformers:
        versions = f"transformers {there.transformers} there, {here.transformers} here"
        text = f"{versions}: they may read a model's config otherwise"
        yield Finding(WARNING, name, "transformers", text, INSTALL)
    if facts.accelerator and here.torch and here.torch.partition("+")[0] != there.torch.partition("+")[0]:
        text = f"torch {there.torch} there, {here.torch} here: GPUs may share no arithmetic"
        yield Finding(WARNING, name, "torch", text, INSTALL)
    if here.python.split(".")[:2] != there.python.split(".")[:2]:
        text = f"Python {there.python} there, {here.python} here: its packages may come in other versions"
        yield Finding(NOTE, name, "python", text, "nothing, while transformers is the same")
    if facts.board.is_jetson and not there.cuda:
        torch = f"whose torch ({there.torch}) was built without CUDA" if there.torch else "without torch"
        advice = "install JetPack's torch (docs/devices.md, Jetson)"
        yield Finding(PROBLEM, name, "cuda", f"a Jetson {torch}: its GPU idles", advice)
    elif facts.accelerator:
        yield _untried_gpu(name)
    elif facts.board.is_jetson:
        fit = "if it is so, torch and JetPack do not fit each other (docs/devices.md, Jetson)"
        advice = f"start its daemon without --device cpu; {fit}"
        yield Finding(WARNING, name, "cuda", "a Jetson whose daemon does not use its GPU", advice)


def _untried_gpu(name: str) -> Finding:
    text = (
        "FlowSpec's makers ran it on two servers' GPUs and on no Jetson: kernels are tried before they are "
        "used, but how fast they are is an estimate"
    )
    advice = "measure it with flowspec profile, and send in what flowspec doctor --local 1 --json prints"
    return Finding(NOTE, name, "cuda", text, advice)


def _of_kernel(name: str, kernel: KernelFacts) -> Iterator[Finding]:
    if not kernel.kernel:
        text = f"{kernel.dtype} cannot be computed there: {kernel.faults}"
        advice = "use another --dtype, or do what is said there, on that machine"
        yield Finding(PROBLEM, name, "kernels", text, advice)
    elif kernel.faults:
        slow = f"which may be slow, for {kernel.faults}"
        text = f"{kernel.dtype} is computed by the kernel {kernel.kernel} there, {slow}"
        advice = "nothing, answers are right; for speed, install another gcc or clang on that machine"
        yield Finding(WARNING, name, "kernels", text, advice)


def _of_board(name: str, board: Board) -> Iterator[Finding]:
    """What throttles it now, what did, what holds its clocks down."""
    bits = board.throttled or 0
    for shift, severity, when in ((0, PROBLEM, "now"), (16, WARNING, "since it was started, though not now")):
        seen = [bit for bit in PI_BITS if bits >> (bit + shift) & 1 and not (shift and bits >> bit & 1)]
        if seen:
            text = f"the firmware reports {', '.join(PI_BITS[bit] for bit in seen)}, {when}"
            advice = POWER if seen == [0] else COOLING if 0 not in seen else f"{POWER}; {COOLING}"
            yield Finding(severity, name, "throttling", text, advice)
    if board.is_capped:
        text = "its kernel holds its clocks down because of heat, now"
        yield Finding(PROBLEM, name, "throttling", text, COOLING)
    if board.celsius is not None and board.trip_c is not None and board.celsius >= board.trip_c:
        text = f"{board.celsius:.0f} degrees, and it throttles from {board.trip_c:.0f} on"
        yield Finding(WARNING, name, "throttling", text, COOLING)
    clock, most = board.cpu_mhz, board.cpu_max_mhz
    if clock is not None and most is not None and clock < CAP_SHARE * most:
        text = f"its processor may run at {clock:.0f} MHz of {most:.0f}"
        advice = "look for a power mode (nvpmodel on a Jetson), a battery saver, or heat"
        yield Finding(WARNING, name, "throttling", text, advice)
    if board.power_mode and not board.power_mode.upper().startswith("MAXN"):
        text = f"its power mode is {board.power_mode}, not MAXN"
        advice = "if its supply and cooling allow: sudo nvpmodel -m 0, then sudo jetson_clocks"
        yield Finding(WARNING, name, "power mode", text, advice)


def _of_model(name: str, state: str, model: str) -> Finding:
    """What a daemon lacks of a model comes from the hub or from the head, so that it only costs time."""
    if os.path.isabs(model):
        what, source = os.path.basename(model), "this machine sends it its layers"
        advice = "nothing, or to save the time: copy it to the same place there"
    else:
        what, source = model, "its layers come from the hub or from this machine"
        advice = f"nothing, or beforehand: hf download {what}"
    text = f"{what} {LACKS[state]}: {source} when they are first needed, and it stores them"
    return Finding(NOTE, name, "weights", text, advice)


def _of_arithmetics(found: Sequence[Examined], needs: ModelNeeds) -> Iterator[Finding]:
    """What the devices that run stages would agree on."""
    kernels = {
        each.device.name: each.facts.kernel
        for each in found
        if needs.of(each.device.name) and each.facts and each.facts.kernel and each.facts.kernel.arithmetics
    }
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


def _of_this_machine(measured: Mapping[str, Any]) -> Iterator[Finding]:
    if "fault" in measured:
        advice = "install the versions that FlowSpec's constraints folder has for this machine"
        yield Finding(PROBLEM, HERE, "accelerator", f"measuring it failed: {measured['fault']}", advice)
    elif measured and not measured["no_gpu"]:
        yield _untried_gpu(HERE)
        for kernel in measured["kernels"]:
            if not kernel["kernel"]:
                yield from _of_kernel(HERE, KernelFacts(**kernel))


def _of_memory(found: Sequence[Examined], needs: ModelNeeds) -> Iterator[Finding]:
    """Daemons at the same host share what is free there, in the order of the pipeline."""
    left: dict[str, int] = {}
    for each in found:
        name, need, facts = each.device.name, needs.of(each.device.name), each.facts
        if facts is None:
            continue
        memory = needs.layer if need is None else need.memory
        limits = [size for size in (facts.memory_limit_bytes, each.device.memory_bytes) if size]
        if facts.accelerator and not facts.board.is_jetson:
            where, needed = f"on {facts.accelerator}", memory.total_bytes
            free = facts.accelerator_free_bytes
            allowed = min(limits, default=free)
        else:
            host = each.device.address.rpartition(":")[0]
            where, needed = "there", max(0, PROCESS_BYTES + memory.total_bytes - facts.resident_bytes)
            free = left.get(host, facts.memory_available_bytes)
            allowed = min(limits, default=free + facts.resident_bytes) - facts.resident_bytes
            left[host] = free if need is None else max(0, free - needed)
        have = max(0, min(free, allowed))
        if needed > have:
            what = f"layers {need.first} to {need.end - 1} and their" if need else "a single layer and its"
            cache = f"cache {mib(memory.cache_bytes)} for {needs.context} tokens"
            why = f"is allowed ({mib(min(limits))})" if allowed < free else f"is free {where}"
            text = (
                f"{what} process need {mib(needed)} more (weights {mib(memory.weight_bytes)}, {cache}), "
                f"{mib(have)} of that {why}: {mib(needed - have)} short"
            )
            text += "" if need else "; chat leaves it out"
            advice = (
                "give it fewer layers (--layers), take a smaller --context or --dtype; flowspec plan tells "
                "what fits"
            )
            if allowed < free:
                advice = f"allow it more (daemon --memory, memory in the cluster file), {advice}"
            yield Finding(WARNING if need is None else PROBLEM, name, "memory", text, advice)
        elif need is None:
            text = "chat leaves it out: the planner predicts more tokens/s without it"
            advice = "nothing; --all-devices uses it all the same, and flowspec plan tells what limits a plan"
            yield Finding(NOTE, name, "plan", text, advice)


def _of_interfaces(found: Sequence[Examined]) -> Iterator[Finding]:
    answered = [each for each in found if each.facts is not None]
    own = {each.own.name: each.own for each in answered if each.own is not None}
    ends = [(HERE, interface) for interface in own.values()]
    for each in answered:
        if each.facts and each.facts.interface:
            ends.append((each.device.name, each.facts.interface))
            continue
        text = (
            "it is reached by an address that none of its interfaces has: through a container, a tunnel or "
            "address translation"
        )
        advice = "give its own address in the cluster file, or let the container use its host's network"
        yield Finding(WARNING, each.device.name, "interface", text, advice)
    for name, interface in ends:
        if interface.kind in KINDS:
            what, advice = KINDS[interface.kind]
            yield Finding(WARNING, name, "interface", f"it is reached over {what}, {interface.name}", advice)
    sizes = {interface.mtu for _, interface in ends if interface.mtu and interface.kind != "loopback"}
    if len(sizes) > 1:
        differ = f"interfaces have different MTUs ({', '.join(map(str, sorted(sizes)))})"
        advice = "set the same MTU everywhere, 1500 if in doubt"
        yield Finding(WARNING, "all", "mtu", f"{differ}: packets may be split or lost", advice)


class _Path(NamedTuple):
    """A link by name, with the interfaces at its ends, and the bytes of a row of hidden states that travels
    on it: 0 for none."""

    name: str
    ends: tuple[Interface | None, Interface | None]
    found: LinkFacts
    row_bytes: int


def _of_links(found: Sequence[Examined], needs: ModelNeeds) -> Iterator[Finding]:
    paths = []
    for each, following in zip(found, [*found[1:], None], strict=True):
        name, own = each.device.name, each.facts.interface if each.facts is not None else None
        if each.from_head is not None:
            paths.append(_Path(f"{HERE} -> {name}", (each.own, own), each.from_head, 0))
        if each.onward is not None and following is not None and following.facts is not None:
            other, ends = following.device.name, (own, following.facts.interface)
            row_bytes = needs.row_bytes if needs.of(name) and needs.of(other) else 0
            paths.append(_Path(f"{name} -> {other}", ends, each.onward, row_bytes))
    rates = sorted(path.found.bandwidth_mbps for path in paths if not path.found.problem)
    for path in paths:
        yield from _of_link(path, rates[len(rates) // 2] if len(rates) > 2 else 0.0)


def _of_link(path: _Path, usual_mbps: float) -> Iterator[Finding]:
    """At most one finding about the rate, the gravest."""
    found, mbps = path.found, path.found.bandwidth_mbps
    if found.problem:
        advice = (
            "can the one reach the other's address and port? a firewall or an address of another network "
            "are usual causes"
        )
        yield Finding(PROBLEM, path.name, "link", f"it could not be measured: {found.problem}", advice)
        return
    if found.latency_s > LATENCY_S:
        text = f"a message takes {1000 * found.latency_s:.0f} ms, and every token waits for every link"
        yield Finding(WARNING, path.name, "latency", text, "use a cable, and no device between but a switch")
    slot_s = SLOT_ROWS * path.row_bytes * 8e-6 / max(mbps, 1e-9)
    speeds = [end.speed_mbps for end in path.ends if end and end.kind == "wired" and end.speed_mbps]
    nominal = min(NOMINAL_MBPS_MAX, *speeds) if len(speeds) == 2 else 0
    if slot_s > SLOT_S:
        takes = f"the hidden states of {SLOT_ROWS} nodes take {1000 * slot_s:.0f} ms"
        text = f"{rate(mbps)}: {takes}, so that the devices wait for it"
        advice = "use a gigabit cable and switch; else fewer devices, or a smaller --tree-nodes"
        yield Finding(PROBLEM, path.name, "link", text, advice)
    elif mbps < NOMINAL_SHARE * nominal:
        text = f"{rate(mbps)}, where both ends are wired for {nominal} Mbit/s or more"
        causes = "other traffic, a slow switch or port between them, or a bad cable (ethtool shows errors)"
        yield Finding(WARNING, path.name, "link", text, f"look for {causes}")
    elif mbps < OTHERS_SHARE * min(usual_mbps, NOMINAL_MBPS_MAX):
        text = f"{rate(mbps)}, while the others' median is {rate(usual_mbps)}"
        advice = "compare its cable, port and card with the others'"
        yield Finding(WARNING, path.name, "link", text, advice)


def rate(mbps: float) -> str:
    """A link's rate for people."""
    return f"{rounded(mbps)} Mbit/s"
