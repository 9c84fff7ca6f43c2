"""List the drafters that others published for a model, which of them are here, and what each would bring.

Nobody is asked: what is here is in the Hugging Face cache, what is published is in a table of this project.
Rates are predicted by the planner's formula, not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowspec.cli.console import working
from flowspec.cli.options import add_cache_argument, positive
from flowspec.cli.plan_request import add_device_arguments, make_plan_inputs
from flowspec.core.protocol import limits
from flowspec.core.protocol.precision import FILED, PRECISION_BYTES
from flowspec.draft.choosing import (
    BOARD,
    BOARDS,
    PRECISION,
    Candidate,
    Candidates,
    Rate,
    best_here,
    candidates,
    on,
    on_equal_devices,
    without_model,
)
from flowspec.draft.kinds import FALLBACK
from flowspec.draft.published import Measured, table
from flowspec.errors import InputError, first_line, meant
from flowspec.model.files import BUNDLED, ModelFiles, bundled_models
from flowspec.plan.accepted_length import EAGLE_2_TREE
from flowspec.plan.memory import mib, weights_of
from flowspec.plan.planner import DoesNotFit
from flowspec.plan.shape import ModelShape
from flowspec.rounding import rounded
from flowspec.runtime.cluster import pick_context
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.default_drafter import Taken
from flowspec.runtime.planning.plan_inputs import model_weights
from flowspec.runtime.session import pick_dtype

WIDTH = 80
INDENT = 9 * " "
_NO_SHAPE = "the model is not here, and its shape is none that flowspec plan --shape knows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """A drafter with the rate that is predicted, and by how much it is above that of n-grams; None where
    that cannot be predicted."""

    candidate: Candidate
    tokens_per_s: float | None
    gain: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the model that is to be guessed for: a hub id, a folder or a GGUF file",
    )
    group = parser.add_argument_group("devices that it is for")
    add_device_arguments(group)
    group.add_argument(
        "--dtype", metavar="NAME", help="precision (default: the checkpoint's, of one not here float16)"
    )
    group.add_argument(
        "--context", type=positive, metavar="TOKENS", help="memory is reserved for it (default: 4096)"
    )
    add_cache_argument(group)
    # of a plan, which are its own defaults
    parser.set_defaults(shape=None, acceptance=None, users=1, head=None, all_devices=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    found = candidates(args.model)
    if args.model == BUNDLED:
        raise InputError(
            f"{BUNDLED} has its drafters with it: --drafter {', '.join(bundled_models())}; expected a model "
            "for which others published some"
        )
    if found.target is None:
        names = [target.model for target in table().targets]
        hint = meant(args.model, names) or f"; there are some for {', '.join(names[-1:-4:-1])} and others"
        if os.path.exists(args.model):
            hint = f"; without one {FALLBACK} guesses, from what came before in the text"
        raise InputError(
            f"no published drafter is known for {args.model!r:.80} (any small model with the same tokenizer "
            f"may be one: --drafter FOLDER-OR-HUB-ID){hint}"
        )
    taken = best_here(found)
    rated = [Rated(candidate=each, tokens_per_s=None, gain=None) for each in found.found]
    dtype, base, why_not = PRECISION, None, _NO_SHAPE
    if found.shape is not None:
        with working("predicting", quiet=args.json):
            dtype, files = _precision(args)
            rate = _rate(args, found.shape, dtype, files)
            try:
                base = rate(without_model(found.shape))
                rated = sorted((_rated(each, rate, base) for each in found.found), key=_order)
            except DoesNotFit as error:
                least = "; --dtype int4 takes less memory" if dtype not in ("int4", FILED) else ""
                why_not = f"{first_line(error)}{least}"
    if args.json:
        print(json.dumps(report(found, rated, base, taken, "" if base else why_not)))
    else:
        print("\n".join(_lines(args, found, rated, base, taken, dtype, why_not)))
    return 0


def _rate(args: argparse.Namespace, shape: ModelShape, dtype: str, files: ModelFiles | None) -> Rate:
    """On the devices that were named, else on four equal ones."""
    if args.cluster is None and args.devices is None:
        return on_equal_devices(shape, dtype)
    weights, most = weights_of(shape), limits.CONTEXT_MAX
    if files is not None:
        weights, most = model_weights(files, shape), files.spec.context_max
    context, taken = pick_context(args.context, most), Taken(decoding=Decoding(drafters=(FALLBACK,)))
    return on(make_plan_inputs(args, shape, weights, (dtype,), context, taken).request)


def _precision(args: argparse.Namespace) -> tuple[str, ModelFiles | None]:
    """The one that is asked for, else the checkpoint's where it is here; and its files, if they are."""
    if args.dtype is not None and args.dtype not in PRECISION_BYTES:
        raise InputError(f"--dtype: expected {', '.join(PRECISION_BYTES)}, got {args.dtype!r:.80}")
    try:
        files = ModelFiles(args.model, may_fetch=False)
        return pick_dtype(args.dtype, files, files.config()), files
    except InputError:
        return args.dtype or PRECISION, None  # it is not here: its shape must do


def _rated(candidate: Candidate, rate: Rate, base: float) -> Rated:
    if candidate.planned is None:
        return Rated(candidate=candidate, tokens_per_s=None, gain=None)
    tokens_per_s = rate(candidate.planned)
    return Rated(candidate=candidate, tokens_per_s=tokens_per_s, gain=tokens_per_s / base - 1)


