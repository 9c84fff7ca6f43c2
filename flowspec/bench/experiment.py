"""Experiments: prompts, testbeds, setups and a load, from `configs/experiments/*.toml`.

The same experiment runs in every world. A *testbed* is devices, links and the shape that the model's tokens
are timed as; a *setup* is a method with its parameters under the name it is shown by. Every mistake in a file
is one line with file, table, key and what was expected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta, defstruct

from flowspec.core.methods import CHAIN, DEFAULT, METHODS, WITHOUT_GUESSES, find_method
from flowspec.core.protocol import limits
from flowspec.core.protocol.limits import DRAFTERS_MAX, STAGES_MAX
from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.draft.registry import NONE
from flowspec.errors import InputError, counted, meant
from flowspec.model.files import BUNDLED
from flowspec.plan.placement import weighted_split
from flowspec.plan.profile import DeviceProfile, find_profile
from flowspec.plan.shape import ModelShape, find_shape
from flowspec.plan.tables import (
    Count,
    NotNegative,
    Positive,
    Table,
    Text,
    Texts,
    among,
    at,
    find_file,
    read_toml,
    some_tables,
)
from flowspec.plan.timing import LinkSpec
from flowspec.runtime.timeouts import SILENT_S
from flowspec.validation import NOTHING, PRINTABLE, Misfit, Told, expect, fit

FOLDER = "configs/experiments"
SIMULATED, EMULATED, CLUSTER = "simulated", "emulated", "cluster"
WORLDS = {
    SIMULATED: "virtual time, computed from device profiles and not measured on such devices",
    EMULATED: (
        "real processes on one machine that take as long as such devices would; not measured on such devices"
    ),
    CLUSTER: "real processes in real time",
}
"""What a number of each world is; it stands wherever one is shown."""
SYNTHETIC = "synthetic"
FIXED, AUTO = "fixed", "auto"
OURS = DEFAULT
AR = WITHOUT_GUESSES
SHIPPED_PROMPTS, TUNING_PROMPTS = "shipped", "shipped-tuning"
PROMPT_FILES = {
    SHIPPED_PROMPTS: "bench.jsonl",
    TUNING_PROMPTS: "bench-tuning.jsonl",
    "shipped-unseen": "bench-unseen.jsonl",
}
USERS_MAX = limits.CONVERSATIONS_MAX // 2
"""Of a load: in addition to the answers under way the head remembers those that it is about to forget."""
WIDTH_MAX = 16
"""Children that a drafter in virtual time keeps for a prefix, which bounds a method's `width`."""
ACCEPTANCE_MAX = 0.99
STEP_S_MAX = 3600.0
SLOWER_MAX = 1000.0
HEAD_MS = 0.5
"""What the head spends on an event, as measured on a laptop."""

Acceptance = Annotated[float, Meta(gt=0, le=ACCEPTANCE_MAX)]
Users = Annotated[int, Meta(ge=1, le=USERS_MAX)]
T = TypeVar("T")
FileT = TypeVar("FileT", bound="ExperimentFile")


