"""What prompts that begin alike cost, with prefix caching and without: tokens that were prefilled, and the
time to the first token, by turn.

`agents`: two agents with the same system prompt hold dialogues of ten turns, in turns; each turn repeats all
before it and adds what a tool returned. Then the first one's sixth turn is asked otherwise.
`fleet`: clients with that system prompt and questions of their own ask at once, 8 answers at a time, as
`flowspec serve` has it. Real processes and sockets, the bundled model, whose context is 1,024 tokens as it
comes: here its config says more, for it is what things cost that matters. Answers with and without caching
must be the same.

`world`: the same in virtual time, on boards that take as long as declared.

    python -m tests.perf.shared_prefixes [--part agents|fleet|world] [--system 4096] [--clients 32] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flowspec.bench.console import show
from flowspec.core.head.sharing import BLOCK
from flowspec.llm import LLM, PARALLEL_DEFAULT
from flowspec.model.files import bundled_folder
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.device import DeviceSpec
from flowspec.sim.experiment import Experiment
from flowspec.sim.language import HashLanguage
from tests.command import Parser, run_command
from tests.pipeline import ask

TURNS = 10
NEW_TOKENS = 24
TOOL_TOKENS = 96
"""That a tool returns each turn."""
QUESTION_TOKENS = 40
BRANCH = 5
"""The turn that is asked otherwise in the end, from 0."""
CONTEXT = 8192
FIRST_TOKEN, TOKENS = 300, 2000
"""Ordinary tokens of the bundled model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer: tokens of its prompt, how many of these were computed, and when its first token came."""

    who: str
    prompt: int
    prefilled: int
    first_s: float
    answer: tuple[int, ...]


def system_prompt(count: int, seed: int = 0) -> list[int]:
    return tokens(random.Random(f"system {seed}"), count)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, TOKENS) for _ in range(count)]


@contextmanager
def long_model() -> Iterator[Path]:
    """The bundled model with a config that says that its context is longer."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "model"
        shutil.copytree(bundled_folder("target"), copy)
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
        yield copy


def asked(llm: LLM, who: str, prompt: Sequence[int], new_tokens: int = NEW_TOKENS) -> Turn:
    answer = llm.generate(list(prompt), max_new_tokens=new_tokens, temperature=0)
    return Turn(
        who=who,
        prompt=len(prompt),
        prefilled=answer.prompt_tokens - answer.reused_tokens,
        first_s=round(answer.timing.first_s, 4),
        answer=answer.token_ids,
    )


def agents(llm: LLM, system: Sequence[int]) -> list[Turn]:
    found: list[Turn] = []
    names = ("first", "second")
    rngs = {name: random.Random(name) for name in names}
    texts = {name: list(system) for name in names}
    branch: list[int] = []
    for number, name in itertools.product(range(TURNS), names):
        if (number, name) == (BRANCH, names[0]):
            branch = list(texts[name])
        texts[name] += tokens(rngs[name], TOOL_TOKENS)
        found.append(asked(llm, f"{name} agent, turn {number + 1}", texts[name]))
        texts[name] += found[-1].answer
    branch += tokens(random.Random("branch"), TOOL_TOKENS)
    return [*found, asked(llm, f"first agent, turn {BRANCH + 1} otherwise", branch)]


def fleet(llm: LLM, system: Sequence[int], clients: int) -> tuple[list[Turn], float]:
    """The answers, and how long all took."""
    prompts = [[*system, *tokens(random.Random(client), QUESTION_TOKENS)] for client in range(clients)]
    started_s = time.monotonic()
    with ThreadPoolExecutor(PARALLEL_DEFAULT) as pool:
        found = list(pool.map(lambda each: asked(llm, f"client {each[0] + 1}", each[1]), enumerate(prompts)))
    return found, time.monotonic() - started_s


def measured(part: str, options: argparse.Namespace, *, caches: bool) -> dict[str, Any]:
    with (
        long_model() as model,
        LLM(
            model,
            local=options.stages,
            context=CONTEXT,
            dtype="float32",
            drafter="ngram",
            enable_prefix_caching=caches,
        ) as llm,
    ):
        asked(llm, "warm", system_prompt(200, seed=1))
        system = system_prompt(options.system)
        if part == "agents":
            return {"turns": agents(llm, system)}
        turns, took_s = fleet(llm, system, options.clients)
        return _of_fleet(turns, took_s)


