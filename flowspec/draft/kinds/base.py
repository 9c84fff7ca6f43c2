"""What a kind of drafter says of itself: everything that others must know of it before it is loaded.

A `Kind` is a drafter that a user named: found to be of that kind, and not loaded. Its class holds what is
true of all of the kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from flowspec.draft.protocol import Drafter
from flowspec.draft.text import TextDrafter, TextProposer
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.trials import prepare
from flowspec.plan import sites
from flowspec.plan.shape import ModelShape, shape_of

PADDING_MAX = 512
"""By so many entries the tables of models with one vocabulary differ: Qwen2.5 has 151,936 for its small
sizes and 152,064 for its large ones."""


class Kind(ABC):
    """A drafter by the user's `name` for it."""

    plural: str
    """What several of them are called, for people."""
    acceptance: float
    """How often its best guess is right, for the planner where nothing else is known of it."""
    has_tensors = True
    """Whether it computes on a device."""
    layouts: tuple[str, ...] = ()
    """In which drafters of it are published, by the names of `draft.published`."""
    reads_features = False
    """Whether it wants hidden states of the target. Nothing computes these in virtual time."""
    shares_texts = False
    """Whether it guesses in one conversation from what was said in another, so that the time of an answer
    tells of both."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def open(
        self, target: ModelFiles, dtype: str, device: str | None, *, context: int, coupled: bool
    ) -> Drafter | None:
        """The drafter, loaded; None where nothing drafts. Raises `InputError` where it does not fit the
        target.

        The device is a GPU where there is one, unless one is given. `context` is the target's; a drafter that
        can handle fewer positions is fine: it stops drafting there.
        """

    def model_for_device(self, target: ModelFiles) -> ModelFiles | None:
        """The model that a device of its own loads whole for it; None where it drafts at the head only.

        Raises `InputError` where it does not fit the target.
        """
        return None

    def check(self, target: ModelFiles) -> None:
        """Raises `InputError` where it does not fit the target, as far as can be told without a weight."""
        self.reckoned(shape_of(target.spec, target.model))

    @abstractmethod
    def reckoned(self, target: ModelShape) -> sites.PlannedDrafter | None:
        """What the planner reckons with; None where nothing drafts. Raises `InputError`."""

    @classmethod
    def unseen(cls, target: ModelShape, layout: str) -> sites.PlannedDrafter | None:
        """The same for one that is published for the target in a layout and is not here; None where that
        tells no shape."""
        return None

    @classmethod
    def sketched(cls, name: str, target: ModelShape) -> sites.PlannedDrafter | None:
        """The same for a name that `flowspec plan` takes where there are no files; None where it is none of
        this kind."""
        return None

    def parameter_count(self) -> int:
        """By which the models of a chain are put in order."""
        return 0


class WordKind(Kind):
    """A kind that needs no files: a `word` names it."""

    word: str
    has_tensors = False


class TextKind(WordKind):
    """A kind without a cache (`draft.text`), which goes with every target and costs the planner nothing."""

    @staticmethod
    @abstractmethod
    def proposers() -> Callable[[], TextProposer]:
        """What begins the text of each request of one drafter."""

    def open(
        self, target: ModelFiles, dtype: str, device: object, *, context: int, coupled: bool
    ) -> TextDrafter:
        return TextDrafter(self.proposers(), context)

    def reckoned(self, target: ModelShape) -> sites.PlannedDrafter:
        return sites.PlannedDrafter(name=self.name, shape=None, acceptance=self.acceptance)


class FileKind(Kind):
    """A kind that is known by the `files` that the user's name means."""

    file_forms: tuple[str, ...] = ("safetensors",)
    """Of weights, by the names of `draft.published`."""

    def __init__(self, name: str, files: ModelFiles) -> None:
        super().__init__(name)
        self.files = files

    @staticmethod
    @abstractmethod
    def is_in(files: ModelFiles) -> bool:
        """Whether files are of this kind; no weight is read."""

    def open(
        self, target: ModelFiles, dtype: str, device: str | None, *, context: int, coupled: bool
    ) -> Drafter:
        prepare()
        from flowspec.model.accelerator import find

        return self.load(target, dtype, device or find("auto").device, context=context, coupled=coupled)

    def check(self, target: ModelFiles) -> None:
        if not self.is_in(self.files):
            raise self.another_layout()
        for name in sorted(set(self.files.file_map().values())):
            self.files.path(name)
        super().check(target)

    def another_layout(self) -> InputError:
        return InputError(f"{self.name!r} is not of the layout of {self.plural}")

    @abstractmethod
    def load(self, target: ModelFiles, dtype: str, device: str, *, context: int, coupled: bool) -> Drafter:
        """As `open`, on a device."""

    @classmethod
    def of_shape(cls, shape: ModelShape, target: ModelShape) -> sites.PlannedDrafter:
        """What the planner reckons with, where the vocabularies may be the same but for padding. Whether
        tokens mean the same is seen in the files, when the drafter is opened."""
        if abs(shape.vocabulary - target.vocabulary) > PADDING_MAX:
            raise InputError(
                f"--drafter: expected the model's vocabulary of {target.vocabulary}, but {shape.name} has "
                f"{shape.vocabulary}"
            )
        return sites.PlannedDrafter(name=shape.name, shape=shape, acceptance=cls.acceptance)

    def parameter_count(self) -> int:
        tensors = self.files.tensors()
        return sum(map(tensors.element_count, tensors))
