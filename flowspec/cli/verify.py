"""Check that a cluster's answers are exact, and the model behind them faithful.

Exact: runs prompts on the cluster, with every method, set of drafters, chain and number of users that is
asked for, and step by step in this process, and compares token by token. Faithful: reads a text with the
model as FlowSpec runs it and with transformers, and compares logits and perplexity. Exit status 0: exact and
faithful; 1: a wrong token, or not faithful. A few of the answers are bound by a schema, where devices can.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from msgspec import structs
from rich.console import Console
from rich.progress import Progress

from flowspec.bench.cases import of_each_domain, read_prompts
from flowspec.bench.console import show_table
from flowspec.cli.console import loading_bar
from flowspec.cli.options import (
    FILTERS,
    add_decoding_arguments,
    add_model_arguments,
    add_sampling_argument,
    by_flag,
    cluster_options,
    decoding_options,
    number_list,
    positive,
    reals,
)
from flowspec.cli.parser import Rare
from flowspec.cli.terminal import tell
from flowspec.core.methods import CHAINED, METHODS, find_method
from flowspec.core.protocol.limits import REQUESTS_MAX
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.grammar import GrammarVocabulary
from flowspec.model.text import Tokenizer, check_tokenizer, recommended
from flowspec.rounding import rounded
from flowspec.runtime.cluster_file import read_drafters
from flowspec.runtime.decoding import AUTO, Decoding
from flowspec.runtime.session import Limits, Session, open_cluster
from flowspec.validation import checked

if TYPE_CHECKING:  # some import torch, which most other commands do without
    from flowspec.bench.exactness import Case, ClusterAnswer, Difference, Verdict
    from flowspec.bench.faithfulness import Faithfulness

PROMPTS_DEFAULT = bundled_folder("prompts.jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, local_list=True)
    add_decoding_arguments(parser, several=True)
    group = parser.add_argument_group("what to compare")
    group.add_argument(
        "--prompts",
        action="append",
        type=Path,
        metavar="FILE",
        help=(
            "jsonl in Spec-Bench form, or a text file of one prompt a line; may be repeated (default: "
            "shipped prompts)"
        ),
    )
    group.add_argument(
        "--prompt-token-ids",
        action="append",
        type=number_list,
        metavar="1,5,9",
        help=Rare("a prompt as token ids, without a tokenizer; may be repeated"),
    )
    group.add_argument(
        "--parallel",
        type=number_list,
        default=(1,),
        metavar="N[,N...]",
        help="so many answers at a time, for each N (default: 1)",
    )
    group.add_argument(
        "--limit",
        type=positive,
        default=6,
        metavar="N",
        help="prompts per file, of each domain in turn (default: %(default)s)",
    )
    group.add_argument(
        "--temperatures",
        type=reals,
        default=(0.0, 1.0),
        metavar="0,1",
        help="temperatures to try (default: 0,1)",
    )
    group.add_argument(
        "--seeds",
        type=number_list,
        default=(1,),
        metavar="1,2",
        help="seeds to try at temperatures above 0 (default: 1)",
    )
    for name in FILTERS:
        add_sampling_argument(group, name, default=getattr(Sampling(), name))
    group.add_argument(
        "--max-new-tokens",
        type=positive,
        default=64,
        metavar="N",
        help="longest answer (default: %(default)s)",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    counts = args.local if args.cluster is None else (1,)
    if args.layers is not None and len(counts) > 1:
        raise InputError("--layers forces the split of one cluster; expected one number for --local")
    if any(count < 1 for count in counts):
        raise InputError("--local: expected whole numbers from 1")
    if not all(1 <= users <= REQUESTS_MAX for users in args.parallel):
        raise InputError(
            f"--parallel: expected whole numbers from 1 to {REQUESTS_MAX}, got "
            f"{','.join(map(str, args.parallel))}"
        )
    samplings, prompts, decodings = read_samplings(args), read_files(args), read_decodings(args)

    def check(files: ModelFiles) -> None:
        if prompts:
            check_tokenizer(files)

    faithfulness = _faithfulness()
    placed = () if args.cluster is None else tuple(read_drafters(args.cluster))
    for decoding in decodings:
        decoding.check(args.model, placed)
    largest = max(decodings, key=lambda each: len(each.drafters_for(args.model, placed)))
    from flowspec.bench.bound_cases import BoundCases
    from flowspec.bench.exactness import answer, judge
    from flowspec.bench.records import WRONG
    from flowspec.model.step_by_step import StepByStep, device_with

    console = Console(stderr=True)
    found: list[ClusterAnswer] = []
    bound: BoundCases | None = None
    free_only = ""  # why no answer was bound somewhere
    for count in counts:
        with contextlib.ExitStack() as daemons:
            with loading_bar(quiet=args.json) as progress:
                opened = daemons.enter_context(
                    open_cluster(cluster_options(args, count), check, decoding=largest, progress=progress)
                )
            bound = bound or BoundCases(opened.files, opened.config)
            cluster = replace(opened, plan=replace(opened.plan, tokens=bound.tokens))
            for decoding in decodings:
                with contextlib.ExitStack() as stack:
                    with loading_bar(quiet=args.json) as progress:
                        session = stack.enter_context(cluster.session(decoding, progress))
                    files, plan, arithmetic = session.files, session.head.plan, session.head.arithmetic
                    device = device_with(plan.dtype, arithmetic)
                    advice = recommended(files, session.config)
                    limits = Limits(new_tokens_max=args.max_new_tokens, stop_ids=advice.stop_ids)
                    drawn = [
                        structs.replace(each, suppress_tokens=advice.suppress_tokens) for each in samplings
                    ]
                    cases = make_cases(args, drawn, prompts, files)
                    if why_not := bound.why or session.head.grammar_trouble():
                        free_only = why_not
                    else:
                        cases += bound.of(cases)
                    bar = stack.enter_context(
                        Progress(
                            console=console, transient=True, disable=args.json or not console.is_terminal
                        )
                    )
                    for users in args.parallel:
                        pool = ThreadPoolExecutor(users)
                        stack.callback(
                            pool.shutdown, wait=False, cancel_futures=True
                        )  # answers under way end with the session
                        total = len(cases) * limits.new_tokens_max
                        tell_one = partial(bar.advance, bar.add_task(_describe(session, users), total=total))
                        asked = partial(answer, session, limits=limits, users=users, tell=tell_one)
                        found += pool.map(asked, cases)
    plain = StepByStep.load(files, plan.dtype, device, arithmetic, plan.cache)
    if plan.tokens is not None:
        plain.grammars = GrammarVocabulary(plan.tokens)
    with Progress(console=console, transient=True, disable=args.json or not console.is_terminal) as bar:
        sizes = [len(one.case.prompt) + len(one.tokens) for one in found]
        judging, verdicts = bar.add_task("step by step", total=sum(sizes)), []
        plain.tell = partial(bar.advance, judging)
        for place, one in enumerate(found):
            verdicts.append(judge(plain, one, limits.stop_ids))
            bar.update(judging, completed=sum(sizes[: place + 1]))  # one that was known took no time
        reading = bar.add_task("a text of 2,000 tokens beside transformers", total=1.0)
        faithful = faithfulness.check(
            files, plan.dtype, plain, lambda share: bar.update(reading, completed=share)
        )
    if args.json:
        print(json.dumps(report(verdicts, faithful, free_only)))
    else:
        show(verdicts, faithful, free_only)
    return 0 if faithful.is_faithful and not any(verdict.kind == WRONG for verdict in verdicts) else 1


def _faithfulness() -> ModuleType:
    """`flowspec.bench.faithfulness`, which imports torch: it is to come before transformers, which else does
    without it."""
    from flowspec.bench import faithfulness

    return faithfulness


def _describe(session: Session, users: int) -> str:
    return (
        f"{len(session.head.stages)} stages, {session.decoding.method}, {session.drafter}, {users} at a time"
    )


def read_decodings(args: argparse.Namespace) -> list[Decoding]:
    """Every method with every set of drafters and every chain that it can make use of; methods that draft
    nothing once."""
    chosen = args.method or [None]
    methods = METHODS if "all" in chosen else tuple(dict.fromkeys(chosen))
    sets = list(dict.fromkeys(args.drafter or [()]))
    chains = [
        (names, chain)
        for chain in dict.fromkeys(args.chain or ())
        for names in (sets if chain == AUTO else [()])
    ]
    if chains and not {None, *CHAINED} & set(methods):
        raise InputError(f"--chain goes with method {', '.join(CHAINED)}, got {', '.join(methods)}")
    found = []
    for method in methods:
        if method is not None and not find_method(method).drafts:
            found.append(decoding_options(args, method, ()))
        elif chains and (method in CHAINED or not args.drafter):
            found += [decoding_options(args, method, names, chain) for names, chain in chains]
        else:
            found += [decoding_options(args, method, names) for names in sets]
            found += [
                decoding_options(args, method, names, chain) for names, chain in chains if method is None
            ]
    if "all" in chosen:  # asked for by name, one that cannot take so many is an error
        found = [
            each for each in found if len(each.drafters) <= find_method(each.method).drafters_max
        ] or found
    return found


def read_samplings(args: argparse.Namespace) -> list[Sampling]:
    """Every temperature, and above 0 with every seed."""
    filters = {name: getattr(args, name) for name in FILTERS}
    try:
        return [
            checked(Sampling(temperature=temperature, seed=seed, **filters))
            for temperature in args.temperatures
            for seed in (args.seeds if temperature > 0 else args.seeds[:1])
        ]
    except ValueError as error:
        raise InputError(by_flag(str(error), ending="s")) from None


def read_files(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Name and text of the prompts from files: the shipped ones, where none are given in another way."""
    paths = args.prompts or ([] if args.prompt_token_ids else [PROMPTS_DEFAULT])
    return [
        (f"{path.stem} {prompt.prompt_id}", prompt.turns[0])
        for path in paths
        for prompt in of_each_domain(read_prompts(path), args.limit)
    ]


