"""What is judged to be wrong, from facts made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowspec.core.protocol.facts import Board, Facts, Interface, KernelFacts, LinkFacts, Software
from flowspec.plan.memory import PROCESS_BYTES, SliceMemory
from flowspec.runtime.cluster import Device
from flowspec.runtime.health.diagnose import HERE, diagnose
from flowspec.runtime.health.examine import Examined
from flowspec.runtime.health.finding import Finding
from flowspec.runtime.health.needs import ModelNeeds, StageNeed

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


def cluster(count: int = 3) -> list[Examined]:
    """Healthy devices on gigabit cables."""
    return [
        Examined(
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
        StageNeed(device=f"pi-{index}", first=index, end=index + 1, memory=memory) for index in range(count)
    )
    return ModelNeeds(
        model=model,
        fingerprint="f",
        dtype="float16",
        context=4096,
        row_bytes=8192,
        layer=memory,
        stages=stages,
    )


def findings(found: list[Examined], wanted: ModelNeeds | None = None) -> list[tuple[str, str, str]]:
    said = diagnose(found, FACTS, wanted or needs(len(found)))
    assert all(each.text and each.advice for each in said)
    return [(each.severity, each.device, each.check) for each in said]


def with_facts(number: int = 1, **changes: Any) -> list[Examined]:
    found = cluster()
    found[number].facts = replace(FACTS, **changes)
    return found


def only(found: list[Examined], wanted: ModelNeeds | None = None) -> Finding:
    (finding,) = diagnose(found, FACTS, wanted or needs(len(found)))
    return finding


def test_what_cannot_be_is_a_problem() -> None:
    found = with_facts(memory_total_bytes=0, memory_available_bytes=0)
    assert ("problem", "pi-1", "facts") in findings(found)


def test_nothing_is_wrong_with_a_healthy_cluster() -> None:
    assert findings(cluster()) == []


@pytest.mark.parametrize(
    ("board", "severity", "text", "advice"),
    [
        (Board(throttled=0x5), "problem", "under-voltage, throttling, now", "power supply"),
        (
            Board(throttled=0x50000),
            "warning",
            "under-voltage, throttling, since it was started",
            "power supply",
        ),
        (Board(throttled=0x80008), "problem", "the soft temperature limit, now", "heat sink"),
        (Board(is_capped=True), "problem", "holds its clocks down because of heat", "heat sink"),
        (Board(celsius=86.0, trip_c=85.0), "warning", "86 degrees, and it throttles from 85 on", "heat sink"),
        (Board(cpu_mhz=1500, cpu_max_mhz=2400), "warning", "1500 MHz of 2400", "power mode"),
        (Board(power_mode="15W"), "warning", "its power mode is 15W", "nvpmodel -m 0"),
    ],
)
def test_throttling_is_told(board: Board, severity: str, text: str, advice: str) -> None:
    finding = only(with_facts(board=board))
    assert (finding.severity, finding.device) == (severity, "pi-1")
    assert text in finding.text
    assert advice in finding.advice


@pytest.mark.parametrize(
    "board",
    [
        Board(throttled=0),
        Board(celsius=84.0, trip_c=85.0),
        Board(celsius=84.0),
        Board(cpu_mhz=2400, cpu_max_mhz=2400),
    ],
)
def test_a_cool_board_is_left_in_peace(board: Board) -> None:
    assert findings(with_facts(board=board)) == []


UNTRIED = [("note", "pi-1", "cuda")]
"""That a GPU is used, which FlowSpec's makers never did."""


def test_a_jetson_without_cuda_is_a_problem() -> None:
    jetson = Board(is_jetson=True, power_mode="MAXN")
    assert findings(with_facts(board=jetson)) == [("problem", "pi-1", "cuda")]
    built = replace(FACTS.software, cuda="12.6")
    assert findings(with_facts(board=jetson, software=built)) == [("warning", "pi-1", "cuda")]
    assert findings(with_facts(board=jetson, software=built, accelerator="Orin")) == UNTRIED


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch": "2.12.0"}, [("warning", "pi-1", "torch")]),
        ({"torch": "2.13.0"}, []),
        ({"torch": ""}, [("problem", "pi-1", "torch")]),
        ({"transformers": "5.22.0"}, [("warning", "pi-1", "transformers")]),
        ({"python": "3.11.9"}, []),
        ({"python": "3.10.2"}, [("note", "pi-1", "python")]),
    ],
)
def test_other_versions_of_libraries_are_told(
    changes: dict[str, str], expected: list[tuple[str, str, str]]
) -> None:
    assert findings(with_facts(software=replace(FACTS.software, **changes))) == expected


