"""Experiment files: `configs/experiments/*.toml`, read into a `Bench`. Every mistake is one line with file,
table, key and what was expected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from msgspec import Meta, defstruct

from flowspec.bench.config import (
    AUTO,
    CLUSTER,
    FIXED,
    HEAD_MS,
    PROMPT_FILES,
    SHIPPED_PROMPTS,
    SIMULATED,
    STEP_S_MAX,
    SYNTHETIC,
    Acceptance,
    Asked,
    Bench,
    DeclaredDrafter,
    DrafterPlacement,
    Published,
    Setup,
    Testbed,
    drafters_max,
)
from flowspec.bench.guesses import WIDTH_MAX
from flowspec.bench.profiles import find_profile as find_acceptance_profile
from flowspec.core.methods import CHAIN, METHODS, find_method
from flowspec.core.protocol.limits import DRAFTERS_MAX, STAGES_MAX
from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.draft.kinds import NONE
from flowspec.errors import InputError, meant
from flowspec.model.files import BUNDLED
from flowspec.plan.profile import DeviceProfile, find_profile
from flowspec.plan.shape import find_shape
from flowspec.plan.tables import (
    NotNegative,
    Positive,
    Share,
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
Found = TypeVar("Found")


def find_experiment(name: str) -> Path:
    """A file, or one of the shipped experiments by its name; raises `InputError`."""
    return Path(name) if Path(name).is_file() else find_file(name, FOLDER, "--experiment", "a file")


class LinkTable(Table, frozen=True, kw_only=True):
    """A table that says what a link is."""

    bandwidth_mbps: Positive
    latency_ms: NotNegative = 0.0
    jitter_ms: NotNegative = 0.0

    @property
    def link(self) -> LinkSpec:
        return LinkSpec(
            bandwidth_mbps=self.bandwidth_mbps,
            delay_s=self.latency_ms / 1000,
            jitter_s=self.jitter_ms / 1000,
        )


class BoardTable(LinkTable, frozen=True, kw_only=True):
    """A table [[testbed.drafters]]: a board with a link of its own or like the testbed's others, or without
    `device` the head's."""

    models: Texts
    device: Text | None = None
    shape: Text | None = None
    precision: Annotated[str, among(PRECISION_BYTES)] | None = None
    bandwidth_mbps: Positive = 0.0
    """As the testbed's links."""

    def __post_init__(self) -> None:
        has_link = self.bandwidth_mbps or self.latency_ms or self.jitter_ms
        expect(bool(self.device or not has_link), "device", NOTHING, "a board for the link that is described")
        expect(bool(self.bandwidth_mbps or not has_link), "bandwidth_mbps", NOTHING, "a number above 0")


class TestbedTable(LinkTable, frozen=True, kw_only=True):
    name: Text
    devices: Texts
    head: Text | None = None
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


