"""How answers are made: the method, and the models beside the target that it makes use of, by their names and
before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowspec.core.methods import CHAIN, CHAINED, DEFAULT, default_method, find_method
from flowspec.core.protocol import limits
from flowspec.draft.catalogue import best_here, find_candidates
from flowspec.draft.registry import FALLBACK, NONE, WITHOUT_TENSORS, check_drafter, find_drafter, model_name
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED
from flowspec.runtime.cluster_file import read_drafters

AUTO = "auto"
"""A chain that the method puts together by itself."""
BUNDLED_CHAIN = ("draft", "mid")


def method_for(drafters: Sequence[str], chain: str | None) -> str:
    """Where none is named. Look-ups beside one model need nobody to choose between them."""
    models = [name for name in drafters if name not in WITHOUT_TENSORS]
    return default_method(has_team=len(models) > 1, has_chain=chain is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How answers are made: the method, and what drafts for it (none given: the bundled drafter and look-ups
    for the bundled model, else look-ups alone). With `is_default` nobody named them: look-ups stand in for a
    model that cannot be opened.

    `chain` are the models below the target, lowest first and with commas, or `auto`, where the drafters are
    what there is to choose from. `nodes` and `depth` shape the trees of the methods that have fixed ones;
    `options` are the method's own (`core.methods.options_of`). `coupled`: a drafter that is a model ranks
    with the target's noise. With `prefix_caching` prompts begin with what other conversations have computed.
    With `keep_learnt` it begins with what earlier runs learnt of the drafters, and keeps what it learns.
    """

    method: str = DEFAULT
    drafters: tuple[str, ...] = ()
    chain: str | None = None
    nodes: int | None = None
    depth: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    coupled: bool = True
    prefix_caching: bool = True
    keep_learnt: bool = False
    is_default: bool = False

    def drafters_for(self, model: str, placed: Sequence[str] = ()) -> tuple[str, ...]:
        """The names of the models beside the target, those of a chain lowest first; none for a method that
        does not draft.

        `placed` are those that the cluster file has devices for: what is used where nothing is given.
        """
        if not find_method(self.method).drafts or self.drafters == (NONE,):
            return ()
        if self.chain not in (None, AUTO):
            assert self.chain is not None
            return tuple(filter(None, self.chain.split(",")))
        own = BUNDLED_CHAIN if self.chain == AUTO else self.beside_look_ups(BUNDLED)
        names = self.drafters or tuple(placed) or (own if model == BUNDLED else (FALLBACK,))
        if self.chain == AUTO:
            return tuple(sorted(names, key=lambda name: find_drafter(name).parameter_count()))
        return names

    def beside_look_ups(self, name: str) -> tuple[str, ...]:
        """A drafter that nobody named, with look-ups in the conversation where the method makes use of both:
        they take next to no time, and know what is said again."""
        takes_both = find_method(self.method).drafters_max > 1 and self.method not in CHAINED
        return (name, FALLBACK) if takes_both else (name,)

    def check(self, model: str, placed: Sequence[str] = ()) -> None:
        """Raises `InputError` for names that mean nothing, or that do not go together; `place` looks into the
        models."""
        names = self.drafters_for(model, placed)
        if self.chain is not None and self.method not in CHAINED:
            raise InputError(f"--chain goes with method {', '.join(CHAINED)}, got {self.method}")
        if self.chain not in (None, AUTO) and self.drafters:
            raise InputError("--chain names its models; leave out --drafter, or say --chain auto")
        if NONE in self.drafters and len(self.drafters) > 1:
            raise InputError("--drafter: expected drafters or none, got both")
        if len(names) > limits.DRAFTERS_MAX:
            raise InputError(f"--drafter: expected at most {limits.DRAFTERS_MAX} drafters, got {len(names)}")
        known = [model_name(name) for name in names]
        twice = [name for name, each in zip(names, known, strict=True) if known.count(each) > 1]
        if twice:
            raise InputError(f"--drafter: expected each drafter once, got {twice[-1]!r} twice")
        most = find_method(self.method).drafters_max
        if len(names) > most:
            raise InputError(
                f"method {self.method} makes use of {most} drafter, got {len(names)}: {', '.join(names)}"
            )
        for name in names:
            check_drafter(name, may_fetch=self.may_fetch)

    def is_open(self, cluster: Path | None) -> bool:
        """Whether nobody says what drafts, neither here nor in the cluster file, and something may."""
        is_said = self.drafters or self.chain is not None or not find_method(self.method).drafts
        return not is_said and (cluster is None or not read_drafters(cluster))

    @property
    def may_fetch(self) -> bool:
        """Whether the drafters' files may be fetched: what nobody named is taken as it is here."""
        return not self.is_default

    def method_options(self, names: Sequence[str]) -> dict[str, Any]:
        """What `make_method` takes beside the name, where these are the models beside the target."""
        options = {"nodes": self.nodes, "depth": self.depth, **self.options}
        if self.chain not in (None, AUTO):
            options[CHAIN] = tuple(range(len(names)))
        return options

    def levels(self, names: Sequence[str]) -> tuple[int, ...]:
        """The level of each model beside the target: of a chain its place, else all are drafters."""
        return tuple(range(len(names))) if self.method in CHAINED else (0,) * len(names)


def choose_decoding(
    cluster: Path | None,
    method: str | None,
    drafters: tuple[str, ...],
    chain: str | None = None,
    *,
    nodes: int | None = None,
    depth: int | None = None,
    prefix_caching: bool = True,
    keep_learnt: bool = False,
) -> Decoding:
    """What is given; a method that is not is chosen by the drafters, which are those of the cluster file if
    none are given."""
    names = drafters or (() if cluster is None else tuple(read_drafters(cluster)))
    return Decoding(
        method=method or method_for(names, chain),
        drafters=drafters,
        chain=chain,
        nodes=nodes,
        depth=depth,
        prefix_caching=prefix_caching,
        keep_learnt=keep_learnt,
    )


def choose_drafter(decoding: Decoding, model: str, cluster: Path | None) -> Decoding:
    """Where nobody says what drafts, the best published drafter for the model that is here, if there is one:
    files are looked at where they are, and none is fetched."""
    best = best_here(find_candidates(model)[1]) if decoding.is_open(cluster) else None
    if best is None:
        return decoding
    return replace(decoding, drafters=decoding.beside_look_ups(best), is_default=True)
