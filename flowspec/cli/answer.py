"""What `chat` and `generate` share: the model that flags or a journal name, and an answer of it, which Ctrl-C
stops and which is recorded for who asks for it."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from flowspec.cli.console import loading_bar
from flowspec.cli.options import (
    LOCAL,
    add_decoding_arguments,
    add_model_arguments,
    add_sampling_arguments,
    cluster_options,
    decoding_options,
    joined,
)
from flowspec.cli.parser import Rare
from flowspec.cli.terminal import note
from flowspec.core.methods import find_method
from flowspec.core.protocol.messages import SAMPLING_FIELDS
from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.draft.catalogue import find_target
from flowspec.draft.registry import FALLBACK, NONE
from flowspec.errors import InputError, counted
from flowspec.folders import state_folder
from flowspec.llm import LLM
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.hub import is_fetched
from flowspec.runtime.answer import Answer, AnswerStream
from flowspec.runtime.decoding import Decoding, choose_drafter
from flowspec.runtime.journal.file import Journal, newest
from flowspec.runtime.journal.lines import JournalContent, Setting
from flowspec.runtime.pipeline_connections import Progress
from flowspec.runtime.question import Question
from flowspec.runtime.session import RecoveryOptions, Session
from flowspec.runtime.watching import Notes, watch_session
from flowspec.watch.detokenizer import as_numbers
from flowspec.watch.recording import write_recording

LAST = Path()
"""What `--resume` of a chat means without a file."""
STARTING = "starting; loading the model takes a while"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(/.+\.gguf)?", re.IGNORECASE)
"""`owner/name`, or a GGUF file of it."""
FIXED: Mapping[str, Any] = {
    **dict.fromkeys(("prompt", "prompt_token_ids", "prompts", "journal", "system", "dtype", "context")),
    **dict.fromkeys((*SAMPLING_FIELDS, "max_new_tokens")),
    **dict(cache=CACHE_AUTO, raw=False, parallel=1, stop=[], stop_token_ids=(), ignore_eos=False),
}
"""Flags whose part a journal plays, each as it is when it is left out. Where the model runs, and how it is
decoded, may change."""


def add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that name a model, and say how it is asked; those of journals come before."""
    add_model_arguments(parser)
    add_decoding_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(model=None)  # a journal names its own


# ------------------------------------------------------------------------------------------------- the model


def open_llm(
    args: argparse.Namespace,
    recovery_options: RecoveryOptions,
    check: Callable[[ModelFiles], None] = lambda files: None,
    *,
    needs_text: bool = True,
    also: Progress = lambda text, share: None,
) -> LLM:
    """Opens it, with a bar while the layers are loaded, or a line before where no terminal shows one; the
    arguments are those of `LLM.opened`; `also` is told what the bar is."""
    model, drafters = args.model or BUNDLED, joined(args.drafter)
    if not args.json:
        for name in dict.fromkeys((model, *drafters)):
            note_hub(name)
    given = decoding_options(args, args.method, drafters, args.chain)
    decoding = choose_drafter(given, model, args.cluster)
    if not args.json:
        note_drafters(decoding, model, args.cluster)
    is_begun = args.json or sys.stderr.isatty()
    with loading_bar(quiet=args.json) as shown:

        def progress(text: str, share: float) -> None:
            nonlocal is_begun
            if not is_begun:  # what can be wrong with the model was found before
                is_begun = True
                note(f"({STARTING})")
            also(text, share)
            shown(text, share)

        options = cluster_options(args, args.local or LOCAL)
        return LLM.opened(options, decoding, recovery_options, progress, check, needs_text=needs_text)


def note_drafters(decoding: Decoding, model: str, cluster: Path | None) -> None:
    """Says which drafter is used where the user named none, or that none is used whom the user named, and on
    a terminal where to find some."""
    if decoding.drafters not in ((), (NONE,)) and not find_method(decoding.method).drafts:
        named = ",".join(decoding.drafters)
        note(f"(--drafter {named} is not used: method {decoding.method} guesses nothing)")
    if decoding.is_default:
        best = decoding.drafters[0]
        note(f"(drafter {best}, the best one that is here; --drafter {FALLBACK} does without)")
    elif decoding.is_open(cluster) and find_target(model) is not None and sys.stderr.isatty():
        note(f"(a published drafter may make answers faster: flowspec drafters {model} lists them)")