class ExperimentFile(Asked, frozen=True, kw_only=True):
    name: Text | None = None
    testbed: Annotated[tuple[TestbedTable, ...], some_tables("testbed")] = ()
    drafter: Text | list[DeclaredDrafter] | None = None
    drafters: Texts | None = None
    acceptance: Acceptance | None = None
    profile: Text | None = None
    correlation: Share | None = None
    method: Annotated[tuple[dict[str, Any], ...], some_tables("method")] = ()
    methods: Annotated[tuple[Annotated[str, among(METHODS)], ...], Meta(min_length=1)] = ()
    tuned: Text | None = None
    prompts: Texts | None = None
    cluster: Text | None = None
    silent_s: Annotated[float, Meta(ge=0, le=STEP_S_MAX)] | None = None

    @property
    def declared(self) -> tuple[DeclaredDrafter, ...]:
        return tuple(self.drafter) if isinstance(self.drafter, list) else ()

    def __post_init__(self) -> None:
        for key, why in self._needless().items():
            value, name = getattr(self, key), key.replace("steps", "step")
            expect(value in (None, ()), name, value, f"nothing {why}")
        has_guesses = bool(self.declared or self.acceptance or self.profile) or not self.is_synthetic
        expect(has_guesses, "acceptance", NOTHING, "a number above 0 and at most 0.99")
        told = "at least one table, in testbed = [...] or as [[testbed]]"
        expect(self.world == CLUSTER or self.testbed != (), "testbed", NOTHING, told)
        has_methods = bool(self.method or self.methods or self.tuned)
        expect(has_methods, "methods", NOTHING, "a list of methods, or tables [[method]]")
        names = self.drafters or ()
        is_set = len(set(names)) == len(names) <= DRAFTERS_MAX and (NONE not in names or names == (NONE,))
        expect(is_set, "drafters", names, f"up to {DRAFTERS_MAX} models, each once, or {NONE} alone")
        self._check_declared()
        self._check_steps()

    def _needless(self) -> dict[str, str]:
        """Keys that must not be there, and why; a synthetic model draws its prompts, its answers and its
        guesses by chance."""
        useless = f"for model {self.model!r}, which has no use for it"
        found = {} if self.declared else {"correlation": "without tables [[drafter]]"}
        if not self.is_synthetic:
            found |= {"acceptance": useless, "profile": useless}
            found |= {"drafter": "beside `drafters`"} if self.drafters else {}
        elif self.declared:
            own = "beside tables [[drafter]], which say their own"
            found |= {"acceptance": own, "profile": own, "drafters": useless, "prompts": useless}
        else:
            found |= {"drafter": useless, "drafters": useless, "prompts": useless}
            found |= {"acceptance": "beside `profile`"} if self.profile else {}
        if self.world != SIMULATED:
            found |= dict.fromkeys(
                ("users", "steps"), f"in world {self.world}: loads are run in virtual time"
            )
        if self.steps:
            beside = "beside tables [[step]], which say how many users there are"
            return found | {"users": beside, "answers": beside}
        return found | {"silent_s": "without tables [[step]], in which drafters are lost"}

    def _check_declared(self) -> None:
        known = [NONE, SYNTHETIC]
        expect(self.is_synthetic or not self.declared, "drafter", self.drafter, "a printable text")
        is_few = len(self.declared) <= DRAFTERS_MAX
        expect(is_few, "drafter", self.drafter, f"at most {DRAFTERS_MAX} drafters")
        for number, each in enumerate(self.declared):
            domains = self.declared[0].acceptance
            if each.name in known:
                raise Misfit(("drafter", number, "name"), "a name of its own", each.name)
            if each.acceptance.keys() != domains.keys():
                told = f"the domains of {self.declared[0].name}: {', '.join(domains)}"
                raise Misfit(("drafter", number, "acceptance"), told, each.acceptance)
            known.append(each.name)

    def _check_steps(self) -> None:
        silent_s = SILENT_S if self.silent_s is None else self.silent_s
        for number, step in enumerate(self.steps):
            for key, names in (("slow", step.slow), ("lost", step.lost)):
                if not set(names) <= set(self.all_drafters):
                    told = f"names among the experiment's drafters {', '.join(self.all_drafters)}"
                    raise Misfit(("step", number, key), told, names)
            told = f"less than the {step.seconds:g} s of a step in which a drafter is lost"
            expect(not step.lost or step.seconds > silent_s, "silent_s", silent_s, told)

    @property
    def all_drafters(self) -> tuple[str, ...]:
        """The names of the models beside the target."""
        if self.is_synthetic:
            return tuple(each.name for each in self.declared) or (SYNTHETIC,)
        return self.drafters or (str(self.drafter or BUNDLED),)


class TunedFile(Table, frozen=True, kw_only=True):
    method: Annotated[tuple[dict[str, Any], ...], some_tables("method")]


