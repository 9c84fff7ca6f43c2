"""Download a model of the hub, after telling what of it fits these devices and how fast it would be.

Of a repository with GGUF files one is taken (--quant), of another its checkpoint. A download that broke off
goes on where it was. Exit status: 0 when the model is here, 1 when it is not, or does not fit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowspec.bench.console import show
from flowspec.cli.plan_request import add_forecast_arguments, make_plan_inputs
from flowspec.cli.terminal import note
from flowspec.core.protocol.precision import FILED, OF_ANY_MODEL
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.file import is_gguf, parts_of
from flowspec.model.hub import (
    CHECKPOINT,
    Choice,
    cached,
    cached_sizes,
    choices_of,
    chosen,
    hub_cache,
    hub_file,
    hub_sizes,
    write_headers,
)
from flowspec.plan.memory import mib, weights_of
from flowspec.plan.planner import DoesNotFit, make_plan
from flowspec.plan.shape import shape_of
from flowspec.plan.sites import PlanRequest
from flowspec.rounding import rounded
from flowspec.runtime.cluster import pick_context
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.default_drafter import taken_for
from flowspec.runtime.session import pick_dtype

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
    dtype = "precision in which a checkpoint will run (default: its own)"
    add_forecast_arguments(parser, choices=OF_ANY_MODEL, help=dtype)
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
    if not found:
        raise InputError(
            f"{repository!r} on the hub has no safetensors and no GGUF files; if it is an EAGLE head in "
            f".bin, --drafter {repository} downloads it; a model is to be converted first (docs/security.md)"
        )
    rows = _forecasts(args, repository, found)
    report = {"repository": repository, "is_offline": False, "choices": rows, "chosen": None, "model": None}
    if args.list:
        if args.json:
            print(json.dumps(report))
        else:
            _show(repository, rows)
        return 0
    choice = chosen(found, args.quant, repository)
    missing = {name: size for name, size in choice.sizes.items() if cached(repository, name) is None}
    if not args.json:
        _show(repository, rows)
        print(f"\ntaking {choice.name}", flush=True)
    if rows[found.index(choice)]["fits"] is False:
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
        print(json.dumps({**report, "chosen": choice.name, "model": choice.model}))
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


def _forecasts(args: argparse.Namespace, repository: str, choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """Of each choice what it is, whether it fits on the devices that were named, and tokens/s there by the
    planner's formula; None where none were."""
    rows = []
    for choice, request in zip(choices, _requests(args, repository, choices), strict=True):
        fits = tokens_per_s = None
        if request is not None:
            try:
                fits, tokens_per_s = True, make_plan(request).forecast.tokens_per_s
            except DoesNotFit:
                fits = False
        rows.append(
            {
                "name": choice.name,
                "model": choice.model,
                "files": list(choice.sizes),
                "size_bytes": choice.size_bytes,
                "fits": fits,
                "tokens_per_s": tokens_per_s,
            }
        )
    return rows


def _requests(
    args: argparse.Namespace, repository: str, choices: Sequence[Choice]
) -> Iterator[PlanRequest | None]:
    """What the planner is asked of each choice, by the model's config.json or the beginning of a GGUF file:
    in the precision that is asked for, else its checkpoint's (of a GGUF file what it is packed in)."""
    if args.cluster is None and args.devices is None:
        yield from [None] * len(choices)
        return
    filed = [choice for choice in choices if choice.name != CHECKPOINT]
    with tempfile.TemporaryDirectory(prefix="flowspec-") as folder:
        if hub_file(repository, "config.json", may_fetch=True) is not None:
            files = ModelFiles(repository)
        else:
            files = _beginning(repository, filed[0], Path(folder))  # a checkpoint has a config.json
        spec, dtype = files.spec, pick_dtype(args.dtype, files, files.config())
    shape, context = shape_of(spec, repository), pick_context(args.context, spec.context_max)
    precisions = tuple(dict.fromkeys((*([FILED] if filed else []), dtype)))
    taken = taken_for(Decoding(), args.model, args.cluster)
    wanted = make_plan_inputs(args, shape, weights_of(shape), precisions, context, taken).request
    for choice in choices:
        precision = dtype if choice.name == CHECKPOINT else FILED
        size = choice.size_bytes / max(1, shape.params + (0 if shape.is_tied else shape.head_params))
        own = shape if precision != FILED else replace(shape, filed_bytes=size)
        yield replace(wanted, shape=own, precisions=(precision,))


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


def _show(repository: str, rows: Sequence[dict[str, Any]]) -> None:
    shown: list[list[Any]] = []
    for row in rows:
        shown.append([row["name"], len(row["files"]), mib(row["size_bytes"])])
        if row["fits"] is not None:
            shown[-1] += ["yes", rounded(row["tokens_per_s"])] if row["fits"] else ["no", "-"]
    columns = ("what", "files", "size", "fits", "tokens/s, forecast")
    show(f"{repository} on the hub", columns[: len(shown[0])], shown)