# ------------------------------------------------------------------------------------------ what is run


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A method as it is run. `coupled`: its drafters rank with the target's noise.

    `drafters` are the models other than the target that it uses, None for the experiment's own, as many as
    the method can use. With a `chain` they are its levels, in this order: those of a `FIXED` one, or, with
    `AUTO`, those that the method chooses among. `testbeds`: where it is run; everywhere, if none is named.

    `published`: as the papers' code does it, not as kindly as ours: hidden states of all rows travel back,
    the head verifies, and stages wait for its verdict every turn (`bench.simulated` says what that costs).
    """

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    coupled: bool = True
    published: bool = False
    drafters: tuple[str, ...] | None = None
    chain: str = ""
    testbeds: tuple[str, ...] = ()

    def runs_on(self, testbed: str) -> bool:
        return not self.testbeds or testbed in self.testbeds


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterPlacement:
    """Where some models other than the target run, by name, and what their passes are timed as; without a
    `device` on the head's board."""

    models: tuple[str, ...]
    shape: ModelShape
    device: DeviceProfile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """Devices in pipeline order, the head's device, links, and what the model's tokens are timed as.

    Models other than the target that no board of `boards` names run at the head, timed as `drafter_shape`;
    without one drafting takes no time. `slowdown` multiplies the time of every stage's device,
    `head_slowdown` that of the drafters' devices: free parameters, 1 where nothing is known better. Links are
    all alike unless `hops` has one for each: head to first stage, between stages, last stage to head.
    """

    name: str
    devices: tuple[DeviceProfile, ...]
    head: DeviceProfile
    link: LinkSpec
    shape: ModelShape
    drafter_shape: ModelShape | None
    precision: str
    slowdown: float = 1.0
    head_slowdown: float = 1.0
    head_s: float = HEAD_MS / 1000
    split: tuple[int, ...] = ()
    hops: tuple[LinkSpec, ...] = ()
    boards: tuple[DrafterPlacement, ...] = ()

    __test__ = False  # for pytest, which would take it for tests

    @property
    def layers(self) -> list[int]:
        """Layers of each stage: those of `split`, or in proportion to how fast its memory is."""
        return list(self.split) or weighted_split(
            self.shape.layers, [device.bytes_per_s() for device in self.devices]
        )


class LoadStep(Table, frozen=True, kw_only=True):
    """A span of a schedule: so many `users` for so many `seconds`, in which the passes of the `slow` drafters
    take so many times as long, and the `lost` ones are not there."""

    users: Users
    seconds: Annotated[float, Meta(gt=0, le=STEP_S_MAX)]
    slow: Mapping[str, Annotated[float, Meta(gt=0, le=SLOWER_MAX)]] = msgspec.field(default_factory=dict)
    lost: Texts = ()

    @property
    def label(self) -> str:
        """`4 users, of-code 8 times as slow`."""
        slow = [f"{name} {factor:g} times as slow" for name, factor in self.slow.items() if factor != 1]
        return ", ".join([counted(self.users, "user"), *slow, *(f"{name} lost" for name in self.lost)])


class Settings(Table, frozen=True, kw_only=True):
    """What an experiment has as its file says it. `limit` is prompts per file (None: all), `repeat` how often
    each is run (real worlds only), `acceptance` how often a synthetic drafter's best guess is right.

    The load is one user, answer by answer; or with `users` one load of each number of users, who have so many
    `answers` together (None: every prompt once); or with tables [[step]] a schedule of users, in which a
    drafter that is lost has been silent for `silent_s` when the head hears of it.
    """

    world: Annotated[str, among(WORLDS)] = SIMULATED
    model: Text = BUNDLED
    acceptance: Acceptance | None = None
    limit: Count | None = None
    temperatures: Annotated[tuple[NotNegative, ...], Meta(min_length=1)] = (0.0,)
    seeds: Annotated[tuple[Annotated[int, Meta(ge=0, le=10**9)], ...], Meta(min_length=1)] = (1,)
    repeat: Count = 1
    new_tokens: Count = 96
    context: Count = 1024
    local: Count = 4
    users: Annotated[tuple[Users, ...], Meta(min_length=1)] = ()
    answers: Count | None = None
    steps: Annotated[tuple[LoadStep, ...], some_tables("step")] = msgspec.field(name="step", default=())
    silent_s: Annotated[float, Meta(ge=0, le=STEP_S_MAX)] = SILENT_S

    @property
    def is_synthetic(self) -> bool:
        return self.model == SYNTHETIC

    @property
    def needs_acceptance(self) -> bool:
        return self.is_synthetic

    @property
    def is_load(self) -> bool:
        return bool(self.users or self.steps)


