"""What `--journal` and `--resume` mean for a command: where journals lie, what of the flags they fix, and
what is asked again."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowspec.cli.options import LOCAL
from flowspec.cli.parser import Rare
from flowspec.core.protocol.messages import SAMPLING_FIELDS
from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.errors import InputError, counted
from flowspec.folders import state_folder
from flowspec.model.files import ModelFiles
from flowspec.runtime.journal.lines import Entry, Setting
from flowspec.runtime.session import Session
from flowspec.validation import as_dict

FIXED: Mapping[str, Any] = {
    **dict.fromkeys(("prompt", "prompt_token_ids", "prompts", "journal", "system", "dtype", "context")),
    **dict.fromkeys((*SAMPLING_FIELDS, "max_new_tokens")),
    "cache": CACHE_AUTO,
    "raw": False,
    "parallel": 1,
    "stop": [],
    "stop_token_ids": (),
    "ignore_eos": False,
}
"""Flags whose part a journal plays, each as it is when it is left out. Where the model runs, and how it is
decoded, may change."""


def journal_folder() -> Path:
    """Where chats keep their dialogues."""
    return state_folder() / "journals"


def add_good_part(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--good-part",
        action="store_true",
        help=Rare("with --resume: go on with what is whole of a damaged journal, and remove the rest"),
    )


def check_good_part(args: argparse.Namespace) -> None:
    if args.good_part and args.resume is None:
        raise InputError("--good-part is about the journal of --resume; give both or neither")


def refuse_fixed(args: argparse.Namespace) -> None:
    """Refuses what would contradict the journal that is resumed. Raises `InputError`."""
    for name, left_out in FIXED.items():
        if getattr(args, name, left_out) != left_out:
            flag = "a prompt" if name == "prompt" else f"--{name.replace('_', '-')}"
            raise InputError(f"--resume goes on as the journal says; leave out {flag}")


def follow_setting(args: argparse.Namespace, setting: Setting) -> None:
    """Has the flags say what the journal says; a model that is given must turn out to be the same, and where
    it runs is as it was, unless a flag says otherwise."""
    if setting.command != args.command:
        raise InputError(f"--resume: that is a journal of flowspec {setting.command}; resume it there")
    args.model = args.model or setting.model
    args.dtype, args.cache, args.context = setting.dtype, setting.cache, setting.context
    if args.cluster is None and args.local is None:
        args.cluster = Path(setting.cluster) if setting.cluster else None
        args.local = setting.local or None


def place_told(args: argparse.Namespace, setting: Setting) -> str:
    """Where a journal has what is resumed run, in a line; nothing where a flag says it, or it is as it always
    is."""
    if setting.cluster and args.cluster == Path(setting.cluster):
        return f"as before on the devices of {setting.cluster}; --cluster or --local runs it elsewhere"
    if args.cluster is None and setting.local and args.local == setting.local != LOCAL:
        processes = counted(setting.local, "local process", "es")
        return f"as before on {processes}; --cluster or --local runs it elsewhere"
    return ""


def check_model(files: ModelFiles, setting: Setting) -> None:
    """Raises `InputError` for a model of other content than the journal's."""
    found = files.fingerprint()
    if found != setting.fingerprint:
        raise InputError(
            f"model {files.model!r} ({found[:8]}) is not the one of the journal ({setting.model!r}, "
            f"{setting.fingerprint[:8]}); give --model the one that began the answer"
        )


def setting_of(args: argparse.Namespace, session: Session) -> Setting:
    """What a new journal of this command begins with."""
    plan = session.head.plan
    return Setting(
        command=args.command,
        model=plan.model,
        fingerprint=plan.fingerprint,
        dtype=plan.dtype,
        cache=plan.cache,
        context=plan.context,
        arithmetic=session.head.arithmetic,
        cluster="" if args.cluster is None else os.path.abspath(args.cluster),
        local=0 if args.cluster is not None else args.local or LOCAL,
    )


def finished_record(setting: Setting, entry: Entry) -> dict[str, Any]:
    """As `answer.record` has it, for an answer that nothing was computed for."""
    question, count = entry.question, len(entry.question.answered)
    return {
        "token_ids": list(question.answered),
        "text": entry.text,
        "finish_reason": entry.end,
        "prompt_tokens": len(question.prompt),
        "reused_tokens": 0,
        "new_tokens": count,
        "resumed": count,
        "model": setting.model,
        "dtype": setting.dtype,
        "cache": setting.cache,
        "arithmetic": setting.arithmetic,
        "context": setting.context,
        **as_dict(question.sampling),
    }
