"""Runs an experiment: every prompt at every temperature with every setup on every testbed, each answer kept the moment it is there.

`results.jsonl` grows while it runs; started again with the same `out`, it goes on where it was. Knows no tables and no plots.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from flowspec.errors import FlowSpecError, InputError
from flowspec.model.files import ModelFiles
from flowspec.testbed import virtual_runs
from flowspec.testbed.config import SIMULATED, Bench, Setup, prompt_path
from flowspec.testbed.outcome import Key, Record, read_records, write_records
from flowspec.testbed.plain import Case, make_samplings, plain_cases
from flowspec.testbed.prompts import Prompt, read_prompts
from flowspec.testbed.synthetic import synthetic_cases
from flowspec.testbed.virtual_runs import VirtualRuns, Work

RESULTS = "results.jsonl"
EXPERIMENT = "experiment.json"
ANSWERS = "answers.json"
WARM_UP_CASES = 2
SYNTHETIC_PROMPTS = 8

Step = Callable[[str, int], None]
"""Called with what was done and how many answers that was."""


def read_cases(bench: Bench, cache: Path | None) -> list[Case]:
    """The experiment's prompts with their plain answers, which `cache` keeps."""
    samplings = make_samplings(bench.temperatures, bench.seeds)
    if bench.is_synthetic:
        return synthetic_cases(bench.limit or SYNTHETIC_PROMPTS, samplings, bench.new_tokens)
    prompts: list[Prompt] = []
    for name in bench.prompts:
        some = _limited(read_prompts(prompt_path(name)), bench.limit)
        # Files number their prompts as they like, so a prompt of several files is known by its file, too.
        prompts += (
            some if len(bench.prompts) == 1 else [replace(one, prompt_id=f"{prompt_path(name).stem} {one.prompt_id}") for one in some]
        )
    return plain_cases(ModelFiles(bench.model), prompts, samplings, bench.new_tokens, cache)


def _limited(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """`limit` prompts of a file, spread over its domains: a file may hold one domain after the other."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    places = sorted((place, at, prompt.prompt_id) for at, some in enumerate(domains.values()) for place, prompt in enumerate(some))
    chosen = {prompt_id for _, _, prompt_id in places[:limit]}
    return [prompt for prompt in prompts if prompt.prompt_id in chosen]


def warm_up_cases(cases: Sequence[Case]) -> list[Case]:
    """The first case and one from the middle, at each temperature, with the first seed."""
    found = []
    for temperature in dict.fromkeys(case.sampling.temperature for case in cases):
        some = [case for case in cases if case.sampling.temperature == temperature]
        found += [some[at * len(some) // WARM_UP_CASES] for at in range(min(WARM_UP_CASES, len(some)))]
    return found


def open_out(bench: Bench, out: Path) -> list[Record]:
    """Makes the folder, or reads what it holds of this experiment; raises `InputError` if it holds another one."""
    described = json.dumps(_plain(bench), indent=1, sort_keys=True)
    path = out / EXPERIMENT
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(described, "utf-8")
        known = path.read_text("utf-8")
    except OSError as error:
        raise InputError(f"--out: expected a folder that can be written, got {out} ({error.strerror})") from None
    if known != described:
        raise InputError(f"--out: {out} holds results of another experiment; give another folder, or remove it")
    return read_records(out / RESULTS)


def _plain(value: Any) -> Any:
    """A dataclass as JSON can hold it."""
    return json.loads(json.dumps(asdict(value), default=str))


def run_simulated(bench: Bench, cases: Sequence[Case], done: Sequence[Record], out: Path, jobs: int, step: Step) -> list[Record]:
    """The records that are missing, in `jobs` processes; what is done is on disk when an interruption comes."""
    assert bench.world == SIMULATED
    work = list(pending(bench, cases, {record.key for record in done}))
    warm_up = warm_up_cases(cases)
    found = list(done)

    def keep(records: list[Record], case: Case) -> None:
        write_records(out / RESULTS, records)
        found.extend(records)
        step(f"{case.domain} {case.prompt_id}, temperature {case.sampling.temperature:g}", len(records))

    if jobs == 1 or len(work) == 1:
        runs = VirtualRuns(bench, warm_up)
        for one in work:
            keep(runs.records(one), one.case)
        return found
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), virtual_runs.start_worker, (bench, warm_up))
    try:
        running: dict[Future[list[Record] | FlowSpecError], Work] = {pool.submit(virtual_runs.work, one): one for one in work}
        while running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                result = future.result()
                if isinstance(result, FlowSpecError):
                    raise result
                keep(result, running.pop(future).case)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    pool.shutdown()
    return found


def pending(bench: Bench, cases: Sequence[Case], done: set[Key]) -> Iterator[Work]:
    """What is still to be run, by case."""
    for number, case in enumerate(cases):
        jobs = tuple(
            (testbed, setup)
            for testbed in bench.testbeds
            for setup in bench.setups
            if setup.runs_on(testbed.name) and key_of(testbed.name, setup, case, 0) not in done
        )
        if jobs:
            yield Work(number=number, case=case, jobs=jobs)


def key_of(testbed: str, setup: Setup, case: Case, repeat: int) -> Key:
    """The key of the record that this answer will have."""
    return (testbed, setup.name, case.prompt_id, case.sampling.temperature, case.sampling.seed, repeat)


def in_order(bench: Bench, cases: Sequence[Case], records: Sequence[Record]) -> list[Record]:
    """Records in the experiment's order, whatever order they were made in, so that equal runs give equal files."""
    cases_at = {(case.prompt_id, case.sampling.temperature, case.sampling.seed): at for at, case in enumerate(cases)}
    setups_at = {setup.name: at for at, setup in enumerate(bench.setups)}
    testbeds_at = {testbed.name: at for at, testbed in enumerate(bench.testbeds)}

    def place(record: Record) -> tuple[int, int, int, int]:
        at = cases_at[record.prompt_id, record.temperature, record.seed]
        return (testbeds_at.get(record.testbed, 0), at, setups_at[record.method], record.repeat)

    return sorted(records, key=place)


def total(bench: Bench, cases: Sequence[Case]) -> int:
    """Answers of the whole experiment."""
    places = [testbed.name for testbed in bench.testbeds] or [""]
    return len(cases) * bench.repeat * sum(setup.runs_on(place) for place in places for setup in bench.setups)
