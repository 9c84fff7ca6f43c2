"""Experiments of the laboratory, from `lab/experiments/*.toml`: what those of `flowspec bench` have, and
drafters of `lab.bench.drafters`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from flowspec.bench.cases import SYNTHETIC_DOMAIN, PlainCase, read_cases, warm_up_cases
from flowspec.bench.drafters import VirtualDrafter, open_drafter
from flowspec.bench.engine import Engine
from flowspec.bench.experiment import (
    SIMULATED,
    Experiment,
    ExperimentFile,
    find_experiment,
    read_experiment,
    read_file,
)
from flowspec.cli.bench import add_arguments, flags_of, pick_experiment
from flowspec.errors import InputError
from flowspec.plan.tables import Share, Text, at
from flowspec.validation import Misfit, expect
from lab.bench.drafters import Declared, DeclaredDrafter, Profiled
from lab.bench.profiles import Profile, find_profile
from lab.command import Parser

FOLDER = Path(__file__).parents[1] / "experiments"


class Study(Experiment, frozen=True, kw_only=True):
    """An experiment whose synthetic drafter is right as its `profile` says; or there are several, as
    `declared`, whose luck has a `correlation`. With `nothing_learnt`, heads have answered nothing before."""

    profile: Profile | None = None
    declared: tuple[DeclaredDrafter, ...] = ()
    correlation: float = 0.0
    nothing_learnt: bool = False

    @property
    def needs_acceptance(self) -> bool:
        return self.is_synthetic and not (self.profile or self.declared)

    def cases(self, cache: Path | None, *, for_tuning: bool = False) -> list[PlainCase]:
        domains: Sequence[str] = (SYNTHETIC_DOMAIN,)
        if self.declared:
            domains = tuple(self.declared[0].acceptance)
        elif self.profile is not None:
            domains = self.profile.domains
        return read_cases(self, cache, domains=domains, have_words=bool(self.declared), for_tuning=for_tuning)


class StudyFile(ExperimentFile, frozen=True, kw_only=True):
    drafter: Text | list[DeclaredDrafter] | None = None  # type: ignore[assignment]
    profile: Text | None = None
    correlation: Share | None = None
    nothing_learnt: bool = False

    @property
    def declared(self) -> tuple[DeclaredDrafter, ...]:
        return tuple(self.drafter) if isinstance(self.drafter, list) else ()

    @property
    def needs_acceptance(self) -> bool:
        return self.is_synthetic and not (self.profile or self.declared)

    @property
    def all_drafters(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.declared) or super().all_drafters

    @property
    def needless(self) -> dict[str, str]:
        keys = super().needless
        if self.declared:
            own = "beside tables [[drafter]], which say their own"
            del keys["drafter"]
            return keys | {"acceptance": own, "profile": own}
        keys["correlation"] = "without tables [[drafter]]"
        if self.profile:
            keys["acceptance"] = "beside `profile`"
        return keys

    def __post_init__(self) -> None:
        expect(self.is_synthetic or not (self.declared or self.profile), "model", self.model, "synthetic")
        super().__post_init__()
        names = [each.name for each in self.declared]
        expect(len(set(names)) == len(names), "drafter", names, "a name of its own for each")
        for number, each in enumerate(self.declared):
            domains = self.declared[0].acceptance
            if each.acceptance.keys() != domains.keys():
                expected = f"the domains of {names[0]}: {', '.join(domains)}"
                raise Misfit(("drafter", number, "acceptance"), expected, each.acceptance)


def find_study(name: str) -> Path:
    """A file, one of `lab/experiments` by its name, or a shipped experiment; raises `InputError`."""
    path = FOLDER / f"{name}.toml"
    return path if path.is_file() else find_experiment(name)


def read_study(path: Path, flags: Mapping[str, Any] = {}) -> Study:
    """`flags` have values instead of the file's, by its keys. Raises `InputError` naming file, table and key,
    or the flag, and what was expected."""
    file = read_file(path, StudyFile, flags)
    profile = None
    if file.profile is not None:
        with at(path), at("profile"):
            name = file.profile
            profile = find_profile(str(path.parent / name) if name.endswith(".toml") else name)
    return Study(
        **structs.asdict(read_experiment(path, StudyFile, flags)),
        profile=profile,
        declared=file.declared,
        correlation=file.correlation or 0.0,
        nothing_learnt=file.nothing_learnt,
    )


# ------------------------------------------------------------------------------------------ what is run


def make_parser(name: str, doc: str | None) -> Parser:
    """The flags of `flowspec bench` that make sense here, and a few more."""
    parser = Parser(name, doc, conflict_handler="resolve")  # both have --json
    add_arguments(parser)
    parser.add_argument(
        "--profile", metavar="NAME-OR-FILE", help="how often a synthetic drafter is right: of lab/profiles"
    )
    parser.add_argument(
        "--nothing-learnt", action="store_true", help="by heads that have answered nothing before"
    )
    return parser


def pick_study(args: argparse.Namespace) -> Study:
    """What its file says, with what the flags say instead; raises `InputError`."""
    flags = flags_of(args) | ({"profile": args.profile} if args.profile else {})
    if args.profile or args.acceptance:  # one takes the place of the other in the file
        flags = {"profile": None, "acceptance": None} | flags
    if args.nothing_learnt:
        flags["nothing_learnt"] = True
    study = read_study(find_study(args.experiment), flags)
    picked = pick_experiment(args, study)
    assert isinstance(picked, Study)
    if picked.world != SIMULATED:
        raise InputError(f"--world: the laboratory's experiments run in virtual time, got {picked.world}")
    return picked


def engine_of(study: Study, cases: Sequence[PlainCase]) -> partial[Engine]:
    """Makes the engine of each process."""
    warm_up = () if study.nothing_learnt else warm_up_cases(cases)
    return partial(Engine, study, warm_up, open_drafter=open_drafter_of)


def open_drafter_of(study: Experiment, name: str, coupled: bool) -> VirtualDrafter:
    assert isinstance(study, Study)
    if study.profile is not None:
        return Profiled(study.profile, study.context)
    for number, each in enumerate(study.declared):
        if each.name == name:
            return Declared(each, number, study.correlation, study.context)
    return open_drafter(study, name, coupled)