class Experiment(Settings, frozen=True, kw_only=True):
    """An experiment. The cluster world is that of the file `cluster`, or without one `local` daemons of this
    machine."""

    name: str
    testbeds: tuple[Testbed, ...]
    setups: tuple[Setup, ...]
    drafters: tuple[str, ...] = (BUNDLED,)
    prompts: tuple[str, ...] = (SHIPPED_PROMPTS,)
    cluster: Path | None = None

    def drafters_of(self, setup: Setup) -> tuple[str, ...]:
        """The models other than the target that a setup is run with; none for plain decoding."""
        names = self.drafters[: drafters_max(setup.method)] if setup.drafters is None else setup.drafters
        return () if names == (NONE,) else names


def drafters_max(method: str) -> int:
    """How many models other than the target a method can use."""
    found = find_method(method)
    return found.drafters_max if found.drafts else 0


# ------------------------------------------------------------------------------------------ the file


class BoardTable(Table, frozen=True, kw_only=True):
    """A table [[testbed.drafters]]: a board, or without `device` the head's."""

    models: Texts
    device: Text | None = None
    shape: Text | None = None


class TestbedTable(Table, frozen=True, kw_only=True):
    name: Text
    devices: Texts
    head: Text | None = None
    bandwidth_mbps: Positive
    latency_ms: NotNegative = 0.0
    jitter_ms: NotNegative = 0.0
    shape: Text
    drafter_shape: Text | None = None
    drafters: Annotated[tuple[BoardTable, ...], some_tables("testbed.drafters")] = ()
    precision: Annotated[str, among(PRECISION_BYTES)] = "float16"
    slowdown: Positive = 1.0
    head_slowdown: Positive | None = None
    head_ms: NotNegative = HEAD_MS


NO_COMMAS = rf"\A(?:(?!,){PRINTABLE})+\Z"
"""Of names after --methods, which are parted by them."""


class MethodTable(Table, frozen=True, kw_only=True):
    """A table [[method]]; the method's parameters come on top."""

    name: Annotated[str, Meta(pattern=NO_COMMAS, description="a printable text without commas")]
    method: Annotated[str, among(METHODS)] | None = None
    coupled: bool = True
    published: bool = False
    testbeds: Texts = ()
    drafters: Texts | None = None
    chain: str | list[Text] | None = None

    def __post_init__(self) -> None:
        if self.chain is not None and self.chain != AUTO:
            expect(not isinstance(self.chain, str), CHAIN, self.chain, f"{AUTO}, or a list of drafters")
            expect(self.drafters is None, "drafters", self.drafters, f"none beside a {CHAIN} that names them")


