"""Experiment files: `configs/experiments/*.toml`, read into a `Bench`. Every mistake is one line with file,
table, key and what was expected."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowspec.bench.config import (
    AUTO,
    CLUSTER,
    FIXED,
    HEAD_MS,
    PROMPT_FILES,
    SHIPPED_PROMPTS,
    SIMULATED,
    SYNTHETIC,
    USERS_MAX,
    WORLDS,
    Bench,
    DeclaredDrafter,
    DrafterPlacement,
    LoadStep,
    Published,
    Setup,
    Testbed,
    drafters_max,
)
from flowspec.bench.guesses import WIDTH_MAX
from flowspec.bench.profiles import Profile as AcceptanceProfile
from flowspec.bench.profiles import find_profile as find_acceptance_profile
from flowspec.core.methods import CHAIN, METHODS, find_method
from flowspec.core.methods.base import Parameter
from flowspec.core.protocol.limits import DRAFTERS_MAX, STAGES_MAX
from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.draft.kinds import NONE
from flowspec.errors import InputError, meant
from flowspec.model.files import BUNDLED
from flowspec.plan.profile import DeviceProfile, find_profile
from flowspec.plan.shape import find_shape
from flowspec.plan.tables import Table, read_toml
from flowspec.plan.timing import LinkSpec
from flowspec.runtime.timeouts import SILENT_S

ACCEPTANCE_MAX = 0.99


def experiment_folders() -> list[Path]:
    return [
        Path(__file__).resolve().parents[2] / "configs" / "experiments",
        Path(sys.prefix) / "share" / "flowspec" / "experiments",
    ]


def shipped_experiments() -> dict[str, Path]:
    """Their files by name."""
    found = {path.stem: path for folder in reversed(experiment_folders()) for path in folder.glob("*.toml")}
    return dict(sorted(found.items()))


def find_experiment(name: str) -> Path:
    """A file, or one of the shipped experiments by its name; raises `InputError`."""
    if Path(name).is_file():
        return Path(name)
    shipped = shipped_experiments()
    if name in shipped:
        return shipped[name]
    raise InputError(
        f"--experiment: expected a file or one of {', '.join(shipped)}, got {name!r:.80}"
        f"{meant(name, shipped)}"
    )


_KEYS = frozenset(
    [
        "name",
        "world",
        "testbed",
        "model",
        "drafter",
        "drafters",
        "acceptance",
        "profile",
        "correlation",
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
        "local",
        "users",
        "answers",
        "step",
        "silent_s",
        "nothing_learnt",
    ]
)
_OF_SYNTHETIC_ONES = ("acceptance", "profile")
_OF_REAL_MODELS = ("drafter", "drafters", "prompts")
"""What a synthetic model has no use for: it draws its prompts, its answers and its guesses by chance."""


def read_experiment(path: Path) -> Bench:
    """Reads an experiment; raises `InputError` naming file, table, key and what was expected."""
    table = read_toml(path, "an experiment")
    table.check(_KEYS)
    world = table.text("world", SIMULATED, among=WORLDS)
    model = table.text("model", BUNDLED)
    is_synthetic = model == SYNTHETIC
    declared = _declared(table) if is_synthetic and isinstance(table.data.get("drafter"), list) else ()
    for key in _OF_REAL_MODELS if is_synthetic else _OF_SYNTHETIC_ONES:
        if key in table.data and not (key == "drafter" and declared):
            table.wrong(key, f"nothing for model {model!r}, which has no use for it")
    if "correlation" in table.data and not declared:
        table.wrong("correlation", "nothing without tables [[drafter]]")
    drafters = tuple(each.name for each in declared) or ((SYNTHETIC,) if is_synthetic else _drafters(table))
    testbeds: tuple[Testbed, ...] = ()
    if "testbed" in table.data or world != CLUSTER:
        testbeds = tuple(_testbed(each, path, drafters) for each in table.tables("testbed"))
    _check_once(path, "testbed", [testbed.name for testbed in testbeds])
    setups = _setups(table, path, testbeds, drafters)
    return Bench(
        name=table.text("name", path.stem),
        world=world,
        testbeds=testbeds,
        setups=setups,
        model=model,
        drafters=drafters,
        acceptance=table.number("acceptance", most=ACCEPTANCE_MAX)
        if is_synthetic and "profile" not in table.data and not declared
        else 0.0,
        declared=declared,
        correlation=table.number("correlation", 0.0, least=0.0, most=1.0),
        profile=_acceptance_profile(table, path) if "profile" in table.data else None,
        prompts=tuple(
            dict.fromkeys(_beside(path, name) for name in table.texts("prompts", [SHIPPED_PROMPTS]))
        ),
        limit=table.whole("limit") if "limit" in table.data else None,
        temperatures=tuple(dict.fromkeys(table.numbers("temperatures", [0.0]))),
        seeds=_seeds(table),
        repeat=table.whole("repeat", 1),
        new_tokens=table.whole("new_tokens", 96),
        context=table.whole("context", 1024),
        cluster=Path(_beside(path, table.text("cluster"))) if "cluster" in table.data else None,
        local=table.whole("local", 4),
        users=_users(table, world) if "users" in table.data else (),
        answers=table.whole("answers") if "answers" in table.data else None,
        steps=_steps(table, world, drafters) if "step" in table.data else (),
        silent_s=_silent_s(table),
        nothing_learnt=table.flag("nothing_learnt", False),
        published=tuple(_published(each, testbeds, setups) for each in table.tables("published"))
        if "published" in table.data
        else (),
    )


def _declared(table: Table) -> tuple[DeclaredDrafter, ...]:
    """Tables [[drafter]] of a synthetic model: a name, and its acceptance in each domain."""
    for key in _OF_SYNTHETIC_ONES:
        if key in table.data:
            table.wrong(key, "nothing beside tables [[drafter]], which say their own")
    found: list[DeclaredDrafter] = []
    for each in table.tables("drafter"):
        each.check({"name", "acceptance"})
        name = each.text("name")
        if name in (NONE, SYNTHETIC, *(other.name for other in found)):
            each.wrong("name", "a name of its own")
        shares = each.table("acceptance")
        if not shares.data or not all(domain.isprintable() for domain in shares.data):
            each.wrong("acceptance", "a share for each domain: { code = 0.8, plays = 0.5 }")
        one = DeclaredDrafter(
            name=name,
            acceptance=tuple((domain, shares.number(domain, most=ACCEPTANCE_MAX)) for domain in shares.data),
        )
        if found and set(one.domains) != set(found[0].domains):
            each.wrong("acceptance", f"the domains of {found[0].name}: {', '.join(found[0].domains)}")
        found.append(one)
    if len(found) > DRAFTERS_MAX:
        table.wrong("drafter", f"at most {DRAFTERS_MAX} drafters")
    return tuple(found)


def _acceptance_profile(table: Table, experiment: Path) -> AcceptanceProfile:
    if "acceptance" in table.data:
        table.wrong("acceptance", "either `acceptance` or `profile`")
    name = table.text("profile")
    return table.found(
        "profile",
        lambda: find_acceptance_profile(_beside(experiment, name) if name.endswith(".toml") else name),
    )


def _seeds(table: Table) -> tuple[int, ...]:
    seeds = table.numbers("seeds", [1])
    if any(seed != int(seed) for seed in seeds):
        table.wrong("seeds", "a list of whole numbers from 0")
    return tuple(dict.fromkeys(int(seed) for seed in seeds))


def _users(table: Table, world: str) -> tuple[int, ...]:
    users = table.numbers("users")
    if any(count != int(count) or not 1 <= count <= USERS_MAX for count in users):
        table.wrong("users", f"a list of whole numbers from 1 to {USERS_MAX}")
    if world != SIMULATED:
        table.wrong("users", f"nothing in world {world}: loads are run in virtual time")
    return tuple(sorted({int(count) for count in users}))


STEP_S_MAX = 3600.0
TIMES_MAX = 1000.0


def _silent_s(table: Table) -> float:
    if "silent_s" in table.data and "step" not in table.data:
        table.wrong("silent_s", "nothing without tables [[step]], in which drafters are lost")
    return table.number("silent_s", SILENT_S, least=0.0, most=STEP_S_MAX)


def _steps(table: Table, world: str, drafters: Sequence[str]) -> tuple[LoadStep, ...]:
    """Tables [[step]]: users, for how long, and which drafters are slow or lost meanwhile."""
    for key in ("users", "answers"):
        if key in table.data:
            table.wrong(key, "nothing beside tables [[step]], which say how many users there are")
    if world != SIMULATED:
        table.wrong("step", f"nothing in world {world}: loads are run in virtual time")
    found = tuple(_step(each, drafters) for each in table.tables("step"))
    silent_s = _silent_s(table)
    for step in found:
        if step.lost and step.seconds <= silent_s:
            table.wrong(
                "silent_s",
                f"less than the {step.seconds:g} s of a step in which a drafter is lost ({silent_s:g} s)",
            )
    return found


def _step(table: Table, drafters: Sequence[str]) -> LoadStep:
    table.check({"users", "seconds", "slow", "lost"})
    slow = table.table("slow", needed=False)
    lost = tuple(table.texts("lost")) if "lost" in table.data else ()
    for key, names in (("slow", tuple(slow.data)), ("lost", lost)):
        if not set(names) <= set(drafters):
            table.wrong(key, f"names among the experiment's drafters {', '.join(drafters)}")
    return LoadStep(
        users=table.whole("users", most=USERS_MAX),
        seconds=table.number("seconds", most=STEP_S_MAX),
        slow=tuple((name, slow.number(name, most=TIMES_MAX)) for name in slow.data),
        lost=tuple(dict.fromkeys(lost)),
    )


def _drafters(table: Table) -> tuple[str, ...]:
    if "drafters" not in table.data:
        return (table.text("drafter", BUNDLED),)
    if "drafter" in table.data:
        table.wrong("drafter", "either `drafter` or `drafters`")
    found = tuple(table.texts("drafters"))
    if len(set(found)) < len(found) or (NONE in found and len(found) > 1) or len(found) > DRAFTERS_MAX:
        table.wrong("drafters", f"up to {DRAFTERS_MAX} models, each once, or {NONE} alone")
    return found


def _setups(
    table: Table, path: Path, testbeds: Sequence[Testbed], drafters: Sequence[str]
) -> tuple[Setup, ...]:
    """Those of `methods`, of tables [[method]], and of the tuned file, in this order."""
    named = (
        [Setup(name=name, method=name) for name in table.texts("methods")] if "methods" in table.data else []
    )
    for setup in named:
        if setup.method not in METHODS:
            table.wrong("methods", f"names among {', '.join(METHODS)}")
    tables = table.tables("method") if "method" in table.data else []
    own = [_setup(each, drafters) for each in tables]
    known = [testbed.name for testbed in testbeds]
    for each, setup in zip(tables, own, strict=True):
        if not set(setup.testbeds) <= set(known):
            each.wrong("testbeds", f"names among {'; '.join(known)}")
    both = (
        *named,
        *own,
        *(read_setups(Path(_beside(path, table.text("tuned")))) if "tuned" in table.data else ()),
    )
    if not both:
        table.wrong("methods", "a list of methods, or tables [[method]]")
    _check_names(path, both)
    return both


def read_setups(path: Path) -> tuple[Setup, ...]:
    table = read_toml(path, "tuned methods")
    table.check({"method"})
    found = tuple(_setup(each) for each in table.tables("method"))
    _check_names(path, found)
    return found


def _check_once(path: Path, key: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{path}: {key}: expected each name once, got {name!r:.80} twice")


def _check_names(path: Path, setups: Sequence[Setup]) -> None:
    """A name may come twice, with other parameters, as long as the testbeds differ."""
    for at, setup in enumerate(setups):
        for other in setups[:at]:
            if other.name == setup.name and (
                not set(other.testbeds).isdisjoint(setup.testbeds) or not (other.testbeds and setup.testbeds)
            ):
                raise InputError(
                    f"{path}: method: expected each name once on a testbed, got {setup.name!r:.80} twice"
                )


def _published(table: Table, testbeds: Sequence[Testbed], setups: Sequence[Setup]) -> Published:
    table.check({"testbed", "temperature", "reference", "tokens_per_s", "fitted"})
    rates = table.table("tokens_per_s")
    names = {setup.name: None for setup in setups}
    if not rates.data or not rates.data.keys() <= names.keys():
        table.wrong("tokens_per_s", f"rates of at least one of the methods {'; '.join(names)}")
    return Published(
        testbed=table.text("testbed", among=[testbed.name for testbed in testbeds]),
        temperature=table.number("temperature", 0.0, least=0.0),
        reference=table.text("reference", among=rates.data),
        tokens_per_s={name: rates.number(name) for name in rates.data},
        fitted=table.flag("fitted", False),
    )


def _beside(experiment: Path, name: str) -> str:
    """Files that an experiment names are looked for beside it."""
    return name if name in PROMPT_FILES else str(experiment.parent / name)


def _testbed(table: Table, experiment: Path, drafters: Sequence[str]) -> Testbed:
    table.check(
        {
            "drafters",
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
    devices = counted_profiles(table, "devices", experiment)
    shape = table.found("shape", lambda: find_shape(table.text("shape")))
    found = Testbed(
        name=table.text("name"),
        devices=devices,
        head=_profile(table, "head", table.text("head"), experiment) if "head" in table.data else devices[0],
        link=link_of(table),
        shape=shape,
        drafter_shape=table.found(
            "drafter_shape", lambda: find_shape(table.text("drafter_shape", f"eagle-{shape.name}"))
        ),
        precision=table.text("precision", "float16", among=PRECISION_BYTES),
        slowdown=table.number("slowdown", 1.0),
        head_slowdown=table.number("head_slowdown", table.number("slowdown", 1.0)),
        head_s=table.number("head_ms", HEAD_MS, least=0.0) / 1000,
    )
    if "drafters" in table.data:
        found = replace(
            found,
            boards=tuple(_board(each, experiment, found, drafters) for each in table.tables("drafters")),
        )
        _check_once(
            experiment, "testbed: drafters: models", [name for board in found.boards for name in board.models]
        )
    table.found("devices", lambda: found.layers)
    table.found("precision", lambda: [device.rates(found.precision) for device in (*devices, found.head)])
    return found


def link_of(table: Table) -> LinkSpec:
    return LinkSpec(
        bandwidth_mbps=table.number("bandwidth_mbps"),
        delay_s=table.number("latency_ms", 0.0, least=0.0) / 1000,
        jitter_s=table.number("jitter_ms", 0.0, least=0.0) / 1000,
    )


_LINK_KEYS = ("bandwidth_mbps", "latency_ms", "jitter_ms")


def _board(table: Table, experiment: Path, testbed: Testbed, drafters: Sequence[str]) -> DrafterPlacement:
    """A table [[testbed.drafters]]: a board with a link of its own or like the testbed's others, or without
    `device` the head's."""
    table.check({"models", "device", "shape", "precision", *_LINK_KEYS})
    models = tuple(table.texts("models"))
    if not set(models) <= set(drafters):
        table.wrong("models", f"names among the experiment's drafters {', '.join(drafters)}")
    has_link = any(key in table.data for key in _LINK_KEYS)
    if has_link and "device" not in table.data:
        table.wrong("device", "a board for the link that is described")
    device = _profile(table, "device", table.text("device"), experiment) if "device" in table.data else None
    assert testbed.drafter_shape is not None, "an experiment's testbed times its drafter"
    usual = testbed.drafter_shape.name
    found = DrafterPlacement(
        models=models,
        shape=table.found("shape", lambda: find_shape(table.text("shape", usual))),
        precision=table.text("precision", testbed.precision, among=PRECISION_BYTES),
        device=device,
        link=None if device is None else link_of(table) if has_link else testbed.link,
    )
    table.found("precision", lambda: (device or testbed.head).rates(found.precision))
    return found


