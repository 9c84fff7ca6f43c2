"""Give one answer to one prompt, then stop.

The answer goes to standard output, what else there is to say to standard error. `--json` prints one object instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from flowspec.cli.answer import Outcome, Question, ask, record
from flowspec.cli.options import (
    INTERRUPTED,
    add_model_arguments,
    add_sampling_arguments,
    check_flags,
    cluster_options,
    loading_bar,
    note,
    number_list,
    pick_limits,
    pick_sampling,
)
from flowspec.errors import ClusterError, InputError
from flowspec.model.files import ModelFiles
from flowspec.model.text import Tokenizer, check_utf8, recommended
from flowspec.runtime.session import Session, open_session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt (default: read from standard input)")
    parser.add_argument("--prompt-token-ids", type=number_list, metavar="1,5,9", help="the prompt as token ids; no tokenizer is needed")
    parser.add_argument("--system", metavar="TEXT", help="a system text before the prompt")
    parser.add_argument("--raw", action="store_true", help="give the prompt as it is, without the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.prompt is not None and args.prompt_token_ids is not None:
        raise InputError("expected a PROMPT or --prompt-token-ids, got both")
    if args.prompt_token_ids is not None and (args.stop or args.system):
        raise InputError("--stop and --system need text; with --prompt-token-ids use --stop-token-ids")
    if args.prompt_token_ids is None:
        if args.prompt is None:
            if sys.stdin.isatty():
                raise InputError('expected a prompt: flowspec generate "What is 17 + 25?"')
            args.prompt = sys.stdin.read()
        if not args.prompt.strip():
            raise InputError("expected a prompt, got an empty one")
        check_utf8(args.prompt)
    check_flags(args)
    loaded: list[Tokenizer] = []

    def load_tokenizer(files: ModelFiles) -> None:
        if args.prompt_token_ids is None or files.find("tokenizer.json") is not None:
            loaded.append(Tokenizer(files))

    with contextlib.ExitStack() as stack:
        with loading_bar(quiet=args.json) as progress:
            session = stack.enter_context(open_session(cluster_options(args, args.local), progress, load_tokenizer))
        tokenizer = loaded[0] if loaded else None
        advice = recommended(session.files, session.config)
        question = Question(
            prompt=args.prompt_token_ids or encode_prompt(tokenizer, args),
            request=session.head.new_request(),
            sampling=pick_sampling(args, advice),
            limits=pick_limits(args, advice, tokenizer.eos_id if tokenizer else None),
            tokenizer=tokenizer,
            stops=args.stop,
            method=args.method,
        )
        try:
            outcome = ask(session, question, (lambda text: None) if args.json else _show)
        except ClusterError:
            _show("" if args.json else "\n")  # the error gets a line of its own
            raise
        if args.json:
            print(json.dumps(record(session, question, outcome)))
        else:
            print(flush=True)
            note(figures(session, question, outcome))
    return INTERRUPTED if outcome.is_interrupted else 0


def _show(text: str) -> None:
    print(text, end="", flush=True)


def encode_prompt(tokenizer: Tokenizer | None, args: argparse.Namespace) -> list[int]:
    assert tokenizer is not None
    if args.raw or not tokenizer.has_chat_template:
        if args.system:
            raise InputError("--system needs a chat template, which this model lacks or --raw switched off")
        return tokenizer.encode(args.prompt)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    return tokenizer.encode_chat([*messages, {"role": "user", "content": args.prompt}])


def figures(session: Session, question: Question, outcome: Outcome) -> str:
    """The lines under an answer: speed, seed, and which process ran what."""
    lines = [outcome.figures]
    if question.sampling.temperature > 0:
        lines[0] += f", seed {question.sampling.seed}"
    for stage in session.stages_report():
        first, end = stage["layers"]
        lines.append(f"  {stage['name']}: layers {first} to {end - 1}, process {stage['pid']} at {stage['address']}")
    return "\n".join(lines)