class ExperimentFile(Settings, frozen=True, kw_only=True):
    name: Text | None = None
    testbed: Annotated[tuple[TestbedTable, ...], some_tables("testbed")] = ()
    drafter: Text | None = None
    drafters: Texts | None = None
    method: Annotated[tuple[dict[str, Any], ...], some_tables("method")] = ()
    methods: Annotated[tuple[Annotated[str, among(METHODS)], ...], Meta(min_length=1)] = ()
    tuned: Text | None = None
    prompts: Texts | None = None
    cluster: Text | None = None

    @property
    def all_drafters(self) -> tuple[str, ...]:
        """The names of the models beside the target."""
        return (SYNTHETIC,) if self.is_synthetic else self.drafters or (self.drafter or BUNDLED,)

    @property
    def needless(self) -> dict[str, str]:
        """Keys that must not be there, and why; a synthetic model draws its prompts, its answers and its
        guesses by chance."""
        useless = f"for model {self.model!r}, which has no use for it"
        if self.is_synthetic:
            keys = dict.fromkeys(("drafter", "drafters", "prompts"), useless)
        else:
            keys = {"acceptance": useless} | ({"drafter": "beside `drafters`"} if self.drafters else {})
        if self.world != SIMULATED:
            keys |= dict.fromkeys(("users", "steps"), f"in world {self.world}: loads are run in virtual time")
        if self.steps:
            reason = "beside tables [[step]], which say how many users there are"
            keys |= {"users": reason, "answers": reason}
        elif not self.users:
            keys["answers"] = "without `users`, of whose loads it is"
        return keys

    def __post_init__(self) -> None:
        expected = "a printable text without slashes: results go to a folder of this name"
        expect("/" not in (self.name or ""), "name", self.name, expected)
        for key, reason in self.needless.items():
            value, name = getattr(self, key), key.replace("steps", "step")
            shown = Told(counted(len(self.steps), "table")) if key == "steps" else value
            expect(value in (None, ()), name, shown, f"nothing {reason}")
        expected = "nothing without tables [[step]], in which drafters are lost"
        expect(bool(self.steps) or self.silent_s == SILENT_S, "silent_s", self.silent_s, expected)
        expected = "1 in virtual time, which gives the same figures every time"
        expect(self.world != SIMULATED or self.repeat == 1, "repeat", self.repeat, expected)
        has_guesses = bool(self.acceptance) or not self.needs_acceptance
        expect(
            has_guesses,
            "acceptance",
            NOTHING,
            f"a number above 0 and at most {ACCEPTANCE_MAX:g}, or --acceptance",
        )
        expected = "at least one table, in testbed = [...] or as [[testbed]]"
        expect(self.world == CLUSTER or self.testbed != (), "testbed", NOTHING, expected)
        has_methods = bool(self.method or self.methods or self.tuned)
        expect(has_methods, "methods", NOTHING, "a list of methods, or tables [[method]]")
        names = self.drafters or ()
        is_set = len(set(names)) == len(names) <= DRAFTERS_MAX and (NONE not in names or names == (NONE,))
        expect(is_set, "drafters", names, f"up to {DRAFTERS_MAX} models, each once, or {NONE} alone")
        for number, step in enumerate(self.steps):
            for key, names in (("slow", tuple(step.slow)), ("lost", step.lost)):
                if not set(names) <= set(self.all_drafters):
                    expected = f"names among the experiment's drafters {', '.join(self.all_drafters)}"
                    raise Misfit(("step", number, key), expected, names)
            expected = f"less than the {step.seconds:g} s of a step in which a drafter is lost"
            expect(not step.lost or step.seconds > self.silent_s, "silent_s", self.silent_s, expected)


class TunedFile(Table, frozen=True, kw_only=True):
    method: Annotated[tuple[dict[str, Any], ...], some_tables("method")]


# ------------------------------------------------------------------------------------------ reading


def find_experiment(name: str) -> Path:
    """A file, or one of the shipped experiments by its name; raises `InputError`."""
    return Path(name) if Path(name).is_file() else find_file(name, FOLDER, "--experiment", "a file")


def read_experiment(
    path: Path, kind: type[ExperimentFile] = ExperimentFile, flags: Mapping[str, Any] = {}
) -> Experiment:
    """Reads an experiment; `flags` have values instead of the file's, by its keys. Raises `InputError` naming
    file, table and key, or the flag, and what was expected."""
    file = read_file(path, kind, flags)
    drafters, testbeds = file.all_drafters, []
    with at(path):
        for number, table in enumerate(file.testbed, 1):
            with at(f"testbed {number}"):
                testbeds.append(_testbed(table, path.parent, drafters))
        names = [testbed.name for testbed in testbeds]
        check_once("testbed", names)
        setups = [Setup(name=name, method=name) for name in file.methods]
        setups += _setups(file.method, drafters, names)
    if file.tuned is not None:
        setups += read_setups(path.parent / file.tuned)
    with at(path):
        _check_setups(setups)
    prompts = [
        name if name in PROMPT_FILES else str(path.parent / name)
        for name in file.prompts or (SHIPPED_PROMPTS,)
    ]
    changed = {
        "temperatures": tuple(dict.fromkeys(file.temperatures)),
        "seeds": tuple(dict.fromkeys(file.seeds)),
        "users": tuple(sorted(set(file.users))),
    }
    return Experiment(
        **{name: getattr(file, name) for name in Settings.__struct_fields__} | changed,
        name=file.name or path.stem,
        testbeds=tuple(testbeds),
        setups=tuple(setups),
        drafters=drafters,
        prompts=tuple(dict.fromkeys(prompts)),
        cluster=None if file.cluster is None else path.parent / file.cluster,
    )


