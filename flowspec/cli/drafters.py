"""List the drafters that others published for a model, best first, and which of them are here.

Nobody is asked: what is here is in the Hugging Face cache, what is published is in a table of this project.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from flowspec.cli.result import Result
from flowspec.draft.catalogue import EAGLE_2_TREE, Candidate, best_here, find_candidates, published
from flowspec.draft.registry import FALLBACK
from flowspec.errors import InputError, counted, meant
from flowspec.model.files import BUNDLED, bundled_models
from flowspec.plan.memory import mib
from flowspec.rounding import rounded
from flowspec.validation import as_dict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "the model that is to be guessed for: a hub id, a folder or a GGUF file"
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.model == BUNDLED:
        raise InputError(
            f"{BUNDLED} has its drafters with it: --drafter {', '.join(bundled_models())}; expected a model "
            "for which others published some"
        )
    target, found = find_candidates(args.model)
    if target is None:
        names = list(dict.fromkeys(name for row in published() for name in row.targets))
        hint = meant(args.model, names) or f"; there are some for {', '.join(names[:3])} and others"
        if os.path.exists(args.model):
            hint = f"; without one {FALLBACK} guesses, from what came before in the text"
        raise InputError(
            f"no published drafter is known for {args.model!r:.80} (any small model with the same tokenizer "
            f"may be one: --drafter FOLDER-OR-HUB-ID){hint}"
        )
    used = best_here(found)
    result = Result({"model": target, "taken": used, "drafters": [_report(each) for each in found]})
    here = sum(each.is_here for each in found) or "none"
    count = counted(len(found), "published drafter")
    result.note(f"{target}: {count}, {here} in the Hugging Face cache")
    for each in found:
        result.note(f"\n{each.row.drafter}")
        for line in _lines(each, used):
            result.note(f"  {line}")
    if used is not None:
        result.note(f"\nchat, generate, serve and plan take {used}, unless --drafter says another")
    else:
        result.note(
            f"\nnone that would help is here, so chat takes {FALLBACK}; --drafter with a name from this list "
            "downloads it"
        )
    result.note("Sources, and all that was measured: --json")
    result.print(as_json=args.json)
    return 0


def _report(found: Candidate) -> dict[str, Any]:
    row = as_dict(found.row)
    measured, _ = row.pop("measured"), row.pop("targets")
    shares = [each.share_right for each in found.row.measured]
    return {
        **row,
        "name": found.row.name,
        "is_here": found.is_here,
        "bytes_here": found.bytes_here or None,
        "refusal": found.refusal or None,
        "accepted": [{**each, "share_right": share} for each, share in zip(measured, shares, strict=True)],
        "acceptance": found.row.acceptance,
    }


def _lines(found: Candidate, used: str | None) -> Iterator[str]:
    """What people read of a drafter."""
    row = found.row
    facts = [row.layout]
    if size := row.bytes or found.bytes_here:
        facts.append(mib(size))
    elif row.parameters is not None:
        facts.append(f"{rounded(row.parameters / 1e9)} billion parameters")
    if row.licence is not None:
        facts.append(f"licence {row.licence}")
    if found.is_here:
        facts.append("here, taken" if row.name == used else "here")
    yield ", ".join(facts)
    measured = row.best_known
    if measured is None:
        yield "acceptance not published"
    else:
        most = f" of at most {measured.drafted + 1}" if isinstance(measured.drafted, int) else ""
        tree = " in EAGLE-2's tree" if measured.drafted == EAGLE_2_TREE else ""
        right = "" if measured.share_right is None else f": {measured.share_right:.1%} right"
        yield f"{measured.length:g} tokens a round{most}{tree} ({measured.tasks}){right}"
    if found.refusal:
        yield found.refusal
