"""Experiments of rivals (`configs/experiments/rivals.toml`): models on boards over networks, by how often a
drafter is right. Every mistake in such a file is one line with file, table, key and what was expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta, field, structs

from flowspec.bench.config import Acceptance
from flowspec.bench.experiments import LinkTable, check_once, counted_profiles
from flowspec.core.protocol.precision import OF_ANY_MODEL
from flowspec.draft.kinds import sketched
from flowspec.draft.kinds.eagle import SKETCH
from flowspec.plan.memory import weights_of
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.shape import ModelShape, find_shape
from flowspec.plan.sites import Network, PlanRequest, site
from flowspec.plan.tables import Count, Positive, Table, Text, Texts, among, at, read_toml, some_tables
from flowspec.validation import Misfit, expect

FLAG = "rivals"
"""The key that tells such an experiment from others."""
ANSWERS_MAX = 1000
Acceptances = Annotated[tuple[Acceptance, ...], Meta(min_length=1)]


class RivalNetwork(LinkTable, frozen=True, kw_only=True):
    """Links that are all alike, and the shares of right guesses that are tried over them."""

    name: Text
    acceptances: Acceptances = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Boards:
    name: str
    devices: tuple[DeviceProfile, ...]


class BoardsTable(Table, frozen=True, kw_only=True):
    name: Text
    devices: Texts


class Figure(Table, frozen=True, kw_only=True):
    """What others measured on such boards, for people: `what` says how, and where it is from."""

    testbed: str
    model: str
    tokens_per_s: Positive
    what: Text


class AskedOfRivals(Table, frozen=True, kw_only=True):
    """What such an experiment has as its file says it. `published` is the acceptance of the drafters that
    others published, among those that are tried. Each rate is of `answers` answers of `new_tokens` tokens."""

    precision: Annotated[str, among(OF_ANY_MODEL)]
    context: Count = 2048
    typical_context: Count = 512
    prompt: Count = 512
    new_tokens: Count = 48
    answers: Annotated[int, Meta(ge=1, le=ANSWERS_MAX)] = 1
    published: Acceptance
    networks: Annotated[tuple[RivalNetwork, ...], some_tables("network")] = field(name="network")
    figures: Annotated[tuple[Figure, ...], some_tables("figure")] = field(name="figure", default=())


class RivalFile(AskedOfRivals, frozen=True, kw_only=True):
    rivals: bool
    name: Text | None = None
    models: Texts
    acceptances: Acceptances
    testbed: Annotated[tuple[BoardsTable, ...], some_tables("testbed")]

    def __post_init__(self) -> None:
        expect(self.rivals, FLAG, self.rivals, "true")
        check_once("network", [each.name for each in self.networks])
        check_once("testbed", [each.name for each in self.testbed])
        tried = [each.acceptances or self.acceptances for each in self.networks]
        told = "one of the acceptances of each network"
        expect(all(self.published in each for each in tried), "published", self.published, told)
        for number, each in enumerate(self.figures):
            testbeds = [boards.name for boards in self.testbed]
            for key, name, known in (("testbed", each.testbed, testbeds), ("model", each.model, self.models)):
                if name not in known:
                    raise Misfit(("figure", number, key), f"one of {', '.join(known)}", name)


class RivalExperiment(AskedOfRivals, frozen=True, kw_only=True):
    name: str
    models: tuple[ModelShape, ...]
    testbeds: tuple[Boards, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model on some boards over a network."""

    testbed: Boards
    network: RivalNetwork
    model: ModelShape


def is_of_rivals(path: Path) -> bool:
    return FLAG in read_toml(path, dict, "an experiment")


def read_rivals(path: Path) -> RivalExperiment:
    """Raises `InputError`."""
    file = read_toml(path, RivalFile, "an experiment of rivals")
    with at(path), at("models"):
        models = tuple(map(find_shape, file.models))
    testbeds = []
    for number, each in enumerate(file.testbed, 1):
        with at(path), at(f"testbed {number}"):
            testbeds.append(Boards(name=each.name, devices=counted_profiles(each.devices, path)))
    networks = tuple(
        structs.replace(each, acceptances=tuple(sorted(set(each.acceptances or file.acceptances))))
        for each in file.networks
    )
    shared = {name: getattr(file, name) for name in AskedOfRivals.__struct_fields__} | {"networks": networks}
    return RivalExperiment(name=file.name or path.stem, models=models, testbeds=tuple(testbeds), **shared)


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
