"""Which published drafters go with a model, which of them are here, and what each would bring.

What is here is in the hub's cache; nobody is asked for anything. What a drafter would bring is the planner's
formula, with the share of guesses that is published as right. Which of those that are here is taken where
the user names none does not depend on the devices: it is the one that is best on four equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flowspec.draft.kinds import FALLBACK, of_layout, sketched
from flowspec.draft.kinds.base import FileKind, Kind, WordKind
from flowspec.draft.kinds.ngram import Ngram
from flowspec.draft.published import Published, Target, drafters_of, target_of
from flowspec.errors import InputError, first_line
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.hub import cached_sizes
from flowspec.plan.advice import GIGABIT
from flowspec.plan.memory import weights_of
from flowspec.plan.planner import make_plan, rate_split
from flowspec.plan.profile import find_profile
from flowspec.plan.shape import ModelShape, find_shape, shape_of
from flowspec.plan.sites import Network, PlannedDrafter, PlanRequest, Site
from flowspec.plan.split import even_split

BOARD, BOARDS = "jetson-orin-nano", 4
"""What drafters are compared on where nobody says on what: so many of these, with room for any model."""
PRECISION = "float16"
MEMORY_BYTES = 1 << 60
GAIN_MIN = 0.05
"""A download that would bring less is not told of."""
Rate = Callable[[PlannedDrafter | None], float]
"""Tokens/s by the planner's formula, with a drafter."""
Download = tuple["Candidate", float]
"""A drafter that is not here, and by how much answers would be faster with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A published drafter for the model in question.

    `name` is what `--drafter` takes. `bytes_here` are those of its files where it is here. `refusal` says why
    it cannot be used as far as that is known; where it is empty `planned` is what the planner reckons with,
    None if that is not known."""

    row: Published
    name: str
    is_here: bool
    refusal: str
    planned: PlannedDrafter | None
    bytes_here: int = 0

    @property
    def is_usable(self) -> bool:
        return self.is_here and not self.refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The published drafters of a model. `shape` is the model's; None where its files are not here and the
    planner does not know it. `target` is None for a model that nothing is published for."""

    target: Target | None = None
    shape: ModelShape | None = None
    found: tuple[Candidate, ...] = ()


def candidates(model: str) -> Candidates:
    """Those of a model by its name or files, which are not fetched."""
    if model == BUNDLED:
        return Candidates()
    files = _here(model)
    target = target_of(model, files)
    if target is None:
        return Candidates()
    shape = None if target.shape is None else find_shape(target.shape)
    if files is not None:
        shape = shape_of(files.spec, model, files.filed_bytes)
    found = tuple(_candidate(row, files, shape) for row in drafters_of(target))
    return Candidates(target=target, shape=shape, found=found)


def on(request: PlanRequest) -> Rate:
    """What each would give on a plan's devices, each with the plan that is best for it; raises
    `DoesNotFit`."""
    return lambda planned: make_plan(replace(request, drafter=planned)).forecast.tokens_per_s


def on_equal_devices(shape: ModelShape, precision: str = PRECISION) -> Rate:
    """The same on four equal devices and one for the head, with room for any model."""
    board = find_profile(BOARD)
    sites = [
        Site(name=f"{BOARD}-{number}", profile=board, memory_bytes=MEMORY_BYTES, runs_stages=number > 0)
        for number in range(BOARDS + 1)
    ]
    head, *stages = sites
    request = PlanRequest(
        sites=tuple(sites),
        network=Network(default=GIGABIT),
        shape=shape,
        weights=weights_of(shape),
        precisions=(precision,),
        drafter=None,
        head=head.name,
    )
    order = stages[: shape.layers]
    layers = even_split(shape.layers, len(order))

    def rate(planned: PlannedDrafter | None) -> float:
        plan = rate_split(replace(request, drafter=planned), order, head, layers)
        return plan.forecast.tokens_per_s

    return rate


def without_model(shape: ModelShape) -> PlannedDrafter:
    """What guesses where nobody says otherwise: n-grams."""
    return Ngram(FALLBACK).reckoned(shape)


def best_here(all_of_them: Candidates) -> Candidate | None:
    """The one to take where the user names none; None where n-grams are as good, or nothing is here."""
    usable = [each for each in all_of_them.found if each.is_usable and each.planned is not None]
    if all_of_them.shape is None or not usable:
        return None
    rate = on_equal_devices(all_of_them.shape)
    rated = [(rate(each.planned), each) for each in usable]
    most, best = max(rated, key=lambda each: each[0])
    return best if most > rate(without_model(all_of_them.shape)) else None


def best_download(all_of_them: Candidates, rate: Rate, now: PlannedDrafter | None) -> Download | None:
    """The one that is not here and would bring most, and by how much answers would be faster than they are
    `now`; None where none would bring much. Only those count of which it is published how often they are
    right, and in which form their weights come."""
    wanted = [
        each
        for each in all_of_them.found
        if not each.is_here and not each.refusal and each.planned is not None
        if each.row.acceptance is not None and each.row.files is not None
    ]
    if not wanted:
        return None
    rated = [(rate(each.planned), each) for each in wanted]
    most, best = max(rated, key=lambda each: each[0])
    gain = most / rate(now) - 1
    return (best, gain) if gain >= GAIN_MIN else None


def published_acceptance(name: str, target: str) -> float | None:
    """The share of a drafter's guesses that is published as right, for a target by their names."""
    found = target_of(target)
    rows: Sequence[Published] = () if found is None else drafters_of(found)
    return next((row.acceptance for row in rows if name == _name(row, of_layout(row.layout))), None)


