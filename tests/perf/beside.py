"""Methods beside each other on a real local cluster: tokens per second of the same prompts, in turns, and
what explains them.

One cluster of `--local` processes in float32, one thread each; every round each method holds it once, with a
head of its own that answers all prompts after a short answer to warm up. Rates are `(tokens - 1) / (last -
first)`, for each prompt the median of its rounds; ratios are of these. The answers of all methods must be
equal. Processes that share a machine's cores show what the machinery costs, not what separate devices gain.

    python -m tests.perf.beside [--method continuous --method ar] [--local 4] [--prompts-per-domain 1]
    [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.bench.console import progress, show
from flowspec.bench.plain import DTYPE
from flowspec.cli.options import positive
from flowspec.core.methods import METHODS
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import FlowSpecError, InputError
from flowspec.model.files import BUNDLED, bundled_folder
from flowspec.model.prompts import Prompt, read_prompts
from flowspec.model.text import Tokenizer, recommended
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, OpenCluster, Session, open_cluster
from flowspec.runtime.token_stream import Timing, timed
from tests.command import Parser, run_command

WARM_UP_TOKENS = 16
REFERENCE = "ar"
WORLD = "cluster (local)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One answer: its rate, and the head's report of it."""

    prompt: Prompt
    method: str
    tokens: tuple[int, ...]
    tokens_per_s: float
    statistics: dict[str, Any]


def measure(
    cluster: OpenCluster,
    methods: Sequence[str],
    drafter: str | None,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    tokens: int,
    rounds: int,
) -> list[Timed]:
    """Every prompt with every method in every round; raises `FlowSpecError` where answers differ."""
    tokenizer = Tokenizer(cluster.files)
    limits = Limits(new_tokens_max=tokens, stop_ids=recommended(cluster.files, cluster.config).stop_ids)
    encoded = [
        (prompt, tokenizer.encode_dialogue([{"role": "user", "content": prompt.turns[0]}]))
        for prompt in prompts
    ]
    found: list[Timed] = []
    answers: dict[str, tuple[int, ...]] = {}
    with progress("answers", rounds * len(methods) * len(prompts)) as step:
        for number in range(rounds):
            for method in methods if number % 2 == 0 else methods[::-1]:
                with cluster.session(
                    Decoding(method=method, drafters=() if drafter is None else (drafter,)),
                    lambda text, share: None,
                ) as session:
                    answer(
                        session,
                        encoded[0][1],
                        sampling,
                        Limits(new_tokens_max=WARM_UP_TOKENS, stop_ids=limits.stop_ids),
                    )
                    for prompt, ids in encoded:
                        timing, report = answer(session, ids, sampling, limits)
                        new = tuple(timing.new_tokens)
                        if new != answers.setdefault(prompt.prompt_id, new):
                            raise FlowSpecError(
                                f"{method} answers prompt {prompt.prompt_id} ({prompt.domain}) otherwise "
                                f"than {methods[0]}"
                            )
                        rate = timing.tokens_per_s
                        found.append(
                            Timed(
                                prompt=prompt, method=method, tokens=new, tokens_per_s=rate, statistics=report
                            )
                        )
                        step(f"round {number + 1}, {method}")
    return found


def answer(
    session: Session, ids: Sequence[int], sampling: Sampling, limits: Limits
) -> tuple[Timing, dict[str, Any]]:
    """An answer's times and statistics."""
    request = session.head.new_request()
    timing = Timing()
    running = session.submit(ids, sampling, limits, request=request)
    for _ in timed(running, timing):
        pass
    session.head.forget(request)
    assert running.end is not None
    return timing, running.end.statistics


def report(found: Sequence[Timed]) -> dict[str, Any]:
    """Medians by prompt and method, ratios of the first method to the others, and what explains them; too
    short answers are left out."""
    methods = list(dict.fromkeys(one.method for one in found))
    prompts: list[dict[str, Any]] = []
    for prompt_id in dict.fromkeys(one.prompt.prompt_id for one in found if one.tokens_per_s > 0):
        some = [one for one in found if one.prompt.prompt_id == prompt_id]
        by_method = {
            name: statistics.median(one.tokens_per_s for one in some if one.method == name)
            for name in methods
        }
        if min(by_method.values()) > 0:
            about = {"prompt": prompt_id, "domain": some[0].prompt.domain, "tokens": len(some[0].tokens)}
            prompts.append({**about, "tokens_per_s": by_method, "ratio": _ratios(by_method)})
    if not prompts:
        raise InputError("no answer has tokens enough to time; give more --tokens or other --prompts")
    return {
        "world": WORLD,
        "tokens_per_s": {
            name: statistics.median(each["tokens_per_s"][name] for each in prompts) for name in methods
        },
        "ratio": {
            name: statistics.median(each["ratio"][name] for each in prompts) for name in prompts[0]["ratio"]
        },
        "prompts": prompts,
        "statistics": {
            name: explain([one.statistics for one in found if one.method == name]) for name in methods
        },
    }


def _ratios(by_method: dict[str, float]) -> dict[str, float]:
    first, *others = by_method
    return {f"{first} / {name}": by_method[first] / by_method[name] for name in others}


