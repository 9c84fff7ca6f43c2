"""Drafters in virtual time.

A `VirtualDrafter` is one kind; for one case at a time it makes as many `Drafter`s as there are worlds. What a
drafter proposes after a prefix is computed once, and all methods share it (`Guesses`), but for those that
read the target's features: what they guess depends on how far the target has come, so they run for real in
every world. Knows nothing of time: what a pass costs is the world's business.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.bench.cases import DTYPE, VOCABULARY, PlainCase
from flowspec.bench.experiment import WIDTH_MAX, Experiment
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal, Release, Segment
from flowspec.core.stage.events import JobPart, RunLayers
from flowspec.core.text_before import TextBefore
from flowspec.draft.base import Drafter, Kind
from flowspec.draft.feature_drafter import FeatureDrafter
from flowspec.draft.ranking import F32, Children, Ranker
from flowspec.draft.registry import find_drafter
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.arithmetic.compiled import use_threads
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.weights import Span
from flowspec.sim.language import HashLanguage, as_prefix
from flowspec.sim.prefixes import Prefixes, PrefixView

RANDOM = "random"
RANDOM_SHARPNESS = 3.0
"""A useless drafter is the harder to bear the surer it is of itself."""
BATCH = 64
"""Prefixes that are run in one pass."""
HELD_MAX = 16
"""Cases whose paths a model holds at once: those that many users have answered at one time."""
GUESSED_ROWS_MAX = 4096
"""Rows of one pass of a model: what is asked for, and the guesses before it."""
CPU = "cpu"
"""Where worlds run: a simulation's answers do not depend on the machine."""
CONCENTRATION = 2.0
"""Sum of the parameters of a synthetic drafter's Beta distribution: at 2 with a mean of .5 it is uniform,
below it leans to the extremes."""
SURE_MAX = 0.995
RECENT = 8
"""Tokens of a prefix that decide what a synthetic drafter says after it."""
OTHERS = tuple(rank * (VOCABULARY // WIDTH_MAX) for rank in range(WIDTH_MAX))
"""Tokens that are not the same, whatever is added to them all."""
GOLDEN = (math.sqrt(5) - 1) / 2
QUANTILES = 4096
"""Draws that stand for a Beta distribution's quantiles."""

Maker = Callable[[], Drafter]
"""Makes a drafter for one world of a case."""
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

VirtualDrafter = Callable[[PlainCase], Maker]
"""One kind of drafter: what makes one for each world of a case; what is computed for one is kept for all."""
OpenDrafter = Callable[[Experiment, str, bool], VirtualDrafter]
"""Opens an experiment's drafter of a name, coupled or not, for all its cases."""


def open_drafter(experiment: Experiment, name: str, coupled: bool) -> VirtualDrafter:
    """What `draft.registry.open_drafter` opens, `random`, or the synthetic one; without coupling models guess
    without the noise.

    Raises `InputError` for a drafter that cannot be used with the target in virtual time.
    """
    if experiment.is_synthetic:
        acceptance = experiment.acceptance
        assert acceptance is not None, "an experiment with a synthetic model says its acceptance"
        return lambda case: Synthetic(case, experiment.context, acceptance).drafter
    target = ModelFiles(experiment.model)
    vocabulary, context = target.spec.vocabulary, target.spec.context_max
    ranker = Ranker(vocabulary, coupled=coupled)
    if name == RANDOM:
        return lambda case: Randoms(case, context, ranker, vocabulary).drafter
    kind = find_drafter(name)
    if kind.reads_features:
        kind.check(target)
        return FeatureReaders(kind, target, context=context, coupled=coupled)
    model = kind.model_for_device(target)
    if model is None:  # cheap enough to run for real in every world
        return lambda case: lambda: kind.open(target, DTYPE, None, context=context, coupled=coupled)
    return Models(model, ranker, min(context, model.spec.context_max, limits.CONTEXT_MAX))


def depths_of(drafters: Iterable[Drafter]) -> tuple[float, ...]:
    """At which shares of the target's layers stand the states that drafters read; empty for most."""
    return tuple(sorted({depth for each in drafters for depth in getattr(each, "depths", ())}))


# ------------------------------------------------------------------------------------------ guesses


class Guesses(ABC):
    """What a drafter proposes after the prefixes of one case: computed once, and looked up in every world."""

    def __init__(self, case: PlainCase, context: int) -> None:
        self.case = case
        self.context = context
        self.prefixes = Prefixes()
        self.passes = 0
        self._known: dict[int, Children] = {}

    def drafter(self) -> MemoDrafter:
        """For one world."""
        return MemoDrafter(self)

    def children(self, asked: Sequence[int]) -> list[Children]:
        """Up to `WIDTH_MAX` children of each prefix, best first."""
        missing = [prefix for prefix in dict.fromkeys(asked) if prefix not in self._known]
        for first in range(0, len(missing), BATCH):
            some = missing[first : first + BATCH]
            self.passes += 1
            self._known.update(zip(some, self._rank(some), strict=True))
        return [self._known[prefix] for prefix in asked]

    def _best(self, ranker: Ranker, logits: F32, prefixes: Sequence[int]) -> list[Children]:
        """By a model's logits, with the sampling, the position of each child, and the text before it where
        the sampling needs it."""
        sampling, texts = self.case.sampling, list[TextBefore]()
        if sampling.needs_text:
            tokens = [np.array(self.prefixes.tokens(prefix), dtype=np.int64) for prefix in prefixes]
            texts = [TextBefore(each, len(self.case.prompt)) for each in tokens]
        positions = [(sampling, self.prefixes.length[prefix]) for prefix in prefixes]
        return ranker.best(logits, positions, WIDTH_MAX, texts)

    @abstractmethod
    def _rank(self, prefixes: Sequence[int]) -> list[Children]: ...


class MemoDrafter:
    """A drafter of one world that says what the case's guesses are."""

    captures: tuple[int, ...] = ()
    weight_bytes = 0
    cache_slots = limits.ID_MAX

    def __init__(self, guesses: Guesses) -> None:
        self.context = guesses.context
        self._guesses = guesses
        self._view = PrefixView(guesses.prefixes)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        assert width <= WIDTH_MAX, f"{width} children are asked for, {WIDTH_MAX} are kept"
        asked = [
            (part.commit, node, prefix) for part in segment.parts for node, prefix in self._view.take(part)
        ]
        children = self._guesses.children([prefix for _, _, prefix in asked])
        return tuple(
            Proposal(
                request=commit.request,
                epoch=commit.epoch,
                node=node,
                tokens=each.tokens[:width],
                confidences=each.confidences[:width],
            )
            for (commit, node, _), each in zip(asked, children, strict=True)
        )

    def release(self, message: Release) -> None:
        self._view.release(message.request)

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: object) -> None:
        raise AssertionError("features came for a drafter that wants none")


class Randoms(Guesses):
    """`random`: sure of itself, and about nothing."""

    def __init__(self, case: PlainCase, context: int, ranker: Ranker, vocabulary_size: int) -> None:
        super().__init__(case, context)
        self._ranker = ranker
        self._vocabulary_size = vocabulary_size

    def _rank(self, prefixes: Sequence[int]) -> list[Children]:
        # Anew: a language remembers all it says.
        language = HashLanguage(self._vocabulary_size, seed=0, sharpness=RANDOM_SHARPNESS)
        logits = [language.logits(as_prefix(self.prefixes.tokens(prefix))) for prefix in prefixes]
        return self._best(self._ranker, np.stack(logits), prefixes)


# ------------------------------------------------------------------------------------------ a synthetic one


def children_of(first: int, sure: float, true: int | None = None, lucky: float = 0.0) -> Children:
    """What is said where the best guess has the confidence `sure`: tokens from `first` on, but for the true
    one, whose rank is drawn by `lucky` from 0 to 1."""
    sure = min(SURE_MAX, max(1 - SURE_MAX, sure))
    tokens = [first + other for other in OTHERS]
    if true is not None:
        rank = int(math.log(1 - lucky) / math.log(1 - sure))
        tokens = [token if token != true else VOCABULARY for token in tokens]
        if rank < WIDTH_MAX:
            tokens[rank] = true
    return Children(
        tokens=tuple(tokens), confidences=tuple(sure * (1 - sure) ** rank for rank in range(WIDTH_MAX))
    )


class SyntheticGuesses(Guesses):
    """What synthetic drafters have in common: where a prefix stands on the path of the answer."""

    def __init__(self, case: PlainCase, context: int) -> None:
        super().__init__(case, context)
        self.path = (*case.prompt, *case.answer)
        self._on_path = {prefix: at for at, prefix in enumerate(self.prefixes.chain(self.path), 1)}

    def place(self, prefix: int) -> tuple[int | None, int]:
        """The prefix's position on the path, and a number that its tokens decide, not its own number, which
        differs between methods."""
        position = self._on_path.get(prefix)
        length, recent = self.prefixes.length[prefix], self.prefixes.tokens(prefix, RECENT)
        return position, hash((self.case.sampling.seed, length, position is None, *recent))

    def _rank(self, prefixes: Sequence[int]) -> list[Children]:
        return [self._children(prefix) for prefix in prefixes]

    @abstractmethod
    def _children(self, prefix: int) -> Children: ...


class Synthetic(SyntheticGuesses):
    """A drafter that needs no weights: its guesses are right as often as they claim.

    After a prefix its confidences fall off geometrically, `c (1 - c)^i`, where c is drawn for each prefix
    from a Beta distribution: models are sure of some tokens and unsure of others. On the path of the answer
    the true token has rank i with just that probability. The mean of c, the `acceptance`, is the one
    parameter.

    Chance makes some answers easier to guess than others, and their rates differ by a quarter. A `balanced`
    answer has its share of easy and hard tokens, in an order by chance: what is drawn for its tokens are the
    points of a lattice, moved by chance, which fill the unit square evenly (Cranley and Patterson, 1976). So
    a few balanced answers tell the mean rate that many others have.
    """

    def __init__(self, case: PlainCase, context: int, acceptance: float, *, balanced: bool = False) -> None:
        assert 0 < acceptance < 1
        super().__init__(case, context)
        self._a = acceptance * CONCENTRATION
        self._b = CONCENTRATION - self._a
        self._drawn = self._draw_balanced() if balanced else None

    def _draw_balanced(self) -> list[tuple[float, float]]:
        """For each token of the answer the confidence, and the chance that decides its rank."""
        count = len(self.case.answer)
        chance = np.random.default_rng((self.case.sampling.seed, *self.case.prompt[:RECENT]))
        quantiles = np.sort(np.random.default_rng(0).beta(self._a, self._b, QUANTILES))
        along, across = chance.random(2)
        at = np.arange(count)
        sure = quantiles[((at + along) / count * QUANTILES).astype(int)]
        lucky = (at * GOLDEN + across) % 1
        order = chance.permutation(count)
        return list(zip(sure[order].tolist(), lucky[order].tolist(), strict=True))

    def _children(self, prefix: int) -> Children:
        position, seed = self.place(prefix)
        chance = random.Random(seed)
        sure = chance.betavariate(self._a, self._b)
        first = chance.randrange(VOCABULARY // WIDTH_MAX)
        if position is None or position >= len(self.path):
            return children_of(first, sure)
        lucky = chance.random()
        if self._drawn is not None and position >= len(self.case.prompt):
            sure, lucky = self._drawn[position - len(self.case.prompt)]
        return children_of(first, sure, self.path[position], lucky)


# ------------------------------------------------------------------------------------------ models


def _whole(files: ModelFiles) -> Slice:
    use_threads(1)  # its passes are too small for more
    count = len(files.spec.layers)
    return Slice.load(files, Span(first=0, end=count, count=count), DTYPE, CPU)


def _job(
    request: int,
    case: PlainCase,
    tokens: Sequence[int],
    positions: Ints | None = None,
    visible: Bools | None = None,
) -> RunLayers:
    """A path from its first token on; or the last rows of a request, at `positions`, of which each sees the
    slots that `visible` `[rows, slots]` says."""
    count = len(tokens)
    positions = np.arange(count) if positions is None else positions
    visible = np.tri(count, dtype=bool) if visible is None else visible
    before = np.arange(visible.shape[1] - count)
    part = JobPart(
        request=request,
        slots=np.arange(len(before), visible.shape[1]),
        tokens=np.array(tokens, dtype=np.int64),
        positions=positions,
        key_positions=np.concatenate([before, positions]).astype(np.int32),
        visible=visible,
        sampled=np.zeros(count, dtype=bool),
        sampling=case.sampling,
    )
    return RunLayers(job=0, parts=(part,), payload=None, rows=tuple(range(count)))


class Models:
    """A small language model, in float32. It runs over a prompt and its plain answer at once. A guess off
    that path is run together with the guesses before it, back to where they leave the path, and several such
    branches make one pass."""

    def __init__(self, files: ModelFiles, ranker: Ranker, context: int) -> None:
        self.model = _whole(files)
        self.ranker = ranker
        self.context = context
        self.held: OrderedDict[_ModelGuesses, int] = OrderedDict()
        """Whose paths are in the model's caches, the longest unused first, and in which."""

    def __call__(self, case: PlainCase) -> Maker:
        return _ModelGuesses(self, case).drafter


class _ModelGuesses(Guesses):
    """Slots 0, 1, ... of a cache hold the path of prompt and plain answer, those behind it the guesses of the
    pass under way."""

    def __init__(self, drafter: Models, case: PlainCase) -> None:
        super().__init__(case, drafter.context)
        self._drafter, self._model = drafter, drafter.model
        self._path = (*case.prompt, *case.answer)[: drafter.context]
        self._position = {prefix: position for position, prefix in enumerate(self.prefixes.chain(self._path))}
        self._path_states = self._hold()

    def _hold(self) -> Array:
        """Puts the path into a cache of the model's, if there are enough in place of another case's; its
        hidden states."""
        held = self._drafter.held
        held[self] = len(held) if len(held) < HELD_MAX else held.popitem(last=False)[1]
        self._model.open_cache(held[self], len(self._path) + GUESSED_ROWS_MAX)
        return self._model.forward(_job(held[self], self.case, self._path), None)[1]

    def _rank(self, prefixes: Sequence[int]) -> list[Children]:
        """Guesses are run with those before them, back to where they leave the path."""
        held = self._drafter.held
        if self not in held:
            self._hold()
        held.move_to_end(self)
        length, states = len(self._path_states), self._path_states
        guesses, places = list[int](), dict(self._position)  # where the states of prefixes are
        for prefix in prefixes:
            branch = []
            while prefix not in places:
                branch.append(prefix)
                prefix = self.prefixes.parent[prefix]
            for guess in reversed(branch):
                places[guess] = length + len(guesses)
                guesses.append(guess)
        if guesses:
            states = np.concatenate([states, self._run(guesses, places)])
        logits = self._model.logits(states[[places[prefix] for prefix in prefixes]])
        return self._best(self._drafter.ranker, logits, prefixes)

    def _run(self, guesses: Sequence[int], places: Mapping[int, int]) -> Array:
        """Hidden states of guesses, behind the path."""
        length = len(self._path_states)
        visible = np.zeros((len(guesses), length + len(guesses)), dtype=bool)
        for row, guess in enumerate(guesses):
            parent = places[self.prefixes.parent[guess]]
            if parent < length:
                visible[row, : parent + 1] = True
            else:
                visible[row] = visible[parent - length]
            visible[row, length + row] = True
        tokens = [self.prefixes.token[guess] for guess in guesses]
        positions = np.array([self.prefixes.length[guess] - 1 for guess in guesses])
        job = _job(self._drafter.held[self], self.case, tokens, positions, visible)
        return self._model.forward(job, None)[1]


class FeatureReaders:
    """Drafters of one kind over one target, in float32. No target runs in a world: the states of the output's
    path are computed beforehand, in one pass over a prompt and its plain answer, and given when the simulated
    last stage names their nodes."""

    def __init__(self, kind: Kind, target: ModelFiles, *, context: int, coupled: bool) -> None:
        self._open = partial(kind.open, target, DTYPE, CPU, context=context, coupled=coupled)
        self._target = _whole(target)
        self._target.captures = self._drafter().captures

    def __call__(self, case: PlainCase) -> Maker:
        path = (*case.prompt, *case.answer)
        self._target.open_cache(0, len(path))
        _, features, *_ = self._target.run(_job(0, case, path), None)
        self._target.close_cache(0)
        states = features.copy()
        return lambda: PathReader(self._drafter(), states, self._target.span.count)

    def _drafter(self) -> FeatureDrafter:
        drafter = self._open()
        assert isinstance(drafter, FeatureDrafter), "a kind that reads features drafts"
        return drafter


class PathReader:
    """A drafter of one case's worlds, over the target's states `features` `[path, hidden * len(captures)]`.
    `depths`: which shares of the target's layers stand before what it reads; `ranked_rows`: rows of the last
    job that are proposed children, which of a block may be without a pass."""

    def __init__(self, drafter: FeatureDrafter, features: Array, layer_count: int) -> None:
        self.captures, self.context = drafter.captures, drafter.context
        self.weight_bytes, self.cache_slots = drafter.weight_bytes, drafter.cache_slots
        self.depths = tuple(each / layer_count for each in drafter.captures)
        self.ranked_rows = 0
        self._drafter, self._features = drafter, features
        self._position: dict[tuple[int, int], int] = {}  # of a request's node
        self._waiting: list[tuple[int, int, int]] = []
        """Request, epoch and node of which a feature is here, and not yet the position."""

    @property
    def pass_rows(self) -> Sequence[int]:
        """Rows of each pass of its network in the last job."""
        return self._drafter.pass_rows

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        for part in segment.parts:
            request = part.commit.request
            committed = enumerate(part.commit.path, part.commit.base)
            for position, node in (*committed, *zip(part.positions, part.ids, strict=True)):
                self._position[request, node] = position
        self._give()
        self._drafter.pass_rows = []  # a job in which nothing runs leaves them as they were
        proposals = self._drafter.draft(segment, width)
        self.ranked_rows = len(proposals)
        return proposals

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: object) -> None:
        """Who says that they are here; what they are is known from the path."""
        self._waiting += [(request, epoch, node) for node in ids]
        self._give()

    def _give(self) -> None:
        given, self._waiting = self._waiting, []
        for request, epoch, node in given:
            position = self._position.get((request, node))
            if position is None:
                self._waiting.append((request, epoch, node))
            else:
                self._drafter.take_features(request, epoch, (node,), self._features[position : position + 1])

    def release(self, message: Release) -> None:
        self._drafter.release(message)
        self._waiting = [each for each in self._waiting if each[0] != message.request]


# ------------------------------------------------------------------------------------------ many users


class DrafterForEach:
    """Drafters of one request each, as one: each part of a segment goes to its own, and one pass runs them
    all."""

    weight_bytes = 0
    cache_slots = limits.ID_MAX

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.context = min(drafter.context for drafter in drafters)
        self.captures = drafters[0].captures
        self.depths = depths_of(drafters)
        self._drafters = drafters
        self._asked: list[Drafter] = []  # those of the last job

    @property
    def pass_rows(self) -> Sequence[int]:
        """Rows of each pass of the last job: what several run at a time is one pass. Empty where its
        drafters do not say it."""
        rows = [getattr(each, "pass_rows", ()) for each in self._asked]
        return [sum(some) for some in zip_longest(*rows, fillvalue=0)]

    @property
    def ranked_rows(self) -> int | None:
        """Rows of the last job that are proposed children; None where its drafters do not say it."""
        rows = [each.ranked_rows for each in self._asked if hasattr(each, "ranked_rows")]
        return sum(rows) if self._asked and len(rows) == len(self._asked) else None

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        self._asked = [self._drafters[part.commit.request] for part in segment.parts]
        return tuple(
            proposal
            for drafter, part in zip(self._asked, segment.parts, strict=True)
            for proposal in drafter.draft(Segment(segment=segment.segment, parts=(part,)), width)
        )

    def release(self, message: Release) -> None:
        self._drafters[message.request].release(message)

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: Any) -> None:
        self._drafters[request].take_features(request, epoch, ids, features)
