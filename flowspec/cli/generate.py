"""Answer a prompt, or a file of prompts, then stop.

The answer goes to standard output, what else there is to say to standard error. `--json` prints one object
per answer instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from flowspec.bench.cases import read_prompts
from flowspec.cli import batch, resume, statistics
from flowspec.cli.answer import (
    NotRecordedError,
    ask,
    check_recording,
    drafter_lines,
    explain_forecast,
    figures,
    from_head,
    open_llm,
    record,
    record_answer,
    text_of,
)
from flowspec.cli.options import (
    add_decoding_arguments,
    add_model_arguments,
    add_sampling_arguments,
    number_list,
    positive,
    sampling_params,
)
from flowspec.cli.parser import Rare
from flowspec.cli.streaming import show_answer
from flowspec.cli.terminal import note
from flowspec.core.head.head import too_long
from flowspec.errors import InputError
from flowspec.interruption import INTERRUPTED
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.text import Tokenizer, check_utf8
from flowspec.plan.memory import mib
from flowspec.runtime import timeouts
from flowspec.runtime.answer import Answer
from flowspec.runtime.cluster import pick_context
from flowspec.runtime.journal.file import Journal
from flowspec.runtime.journal.lines import Entry, JournalContent, Setting
from flowspec.runtime.question import Question
from flowspec.runtime.session import RecoveryOptions, Session
from flowspec.runtime.watching import Notes

SURE_BYTES = 256
"""A prompt that is shorter fits any context that nobody chose."""
SEVERAL = "expected one of PROMPT, --prompt, --prompt-token-ids and --prompts, got several"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="the prompt (without one, or with -: what is piped in)"
    )
    parser.add_argument(
        "--prompt", "-p", dest="prompt_flag", metavar="TEXT", help="the prompt, as other tools take it"
    )
    parser.add_argument(
        "--prompt-token-ids",
        type=number_list,
        metavar="1,5,9",
        help=Rare("the prompt as token ids; no tokenizer is needed"),
    )
    parser.add_argument("--system", metavar="TEXT", help="a system text before the prompt")
    parser.add_argument(
        "--raw", action="store_true", help=Rare("give the prompt as it is, without the chat template")
    )
    parser.add_argument(
        "--prompts",
        action="append",
        type=Path,
        metavar="FILE",
        help=(
            "answer all of a file: jsonl in Spec-Bench form, or text with one prompt a line; may be repeated"
        ),
    )
    parser.add_argument(
        "--parallel",
        type=positive,
        default=1,
        metavar="N",
        help="with --prompts: N answers at a time (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer")
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="keep the answer in FILE as it comes, for --resume"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="go on with the answer of this journal; prints all of it"
    )
    resume.add_good_part(parser)
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="save a recording of the answer in FILE, for the page of flowspec serve",
    )
    add_model_arguments(parser)
    add_decoding_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(model=None)  # a journal names its own


def run(args: argparse.Namespace) -> int:
    if args.prompt_flag is not None:
        if args.prompt is not None:
            raise InputError(SEVERAL)
        args.prompt = args.prompt_flag
    with contextlib.ExitStack() as stack:
        journal = content = None
        resume.check_good_part(args)
        if args.resume is None:
            check_prompt(args)
            check_journal(args)
            check_record(args)
            sampling_params(args)
            check_length(args)
        else:
            resume.refuse_fixed(args)
            check_record(args)
            journal, content = Journal.open(args.resume, note, good_part=args.good_part)
            stack.enter_context(journal)
            if content.damage:
                note(f"({content.damage}; the answer goes on from before it)")
            resume.follow_setting(args, content.setting)
            if content.last is None:
                raise InputError(f"{args.resume} ends before its question; ask again")
            if content.last.is_finished:
                return show_finished(content.setting, content.last, is_json=args.json)
            if told := resume.place_told(args, content.setting):
                note(f"({told})")
        return _answer(args, stack, journal, content)


def _answer(
    args: argparse.Namespace,
    stack: contextlib.ExitStack,
    journal: Journal | None,
    content: JournalContent | None,
) -> int:
    """Asks what the flags or the journal say, and shows the answers."""
    prompts = [prompt for path in args.prompts or [] for prompt in read_prompts(path)]
    last = None if content is None else content.last

    def check(files: ModelFiles) -> None:
        if content is not None:
            resume.check_model(files, content.setting)

    notes = Notes(lambda text: note(f"({text})"))
    recovery_options = RecoveryOptions(
        on_note=notes,
        wait_s=timeouts.WAIT_FOR_DEVICES_S,
        arithmetic="" if content is None else content.setting.arithmetic,
    )
    needs_text = args.prompt_token_ids is None if last is None else bool(last.question.stops)
    llm = stack.enter_context(open_llm(args, recovery_options, check, needs_text=needs_text))
    session, tokenizer = llm.session, llm.tokenizer
    if last is not None:
        question = last.question
    else:
        ids = args.prompt_token_ids or ([] if prompts else encode_prompt(tokenizer, args, args.prompt))
        question = llm.question_of(ids, sampling_params(args))
    if prompts:
        return batch.run(
            llm,
            question,
            prompts,
            parallel=args.parallel,
            system=args.system,
            is_raw=args.raw,
            is_json=args.json,
        )
    if args.journal is not None:
        journal = stack.enter_context(Journal.start(args.journal, resume.setting_of(args, session), note))
        journal.ask(Entry(question=question))
    unrecorded: NotRecordedError | None = None
    try:
        with (
            record_answer(session, tokenizer, args.record, notes),
            contextlib.nullcontext(lambda text: None) if args.json else show_answer() as piece,
        ):
            answer, is_interrupted = ask(llm, question, session.head.new_request(), piece, keep=journal)
    except NotRecordedError as error:
        unrecorded = error  # the answer is there all the same
    if journal is not None and not is_interrupted:
        journal.end(answer.finish_reason, text_of(llm, answer))
    if args.json:
        print(json.dumps(record(llm, question, answer)))
    else:
        note(report(session, question, answer, is_verbose=args.verbose))
    if unrecorded is not None:
        note(f"(the answer is whole, but {unrecorded})")
    return INTERRUPTED if is_interrupted else int(unrecorded is not None)


def show_finished(setting: Setting, entry: Entry, *, is_json: bool) -> int:
    """Prints an answer that is whole in its journal, for which nothing need run."""
    if is_json:
        print(json.dumps(resume.finished_record(setting, entry)))
    else:
        with show_answer() as piece:
            numbers = "".join(f"{token} " for token in entry.question.answered)
            piece(numbers if entry.text is None else entry.text)
        note("(the answer was finished; this is what the journal holds)")
    return 0


def check_journal(args: argparse.Namespace) -> None:
    """Whether a new journal can be written where `--journal` says, before anything is started."""
    if args.journal is None:
        return
    if args.prompts:
        raise InputError("--journal holds one answer; with --prompts, which has many, leave it out")
    if args.journal.exists() or not os.access(args.journal.parent, os.W_OK):
        why = (
            "exists; --resume goes on with it"
            if args.journal.exists()
            else "is in no folder that can be written"
        )
        raise InputError(f"--journal: expected a new file, but {args.journal} {why}")


def check_record(args: argparse.Namespace) -> None:
    """Whether a recording can be written where `--record` says, before anything is started."""
    if args.record is not None:
        if args.prompts:
            raise InputError("--record saves one answer; with --prompts, which has many, leave it out")
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
    if args.parallel > batch.PARALLEL_MAX:
        raise InputError(f"--parallel: expected at most {batch.PARALLEL_MAX}, got {args.parallel}")
    if not given or args.prompt == "-":
        if sys.stdin.isatty():
            raise InputError('expected a prompt: flowspec generate "What is 17 + 25?"')
        args.prompt = sys.stdin.read().removeprefix("\ufeff")  # the mark that some editors begin a text with
    if args.prompt is not None:
        if not args.prompt.strip():
            raise InputError("expected a prompt, got an empty one")
        check_utf8(args.prompt)


def check_length(args: argparse.Namespace) -> None:
    """Refuses a prompt that has more tokens than the context before anything is started, as far as the
    model's files tell. Only one that is long enough for that is looked at: it takes the tokenizer."""
    ids = args.prompt_token_ids
    if ids is None and args.prompt is None:
        return
    chars = 0 if ids is not None else len(f"{args.system or ''}{args.prompt}".encode())
    if ids is None and args.context is None and chars < SURE_BYTES:
        return
    files = ModelFiles(args.model or BUNDLED)
    most = files.raw_config().get("max_position_embeddings")
    if type(most) is not int:
        return
    context = pick_context(args.context, most)
    if ids is None:
        if chars < context // 2:
            return
        ids = encode_prompt(Tokenizer(files), args, args.prompt)
    if len(ids) >= context:
        raise InputError(too_long(len(ids), context, most))


