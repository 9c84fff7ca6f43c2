"""Prompts of further domains, which the specialists learnt and the general drafter never saw: functions in
JavaScript, novels, and sums in words. The target answers them (own.py) as well as it can.

    python -m lab.recipe.asked javascript FOLDER > javascript.jsonl
    python -m lab.recipe.asked novels FILE ... > novels.jsonl
    python -m lab.recipe.asked words > words.jsonl

FOLDER has packages of JavaScript, a FILE is the text of a novel; nothing of them is part of the project. In
an order that is drawn once, the first prompts of each domain are held out: `--held-out` writes these instead.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.recipe.flags import RecipeParser

HELD_OUT = 40
FUNCTION = re.compile(
    r"^(?:export (?:default )?)?((?:async )?function\s*\*?\s*\w+\([^)]*\) \{)\n((?:.*\n)*?^\})"
    r"|^((?:var|const|let) \w+ = (?:_curry\w+\()?function \w*\([^)]*\) \{)\n((?:.*\n)*?^\}\)?;)",
    re.MULTILINE,
)
"""A function at the top of a module: its first line, and the rest."""
BODY_CHARS_MIN, BODY_CHARS_MAX = 31, 1_500
COPIES = re.compile(
    r"\.min\.|/dist/|/umd|/cjs/|/amd/|/lodash\.js|/core\.js|underscore(-|\.|[a-z])*\.js$|/fp/"
)
"""Files that only hold what others hold."""
PARAGRAPH_CHARS = range(61, 700)
PARAGRAPHS_APART = 3
SUMS = 4_000
SUM_FORMS = (
    "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} and {b} together?",
    "Take {b} away from {a}.", "What is {a} less {b}?", "What is {a} times {b}?",
    "Work out {a} multiplied by {b}.", "{a} plus {b} is", "Share {a} equally among {b}.",
    "What do {a} and {b} make?",
)  # fmt: skip
THEN = (", and then add ", ", and after that take away ")
ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    """A number below a thousand, as it is said."""
    if number < len(ONES):
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f"-{ONES[number % 10]}" if number % 10 else "")
    return f"{ONES[number // 100]} hundred" + (f" and {in_words(number % 100)}" if number % 100 else "")


def sums_in_words(count: int = SUMS) -> list[str]:
    rng = random.Random(5)
    found: set[str] = set()
    while len(found) < count:
        a, b = rng.randint(2, 999 if rng.random() < 0.5 else 99), rng.randint(2, 99)
        text = rng.choice(SUM_FORMS).format(a=in_words(max(a, b)), b=in_words(min(a, b)))
        text = text[0].upper() + text[1:]
        if rng.random() < 0.3:
            text = (
                text.rstrip(".?") + rng.choice(THEN) + in_words(rng.randint(2, 60)) + rng.choice((".", "?"))
            )
        found.add(text)
    return sorted(found)


def functions(folder: Path) -> list[str]:
    """First lines of the functions in a folder's modules; a line with several bodies comes several times."""
    found = set()
    for path in sorted(folder.rglob("*.js")):
        if COPIES.search(str(path)):
            continue
        for match in FUNCTION.finditer(path.read_text("utf-8", errors="replace")):
            first, body = match[1] or match[3], match[2] or match[4]
            if len(body) >= BODY_CHARS_MIN:
                found.add((first, body[:BODY_CHARS_MAX]))
    return [f"Complete this JavaScript code:\n{first}" for first, _ in sorted(found)]


def passages(novels: Sequence[Path]) -> list[str]:
    """Paragraphs of novels, some apart from each other."""
    paragraphs = [
        paragraph
        for novel in novels
        for part in re.split(r"\n\s*\n", novel.read_text("utf-8"))
        for paragraph in [" ".join(part.split())]
        if len(paragraph) in PARAGRAPH_CHARS and not paragraph.isupper()
    ]
    return [
        f"Continue the novel:\n{paragraph}" for paragraph in paragraphs[:-PARAGRAPHS_APART:PARAGRAPHS_APART]
    ]


def split(prompts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those held out and those to train on; none is in both."""
    shuffled = list(prompts)
    random.Random(0).shuffle(shuffled)
    held_out = shuffled[:HELD_OUT]
    return held_out, [prompt for prompt in shuffled[HELD_OUT:] if prompt not in held_out]


def rows(domain: str, prompts: Sequence[str]) -> Iterator[str]:
    for prompt in prompts:
        yield json.dumps({"category": domain, "turns": [prompt]})


def main() -> None:
    parser = RecipeParser("asked", __doc__)
    parser.add_argument("--held-out", action="store_true", help="those that are not for training")
    domains = parser.add_subparsers(dest="domain", required=True, parser_class=argparse.ArgumentParser)
    domains.add_parser("javascript").add_argument("folder", type=Path, help="with packages of JavaScript")
    domains.add_parser("novels").add_argument("files", type=Path, nargs="+", help="texts of novels")
    domains.add_parser("words")
    args = parser.parse_args()
    if args.domain == "javascript":
        prompts = functions(args.folder)
    elif args.domain == "novels":
        prompts = passages(args.files)
    else:
        prompts = sums_in_words()
    held_out, trained = split(prompts)
    for row in rows(args.domain, held_out if args.held_out else trained):
        print(row)


if __name__ == "__main__":
    main()