def _of_fleet(turns: list[Turn], took_s: float) -> dict[str, Any]:
    firsts = sorted(turn.first_s for turn in turns)
    return {
        "answers": sum(bool(turn.answer) for turn in turns),
        "prefilled": sum(turn.prefilled for turn in turns),
        "first_median_s": round(median(firsts), 3),
        "first_max_s": round(firsts[-1], 3),
        "took_s": round(took_s, 3),
        "tokens_per_s": round(sum(len(turn.answer) for turn in turns) / took_s, 1),
        "turns": turns,
    }


def in_virtual_time(options: argparse.Namespace, *, caches: bool) -> dict[str, Any]:
    """Four boards whose pass takes 50 ms and 4 ms for each row, over 1 Gbit/s: about a model of 8 billion
    parameters in four bits on Raspberry Pis. All clients are there at once."""
    language = HashLanguage(TOKENS, seed=1)
    link = LinkSpec(delay_s=0.0002, bandwidth_mbps=1000)
    world = Experiment(
        devices=(DeviceSpec(curve=Curve(base_s=0.05, row_s=0.004), layers=8),) * 4,
        control=link,
        data=link,
        method="ar",
        context=CONTEXT,
        row_bytes=8192,
        prefix_block=BLOCK if caches else 0,
    ).build(language, checks=False)
    system = system_prompt(options.system)
    for client in range(options.clients):
        prompt = (*system, *tokens(random.Random(client), QUESTION_TOKENS))
        world.at(0.0, ask(client, prompt, NEW_TOKENS))
    world.run()
    turns = []
    for client, (answer,) in sorted(world.answers.items()):
        assert answer.end is not None
        length = len(answer.submit.prompt)
        turns.append(
            Turn(
                who=f"client {client + 1}",
                prompt=length,
                prefilled=length - answer.end.reused,
                first_s=round(answer.times_s[0], 3),
                answer=tuple(answer.tokens),
            )
        )
    return _of_fleet(turns, world.clock.now_s)


def tell(part: str, found: dict[bool, dict[str, Any]]) -> None:
    if part == "agents":
        columns = ("", "prompt", "prefilled", "without", "first token, s", "without")
        pairs = zip(found[True]["turns"], found[False]["turns"], strict=True)
        rows = [
            (
                own.who,
                own.prompt,
                own.prefilled,
                other.prefilled,
                f"{own.first_s:.3f}",
                f"{other.first_s:.3f}",
            )
            for own, other in pairs
        ]
        show("Two agents with one system prompt", columns, rows)
        return
    names = ("answers", "prefilled", "first_median_s", "first_max_s", "took_s", "tokens_per_s")
    figures = [(name, found[True][name], found[False][name]) for name in names]
    show(f"Clients with one system prompt: {part}", ("", "with", "without"), figures)


def run(options: argparse.Namespace) -> int:
    report, is_same = {}, True
    for part in options.part:
        found = {
            caches: in_virtual_time(options, caches=caches)
            if part == "world"
            else measured(part, options, caches=caches)
            for caches in (True, False)
        }
        answers = [[turn.answer for turn in each["turns"]] for each in found.values()]
        is_same &= all(own == other for own, other in itertools.pairwise(answers))
        if not options.json:
            tell(part, found)
        for each in found.values():
            each["turns"] = [asdict(turn) for turn in each["turns"]]
        report[part] = {"with": found[True], "without": found[False]}
    if options.json:
        print(json.dumps(report))
    elif not is_same:
        print("answers differ")
    return 0 if is_same else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.shared_prefixes", __doc__)
    parser.add_argument(
        "--part",
        type=lambda text: (text,),
        choices=[(part,) for part in ("agents", "fleet", "world")],
        default=("agents", "fleet", "world"),
        metavar="agents|fleet|world",
        help="one of the measurements (default: all)",
    )
    parser.whole("--system", 4096, "tokens of the system prompt")
    parser.whole("--clients", 32, "clients of the fleet")
    parser.whole("--stages", 2, "processes with layers")
    return run_command(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
