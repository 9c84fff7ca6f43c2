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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs
from rich.console import Console
from rich.progress import Progress

from flowspec.bench.cases import of_each_domain, read_prompts
from flowspec.bench.records import EXACT, WRONG
from flowspec.bench.verify import Case, ClusterAnswer, answer_of, judge, read_binding
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
from flowspec.cli.result import Result
from flowspec.cli.terminal import tell
from flowspec.core.methods import CHAINED, METHODS, find_method
from flowspec.core.protocol.limits import REQUESTS_MAX
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.grammar import GrammarVocabulary
from flowspec.model.step_by_step import StepByStep, device_with
from flowspec.model.text import Tokenizer, check_tokenizer, recommended
from flowspec.rounding import rounded
from flowspec.runtime.cluster_file import read_drafters
from flowspec.runtime.decoding import AUTO, Decoding
from flowspec.runtime.session import Limits, Session, open_cluster
from flowspec.validation import checked

Answers = Sequence[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, local_list=True)
    add_decoding_arguments(parser, several=True)
    group = parser.add_argument_group("what to compare")
    text = (
        "jsonl in Spec-Bench form, or a text file of one prompt a line; may be repeated (default: shipped "
        "prompts)"
    )
    group.add_argument("--prompts", action="append", type=Path, metavar="FILE", help=text)
    text = Rare("a prompt as token ids, without a tokenizer; may be repeated")
    group.add_argument("--prompt-token-ids", action="append", type=number_list, metavar="1,5,9", help=text)
    for name, kind, default, metavar, text in (
        ("parallel", number_list, (1,), "N[,N...]", "so many answers at a time, for each N (default: 1)"),
        ("limit", positive, 6, "N", "prompts per file, of each domain in turn (default: %(default)s)"),
        ("temperatures", reals, (0.0, 1.0), "0,1", "temperatures to try (default: 0,1)"),
        ("seeds", number_list, (1,), "1,2", "seeds to try at temperatures above 0 (default: 1)"),
    ):
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)
    for name in FILTERS:
        add_sampling_argument(group, name, default=getattr(Sampling(), name))
    text = "longest answer (default: %(default)s)"
    group.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help=text)
    group.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    counts = args.local if args.cluster is None else (1,)
    if args.layers is not None and len(counts) > 1:
        raise InputError("--layers forces the split of one cluster; expected one number for --local")
    if any(count < 1 for count in counts):
        raise InputError("--local: expected whole numbers from 1")
    if not all(1 <= users <= REQUESTS_MAX for users in args.parallel):
        got = ",".join(map(str, args.parallel))
        raise InputError(f"--parallel: expected whole numbers from 1 to {REQUESTS_MAX}, got {got}")
    samplings, prompts, decodings = read_samplings(args), read_files(args), read_decodings(args)
    from flowspec.bench import faithfulness  # imports torch, before transformers does without it

    placed = () if args.cluster is None else tuple(read_drafters(args.cluster))
    for decoding in decodings:
        decoding.check(args.model, placed)
    largest = max(decodings, key=lambda each: len(each.drafters_for(args.model, placed)))
    check = check_tokenizer if prompts else lambda files: None
    found: list[ClusterAnswer] = []
    binding, not_bound = None, ""
    for count in counts:
        with contextlib.ExitStack() as daemons:
            with loading_bar(quiet=args.json) as progress:
                where = cluster_options(args, count)
                opening = open_cluster(where, check, decoding=largest, progress=progress)
                cluster = daemons.enter_context(opening)
            files, advice = cluster.files, recommended(cluster.files, cluster.config)
            limits = Limits(new_tokens_max=args.max_new_tokens, stop_ids=advice.stop_ids)
            drawn = [structs.replace(each, suppress_tokens=advice.suppress_tokens) for each in samplings]
            cases = make_cases(args, drawn, prompts, files)
            binding = binding or read_binding(files, cluster.config)
            cluster = replace(cluster, plan=replace(cluster.plan, tokens=binding.tokens))
            for decoding in decodings:
                with contextlib.ExitStack() as stack:
                    with loading_bar(quiet=args.json) as progress:
                        session = stack.enter_context(cluster.session(decoding, progress))
                    plan, arithmetic = session.head.plan, session.head.arithmetic
                    device = device_with(plan.dtype, arithmetic)
                    why = binding.why or session.head.grammar_trouble()
                    bound, not_bound = ([], why) if why else (binding.of(cases), not_bound)
                    bar = stack.enter_context(work_bar(args))
                    for users in args.parallel:
                        found += ask(session, [*cases, *bound], limits, users, bar)
    plain = StepByStep.load(files, plan.dtype, device, arithmetic, plan.cache)
    if plan.tokens is not None:
        plain.grammars = GrammarVocabulary(plan.tokens)
    with work_bar(args) as bar:
        sizes = {one.case: len(one.case.prompt) + len(one.tokens) for one in found}
        plain.tell = partial(bar.advance, bar.add_task("step by step", total=sum(sizes.values())))
        answers = [judge(plain, one, limits.stop_ids) for one in found]
        reading = bar.add_task("a text of 2,000 tokens beside transformers", total=1.0)
        faithful = faithfulness.check(files, plan.dtype, plain, partial(bar.advance, reading))
    if args.json:
        print(json.dumps(report(answers, faithful, not_bound)))
    else:
        show(answers, faithful, not_bound)
    return 0 if faithful["is_faithful"] and not totals(answers)["wrong"] else 1


