"""Runs an experiment: every prompt at every temperature with every setup on every testbed, each answer kept
the moment it is there.

`results.jsonl` grows while it runs; started again with the same `out`, it goes on where it was. Knows no
tables and no plots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowspec.bench.config import SIMULATED, Bench, Setup, prompt_path
from flowspec.bench.out_folder import first_difference, open_folder, shown
from flowspec.bench.outcome import Key, Record, read_records
from flowspec.bench.plain import PlainCase, make_samplings, plain_cases
from flowspec.bench.prompts import Prompt, read_prompts
from flowspec.bench.summary import TUNED
from flowspec.bench.synthetic import PROMPT_TOKENS, SYNTHETIC_DOMAIN, synthetic_cases
from flowspec.bench.virtual_runs import VirtualRuns, Work, open_workers
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles

RESULTS = "results.jsonl"
LOADS = "loads.jsonl"
ANSWERS = "answers.json"
TUNED_FILE = "tuned.toml"
WARM_UP_CASES = 2
SYNTHETIC_PROMPTS = 8
SYNTHETIC_TUNING = 1_000_000
"""The number of the first synthetic prompt that methods are tuned on."""

Step = Callable[[str, int], None]
"""Called with what is done or under way, or nothing new, and how many answers were finished."""


def read_cases(bench: Bench, cache: Path | None, *, for_tuning: bool = False) -> list[PlainCase]:
    """The experiment's prompts with their plain answers, which `cache` keeps; synthetic ones are others
    `for_tuning`."""
    samplings = make_samplings(bench.temperatures, bench.seeds)
    if not bench.is_synthetic:
        return plain_cases(
            ModelFiles(bench.model), _prompts(bench), samplings, bench.new_tokens, cache, bench.context
        )
    if PROMPT_TOKENS + bench.new_tokens > bench.context:
        raise InputError(
            f"a synthetic prompt has {PROMPT_TOKENS} tokens, which with {bench.new_tokens} new ones is more "
            f"than the context of {bench.context}"
        )
    domains: tuple[str, ...] = (SYNTHETIC_DOMAIN,)
    if bench.declared:
        domains = tuple(bench.declared[0].acceptance)
    elif bench.profile is not None:
        domains = bench.profile.domains
    return synthetic_cases(
        bench.limit or SYNTHETIC_PROMPTS,
        samplings,
        bench.new_tokens,
        first=SYNTHETIC_TUNING if for_tuning else 0,
        domains=domains,
        have_words=bool(bench.declared),
    )


def _prompts(bench: Bench) -> list[Prompt]:
    """Files number their prompts as they like, so a prompt of several files is known by its file, too."""
    paths = [prompt_path(name) for name in dict.fromkeys(bench.prompts)]
    stems = [path.stem for path in paths]
    labels = stems if len(set(stems)) == len(stems) else [str(path) for path in paths]
    found: list[Prompt] = []
    for path, label in zip(paths, labels, strict=True):
        some = read_prompts(path)
        for prompt_id, count in Counter(prompt.prompt_id for prompt in some).items():
            if count > 1:
                raise InputError(
                    f"{path}: question_id: expected each once, got {prompt_id!r:.80} {count} times"
                )
        some = _limited(some, bench.limit)
        found += (
            some if len(paths) == 1 else [replace(one, prompt_id=f"{label} {one.prompt_id}") for one in some]
        )
    return found


def _limited(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """`limit` prompts of a file, spread over its domains: a file may hold one domain after the other."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    places = sorted(
        (place, at, prompt.prompt_id)
        for at, some in enumerate(domains.values())
        for place, prompt in enumerate(some)
    )
    chosen = {prompt_id for _, _, prompt_id in places[:limit]}
    return [prompt for prompt in prompts if prompt.prompt_id in chosen]