@pytest.mark.parametrize(
    ("offset_s", "text"), [(90.0, "90 s ahead of"), (-3.0, "3 s behind"), (1.0, ""), (1e6, "certificates")]
)
def test_a_clock_that_is_off_is_a_warning(offset_s: float, text: str) -> None:
    found = cluster()
    found[2].clock_offset_s = offset_s
    if not text:
        assert findings(found) == []
    else:
        finding = only(found)
        assert (finding.severity, finding.device, finding.check) == ("warning", "pi-2", "clock")
        assert text in finding.text


# ------------------------------------------------------------------------------------------------------
# memory


def test_what_a_device_lacks_is_told_to_the_mib() -> None:
    slice_bytes = needs().stages[1].memory.total_bytes
    resident, available = 100 << 20, GIB
    short = PROCESS_BYTES + slice_bytes - resident - available
    finding = only(with_facts(memory_available_bytes=available, resident_bytes=resident))
    assert (finding.severity, finding.device, finding.check) == ("problem", "pi-1", "memory")
    assert f"layers 1 to 1 and their process need {(short + available) >> 20} MiB more" in finding.text
    assert f"{short >> 20} MiB short" in finding.text
    assert "--layers" in finding.advice


def test_what_is_exactly_enough_is_enough() -> None:
    need = PROCESS_BYTES + needs().stages[1].memory.total_bytes
    for changes in ({"memory_available_bytes": need - FACTS.resident_bytes}, {"memory_limit_bytes": need}):
        assert findings(with_facts(**changes)) == []
        (key, value) = next(iter(changes.items()))
        assert findings(with_facts(**{key: value - 1})) == [("problem", "pi-1", "memory")]


def test_the_cluster_files_limit_counts_too() -> None:
    found = cluster()
    found[0].device = replace(found[0].device, memory_bytes=GIB)
    finding = only(found)
    assert "is allowed (1024 MiB)" in finding.text
    assert finding.advice.startswith("allow it more")


def test_daemons_of_one_host_share_what_is_free() -> None:
    found = cluster()
    for each in found:
        each.device = replace(each.device, address=f"10.0.0.1:{7700 + len(each.device.name)}")
        each.facts = replace(FACTS, memory_available_bytes=4 * GIB)
    assert findings(found) == [("problem", "pi-2", "memory")], "each needs 1.6 GiB"


def test_weights_that_are_there_already_are_not_counted_twice() -> None:
    loaded = PROCESS_BYTES + needs().stages[1].memory.total_bytes
    assert findings(with_facts(memory_available_bytes=1, resident_bytes=loaded)) == []


def test_a_card_with_memory_of_its_own_is_asked_for_its_own() -> None:
    card: dict[str, Any] = {"accelerator": "RTX", "accelerator_total_bytes": 8 * GIB}
    much = {"accelerator_free_bytes": 7 * GIB, "memory_available_bytes": GIB}
    assert findings(with_facts(**card, **much)) == UNTRIED
    found = with_facts(**card, accelerator_free_bytes=GIB)
    finding = next(each for each in diagnose(found, FACTS, needs(1)) if each.check != "cuda")
    assert finding.check == "memory"
    assert "free on RTX" in finding.text


# -------------------------------------------------------------------------------------------------------
# links


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("wi-fi", "Wi-Fi, x0"),
        ("bridge", "a virtual bridge, x0"),
        ("tunnel", "tunnel"),
        ("virtual", "virtual"),
    ],
)
def test_interfaces_that_are_no_cable_are_warned_of(kind: str, text: str) -> None:
    finding = only(with_facts(interface=Interface(name="x0", kind=kind, speed_mbps=0, mtu=1500)))
    assert (finding.severity, finding.device, finding.check) == ("warning", "pi-1", "interface")
    assert text in finding.text


def test_this_machines_own_wi_fi_is_told_once() -> None:
    found = cluster()
    for each in found:
        each.own = Interface(name="wlan0", kind="wi-fi", speed_mbps=0, mtu=1500)
    assert findings(found) == [("warning", HERE, "interface")]


def test_an_address_that_is_not_the_devices_own_is_told() -> None:
    assert findings(with_facts(interface=None)) == [("warning", "pi-1", "interface")]


def test_different_mtus_are_told() -> None:
    assert findings(with_facts(interface=replace(WIRED, mtu=9000))) == [("warning", "all", "mtu")]


@pytest.mark.parametrize(
    ("mbps", "expected"),
    [
        (90.0, [("problem", "pi-0 -> pi-1", "link")]),  # 16 rows of 8 KiB: 11.7 ms
        (110.0, [("warning", "pi-0 -> pi-1", "link")]),  # 9.5 ms, on a gigabit cable
        (600.0, []),
    ],
)
def test_a_slow_link_between_neighbours(mbps: float, expected: list[tuple[str, str, str]]) -> None:
    found = cluster()
    found[0].onward = replace(GOOD, bandwidth_mbps=mbps)
    assert findings(found) == expected