def work_bar(args: argparse.Namespace) -> Progress:
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=args.json or not console.is_terminal)


def ask(
    session: Session, cases: Sequence[Case], limits: Limits, users: int, bar: Progress
) -> list[ClusterAnswer]:
    """Asks a cluster all cases, so many at a time."""
    decoding = f"{session.decoding.method}, {session.drafter}"
    text = f"{len(session.head.stages)} stages, {decoding}, {users} at a time"
    advance = partial(bar.advance, bar.add_task(text, total=len(cases) * limits.new_tokens_max))

    def ask_one(case: Case) -> ClusterAnswer:
        running, timing = session.ask(case.prompt, case.sampling, limits, advance)
        advance(limits.new_tokens_max - len(timing.new_tokens))
        return answer_of(session, case, running, timing, limits, users)

    pool = ThreadPoolExecutor(users)
    try:
        return list(pool.map(ask_one, cases))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # answers under way end with the session


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
        ways = [(names, None) for names in sets]
        if method is not None and not find_method(method).drafts:
            ways = [((), None)]
        elif chains and (method in CHAINED or not args.drafter):
            ways = chains
        elif method is None:
            ways += chains
        found += [decoding_options(args, method, *way) for way in ways]
    if "all" in chosen:  # asked for by name, one that cannot take so many is an error
        fitting = [each for each in found if len(each.drafters) <= find_method(each.method).drafters_max]
        return fitting or found
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
    paths = args.prompts or ([] if args.prompt_token_ids else [bundled_folder("prompts.jsonl")])
    return [
        (f"{path.stem} {prompt.prompt_id}", prompt.turns[0])
        for path in paths
        for prompt in of_each_domain(read_prompts(path), args.limit)
    ]


def make_cases(
    args: argparse.Namespace, samplings: list[Sampling], prompts: list[tuple[str, str]], files: ModelFiles
) -> list[Case]:
    """What to ask: every prompt with every sampling."""
    given = [(f"ids {number}", ids) for number, ids in enumerate(args.prompt_token_ids or [], 1)]
    if prompts:
        encode = Tokenizer(files).encode_dialogue
        given += [(name, tuple(encode([{"role": "user", "content": text}]))) for name, text in prompts]
    return [
        Case(prompt_id=name, prompt=ids, sampling=sampling) for sampling in samplings for name, ids in given
    ]


