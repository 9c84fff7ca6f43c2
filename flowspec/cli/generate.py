"""Give one answer to one prompt, then stop.

The answer goes to standard output, what else there is to say to standard error. `--json` prints one object instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from flowspec.cli.options import (
    Choice,
    add_model_arguments,
    add_sampling_arguments,
    cluster_options,
    loading_bar,
    note,
    number_list,
    pick_limits,
    pick_sampling,
)
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.text import StopStrings, TextStream, Tokenizer, recommended
from flowspec.runtime.session import Session, Timing, open_session, timed


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
    loaded: list[Tokenizer] = []

    def load_tokenizer(files: ModelFiles) -> None:
        if args.prompt_token_ids is None or files.find("tokenizer.json") is not None:
            loaded.append(Tokenizer(files))

    with loading_bar(quiet=args.json) as progress, open_session(cluster_options(args, args.local), progress, load_tokenizer) as session:
        tokenizer = loaded[0] if loaded else None
        advice = recommended(session.files, session.config)
        choice = pick_sampling(args, advice)
        limits = pick_limits(args, advice, tokenizer.eos_id if tokenizer else None)
        prompt = list(args.prompt_token_ids) if args.prompt_token_ids is not None else encode_prompt(tokenizer, args)
        stream = None if tokenizer is None else TextStream(tokenizer, args.stop)
        rule = StopStrings(TextStream(tokenizer, args.stop)) if tokenizer is not None and args.stop else None
        timing = Timing()
        answer = session.submit(prompt, choice.sampling, limits, request=session.head.new_request(), stop_rule=rule)
        interrupted = False
        progress("", 1.0)
        try:
            for tokens in timed(answer, timing):
                _show(stream, tokens, quiet=args.json)
        except KeyboardInterrupt:
            interrupted = True
            session.head.cancel(answer)
            for tokens in timed(answer, timing):
                _show(stream, tokens, quiet=args.json)
        rest = stream.finish() if stream is not None else ""
        assert answer.end is not None
        if args.json:
            text = stream.text if stream is not None else None
            print(json.dumps(report(session, choice, prompt, timing, answer.end.reason, text, args.method)))
        else:
            print(rest, flush=True)
            note(figures(session, timing, choice))
    return 130 if interrupted else 0


def encode_prompt(tokenizer: Tokenizer | None, args: argparse.Namespace) -> list[int]:
    assert tokenizer is not None
    if args.raw or not tokenizer.has_chat_template:
        if args.system:
            raise InputError("--system needs a chat template, which this model lacks or --raw switched off")
        return tokenizer.encode(args.prompt)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    return tokenizer.encode_chat([*messages, {"role": "user", "content": args.prompt}])


def _show(stream: TextStream | None, tokens: tuple[int, ...], *, quiet: bool) -> None:
    text = stream.push(tokens) if stream is not None else " ".join(map(str, tokens)) + " "
    if not quiet:
        print(text, end="", flush=True)


def report(
    session: Session, choice: Choice, prompt: list[int], timing: Timing, reason: str, text: str | None, method: str
) -> dict[str, Any]:
    """What `--json` prints."""
    sampling = choice.sampling
    return {
        "token_ids": timing.new_tokens,
        "text": text,
        "finish_reason": reason,
        "prompt_tokens": len(prompt),
        "new_tokens": len(timing.new_tokens),
        "time_to_first_token_s": round(timing.first_s, 6),
        "decode_s": round(timing.decode_s, 6),
        "tokens_per_s": round(timing.tokens_per_s, 3),
        "method": method,
        "world": "cluster",
        "model": session.head.plan.model,
        "dtype": session.head.plan.dtype,
        "context": session.head.plan.context,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stages": session.stages_report(),
    }


def figures(session: Session, timing: Timing, choice: Choice) -> str:
    """The lines under an answer: speed, seed, and which process ran what."""
    lines = [f"{len(timing.new_tokens)} tokens, {timing.tokens_per_s:.1f} tokens/s, first after {timing.first_s:.2f} s"]
    if choice.sampling.temperature > 0:
        lines[0] += f", seed {choice.sampling.seed}"
    for stage in session.stages_report():
        first, end = stage["layers"]
        lines.append(f"  {stage['name']}: layers {first} to {end - 1}, process {stage['pid']} at {stage['address']}")
    return "\n".join(lines)