def _order(rated: Rated) -> tuple[bool, bool, float]:
    """What runs comes first, and of that what brings most."""
    return bool(rated.candidate.refusal), rated.gain is None, -(rated.gain or 0.0)


# ------------------------------------------------------------------------------------------------------- JSON


def report(
    found: Candidates, rated: list[Rated], base: float | None, taken: Candidate | None, why_not: str = ""
) -> dict[str, Any]:
    """What `--json` prints; `why_not` says why nothing is predicted."""
    assert found.target is not None
    return {
        "model": found.target.model,
        "world": "forecast by formula",
        "without_tokens_per_s": base,
        "why_not_foretold": why_not or None,
        "taken": None if taken is None else taken.name,
        "drafters": [
            {
                "drafter": each.candidate.row.drafter,
                "name": each.candidate.name,
                "layout": each.candidate.row.layout,
                "files": each.candidate.row.files,
                "licence": each.candidate.row.licence,
                "parameters": each.candidate.row.parameters,
                "bytes": each.candidate.row.bytes,
                "is_here": each.candidate.is_here,
                "bytes_here": each.candidate.bytes_here or None,
                "refusal": each.candidate.refusal or None,
                "accepted": [_measured(one) for one in each.candidate.row.measured],
                "acceptance": _acceptance(each.candidate),
                "is_acceptance_published": each.candidate.row.acceptance is not None,
                "tokens_per_s": each.tokens_per_s,
                "gain": each.gain,
                "source": each.candidate.row.source,
            }
            for each in rated
        ],
    }


def _measured(one: Measured) -> dict[str, Any]:
    return {
        "length": one.length,
        "tasks": one.tasks,
        "drafted": one.drafted,
        "temperature": one.temperature,
        "share_right": one.share,
        "source": one.source,
    }


def _acceptance(candidate: Candidate) -> float | None:
    """What the planner assumes, else what is published."""
    return candidate.row.acceptance if candidate.planned is None else candidate.planned.acceptance


# ------------------------------------------------------------------------------------------------------- text


def _lines(
    args: argparse.Namespace,
    found: Candidates,
    rated: list[Rated],
    base: float | None,
    taken: Candidate | None,
    dtype: str,
    why_not: str,
) -> Iterator[str]:
    assert found.target is not None
    here = sum(each.candidate.is_here for each in rated)
    count = "1 published drafter" if len(rated) == 1 else f"{len(rated)} published drafters"
    yield f"{found.target.model}: {count}, {here or 'none'} in the Hugging Face cache"
    if base is None:
        yield from _filled(f"what they would bring is not known: {why_not}")
    else:
        where = "these devices"
        if args.cluster is None and args.devices is None:
            where = f"{BOARDS} {BOARD} and one for the head (yours: --devices, --cluster)"
        yield from _filled(
            f"predicted by formula for {where} in {dtype}: {rounded(base)} tokens/s with n-grams; "
            "the best first:"
        )
    for each in rated:
        gain = "-" if each.gain is None else f"{each.gain:+.0%}"
        yield f"\n{gain:>7}  {each.candidate.row.drafter}"
        yield from (INDENT + line for line in _told(each, taken, is_foretold=base is not None))
    yield ""
    if taken is not None:
        yield from _filled(f"chat, generate, serve and plan take {taken.name}, unless --drafter says another")
    else:
        yield from _filled(
            f"none that would help is here, so chat takes {FALLBACK}; --drafter with a name from this list "
            "downloads it"
        )
    yield "Sources, and all that was measured: --json"


def _told(rated: Rated, taken: Candidate | None, *, is_foretold: bool) -> Iterator[str]:
    row, candidate = rated.candidate.row, rated.candidate
    facts = [row.layout]
    if size := row.bytes or candidate.bytes_here:
        facts.append(mib(size))
    elif row.parameters is not None:
        facts.append(f"{rounded(row.parameters / 1e9)} billion parameters")
    if row.licence is not None:
        facts.append(f"licence {row.licence}")
    if candidate.is_here:
        facts.append("here" if candidate is not taken else "here, taken")
    text = [", ".join(facts)]
    text.append(_accepted(candidate))
    if candidate.refusal:
        text.append(candidate.refusal)
    elif is_foretold and rated.gain is None:
        text.append("what it would bring cannot be forecast: its layers are not known")
    for line in text:
        yield from textwrap.wrap(line, WIDTH - len(INDENT), break_on_hyphens=False, break_long_words=False)


def _accepted(candidate: Candidate) -> str:
    told, share = candidate.row.told, _acceptance(candidate)
    if told is None:
        return "acceptance not published" + ("" if share is None else f", {share:.1%} right assumed")
    most = f" of at most {told.drafted + 1}" if isinstance(told.drafted, int) else ""
    tree = " in EAGLE-2's tree" if told.drafted == EAGLE_2_TREE else ""
    text = f"{told.length:g} tokens a round{most}{tree} ({told.tasks})"
    if told.share is not None:
        return f"{text}: {told.share:.1%} right"
    return text + ("" if share is None else f"; {share:.1%} right assumed")


def _filled(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False, break_long_words=False)
