"""The model that a command's flags name, and one answer of it at the terminal: shows its text, lets Ctrl-C
stop it, records it, and gathers what there is to report."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from flowspec.cli.console import loading_bar
from flowspec.cli.options import LOCAL, cluster_options, decoding_options, joined
from flowspec.cli.terminal import note
from flowspec.core.cluster.slowing import why_slow
from flowspec.core.methods import find_method
from flowspec.draft.choosing import BOARD, BOARDS, best_download, on_equal_devices, without_model
from flowspec.draft.kinds import FALLBACK, NONE
from flowspec.errors import InputError, counted
from flowspec.llm import LLM
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.hub import is_fetched
from flowspec.model.text import Tokenizer
from flowspec.plan.memory import mib
from flowspec.rounding import rounded
from flowspec.runtime.answer import Answer, AnswerStream, Keep
from flowspec.runtime.default_drafter import Taken, taken_for
from flowspec.runtime.pipeline_connections import Progress
from flowspec.runtime.planning.forecast_check import Measured, causes, is_wrong
from flowspec.runtime.planning.survey import machine_of
from flowspec.runtime.question import Question
from flowspec.runtime.session import RecoveryOptions, Session
from flowspec.runtime.watching import Notes, watch_session
from flowspec.validation import as_dict
from flowspec.watch.detokenizer import as_numbers
from flowspec.watch.recording import write_recording

STARTING = "starting; loading the model takes a while"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(/.+\.gguf)?", re.IGNORECASE)
"""`owner/name`, or a GGUF file of it."""
WAIT_TOLD_S = 1.0
"""That an answer had waited for a token when it was stopped."""


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
    if not args.json:
        for name in dict.fromkeys((args.model or BUNDLED, *joined(args.drafter))):
            note_hub(name)
    model = args.model or BUNDLED
    taken = taken_for(
        decoding_options(args, args.method, joined(args.drafter), args.chain), model, args.cluster
    )
    if not args.json:
        note_drafters(taken, model)
    is_begun = args.json or sys.stderr.isatty()
    with loading_bar(quiet=args.json) as shown:

        def progress(text: str, share: float) -> None:
            nonlocal is_begun
            if not is_begun:  # what can be wrong with the model was found before
                is_begun = True
                note(f"({STARTING})")
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


def note_drafters(taken: Taken, model: str) -> None:
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


def note_hub(name: str) -> None:
    """Says that a model must come from the hub, which may take long to answer, or to be given up."""
    is_hub_id = HUB_ID.fullmatch(name) is not None and not os.path.exists(name)
    if is_hub_id and not is_fetched("/".join(name.split("/")[:2])):
        note(f"(asking the hub for {name}; it has half a minute to answer)")


def from_head(stage: dict[str, Any]) -> str:
    """What the head had to send a stage of its weights, as a part of a line; nothing if that was nothing."""
    return f" ({mib(stage['received_bytes'])} of them just sent)" if stage["received_bytes"] else ""


def figures(answer: Answer, session: Session | None) -> str:
    """Speed, where it can be told, and how an answer ended where that is not of itself, in one line."""
    count = counted(answer.new_tokens, "token") + (
        f" ({answer.resumed_tokens} taken over)" if answer.resumed_tokens else ""
    )
    timing = answer.timing
    at_once = "" if answer.new_tokens else ": the model ended the answer at once"
    endings = {"stop": at_once, "length": ", stopped at the token limit", "cancelled": ", stopped"}
    ending = endings.get(answer.finish_reason, "")
    if session is not None and answer.finish_reason == "length":
        context, most = session.head.plan.context, session.spec.context_max
        if answer.prompt_tokens + answer.new_tokens >= context:
            more = f"; --context takes up to {most}" if most > context else ""
            ending = f", stopped: the context of {context} tokens is full{more}"
    if answer.finish_reason == "cancelled" and timing.ended_s - timing.last_s >= WAIT_TOLD_S:
        ending += f" after {rounded(timing.ended_s - timing.last_s)} s without a token"  # no rate knows of it
    if answer.new_tokens == answer.resumed_tokens:
        return f"{count}{ending}"
    rate = f"{timing.tokens_per_s:.1f} tokens/s, " if timing.tokens_per_s else ""
    return f"{count}, {rate}first after {timing.first_s:.2f} s{ending}"


@contextlib.contextmanager
def cancel_on_ctrl_c(stream: AnswerStream) -> Iterator[threading.Event]:
    """Ctrl-C cancels the answer, which then ends by itself; a second one interrupts, should the cluster not
    answer."""
    interruption = threading.Event()

    def cancel(number: int, frame: FrameType | None) -> None:
        if interruption.is_set():
            raise KeyboardInterrupt
        interruption.set()
        stream.cancel()

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)


def ask(
    llm: LLM,
    question: Question,
    request: int,
    show: Callable[[str], None],
    keep: Keep | None = None,
) -> tuple[Answer, bool]:
    """Has a question answered in the conversation `request`, and shows the text as it comes, up to its end
    (without a tokenizer the token ids); Ctrl-C cancels the answer and keeps what is there.

    `keep` gets new tokens before they are shown. Returns the answer, and whether Ctrl-C ended it.
    """
    stream = AnswerStream(llm.session, question, llm.tokenizer, request=request, keep=keep)
    with cancel_on_ctrl_c(stream) as interruption:
        for piece in stream:
            show(piece.text if llm.tokenizer else "".join(f"{token} " for token in piece.token_ids))
        return stream.answer(), interruption.is_set()


class NotRecordedError(InputError):
    """The answer is there, but not its recording."""


def check_recording(path: Path) -> None:
    """Whether a recording can be written there, before anything is started."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        why = "is a folder" if path.is_dir() else "is in no folder that can be written"
        raise InputError(f"expected a file for the recording, but {path} {why}")