def counted_profiles(table: Table, key: str, experiment: Path) -> tuple[DeviceProfile, ...]:
    """Of `raspberry-pi-5` or `8 x raspberry-pi-5` in a list, one for each device."""
    counted = [(_profile(table, key, name, experiment), count) for name, count in _counted(table, key)]
    return tuple(device for device, count in counted for _ in range(count))


def _counted(table: Table, key: str) -> list[tuple[str, int]]:
    found = []
    for text in table.texts(key):
        count, times, name = text.partition(" x ")
        if times and not (count.isdecimal() and 1 <= int(count) <= STAGES_MAX):
            table.wrong(key, 'names such as "jetson-orin-nano" or "4 x jetson-orin-nano"')
        found.append((name, int(count)) if times else (text, 1))
    return found


def _profile(table: Table, key: str, name: str, experiment: Path) -> DeviceProfile:
    return table.found(
        key, lambda: find_profile(_beside(experiment, name) if name.endswith(".toml") else name)
    )


_MOST = {"width": WIDTH_MAX}
"""Where what is kept of a drafter's answers bounds a method's parameter."""


def _setup(table: Table, drafters: Sequence[str] = ()) -> Setup:
    """`drafters` are the experiment's, of which a setup may choose some; a file of tuned ones has none to
    choose from."""
    name = table.text("method", table.data.get("name"), among=METHODS)
    method = find_method(name)
    table.check(
        {
            "name",
            "method",
            "coupled",
            "published",
            "testbeds",
            "drafters",
            CHAIN,
            *(each.name for each in method.parameters),
        }
    )
    options = {each.name: _option(table, each) for each in method.parameters if each.name in table.data}
    chosen = _chosen(table, name, drafters)
    if CHAIN in table.data and method.takes_chain:
        options[CHAIN] = None if table.data[CHAIN] == AUTO else tuple(range(len(chosen or ())))
    called = table.text("name")
    if "," in called:
        table.wrong("name", "one without commas, which part names after --methods")
    return Setup(
        name=called,
        method=name,
        options=options,
        coupled=table.flag("coupled", True),
        published=table.flag("published", False),
        drafters=chosen,
        chain="" if CHAIN not in table.data else AUTO if table.data[CHAIN] == AUTO else FIXED,
        testbeds=tuple(table.texts("testbeds")) if "testbeds" in table.data else (),
    )


