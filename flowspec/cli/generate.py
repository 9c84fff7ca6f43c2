"""Answer a prompt, or a file of prompts, then stop.

The answer goes to standard output, what else there is to say to standard error. `--json` prints one object
per answer instead. Answers to a file are printed in its order, each when it and those before it are there;
Ctrl-C stops all of them and prints what is finished.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from flowspec.bench.cases import Prompt, read_prompts
from flowspec.cli import answer_report as report
from flowspec.cli.answer import (
    add_answer_arguments,
    add_good_part,
    ask,
    check_model,
    check_recording,
    open_journal,
    open_llm,
    record_answer,
    setting_of,
)
from flowspec.cli.console import note_child_lines, show_answer
from flowspec.cli.options import number_list, positive, sampling_params
from flowspec.cli.parser import Rare
from flowspec.cli.terminal import note, show
from flowspec.core.head.head import too_long
from flowspec.core.protocol.limits import REQUESTS_MAX
from flowspec.errors import FlowSpecError, InputError
from flowspec.interruption import INTERRUPTED
from flowspec.llm import LLM
from flowspec.model.files import ModelFiles
from flowspec.model.text import Messages, Tokenizer, check_utf8
from flowspec.runtime import timeouts
from flowspec.runtime.answer import Answer, AnswerStream
from flowspec.runtime.cluster import pick_context
from flowspec.runtime.journal.file import Journal
from flowspec.runtime.journal.lines import Entry, Setting
from flowspec.runtime.question import Question
from flowspec.runtime.session import RecoveryOptions
from flowspec.runtime.watching import Notes
from flowspec.validation import as_dict

SEVERAL = "expected one of PROMPT, --prompt, --prompt-token-ids and --prompts, got several"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="the prompt (without one, or with -: what is piped in)")
    add("--prompt", "-p", dest="prompt_flag", metavar="TEXT", help="the prompt, as other tools take it")
    rare = Rare("the prompt as token ids; no tokenizer is needed")
    add("--prompt-token-ids", type=number_list, metavar="1,5,9", help=rare)
    add("--system", metavar="TEXT", help="a system text before the prompt")
    add("--raw", action="store_true", help=Rare("give the prompt as it is, without the chat template"))
    text = "answer all of a file: jsonl in Spec-Bench form, or text with one prompt a line; may be repeated"
    add("--prompts", action="append", type=Path, metavar="FILE", help=text)
    text = "with --prompts: N answers at a time (default: 1)"
    add("--parallel", type=positive, default=1, metavar="N", help=text)
    add("--json", action="store_true", help="print one JSON object per answer")
    add("--journal", type=Path, metavar="FILE", help="keep the answer in FILE as it comes, for --resume")
    text = "go on with the answer of this journal; prints all of it"
    add("--resume", type=Path, metavar="FILE", help=text)
    add_good_part(parser)
    text = "save a recording of the answer in FILE, for the page of flowspec serve"
    add("--record", type=Path, metavar="FILE", help=text)
    add_answer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.prompt_flag is not None:
        if args.prompt is not None:
            raise InputError(SEVERAL)
        args.prompt = args.prompt_flag
    with contextlib.ExitStack() as stack:
        stack.enter_context(note_child_lines())
        journal = setting = entry = None
        if (opened := open_journal(args, note)) is None:
            check_prompt(args)
            check_files(args)
            sampling_params(args)
        else:
            journal, content = opened
            stack.enter_context(journal)
            check_files(args)
            setting, entry = content.setting, content.last
            if entry is None:
                raise InputError(f"{args.resume} ends before its question; ask again")
            if entry.is_finished:
                return show_finished(setting, entry, is_json=args.json)
        prompts = [prompt for path in args.prompts or [] for prompt in read_prompts(path)]
        notes = Notes(lambda text: note(f"({text})"))
        recovery_options = RecoveryOptions(
            on_note=notes,
            wait_s=timeouts.WAIT_FOR_DEVICES_S,
            arithmetic="" if setting is None else setting.arithmetic,
        )

        def check(files: ModelFiles) -> None:
            check_model(setting, files)
            if args.resume is None and not prompts:
                check_length(args, files)

        needs_text = args.prompt_token_ids is None if entry is None else bool(entry.question.stops)
        llm = stack.enter_context(open_llm(args, recovery_options, check, needs_text=needs_text))
        if prompts:
            return answer_all(llm, llm.question_of([], sampling_params(args)), prompts, args)
        if entry is None:
            ids = args.prompt_token_ids or encode_prompt(llm.tokenizer, args)
            entry = Entry(question=llm.question_of(ids, sampling_params(args)))
        if args.journal is not None:
            journal = Journal.start(args.journal, setting_of(args, llm.session), note)
            stack.enter_context(journal).ask(entry)
        return answer_one(llm, entry.question, journal, notes, args)


def answer_one(
    llm: LLM, question: Question, journal: Journal | None, notes: Notes, args: argparse.Namespace
) -> int:
    """Shows the answer to a question; the exit status."""
    troubles: list[str] = []
    recording = record_answer(llm, args.record, notes, troubles.append)
    with recording, show_answer(quiet=args.json) as piece:
        answer = ask(llm, question, llm.session.head.new_request(), piece, journal)
    is_interrupted = answer.finish_reason == "cancelled"
    if journal is not None and not is_interrupted:
        journal.end(answer.finish_reason, None if llm.tokenizer is None else answer.text)
    if args.json:
        print(json.dumps(report.record(llm, question, answer)))
    else:
        note("\n".join(report_lines(llm, question, answer, is_verbose=args.verbose)))
    for trouble in troubles:
        note(f"(the answer is whole, but {trouble})")
    return INTERRUPTED if is_interrupted else len(troubles)


def show_finished(setting: Setting, entry: Entry, *, is_json: bool) -> int:
    """Prints an answer that is whole in its journal, for which nothing need run; as `record` has it."""
    question, tokens = entry.question, entry.question.answered
    if is_json:
        document: dict[str, Any] = {
            "token_ids": list(tokens),
            "text": entry.text,
            "finish_reason": entry.end,
            "prompt_tokens": len(question.prompt),
            "reused_tokens": 0,
            "new_tokens": len(tokens),
            "resumed": len(tokens),
            **{name: getattr(setting, name) for name in ("model", "dtype", "cache", "arithmetic", "context")},
            **as_dict(question.sampling),
        }
        print(json.dumps(document))
        return 0
    with show_answer() as piece:
        piece("".join(f"{token} " for token in tokens) if entry.text is None else entry.text)
    note("(the answer was finished; this is what the journal holds)")
    return 0


def report_lines(llm: LLM, question: Question, answer: Answer, *, is_verbose: bool) -> list[str]:
    """The lines under an answer: speed, seed, which process ran what, and with --verbose the statistics."""
    session = llm.session
    first_line = f"{report.figures(answer, session)}, {session.decoding.method}, drafter {session.drafter}"
    seed = f", seed {question.sampling.seed}" if question.sampling.temperature > 0 else ""
    lines = [f"arithmetic {answer.arithmetic}"] if is_verbose else []
    for stage in session.stages_report():
        lines.append(f"{stage['name']}: {report.held(stage)} at {stage['address']}")
    lines += report.drafter_lines(session)
    if session.chosen is not None:
        why, kinds = report.explain_forecast(session, answer)
        lines += session.chosen.lines(session.head.plan.stages, why if kinds else None)
    more = report.statistics_lines(answer.statistics, session.drafters) if is_verbose else []
    return [first_line + seed, *(f"  {line}" for line in lines), *more]


# ------------------------------------------------------------------------------------------------- checks


def check_files(args: argparse.Namespace) -> None:
    """Whether a new journal and a recording can be written where flags say, before anything is started."""
    path = args.journal
    for flag, given, does in (("journal", path, "holds"), ("record", args.record, "saves")):
        if given is not None and args.prompts:
            raise InputError(f"--{flag} {does} one answer; with --prompts, which has many, leave it out")
    if path is not None and (path.exists() or not os.access(path.parent, os.W_OK)):
        there = path.exists()
        why = "exists; --resume goes on with it" if there else "is in no folder that can be written"
        raise InputError(f"--journal: expected a new file, but {path} {why}")
    if args.record is not None:
        check_recording(args.record)


def check_prompt(args: argparse.Namespace) -> None:
    """Exactly one source of prompts, and something in it; a prompt from standard input is read here."""
    given = [name for name in ("prompt", "prompt_token_ids", "prompts") if getattr(args, name) is not None]
    if len(given) > 1:
        raise InputError(SEVERAL)
    if args.prompt_token_ids is not None and (args.stop or args.system):
        raise InputError("--stop and --system need text; with --prompt-token-ids use --stop-token-ids")
    if args.parallel > 1 and not args.prompts:
        raise InputError("--parallel needs --prompts: one prompt has one answer")
    if args.parallel > REQUESTS_MAX:
        raise InputError(f"--parallel: expected at most {REQUESTS_MAX}, got {args.parallel}")
    if not given or args.prompt == "-":
        if sys.stdin.isatty():
            raise InputError('expected a prompt: flowspec generate "What is 17 + 25?"')
        args.prompt = sys.stdin.read().removeprefix("\ufeff")  # the mark that some editors begin a text with
    if args.prompt is not None:
        if not args.prompt.strip():
            raise InputError("expected a prompt, got an empty one")
        check_utf8(args.prompt)


def check_length(args: argparse.Namespace, files: ModelFiles) -> None:
    """Refuses a prompt that has more tokens than the context before anything is started. Only one that is
    long enough for that is encoded."""
    ids, most = args.prompt_token_ids, files.spec.context_max
    context, size = pick_context(args.context, most), len(f"{args.system or ''}{args.prompt or ''}".encode())
    if ids is None and (size < context // 2 or not files.has_tokenizer):
        return
    count = len(ids or encode_prompt(Tokenizer(files), args))
    if count >= context:
        raise InputError(too_long(count, context, most))


def encode_prompt(tokenizer: Tokenizer | None, args: argparse.Namespace) -> list[int]:
    assert tokenizer is not None
    messages = [{"role": "user", "content": args.prompt}]
    return tokenizer.encode_dialogue(messages, system=args.system, is_raw=args.raw)


# ------------------------------------------------------------------------------------------------- files


def answer_all(llm: LLM, question: Question, prompts: Sequence[Prompt], args: argparse.Namespace) -> int:
    """Answers and prints all prompts, several at a time, whose nodes share the pipeline's segments; the exit
    status."""
    head, tokenizer = llm.session.head, llm.tokenizer
    assert tokenizer is not None
    running: set[AnswerStream] = set()
    stopped = threading.Event()

    def answer(prompt: Prompt) -> list[tuple[Question, Answer]]:
        """All turns of a prompt, one after another; fewer if they are stopped meanwhile."""
        request, messages = head.new_request(), Messages()
        found: list[tuple[Question, Answer]] = []
        for turn in prompt.turns:
            if stopped.is_set():
                break
            messages.append({"role": "user", "content": turn})
            ids = tokenizer.encode_dialogue(messages, system=args.system, is_raw=args.raw)
            asked = replace(question, prompt=ids)
            try:
                stream = AnswerStream(llm.session, asked, tokenizer, request=request)
                running.add(stream)
                if stopped.is_set():  # before it was listed
                    stream.cancel()
                found.append((asked, stream.answer()))
                running.discard(stream)
            except InputError as error:
                raise InputError(f"prompt {prompt.prompt_id}: {error}") from None
            messages.append({"role": "assistant", "content": found[-1][1].text})
        head.forget(request)
        return found

    def stop() -> None:
        stopped.set()
        for stream in running.copy():
            stream.cancel()

    def show_answers(prompt: Prompt, found: list[tuple[Question, Answer]]) -> None:
        for turn, (asked, answer) in enumerate(found):
            if args.json:
                document = report.record(llm, asked, answer)
                print(json.dumps({"prompt": prompt.prompt_id, "turn": turn, **document}), flush=True)
            else:
                show(f"[{prompt.prompt_id}] {answer.text}\n\n")
                note(f"  {report.figures(answer, llm.session)}")

    console = Console(stderr=True)
    with (
        ThreadPoolExecutor(args.parallel) as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("answers", total=len(prompts))
        waiting = deque((prompt, pool.submit(answer, prompt)) for prompt in prompts)
        try:
            while waiting:
                prompt, future = waiting[0]
                found = future.result()
                waiting.popleft()
                show_answers(prompt, found)
                bar.advance(task)
        except KeyboardInterrupt:
            stop()
            for prompt, future in waiting:
                if not future.cancel():
                    show_answers(prompt, future.result())
            return INTERRUPTED
        except FlowSpecError:
            stop()
            raise
    if not args.json and (known := report.expertise_table(llm.session, tokenizer)) is not None:
        console.print(known)
    return 0