def totals(answers: Answers) -> dict[str, int]:
    verdicts = [each["verdict"] for each in answers]
    tokens, unlikely = (sum(each[name] for each in answers) for name in ("new_tokens", "unlikely_tokens"))
    exact, wrong = verdicts.count(EXACT), verdicts.count(WRONG)
    return {"exact": exact, "wrong": wrong, "tokens": tokens, "unlikely_tokens": unlikely}


def report(answers: Answers, faithful: dict[str, Any], not_bound: str) -> dict[str, Any]:
    """Both statements, for JSON; what is no number is None. `not_bound`: why no schema bound answers
    somewhere."""
    found = totals(answers)
    exact = {"is_exact": not found["wrong"], **found, "answers": answers, "not_bound": not_bound}
    return dict(msgspec.json.decode(msgspec.json.encode({"exact": exact, "faithful": faithful})))


def show(answers: Answers, faithful: dict[str, Any], not_bound: str) -> None:
    groups, drawn = dict[Any, list[Any]](), dict[float, list[Any]]()
    for each in answers:
        method, temperature = each["method"] + f" {AUTO}" * (each["chain"] == AUTO), each["temperature"]
        key = (method, each["drafter"], each["stages"], each["users"], temperature)
        groups.setdefault(key, []).append(each)
        if temperature > 0:
            drawn.setdefault(temperature, []).append(each)
    rows = []
    for (method, drafter, *numbers, temperature), group in groups.items():
        found = totals(group)
        numbers += [f"{temperature:g}", len(group), found["tokens"], found["exact"], found["wrong"]]
        rows.append([f"{method}: {Path(drafter).name}", *map(str, numbers)])
    columns = ("method: drafter", "stages", "users", "temp", "answers", "tokens", "exact", "wrong")
    result = Result()
    result.table(columns, rows)
    result.print()
    for each in answers:
        if each["difference"] is not None:
            tell(wrong_line(each))
    wrong = totals(answers)["wrong"]
    verdict = f"NO, {wrong} of {len(answers)} answers are wrong" if wrong else "yes, all answers are equal"
    tell(f"exact: {verdict}")
    for temperature, group in drawn.items():
        found = totals(group)
        unlikely, tokens = found["unlikely_tokens"], found["tokens"]
        hint = "" if unlikely else "; as at temperature 0: ask what has many answers (--prompts)"
        tell(f"at temperature {temperature:g}: {unlikely} of {tokens} tokens are not the likeliest{hint}")
    tell(f"faithful: {'NO, ' + '; '.join(faithful['faults']) if faithful['faults'] else 'yes'}")
    text = (
        "on {tokens} tokens of {text}: logits off by {typical:.2g} typically ({typical_limit:.2g} allowed), "
        "perplexity {perplexity:.5g}, transformers {reference:.5g} ({change:+.2%}); "
        "matrices off by {matrix[share]:.2%} at most ({matrix_limit:.2%} allowed)"
    )
    tell(text.format(**faithful))
    if (unrounded := faithful["unrounded"]) is not None:
        loss = faithful["reference"] / unrounded - 1
        tell(f"rounding to {faithful['dtype']} itself: perplexity {unrounded:.5g} before ({loss:+.2%})")
    if bound := sum(each["is_bound"] for each in answers):
        tell(f"structured output: {bound} of the answers were bound by a schema")
    if not_bound:
        tell(f"structured output is not checked{' everywhere' if bound else ''}: {not_bound}")


def wrong_line(answer: dict[str, Any]) -> str:
    asked = "{prompt}, {method}, {stages} stages, {users} at a time, temperature {temperature:g}, seed {seed}"
    place = answer["difference"]
    found, expected = ("the end" if place[name] is None else place[name] for name in ("found", "expected"))
    lead = "" if place["margin"] is None else f", which leads by {rounded(place['margin'])} logits"
    where = f"wrong: {asked.format(**answer)}: token {place['index']}"
    return f"{where} is {found}, step by step it is {expected}{lead}"
