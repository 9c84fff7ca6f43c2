"""What of a repository on the hub one would download: its checkpoint, or one of its GGUF files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flowspec.core.protocol.limits import JSON_BYTES_MAX
from flowspec.errors import InputError, first_line
from flowspec.model.gguf.names import is_gguf, parts_of
from flowspec.model.hub import hub_file, unreachable

CHECKPOINT = "checkpoint"
"""The choice that is no GGUF file."""
USUAL = ("Q4_K_M", "Q4_0", CHECKPOINT)
"""What is taken where nobody says, the first that is there."""
_QUANT = re.compile(r"(?:^|[-._])((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_PICKLES = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin")
_HEADER_BYTES = (1 << 23, 1 << 25, 1 << 27)
"""Of a GGUF file, so much is read to see what the model is; more where its vocabulary is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Files that make up a model, and their bytes; `name` is a quant's, as people call it. `model` is what
    `--model` takes once they are here."""

    name: str
    model: str
    sizes: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def main(self) -> str:
        """The file that others are named after, or the first."""
        return next(iter(self.sizes))


def choices_of(repository: str, sizes: Mapping[str, int]) -> list[Choice]:
    """By the names of a repository's files and their bytes, small ones first; a checkpoint comes last."""
    found = []
    for name in sorted(sizes):
        parts = parts_of(name)
        if (
            not is_gguf(name)
            or "mmproj" in name.lower()
            or name != parts[0]
            or not all(part in sizes for part in parts)
        ):
            continue
        stem = parts[0].rpartition("/")[2].removesuffix(".gguf")
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", stem)
        quant = _QUANT.search(stem)
        found.append(
            Choice(
                name=stem if quant is None else quant[1].upper(),
                model=f"{repository}/{name}",
                sizes={part: sizes[part] for part in parts},
            )
        )
    weights = [name for name in sorted(sizes) if _WEIGHTS.fullmatch(name)]
    if weights and "config.json" in sizes:
        beside = [
            name
            for name, size in sorted(sizes.items())
            if "/" not in name and name.endswith((".json", ".jinja")) and size <= JSON_BYTES_MAX
        ]
        found.append(
            Choice(
                name=CHECKPOINT, model=repository, sizes={name: sizes[name] for name in (*beside, *weights)}
            )
        )
    return sorted(found, key=lambda choice: (choice.name == CHECKPOINT, choice.size_bytes))


def chosen(choices: list[Choice], quant: str | None, repository: str) -> Choice:
    """The one that is asked for, else the usual one; raises `InputError` naming those that there are."""
    names = ", ".join(dict.fromkeys(choice.name for choice in choices))
    if not choices:
        raise InputError(f"{repository!r} on the hub has no safetensors and no GGUF files")
    wanted = (quant.upper() if quant.lower() != CHECKPOINT else CHECKPOINT,) if quant else USUAL
    for name in wanted:
        same = [choice for choice in choices if choice.name == name]
        if len(same) > 1:
            files = ", ".join(choice.main for choice in same)
            raise InputError(f"{repository!r} on the hub has several files of {name}: give one of {files}")
        if same:
            return same[0]
    if quant is None and len(choices) == 1:
        return choices[0]
    asked = "expected --quant" if quant is None else f"has no {quant}; expected --quant"
    raise InputError(f"{repository!r} on the hub: {asked} with one of {names}")


def check_any(choices: list[Choice], repository: str, names: Iterable[str]) -> None:
    """Raises `InputError` where a repository with files of these `names` has nothing to choose."""
    if not choices and any(_PICKLES.fullmatch(name) for name in names):
        raise InputError(
            f"{repository!r} on the hub has its weights as .bin alone, a pickle: if it is an EAGLE head, "
            f"--drafter {repository} downloads it; a model is to be converted first (docs/security.md)"
        )


def hub_sizes(repository: str) -> dict[str, int]:
    """The files of `owner/name` on the hub and their bytes. Raises `InputError` where it cannot tell."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        told = HfApi().model_info(repository, files_metadata=True).siblings or []
    except GatedRepoError:
        raise InputError(
            f"{repository!r} on the hub is for those whom its owner lets in: ask there, and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"there is no model {repository!r} on the hub, or it is for those with a token: set HF_TOKEN"
        ) from None
    except unreachable() as error:
        raise InputError(
            f"cannot ask the hub for {repository!r}: {first_line(error)}; is this machine online? "
            "(HF_HUB_OFFLINE=1: fetch says what is here)"
        ) from None
    return {each.rfilename: int(each.size or 0) for each in told}


def cached(repository: str, name: str) -> Path | None:
    """A file of `owner/name` that is in the hub's cache here."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, name)
    return Path(found) if isinstance(found, str) else None


def download(repository: str, name: str) -> Path:
    """Fetches a file of `owner/name`, on from where an earlier try broke off; raises `InputError` where it
    cannot be had."""
    found = hub_file(repository, name, may_fetch=True)
    if found is None:
        raise InputError(f"{repository!r} on the hub has no {name} any more; start again")
    return found


def write_headers(repository: str, choice: Choice, folder: Path, attempt: int) -> Path | None:
    """Files of a GGUF choice as long as they are on the hub, of which only the beginning is there: enough to
    read what the model is. None where no later `attempt` would read more."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session

    if attempt >= len(_HEADER_BYTES):
        return None
    for name, size in choice.sizes.items():
        headers = {**build_hf_headers(), "Range": f"bytes=0-{_HEADER_BYTES[attempt] - 1}"}
        try:
            answer = get_session().get(hf_hub_url(repository, name), headers=headers)
            answer.raise_for_status()
        except unreachable() as error:
            text = f"cannot read {name} of {repository!r} on the hub: {first_line(error)}"
            raise InputError(text) from None
        path = folder / name.rpartition("/")[2]
        with path.open("wb") as file:
            file.write(answer.content[:size])
            file.truncate(size)
    return folder / choice.main.rpartition("/")[2]