def _here(model: str) -> ModelFiles | None:
    """The files of a model that can be looked into without asking anybody."""
    try:
        files = ModelFiles(model, may_fetch=False)
        files.raw_config()
    except InputError:
        return None
    return files


def _name(row: Published, kind: type[Kind] | None) -> str:
    return kind.word if kind is not None and issubclass(kind, WordKind) else row.drafter


def _candidate(row: Published, target: ModelFiles | None, shape: ModelShape | None) -> Candidate:
    kind = of_layout(row.layout)
    is_word = kind is not None and issubclass(kind, WordKind)  # it comes with the target
    sizes = {} if is_word else cached_sizes(row.drafter)
    is_here = target is not None if is_word else "config.json" in sizes
    refusal, planned = "", None
    if kind is None:
        refusal = f"FlowSpec does not run {row.layout} yet"
    else:
        try:
            planned = None if shape is None else _planned(row, kind, shape, is_here=is_here)
            if is_here and target is not None:
                _opened(row, kind).check(target)
            elif not is_here and issubclass(kind, FileKind) and row.files not in (None, *kind.file_forms):
                refusal = f"its weights come as a .{row.files}, to be converted first (docs/security.md)"
        except InputError as error:
            refusal = first_line(error)
    return Candidate(
        row=row,
        name=_name(row, kind),
        is_here=is_here,
        refusal=refusal,
        planned=planned,
        bytes_here=sum(sizes.values()) if is_here else 0,
    )


def _opened(row: Published, kind: type[Kind]) -> Kind:
    if issubclass(kind, FileKind):
        return kind(row.drafter, ModelFiles(row.drafter, may_fetch=False))
    return kind(_name(row, kind))


def _planned(row: Published, kind: type[Kind], shape: ModelShape, *, is_here: bool) -> PlannedDrafter | None:
    """What the planner reckons with: by the drafter's files, else as if it had the usual shape."""
    if is_here or issubclass(kind, WordKind):
        planned = _opened(row, kind).reckoned(shape)
    else:
        planned = kind.unseen(shape, row.layout) if row.shape is None else sketched(row.shape, shape)
    if planned is None:
        return None
    return replace(planned, name=row.drafter, acceptance=row.acceptance or planned.acceptance)
