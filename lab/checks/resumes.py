"""The head is killed in the middle of an answer, and another one goes on: `python -m lab.checks.resumes`.

`flowspec generate --journal` is ended by `kill -9` at a random moment of its journal; `flowspec generate
--resume` finishes the answer, on another number of stages and by another method. Every answer is compared
with step-by-step decoding. Precisions, methods, stages and temperatures take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowspec.bench.console import progress
from flowspec.bench.records import WRONG
from flowspec.core.methods import METHODS
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.precision import OF_ANY_MODEL
from flowspec.errors import FlowSpecError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer, recommended
from lab.checks.rigs import QUESTIONS, agreement
from lab.command import Parser, chosen, run_command

STAGES = (1, 2, 3)
TEMPERATURES = (0.0, 1.0)
FLOWSPEC = (sys.executable, "-m", "flowspec.cli.main")
UNTIL_S = 180.0
"""Within which an answer must have begun."""


def written(journal: Path) -> int:
    """Lines of tokens in a journal; 0 where it is not there yet."""
    try:
        return journal.read_bytes().count(b'{"tokens"')
    except FileNotFoundError:
        return 0


def killed(command: Sequence[str], journal: Path, lines: int) -> bool:
    """Runs a command until its journal has so many lines of tokens, then kills it (-9). False where it ended
    before.

    Raises:
        FlowSpecError: it failed, or the answer does not come.
    """
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, text=True)
        try:
            until_s = time.monotonic() + UNTIL_S
            while written(journal) < lines and process.poll() is None:
                if time.monotonic() > until_s:
                    raise FlowSpecError(f"no {lines} lines of an answer within {UNTIL_S:.0f} s: {command}")
                time.sleep(0.002)
            if process.poll():
                said.seek(0)
                raise FlowSpecError(f"{' '.join(command)} failed: {said.read().strip()}")
        finally:
            process.kill()
            status = process.wait()
    return status == -signal.SIGKILL


def command(args: argparse.Namespace) -> int:
    files = ModelFiles(BUNDLED)
    rng = random.Random(args.seed)
    tokenizer = Tokenizer(files)
    stop_ids = recommended(files, files.config()).stop_ids
    verdicts: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    resumed = finished = 0
    with (
        tempfile.TemporaryDirectory(prefix="flowspec-") as folder,
        progress("starting", len(args.dtypes) * args.answers) as step,
    ):
        for dtype in args.dtypes:
            plain = StepByStep.load(files, dtype)
            turns = itertools.cycle(itertools.product(TEMPERATURES, METHODS))
            for number, (temperature, method) in enumerate(itertools.islice(turns, args.answers)):
                text = rng.choice(QUESTIONS)
                journal = Path(folder) / f"{dtype}-{number}"
                before, after = rng.sample(STAGES, 2)
                asked = ["--temperature", f"{temperature:g}", "--seed", str(number), "--dtype", dtype]
                asked += ["--max-new-tokens", str(args.tokens), "--journal", str(journal), text]
                begin = [*FLOWSPEC, "generate", "--local", str(before), "--method", method, *asked]
                was_killed = killed(begin, journal, rng.randrange(1, args.tokens // 4))
                if not was_killed:
                    finished += 1
                there = written(journal)
                other = rng.choice(list(METHODS))
                go_on = [*FLOWSPEC, "generate", "--local", str(after), "--method", other]
                done = subprocess.run(
                    [*go_on, "--json", "--resume", str(journal)], capture_output=True, text=True, check=False
                )
                if done.returncode:
                    raise FlowSpecError(f"--resume failed: {done.stderr.strip()}")
                answer = json.loads(done.stdout)
                resumed += bool(was_killed and there)
                prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))
                sampling = Sampling(temperature=temperature, seed=number)
                expected = plain.generate(prompt, sampling, args.tokens, stop_ids)
                kept = tuple(token for token in expected if token not in stop_ids)
                verdict = agreement(kept, answer["token_ids"], frozenset())
                verdicts[verdict] += 1
                if verdict == WRONG:
                    wrong.append({"command": begin, "resumed": [after, other], "lines": there})
                with contextlib.suppress(FileNotFoundError):
                    journal.unlink()
                step(
                    f"{dtype}: {method} on {before}, killed after {there} lines, "
                    f"{other} on {after}: {verdict}"
                )
    found = {"answers": dict(verdicts), "resumed": resumed, "finished_before": finished, "wrong": wrong}
    if args.json:
        print(json.dumps(found))
    else:
        print(f"answers: {dict(verdicts)}; {resumed} gone on with, {finished} had ended before the kill")
        for each in wrong:
            print(f"wrong: {each}")
    return 1 if wrong or not resumed else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.checks.resumes", __doc__)
    parser.whole("--answers", 28, "of each precision")
    parser.add_argument(
        "--dtypes",
        type=chosen(OF_ANY_MODEL),
        default=OF_ANY_MODEL,
        metavar="NAME[,NAME...]",
        help="default: all",
    )
    parser.whole("--tokens", 64, "longest answer")
    parser.add_argument("--seed", type=int, default=0, help="of questions and moments (default: %(default)s)")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
