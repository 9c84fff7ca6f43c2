"""The drafters that others published: which go with a model, which are here, and which of these is used.

`published.json` says only what a card, a paper or a repository says, with where it says so; what none says is
null. Of those for one model the best come first: by the planner's formula, on four equal boards with room for
any model, with the acceptance that is published. What is here is in the hub's cache; nobody is asked.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowspec.draft.base import Kind, WordKind
from flowspec.draft.registry import KINDS, find_drafter
from flowspec.errors import InputError, first_line
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.hub import cached, cached_sizes
from flowspec.validation import Document, decode_json

EAGLE_2_TREE = "eagle-2 tree"
"""60 nodes on 6 levels, of each of which the ten best are expanded (2406.16858)."""
EAGLE_2_LENGTHS = ((0.4, 3.02), (0.5, 3.65), (0.6, 4.36), (0.7, 5.19), (0.8, 6.07), (0.9, 6.74))
"""Shares of right guesses, and the length that this tree accepts of the synthetic drafter (`bench.drafters`)
with such a share: means of 20,000 trees."""
STEPS = 1 << 50
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
    def share_right(self) -> float | None:
        return share_right(self.length, self.drafted)


class Published(Document, frozen=True, kw_only=True):
    """A drafter's repository, its layout, and the repositories of its targets; `files` is the form of its
    weights (safetensors, bin)."""

    drafter: str
    layout: str
    files: str | None
    licence: str | None
    parameters: int | None
    bytes: int | None
    targets: tuple[str, ...]
    measured: tuple[Measured, ...]
    source: str

    @property
    def best_known(self) -> Measured | None:
        """The first measurement that tells a share of right guesses; else the first."""
        return min(self.measured, key=lambda each: each.share_right is None, default=None)

    @property
    def acceptance(self) -> float | None:
        """The share of its best guesses that are right, by what is published."""
        return None if self.best_known is None else self.best_known.share_right

    @property
    def kind(self) -> type[Kind] | None:
        """The kind that runs it; None where none does."""
        return next((kind for kind in KINDS if self.layout in kind.layouts), None)

    @property
    def name(self) -> str:
        """What `--drafter` takes."""
        return self.kind.word if self.kind and issubclass(self.kind, WordKind) else self.drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A published drafter for the model in question; `refusal` says why it cannot be used, as far as that is
    known. `bytes_here` are those of its files in the cache."""

    row: Published
    is_here: bool
    bytes_here: int
    refusal: str


@functools.cache
def published() -> tuple[Published, ...]:
    return decode_json(Path(__file__).with_name("published.json").read_bytes(), tuple[Published, ...])


def find_target(model: str, files: ModelFiles | None = None) -> str | None:
    """The target that a model is, whoever packed it or how; None for one that nothing is published for.

    It is known by its name or, where `files` of it are here, by what they say that it was made of."""
    named = {_plain(target): target for row in published() for target in row.targets}
    names = [*_names(model), *(() if files is None else _made_of(files))]
    return next((named[name] for name in map(_plain, names) if name in named), None)


def find_candidates(model: str) -> tuple[str | None, list[Candidate]]:
    """The target that a model is by its name or files, which are not fetched, and the drafters for it, best
    first."""
    if model == BUNDLED:
        return None, []
    files = _files_here(model)
    target = find_target(model, files)
    return target, [_candidate(row, files) for row in published() if target in row.targets]


def best_here(candidates: Sequence[Candidate]) -> str | None:
    """The drafter to use where the user names none, as `--drafter` takes it; None where none is here."""
    return next((each.row.name for each in candidates if each.is_here and not each.refusal), None)


def published_acceptance(name: str, model: str) -> float | None:
    """The share of a drafter's guesses that is published as right, for a target by their names."""
    target = find_target(model)
    rows = (row for row in published() if target in row.targets and row.name == name)
    return next((row.acceptance for row in rows), None)


def share_right(length: float, drafted: int | str | None) -> float | None:
    """The share of right guesses that gives this accepted length in a chain of so many guesses, each right as
    often as the first, or in `EAGLE_2_TREE`.

    None where it is not known what was drafted, or a length cannot be of that."""
    if drafted == EAGLE_2_TREE:
        shares, lengths = zip(*EAGLE_2_LENGTHS, strict=True)
        is_within = lengths[0] <= length <= lengths[-1]
        return float(np.interp(length, lengths, shares)) if is_within else None
    if not isinstance(drafted, int) or not 1 < length < drafted + 1:
        return None
    place = bisect_left(range(STEPS), length, key=lambda step: chain_length(step / STEPS, drafted))
    return (place - 1) / STEPS


def chain_length(share: float, drafted: int) -> float:
    """What a chain of so many guesses accepts, with the target's own token: 1 + a + a^2 + ... + a^k."""
    return sum(share**guess for guess in range(drafted + 1))


def _candidate(row: Published, target: ModelFiles | None) -> Candidate:
    sizes = {} if row.name != row.drafter else cached_sizes(row.drafter)
    is_here = "config.json" in sizes if row.name == row.drafter else target is not None
    refusal = ""
    if row.kind is None:
        refusal = f"FlowSpec does not run {row.layout} yet"
    elif is_here and target is not None:
        try:
            find_drafter(row.name, may_fetch=False).check(target)
        except InputError as error:
            refusal = first_line(error)
    return Candidate(
        row=row, is_here=is_here, bytes_here=sum(sizes.values()) if is_here else 0, refusal=refusal
    )


def _files_here(model: str) -> ModelFiles | None:
    """The files of a model that can be looked into without asking anybody."""
    try:
        files = ModelFiles(model, may_fetch=False)
        files.raw_config()
    except InputError:
        return None
    return files


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
