"""Experiments of rivals (`configs/experiments/rivals.toml`): models on boards over networks, by how often a
drafter is right. Every mistake in such a file is one line with file, table, key and what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flowspec.bench.experiments import ACCEPTANCE_MAX, counted_profiles, link_of
from flowspec.core.protocol.precision import OF_ANY_MODEL
from flowspec.draft.kinds import sketched
from flowspec.draft.kinds.eagle import SKETCH
from flowspec.errors import InputError
from flowspec.plan.memory import weights_of
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.shape import ModelShape, find_shape
from flowspec.plan.sites import Network, PlanRequest, site
from flowspec.plan.tables import Table, read_toml
from flowspec.plan.timing import LinkSpec

FLAG = "rivals"
"""The key that tells such an experiment from others."""
ANSWERS_MAX = 1000
_KEYS = {
    "name",
    FLAG,
    "models",
    "precision",
    "context",
    "typical_context",
    "prompt",
    "new_tokens",
    "answers",
    "acceptances",
    "published",
    "network",
    "testbed",
    "figure",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalNetwork:
    """Links that are all alike, and the shares of right guesses that are tried over them."""

    name: str
    link: LinkSpec
    acceptances: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boards:
    name: str
    devices: tuple[DeviceProfile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What others measured on such boards, for people: `what` says how, and where it is from."""

    testbed: str
    model: str
    tokens_per_s: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalExperiment:
    """`published` is the acceptance of the drafters that others published, among those that are tried. Each
    rate is of `answers` answers of `new_tokens` tokens."""

    name: str
    models: tuple[ModelShape, ...]
    precision: str
    context: int
    typical_context: int
    prompt: int
    new_tokens: int
    answers: int
    published: float
    networks: tuple[RivalNetwork, ...]
    testbeds: tuple[Boards, ...]
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model on some boards over a network."""

    testbed: Boards
    network: RivalNetwork
    model: ModelShape


def is_of_rivals(path: Path) -> bool:
    return FLAG in read_toml(path, "an experiment").data


def read_rivals(path: Path) -> RivalExperiment:
    """Raises `InputError`."""
    table = read_toml(path, "an experiment of rivals")
    table.check(_KEYS)
    if not table.flag(FLAG, True):
        table.wrong(FLAG, "true")
    acceptances = _acceptances(table)
    networks = tuple(_network(each, acceptances) for each in table.tables("network"))
    testbeds = tuple(_boards(each, path) for each in table.tables("testbed"))
    for key, names in (
        ("network", [network.name for network in networks]),
        ("testbed", [testbed.name for testbed in testbeds]),
    ):
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"{path}: {key}: expected each name once, got {name!r:.80} twice")
    published = table.number("published", most=ACCEPTANCE_MAX)
    if any(published not in network.acceptances for network in networks):
        table.wrong("published", "one of the acceptances of each network")
    return RivalExperiment(
        name=table.text("name", path.stem),
        models=tuple(table.found("models", partial(find_shape, name)) for name in table.texts("models")),
        precision=table.text("precision", among=OF_ANY_MODEL),
        context=table.whole("context", 2048),
        typical_context=table.whole("typical_context", 512),
        prompt=table.whole("prompt", 512),
        new_tokens=table.whole("new_tokens", 48),
        answers=table.whole("answers", 1, most=ANSWERS_MAX),
        published=published,
        networks=networks,
        testbeds=testbeds,
        figures=tuple(
            _figure(each, [testbed.name for testbed in testbeds], table.texts("models"))
            for each in table.tables("figure")
        )
        if "figure" in table.data
        else (),
    )


def _figure(table: Table, testbeds: list[str], models: list[str]) -> Figure:
    table.check({"testbed", "model", "tokens_per_s", "what"})
    return Figure(
        testbed=table.text("testbed", among=testbeds),
        model=table.text("model", among=models),
        tokens_per_s=table.number("tokens_per_s"),
        what=table.text("what"),
    )


def _acceptances(table: Table) -> tuple[float, ...]:
    found = table.numbers("acceptances")
    if not all(0 < each <= ACCEPTANCE_MAX for each in found):
        table.wrong("acceptances", f"numbers above 0, up to {ACCEPTANCE_MAX:g}")
    return tuple(sorted(set(found)))


def _network(table: Table, acceptances: tuple[float, ...]) -> RivalNetwork:
    table.check({"name", "bandwidth_mbps", "latency_ms", "jitter_ms", "acceptances"})
    return RivalNetwork(
        name=table.text("name"),
        link=link_of(table),
        acceptances=_acceptances(table) if "acceptances" in table.data else acceptances,
    )


def _boards(table: Table, experiment: Path) -> Boards:
    table.check({"name", "devices"})
    return Boards(name=table.text("name"), devices=counted_profiles(table, "devices", experiment))


def cells_of(bench: RivalExperiment) -> Iterator[Cell]:
    for testbed in bench.testbeds:
        for network in bench.networks:
            for model in bench.models:
                yield Cell(testbed=testbed, network=network, model=model)


def request_of(bench: RivalExperiment, cell: Cell, acceptance: float) -> PlanRequest:
    """What a planner is asked for a cell."""
    drafter = sketched(SKETCH, cell.model)
    return PlanRequest(
        sites=tuple(
            site(f"{profile.name}-{number}", profile)
            for number, profile in enumerate(cell.testbed.devices, 1)
        ),
        network=Network(default=cell.network.link),
        shape=cell.model,
        weights=weights_of(cell.model),
        precisions=(bench.precision,),
        drafter=replace(drafter, acceptance=acceptance),
        context=bench.context,
        typical_context=bench.typical_context,
    )
