"""Judges a cluster and this machine by what devices report: findings, each with what to do.

A *problem* keeps the cluster from working, or makes it so slow that it is not worth it; a *warning* costs
speed or may do harm later; a *note* is good to know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flowspec.core.cluster.agreement import Agreement, Lack
from flowspec.core.protocol.cluster_messages import Arithmetics
from flowspec.core.protocol.device_messages import (
    AskFacts,
    Board,
    Facts,
    Interface,
    KernelFacts,
    LinkFacts,
    Software,
)
from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.errors import ClusterError
from flowspec.model.families import check_family
from flowspec.model.files import ModelFiles
from flowspec.model.weights import Span
from flowspec.plan.advice import ModelDoesNotFitError
from flowspec.plan.memory import PROCESS_BYTES, SliceMemory, mib
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.plan.profile import why_insane
from flowspec.rounding import rounded
from flowspec.runtime.cluster import Device, check_local, split_layers
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.device.links import HERE, DeviceReport, Tell, ask, measure_link, measure_onward
from flowspec.runtime.loading import slice_memory
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.session import ClusterOptions, choose_for, unplaced_plan
from flowspec.runtime.survey import Surveyor, limits_of
from flowspec.wire.codec import DTYPE_BYTES

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
CLOCK_S = 2.0
"""An offset above this is told."""
SLOT_ROWS, SLOT_S = 16, 0.01
"""How long the hidden states of so many nodes, a usual pipeline slot, may take from a device to the next;
boards compute a slot in some ten milliseconds."""
LATENCY_S = 0.01
"""Half a round trip above this costs every token more than most boards' layers do."""
NOMINAL_SHARE, NOMINAL_MBPS_MAX = 0.5, 1000
"""Of what a link is wired for; of a faster one no more is expected: one connection of ours does not fill
it."""
CAP_SHARE = 0.95
"""A cap on the processor's clock above this share of what it can do is not told."""
PI_BITS = ("under-voltage", "a capped clock", "throttling", "the soft temperature limit")
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
UNTRIED = (
    "FlowSpec's makers ran it on two servers' GPUs and on no Jetson: kernels are tried before they are used, "
    "but how fast they are is an estimate"
)
SEND_IN = "measure it with flowspec profile, and send in what flowspec doctor --local 1 --json prints"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """A model on a cluster, planned as `chat` would: devices that it would leave out have no stage. `memory`
    is that of each stage, `layer` of one layer alone."""

    plan: ClusterPlan
    memory: Mapping[str, SliceMemory]
    layer: SliceMemory

    def stage_of(self, device: str) -> StagePlan | None:
        """The layers of a device; None for one that is left out."""
        return next((stage for stage in self.plan.stages if stage.name == device), None)


class Finding(NamedTuple):
    """`check` names what was looked at, `device` a device or a link, `text` says what is, `advice` what to
    do."""

    severity: str
    device: str
    check: str
    text: str
    advice: str


# ----------------------------------------------------------------------------------------------------- asking


