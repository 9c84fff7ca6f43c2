"""The same prompts asked on two machines in each precision, and the token ids compared.

  python -m lab.arm64.tokens ask FILE [--dtype D] [--limit N] [--new-tokens N] [--local N | --cluster FILE]
  python -m lab.arm64.tokens compare OURS THEIRS

`ask` writes what `flowspec generate` answers. `compare` says for each answer whether theirs is ours, else
where they part and by what margin: how many logits lie between both tokens there, as plain transformers in
float32 computes them. Machines whose kernels have other bits need not agree. But each is faithful only where
its logits are within the limit of `flowspec verify`, so two of them can part where the margin is twice that
at most; beyond it theirs is wrong. Exit status 1 where one is, or where a precision did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowspec.bench.cases import read_prompts
from flowspec.bench.records import EXACT, WRONG
from flowspec.bench.verify import STOPPED, parting
from flowspec.errors import InputError
from flowspec.model.engines import run_trial
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer, recommended

if TYPE_CHECKING:
    from flowspec.model.reference import Reference

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
FIRST = "What is 17 + 25?"
PARTS = "parts"
"""Another answer than ours, where faithful machines may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one machine answered, and why not, by precision.

    An answer is its token ids, with `STOPPED` last where a stop token ended it. `kernels`: the one that was
    found right, and what is wrong with better ones. `seconds` is for all answers.
    """

    new_tokens_max: int
    prompts: list[str]
    answers: dict[str, list[list[int]]]
    kernels: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def prompts(limit: int) -> list[str]:
    """The README's question, then the first shipped prompt of each domain."""
    shipped = read_prompts(bundled_folder("prompts.jsonl"))
    by_domain = {prompt.domain: prompt.turns[0] for prompt in reversed(shipped)}
    return [FIRST, *reversed(by_domain.values())][:limit]


def ask(texts: Sequence[str], precisions: Sequence[str], new_tokens_max: int, where: Sequence[str]) -> Asked:
    """Tries the kernels of each precision anew, and asks the bundled model at temperature 0. `where`: flags
    that say on what devices."""
    found = Asked(new_tokens_max=new_tokens_max, prompts=list(texts), answers={})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        given = [{"question_id": text, "category": "any", "turns": [text]} for text in texts]
        file.write_text("\n".join(map(json.dumps, given)))
        flags = [*f"--json --temperature 0 --max-new-tokens {new_tokens_max}".split(), *where]
        os.environ["XDG_CACHE_HOME"] = folder  # where daemons find what trials found
        for precision in precisions:
            try:
                trial = run_trial(precision, "cpu")
            except InputError as error:
                found.failures[precision] = str(error)
                continue
            found.kernels[precision] = trial.kernel + (f" ({trial.slowed_by})" if trial.slowed_by else "")
            words = ["generate", *flags, "--dtype", precision, "--prompts", str(file)]
            command = [sys.executable, "-m", "flowspec.cli.main", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stderr.strip() or "not a word").splitlines()[-1]
                found.failures[precision] = f"status {done.returncode}, {reason}"
                continue
            records = [json.loads(line) for line in done.stdout.splitlines()]
            found.answers[precision] = [_answer(record) for record in records]
            times = (record["time_to_first_token_s"] + record["decode_s"] for record in records)
            found.seconds[precision] = round(sum(times), 2)
    return found


def _answer(record: dict[str, Any]) -> list[int]:
    return [*record["token_ids"], *([STOPPED] if record["finish_reason"] == "stop" else [])]


def read(path: Path) -> Asked:
    return Asked(**json.loads(path.read_text()))


