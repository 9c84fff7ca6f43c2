"""The model and the cluster that a command's flags name, ready to answer."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable

from flowspec.cli.console import loading_bar
from flowspec.cli.options import cluster_options, decoding_options, joined
from flowspec.cli.terminal import note
from flowspec.llm import LLM
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.hub import is_fetched
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
    """Opens it, with a bar while the layers are loaded; the arguments are those of `LLM.opened` and
    `loading_bar`; `also` is told what the bar is."""
    if not args.json:
        for name in dict.fromkeys((args.model or BUNDLED, *joined(args.drafter))):
            tell_of_hub(name)
    decoding = decoding_options(args, args.method, joined(args.drafter), args.chain)
    with loading_bar(quiet=args.json, is_logged=is_logged) as shown:

        def progress(text: str, share: float) -> None:
            also(text, share)
            shown(text, share)

        return LLM.opened(
            cluster_options(args, args.local),
            decoding,
            recovery_options,
            progress,
            check,
            needs_text=needs_text,
        )


def tell_of_hub(name: str) -> None:
    """Says that a model must come from the hub, which may take long to answer, or to be given up."""
    is_hub_id = HUB_ID.fullmatch(name) is not None and not os.path.exists(name)
    if is_hub_id and not is_fetched("/".join(name.split("/")[:2])):
        note(f"(asking the hub for {name}; it has half a minute to answer)")
