"""Models on the Hugging Face hub: what of a repository one would download, and its files, fetched or from the
cache. `HF_HOME`, `HF_TOKEN` and offline mode are huggingface_hub's own.

As a program it does this for a daemon (`runtime/weights/sources.py`).
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.core.protocol.limits import JSON_BYTES_MAX
from flowspec.errors import InputError, first_line
from flowspec.extras import imported
from flowspec.model.gguf.file import is_gguf, parts_of

CHECKPOINT = "checkpoint"
"""The choice that is no GGUF file."""
USUAL = ("Q4_K_M", "Q4_0", CHECKPOINT)
"""What is taken where nobody says, the first that is there."""
_QUANT = re.compile(r"(?:^|[-._])((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


# ------------------------------------------------------------------------------------------------ files


def _hub() -> Any:
    """Its own package, of which a name is loaded when it is used."""
    return imported("huggingface_hub")


def hub_file(repository: str, name: str, *, may_fetch: bool) -> Path | None:
    """The local path of a file of `owner/name`; None where the hub, or offline the cache of the model, has no
    such file.

    Raises `InputError` when nothing of the model is cached and it cannot be, or may not be, fetched.
    """
    errors = imported("huggingface_hub.errors")
    try:
        if may_fetch and not is_fetched(repository) and not _answers(repository, name):
            raise errors.LocalEntryNotFoundError(name)
        return Path(_hub().hf_hub_download(repository, name, local_files_only=not may_fetch))
    except errors.LocalEntryNotFoundError:
        is_offline = _hub().is_offline_mode()
        has_some = cached(repository, "config.json") is not None
        if (is_offline or not may_fetch) and has_some:
            return None  # the cache has the model and not this file: most models lack some
        why = "nothing is fetched here; `flowspec fetch` gets a model"
        if is_offline:
            why = "HF_HUB_OFFLINE is set, so that it is not fetched; check the name, unset HF_HUB_OFFLINE"
        elif may_fetch:
            advice = "set HF_HUB_OFFLINE=1 to use what is there" if has_some else "connect this machine"
            why = f"the hub cannot be reached; {advice}"
        raise InputError(
            f"{name} of {repository!r} is not in the Hugging Face cache, and {why}, or give a model folder "
            "or a GGUF file"
        ) from None
    except errors.EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot get {name} of {repository!r} from the hub: {first_line(error)}") from None


def _answers(repository: str, name: str) -> bool:
    """Whether the hub can be reached. A download tries for half a minute before it says that it cannot."""
    try:
        _hub().get_hf_file_metadata(_hub().hf_hub_url(repository, name))
    except (OSError, ValueError):
        return True  # a download says what is wrong
    except Exception:  # noqa: BLE001 - of an HTTP library whose name changes with its versions
        return False
    return True


def hub_cache() -> Path:
    """The folder of the hub's cache; it need not exist yet."""
    return Path(imported("huggingface_hub.constants").HF_HUB_CACHE)


def is_fetched(repository: str) -> bool:
    """Whether the cache has something of `owner/name`, or all there is to use is what it has."""
    return _hub().is_offline_mode() or bool(cached_sizes(repository))


def cached(repository: str, name: str) -> Path | None:
    """A file of `owner/name` that is in the hub's cache here."""
    found = _hub().try_to_load_from_cache(repository, name)
    return Path(found) if isinstance(found, str) else None


def cached_sizes(repository: str) -> dict[str, int]:
    """The files of `owner/name` in the cache, of the revision that is used, and their bytes."""
    folder = hub_cache() / f"models--{repository.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text("utf-8").strip()
    except FileNotFoundError:
        return {}
    files = (path for path in snapshot.rglob("*") if path.is_file())
    return {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in files}


def hub_sizes(repository: str) -> dict[str, int]:
    """The files of `owner/name` on the hub and their bytes. Raises `InputError` where it cannot tell."""
    errors = imported("huggingface_hub.errors")
    try:
        told = _hub().HfApi().model_info(repository, files_metadata=True).siblings or []
    except errors.RepositoryNotFoundError:  # also of one that needs a token
        raise InputError(
            f"there is no model {repository!r} on the hub, or it is for those whom its owner lets in: ask "
            "there, and set HF_TOKEN"
        ) from None
    except Exception as error:  # noqa: BLE001 - of an HTTP library whose name changes with its versions
        raise InputError(
            f"cannot ask the hub for {repository!r}: {first_line(error)}; is this machine online? "
            "(HF_HUB_OFFLINE=1: fetch says what is here)"
        ) from None
    return {each.rfilename: each.size for each in told if each.size is not None}


# ---------------------------------------------------------------------------------------------- choices


@dataclass(frozen=True, slots=True)
class Choice:
    """Files that make up a model, and their bytes; `name` is a quant's, as people call it. `model` is what
    `--model` takes once they are here."""

    name: str
    model: str
    sizes: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())


def choices_of(repository: str, sizes: Mapping[str, int]) -> list[Choice]:
    """By the names of a repository's files and their bytes, small ones first; a checkpoint comes last."""
    found = []
    for name in sorted(filter(is_gguf, sizes)):
        parts = parts_of(name)
        if "mmproj" not in name.lower() and name == parts[0] and sizes.keys() >= {*parts}:
            stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name.rpartition("/")[2])
            quant = _QUANT.search(stem)
            called = stem if quant is None else quant[1].upper()
            found.append(Choice(called, f"{repository}/{name}", {part: sizes[part] for part in parts}))
    found.sort(key=lambda choice: choice.size_bytes)
    weights = [name for name in sorted(sizes) if _WEIGHTS.fullmatch(name)]
    if weights and "config.json" in sizes:
        beside = [
            name
            for name, size in sorted(sizes.items())
            if "/" not in name and name.endswith((".json", ".jinja")) and size <= JSON_BYTES_MAX
        ]
        found.append(Choice(CHECKPOINT, repository, {name: sizes[name] for name in (*beside, *weights)}))
    return found


def chosen(choices: list[Choice], quant: str | None, repository: str) -> Choice:
    """The one that is asked for, else the usual one; raises `InputError` naming those that there are."""
    for name in USUAL if quant is None else (quant,):
        same = [choice for choice in choices if choice.name.lower() == name.lower()]
        if len(same) > 1:
            files = ", ".join(choice.model for choice in same)
            raise InputError(f"{repository!r} on the hub has several files of {name}: give one of {files}")
        if same:
            return same[0]
    if quant is None and len(choices) == 1:
        return choices[0]
    names = ", ".join(dict.fromkeys(choice.name for choice in choices))
    asked = "expected --quant" if quant is None else f"has no {quant}; expected --quant"
    raise InputError(f"{repository!r} on the hub: {asked} with one of {names}")


# --------------------------------------------------------------------------------------- for a daemon


def main() -> None:
    """Fetches those of some files that a repository has, unless they exceed so many bytes; says in a line of
    JSON how many they have, or what is wrong. Ends when its standard input does: its parent is gone."""
    repository, bytes_max, *names = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        sizes = hub_sizes(repository)
        there = [name for name in names if name in sizes]
        total = sum(sizes[name] for name in there)
        for name in there if total <= int(bytes_max) else ():
            hub_file(repository, name, may_fetch=True)
        print(json.dumps({"bytes": total}), flush=True)
    except InputError as error:
        print(json.dumps({"error": str(error)}), flush=True)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
