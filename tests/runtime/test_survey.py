"""What a survey makes of what daemons say: profiles, memory, the head's place, links. The daemons are made
up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flowspec.core.protocol.device_messages import Board, Facts, LinkFacts
from flowspec.errors import ClusterError, InputError
from flowspec.plan.memory import PROCESS_BYTES
from flowspec.plan.profile import find_profile, speed_of
from flowspec.plan.sites import SharedCores
from flowspec.plan.timing import LinkSpec
from flowspec.runtime import survey as module
from flowspec.runtime.cluster import Device
from flowspec.runtime.device import links
from flowspec.runtime.device.links import ASKED, HERE, DeviceReport, Failure, Question, Tell
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.survey import LOOPBACK, Survey, Surveyor, rounds
from tests.runtime.test_doctor import FACTS, GIB

PI = speed_of(find_profile("raspberry-pi-4"), "probed")
LAPTOP = speed_of(find_profile("old-laptop"), "kept")
ABSENT = Failure(check="reachable", text="nothing listens", advice="start its daemon")


class Cluster:
    """Daemons that say what they are told to, and a file that names them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "cluster.toml"
        self.asked: list[Sequence[str]] = []
        self.measured: list[tuple[str, ...]] = []
        self.links: dict[tuple[str, ...], LinkFacts] = {}
        self.facts: dict[str, Facts | Failure] = {}
        self.keys = Keyring(
            name="head", public=bytes(32), secret=bytes(32), heads={}, devices={}, where="here"
        )
        monkeypatch.setattr(module, "ask", self.ask)
        monkeypatch.setattr(module, "measure_link", lambda device, keys, _: self.measure(keys, device.name))
        monkeypatch.setattr(links, "is_here", lambda address: address.startswith("127."))
        monkeypatch.setattr(
            module,
            "measure_onward",
            lambda pairs, keys, *, is_brief: [
                self.measure(keys, one.name, other.name) for one, other in pairs
            ],
        )

    def ask(
        self,
        devices: Sequence[Device],
        keys: Keyring | None,
        question: Question,
        *,
        hello_s: float,
        tell: Tell,
    ) -> list[DeviceReport]:
        assert keys is self.keys
        for device in devices:
            tell(device.name, ASKED, 1.0)
        questions = [(device.name, question(device)) for device in devices]
        self.asked.append([name for name, asked in questions if asked.speed])
        found = [(device, self.facts[device.name]) for device in devices]
        return [
            DeviceReport(device=device, failure=said)
            if isinstance(said, Failure)
            else DeviceReport(device=device, facts=said)
            for device, said in found
        ]

    def measure(self, keys: Keyring | None, *names: str) -> LinkFacts:
        assert keys is self.keys
        self.measured.append(names)
        return self.links.get(names, LinkFacts(latency_s=0.00024, bandwidth_mbps=941.0))

    def survey(self, *devices: Device, links: str = "", **options: Any) -> Survey:
        self.file.write_text(
            links + "".join(f'[[device]]\naddress = "{device.address}"\n' for device in devices)
        )
        self.surveyor = Surveyor(devices=devices, cluster=self.file, precision="bfloat16", keys=self.keys)
        return self.surveyor.survey(**{"head_drafts": False, **options})

    def devices(self, *said: Facts | Failure, network: str = "10.0.0", **fields: Any) -> list[Device]:
        """`d0`, `d1`, ..., each saying this, each on a host of its own."""
        self.facts |= {f"d{number}": each for number, each in enumerate(said)}
        return [
            Device(name=f"d{number}", address=f"{network}.{number + 1}:7700", **fields)
            for number in range(len(said))
        ]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def test_the_file_knows_best_then_the_daemon_and_who_tells_nothing_counts_as_the_slowest(
    cluster: Cluster,
) -> None:
    first, *others = cluster.devices(
        structs.replace(FACTS, speed=PI),
        structs.replace(FACTS, speed=LAPTOP),
        structs.replace(FACTS, speed=PI),
        FACTS,
    )
    found = cluster.survey(replace(first, profile="jetson-orin-nano"), *others)
    assert [site.profile.name for site in found.sites[:4]] == [
        "jetson-orin-nano",
        "old-laptop",
        "raspberry-pi-4",
        "raspberry-pi-4",
    ]
    assert found.sources == {"d0": "declared", "d1": "kept", "d2": "probed", "d3": "assumed"}
    assert cluster.asked == [["d1", "d2", "d3"]], "who is declared need not probe"
    with pytest.raises(InputError, match=r"d0: profile: .*pi5"):
        cluster.survey(replace(first, profile="pi5"), *others)
    assert len(cluster.asked) == 1, "refused before anybody is asked"