def explain(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums and means over one method's answers: S and rho, the stages' busy shares, and rows dropped in each
    place per 100 run."""
    rows = sum(each["rows_computed"] for each in reports)
    dropped = {
        place: 100 * sum(each[place] for each in reports) / max(1, rows)
        for place in ("dead_in_queue", "dead_between_layers", "dead_late")
    }
    by_stage = zip(*(each["stage_busy"] for each in reports if each["stage_busy"]), strict=True)
    return {
        "tokens_per_commit": statistics.fmean(each["tokens_per_commit"] for each in reports),
        "share_in_flight": statistics.fmean(each["share_in_flight"] for each in reports),
        "nodes_sent": sum(each["nodes_sent"] for each in reports),
        "rows_computed": rows,
        **dropped,
        "stage_busy": [statistics.fmean(shares) for shares in by_stage],
        "draft_s": sum(each["draft_s"] for each in reports),
        "head_s": sum(each["head_s"] for each in reports),
        "decode_s": sum(each["decode_s"] for each in reports),
    }


def show_rates(found: dict[str, Any]) -> None:
    """The table of rates and ratios, prompt by prompt."""
    rows = [
        [
            f"{each['domain']} {each['prompt']}",
            each["tokens"],
            *each["tokens_per_s"].values(),
            *each["ratio"].values(),
        ]
        for each in found["prompts"]
    ]
    rows.append(["median", None, *found["tokens_per_s"].values(), *found["ratio"].values()])
    columns = ["prompt", "tokens", *found["tokens_per_s"], *found["ratio"]]
    show(f"{found['world']}, {found['stages']} stages: tokens per second", columns, rows)


def show_report(found: dict[str, Any]) -> None:
    show_rates(found)
    methods = list(found["tokens_per_s"])
    explained = []
    for name in methods:
        each = found["statistics"][name]
        busy = " ".join(f"{100 * share:.0f}%" for share in each["stage_busy"])
        dropped = [each[place] for place in ("dead_in_queue", "dead_between_layers", "dead_late")]
        spent = [each[name] for name in ("draft_s", "head_s", "decode_s")]
        explained.append(
            [
                name,
                each["tokens_per_commit"],
                each["share_in_flight"],
                busy,
                *dropped,
                each["nodes_sent"],
                *spent,
            ]
        )
    columns = [
        "method",
        "S",
        "rho",
        "stages busy",
        "in queue",
        "in layers",
        "late",
        "sent",
        "draft s",
        "head s",
        "decode s",
    ]
    show("what explains it (rows dropped per 100 run)", columns, explained)


def command(args: argparse.Namespace) -> int:
    methods = list(dict.fromkeys(args.method or ["continuous", REFERENCE]))
    prompts = first_of_each(read_prompts(args.prompts), args.prompts_per_domain)
    try:
        sampling = Sampling(temperature=args.temperature, seed=1)
    except ValueError as error:
        raise InputError(f"--temperature: {error}") from None
    with open_cluster(ClusterOptions(model=args.model, dtype=DTYPE, local=args.local)) as cluster:
        found = measure(cluster, methods, args.drafter, prompts, sampling, args.tokens, args.rounds)
    about = {
        "stages": args.local,
        "temperature": args.temperature,
        "drafter": args.drafter,
        "rounds": args.rounds,
    }
    result = {**report(found), **about}
    if args.json:
        print(json.dumps(result))
    else:
        show_report(result)
    return 0


def add_run_arguments(parser: argparse.ArgumentParser, *, local: int, rounds: int) -> None:
    """How many processes, rounds and tokens, and which prompts."""
    add_prompt_arguments(parser, local=local)
    parser.add_argument("--rounds", type=positive, default=rounds, metavar="N", help="default: %(default)s")


def first_of_each(prompts: Iterable[Prompt], per_domain: int | None) -> list[Prompt]:
    """The first `per_domain` prompts of each domain; None takes all."""
    seen: Counter[str] = Counter()
    found = []
    for prompt in prompts:
        seen[prompt.domain] += 1
        if per_domain is None or seen[prompt.domain] <= per_domain:
            found.append(prompt)
    return found


def add_prompt_arguments(parser: argparse.ArgumentParser, *, local: int) -> None:
    """How many processes and tokens, and which prompts."""
    parser.add_argument(
        "--local", type=positive, default=local, metavar="N", help="local processes (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=positive, default=96, metavar="N", help="longest answer (default: %(default)s)"
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        default=bundled_folder("prompts.jsonl"),
        metavar="FILE",
        help="jsonl in Spec-Bench form (default: shipped)",
    )
    parser.add_argument(
        "--prompts-per-domain",
        type=positive,
        default=1,
        metavar="N",
        help="the first N of each domain (default: %(default)s)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.beside", __doc__)
    parser.add_argument(
        "--model", default=BUNDLED, metavar="PATH-OR-HUB-ID", help="default: the bundled demo model"
    )
    parser.add_argument(
        "--method",
        action="append",
        choices=METHODS,
        help="may be repeated; ratios are of the first (default: continuous, ar)",
    )
    parser.add_argument(
        "--drafter",
        metavar="NAME",
        help="what guesses ahead (default: bundled for the bundled model, else ngram)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    add_run_arguments(parser, local=4, rounds=3)
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
