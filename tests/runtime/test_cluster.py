"""A cluster file gives the devices it names, or one line that says which file, which key and what was
expected.

Whatever stands in the file, nothing but `InputError` comes out. A device's layers follow from the user's
word, its memory, or evenly, and cover the model without a gap.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.plan.timing import LinkSpec
from flowspec.runtime.cluster import (
    CONTEXT_DEFAULT,
    Device,
    parse_bytes,
    pick_context,
    split_layers,
    stage_devices,
)
from flowspec.runtime.cluster_file import read_cluster, read_drafters, read_links
from flowspec.runtime.security.keyring import check_name
from flowspec.runtime.transport import split_address
from tests.mutations import mutants, one_line_at_most, toml_file

ONE = '[[device]]\naddress = "10.0.0.1:7700"\n'
TWO = ONE + '[[device]]\naddress = "10.0.0.2:7700"\n'


def drafting(model: str, device: str) -> str:
    return f"[[drafter]]\nmodel = '{model}'\ndevice = '{device}'\n"


def read(content: str) -> list[Device]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(content)
        return read_cluster(path)


def devices(*layers: tuple[int, int] | None) -> list[Device]:
    return [
        Device(name=f"d{number}", address=f"10.0.0.{number + 1}:7700", layers=each)
        for number, each in enumerate(layers)
    ]


def spans(stages: list[Any]) -> list[tuple[int, int]]:
    return [(stage.first, stage.end) for stage in stages]


GOOD: dict[str, Any] = {
    "insecure": False,
    "links": ["100/2", "pi:0--1-7701=10"],
    "device": [
        {
            "name": "pi",
            "address": "pi.local:7700",
            "layers": [0, 3],
            "memory": "1.5GiB",
            "profile": "raspberry-pi-5",
            "ssh": "me@pi",
        },
        {"address": "[::1]:7701", "layers": [3, 8], "memory": 1000},
    ],
}


def test_every_key_is_read() -> None:
    pi, other = read(toml_file(GOOD).decode())
    assert pi == Device(
        name="pi",
        address="pi.local:7700",
        layers=(0, 3),
        memory_bytes=3 << 29,
        profile="raspberry-pi-5",
        ssh="me@pi",
    )
    assert other == Device(name="0--1-7701", address="[::1]:7701", layers=(3, 8), memory_bytes=1000)


@given(mutants(GOOD).map(toml_file) | st.binary())
def test_a_file_with_anything_wrong_is_read_or_refused_in_one_line(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_bytes(content)
        with one_line_at_most():
            found = read_cluster(path)
            links = read_links(path, [device.name for device in found])
            assert all(split_address(device.address)[1] in range(1, 65536) for device in found)
            for kind in ("name", "address"):
                assert len({getattr(device, kind) for device in found}) == len(found)
            assert len({device.layers is None for device in found}) == 1
            assert all(first < end for first, end in (device.layers for device in found if device.layers))
            assert links is None or links.between(found[0].name, "anywhere else")


def test_the_name_of_a_nameless_device_does_not_depend_on_other_lines() -> None:
    other = ONE.replace("10.0.0.1", "10.0.0.9")
    for address, name in (
        ("192.168.1.21:7700", "192.168.1.21"),
        ("pi.local:7701", "pi.local-7701"),
        ("[fe80::1%eth0]:7700", "fe80--1-eth0"),
        ("[::1]:7700", "0--1"),
    ):
        table = f'[[device]]\naddress = "{address}"\n'
        for content in (table, other + table, table + other):
            assert [each.name for each in read(content) if each.address == address] == [check_name(name)]


def test_links_are_declared_for_all_pairs_or_for_one(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(ONE)
    assert read_links(path, ["a", "b", "c"]) is None
    path.write_text('links = ["100/2", "a:b=10"]\n' + TWO)
    found = read_links(path, ["a", "b", "c"])
    assert found is not None
    assert found.between("b", "a") == LinkSpec(bandwidth_mbps=10, delay_s=0.0005)
    assert found.between("b", "c") == LinkSpec(bandwidth_mbps=100, delay_s=0.002)
    path.write_text('links = ["a:10.0.0.2=10"]\n' + TWO + drafting("draft", "10.0.0.2"))
    assert read_links(path, ["a"]) is not None, "a drafter's device may have a link"
    for wrong in ('["a:z=1/1"]', '["a:a=1/1"]', '["fast"]', "3"):
        path.write_text(f"links = {wrong}\n{TWO}")
        with pytest.raises(InputError, match=f"{path}: links: expected"):
            read_links(path, ["a", "b"])


def test_a_device_that_has_a_drafter_runs_no_stage(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TWO + drafting("draft-math", "10.0.0.2") + drafting("ngram", "head"))
    found = read_cluster(path)
    assert [device.drafter for device in found] == [None, "draft-math"]
    assert stage_devices(found) == found[:1]
    assert read_drafters(path) == {"draft-math": "10.0.0.2", "ngram": "head"}


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("", "device:"),
        ("".join(f'[[device]]\naddress = "d{n}:1"\n' for n in range(limits.STAGES_MAX + 1)), "device:"),
        *(
            (f'[[device]]\naddress = "{each}"', "device 1: address")
            for each in ("host", ":7700", "host:65536")
        ),
        *((ONE + f"layers = {each}", "device 1: layers") for each in ("[4]", "[4, 4]", "[-1, 4]")),
        (ONE + ONE.replace("[[device]]", '[[device]]\nname = "a"'), "address:"),
        (TWO + "name = '10.0.0.1'", "name: expected each"),
        (TWO + "layers = [0, 8]", "layers:"),
        (TWO + "[[drafter]]\nmodel = 'draft'", "drafter 1: device:"),
        (TWO + drafting("draft", "device-7"), "drafter: device:"),
        (TWO + drafting("draft", "10.0.0.2") + "layers = 3", "drafter 1:"),
        (TWO + drafting("draft", "head") * 2, "drafter 2: model:"),
        (TWO + drafting("draft", "10.0.0.2") + drafting("mid", "10.0.0.2"), "drafter 2: device:"),
        (TWO + drafting("draft", "10.0.0.1") + drafting("mid", "10.0.0.2"), "drafter:"),
        (TWO + "layers = [0, 8]\n" + drafting("draft", "10.0.0.2"), "10.0.0.2:"),
        (TWO + "name = 'head'\n" + drafting("draft", "head"), "name:"),
        (TWO + "".join(drafting(f"m{number}", "head") for number in range(17)), "drafter:"),
    ],
    ids=itertools.count(),
)
def test_an_error_names_file_and_place(content: str, place: str) -> None:
    with pytest.raises(InputError) as caught:
        read(content)
    (line,) = str(caught.value).splitlines()
    assert "cluster.toml: " in line
    assert place in line


def test_sizes_with_and_without_units() -> None:
    for text, size in (("512", 512), (" 4 GiB ", 4 << 30), ("2k", 2048), ("3MB", 3_000_000), ("0.5KiB", 512)):
        assert parse_bytes(text) == size
    for text in ("", "GiB", "-1", "1e9", "4XiB", "4 Gi B", "nan", "0", "9" * 400, "1_000"):
        with pytest.raises(InputError, match="expected a size such as 4GiB"):
            parse_bytes(text)


def test_layers_are_forced_fixed_or_even_and_cover_the_model_in_order() -> None:
    fixed = devices((0, 5), (5, 8))
    assert spans(split_layers(fixed, 8, None)) == [(0, 5), (5, 8)]
    assert spans(split_layers(fixed, 8, [2, 6])) == [(0, 2), (2, 8)], "the command line overrides the file"
    others = devices(None, None, None)
    stages = split_layers(others, 8, None)
    assert spans(stages) == [(0, 3), (3, 6), (6, 8)]
    assert [(stage.name, stage.address) for stage in stages] == [(each.name, each.address) for each in others]
    for layers, expected in (
        ([(1, 4), (4, 8)], "layers of d0"),
        ([(0, 4), (5, 8)], "layers of d1"),
        ([(0, 4), (3, 8)], "layers of d1"),
        ([(0, 4), (4, 7)], "hold 7 layers together"),
        ([(0, 4), (4, 9)], "hold 9 layers together"),
    ):
        with pytest.raises(InputError, match=expected):
            split_layers(devices(*layers), 8, None)


def test_the_context_is_what_is_wanted_within_the_models_limit() -> None:
    assert pick_context(None, 1024) == 1024
    assert pick_context(None, 131072) == CONTEXT_DEFAULT
    assert (pick_context(2, 1024), pick_context(1024, 1024)) == (2, 1024)
    for wanted in (-1, 0, 1, 1025):
        with pytest.raises(InputError, match=f"--context: .* got {wanted}"):
            pick_context(wanted, 1024)
