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
from typing import Any, NamedTuple

from flowspec.cli.console import working
from flowspec.cli.plan_request import add_forecast_arguments, make_plan_inputs
from flowspec.core.protocol import limits
from flowspec.core.protocol.precision import FILED, PRECISION_BYTES
from flowspec.draft.choosing import (
    BOARD,
    BOARDS,
    PRECISION,
    Candidate,
    Rate,
    best_here,
    candidates,
    on,
    on_equal_devices,
    without_model,
)
from flowspec.draft.kinds import FALLBACK
from flowspec.draft.published import table
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


class Rated(NamedTuple):
    """A drafter with the rate that is predicted, None where that cannot be; `base` is that of n-grams."""

    candidate: Candidate
    tokens_per_s: float | None = None
    base: float = 1.0

    @property
    def gain(self) -> float | None:
        return None if self.tokens_per_s is None else self.tokens_per_s / self.base - 1

    @property
    def order(self) -> tuple[bool, bool, float]:
        """What runs comes first, and of that what brings most."""
        return bool(self.candidate.refusal), self.gain is None, -(self.gain or 0.0)

    @property
    def acceptance(self) -> float | None:
        """What the planner assumes, else what is published."""
        planned = self.candidate.planned
        return self.candidate.row.acceptance if planned is None else planned.acceptance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "the model that is to be guessed for: a hub id, a folder or a GGUF file"
    parser.add_argument("model", metavar="MODEL", help=model)
    dtype = "precision (default: the checkpoint's, of one not here float16)"
    add_forecast_arguments(parser, metavar="NAME", help=dtype)
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
    rated = [Rated(each) for each in found.found]
    dtype, base, why_not = PRECISION, None, _NO_SHAPE
    if found.shape is not None:
        with working("predicting", quiet=args.json):
            dtype, rate = _rate(args, found.shape)
            try:
                base = rate(without_model(found.shape))
                rates = [None if each.planned is None else rate(each.planned) for each in found.found]
                rated = [Rated(each, own, base) for each, own in zip(found.found, rates, strict=True)]
                rated.sort(key=lambda each: each.order)
            except DoesNotFit as error:
                least = "; --dtype int4 takes less memory" if dtype not in ("int4", FILED) else ""
                why_not = f"{first_line(error)}{least}"
    if args.json:
        told = {
            "model": found.target.model,
            "world": "forecast by formula",
            "without_tokens_per_s": base,
            "why_not_foretold": None if base else why_not,
            "taken": None if taken is None else taken.name,
            "drafters": [_report(each) for each in rated],
        }
        print(json.dumps(told))
        return 0
    here = sum(each.candidate.is_here for each in rated)
    count = "1 published drafter" if len(rated) == 1 else f"{len(rated)} published drafters"
    print(f"{found.target.model}: {count}, {here or 'none'} in the Hugging Face cache")
    if base is None:
        _print(f"what they would bring is not known: {why_not}")
    else:
        where = "these devices"
        if args.cluster is None and args.devices is None:
            where = f"{BOARDS} {BOARD} and one for the head (yours: --devices, --cluster)"
        _print(
            f"predicted by formula for {where} in {dtype}: {rounded(base)} tokens/s with n-grams; the best "
            "first:"
        )
    for each in rated:
        gain = "-" if each.gain is None else f"{each.gain:+.0%}"
        print(f"\n{gain:>7}  {each.candidate.row.drafter}")
        for line in _lines(each, taken, is_foretold=base is not None):
            _print(line, INDENT)
    print()
    if taken is not None:
        _print(f"chat, generate, serve and plan take {taken.name}, unless --drafter says another")
    else:
        _print(
            f"none that would help is here, so chat takes {FALLBACK}; --drafter with a name from this list "
            "downloads it"
        )
    print("Sources, and all that was measured: --json")
    return 0


def _print(text: str, indent: str = "") -> None:
    print(
        textwrap.fill(
            text,
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
    )


def _rate(args: argparse.Namespace, shape: ModelShape) -> tuple[str, Rate]:
    """The precision that is asked for, else the checkpoint's where it is here; and rates in it on the devices
    that were named, else on four equal ones."""
    if args.dtype is not None and args.dtype not in PRECISION_BYTES:
        raise InputError(f"--dtype: expected {', '.join(PRECISION_BYTES)}, got {args.dtype!r:.80}")
    files = None
    try:
        here = ModelFiles(args.model, may_fetch=False)
        dtype, files = pick_dtype(args.dtype, here, here.config()), here
    except InputError:
        dtype = args.dtype or PRECISION  # it is not here: its shape must do
    if args.cluster is None and args.devices is None:
        return dtype, on_equal_devices(shape, dtype)
    weights, most = weights_of(shape), limits.CONTEXT_MAX
    if files is not None:
        weights, most = model_weights(files, shape), files.spec.context_max
    context = pick_context(args.context, most)
    taken = Taken(decoding=Decoding(drafters=(FALLBACK,)))  # others are compared with it
    return dtype, on(make_plan_inputs(args, shape, weights, (dtype,), context, taken).request)


def _report(rated: Rated) -> dict[str, Any]:
    candidate, row = rated.candidate, rated.candidate.row
    return {
        "drafter": row.drafter,
        "name": candidate.name,
        "layout": row.layout,
        "files": row.files,
        "licence": row.licence,
        "parameters": row.parameters,
        "bytes": row.bytes,
        "is_here": candidate.is_here,
        "bytes_here": candidate.bytes_here or None,
        "refusal": candidate.refusal or None,
        "accepted": [
            {
                "length": one.length,
                "tasks": one.tasks,
                "drafted": one.drafted,
                "temperature": one.temperature,
                "share_right": one.share,
                "source": one.source,
            }
            for one in row.measured
        ],
        "acceptance": rated.acceptance,
        "is_acceptance_published": row.acceptance is not None,
        "tokens_per_s": rated.tokens_per_s,
        "gain": rated.gain,
        "source": row.source,
    }


def _lines(rated: Rated, taken: Candidate | None, *, is_foretold: bool) -> Iterator[str]:
    """What people read of a drafter."""
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
    yield ", ".join(facts)
    yield _accepted(rated)
    if candidate.refusal:
        yield candidate.refusal
    elif is_foretold and rated.gain is None:
        yield "what it would bring cannot be forecast: its layers are not known"


def _accepted(rated: Rated) -> str:
    told, share = rated.candidate.row.told, rated.acceptance
    assumed = "" if share is None else f"{share:.1%} right assumed"
    if told is None:
        return ", ".join(filter(None, ("acceptance not published", assumed)))
    most = f" of at most {told.drafted + 1}" if isinstance(told.drafted, int) else ""
    tree = " in EAGLE-2's tree" if told.drafted == EAGLE_2_TREE else ""
    text = f"{told.length:g} tokens a round{most}{tree} ({told.tasks})"
    if told.share is not None:
        return f"{text}: {told.share:.1%} right"
    return "; ".join(filter(None, (text, assumed)))
