"""The model and the cluster that a command's flags name, ready to answer."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable

from flowspec.cli.console import STARTING, loading_bar
from flowspec.cli.options import LOCAL, cluster_options, decoding_options, joined
from flowspec.cli.terminal import note
from flowspec.core.methods import find_method
from flowspec.draft.choosing import BOARD, BOARDS, best_download, on_equal_devices, without_model
from flowspec.draft.kinds import FALLBACK, NONE
from flowspec.llm import LLM
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.hub import is_fetched
from flowspec.runtime.default_drafter import Taken, taken_for
from flowspec.runtime.pipeline_connections import Progress
from flowspec.runtime.session import RecoveryOptions

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(/.+\.gguf)?", re.IGNORECASE)
"""`owner/name`, or a GGUF file of it."""


def open_llm(
    args: argparse.Namespace,
    recovery_options: RecoveryOptions,
    check: Callable[[ModelFiles], None] = lambda files: None,
    *,
    needs_text: bool = True,
    is_logged: bool = False,
    also: Progress = lambda text, share: None,
) -> LLM:
    """Opens it, with a bar while the layers are loaded, or a line before where no terminal shows one; the
    arguments are those of `LLM.opened` and `loading_bar`; `also` is told what the bar is."""
    if not args.json:
        for name in dict.fromkeys((args.model or BUNDLED, *joined(args.drafter))):
            tell_of_hub(name)
    model = args.model or BUNDLED
    taken = taken_for(
        decoding_options(args, args.method, joined(args.drafter), args.chain), model, args.cluster
    )
    if not args.json:
        tell_of_drafters(taken, model)
    is_begun = args.json or is_logged or sys.stderr.isatty()

    def begin() -> None:
        nonlocal is_begun
        if not is_begun:
            is_begun = True
            note(f"({STARTING})")

    with loading_bar(quiet=args.json, is_logged=is_logged, before=begin) as shown:

        def progress(text: str, share: float) -> None:
            begin()  # what can be wrong with the model was found before
            also(text, share)
            shown(text, share)

        return LLM.opened(
            cluster_options(args, args.local or LOCAL),
            taken.decoding,
            recovery_options,
            progress,
            check,
            needs_text=needs_text,
        )


def tell_of_drafters(taken: Taken, model: str) -> None:
    """Says which drafter is taken where the user named none, or that none is used whom the user named, and on
    a terminal which download would help."""
    decoding = taken.decoding
    if decoding.drafters not in ((), (NONE,)) and not find_method(decoding.method).drafts:
        named = ",".join(decoding.drafters)
        note(f"(--drafter {named} is not used: method {decoding.method} guesses nothing)")
    if taken.drafter is not None:
        note(f"(drafter {taken.drafter.name}, the best one that is here; --drafter {FALLBACK} does without)")
    shape = taken.candidates.shape
    if shape is None or not sys.stderr.isatty():
        return
    now = without_model(shape) if taken.drafter is None else taken.drafter.planned
    if (better := best_download(taken.candidates, on_equal_devices(shape), now)) is not None:
        found, gain = better
        note(
            f"(a drafter that is not here would make answers some {gain:.0%} faster, by formula on "
            f"{BOARDS} {BOARD}: --drafter {found.name} downloads it; flowspec drafters {model} tells more)"
        )


def tell_of_hub(name: str) -> None:
    """Says that a model must come from the hub, which may take long to answer, or to be given up."""
    is_hub_id = HUB_ID.fullmatch(name) is not None and not os.path.exists(name)
    if is_hub_id and not is_fetched("/".join(name.split("/")[:2])):
        note(f"(asking the hub for {name}; it has half a minute to answer)")
