"""The model and the cluster that a command's flags name, ready to answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from flowspec.cli.console import loading_bar
from flowspec.cli.options import cluster_options, decoding_options, joined
from flowspec.llm import LLM
from flowspec.model.files import ModelFiles
from flowspec.runtime.session import RecoveryOptions


def open_llm(
    args: argparse.Namespace,
    recovery_options: RecoveryOptions,
    check: Callable[[ModelFiles], None] = lambda files: None,
    *,
    needs_text: bool = True,
) -> LLM:
    """Opens it, with a bar while the layers are loaded; the arguments are those of `LLM.opened`."""
    decoding = decoding_options(args, args.method, joined(args.drafter), args.chain)
    with loading_bar(quiet=args.json) as progress:
        return LLM.opened(
            cluster_options(args, args.local),
            decoding,
            recovery_options,
            progress,
            check,
            needs_text=needs_text,
        )