def find_needs(options: ClusterOptions, devices: Sequence[Device], keys: Keyring | None = None) -> ModelNeeds:
    """Counts as `chat` would split the model; raises `InputError` for a model or a split that cannot be.
    Nothing is loaded.

    Where `chat` would refuse, layers are those of its refusal, in proportion to memory; where it would not
    reach all devices, even.
    """
    files = ModelFiles(options.model)
    raw = files.raw_config()
    check_family(raw, files.model)
    files.check_weights()
    count = raw["num_hidden_layers"]
    if options.cluster is None and options.layers is None:
        check_local(options.local, count)
    is_planned = options.cluster is not None and options.layers is None and devices[0].layers is None
    stages = split_layers(devices[:count] if is_planned else devices, count, options.layers)
    plan = unplaced_plan(options, files, files.config())
    if is_planned and options.cluster is not None:
        surveyor = Surveyor(devices=tuple(devices), cluster=options.cluster, precision=plan.dtype, keys=keys)
        try:
            stages = choose_for(options, files, surveyor, plan, Decoding()).stages(devices)
        except ModelDoesNotFitError as refusal:
            shares = {each.site.name: each.layers for each in refusal.shortfalls}
            there = [device for device in devices if device.name in shares]
            stages = split_layers(there, sum(shares.values()), [shares[device.name] for device in there])
        except ClusterError:  # a device that does not answer is told of by itself
            pass

    def memory(first: int, end: int) -> SliceMemory:
        span = Span(first=first, end=end, count=count)
        return slice_memory(
            files, span, plan.dtype, plan.context, cache=plan.cache, window=plan.sliding_window
        )

    return ModelNeeds(
        plan=replace(plan, stages=tuple(stages)),
        memory={stage.name: memory(stage.first, stage.end) for stage in stages},
        layer=memory(count // 2, count // 2 + 1),
    )


def examine(
    devices: Sequence[Device],
    keys: Keyring | None,
    question: AskFacts,
    tell: Tell = lambda device, doing, share: None,
) -> list[DeviceReport]:
    """What devices report, with their links, in their order; links are measured one after another, so that
    they do not share a wire. `tell` hears of each when it is done, with a share of 1."""
    reports = ask(devices, keys, lambda device: question, tell=tell)
    for report, following in zip(reports, [*reports[1:], None], strict=True):
        name = report.device.name
        if report.facts is not None:
            report.from_head = measure_link(report.device, keys)
        tell(name, "link from here", 1.0)
        if following is not None:
            if report.facts is not None and following.facts is not None:
                (report.onward,) = measure_onward([(report.device, following.device)], keys)
            tell(name, f"link to {following.device.name}", 1.0)
    return reports


# ---------------------------------------------------------------------------------------------------- judging


Rule = tuple[str, str, str, str]
"""Of a device: severity, check, text, advice."""


def diagnose(
    reports: Sequence[DeviceReport], here: Software, needs: ModelNeeds, measured: Mapping[str, Any]
) -> list[Finding]:
    """All findings, the worst first, else in the order of the devices; `here` is the software of this
    machine, and `measured` what `measure_apart` measured, if it did."""
    findings = list[Finding]()
    for each in reports:
        findings += [Finding(rule[0], each.device.name, *rule[1:]) for rule in _of_device(each, here, needs)]
    findings += _of_memory(reports, needs)
    findings += _of_arithmetics(reports, needs)
    findings += _of_interfaces(reports)
    findings += _of_links(reports, needs)
    findings += [Finding(rule[0], HERE, *rule[1:]) for rule in _of_this_machine(measured)]
    order = (PROBLEM, WARNING, NOTE)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def _of_device(report: DeviceReport, here: Software, needs: ModelNeeds) -> Iterator[Rule]:
    if (failure := report.failure) is not None:
        yield PROBLEM, failure.check, failure.text, failure.advice
    if (facts := report.facts) is None:
        return
    if why := why_insane(facts):
        text = f"it says that it has {why}, which cannot be: chat leaves it out"
        yield PROBLEM, "facts", text, "start its daemon again; is it the device that you think?"
    if facts.is_held:
        text = "a head holds it now, so that its memory and its links are those of a busy device"
        yield NOTE, "held", text, "run the doctor again when nobody uses it"
    if (offset_s := abs(report.clock_offset_s)) > CLOCK_S:
        way = "ahead of" if report.clock_offset_s > 0 else "behind"
        harm = "no answer depends on it, but logs cannot be compared"
        harm += ", and certificates of the hub may count as expired" if offset_s > 86400 else ""
        text = f"its clock is {offset_s:.0f} s {way} this machine's; {harm}"
        yield WARNING, "clock", text, "switch its time synchronisation on: timedatectl set-ntp true"
    yield from _of_software(facts, here)
    if facts.kernel is not None:
        yield from _of_kernel(facts.kernel)
    yield from _of_board(facts.board)
    if facts.model in LACKS:
        yield _of_model(facts.model, needs.plan.model)


def _of_software(facts: Facts, here: Software) -> Iterator[Rule]:
    there, is_jetson = facts.software, facts.board.is_jetson
    if not there.transformers:
        yield PROBLEM, "transformers", "transformers is not installed there", "launch/boards install"
    elif there.transformers != here.transformers:
        versions = f"transformers {there.transformers} there, {here.transformers} here"
        yield WARNING, "transformers", f"{versions}: they may read a model's config otherwise", INSTALL
    if facts.accelerator and here.torch and here.torch.partition("+")[0] != there.torch.partition("+")[0]:
        text = f"torch {there.torch} there, {here.torch} here: GPUs may share no arithmetic"
        yield WARNING, "torch", text, INSTALL
    if is_jetson and not there.cuda:
        torch = f"whose torch ({there.torch}) was built without CUDA" if there.torch else "without torch"
        text = f"a Jetson {torch}: its GPU idles"
        yield PROBLEM, "cuda", text, "install JetPack's torch (docs/devices.md, Jetson)"
    elif facts.accelerator:
        yield NOTE, "cuda", UNTRIED, SEND_IN
    elif is_jetson:
        fit = "if it is so, torch and JetPack do not fit each other (docs/devices.md, Jetson)"
        text = "a Jetson whose daemon does not use its GPU"
        yield WARNING, "cuda", text, f"start its daemon without --device cpu; {fit}"


def _of_kernel(kernel: KernelFacts) -> Iterator[Rule]:
    if not kernel.kernel:
        text = f"{kernel.dtype} cannot be computed there: {kernel.faults}"
        yield PROBLEM, "kernels", text, "use another --dtype, or do what is said there, on that machine"
    elif kernel.faults:
        slow = f"which may be slow, for {kernel.faults}"
        text = f"{kernel.dtype} is computed by the kernel {kernel.kernel} there, {slow}"
        advice = "nothing, answers are right; for speed, install another gcc or clang on that machine"
        yield WARNING, "kernels", text, advice


def _of_board(board: Board) -> Iterator[Rule]:
    """What throttles it now, what did, what holds its clocks down."""
    bits = board.throttled or 0
    for severity, when, shown in (
        (PROBLEM, "now", bits),
        (WARNING, "since it was started, though not now", bits >> 16 & ~bits),
    ):
        if seen := [name for bit, name in enumerate(PI_BITS) if shown >> bit & 1]:
            cures = {POWER if name == PI_BITS[0] else COOLING: None for name in seen}
            text = f"the firmware reports {', '.join(seen)}, {when}"
            yield severity, "throttling", text, "; ".join(cures)
    if board.is_capped:
        yield PROBLEM, "throttling", "its kernel holds its clocks down because of heat, now", COOLING
    if board.celsius is not None and board.trip_c is not None and board.celsius >= board.trip_c:
        text = f"{board.celsius:.0f} degrees, and it throttles from {board.trip_c:.0f} on"
        yield WARNING, "throttling", text, COOLING
    if board.cpu_mhz is not None and board.cpu_mhz < CAP_SHARE * (board.cpu_max_mhz or 0):
        text = f"its processor may run at {board.cpu_mhz:.0f} MHz of {board.cpu_max_mhz:.0f}"
        advice = "look for a power mode (nvpmodel on a Jetson), a battery saver, or heat"
        yield WARNING, "throttling", text, advice
    if board.power_mode and not board.power_mode.upper().startswith("MAXN"):
        text = f"its power mode is {board.power_mode}, not MAXN"
        advice = "if its supply and cooling allow: sudo nvpmodel -m 0, then sudo jetson_clocks"
        yield WARNING, "power mode", text, advice


def _of_model(state: str, model: str) -> Rule:
    """What a daemon lacks of a model comes from the hub or from the head, so that it only costs time."""
    source, advice = "its layers come from the hub or from this machine", f"beforehand: hf download {model}"
    if os.path.isabs(model):
        source, advice = (
            "this machine sends it its layers",
            "to save the time: copy it to the same place there",
        )
        model = os.path.basename(model)
    text = f"{model} {LACKS[state]}: {source} when they are first needed, and it stores them"
    return NOTE, "weights", text, f"nothing, or {advice}"


def _of_this_machine(measured: Mapping[str, Any]) -> Iterator[Rule]:
    if "fault" in measured:
        advice = "install the versions that FlowSpec's constraints folder has for this machine"
        yield PROBLEM, "accelerator", f"measuring it failed: {measured['fault']}", advice
    elif measured and not measured["no_gpu"]:
        yield NOTE, "cuda", UNTRIED, SEND_IN
        for kernel in measured["kernels"]:
            if not kernel["kernel"]:
                yield from _of_kernel(KernelFacts(**kernel))


def _of_memory(reports: Sequence[DeviceReport], needs: ModelNeeds) -> Iterator[Finding]:
    """Daemons of one machine share what is free there, in the order of the pipeline."""
    left = dict[str, int]()
    for each in reports:
        name, facts = each.device.name, each.facts
        if facts is None:
            continue
        stage, memory = needs.stage_of(name), needs.memory.get(name, needs.layer)
        if facts.accelerator and not facts.board.is_jetson:
            where, needed, free = f"on {facts.accelerator}", memory.total_bytes, facts.accelerator_free_bytes
            allowed = min(limits_of(each), default=free)
        else:
            where, needed = "there", max(0, PROCESS_BYTES + memory.total_bytes - facts.resident_bytes)
            free = left.get(each.machine, facts.memory_available_bytes)
            allowed = min(limits_of(each), default=free + facts.resident_bytes) - facts.resident_bytes
            left[each.machine] = free if stage is None else max(0, free - needed)
        if needed <= (have := max(0, min(free, allowed))):
            continue
        what = f"layers {stage.first} to {stage.end - 1} and their" if stage else "a single layer and its"
        cache = f"cache {mib(memory.cache_bytes)} for {needs.plan.context} tokens"
        why = f"is allowed ({mib(min(limits_of(each)))})" if allowed < free else f"is free {where}"
        text = f"{what} process need {mib(needed)} more (weights {mib(memory.weight_bytes)}, {cache}), "
        text += f"{mib(have)} of that {why}: {mib(needed - have)} short"
        text += "" if stage else "; chat leaves it out"
        advice = "give it fewer layers (--layers), take a smaller --context or --dtype"
        if allowed < free:
            advice = f"allow it more (daemon --memory, memory in the cluster file), {advice}"
        advice += "; flowspec plan tells what fits"
        yield Finding(PROBLEM if stage else WARNING, name, "memory", text, advice)


def _of_arithmetics(reports: Sequence[DeviceReport], needs: ModelNeeds) -> Iterator[Finding]:
    """Whether the devices that run stages share one."""
    agreement, names = Agreement(), list[str]()
    for each in reports:
        kernel = each.facts.kernel if each.facts is not None else None
        if kernel is not None and kernel.arithmetics and needs.stage_of(each.device.name) is not None:
            names.append(each.device.name)
            agreement.hear(names[-1], Arithmetics(dtype=kernel.dtype, names=kernel.arithmetics))
    if names and isinstance(lack := agreement.agree(names), Lack):
        advice = "use CPUs alone, or GPUs alike with the same versions on all (launch/boards install)"
        yield Finding(PROBLEM, lack.device, "arithmetic", lack.text, advice)


def _of_interfaces(reports: Sequence[DeviceReport]) -> Iterator[Finding]:
    there = [each for each in reports if each.facts is not None]
    own = {each.own.name: each.own for each in there if each.own is not None}
    ends = [(HERE, interface) for interface in own.values()]
    for each in there:
        if each.facts and each.facts.interface:
            ends.append((each.device.name, each.facts.interface))
            continue
        through = "through a container, a tunnel or address translation"
        text = f"it is reached by an address that none of its interfaces has: {through}"
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


def _of_links(reports: Sequence[DeviceReport], needs: ModelNeeds) -> Iterator[Finding]:
    plan = needs.plan
    row_bytes = (plan.hidden_size + plan.carried) * DTYPE_BYTES[ACTIVATIONS[plan.dtype]]
    for each, following in zip(reports, [*reports[1:], None], strict=True):
        name, interface = each.device.name, each.facts.interface if each.facts else None
        if each.from_head is not None:
            for severity, *rule in _of_link(each.from_head, (each.own, interface), 0):
                yield Finding(severity, f"{HERE} -> {name}", *rule)
        if each.onward is not None and following is not None and following.facts is not None:
            other = following.device.name
            size = row_bytes if name in needs.memory and other in needs.memory else 0
            for severity, *rule in _of_link(each.onward, (interface, following.facts.interface), size):
                yield Finding(severity, f"{name} -> {other}", *rule)


def _of_link(link: LinkFacts, ends: Sequence[Interface | None], row_bytes: int) -> Iterator[Rule]:
    """Of a link with the interfaces at its ends, over which rows of hidden states of so many bytes travel."""
    mbps = link.bandwidth_mbps
    if link.problem:
        causes = "a firewall or an address of another network are usual causes"
        advice = f"can the one reach the other's address and port? {causes}"
        yield PROBLEM, "link", f"it could not be measured: {link.problem}", advice
        return
    if link.latency_s > LATENCY_S:
        text = f"a message takes {1000 * link.latency_s:.0f} ms, and every token waits for every link"
        yield WARNING, "latency", text, "use a cable, and no device between but a switch"
    slot_s = SLOT_ROWS * row_bytes * 8e-6 / max(mbps, 1e-9)
    speeds = [end.speed_mbps for end in ends if end and end.kind == "wired" and end.speed_mbps]
    nominal = min(NOMINAL_MBPS_MAX, *speeds) if len(speeds) == 2 else 0
    if slot_s > SLOT_S:
        takes = f"the hidden states of {SLOT_ROWS} nodes take {1000 * slot_s:.0f} ms"
        text = f"{rate(mbps)}: {takes}, so that the devices wait for it"
        advice = "use a gigabit cable and switch; else fewer devices, or a smaller --tree-nodes"
        yield PROBLEM, "link", text, advice
    elif mbps < NOMINAL_SHARE * nominal:
        text = f"{rate(mbps)}, where both ends are wired for {nominal} Mbit/s or more"
        causes = "other traffic, a slow switch or port between them, or a bad cable (ethtool shows errors)"
        yield WARNING, "link", text, f"look for {causes}"


def rate(mbps: float) -> str:
    """A link's rate for people."""
    return f"{rounded(mbps)} Mbit/s"