@pytest.mark.parametrize(
    ("changes", "device_bytes", "expected"),
    [
        ({}, None, 6 * GIB + (64 << 20)),
        ({"memory_available_bytes": 5 * GIB + 12345}, None, 5 * GIB + (64 << 20)),
        ({"memory_limit_bytes": GIB}, None, GIB),
        ({"memory_limit_bytes": 3 * GIB}, 2 * GIB, 2 * GIB),
        ({"accelerator": "Orin", "accelerator_free_bytes": GIB}, None, GIB + PROCESS_BYTES),
        (
            {"accelerator": "Orin", "accelerator_free_bytes": GIB, "board": Board(is_jetson=True)},
            None,
            6 * GIB + (64 << 20),
        ),
    ],
)
def test_memory_is_what_is_free_and_allowed(
    cluster: Cluster,
    changes: dict[str, Any],
    device_bytes: int | None,
    expected: int,
) -> None:
    found = cluster.survey(*cluster.devices(structs.replace(FACTS, **changes), memory_bytes=device_bytes))
    assert found.sites[0].memory_bytes == expected
    assert found.limited == (("d0",) if expected in (GIB, 2 * GIB) else ())


def test_the_head_is_where_this_machine_is(cluster: Cluster) -> None:
    away = cluster.devices(structs.replace(FACTS, speed=PI), structs.replace(FACTS, speed=PI))
    found = cluster.survey(*away)
    assert (found.head, found.sites[-1].name, found.sites[-1].runs_stages) == (HERE, HERE, False)
    here = [replace(away[0], address="127.0.0.1:7700"), away[1]]
    found = cluster.survey(*here)
    assert (found.head, len(found.sites)) == ("d0", 2)
    found = cluster.survey(here[0], replace(away[1], address="127.0.0.1:7701"))
    assert (found.head, len(found.sites)) == (None, 2)
    assert found.network.default == LOOPBACK


def test_links_are_measured_between_hosts_only_and_rounded(cluster: Cluster) -> None:
    devices = cluster.devices(*[structs.replace(FACTS, speed=PI)] * 3)
    cluster.links["d0", "d1"] = LinkFacts(latency_s=0.003, bandwidth_mbps=23.0)
    cluster.links["d1", "d2"] = cluster.links["d2", "d1"] = LinkFacts(problem="no route")
    cluster.links["d2",] = LinkFacts(latency_s=0.001, bandwidth_mbps=95.0)
    found = cluster.survey(*devices)
    assert found.network.between(HERE, "d0") == LinkSpec(bandwidth_mbps=1000, delay_s=0.00025)
    assert found.network.between("d0", "d1") == LinkSpec(bandwidth_mbps=25, delay_s=0.0025)
    assert (
        found.network.between("d1", "d2")
        == found.network.between(HERE, "d2")
        == LinkSpec(bandwidth_mbps=100, delay_s=0.001)
    )
    assert len(cluster.measured) == 6


def test_links_that_the_file_declares_are_not_measured(cluster: Cluster) -> None:
    devices = cluster.devices(*[structs.replace(FACTS, speed=PI)] * 2)
    found = cluster.survey(*devices, links='links = ["100/2", "d0:d1=10/3"]\n')
    assert cluster.measured == []
    assert found.network.between("d0", "d1") == LinkSpec(bandwidth_mbps=10, delay_s=0.003)
    assert found.network.between(HERE, "d1") == LinkSpec(bandwidth_mbps=100, delay_s=0.002)
    with pytest.raises(InputError, match=r"cluster.toml: links: expected two of d0, d1 as A:B, got 'd0:x'"):
        cluster.survey(*devices, links='links = ["d0:x=10/3"]\n')


@pytest.mark.parametrize("check", ["keys", "version"])
def test_a_device_that_is_there_and_not_as_it_should_be_is_not_absent(cluster: Cluster, check: str) -> None:
    devices = cluster.devices(FACTS, Failure(check=check, text="it is not as it should be", advice="mend it"))
    with pytest.raises(ClusterError, match=r"device d1 at .*: it is not as it should be; mend it"):
        cluster.survey(*devices, needs_all=False)