def make_cases(
    args: argparse.Namespace, samplings: list[Sampling], prompts: list[tuple[str, str]], files: ModelFiles
) -> list[Case]:
    """What to ask: every prompt with every sampling."""
    from flowspec.bench.exactness import Case

    given = [(f"ids {number + 1}", ids) for number, ids in enumerate(args.prompt_token_ids or [])]
    if prompts:
        tokenizer = Tokenizer(files)
        for name, text in prompts:
            chat = tokenizer.has_chat_template
            ids = (
                tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
            )
            given.append((name, tuple(ids)))
    return [
        Case(prompt_id=name, prompt=ids, sampling=sampling) for sampling in samplings for name, ids in given
    ]


def report(verdicts: list[Verdict], faithful: Faithfulness, free_only: str = "") -> dict[str, Any]:
    """Both statements, for JSON; `free_only` is why no answer was bound by a schema, where none was."""
    counts = Counter(verdict.kind for verdict in verdicts)
    return {
        "exact": {
            "is_exact": not counts["wrong"],
            "exact": counts["exact"],
            "wrong": counts["wrong"],
            "tokens": sum(len(verdict.found.tokens) for verdict in verdicts),
            "unlikely_tokens": sum(verdict.unlikely for verdict in verdicts),
            "answers": [_answer_report(verdict) for verdict in verdicts],
            "not_bound": free_only,
        },
        "faithful": faithful.report(),
    }