def read_experiment(path: Path) -> Bench:
    """Reads an experiment; raises `InputError` naming file, table, key and what was expected."""
    file = read_toml(path, ExperimentFile, "an experiment")
    drafters, profile = file.all_drafters, None
    with at(path):
        testbeds = [_testbed(number, each, path, drafters) for number, each in enumerate(file.testbed, 1)]
        names = [testbed.name for testbed in testbeds]
        check_once("testbed", names)
        setups = [Setup(name=name, method=name) for name in file.methods]
        setups += _setups(file.method, drafters, names)
        if file.profile is not None:
            profile = _found("profile", find_acceptance_profile, file.profile, path)
    if file.tuned is not None:
        setups += read_setups(path.parent / file.tuned)
    with at(path):
        _check_names(setups)
        _check_published(file.published, names, [setup.name for setup in setups])
    prompts = [
        name if name in PROMPT_FILES else str(path.parent / name)
        for name in file.prompts or (SHIPPED_PROMPTS,)
    ]
    changed = {
        "temperatures": tuple(dict.fromkeys(file.temperatures)),
        "seeds": tuple(dict.fromkeys(file.seeds)),
        "users": tuple(sorted(set(file.users))),
    }
    return Bench(
        **{name: getattr(file, name) for name in Asked.__struct_fields__} | changed,
        name=file.name or path.stem,
        testbeds=tuple(testbeds),
        setups=tuple(setups),
        drafters=drafters,
        acceptance=file.acceptance or 0.0,
        profile=profile,
        declared=file.declared,
        correlation=file.correlation or 0.0,
        prompts=tuple(dict.fromkeys(prompts)),
        cluster=None if file.cluster is None else path.parent / file.cluster,
        silent_s=SILENT_S if file.silent_s is None else file.silent_s,
    )


def _found(key: str, find: Callable[[str], Found], name: str, experiment: Path) -> Found:
    """What a name at a key stands for: that of a file beside the experiment, or of something shipped."""
    with at(key):
        return find(str(experiment.parent / name) if name.endswith(".toml") else name)


def read_setups(path: Path) -> tuple[Setup, ...]:
    tables = read_toml(path, TunedFile, "tuned methods").method
    with at(path):
        found = _setups(tables)
        _check_names(found)
    return tuple(found)


def check_once(key: str, names: Sequence[str]) -> None:
    for name in names:
        expect(names.count(name) == 1, key, Told(f"{name!r:.80} twice"), "each name once")


def _check_names(setups: Sequence[Setup]) -> None:
    """A name may come twice, with other parameters, as long as the testbeds differ."""
    for number, setup in enumerate(setups):
        for other in setups[:number]:
            is_apart = other.testbeds and setup.testbeds and set(other.testbeds).isdisjoint(setup.testbeds)
            if other.name == setup.name and not is_apart:
                raise Misfit(("method",), "each name once on a testbed", Told(f"{setup.name!r:.80} twice"))


def _check_published(tables: Sequence[Published], testbeds: Sequence[str], setups: Sequence[str]) -> None:
    for number, each in enumerate(tables, 1):
        with at(f"published {number}"):
            expect(each.testbed in testbeds, "testbed", each.testbed, f"one of {', '.join(testbeds)}")
            told = f"rates of at least one of the methods {'; '.join(dict.fromkeys(setups))}"
            expect(each.tokens_per_s.keys() <= set(setups), "tokens_per_s", each.tokens_per_s, told)


def _testbed(number: int, table: TestbedTable, experiment: Path, drafters: Sequence[str]) -> Testbed:
    with at(f"testbed {number}"):
        devices = counted_profiles(table.devices, experiment)
        shape = _found("shape", find_shape, table.shape, experiment)
        usual = f"eagle-{shape.name}"
        found = Testbed(
            name=table.name,
            devices=devices,
            head=devices[0] if table.head is None else _found("head", find_profile, table.head, experiment),
            link=table.link,
            shape=shape,
            drafter_shape=_found("drafter_shape", find_shape, table.drafter_shape or usual, experiment),
            precision=table.precision,
            slowdown=table.slowdown,
            head_slowdown=table.head_slowdown or table.slowdown,
            head_s=table.head_ms / 1000,
        )
        boards = []
        for place, each in enumerate(table.drafters, 1):
            with at(f"drafters {place}"):
                boards.append(_board(each, experiment, found, drafters))
        found = replace(found, boards=tuple(boards))
        with at("devices"):
            assert found.layers
        with at("precision"):
            for device in (*devices, found.head):
                device.rates(found.precision)
        with at("drafters"):
            check_once("models", [name for board in found.boards for name in board.models])
    return found


def _board(
    table: BoardTable, experiment: Path, testbed: Testbed, drafters: Sequence[str]
) -> DrafterPlacement:
    told = f"names among the experiment's drafters {', '.join(drafters)}"
    expect(set(table.models) <= set(drafters), "models", table.models, told)
    device = None if table.device is None else _found("device", find_profile, table.device, experiment)
    assert testbed.drafter_shape is not None, "an experiment's testbed times its drafter"
    found = DrafterPlacement(
        models=table.models,
        shape=_found("shape", find_shape, table.shape or testbed.drafter_shape.name, experiment),
        precision=table.precision or testbed.precision,
        device=device,
        link=None if device is None else table.link if table.bandwidth_mbps else testbed.link,
    )
    with at("precision"):
        (device or testbed.head).rates(found.precision)
    return found


