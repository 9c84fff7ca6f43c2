"""Download a model of the hub.

Of a repository with GGUF files one is taken (--quant), of another its checkpoint. A download that broke off
goes on where it was. Exit status: 0 when the model is here, 1 when it is not.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from flowspec.cli.result import Result
from flowspec.cli.terminal import note
from flowspec.errors import InputError
from flowspec.model import hub
from flowspec.model.gguf.file import is_gguf, parts_of
from flowspec.plan.memory import mib

DISK_SPARED_BYTES = 1 << 30
"""Left free where the hub's cache is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "a repository of the hub, or a file in it"
    parser.add_argument("model", metavar="OWNER/NAME[/FILE.gguf]", help=model)
    parser.add_argument(
        "--quant",
        metavar="NAME",
        help="which GGUF file, as in its name: Q4_K_M, Q8_0; or checkpoint (default: Q4_K_M, else Q4_0, else "
        "the checkpoint)",
    )
    parser.add_argument("--list", action="store_true", help="only tell what there is")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    repository, file = _split(args.model)
    from huggingface_hub import is_offline_mode
    from huggingface_hub.utils import disable_progress_bars

    if is_offline_mode():
        return _offline(args, repository, file)
    found = hub.choices_of(repository, hub.hub_sizes(repository))
    if file:
        found = [choice for choice in found if file in choice.sizes]
        if not found:
            raise InputError(f"{repository!r} on the hub has no {file}, or not all parts of it")
    if not found:
        raise InputError(
            f"{repository!r} on the hub has no safetensors and no GGUF files; if it is an EAGLE head in "
            f".bin, --drafter {repository} downloads it; a model is to be converted first (docs/security.md)"
        )
    choices = [
        {"name": each.name, "model": each.model, "files": [*each.sizes], "size_bytes": each.size_bytes}
        for each in found
    ]
    report = {
        "repository": repository,
        "is_offline": False,
        "choices": choices,
        "chosen": None,
        "model": None,
    }
    listed = Result(report)
    rows = [(each.name, len(each.sizes), mib(each.size_bytes)) for each in found]
    listed.table(("what", "files", "size"), rows, title=f"{repository} on the hub")
    choice = None if args.list else hub.chosen(found, args.quant, repository)
    if choice is None:
        listed.print(as_json=args.json)
        return 0
    if args.json:
        disable_progress_bars()
    else:
        listed.print()
        print(f"\ntaking {choice.name}", flush=True)
    _download(repository, choice)
    fetched = Result({**report, "chosen": choice.name, "model": choice.model})
    fetched.note(f"here; use it with --model {choice.model}")
    fetched.print(as_json=args.json)
    return 0


def _split(model: str) -> tuple[str, str]:
    """`owner/name`, and the file in it, if one is named; raises `InputError` for what is no name on the
    hub."""
    parts = model.split("/", 2)
    is_there = Path(model).exists()
    if len(parts) < 2 or not all(parts) or model.startswith((".", "/", "~")) or is_there:
        why = "it is here already" if is_there else "that is no name on the hub"
        raise InputError(f"expected owner/name, or owner/name/file.gguf, got {model!r:.80}: {why}")
    file = parts[2] if len(parts) == 3 else ""
    if file and not is_gguf(file):
        raise InputError(f"expected owner/name, or a GGUF file in it, got {model!r:.80}")
    return "/".join(parts[:2]), file


def _offline(args: argparse.Namespace, repository: str, file: str) -> int:
    """What of a model is here and what is missing, where the hub may not be asked."""
    if file:
        missing = [part for part in parts_of(file) if hub.cached(repository, part) is None]
        models = [] if missing else [args.model]
    else:
        models, missing = _cached_models(repository, args.quant)
    if missing and not args.json:
        note(
            f"flowspec fetch: offline mode is on (HF_HUB_OFFLINE), and of {repository!r} there is no "
            f"{', '.join(missing)} in {hub.hub_cache()}"
        )
        return 1
    result = Result({"repository": repository, "is_offline": True, "models": models, "missing": missing})
    for model in models:
        result.note(f"here; use it with --model {model}")
    result.print(as_json=args.json)
    return 1 if missing else 0


def _cached_models(repository: str, quant: str | None) -> tuple[list[str], list[str]]:
    """What `--model` takes of what the cache has of a repository; else what is missing."""
    found = hub.choices_of(repository, hub.cached_sizes(repository))
    files = [choice for choice in found if choice.name != hub.CHECKPOINT]
    if quant and quant.lower() != hub.CHECKPOINT:
        models = [choice.model for choice in files if choice.name == quant.upper()]
        return models, [] if models else [f"GGUF file of {quant}"]
    if files and not quant and hub.cached(repository, "config.json") is None:
        return [choice.model for choice in files], []
    names = ["config.json", "model.safetensors"]
    if (index := hub.cached(repository, "model.safetensors.index.json")) is not None:
        shards = json.loads(index.read_text("utf-8")).get("weight_map", {})
        names = ["config.json", *sorted(set(shards.values()))]
    missing = [name for name in names if hub.cached(repository, name) is None]
    return ([] if missing else [repository]), missing


def _download(repository: str, choice: hub.Choice) -> None:
    missing = {name: size for name, size in choice.sizes.items() if hub.cached(repository, name) is None}
    folder = hub.hub_cache()
    while not folder.exists():
        folder = folder.parent
    needed, free = sum(missing.values()), max(0, shutil.disk_usage(folder).free - DISK_SPARED_BYTES)
    if needed > free:
        raise InputError(
            f"the files that are missing have {mib(needed)}, but {mib(free)} may be used on the disk of "
            f"{hub.hub_cache()}; make room, or set HF_HOME to another disk"
        )
    for name in missing:
        if hub.hub_file(repository, name, may_fetch=True) is None:
            raise InputError(f"{repository!r} on the hub has no {name} any more; start again")