@contextlib.contextmanager
def record_answer(
    session: Session, tokenizer: Tokenizer | None, path: Path | None, notes: Notes
) -> Iterator[None]:
    """Writes what the head does in the meantime, one answer, to a file, with what `notes` tell of devices;
    nothing without one. Raises `NotRecordedError` after the answer."""
    if path is None:
        yield
        return
    watch = watch_session(session, as_numbers if tokenizer is None else tokenizer.decode, keeps=True)
    watch.join(reads=False)
    notes.watch = watch
    try:
        yield
        watch.settle()
        document = watch.recording()
    finally:
        notes.watch = None
        watch.close()
    if document is None:
        raise NotRecordedError(
            "nothing is recorded: the answer was too long for it, or was known before it began"
        )
    try:
        write_recording(path, document)
    except InputError as error:
        raise NotRecordedError(str(error)) from None


def drafter_lines(session: Session) -> list[str]:
    """A line for each drafter that runs on a device of its own."""
    return [
        f"{each['device']}: drafter {each['name']}, {mib(each['weight_bytes'])} of weights{from_head(each)}, "
        f"pid {each['pid']} at {each['address']}" + ("" if each["is_there"] else " (lost)")
        for each in session.drafters_report()
        if each["address"]
    ]


def text_of(llm: LLM, answer: Answer) -> str | None:
    """An answer's text; None of a model without a tokenizer."""
    return None if llm.tokenizer is None else answer.text


def record(llm: LLM, question: Question, answer: Answer) -> dict[str, Any]:
    """An answer as `--json` prints it."""
    session, timing = llm.session, answer.timing
    plan = session.head.plan
    return {
        "token_ids": list(answer.token_ids),
        "text": text_of(llm, answer),
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "reused_tokens": answer.reused_tokens,
        "new_tokens": answer.new_tokens,
        "resumed": answer.resumed_tokens,
        "time_to_first_token_s": round(timing.first_s, 6),
        "decode_s": round(timing.decode_s, 6),
        "tokens_per_s": round(timing.tokens_per_s, 3),
        "method": session.decoding.method,
        "drafter": session.drafter,
        "world": "cluster",
        "model": plan.model,
        "dtype": plan.dtype,
        "cache": plan.cache,
        "arithmetic": answer.arithmetic,
        "context": plan.context,
        **as_dict(question.sampling),
        "statistics": answer.statistics,
        "stages": session.stages_report(),
        "drafters": session.drafters_report(),
        "expertise": session.expertise_report(),
        "plan": None if session.chosen is None else session.chosen.report(),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a forecast was wrong: `text` is empty where that is not known. `kinds` tell whether that was told
    before, whatever the figures."""

    text: str
    kinds: frozenset[str]


def explain_forecast(session: Session, answer: Answer) -> Explanation | None:
    """Why the forecast was wrong by more than a factor of two; None where it was right or nothing was
    forecast."""
    if session.chosen is None:
        return None
    plan, found, stages = session.chosen.plan, answer.statistics, session.head.stages
    measured = Measured(
        tokens_per_s=answer.timing.tokens_per_s,
        new_tokens=answer.new_tokens - answer.resumed_tokens,
        hops=list(session.head.hops)[-max(1, found["segments"]) :],
        links_s=found["link_s"] / max(1, found["segments"]),
        missed=1 - found["share_in_flight"],
        why_slow={
            stage.plan.name: why_slow(stage.pong)
            for stage in stages
            if stage.pong is not None and stage.pong.is_throttled
        },
        hosts={stage.plan.name: machine_of(stage.plan.address) for stage in stages},
        in_use=session.chosen.survey.in_use,
        returning=session.head.returning,
        runs={each.name: each.end - each.first for each in session.head.plan.stages},
        recoveries=found["recoveries"],
        recovery_s=sum(found[f"recovery_{part}_s"] for part in ("detect", "load", "prefill")),
    )
    if not is_wrong(plan, measured):
        return None
    reasons = causes(session.chosen.request, plan, measured)
    why = "; ".join(cause.text for cause in reasons)
    forecast, was = rounded(plan.forecast.tokens_per_s), rounded(measured.tokens_per_s)
    text = f"forecast {forecast} tokens/s, measured {was}: {why}" if why else ""
    return Explanation(text=text, kinds=frozenset(cause.kind for cause in reasons) or frozenset(("unknown",)))