def warm_up_cases(bench: Bench, cases: Sequence[PlainCase], count: int = WARM_UP_CASES) -> list[PlainCase]:
    """What heads learn from beforehand: `count` cases, evenly spaced from the first on, at each temperature,
    with the first seed; none where they are to have learnt nothing."""
    if bench.nothing_learnt:
        return []
    by_temperature: dict[float, list[PlainCase]] = {}
    for case in cases:
        some = by_temperature.setdefault(case.sampling.temperature, [])
        if not some or case.sampling == some[0].sampling:
            some.append(case)
    return [
        some[at * len(some) // count]
        for some in by_temperature.values()
        for at in range(min(count, len(some)))
    ]


def open_out(bench: Bench, out: Path, command: str = "", *, to_be_tuned: bool = False) -> list[Record]:
    """Makes the folder, or reads what it holds of this experiment; raises `InputError` if it holds another
    one.

    An experiment may come back with more methods than it had. `to_be_tuned`: with tuned ones, which are not
    known yet. `command` is kept beside a new one, for whoever wants to go on with it.
    """
    open_folder(
        bench,
        out,
        command,
        results=(RESULTS, LOADS, TUNED_FILE),
        difference=lambda known, new: _difference(known, new, to_be_tuned),
        lists=("setups",),
        stays=to_be_tuned,
    )
    return read_records(out / RESULTS, Record)


def _difference(known: dict[str, Any], new: dict[str, Any], to_be_tuned: bool) -> str | None:
    """What of a known experiment is not so in the new one; more methods are none."""
    old_setups, new_setups = (
        {f"{setup['name']} {setup['testbeds'] or ''}": setup for setup in each["setups"]}
        for each in (known, new)
    )
    if to_be_tuned:
        old_setups = {
            name: setup
            for name, setup in old_setups.items()
            if name in new_setups or not setup["name"].endswith(TUNED)
        }
    for key in ("name", "world", "model"):  # another one of these explains all other differences
        if known.get(key) != new.get(key):
            return f"{key}: expected {shown(known.get(key))}, got {shown(new.get(key))}"
    if not old_setups.keys() <= new_setups.keys():
        names = [dict.fromkeys(each["name"] for each in some.values()) for some in (old_setups, new_setups)]
        return "methods: expected " + ", got ".join(map(", ".join, names))
    return first_difference(
        known | {"setups": old_setups}, new | {"setups": {name: new_setups.get(name) for name in old_setups}}
    )


def run_simulated(
    bench: Bench, cases: Sequence[PlainCase], done: Sequence[Record], out: Path, jobs: int, step: Step
) -> list[Record]:
    """The records that are missing, in `jobs` processes; each is on disk the moment it is there."""
    assert bench.world == SIMULATED
    work = list(pending(bench, cases, {record.key for record in done}))
    found = list(done)
    with open_workers(
        bench,
        warm_up_cases(bench, cases),
        max(1, min(jobs, len(work))),
        VirtualRuns.records,
        kept=out / RESULTS,
        finished=lambda count: step("answers", count),
    ) as run:
        for _, records in run(work):
            found += records
    return found


def pending(bench: Bench, cases: Sequence[PlainCase], done: set[Key]) -> Iterator[Work]:
    """What is still to be run, by case; where guesses cost next to nothing, also by testbed, so that all
    processes have work."""
    groups = [(testbed,) for testbed in bench.testbeds] if bench.is_synthetic else [bench.testbeds]
    for number, case in enumerate(cases):
        for group in groups:
            jobs = tuple(
                (testbed, setup)
                for testbed in group
                for setup in bench.setups
                if setup.runs_on(testbed.name) and key_of(testbed.name, setup, case, 0) not in done
            )
            if jobs:
                yield Work(number=number, case=case, jobs=jobs)


def key_of(testbed: str, setup: Setup, case: PlainCase, repeat: int) -> Key:
    """The key of the record that this answer will have."""
    return (testbed, setup.name, case.prompt_id, case.sampling.temperature, case.sampling.seed, repeat)


def in_order(bench: Bench, cases: Sequence[PlainCase], records: Sequence[Record]) -> list[Record]:
    """Records in the experiment's order, whatever order they were made in, so that equal runs give equal
    files."""
    cases_at = {
        (case.prompt_id, case.sampling.temperature, case.sampling.seed): at for at, case in enumerate(cases)
    }
    setups_at = {setup.name: at for at, setup in enumerate(bench.setups)}
    testbeds_at = {testbed.name: at for at, testbed in enumerate(bench.testbeds)}

    def place(record: Record) -> tuple[int, int, int, int]:
        at = cases_at[record.prompt_id, record.temperature, record.seed]
        return (testbeds_at.get(record.testbed, 0), at, setups_at[record.method], record.repeat)

    return sorted(records, key=place)


def total(bench: Bench, cases: Sequence[PlainCase]) -> int:
    places = [testbed.name for testbed in bench.testbeds] or [""]
    return len(cases) * bench.repeat * sum(setup.runs_on(place) for place in places for setup in bench.setups)
