"""Single files of models on the Hugging Face hub, fetched or from its cache. `HF_HOME`, `HF_TOKEN` and offline mode are huggingface_hub's own."""

from __future__ import annotations

from pathlib import Path

from flowspec.errors import InputError, first_line


def hub_file(repository: str, name: str, *, may_fetch: bool) -> Path | None:
    """The local path of a file of `owner/name`; None where the hub, or offline the cache of the model, has no such file.

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
        why = "offline mode is on" if is_offline else "the hub cannot be reached (HF_HUB_OFFLINE=1 makes do with what is cached)"
        raise InputError(f"{name} of {repository!r} is not in the Hugging Face cache, and {why}; or give a model folder") from None
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(f"cannot get {name} of {repository!r} from the hub: {first_line(error)}") from None