def lines(ours: Asked, theirs: Asked) -> Iterator[tuple[bool, str]]:
    """For each precision and prompt: whether it is well, and what to say.

    Raises `InputError` for answers to other questions.
    """
    if (ours.prompts, ours.new_tokens_max) != (theirs.prompts, theirs.new_tokens_max):
        raise InputError("expected answers of the same length to the same prompts; ask both again")
    for precision in dict.fromkeys([*ours.answers, *ours.failures]):
        failures = [each.failures[precision] for each in (ours, theirs) if precision in each.failures]
        if failures:
            yield False, f"{precision}: did not run: {'; '.join(failures)}"
            continue
        yield True, f"{precision}: kernel here {ours.kernels[precision]}, there {theirs.kernels[precision]}"
        model = Model(ours, precision)
        answers = zip(ours.prompts, ours.answers[precision], theirs.answers[precision], strict=True)
        for text, expected, found in answers:
            kind, why = (EXACT, "") if expected == found else model.judge(text, expected, found)
            seen = _shown(found) if kind == EXACT else f"here {_shown(expected)}, there {_shown(found)}"
            yield kind != WRONG, f"{precision}, {text!r}: {kind}{why}: {seen}"


class Model:
    """What plain transformers says of a difference, on this machine. Loads the model when there is one."""

    def __init__(self, asked: Asked, precision: str) -> None:
        from flowspec.bench import faithfulness  # which imports torch, before transformers does without it

        self._asked = asked
        self._precision = precision
        self._check = faithfulness.check

    def judge(self, text: str, expected: Sequence[int], found: Sequence[int]) -> tuple[str, str]:
        """The kind of the difference, and where and by what margin the answers part."""
        prompt = self._encode(text)
        first = parting(expected, found, frozenset())
        assert first is not None, "they are not equal"
        allowed = 2 * self._limit
        if first >= min(len(expected), len(found)):
            return WRONG, f" from token {first} on, where one of them ends without a stop token"
        (logits,) = self._reference.forced_logits((*prompt, *expected[:first]), [])
        here, there = (float(logits[self._ids(token)].max()) for token in (expected[first], found[first]))
        margin = abs(here - there)
        kind = PARTS if margin <= allowed else WRONG
        return kind, f" from token {first} on, margin {margin:.2g}, {allowed:.2g} allowed"

    def _ids(self, token: int) -> list[int]:
        """A token, or all that stop."""
        return sorted(self._stop_ids) if token == STOPPED else [token]

    @cached_property
    def _files(self) -> ModelFiles:
        return ModelFiles(BUNDLED)

    @cached_property
    def _stop_ids(self) -> frozenset[int]:
        return recommended(self._files, self._files.config()).stop_ids

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._files)

    @cached_property
    def _reference(self) -> Reference:
        from flowspec.model.reference import Reference

        return Reference(self._files, self._precision)

    @cached_property
    def _limit(self) -> float:
        """Of a logit's difference between this machine and the plain model, in this precision."""
        whole = StepByStep.load(self._files, self._precision)
        return float(self._check(self._files, self._precision, whole)["limit"])

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode_chat([{"role": "user", "content": text}]))


def _shown(answer: Sequence[int]) -> str:
    return " ".join("end" if token == STOPPED else str(token) for token in answer)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.arm64.tokens")
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("ask")
    asking.add_argument("file", type=Path)
    asking.add_argument("--limit", type=int, default=1)
    asking.add_argument("--new-tokens", type=int, default=16)
    asking.add_argument("--dtype", action="append", choices=PRECISIONS, help="may be repeated (default: all)")
    asking.add_argument("--local", default="1")
    asking.add_argument("--cluster", metavar="FILE")
    comparing = commands.add_parser("compare")
    comparing.add_argument("ours", type=Path)
    comparing.add_argument("theirs", type=Path)
    args = parser.parse_args(words)
    if args.command == "ask":
        where = ("--cluster", args.cluster) if args.cluster else ("--local", args.local)
        found = ask(prompts(args.limit), args.dtype or PRECISIONS, args.new_tokens, where)
        args.file.write_text(json.dumps(asdict(found)))
        return 0
    is_well = True
    for is_right, line in lines(read(args.ours), read(args.theirs)):
        print(line, flush=True)
        is_well = is_well and is_right
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
