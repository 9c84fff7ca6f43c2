"""Experiment files: `configs/experiments/*.toml`, read into a `Bench`. Every mistake is one line with file, table, key and what was expected."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flowspec.core.methods import METHODS, OPTIONS
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED
from flowspec.plan.profile import DeviceProfile, find_profile
from flowspec.plan.shape import PRECISION_BYTES, ModelShape, find_shape
from flowspec.plan.tables import Table, read_toml
from flowspec.plan.timing import LinkSpec
from flowspec.testbed.config import (
    CLUSTER,
    HEAD_MS,
    PROMPT_FILES,
    SHIPPED_PROMPTS,
    SIMULATED,
    SYNTHETIC,
    WORLDS,
    Bench,
    Published,
    Setup,
    Testbed,
)


def experiment_folders() -> list[Path]:
    return [Path(__file__).resolve().parents[2] / "configs" / "experiments", Path(sys.prefix) / "share" / "flowspec" / "experiments"]


def find_experiment(name: str) -> Path:
    """A file, or one of the shipped experiments by its name; raises `InputError`."""
    if Path(name).is_file():
        return Path(name)
    shipped = {path.stem: path for folder in reversed(experiment_folders()) for path in folder.glob("*.toml")}
    if name in shipped:
        return shipped[name]
    raise InputError(f"--experiment: expected a file or one of {', '.join(sorted(shipped))}, got {name!r:.80}")


_KEYS = frozenset(
    [
        "name",
        "world",
        "testbed",
        "model",
        "drafter",
        "acceptance",
        "method",
        "methods",
        "tuned",
        "published",
        "prompts",
        "limit",
        "temperatures",
        "seeds",
        "repeat",
        "new_tokens",
        "context",
        "cluster",
    ]
)


def read_experiment(path: Path) -> Bench:
    """Reads an experiment; raises `InputError` naming file, table, key and what was expected."""
    table = read_toml(path, "an experiment")
    table.check(_KEYS)
    setups = [_setup(each) for each in table.tables("method")] if "method" in table.data else []
    named = [Setup(name=name, method=name) for name in table.texts("methods")] if "methods" in table.data else []
    for setup in named:
        if setup.method not in METHODS:
            table.wrong("methods", f"names among {', '.join(METHODS)}")
    both = (*named, *setups, *(read_setups(Path(_beside(path, table.text("tuned")))) if "tuned" in table.data else ()))
    if not both:
        table.wrong("methods", "a list of methods, or tables [[method]]")
    _check_names(path, both)
    world = table.text("world", SIMULATED, among=WORLDS)
    model = table.text("model", BUNDLED)
    testbeds = tuple(_testbed(each) for each in table.tables("testbed")) if "testbed" in table.data or world != CLUSTER else ()
    return Bench(
        name=table.text("name", path.stem),
        world=world,
        testbeds=testbeds,
        setups=both,
        model=model,
        drafter=table.text("drafter", SYNTHETIC if model == SYNTHETIC else BUNDLED),
        acceptance=table.number("acceptance") if model == SYNTHETIC else 0.0,
        prompts=tuple(_beside(path, name) for name in table.texts("prompts", [SHIPPED_PROMPTS])),
        limit=table.whole("limit") if "limit" in table.data else None,
        temperatures=tuple(table.numbers("temperatures", [0.0])),
        seeds=tuple(int(seed) for seed in table.numbers("seeds", [1])),
        repeat=table.whole("repeat", 1),
        new_tokens=table.whole("new_tokens", 96),
        context=table.whole("context", 1024),
        cluster=Path(_beside(path, table.text("cluster"))) if "cluster" in table.data else None,
        local=table.whole("local", 4),
        published=tuple(_published(each) for each in table.tables("published")) if "published" in table.data else (),
    )


def read_setups(path: Path) -> tuple[Setup, ...]:
    """The setups of a file that `bench --tune` wrote."""
    table = read_toml(path, "tuned methods")
    table.check({"method"})
    return tuple(_setup(each) for each in table.tables("method"))


def _check_names(path: Path, setups: Sequence[Setup]) -> None:
    """A name may come twice, with other parameters, as long as the testbeds differ."""
    for at, setup in enumerate(setups):
        for other in setups[:at]:
            if other.name == setup.name and (not set(other.testbeds).isdisjoint(setup.testbeds) or not (other.testbeds and setup.testbeds)):
                raise InputError(f"{path}: method: expected each name once on a testbed, got {setup.name!r} twice")


def _published(table: Table) -> Published:
    table.check({"testbed", "temperature", "reference", "tokens_per_s", "fitted"})
    rates = table.table("tokens_per_s")
    return Published(
        testbed=table.text("testbed"),
        temperature=table.number("temperature", 0.0, least=0.0),
        reference=table.text("reference", among=rates.data),
        tokens_per_s={name: rates.number(name) for name in rates.data},
        fitted=table.flag("fitted", False),
    )


def _beside(experiment: Path, name: str) -> str:
    """Files that an experiment names are looked for beside it."""
    return name if name in PROMPT_FILES else str(experiment.parent / name)


def _testbed(table: Table) -> Testbed:
    table.check(
        {
            "name",
            "devices",
            "head",
            "bandwidth_mbps",
            "latency_ms",
            "jitter_ms",
            "shape",
            "drafter_shape",
            "precision",
            "slowdown",
            "head_slowdown",
            "head_ms",
        }
    )
    names = [_counted(table, text) for text in table.texts("devices")]
    devices = [device for name, count in names for device in [_profile(table, name)] * count]
    shape = _known_shape(table, table.text("shape"))
    return Testbed(
        name=table.text("name"),
        devices=tuple(devices),
        head=_profile(table, table.text("head", names[0][0])),
        link=LinkSpec(
            bandwidth_mbps=table.number("bandwidth_mbps"),
            delay_s=table.number("latency_ms", 0.0, least=0.0) / 1000,
            jitter_s=table.number("jitter_ms", 0.0, least=0.0) / 1000,
        ),
        shape=shape,
        drafter_shape=_known_shape(table, table.text("drafter_shape", f"eagle-{shape.name}")),
        precision=table.text("precision", "float16", among=PRECISION_BYTES),
        slowdown=table.number("slowdown", 1.0),
        head_slowdown=table.number("head_slowdown", table.number("slowdown", 1.0)),
        head_s=table.number("head_ms", HEAD_MS, least=0.0) / 1000,
    )


def _counted(table: Table, text: str) -> tuple[str, int]:
    """`raspberry-pi-5` or `8 x raspberry-pi-5`."""
    count, times, name = text.partition(" x ")
    if not times:
        return text, 1
    if not count.isdecimal() or not 1 <= int(count) <= 256:
        table.wrong("devices", 'names such as "jetson-orin-nano" or "4 x jetson-orin-nano"')
    return name, int(count)


def _profile(table: Table, name: str) -> DeviceProfile:
    try:
        return find_profile(name)
    except InputError as error:
        raise InputError(f"{table.where}: {error}") from None


def _known_shape(table: Table, name: str) -> ModelShape:
    try:
        return find_shape(name)
    except InputError as error:
        raise InputError(f"{table.where}: {error}") from None


def _setup(table: Table) -> Setup:
    method = table.text("method", table.data.get("name"), among=METHODS)
    table.check({"name", "method", "coupled", "published", "testbeds", *OPTIONS[method]})
    options = {
        name: table.number(name, least=0.0) if name in ("value_min", "window_slack") else table.whole(name, most=256)
        for name in OPTIONS[method]
        if name in table.data
    }
    return Setup(
        name=table.text("name"),
        method=method,
        options=options,
        coupled=table.flag("coupled", True),
        published=table.flag("published", False),
        testbeds=tuple(table.texts("testbeds")) if "testbeds" in table.data else (),
    )


def pick_setups(setups: Sequence[Setup], names: Sequence[str]) -> tuple[Setup, ...]:
    """The setups of these names; a method that none has the name of is taken with its defaults. Raises `InputError`."""
    known = dict.fromkeys(setup.name for setup in setups)
    for name in names:
        if name not in known and name not in METHODS:
            raise InputError(f"--methods: expected names among {', '.join(dict.fromkeys([*known, *METHODS]))}, got {name!r:.80}")
    found = []
    for name in dict.fromkeys(names):
        found += [setup for setup in setups if setup.name == name] or [Setup(name=name, method=name)]
    return tuple(found)