def _answer_report(verdict: Verdict) -> dict[str, Any]:
    found, difference = verdict.found, verdict.difference
    return {
        "prompt": found.case.prompt_id,
        "method": found.method,
        "drafter": found.drafter,
        "chain": found.chain,
        "users": found.users,
        "stages": found.stages,
        "temperature": found.case.sampling.temperature,
        "seed": found.case.sampling.seed,
        "is_bound": found.case.sampling.grammar is not None,
        "verdict": verdict.kind,
        "new_tokens": len(found.tokens),
        "unlikely_tokens": verdict.unlikely,
        "difference": None if difference is None else asdict(difference),
    }


def show(verdicts: list[Verdict], faithful: Faithfulness, free_only: str = "") -> None:
    rows = []
    groups: dict[tuple[str, str, int, int, float], list[Verdict]] = {}
    for verdict in verdicts:
        found = verdict.found
        method = f"{found.method} {AUTO}" if found.chain == AUTO else found.method
        key = (method, found.drafter, found.stages, found.users, found.case.sampling.temperature)
        groups.setdefault(key, []).append(verdict)
    for (method, drafter, stages, users, temperature), group in groups.items():
        counts = Counter(verdict.kind for verdict in group)
        numbers = (len(group), sum(len(v.found.tokens) for v in group), counts["exact"], counts["wrong"])
        row = (str(stages), str(users), f"{temperature:g}", *map(str, numbers))
        rows.append((f"{method}: {Path(drafter).name}", *row))
    columns = ("method: drafter", "stages", "users", "temp", "answers", "tokens", "exact", "wrong")
    show_table(columns, rows, numbers_from=1)
    for verdict in verdicts:
        if verdict.difference is not None:
            tell(f"wrong: {_asked(verdict.found)}: {_told(verdict.difference)}")
    wrong = sum(verdict.kind == "wrong" for verdict in verdicts)
    exact = f"NO, {wrong} of {len(verdicts)} answers are wrong" if wrong else "yes, all answers are equal"
    bound = bound_lines(verdicts, free_only)
    for line in (f"exact: {exact}", *sampled_lines(verdicts), *faithful_lines(faithful), *bound):
        tell(line)