def encode_prompt(tokenizer: Tokenizer | None, args: argparse.Namespace, prompt: str) -> list[int]:
    assert tokenizer is not None
    return tokenizer.encode_dialogue(
        [{"role": "user", "content": prompt}], system=args.system, is_raw=args.raw
    )


def report(session: Session, question: Question, answer: Answer, *, is_verbose: bool) -> str:
    """The lines under an answer: speed, seed, which process ran what, and with --verbose the statistics."""
    lines = [f"{figures(answer, session)}, {session.decoding.method}, drafter {session.drafter}"]
    if is_verbose:
        lines.append(f"  arithmetic {answer.arithmetic}")
    if question.sampling.temperature > 0:
        lines[0] += f", seed {question.sampling.seed}"
    for stage in session.stages_report():
        first, end = stage["layers"]
        lines.append(
            f"  {stage['name']}: layers {first} to {end - 1}, {mib(stage['weight_bytes'])} of "
            f"weights{from_head(stage)}, pid {stage['pid']} at {stage['address']}"
        )
    lines += [f"  {line}" for line in drafter_lines(session)]
    if session.chosen is not None:
        told, runs = explain_forecast(session, answer), session.head.plan.stages
        lines += [f"  {line}" for line in session.chosen.lines(runs, None if told is None else told.text)]
    return "\n".join([*lines, *(statistics.lines(answer.statistics, session.drafters) if is_verbose else ())])
