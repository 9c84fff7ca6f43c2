"""A cluster file gives the devices it names, or one line that says which file, which key and what was
expected.

Whatever stands in the file, nothing but `InputError` comes out. A device's layers follow from the user's
word, its memory, or evenly, and cover the model without a gap.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
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
from tests.mutations import mutants, one_line_at_most, toml, toml_file

ONE = '[[device]]\naddress = "10.0.0.1:7700"\n'
TWO = ONE + '[[device]]\naddress = "10.0.0.2:7700"\n'


def drafting(model: str, device: str) -> str:
    return f"[[drafter]]\nmodel = '{model}'\ndevice = '{device}'\n"


def read(content: str | bytes) -> list[Device]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return read_cluster(path)


def devices(count: int, **fixed: Any) -> list[Device]:
    return [
        Device(
            name=f"d{n}", address=f"10.0.0.{n + 1}:7700", **{key: values[n] for key, values in fixed.items()}
        )
        for n in range(count)
    ]


def spans(stages: list[Any]) -> list[tuple[int, int]]:
    return [(stage.first, stage.end) for stage in stages]


def test_reads_every_key_and_names_the_nameless() -> None:
    content = '[[device]]\nname = "pi"\naddress = "pi.local:7700"\nlayers = [0, 3]\nmemory = "1.5GiB"\n' + (
        '[[device]]\naddress = "[::1]:7701"\nlayers = [3, 8]\nmemory = 1000\n'
    )
    assert read(content) == [
        Device(name="pi", address="pi.local:7700", layers=(0, 3), memory_bytes=3 << 29),
        Device(name="0--1-7701", address="[::1]:7701", layers=(3, 8), memory_bytes=1000),
    ]
    assert read(ONE) == [Device(name="10.0.0.1", address="10.0.0.1:7700")]


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("192.168.1.21:7700", "192.168.1.21"),
        ("pi.local:7701", "pi.local-7701"),
        ("[fe80::1%eth0]:7700", "fe80--1-eth0"),
        ("[::1]:7700", "0--1"),
    ],
)
def test_a_device_without_a_name_has_one_that_other_lines_do_not_change(address: str, name: str) -> None:
    other = ONE.replace("10.0.0.1", "10.0.0.9")
    table = f'[[device]]\naddress = "{address}"\n'
    for content in (table, other + table, table + other):
        assert [device.name for device in read(content) if device.address == address] == [check_name(name)]


def test_links_are_declared_for_all_pairs_or_for_one(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(ONE)
    assert read_links(path, ["a", "b", "c"]) is None
    path.write_text('links = ["100/2", "a:b=10"]\n' + TWO)
    found = read_links(path, ["a", "b", "c"])
    assert found is not None
    assert found.between("b", "a") == LinkSpec(bandwidth_mbps=10, delay_s=0.0005)
    assert found.between("b", "c") == LinkSpec(bandwidth_mbps=100, delay_s=0.002)
    path.write_text('links = ["100/2", "10.0.0.1:10.0.0.2=10"]\n' + TWO)
    assert len(read_cluster(path)) == 2
    path.write_text('links = ["a:10.0.0.2=10"]\n' + TWO + drafting("draft", "10.0.0.2"))
    assert read_links(path, ["a"]) is not None, "a drafter's device may have a link"


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ("3", "links: expected a list of printable texts, got 3"),
        ('["fast"]', "links: expected Mbit/s and ms such as 1000/0.5, .*got 'fast'"),
        ('["a:z=1/1"]', "links: expected two of a, b as A:B, got 'a:z'"),
        ('["a:a=1/1"]', "links: expected two of a, b as A:B, got 'a:a'"),
    ],
)
def test_links_that_are_none_are_refused(tmp_path: Path, links: str, expected: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f"links = {links}\n{TWO}")
    with pytest.raises(InputError, match=f"{path}: {expected}"):
        read_links(path, ["a", "b"])


def test_a_file_that_is_not_there_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.toml: expected a cluster file.*No such file"):
        read_cluster(tmp_path / "absent.toml")
    with pytest.raises(InputError, match=f"{tmp_path}: expected a cluster file.*directory"):
        read_cluster(tmp_path)


def test_a_device_that_has_a_drafter_runs_no_stage(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(
        TWO + drafting("draft-math", "10.0.0.2") + drafting("ngram", "head")
    )
    devices = read_cluster(tmp_path / "cluster.toml")
    assert [device.drafter for device in devices] == [None, "draft-math"]
    assert stage_devices(devices) == devices[:1]
    assert read_drafters(tmp_path / "cluster.toml") == {"draft-math": "10.0.0.2", "ngram": "head"}


@pytest.mark.parametrize(
    ("content", "key", "expected"),
    [
        (b"\xff\xfe", "", "cannot be read"),
        ("[[device]\n", "", "expected TOML"),
        ("number = " + "1" * 5000, "", "expected TOML"),
        ("deep = " + "[" * 5000, "", "expected TOML"),
        ("", "device:", "at least one"),
        ("device = []", "device:", "at least one"),
        ("device = 3", "device:", "at least one"),
        ('[device]\naddress = "a:1"', "device:", "at least one"),
        ("device = [1]", "device:", "at least one"),
        (
            "".join(f'[[device]]\naddress = "d{n}:1"\n' for n in range(limits.STAGES_MAX + 1)),
            "device:",
            "at most 256",
        ),
        (ONE + "[devices]\n", "'devices'", "expected device, drafter, insecure, links"),
        (
            ONE + "port = 3\n",
            "device 1: unknown key 'port'",
            "expected address, layers, memory, name, profile, ssh",
        ),
        ('[[device]]\nname = "a"\n', "device 1: address", 'expected "host:port", got nothing'),
        (ONE + "[[device]]\naddress = 7700\n", "device 2: address", 'expected "host:port", got 7700'),
        ('[[device]]\naddress = "host"', "device 1: address", "host:port"),
        ('[[device]]\naddress = ":7700"', "device 1: address", "host:port"),
        ('[[device]]\naddress = "host:0"', "device 1: address", "host:port"),
        ('[[device]]\naddress = "host:65536"', "device 1: address", "host:port"),
        (f'[[device]]\naddress = "host:{"9" * 5000}"', "device 1: address", "host:port"),
        (f'[[device]]\naddress = "{"h" * 200}:1"', "device 1: address", "host:port"),
        ('[[device]]\naddress = "a\\nb:1"', "device 1: address", "host:port"),
        ('links = ["fast"]\n' + ONE, "links", "expected Mbit/s and ms"),
        (ONE + 'profile = "toaster"', "profile", "expected a .toml file or one of"),
        (ONE + "name = 1", "device 1: name", "short text, got 1"),
        (ONE + 'name = ""', "device 1: name", "short text, got ''"),
        (ONE + f'name = "{"n" * 201}"', "device 1: name", "short text"),
        (ONE + 'name = "a\\nb"', "device 1: name", "short text"),
        (ONE + "layers = 4", "device 1: layers", "[first, end)"),
        (ONE + "layers = [4]", "device 1: layers", "[first, end)"),
        (ONE + "layers = [4, 4]", "device 1: layers", "[first, end)"),
        (ONE + "layers = [-1, 4]", "device 1: layers", "[first, end)"),
        (ONE + "layers = [false, true]", "device 1: layers", "[first, end)"),
        (ONE + "layers = [0.0, 1.0]", "device 1: layers", "[first, end)"),
        (ONE + 'memory = "lots"', "device 1: memory", "4GiB"),
        (ONE + "memory = -1", "device 1: memory", "4GiB"),
        (ONE + "memory = true", "device 1: memory", "4GiB"),
        (ONE + "memory = 0", "device 1: memory", "4GiB"),
        (ONE + f"memory = {10**400}", "device 1: memory", "4GiB"),
        (ONE + ONE.replace("[[device]]", '[[device]]\nname = "a"'), "address:", "'10.0.0.1:7700' twice"),
        (TWO.replace("address", 'name = "a"\naddress'), "name:", "'a' twice"),
        (TWO + "name = '10.0.0.1'", "name:", "'10.0.0.1' twice"),
        (TWO + "layers = [0, 8]", "layers:", "10.0.0.1 has none"),
        ("drafter = 4\n" + TWO, "drafter:", "at least one table, in drafter = [...] or as [[drafter]]"),
        (TWO + "[[drafter]]\nmodel = 'draft'", "drafter 1: device:", "a device of this file"),
        (TWO + "[[drafter]]\ndevice = 'head'", "drafter 1: model:", "as --drafter takes it"),
        (
            TWO + drafting("draft", "device-7"),
            "drafter: device:",
            "head or one of 10.0.0.1, 10.0.0.2, got 'device-7'",
        ),
        (TWO + drafting("draft", "10.0.0.2") + "layers = 3", "drafter 1:", "unknown key 'layers'"),
        (TWO + drafting("draft", "head") * 2, "drafter 2: model:", "'draft' twice"),
        (
            TWO + drafting("draft", "10.0.0.2") + drafting("mid", "10.0.0.2"),
            "drafter 2: device:",
            "10.0.0.2 has two",
        ),
        (
            TWO + drafting("draft", "10.0.0.1") + drafting("mid", "10.0.0.2"),
            "drafter:",
            "left for the model itself",
        ),
        (
            TWO + "layers = [0, 8]\n" + drafting("draft", "10.0.0.2"),
            "10.0.0.2:",
            "layers or a drafter, got both",
        ),
        (TWO + "name = 'head'\n" + drafting("draft", "head"), "name:", "another than 'head'"),
        (
            TWO + "".join(drafting(f"m{number}", "head") for number in range(17)),
            "drafter:",
            "at most 16 drafters, got 17",
        ),
    ],
)
def test_an_error_names_file_key_and_what_was_expected(content: str | bytes, key: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        read(content)
    text = str(caught.value)
    assert "cluster.toml: " in text
    assert key in text
    assert expected in text
    assert "\n" not in text


@given(st.one_of(st.text(), st.binary()))
def test_arbitrary_content_is_refused_and_nothing_worse(content: str | bytes) -> None:
    """None of these can be a cluster by chance."""
    with pytest.raises(InputError):
        read(content)


SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=10),
    st.sampled_from(["a:1", "b:2", "4GiB", "c:99999", "2.5 mb"]),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(st.integers(-1, 9), max_size=3),
    st.dictionaries(st.text(max_size=3), SCALARS, max_size=2),
)
ADDRESSES = st.one_of(st.sampled_from(["a:1", "b:2", "c:3"]), VALUES)
TABLES = st.fixed_dictionaries(
    {"address": ADDRESSES}, optional={"name": VALUES, "layers": VALUES, "memory": VALUES, "port": SCALARS}
)


@given(st.lists(TABLES, min_size=1, max_size=3))
@example([{"address": "a:1", "memory": "4GiB"}, {"address": "b:2", "memory": 10**15}])
@example([{"address": "a:1", "layers": [0, 4]}, {"address": "b:2", "layers": [4, 9]}])
def test_arbitrary_tables_give_usable_devices_or_are_refused(tables: list[dict[str, Any]]) -> None:
    content = "".join(
        "[[device]]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in table.items())
        for table in tables
    )
    refusal = ""
    try:
        found = read(content)
    except InputError as error:
        refusal = str(error)
    if refusal:
        assert len(refusal.splitlines()) == 1
        return
    assert [device.address for device in found] == [table["address"] for table in tables]
    assert len({device.name for device in found}) == len(found)
    for device, table in zip(found, tables, strict=True):
        assert split_address(device.address)[1] in range(1, 65536)
        assert device.name == table.get("name", device.name)
        assert (device.layers is None) == ("layers" not in table)
        assert (device.memory_bytes is None) == ("memory" not in table)


GOOD = {
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


def test_a_whole_file_reads(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(toml_file(GOOD))
    assert read_links(path, [device.name for device in read_cluster(path)]) is not None


@given(mutants(GOOD))
def test_a_file_with_anything_wrong_is_read_or_refused_in_one_line(tables: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_bytes(toml_file(tables))
        with one_line_at_most():
            found = read_cluster(path)
            links = read_links(path, [device.name for device in found])
            assert all(split_address(device.address)[1] in range(1, 65536) for device in found)
            assert links is None or links.between(found[0].name, "anywhere else")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512B", 512),
        (" 4 GiB ", 4 << 30),
        ("4gib", 4 << 30),
        ("2k", 2048),
        ("3MB", 3_000_000),
        ("0.5KiB", 512),
        ("1.5GB", 15 * 10**8),
    ],
)
def test_sizes_with_and_without_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "1e9",
        "4XiB",
        "4 Gi B",
        "nan",
        "0",
        "0.5",
        "0GiB",
        "9" * 400,
        "9" * 20 + "GiB",
        "1_000",
    ],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected a size such as 4GiB"):
        parse_bytes(text)


def test_layers_are_forced_fixed_or_even() -> None:
    fixed = devices(2, layers=[(0, 5), (5, 8)])
    assert spans(split_layers(fixed, 8, None)) == [(0, 5), (5, 8)]
    assert spans(split_layers(fixed, 8, [2, 6])) == [(0, 2), (2, 8)], "the command line overrides the file"
    stages = split_layers(devices(3), 8, None)
    assert spans(stages) == [(0, 3), (3, 6), (6, 8)]
    assert [(stage.name, stage.address) for stage in stages] == [
        (device.name, device.address) for device in devices(3)
    ]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([(1, 4), (4, 8)], "layers of d0: expected to begin at 0, .*got 1"),
        ([(0, 4), (5, 8)], "layers of d1: expected to begin at 4, .*got 5"),
        ([(0, 4), (3, 8)], "layers of d1: expected to begin at 4, .*got 3"),
        ([(0, 4), (4, 7)], "hold 7 layers together, but the model has 8"),
        ([(0, 4), (4, 9)], "hold 9 layers together, but the model has 8"),
    ],
)
def test_fixed_layers_must_cover_the_model_in_order(layers: list[tuple[int, int]], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        split_layers(devices(2, layers=layers), 8, None)


def test_the_context_is_what_is_wanted_within_the_models_limit() -> None:
    assert pick_context(None, 1024) == 1024
    assert pick_context(None, 131072) == CONTEXT_DEFAULT
    assert (pick_context(2, 1024), pick_context(1024, 1024)) == (2, 1024)
    for wanted in (-1, 0, 1, 1025):
        with pytest.raises(InputError, match=f"--context: expected 2 to 1024, .* got {wanted}"):
            pick_context(wanted, 1024)