def bound_lines(verdicts: list[Verdict], free_only: str) -> Iterator[str]:
    """How many answers a schema bound, and why others were not."""
    if count := sum(verdict.found.case.sampling.grammar is not None for verdict in verdicts):
        yield f"structured output: {count} of the answers were bound by a schema"
    if free_only:
        yield f"structured output is not checked{' everywhere' if count else ''}: {free_only}"


def sampled_lines(verdicts: list[Verdict]) -> Iterator[str]:
    """For each temperature above 0, whether the answers show anything of sampling."""
    groups: dict[float, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.found.case.sampling.temperature, []).append(verdict)
    for temperature, group in groups.items():
        if temperature > 0:
            unlikely, tokens = (
                sum(verdict.unlikely for verdict in group),
                sum(len(verdict.found.tokens) for verdict in group),
            )
            hint = "" if unlikely else "; as at temperature 0: ask what has many answers (--prompts)"
            yield f"at temperature {temperature:g}: {unlikely} of {tokens} tokens are not the likeliest{hint}"


def _asked(found: ClusterAnswer) -> str:
    sampling = found.case.sampling
    where = f"{found.method}, {found.stages} stages, {found.users} at a time"
    return f"{found.case.prompt_id}, {where}, temperature {sampling.temperature:g}, seed {sampling.seed}"


def _told(difference: Difference) -> str:
    tokens = difference.found, difference.expected
    found, expected = ("the end" if token is None else token for token in tokens)
    margin = "" if difference.margin is None else f", which leads by {rounded(difference.margin)} logits"
    return f"token {difference.index} is {found}, step by step it is {expected}{margin}"


def faithful_lines(found: Faithfulness) -> list[str]:
    """The second statement, in words."""
    logits = f"logits off by {found.typical:.2g} typically ({found.typical_limit:.2g} allowed)"
    theirs = f"transformers {found.reference:.5g} ({found.change:+.2%})"
    perplexity = f"perplexity {found.perplexity:.5g}, {theirs}"
    matrices = f"matrices off by {found.matrix.share:.2%} at most ({found.matrix_limit:.2%} allowed)"
    lines = [
        f"faithful: {'yes' if found.is_faithful else 'NO, ' + '; '.join(found.faults)}",
        f"on {found.tokens} tokens of {found.text}: {logits}, {perplexity}; {matrices}",
    ]
    if found.unrounded is not None:
        loss = found.reference / found.unrounded - 1
        lines.append(
            f"rounding to {found.dtype} itself: perplexity {found.unrounded:.5g} before ({loss:+.2%})"
        )
    return lines
