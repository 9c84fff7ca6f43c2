"""FlowSpec beside `transformers.generate`, without and with its own assisted generation: the bundled pair,
greedy, in tokens per second.

A local cluster of `--local` processes in float32, and transformers in the head's process, one torch thread
each; every round they take turns, each after a short answer to warm up. Rates count after the first token (of
assisted generation, after all that came with the first); for each prompt the median of its rounds, ratios are
of these. Every answer is compared with the plain one.

    python -m tests.perf.against [--local 2] [--prompts-per-domain 1] [--rounds 5] [--tokens 96]
    [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowspec.bench.console import progress
from flowspec.bench.outcome import EXACT, WRONG
from flowspec.bench.plain import DTYPE, PlainCase, plain_cases
from flowspec.bench.recording import agreement_of
from flowspec.core.head.statistics import Statistics
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import FlowSpecError
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder
from flowspec.model.prompts import Prompt, read_prompts
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, OpenCluster, open_cluster
from tests.command import Parser, run_command
from tests.perf import beside
from tests.perf.beside import WARM_UP_TOKENS, Timed, first_of_each

OURS = ("continuous", "ar")
PLAIN, ASSISTED = "generate", "generate (assisted)"
NOTHING = {**Statistics(stage_count=0).report(), "head_s": 0.0}
"""What is known of the inner life of an answer of transformers'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer without its stop token, and how fast it came."""

    tokens: tuple[int, ...]
    reason: str
    tokens_per_s: float
    statistics: dict[str, Any]


Ask = Callable[[PlainCase], Said]


@contextlib.contextmanager
def ours(cluster: OpenCluster, method: str) -> Iterator[Ask]:
    """A session with one of our methods."""
    with cluster.session(Decoding(method=method), lambda text, share: None) as session:

        def ask(case: PlainCase) -> Said:
            limits = Limits(new_tokens_max=case.new_tokens_max, stop_ids=case.stop_ids)
            answer, timing = session.ask(case.prompt, case.sampling, limits)
            assert answer.end is not None
            return Said(
                tokens=tuple(timing.new_tokens),
                reason=answer.end.reason,
                tokens_per_s=timing.tokens_per_s,
                statistics=answer.end.statistics,
            )

        yield ask


class Theirs:
    """The bundled models as transformers runs them."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        from flowspec.model.slice import DTYPES

        transformers_logging.set_verbosity_error()  # assisted generation warns of how it calls itself
        torch.set_num_threads(1)
        folders = bundled_folder("target"), bundled_folder("draft")
        self._torch = torch
        self._target, self._draft = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[DTYPE]).eval() for folder in folders
        )

    def ask(self, case: PlainCase, is_assisted: bool) -> Said:
        """A greedy answer of `generate`."""
        watch = StopWatch()
        with self._torch.inference_mode():
            ids = self._torch.tensor([case.prompt])
            out = self._target.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=case.new_tokens_max,
                do_sample=False,
                eos_token_id=sorted(case.stop_ids),
                pad_token_id=0,
                assistant_model=self._draft if is_assisted else None,
                streamer=watch,
            )
        tokens = tuple(out[0, len(case.prompt) :].tolist())
        is_stopped = bool(tokens) and tokens[-1] in case.stop_ids
        return Said(
            tokens=tokens[:-1] if is_stopped else tokens,
            reason="stop" if is_stopped else "length",
            tokens_per_s=watch.tokens_per_s,
            statistics=NOTHING,
        )


@dataclass(slots=True)
class StopWatch:
    """A streamer, as transformers calls it, that notes when how many tokens came."""

    came: list[tuple[float, int]] = field(default_factory=list)
    _has_prompt: bool = False

    def put(self, tokens: Any) -> None:
        if self._has_prompt:
            self.came.append((time.monotonic(), tokens.numel()))
        self._has_prompt = True

    def end(self) -> None: ...

    @property
    def tokens_per_s(self) -> float:
        """Tokens after those that came first, by the time since then."""
        if len(self.came) < 2:
            return 0.0
        return sum(count for _, count in self.came[1:]) / (self.came[-1][0] - self.came[0][0])


def measure(
    cluster: OpenCluster, prompts: Sequence[Prompt], cases: Sequence[PlainCase], rounds: int
) -> tuple[list[Timed], dict[str, Counter[str]]]:
    """Every case by everyone in every round, and how the answers agree; raises `FlowSpecError` for a wrong
    one of ours."""
    theirs = Theirs()
    sides: dict[str, Callable[[], contextlib.AbstractContextManager[Ask]]] = {
        **{method: lambda method=method: ours(cluster, method) for method in OURS},  # type: ignore[misc]
        PLAIN: lambda: contextlib.nullcontext(lambda case: theirs.ask(case, False)),
        ASSISTED: lambda: contextlib.nullcontext(lambda case: theirs.ask(case, True)),
    }
    found: list[Timed] = []
    agreements = {name: Counter({EXACT: 0, WRONG: 0}) for name in sides}
    with progress("answers", rounds * len(sides) * len(cases)) as step:
        for number in range(rounds):
            for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                with sides[name]() as ask:
                    ask(replace(cases[0], new_tokens_max=WARM_UP_TOKENS))
                    for prompt, case in zip(prompts, cases, strict=True):
                        said = ask(case)
                        agreement = agreement_of(case, said.tokens, said.reason)
                        if agreement == WRONG and name in OURS:
                            raise FlowSpecError(
                                f"{name} answers prompt {case.prompt_id} ({case.domain}) otherwise than the "
                                "plain model"
                            )
                        agreements[name][agreement] += 1
                        rate, statistics = said.tokens_per_s, said.statistics
                        found.append(
                            Timed(
                                prompt=prompt,
                                method=name,
                                tokens=said.tokens,
                                tokens_per_s=rate,
                                statistics=statistics,
                            )
                        )
                        step(f"round {number + 1}, {name}")
    return sorted(found, key=lambda one: list(sides).index(one.method)), agreements


def report(found: Sequence[Timed], agreements: dict[str, Counter[str]]) -> dict[str, Any]:
    """Medians and ratios as `beside` has them, what explains ours, and how many answers agree how."""
    said = beside.report(found)
    said["statistics"] = {name: said["statistics"][name] for name in OURS}
    return {**said, "agreement": {name: dict(counts) for name, counts in agreements.items()}}


def show_report(found: dict[str, Any]) -> None:
    beside.show_rates(found)
    for name, counts in found["agreement"].items():
        print(f"{name}: {', '.join(f'{count} {kind}' for kind, count in counts.items())}")


def command(args: argparse.Namespace) -> int:
    prompts = first_of_each(read_prompts(args.prompts), args.prompts_per_domain)
    cases = plain_cases(ModelFiles(BUNDLED), prompts, [Sampling()], args.tokens)
    with open_cluster(ClusterOptions(model=BUNDLED, dtype=DTYPE, local=args.local)) as cluster:
        found, agreements = measure(cluster, prompts, cases, args.rounds)
    result = {
        **report(found, agreements),
        "stages": args.local,
        "threads_per_process": 1,
        "dtype": DTYPE,
        "rounds": args.rounds,
    }
    if args.json:
        print(json.dumps(result))
    else:
        show_report(result)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.against", __doc__)
    beside.add_run_arguments(parser, local=2, rounds=5)
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