def read_file(path: Path, kind: type[FileT], flags: Mapping[str, Any]) -> FileT:
    """The tables of an experiment. A flag's model takes away what only the file's model has a use for."""

    def apply(table: dict[str, Any]) -> None:
        if "model" in flags:
            is_synthetic = flags["model"] == SYNTHETIC
            for key in ("drafter", "drafters", "prompts") if is_synthetic else ("acceptance",):
                table.pop(key, None)
        table.update(flags)

    try:
        return read_toml(path, kind, "an experiment", apply)
    except InputError as error:
        key, _, said = str(error).removeprefix(f"{path}: ").partition(": ")
        name = key.split(" ")[0]
        if name not in flags:
            raise
        flag = "max-new-tokens" if name == "new_tokens" else name.replace("_", "-")
        raise InputError(f"--{flag}: {said}") from None


def read_setups(path: Path) -> tuple[Setup, ...]:
    tables = read_toml(path, TunedFile, "tuned methods").method
    with at(path):
        setups = _setups(tables)
        _check_setups(setups)
    return tuple(setups)


def check_once(key: str, names: Sequence[str]) -> None:
    for name in names:
        expect(names.count(name) == 1, key, Told(f"{name!r:.80} twice"), "each name once")


def _check_setups(setups: Sequence[Setup]) -> None:
    """A name may come twice, with other parameters, as long as the testbeds differ."""
    for one, other in itertools.combinations(setups, 2):
        is_apart = one.testbeds and other.testbeds and set(one.testbeds).isdisjoint(other.testbeds)
        is_right = one.name != other.name or bool(is_apart)
        expect(is_right, "method", Told(f"{one.name!r:.80} twice"), "each name once on a testbed")


def _testbed(table: TestbedTable, folder: Path, drafters: Sequence[str]) -> Testbed:
    def find(key: str, find_named: Callable[[str], T], name: str) -> T:
        """What a name at a key stands for: that of a file in the folder, or of something shipped."""
        with at(key):
            return find_named(str(folder / name) if name.endswith(".toml") else name)

    devices: list[DeviceProfile] = []
    for text in table.devices:  # `raspberry-pi-5` or `8 x raspberry-pi-5`
        count, times, name = text.partition(" x ")
        is_right = not times or (count.isdecimal() and 1 <= int(count) <= STAGES_MAX)
        expect(is_right, "devices", text, 'names such as "jetson-orin-nano" or "4 x jetson-orin-nano"')
        devices += [find("devices", find_profile, name or text)] * int(count if times else 1)
    head = devices[0] if table.head is None else find("head", find_profile, table.head)
    shape = find("shape", find_shape, table.shape)
    drafter_shape = find("drafter_shape", find_shape, table.drafter_shape or f"eagle-{shape.name}")
    boards = []
    for number, board in enumerate(table.drafters, 1):
        with at(f"drafters {number}"):
            expected = f"names among the experiment's drafters {', '.join(drafters)}"
            expect(set(board.models) <= set(drafters), "models", board.models, expected)
            placement = DrafterPlacement(
                models=board.models,
                shape=drafter_shape if board.shape is None else find("shape", find_shape, board.shape),
                device=None if board.device is None else find("device", find_profile, board.device),
            )
            boards.append(placement)
    with at("drafters"):
        check_once("models", [name for board in boards for name in board.models])
    with at("precision"):
        for device in (*devices, head, *(board.device for board in boards if board.device)):
            device.rates(table.precision)
    testbed = Testbed(
        name=table.name,
        devices=tuple(devices),
        head=head,
        link=LinkSpec(
            bandwidth_mbps=table.bandwidth_mbps,
            delay_s=table.latency_ms / 1000,
            jitter_s=table.jitter_ms / 1000,
        ),
        shape=shape,
        drafter_shape=drafter_shape,
        precision=table.precision,
        slowdown=table.slowdown,
        head_slowdown=table.head_slowdown or table.slowdown,
        head_s=table.head_ms / 1000,
        boards=tuple(boards),
    )
    with at("devices"):
        assert testbed.layers
    return testbed


