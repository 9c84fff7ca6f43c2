"""What every drafter is to the world that runs it, and what others must know of one before it is loaded.

A `Kind` is a drafter that a user named: found to be of that kind, and not loaded. Its class holds what is
true of all of the kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from flowspec.core.head.events import CopyFeatures
from flowspec.core.protocol.messages import Proposal, Release, Segment
from flowspec.errors import InputError
from flowspec.model.accelerator import find
from flowspec.model.engines import prepare
from flowspec.model.files import ModelFiles
from flowspec.plan.shape import ModelShape, shape_of
from flowspec.plan.sites import PlannedDrafter

PADDING_MAX = 512
"""By so many entries the tables of models with one vocabulary differ: Qwen2.5 has 151,936 for its small
sizes and 152,064 for its large ones."""


class Drafter(Protocol):
    """What proposes children: a model with a cache for trees, or one that looks at the text alone. It runs in
    one thread or on one simulated device, one job after another.

    Proposals are ranked by `log q / T + G` with the target's own noise (at temperature 0 by `log q`), without
    its filters.
    """

    @property
    def captures(self) -> tuple[int, ...]:
        """Hidden states of the target that it wants of committed nodes (`Assign.captures`)."""
        ...

    @property
    def context(self) -> int:
        """Positions it can handle; nodes at or beyond are not given to it."""
        ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def cache_slots(self) -> int:
        """What there is memory for, of all requests together, as of when it was loaded."""
        ...

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        """Runs the segment's nodes; proposes up to `width` children for every root or uncommitted one of them
        that lives."""
        ...

    def release(self, message: Release) -> None: ...

    def take_features(self, request: int, epoch: int, ids: Sequence[int], features: Any) -> None:
        """Features `[len(ids), hidden * len(captures)]` of nodes that are now committed; only for those that
        want any."""
        ...


@runtime_checkable
class CopiesFeatures(Protocol):
    """A drafter that keeps all features which it was given, and so can take those of one node for
    another's."""

    def copy_features(self, message: CopyFeatures) -> None: ...


class Kind(ABC):
    """A drafter by the user's `name` for it."""

    plural: str
    """What several of them are called, for people."""
    acceptance: float
    """How often its best guess is right, for the planner where nothing else is known of it."""
    has_tensors = True
    """Whether it computes on a device."""
    layouts: tuple[str, ...] = ()
    """In which drafters of it are published, by the names of `draft.catalogue`."""
    reads_features = False
    """Whether it wants hidden states of the target. Nothing computes these in virtual time."""
    shares_texts = False
    """Whether it guesses in one conversation from what was said in another, so that the time of an answer
    tells of both."""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(
        self,
        target: ModelFiles,
        dtype: str,
        device: str | None = None,
        *,
        context: int,
        coupled: bool = True,
    ) -> Drafter:
        """The drafter, loaded. Raises `InputError` where it does not fit the target.

        The device is a GPU where there is one, unless one is given. `context` is the target's; a drafter that
        can handle fewer positions is fine: it stops drafting there.
        """
        if self.has_tensors:
            prepare()
            device = device or find("auto").device
        return self.load(target, dtype, device or "cpu", context=context, coupled=coupled)

    @abstractmethod
    def load(self, target: ModelFiles, dtype: str, device: str, *, context: int, coupled: bool) -> Drafter:
        """As `open`, on a device."""

    def model_for_device(self, target: ModelFiles) -> ModelFiles | None:
        """The model that a device of its own loads whole for it; None where it drafts at the head only.

        Raises `InputError` where it does not fit the target.
        """
        return None

    def check(self, target: ModelFiles) -> None:
        """Raises `InputError` where it does not fit the target, as far as can be told without a weight."""
        self.plan(shape_of(target.spec, target.model))

    @abstractmethod
    def plan(self, target: ModelShape) -> PlannedDrafter:
        """What the planner computes with. Raises `InputError`."""

    def parameter_count(self) -> int:
        """By which the models of a chain are put in order."""
        return 0


class WordKind(Kind):
    """A kind that needs no files: a `word` names it."""

    word: str


class FileKind(Kind):
    """A kind that is known by the `files` that the user's name means."""

    def __init__(self, name: str, files: ModelFiles) -> None:
        super().__init__(name)
        self.files = files

    @staticmethod
    @abstractmethod
    def is_in(files: ModelFiles) -> bool:
        """Whether files are of this kind; no weight is read."""

    def check(self, target: ModelFiles) -> None:
        for name in sorted(set(self.files.file_map().values())):
            self.files.path(name)
        super().check(target)

    @classmethod
    def of_shape(cls, shape: ModelShape, target: ModelShape) -> PlannedDrafter:
        """What the planner computes with, where the vocabularies may be the same but for padding. Whether
        tokens mean the same is seen in the files, when the drafter is opened."""
        if abs(shape.vocabulary - target.vocabulary) > PADDING_MAX:
            raise InputError(
                f"--drafter: expected the model's vocabulary of {target.vocabulary}, but {shape.name} has "
                f"{shape.vocabulary}"
            )
        return PlannedDrafter(name=shape.name, shape=shape, acceptance=cls.acceptance)

    def parameter_count(self) -> int:
        tensors = self.files.tensors()
        return sum(map(tensors.element_count, tensors))