def note_hub(name: str) -> None:
    """Says that a model must come from the hub, which may take long to answer, or to be given up."""
    is_hub_id = HUB_ID.fullmatch(name) is not None and not os.path.exists(name)
    if is_hub_id and not is_fetched("/".join(name.split("/")[:2])):
        note(f"(asking the hub for {name}; it has half a minute to answer)")


# ------------------------------------------------------------------------------------------------- journals


def journal_folder() -> Path:
    """Where chats keep their dialogues."""
    return state_folder() / "journals"


def add_good_part(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--good-part",
        action="store_true",
        help=Rare("with --resume: go on with what is whole of a damaged journal, and remove the rest"),
    )


def open_journal(
    args: argparse.Namespace, tell: Callable[[str], None]
) -> tuple[Journal, JournalContent] | None:
    """The journal that is to be resumed, if one is. The flags say from now on what it says, also where it
    runs, which is noted, unless they did before. Raises `InputError`, also for flags that contradict it."""
    if args.resume is None:
        if args.good_part:
            raise InputError("--good-part is about the journal of --resume; give both or neither")
        return None
    for name, left_out in FIXED.items():
        if getattr(args, name, left_out) != left_out:
            flag = "a prompt" if name == "prompt" else f"--{name.replace('_', '-')}"
            raise InputError(f"--resume goes on as the journal says; leave out {flag}")
    path = newest(journal_folder()) if args.resume == LAST and args.command == "chat" else args.resume
    journal, content = Journal.open(path, tell, good_part=args.good_part)
    setting = content.setting
    if content.damage:
        what = "dialogue" if args.command == "chat" else "answer"
        note(f"({content.damage}; the {what} goes on from before it)")
    if setting.command != args.command:
        journal.close()
        raise InputError(f"--resume: that is a journal of flowspec {setting.command}; resume it there")
    args.model = args.model or setting.model
    args.dtype, args.cache, args.context = setting.dtype, setting.cache, setting.context
    if args.cluster is None and args.local is None:
        args.cluster = Path(setting.cluster) if setting.cluster else None
        args.local = setting.local or None
    place = ""
    if setting.cluster and args.cluster == Path(setting.cluster):
        place = f"the devices of {setting.cluster}"
    elif args.cluster is None and setting.local and args.local == setting.local != LOCAL:
        place = counted(setting.local, "local process", "es")
    goes_on = args.command == "chat" or (content.last is not None and not content.last.is_finished)
    if place and goes_on:
        note(f"(as before on {place}; --cluster or --local runs it elsewhere)")
    return journal, content


def check_model(setting: Setting | None, files: ModelFiles) -> None:
    """Raises `InputError` for a model of other content than the journal's."""
    if setting is not None and (found := files.fingerprint()) != setting.fingerprint:
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


# ------------------------------------------------------------------------------------------------- an answer


def ask(
    llm: LLM, question: Question, request: int, show: Callable[[str], None], journal: Journal | None
) -> Answer:
    """Has a question answered in the conversation `request`, and shows the text as it comes, up to its end
    (without a tokenizer the token ids); the `journal` gets it before. Ctrl-C cancels the answer, which then
    ends by itself, with what is there."""
    stream = AnswerStream(llm.session, question, llm.tokenizer, request=request, keep=journal)

    def cancel(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # should the cluster not answer
        stream.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        for piece in stream:
            show(piece.text if llm.tokenizer else "".join(f"{token} " for token in piece.token_ids))
        return stream.answer()
    finally:
        signal.signal(signal.SIGINT, before)


def check_recording(path: Path) -> None:
    """Whether a recording can be written there, before anything is started."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        why = "is a folder" if path.is_dir() else "is in no folder that can be written"
        raise InputError(f"expected a file for the recording, but {path} {why}")


@contextlib.contextmanager
def record_answer(
    llm: LLM, path: Path | None, notes: Notes, tell_trouble: Callable[[str], None]
) -> Iterator[None]:
    """Writes what the head does in the meantime, one answer, to a file, with what `notes` tell of devices;
    nothing without one. The answer is there also where its recording cannot be."""
    if path is None:
        yield
        return
    decode = as_numbers if llm.tokenizer is None else llm.tokenizer.decode
    with contextlib.closing(watch_session(llm.session, decode, keeps=True)) as watch:
        watch.join(reads=False)
        notes.watch = watch
        try:
            yield
            watch.settle()
        finally:
            notes.watch = None
        document = watch.recording()
    if document is None:
        tell_trouble("nothing is recorded: the answer was too long for it, or was known before it began")
        return
    try:
        write_recording(path, document)
    except InputError as error:
        tell_trouble(str(error))