def test_the_link_from_here_carries_no_hidden_states() -> None:
    found = cluster()
    found[1].from_head = replace(GOOD, bandwidth_mbps=20.0)
    assert findings(found) == [("warning", f"{HERE} -> pi-1", "link")]


def test_a_link_of_unknown_speed_is_compared_with_the_others() -> None:
    found = cluster(4)
    for each in found:
        each.facts = replace(FACTS, interface=replace(WIRED, speed_mbps=0))
    found[3].from_head = replace(GOOD, bandwidth_mbps=150.0)
    finding = only(found)
    assert (finding.severity, finding.device) == ("warning", f"{HERE} -> pi-3")
    assert "the others' median is 900 Mbit/s" in finding.text


def test_latency_and_links_that_do_not_stand() -> None:
    found = cluster()
    found[0].from_head = replace(GOOD, latency_s=0.03)
    found[1].onward = LinkFacts(problem="pi-2 at 10.0.0.2:7700 does not answer")
    assert findings(found) == [("problem", "pi-1 -> pi-2", "link"), ("warning", f"{HERE} -> pi-0", "latency")]


# -------------------------------------------------------------------------------------------------------
# model


@pytest.mark.parametrize("state", ["none", "part", "other"])
@pytest.mark.parametrize(
    ("model", "source"),
    [("/models/llama", "this machine sends it"), ("Qwen/Qwen3-0.6B", "come from the hub")],
)
def test_a_model_that_is_not_there_is_noted(model: str, source: str, state: str) -> None:
    finding = only(with_facts(model=state), needs(model=model))
    assert (finding.severity, finding.device, finding.check) == ("note", "pi-1", "weights")
    assert source in finding.text
    assert "/models" not in finding.text


def test_a_busy_device_is_noted() -> None:
    assert findings(with_facts(is_held=True)) == [("note", "pi-1", "held")]


def kernel_of(*arithmetics: str) -> KernelFacts:
    return KernelFacts(dtype="bfloat16", kernel="torch", faults="", arithmetics=arithmetics)


def test_what_devices_agree_on_is_told_where_it_is_not_the_best_of_each() -> None:
    found = cluster()
    for each, kernel in zip(
        found, (kernel_of("fast", "safe"), kernel_of("safe"), kernel_of("safe", "fast")), strict=True
    ):
        each.facts = replace(FACTS, kernel=kernel)
    (told,) = [finding for finding in diagnose(found, FACTS, None) if finding.check == "arithmetic"]
    assert (told.device, told.severity) == ("pi-0", "note")
    assert told.text == "it would compute bfloat16 best with fast, which not all have: all use safe"
    found[1].facts = replace(FACTS, kernel=kernel_of("other"))
    (told,) = [finding for finding in diagnose(found, FACTS, needs()) if finding.check == "arithmetic"]
    assert (told.device, told.severity) == ("pi-1", "problem")
    assert told.text.startswith(
        "it shares no arithmetic of bfloat16 with the devices before it: it has other"
    )
    beside = needs(count=1)
    assert not [finding for finding in diagnose(found, FACTS, beside) if finding.check == "arithmetic"]
    found[2].facts = found[1].facts = FACTS
    assert not [finding for finding in diagnose(found, FACTS, None) if finding.check == "arithmetic"]


def test_kernels_that_are_not_right_are_told_of() -> None:
    right, slow, none = (
        KernelFacts(dtype="int8", kernel="x86", faults=""),
        KernelFacts(
            dtype="int8", kernel="plain", faults="x86 ran an instruction that this processor does not have"
        ),
        KernelFacts(dtype="int8", kernel="", faults="int8 does not run right on cpu"),
    )
    found = cluster()
    for each, kernel in zip(found, (right, slow, none), strict=True):
        each.facts = replace(FACTS, kernel=kernel)
    told = [finding for finding in diagnose(found, FACTS, None) if finding.check == "kernels"]
    assert [(finding.severity, finding.device) for finding in told] == [
        ("problem", "pi-2"),
        ("warning", "pi-1"),
    ]
    assert (
        "int8 is computed by the kernel plain there, which may be slow, for x86 ran an instruction"
        in told[1].text
    )
    assert "int8 cannot be computed there: int8 does not run right on cpu" in told[0].text
    missing = "the faster library is not built (no C compiler works there; install gcc)"
    found[1].facts = replace(FACTS, kernel=KernelFacts(dtype="int8", kernel="x86", faults=missing))
    (unbuilt,) = [
        each for each in diagnose(found, FACTS, None) if each.check == "kernels" and each.device == "pi-1"
    ]
    assert unbuilt.severity == "warning"
    assert unbuilt.text.endswith("install gcc)")
    assert unbuilt.advice.endswith("do that on that machine")
    assert "constraints" in told[1].advice
