"""What is judged to be wrong, from facts made by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from flowspec.core.protocol.device_messages import Board, Facts, Interface, KernelFacts, LinkFacts, Software
from flowspec.plan.memory import PROCESS_BYTES, SliceMemory
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.runtime.cluster import Device
from flowspec.runtime.device.links import HERE, DeviceReport
from flowspec.runtime.doctor import Finding, ModelNeeds, diagnose

GIB = 1 << 30
WIRED = Interface(name="eth0", kind="wired", speed_mbps=1000, mtu=1500)
FACTS = Facts(
    clock_s=0.0,
    is_held=False,
    software=Software(python="3.11.2", torch="2.13.0+cpu", transformers="5.23.0", cuda=""),
    board=Board(),
    memory_total_bytes=8 * GIB,
    memory_available_bytes=6 * GIB,
    memory_limit_bytes=0,
    resident_bytes=64 << 20,
    accelerator="",
    accelerator_total_bytes=0,
    accelerator_free_bytes=0,
    threads=4,
    cores=4,
    interface=WIRED,
    model="same",
    link=None,
    speed=None,
    kernel=None,
)
GOOD = LinkFacts(latency_s=0.0003, bandwidth_mbps=900.0)


def cluster(count: int = 3) -> list[DeviceReport]:
    """Healthy devices on gigabit cables."""
    return [
        DeviceReport(
            device=Device(name=f"pi-{index}", address=f"10.0.0.{index}:7700"),
            facts=FACTS,
            own=WIRED,
            from_head=GOOD,
            onward=GOOD if index + 1 < count else None,
        )
        for index in range(count)
    ]


def needs(count: int = 3, weight_bytes: int = GIB, model: str = "/models/llama") -> ModelNeeds:
    memory = SliceMemory(weight_bytes=weight_bytes, cache_bytes=64 << 20)
    stages = tuple(
        StagePlan(name=f"pi-{index}", address="", first=index, end=index + 1) for index in range(count)
    )
    plan = ClusterPlan(
        model=model, fingerprint="f", dtype="float16", context=4096, stages=stages, hidden_size=4096
    )
    return ModelNeeds(plan=plan, memory=dict.fromkeys((each.name for each in stages), memory), layer=memory)


def judge(found: list[DeviceReport], wanted: ModelNeeds | None = None) -> list[Finding]:
    return diagnose(found, FACTS.software, wanted or needs(len(found)), {})


def findings(found: list[DeviceReport], wanted: ModelNeeds | None = None) -> list[tuple[str, str, str]]:
    said = judge(found, wanted)
    assert all(each.text and each.advice for each in said)
    return [(each.severity, each.device, each.check) for each in said]


def with_facts(number: int = 1, **changes: Any) -> list[DeviceReport]:
    found = cluster()
    found[number].facts = structs.replace(FACTS, **changes)
    return found


def only(found: list[DeviceReport], wanted: ModelNeeds | None = None) -> Finding:
    (finding,) = judge(found, wanted)
    return finding


def test_nothing_is_wrong_with_a_healthy_cluster() -> None:
    assert findings(cluster()) == []


JETSON = Board(is_jetson=True, power_mode="MAXN")
CUDA = structs.replace(FACTS.software, cuda="12.6")
GPU = {"accelerator": "RTX", "accelerator_total_bytes": 8 * GIB, "accelerator_free_bytes": 8 * GIB}


def software(**changes: str) -> dict[str, Software]:
    return {"software": structs.replace(FACTS.software, **changes)}


def interface(kind: str, mtu: int = 1500) -> dict[str, Interface]:
    return {"interface": Interface(name="x0", kind=kind, speed_mbps=0, mtu=mtu)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"memory_total_bytes": 0, "memory_available_bytes": 0}, "problem facts, problem memory"),
        ({"is_held": True}, "note held"),
        ({"board": Board(throttled=0x5)}, "problem throttling"),
        ({"board": Board(throttled=0x50000)}, "warning throttling"),
        ({"board": Board(throttled=0x80008)}, "problem throttling"),
        ({"board": Board(is_capped=True)}, "problem throttling"),
        ({"board": Board(throttled=0)}, ""),
        ({"board": Board(celsius=86.0, trip_c=85.0)}, "warning throttling"),
        ({"board": Board(celsius=84.0, trip_c=85.0)}, ""),
        ({"board": Board(celsius=84.0)}, ""),
        ({"board": Board(cpu_mhz=1500, cpu_max_mhz=2400)}, "warning throttling"),
        ({"board": Board(cpu_mhz=2400, cpu_max_mhz=2400)}, ""),
        ({"board": Board(power_mode="15W")}, "warning power mode"),
        ({"board": JETSON}, "problem cuda"),
        ({"board": JETSON, "software": CUDA}, "warning cuda"),
        ({"board": JETSON, "software": CUDA, "accelerator": "Orin"}, "note cuda"),
        ({"board": JETSON, "software": structs.replace(FACTS.software, torch="")}, "problem cuda"),
        (software(torch="2.12.0"), ""),
        (software(torch=""), ""),
        ({**GPU, "software": structs.replace(CUDA, torch="2.12.0")}, "warning torch, note cuda"),
        ({**GPU, "software": structs.replace(CUDA, torch="2.13.0")}, "note cuda"),
        (software(transformers="5.22.0"), "warning transformers"),
        (software(transformers=""), "problem transformers"),
        (software(python="3.11.9"), ""),
        *((interface(kind), "warning interface") for kind in ("wi-fi", "bridge", "tunnel", "virtual")),
        ({"interface": None}, "warning interface"),
    ],
    ids=itertools.count(),
)
def test_what_one_device_says_of_itself(changes: dict[str, Any], expected: str) -> None:
    found = findings(with_facts(**changes))
    assert {device for _, device, _ in found} <= {"pi-1"}
    assert ", ".join(f"{severity} {check}" for severity, _, check in found) == expected


def test_memory_that_is_exactly_enough_is_enough() -> None:
    need = PROCESS_BYTES + needs().layer.total_bytes
    loaded = with_facts(memory_available_bytes=1, resident_bytes=need)
    assert findings(loaded) == [], "weights that are there already are not counted twice"
    for changes in ({"memory_available_bytes": need - FACTS.resident_bytes}, {"memory_limit_bytes": need}):
        assert findings(with_facts(**changes)) == []
        (key, value) = next(iter(changes.items()))
        assert findings(with_facts(**{key: value - 1})) == [("problem", "pi-1", "memory")]
    short = 300 << 20
    finding = only(with_facts(memory_available_bytes=need - FACTS.resident_bytes - short))
    assert f"{short >> 20} MiB short" in finding.text
    found = cluster()
    found[0].device = replace(found[0].device, memory_bytes=GIB)
    assert "is allowed (1024 MiB)" in only(found).text, "the cluster file's limit counts, too"


def test_daemons_of_one_host_share_what_is_free() -> None:
    found = cluster()
    for each in found:
        each.device = replace(each.device, address=f"10.0.0.1:{7700 + len(each.device.name)}")
        each.facts = structs.replace(FACTS, memory_available_bytes=4 * GIB)
    assert findings(found) == [("problem", "pi-2", "memory")], "each needs 1.6 GiB"


def test_a_card_with_memory_of_its_own_is_asked_for_its_own() -> None:
    card: dict[str, Any] = {"accelerator": "RTX", "accelerator_total_bytes": 8 * GIB}
    much = {"accelerator_free_bytes": 7 * GIB, "memory_available_bytes": GIB}
    assert findings(with_facts(**card, **much)) == [("note", "pi-1", "cuda")]
    found = with_facts(**card, accelerator_free_bytes=GIB)
    assert [each.check for each in judge(found, needs(1)) if "free on RTX" in each.text] == ["memory"]


@pytest.mark.parametrize(
    ("place", "changes", "expected"),
    [
        (2, {"clock_offset_s": 90.0}, [("warning", "pi-2", "clock")]),
        (2, {"clock_offset_s": -3.0}, [("warning", "pi-2", "clock")]),
        (2, {"clock_offset_s": 1.0}, []),
        (
            0,
            {"own": Interface(name="wlan0", kind="wi-fi", speed_mbps=0, mtu=1500)},
            [("warning", HERE, "interface")],
        ),
        (
            1,
            {"facts": structs.replace(FACTS, interface=structs.replace(WIRED, mtu=9000))},
            [("warning", "all", "mtu")],
        ),
        # 16 rows of 8 KiB take 11.7 ms, then 9.5 ms, on a gigabit cable
        (0, {"onward": structs.replace(GOOD, bandwidth_mbps=90.0)}, [("problem", "pi-0 -> pi-1", "link")]),
        (0, {"onward": structs.replace(GOOD, bandwidth_mbps=110.0)}, [("warning", "pi-0 -> pi-1", "link")]),
        (0, {"onward": structs.replace(GOOD, bandwidth_mbps=600.0)}, []),
        (0, {"onward": LinkFacts(problem="no answer")}, [("problem", "pi-0 -> pi-1", "link")]),
        # from here no hidden states are sent
        (
            1,
            {"from_head": structs.replace(GOOD, bandwidth_mbps=20.0)},
            [("warning", f"{HERE} -> pi-1", "link")],
        ),
        (
            1,
            {"from_head": structs.replace(GOOD, latency_s=0.03)},
            [("warning", f"{HERE} -> pi-1", "latency")],
        ),
    ],
    ids=itertools.count(),
)
def test_what_is_wrong_between_devices(
    place: int, changes: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    found = cluster()
    found[place] = replace(found[place], **changes)
    assert findings(found) == expected


@pytest.mark.parametrize("state", ["none", "part", "other"])
def test_a_model_that_is_not_there_is_noted(state: str) -> None:
    for model, source in (("/models/llama", "this machine sends it"), ("Qwen/Qwen3", "come from the hub")):
        finding = only(with_facts(model=state), needs(model=model))
        assert (finding.severity, finding.device, finding.check) == ("note", "pi-1", "weights")
        assert source in finding.text


def kernel_of(*arithmetics: str) -> KernelFacts:
    return KernelFacts(dtype="bfloat16", kernel="torch", faults="", arithmetics=arithmetics)


def told_of(found: list[DeviceReport], check: str, wanted: ModelNeeds | None = None) -> list[Finding]:
    return [finding for finding in judge(found, wanted) if finding.check == check]


def test_devices_that_share_no_arithmetic_cannot_work_together() -> None:
    found = cluster()
    kernels = (kernel_of("fast", "safe"), kernel_of("safe"), kernel_of("safe", "fast"))
    for each, kernel in zip(found, kernels, strict=True):
        each.facts = structs.replace(FACTS, kernel=kernel)
    assert not told_of(found, "arithmetic")
    found[1].facts = structs.replace(FACTS, kernel=kernel_of("other"))
    (told,) = told_of(found, "arithmetic", needs())
    assert (told.device, told.severity) == ("pi-1", "problem")
    assert not told_of(found, "arithmetic", needs(count=1))


def test_kernels_that_are_not_right_are_told_of() -> None:
    found = cluster()
    for each, kernel, faults in zip(
        found, ("x86", "plain", ""), ("", "x86 ran an instruction", "int8 does not run right"), strict=True
    ):
        each.facts = structs.replace(FACTS, kernel=KernelFacts(dtype="int8", kernel=kernel, faults=faults))
    told = [(each.severity, each.device) for each in told_of(found, "kernels")]
    assert told == [("problem", "pi-2"), ("warning", "pi-1")]