def test_a_device_that_was_absent_is_known_when_it_has_been_asked(cluster: Cluster) -> None:
    devices = cluster.devices(
        structs.replace(FACTS, speed=PI), ABSENT, structs.replace(FACTS, speed=LAPTOP), ABSENT
    )
    cluster.links["d0",] = LinkFacts(latency_s=0.003, bandwidth_mbps=23.0)
    found = cluster.survey(*devices, needs_all=False)
    with pytest.raises(ClusterError, match=r"device d1 at .*: nothing listens"):
        cluster.surveyor.join(found, "d1")
    cluster.facts["d1"] = structs.replace(FACTS, speed=PI, memory_total_bytes=0, memory_available_bytes=0)
    with pytest.raises(ClusterError, match="device d1 says that it has 0 MiB of memory"):
        cluster.surveyor.join(found, "d1")
    cluster.facts["d1"], cluster.measured = FACTS, []
    found = cluster.surveyor.join(found, "d1")
    assert cluster.measured == [("d1",)], "between stages nothing is measured"
    assert [site.name for site in found.sites] == ["d0", "d1", "d2", HERE], "in the order of the file"
    assert found.sites[1].profile.name == "raspberry-pi-4", "that of the slowest"
    assert (found.sources["d1"], list(found.absent)) == ("assumed", ["d3"])
    assert found.network.between(HERE, "d1") == LinkSpec(bandwidth_mbps=1000, delay_s=0.00025)
    assert found.network.between("d0", "d1") == LinkSpec(bandwidth_mbps=25, delay_s=0.0025), (
        "the worse of both ends'"
    )
    cluster.facts["d3"] = structs.replace(FACTS, speed=LAPTOP)
    found = cluster.surveyor.join(found, "d3")
    assert (found.sources["d3"], found.absent) == ("kept", {})
    assert found.network.between("d1", "d3") == LinkSpec(bandwidth_mbps=1000, delay_s=0.00025)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"memory_total_bytes": 0, "memory_available_bytes": 0}, "0 MiB of memory"),
        ({"memory_available_bytes": 9 * GIB}, "9216 MiB of memory free of 8192 MiB"),
        ({"memory_total_bytes": 1 << 60}, "1073741824.0 GiB of memory"),
        ({"speed": structs.replace(PI, gb_per_s=5e-324)}, "a memory_gb_per_s of 5e-324"),
        ({"speed": structs.replace(PI, float32=5e-324)}, "a tflops.float32 of 5e-324"),
        ({"speed": structs.replace(PI, layer_us=1e9)}, "a layer_us of 1000000000.0"),
    ],
)
def test_a_device_whose_facts_cannot_be_is_left_out(
    cluster: Cluster,
    changes: dict[str, Any],
    why: str,
) -> None:
    devices = cluster.devices(
        structs.replace(FACTS, speed=PI), structs.replace(FACTS, **{"speed": PI, **changes})
    )
    found = cluster.survey(*devices)
    assert [site.name for site in found.sites] == ["d0", HERE]
    assert found.left_out == {"d1": why}
    with pytest.raises(ClusterError, match=r"device d1 says that it has .*, which cannot be"):
        cluster.survey(devices[1])


@given(st.integers(0, 12))
def test_rounds_pair_each_with_each_once_and_nobody_twice_at_a_time(count: int) -> None:
    devices = [Device(name=str(number), address="") for number in range(count)]
    found = [[frozenset((one.name, other.name)) for one, other in pairs] for pairs in rounds(devices)]
    assert all(len(frozenset().union(*pairs)) == 2 * len(pairs) for pairs in found)
    assert sorted(map(sorted, (pair for pairs in found for pair in pairs))) == sorted(
        sorted((one.name, other.name)) for one, other in combinations(devices, 2)
    )


def test_daemons_of_one_machine_share_its_cores_and_its_memory(cluster: Cluster) -> None:
    """Also with a drafter, where one is alone on its machine; but not one whose speed the user gave."""
    probed = structs.replace(FACTS, speed=PI, threads=4, cores=4)
    few = structs.replace(probed, threads=1)
    given = structs.replace(probed, speed=structs.replace(PI, source="given"))
    one, two, three, alone = cluster.devices(probed, few, given, probed)
    found = cluster.survey(*(replace(each, address="10.0.0.9:7700") for each in (one, two, three)), alone)
    shared = {site.name: site.shared for site in found.sites}
    assert shared["d0"] == SharedCores(host="10.0.0.9", cores=4, threads=4)
    assert shared["d1"] == SharedCores(host="10.0.0.9", cores=4, threads=1)
    assert shared["d2"] is None
    assert [site.memory_bytes for site in found.sites[:3]] == [2 * GIB + (64 << 20)] * 3, "and its memory"
    assert found.network.between("d0", "d1") == LOOPBACK
    assert shared["d3"] == SharedCores(host=alone.address.partition(":")[0], cores=4, threads=4)
    here = cluster.survey(*cluster.devices(probed, few, network="127.0.0"))
    assert [site.shared and site.shared.host for site in here.sites] == [HERE] * 2, "they are one machine"
