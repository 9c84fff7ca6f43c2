"""Single files of models on the Hugging Face hub, fetched or from its cache. `HF_HOME`, `HF_TOKEN` and
offline mode are huggingface_hub's own.

As a program it fetches files for a daemon (`runtime/weights/from_hub.py`), and imports little, so that it
starts quickly.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from flowspec.errors import InputError, first_line


def hub_file(repository: str, name: str, *, may_fetch: bool) -> Path | None:
    """The local path of a file of `owner/name`; None where the hub, or offline the cache of the model, has no
    such file.

    Raises `InputError` when nothing of the model is cached and it cannot be, or may not be, fetched.
    """
    from huggingface_hub import hf_hub_download, is_offline_mode, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repository, name, local_files_only=not may_fetch))
    except LocalEntryNotFoundError:
        is_offline = is_offline_mode() or not may_fetch
        if is_offline and isinstance(try_to_load_from_cache(repository, "config.json"), str):
            return None  # the cache has the model and not this file: most models lack some
        if is_offline_mode():
            raise _lacking_offline(repository, name) from None
        why = "nothing is fetched here; `flowspec fetch` gets a model"
        if may_fetch:
            why = "the hub cannot be reached; check the network, set HF_HUB_OFFLINE=1 if the model is cached"
        raise InputError(
            f"{name} of {repository!r} is not in the Hugging Face cache, and {why}, or give a model folder"
        ) from None
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(f"cannot get {name} of {repository!r} from the hub: {first_line(error)}") from None


def _lacking_offline(repository: str, name: str) -> InputError:
    return InputError(
        f"{name} of {repository!r} is not in the Hugging Face cache, and offline mode is on; check the name, "
        "go online once with HF_HUB_OFFLINE=0, or give a model folder"
    )


def is_fetched(repository: str) -> bool:
    """Whether the cache has something of `owner/name`, or all there is to use is what it has."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode() or _folder(repository).is_dir()


def cached_sizes(repository: str) -> dict[str, int]:
    """The files of `owner/name` in the cache, of the revision that is used, and their bytes."""
    folder = _folder(repository)
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text("utf-8").strip()
    except FileNotFoundError:
        return {}
    files = (path for path in snapshot.rglob("*") if path.is_file())
    return {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in files}


def _folder(repository: str) -> Path:
    return hub_cache() / f"models--{repository.replace('/', '--')}"


def hub_size(repository: str, name: str) -> int | None:
    """How many bytes a file of `owner/name` has on the hub, which is asked; None if there is none.

    Raises `InputError` when the hub cannot tell.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode
    from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled

    if is_offline_mode():
        raise _lacking_offline(repository, name)
    try:
        size: int | None = get_hf_file_metadata(hf_hub_url(repository, name)).size
    except EntryNotFoundError:
        return None
    except (*unreachable(), OfflineModeIsEnabled) as error:
        raise InputError(f"cannot ask the hub for {name} of {repository!r}: {first_line(error)}") from None
    if size is None:
        raise InputError(f"the hub does not tell how large {name} of {repository!r} is")
    return size


def unreachable() -> tuple[type[BaseException], ...]:
    """What is raised where the hub says no or nonsense, or cannot be reached: errors of the system's and of
    the HTTP library that it uses, whose name changes with its versions."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, *HfHubHTTPError.__bases__)


def hub_cache() -> Path:
    """The folder of the hub's cache; it need not exist yet."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def main() -> None:
    """Tells the sizes of files, or fetches them, and says in a line of JSON what came of it; of an error the
    text.

    Ends when its standard input does: its parent is gone.
    """
    what, repository, *names = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    said: dict[str, int | None] | dict[str, str] | str
    try:
        if what == "sizes":
            said = {name: hub_size(repository, name) for name in names}
        else:
            said = {name: str(hub_file(repository, name, may_fetch=True)) for name in names}
    except InputError as error:
        said = str(error)
    print(json.dumps(said), flush=True)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
