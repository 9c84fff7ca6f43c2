"""Download a model of the hub, after telling what of it fits these devices and how fast it would be.

Of a repository with GGUF files one is taken (--quant), of another its checkpoint. A download that broke off
goes on where it was. Exit status: 0 when the model is here, 1 when it is not, or does not fit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowspec.bench.console import show
from flowspec.cli.options import add_cache_argument, positive
from flowspec.cli.plan_request import add_device_arguments, make_plan_inputs
from flowspec.cli.terminal import note
from flowspec.core.protocol.precision import FILED, OF_ANY_MODEL
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.names import is_gguf, parts_of
from flowspec.model.hub import (
    CHECKPOINT,
    Choice,
    cached,
    cached_sizes,
    check_any,
    choices_of,
    chosen,
    hub_cache,
    hub_file,
    hub_sizes,
    write_headers,
)
from flowspec.plan.memory import mib, weights_of
from flowspec.plan.planner import DoesNotFit, make_plan
from flowspec.plan.shape import ModelShape, shape_of
from flowspec.plan.sites import PlanRequest
from flowspec.rounding import rounded
from flowspec.runtime.cluster import pick_context
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.default_drafter import taken_for
from flowspec.runtime.session import pick_dtype

DISK_SPARED_BYTES = 1 << 30
"""Left free where the hub's cache is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a choice would do on the devices: whether it `fits`, and tokens/s by the planner's formula; None
    where no devices were named, or what it is cannot be seen before it is here."""

    choice: Choice
    fits: bool | None = None
    tokens_per_s: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="OWNER/NAME[/FILE.gguf]", help="a repository of the hub, or a file in it"
    )
    parser.add_argument(
        "--quant",
        metavar="NAME",
        help="which GGUF file, as in its name: Q4_K_M, Q8_0; or checkpoint (default: Q4_K_M, else Q4_0, else "
        "the checkpoint)",
    )
    parser.add_argument("--list", action="store_true", help="only tell what there is")
    group = parser.add_argument_group("devices that it is for")
    add_device_arguments(group)
    group.add_argument(
        "--dtype", choices=OF_ANY_MODEL, help="precision in which a checkpoint will run (default: its own)"
    )
    group.add_argument(
        "--context", type=positive, metavar="TOKENS", help="memory is reserved for it (default: 4096)"
    )
    add_cache_argument(group)
    # of a plan, which are its own defaults
    parser.set_defaults(shape=None, acceptance=None, users=1, head=None, all_devices=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    repository, file = _split(args.model)
    from huggingface_hub import is_offline_mode
    from huggingface_hub.utils import disable_progress_bars

    if is_offline_mode():
        return _offline(args, repository, file)
    found = choices_of(repository, hub_sizes(repository))
    if file:
        found = [choice for choice in found if file in choice.sizes]
        if not found:
            raise InputError(f"{repository!r} on the hub has no {file}, or not all parts of it")
    check_any(found, repository)
    outlooks = _outlooks(args, repository, found)
    if args.list:
        _tell(args, repository, outlooks, None)
        return 0
    choice = chosen(found, args.quant, repository)
    outlook = next(each for each in outlooks if each.choice is choice)
    missing = {name: size for name, size in choice.sizes.items() if cached(repository, name) is None}
    if not args.json:
        _tell(args, repository, outlooks, choice)
    if outlook.fits is False:
        raise InputError(
            f"{choice.name} of {repository!r} does not fit these devices; take another --quant or --dtype, "
            "or leave the devices out to download it all the same"
        )
    _check_disk(missing)
    if args.json:
        disable_progress_bars()
    for name in missing:
        if hub_file(repository, name, may_fetch=True) is None:
            raise InputError(f"{repository!r} on the hub has no {name} any more; start again")
    if args.json:
        _tell(args, repository, outlooks, choice)
    else:
        print(f"here; use it with --model {choice.model}")
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
        missing = [part for part in parts_of(file) if cached(repository, part) is None]
        models = [] if missing else [args.model]
    else:
        models, missing = _found(repository, args.quant)
    if args.json:
        told = {"repository": repository, "is_offline": True, "models": models, "missing": missing}
        print(json.dumps(told))
    elif missing:
        note(
            f"flowspec fetch: offline mode is on (HF_HUB_OFFLINE), and of {repository!r} there is no "
            f"{', '.join(missing)} in {hub_cache()}"
        )
    else:
        for model in models:
            print(f"here; use it with --model {model}")
    return 1 if missing else 0


def _found(repository: str, quant: str | None) -> tuple[list[str], list[str]]:
    """What `--model` takes of what the cache has of a repository; else what is missing."""
    filed = [
        choice for choice in choices_of(repository, cached_sizes(repository)) if choice.name != CHECKPOINT
    ]
    if quant and quant.lower() != CHECKPOINT:
        filed = [choice for choice in filed if choice.name == quant.upper()]
        return [choice.model for choice in filed], [] if filed else [f"GGUF file of {quant}"]
    if filed and not quant and cached(repository, "config.json") is None:
        return [choice.model for choice in filed], []
    names = ["config.json", "model.safetensors"]
    if (index := cached(repository, "model.safetensors.index.json")) is not None:
        shards = json.loads(index.read_text("utf-8")).get("weight_map", {})
        names = ["config.json", *sorted(set(shards.values()))]
    missing = [name for name in names if cached(repository, name) is None]
    return ([] if missing else [repository]), missing


def _outlooks(args: argparse.Namespace, repository: str, choices: Sequence[Choice]) -> list[Outlook]:
    """Of each choice, on the devices that were named."""
    if args.cluster is None and args.devices is None:
        return [Outlook(choice=choice) for choice in choices]
    shown = next((choice for choice in choices if choice.name != CHECKPOINT), None)
    with tempfile.TemporaryDirectory(prefix="flowspec-") as folder:
        shape, dtype, context = _look(args, repository, shown, Path(folder))
    precisions = (dtype,) if shown is None else (FILED, dtype) if dtype != FILED else (FILED,)
    taken = taken_for(Decoding(), args.model, args.cluster)
    request = make_plan_inputs(args, shape, weights_of(shape), precisions, context, taken).request
    found = []
    for choice in choices:
        precision = dtype if choice.name == CHECKPOINT else FILED
        size = choice.size_bytes / max(1, shape.params + (0 if shape.is_tied else shape.head_params))
        own = shape if precision != FILED else replace(shape, filed_bytes=size)
        found.append(_outlook(choice, replace(request, shape=own, precisions=(precision,))))
    return found


def _outlook(choice: Choice, request: PlanRequest) -> Outlook:
    try:
        return Outlook(choice=choice, fits=True, tokens_per_s=make_plan(request).forecast.tokens_per_s)
    except DoesNotFit:
        return Outlook(choice=choice, fits=False)


def _look(
    args: argparse.Namespace, repository: str, shown: Choice | None, folder: Path
) -> tuple[ModelShape, str, int]:
    """The model's shape, the precision that is asked for, else its checkpoint's (of a GGUF file what it is
    packed in), and the context, by its config.json or the beginning of a GGUF file."""
    if hub_file(repository, "config.json", may_fetch=True) is not None:
        files = ModelFiles(repository)
    else:
        assert shown is not None, "a checkpoint has a config.json"
        files = _beginning(repository, shown, folder)
    spec, dtype = files.spec, pick_dtype(args.dtype, files, files.config())
    return shape_of(spec, repository), dtype, pick_context(args.context, spec.context_max)


def _beginning(repository: str, choice: Choice, folder: Path) -> ModelFiles:
    problem = InputError("")
    for path in write_headers(repository, choice, folder):
        try:
            files = ModelFiles(str(path))
            files.config()
            return files
        except InputError as error:
            problem = error
    raise problem


def _check_disk(missing: dict[str, int]) -> None:
    folder = hub_cache()
    while not folder.exists():
        folder = folder.parent
    free = max(0, shutil.disk_usage(folder).free - DISK_SPARED_BYTES)
    needed = sum(missing.values())
    if needed > free:
        raise InputError(
            f"the files that are missing have {mib(needed)}, but {mib(free)} may be used on the disk of "
            f"{hub_cache()}; make room, or set HF_HOME to another disk"
        )


def _tell(
    args: argparse.Namespace, repository: str, outlooks: Sequence[Outlook], choice: Choice | None
) -> None:
    if args.json:
        print(json.dumps(_report(repository, outlooks, choice)))
        return
    rows = []
    for each in outlooks:
        row = [each.choice.name, len(each.choice.sizes), mib(each.choice.size_bytes)]
        if each.fits is not None:
            rate = "-" if each.tokens_per_s is None else rounded(each.tokens_per_s)
            row += ["yes" if each.fits else "no", rate]
        rows.append(row)
    columns = ("what", "files", "size", "fits", "tokens/s, forecast")
    show(f"{repository} on the hub", columns[: len(rows[0])] if rows else columns, rows)
    if choice is not None:
        print(f"\ntaking {choice.name}")
    sys.stdout.flush()


def _report(repository: str, outlooks: Sequence[Outlook], choice: Choice | None) -> dict[str, Any]:
    return {
        "repository": repository,
        "is_offline": False,
        "choices": [
            {
                "name": each.choice.name,
                "model": each.choice.model,
                "files": list(each.choice.sizes),
                "size_bytes": each.choice.size_bytes,
                "fits": each.fits,
                "tokens_per_s": each.tokens_per_s,
            }
            for each in outlooks
        ],
        "chosen": None if choice is None else choice.name,
        "model": None if choice is None else choice.model,
    }