def _option(table: Table, parameter: Parameter) -> Any:
    name = parameter.name
    if parameter.kind is bool:
        return table.flag(name, True)
    if parameter.kind is float:
        return table.number(name, least=0.0, most=parameter.most)
    return table.whole(name, most=_MOST.get(name, int(parameter.most)))


def _chosen(table: Table, method: str, drafters: Sequence[str]) -> tuple[str, ...] | None:
    """The drafters that a setup names: those of `drafters`, or of a `chain`, which may be empty, or `auto`
    for a choice among all of them."""
    key = "drafters"
    if CHAIN in table.data and table.data[CHAIN] != AUTO:
        if key in table.data:
            table.wrong(key, f"none beside a {CHAIN} that names them")
        key = CHAIN
    if key not in table.data:
        return tuple(drafters) if CHAIN in table.data else None
    found = () if key == CHAIN and table.data[key] == [] else tuple(table.texts(key))
    most = drafters_max(method)
    if not set(found) <= set(drafters) or len(set(found)) < len(found) or len(found) > most:
        table.wrong(key, f"at most {most} of the experiment's drafters {', '.join(drafters)}, each once")
    return found


def pick_setups(setups: Sequence[Setup], names: Sequence[str]) -> tuple[Setup, ...]:
    """The setups of these names; a method that none has the name of is taken with its defaults. Raises
    `InputError`."""
    known = dict.fromkeys([*(setup.name for setup in setups), *METHODS])
    for name in names:
        if name not in known:
            raise InputError(
                f"--methods: expected names among {', '.join(known)}, got {name!r:.80}{meant(name, known)}"
            )
    found = []
    for name in dict.fromkeys(names):
        found += [setup for setup in setups if setup.name == name] or [Setup(name=name, method=name)]
    return tuple(found)