def counted_profiles(texts: Sequence[str], experiment: Path) -> tuple[DeviceProfile, ...]:
    """Of `raspberry-pi-5` or `8 x raspberry-pi-5` in a list, one for each device."""
    found: list[DeviceProfile] = []
    for text in texts:
        count, times, name = text.partition(" x ")
        is_right = not times or (count.isdecimal() and 1 <= int(count) <= STAGES_MAX)
        expect(is_right, "devices", text, 'names such as "jetson-orin-nano" or "4 x jetson-orin-nano"')
        found += [_found("devices", find_profile, name or text, experiment)] * int(count if times else 1)
    return tuple(found)


def _setups(
    tables: Sequence[dict[str, Any]], drafters: Sequence[str] = (), testbeds: Sequence[str] | None = None
) -> list[Setup]:
    """`drafters` and `testbeds` are the experiment's, of which a setup may choose some; a file of tuned ones
    has no drafters to choose from, and any testbeds."""
    found = []
    for number, table in enumerate(tables, 1):
        with at(f"method {number}"):
            setup = _setup(table, drafters)
            told = f"names among {'; '.join(testbeds or ())}"
            expect(testbeds is None or set(setup.testbeds) <= set(testbeds), "testbeds", setup.testbeds, told)
            found.append(setup)
    return found


def _setup(data: dict[str, Any], drafters: Sequence[str]) -> Setup:
    name = data.get("method", data.get("name", NOTHING))
    expect(name in METHODS, "method", name, f"one of {', '.join(METHODS)}")
    method = find_method(name)
    table = fit(data, _table_of(name))
    options = {each.name: getattr(table, each.name) for each in method.parameters if each.name in data}
    chosen = _chosen(table, name, drafters)
    if table.chain is not None and method.takes_chain:
        options[CHAIN] = None if table.chain == AUTO else tuple(range(len(chosen or ())))
    return Setup(
        name=table.name,
        method=name,
        options=options,
        coupled=table.coupled,
        published=table.published,
        drafters=chosen,
        chain="" if table.chain is None else AUTO if table.chain == AUTO else FIXED,
        testbeds=table.testbeds,
    )


_MOST = {"width": WIDTH_MAX}
"""Where what is kept of a drafter's answers bounds a method's parameter."""


@cache
def _table_of(method: str) -> type[MethodTable]:
    """The type of a method's tables."""
    fields = []
    for each in find_method(method).parameters:
        most = _MOST.get(each.name, each.most)
        bounds = {int: Meta(ge=1, le=int(most)), float: Meta(ge=0, le=most)}
        kind = Annotated[each.kind, bounds[each.kind]] if each.kind in bounds else each.kind
        fields.append((each.name, kind, None))
    bases = (MethodTable,)
    found = defstruct(method, fields, bases=bases, frozen=True, kw_only=True, forbid_unknown_fields=True)
    return cast(type[MethodTable], found)


def _chosen(table: MethodTable, method: str, drafters: Sequence[str]) -> tuple[str, ...] | None:
    """The drafters that a setup names: those of `drafters`, or of a `chain`, which may be empty, or `auto`
    for a choice among all of them."""
    key, names = ("drafters", table.drafters) if table.chain in (None, AUTO) else (CHAIN, table.chain)
    if names is None:
        return None if table.chain is None else tuple(drafters)
    most = drafters_max(method)
    told = f"at most {most} of the experiment's drafters {', '.join(drafters)}, each once"
    expect(set(names) <= set(drafters) and len(set(names)) == len(names) <= most, key, names, told)
    return tuple(names)


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
    known = dict.fromkeys([*(setup.name for setup in setups), *METHODS])
    check_names("--methods", names, list(known), ", ")
    found = []
    for name in dict.fromkeys(names):
        found += [setup for setup in setups if setup.name == name] or [Setup(name=name, method=name)]
    return tuple(found)
