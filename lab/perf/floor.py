"""Whether `continuous` is slower than plain decoding anywhere, where drafter and stages share two cores:
`python -m lab.perf.floor`, by default with prompts of the domains that the bundled drafter guesses worst.

Two sessions stand beside each other, each with two local daemons of its own; while one answers the other is
idle. In each round every prompt is asked of both, and who is first changes from round to round. The session
that was opened first is slower by some 6% on a machine of two threads, whichever it is: so in half of the
rounds it is one, and in the others the other. A rate counts the tokens after the first one, and a ratio is of
two rates side by side. The interval of the median is by
bootstrap: prompts are drawn, then each one's rounds, since the rounds of one prompt are alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowspec import LLM
from flowspec.bench.cases import Prompt, read_prompts
from flowspec.bench.console import progress, show
from flowspec.errors import InputError, UnexpectedError
from flowspec.model.files import BUNDLED
from lab.command import Parser, run_command

PROMPTS = Path(__file__).parent / "floor.jsonl"
METHODS = OURS, PLAIN = "continuous", "ar"
DRAWS = 2_000
"""Of the bootstrap."""
COLUMNS = ("domain", "prompts", "continuous / ar", "95% from", "to", "worst prompt", "continuous", "ar")

Rates = list[tuple[float, float]]
"""Tokens per second of `continuous` and of `ar`, a pair for each round."""


def median_ratio(pairs: Rates) -> float:
    return statistics.median(ours / plain for ours, plain in pairs)


def interval(prompts: Sequence[Rates], seed: int = 0) -> tuple[float, float]:
    """Between which the median ratio over all prompts and rounds lies in 95 of 100 draws."""
    drawn = random.Random(seed)
    medians = []
    for _ in range(DRAWS):
        some = drawn.choices(prompts, k=len(prompts))
        medians.append(median_ratio([pair for each in some for pair in drawn.choices(each, k=len(each))]))
    medians.sort()
    return medians[round(0.025 * (DRAWS - 1))], medians[round(0.975 * (DRAWS - 1))]


def table(found: Mapping[Prompt, Rates]) -> list[list[object]]:
    """A row for each domain, and one for all."""
    rows: list[list[object]] = []
    for domain in [*dict.fromkeys(prompt.domain for prompt in found), "all"]:
        some = [pairs for prompt, pairs in found.items() if domain in (prompt.domain, "all")]
        every = [pair for pairs in some for pair in pairs]
        speeds = [statistics.median(side) for side in zip(*every, strict=True)]
        rows.append(
            [domain, len(some), median_ratio(every), *interval(some), min(map(median_ratio, some)), *speeds]
        )
    return rows


def measure(args: argparse.Namespace) -> dict[Prompt, Rates]:
    prompts = read_prompts(args.prompts)
    found: dict[Prompt, Rates] = {prompt: [] for prompt in prompts}
    with progress("answers", args.rounds * len(prompts)) as step:
        for opened, rounds in ((METHODS, args.rounds // 2), (METHODS[::-1], args.rounds - args.rounds // 2)):
            with contextlib.ExitStack() as stack:
                sessions = {
                    method: stack.enter_context(
                        LLM(
                            args.model,
                            local=2,
                            dtype=args.dtype,
                            method=method,
                            drafter="none" if method == PLAIN else args.drafter or (),
                        )
                    )
                    for method in opened
                }
                for llm in sessions.values():
                    llm.generate(prompts[0].turns[0], temperature=0, max_new_tokens=args.tokens)
                for number in range(rounds):
                    for prompt in prompts:
                        first = METHODS if number % 2 else METHODS[::-1]
                        found[prompt].append(pair(sessions, first, prompt, args.tokens))
                        step(f"{prompt.domain} {prompt.prompt_id}")
    return found


def pair(
    sessions: Mapping[str, LLM], order: Sequence[str], prompt: Prompt, tokens: int
) -> tuple[float, float]:
    answers = {
        method: sessions[method].generate(prompt.turns[0], temperature=0, max_new_tokens=tokens)
        for method in order
    }
    ours, plain = (answers[method] for method in METHODS)
    name = f"{prompt.domain} {prompt.prompt_id}"
    if ours.token_ids != plain.token_ids:
        raise UnexpectedError(f"{name}: expected {OURS} to give the tokens of {PLAIN}")
    if plain.new_tokens < 2:
        raise InputError(f"prompt {name} has too short an answer to time")
    return ours.timing.tokens_per_s, plain.timing.tokens_per_s


def command(args: argparse.Namespace) -> int:
    found = measure(args)
    rows = table(found)
    if args.json:
        told = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        pairs = [{"domain": each.domain, "id": each.prompt_id, "rates": found[each]} for each in found]
        print(json.dumps({"domains": told, "prompts": pairs}))
    else:
        show("Two processes, tokens per second after the first token", COLUMNS, rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.perf.floor", __doc__)
    parser.add_argument("--model", default=BUNDLED, metavar="PATH-OR-HUB-ID")
    parser.add_argument("--drafter", metavar="PATH-OR-HUB-ID", help="(default: as chat chooses)")
    parser.add_argument("--dtype", metavar="NAME", help="precision (default: as chat chooses)")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE")
    parser.whole("--tokens", 96, "of an answer, at most")
    parser.whole("--rounds", 20)
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
