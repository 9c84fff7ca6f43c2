"""Drafters that others published, and the models that each was made for: what `published.json` says.

Only what a card, a paper or a repository says is there, with where it says so; what none says is null. No
drafter was tried for the table. Whether FlowSpec runs a layout is for the kinds to say (`draft.kinds`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from flowspec.model.files import ModelFiles
from flowspec.model.hub import cached
from flowspec.plan.accepted_length import share_right
from flowspec.validation import Document, decode_json

TABLE = Path(__file__).with_name("published.json")
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_PACKED = re.compile(
    r"[-_.](gguf|hf|awq|gptq|bnb|mlx|unsloth|dynamic|static|quantized|autoround|w\d+a\d+|bf16|f16|f32|fp8|"
    r"fp16|fp32|fp4|nvfp4|mxfp4\w*|u?int\d|\d+bit|g\d+|i?q\d\w*|qat|imatrix|i1|ud)$"
)
"""What those who pack a model add to its name."""


class Measured(Document, frozen=True, kw_only=True):
    """An accepted length as published: the mean of tokens a round, the target's own among them.

    `drafted` is the length of the chain that was guessed, or the name of a tree; None where it is not said,
    and so is the `temperature`."""

    length: float
    tasks: str
    drafted: int | str | None
    temperature: float | None
    source: str

    @property
    def share(self) -> float | None:
        """Of the best guesses that were right; None where it cannot be told."""
        return share_right(self.length, self.drafted)


class Published(Document, frozen=True, kw_only=True):
    """A row: a drafter's repository, its layout, and the repositories of its targets.

    `files` is the form of its weights (safetensors, bin), `shape` a name of `plan.shape` for a language
    model's."""

    drafter: str
    layout: str
    targets: tuple[str, ...]
    files: str | None
    licence: str | None
    parameters: int | None
    bytes: int | None
    shape: str | None
    measured: tuple[Measured, ...]
    source: str

    @property
    def told(self) -> Measured | None:
        """The measurement that its share is of; else the first."""
        shares = [each for each in self.measured if each.share is not None]
        return next(iter((*shares, *self.measured)), None)

    @property
    def acceptance(self) -> float | None:
        """The share of its best guesses that are right, by what is published."""
        return None if self.told is None else self.told.share


class Target(Document, frozen=True, kw_only=True):
    """A model that drafters were published for; `shape` names its shape, where the planner knows it."""

    model: str
    shape: str | None


class Everything(Document, frozen=True, kw_only=True):
    targets: tuple[Target, ...]
    drafters: tuple[Published, ...]


@functools.cache
def table() -> Everything:
    return decode_json(TABLE.read_bytes(), Everything)


def drafters_of(target: Target) -> list[Published]:
    """The rows for a target, as the table has them."""
    return [row for row in table().drafters if target.model in row.targets]


def target_of(model: str, files: ModelFiles | None = None) -> Target | None:
    """The target that a model is, whoever packed it or how; None for one that is not in the table.

    It is known by its name or, where `files` of it are here, by what they say that it was made of."""
    named = {_plain(target.model): target for target in table().targets}
    for name in _names(model):
        if found := named.get(_plain(name)):
            return found
    made_of = () if files is None else _made_of(files)
    return next((found for name in made_of if (found := named.get(_plain(name)))), None)


def _names(model: str) -> Iterator[str]:
    """A model's name, and for a file the one of its folder or repository, too."""
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        yield _PART.sub("", path.stem)
        path = path.parent
    yield path.name


def _plain(name: str) -> str:
    """A name without its owner, and without what tells how the weights are packed."""
    name = name.rpartition("/")[2].lower().removeprefix("meta-")
    while (shorter := _PACKED.sub("", name)) != name:
        name = shorter
    return name


def _made_of(files: ModelFiles) -> list[str]:
    """What a GGUF file's metadata, or the card of a repository, name as the model that it was made of."""
    if files.gguf is not None:
        url = files.gguf_file.metadata.get("general.base_model.0.repo_url")
        return [url] if isinstance(url, str) else []
    card = files.folder / "README.md" if files.folder is not None else cached(files.model, "README.md")
    if card is None or not card.is_file():
        return []
    from huggingface_hub import metadata_load

    try:
        said = (metadata_load(card) or {}).get("base_model")
    except Exception:  # noqa: BLE001 - a card may be anything: PyYAML lets out KeyError and others, too
        return []
    return [each for each in (said if isinstance(said, list) else [said]) if isinstance(each, str)]