def _setups(
    tables: Sequence[dict[str, Any]], drafters: Sequence[str] = (), testbeds: Sequence[str] | None = None
) -> list[Setup]:
    """`drafters` and `testbeds` are the experiment's, of which a setup may choose some; a file of tuned ones
    has no drafters to choose from, and any testbeds."""
    setups = []
    for number, table in enumerate(tables, 1):
        with at(f"method {number}"):
            setup = _setup(table, drafters)
            is_known = testbeds is None or set(setup.testbeds) <= set(testbeds)
            expect(is_known, "testbeds", setup.testbeds, f"names among {'; '.join(testbeds or ())}")
            setups.append(setup)
    return setups


def _setup(data: dict[str, Any], drafters: Sequence[str]) -> Setup:
    name = data.get("method", data.get("name", NOTHING))
    expect(name in METHODS, "method", name, f"one of {', '.join(METHODS)}")
    method = find_method(name)
    table = fit(data, _table_of(name))
    options = {each.name: getattr(table, each.name) for each in method.parameters if each.name in data}
    chain = "" if table.chain is None else AUTO if table.chain == AUTO else FIXED
    chosen: Sequence[str] | None = table.chain if isinstance(table.chain, list) else table.drafters
    if chosen is None:
        chosen = drafters if chain else None
    else:
        most = drafters_max(name)
        expected = f"at most {most} of the experiment's drafters {', '.join(drafters)}, each once"
        is_right = set(chosen) <= set(drafters) and len(set(chosen)) == len(chosen) <= most
        expect(is_right, CHAIN if chain == FIXED else "drafters", chosen, expected)
    if chain and method.takes_chain:
        options[CHAIN] = None if chain == AUTO else tuple(range(len(chosen or ())))
    return Setup(
        name=table.name,
        method=name,
        options=options,
        coupled=table.coupled,
        published=table.published,
        drafters=None if chosen is None else tuple(chosen),
        chain=chain,
        testbeds=table.testbeds,
    )


@cache
def _table_of(method: str) -> type[MethodTable]:
    """The type of a method's tables."""
    fields = []
    for each in find_method(method).parameters:
        most = WIDTH_MAX if each.name == "width" else each.most
        bounds = {int: Meta(ge=1, le=int(most)), float: Meta(ge=0, le=most)}
        kind = Annotated[each.kind, bounds[each.kind]] if each.kind in bounds else each.kind
        fields.append((each.name, kind, None))
    made = defstruct(
        method, fields, bases=(MethodTable,), frozen=True, kw_only=True, forbid_unknown_fields=True
    )
    return cast(type[MethodTable], made)


def check_names(flag: str, names: Sequence[str], known: Sequence[str], between: str = "; ") -> None:
    """Raises `InputError` for a name that is not known."""
    for name in names:
        if name not in known:
            raise InputError(
                f"{flag}: expected names among {between.join(known)}, got {name!r:.80}{meant(name, known)}"
            )


def pick_setups(setups: Sequence[Setup], names: Sequence[str]) -> tuple[Setup, ...]:
    """The setups of these names; a method that none has the name of is taken with its defaults. Raises
    `InputError`."""
    check_names("--methods", names, list(dict.fromkeys([*(each.name for each in setups), *METHODS])), ", ")
    picked = []
    for name in dict.fromkeys(names):
        picked += [setup for setup in setups if setup.name == name] or [Setup(name=name, method=name)]
    return tuple(picked)
