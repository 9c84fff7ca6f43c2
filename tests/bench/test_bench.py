"""Running experiments: complete, resumed after anything, the same however many processes there are, and never
in another one's folder. Plain answers are made once and kept in a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from flowspec.bench.bench import (
    RESULTS,
    in_order,
    open_out,
    pending,
    read_cases,
    run_simulated,
    total,
    warm_up_cases,
)
from flowspec.bench.config import Bench, Setup
from flowspec.bench.out_folder import EXPERIMENT
from flowspec.bench.outcome import EXACT, Record, read_records, write_records
from flowspec.bench.plain import PlainCase, make_samplings, plain_cases
from flowspec.bench.prompts import Prompt
from flowspec.bench.virtual_runs import VirtualRuns, open_workers
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.step_by_step import StepByStep
from tests.bench.benches import Steps, boards, synthetic
from tests.bench.records import record

SETUPS = (
    Setup(name="ar", method="ar"),
    Setup(name="small", method="continuous", options={"segment_nodes": 8}),
)
BENCH = synthetic(setups=SETUPS, testbeds=(boards(2), boards(1, "raspberry-pi-5", "a Pi")))


def bench_with(**changes: Any) -> Bench:
    return structs.replace(BENCH, **changes)


def finish(bench: Bench, out: Path, jobs: int = 1, step: Steps | None = None) -> list[Record]:
    done = open_out(bench, out)
    return run_simulated(bench, read_cases(bench, None), done, out, jobs, step or Steps())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The records of a run that nothing interrupted, in its order."""
    out = tmp_path_factory.mktemp("whole") / "deep" / "er"
    step = Steps()
    found = finish(BENCH, out, step=step)
    assert read_records(out / RESULTS, Record) == found
    assert step.told == [("answers", 1)] * 16
    return found


def test_every_answer_has_one_whole_record_however_many_processes_there_are(
    whole: list[Record], tmp_path: Path
) -> None:
    cases = read_cases(BENCH, None)
    assert len(whole) == total(BENCH, cases) == 16
    for one in whole:
        assert (one.world, one.agreement, one.finish_reason) == ("simulated", EXACT, "length")
        assert (one.new_tokens, one.tokens_per_s) == (12, 11 / one.decode_s)
        assert min(one.network_bytes, one.energy_j, one.events, one.rows, one.tau_s) > 0
    ordered = in_order(BENCH, cases, whole[::-1])
    assert [one.key[:4] for one in ordered] == [
        (place, name, prompt, temperature)
        for place in ("boards", "a Pi")
        for temperature in (0.0, 1.0)
        for prompt in ("1", "2")
        for name in ("ar", "small")
    ]
    step = Steps()
    assert in_order(BENCH, cases, finish(BENCH, tmp_path, 2, step)) == ordered
    assert in_order(BENCH, cases, read_records(tmp_path / RESULTS, Record)) == ordered
    assert step.answers == 16


@pytest.mark.parametrize(("left", "half"), [(0, 200), (3, 1)])
def test_a_run_goes_on_where_it_was_even_after_half_a_line(
    whole: list[Record], tmp_path: Path, left: int, half: int
) -> None:
    open_out(BENCH, tmp_path)
    write_records(tmp_path / RESULTS, whole)
    lines = (tmp_path / RESULTS).read_text().splitlines(keepends=True)
    text = "".join(lines[:left]) + (lines[left][:half])
    (tmp_path / RESULTS).write_text(text)
    step = Steps()
    found = finish(BENCH, tmp_path, step=step)
    assert step.answers == 16 - left
    assert found == whole, "what heads learnt is the same, too"
    assert (tmp_path / RESULTS).read_text() == "".join(lines)


def test_an_interruption_leaves_what_is_done_on_disk(whole: list[Record], tmp_path: Path) -> None:
    def interrupt(text: str, answers: int) -> None:
        raise KeyboardInterrupt  # the first of two in a task, then the other

    for done in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            run_simulated(BENCH, read_cases(BENCH, None), open_out(BENCH, tmp_path), tmp_path, 1, interrupt)
        assert read_records(tmp_path / RESULTS, Record) == whole[:done]


def test_records_of_several_writers_at_once_are_all_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    long = [record("ar", str(at) * 20_000, 1, 1.0) for at in range(8)]  # of several writes each
    with ThreadPoolExecutor(len(long)) as pool:
        list(pool.map(lambda one: [write_records(path, [one]) for _ in range(20)], long))
    found = read_records(path, Record)
    assert len(found) == 20 * len(long)
    assert all(found.count(one) == 20 for one in long)


def test_records_that_are_appended_never_stick_to_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    one, two = record("ar", "a", 1, 1.0), record("ar", "b", 1, 1.0)
    for before in ("", '{"half', json.dumps("x" * 10_000)[:-1]):
        path.write_text(before)
        write_records(path, [one])
        with path.open("a") as file:
            file.write('{"method": "ar", "prom')
        assert read_records(path, Record) == [one]
        write_records(path, [two])
        assert read_records(path, Record) == [one, two]
    with pytest.raises(InputError, match=r"expected a file that can be written \(Is a directory\)"):
        write_records(tmp_path, [one])
    for text in ('{"a": 1}\n', "[]\n", "nonsense\n", "\x00\n", path.read_text().replace('"exact"', '"near"')):
        path.write_text(text)
        with pytest.raises(InputError, match=r"r\.jsonl: expected (results|answers)"):
            read_records(path, Record)


def test_the_folder_of_another_experiment_is_refused_with_what_is_different(tmp_path: Path) -> None:
    open_out(BENCH, tmp_path)
    assert open_out(bench_with(new_tokens=13), tmp_path) == [], "without results it is anybody's"
    open_out(BENCH, tmp_path)
    write_records(tmp_path / RESULTS, [record("ar", "a", 1, 1.0)])
    narrow = replace(BENCH.testbeds[0], link=replace(BENCH.testbeds[0].link, bandwidth_mbps=100))
    fewer = bench_with(setups=SETUPS[:1])
    for changed, to_be_tuned, what in (
        (bench_with(new_tokens=13), True, "new_tokens: expected 12, got 13"),
        (bench_with(temperatures=(0.0, 0.5)), False, "temperatures 2:"),
        (
            bench_with(testbeds=(narrow, BENCH.testbeds[1])),
            False,
            "testbeds 1 link bandwidth_mbps:",
        ),
        (
            bench_with(setups=(SETUPS[0], replace(SETUPS[1], options={}))),
            False,
            "setups small options",
        ),
        (fewer, True, "methods: expected ar, small, got ar"),
    ):
        with pytest.raises(InputError, match=rf"--out: .* another experiment \({what}") as caught:
            open_out(changed, tmp_path, to_be_tuned=to_be_tuned)
        assert "\n" not in str(caught.value)
    tuned = Setup(name="tree-sd tuned", method="tree-sd", testbeds=("boards",))
    more = bench_with(setups=(*SETUPS, tuned))
    assert len(open_out(more, tmp_path)) == 1, "it may come back with more methods"
    with pytest.raises(InputError, match=r"methods: expected ar, small, tree-sd tuned, got ar, small"):
        open_out(BENCH, tmp_path)
    assert len(open_out(BENCH, tmp_path, to_be_tuned=True)) == 1
    for text in ("{", "[]", "{}"):
        (tmp_path / EXPERIMENT).write_text(text)
        with pytest.raises(InputError, match="expected what an earlier run wrote"):
            open_out(BENCH, tmp_path)


def test_what_is_pending_follows_methods_to_their_testbeds() -> None:
    only = Setup(name="small", method="tree-sd", testbeds=("a Pi",))
    bench = bench_with(setups=(SETUPS[0], replace(SETUPS[1], testbeds=("boards",)), only))
    cases = read_cases(bench, None)
    works = list(pending(bench, cases, set()))
    assert [one.case for one in works] == [case for case in cases for _ in bench.testbeds]
    assert [(place.name, setup.method) for one in works[:2] for place, setup in one.jobs] == [
        ("boards", "ar"),
        ("boards", "continuous"),
        ("a Pi", "ar"),
        ("a Pi", "tree-sd"),
    ]
    done = {
        (place.name, setup.name, one.case.prompt_id, one.case.sampling.temperature, one.case.sampling.seed, 0)
        for one in works
        for place, setup in one.jobs
    }
    assert total(bench, cases) == len(done) == 16
    (rest,) = pending(bench, cases, done - {("a Pi", "small", "2", 0.0, 0, 0)})
    assert rest.jobs == ((bench.testbeds[1], only),)


def test_heads_learn_from_the_first_case_and_one_from_the_middle_with_the_first_seed() -> None:
    bench = synthetic(limit=5, seeds=(7, 8))
    cases = read_cases(bench, None)

    def learnt(count: int = 2) -> list[tuple[str, float, int]]:
        found = warm_up_cases(bench, cases, count)
        return [(case.prompt_id, case.sampling.temperature, case.sampling.seed) for case in found]

    assert learnt() == [("1", 0.0, 0), ("3", 0.0, 0), ("1", 1.0, 7), ("3", 1.0, 7)]
    assert learnt(1) == [("1", 0.0, 0), ("1", 1.0, 7)]
    assert warm_up_cases(structs.replace(bench, nothing_learnt=True), cases) == []


def answered(
    prompts: Sequence[object], monkeypatch: pytest.MonkeyPatch, **changes: object
) -> list[PlainCase]:
    """Cases of the bundled model, which is not asked."""
    monkeypatch.setattr("flowspec.bench.plain._Answers.answer", lambda *_: (7, 8))
    plain = {
        "model": BUNDLED,
        "drafters": (BUNDLED,),
        "prompts": tuple(str(path) for path in prompts),
        "temperatures": (0.0,),
        "limit": None,
    }
    return read_cases(synthetic(**(plain | changes)), None)


def write_prompts(path: Path, *domains: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    prompts = enumerate(domains, 1)
    rows = [{"question_id": at, "category": domain, "turns": ["Hello"]} for at, domain in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_limit_spreads_over_the_domains_of_each_file_and_prompts_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write_prompts(tmp_path / "one.jsonl", "a", "a", "a", "b", "b", "c")
    two = write_prompts(tmp_path / "two.jsonl", "d")
    same = write_prompts(tmp_path / "x" / "one.jsonl", "a")

    def ids(limit: int | None, *paths: Path) -> list[str]:
        return [case.prompt_id for case in answered(paths, monkeypatch, limit=limit)]

    assert ids(3, one) == ["1", "4", "6"]
    assert ids(4, one) == ["1", "2", "4", "6"]
    assert len(ids(600, one)) == len(ids(None, one)) == 6
    assert ids(2, one, two) == ["one 1", "one 4", "two 1"]
    assert ids(2, one, one) == ["1", "4"], "a file that is named twice is taken once"
    assert ids(1, one, same) == [f"{one} 1", f"{same} 1"]
    one.write_text(one.read_text() * 2)
    with pytest.raises(InputError, match=r"one\.jsonl: question_id: .* '1' 2 times"):
        ids(1, one)
    with pytest.raises(InputError, match=r"no\.jsonl: .*No such file"):
        ids(1, tmp_path / "no.jsonl")


def test_what_does_not_fit_the_context_is_refused_before_anything_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_prompts(tmp_path / "one.jsonl", "a")
    path.write_text(path.read_text().replace("Hello", "Hello " * 40))
    (case,) = answered((path,), monkeypatch)
    assert len(answered((path,), monkeypatch, context=len(case.prompt) + 12)) == 1
    monkeypatch.setattr("flowspec.bench.plain._Answers.answer", lambda *_: pytest.fail("it was asked"))
    bench = synthetic(model=BUNDLED, drafters=(BUNDLED,), prompts=(str(path),), context=40)
    with pytest.raises(InputError, match=rf"prompt 1 has {len(case.prompt)} tokens, .* context of 40"):
        read_cases(bench, None)
    with pytest.raises(InputError, match=r"64 tokens, .* context of 75"):
        read_cases(synthetic(context=75), None)
    assert read_cases(synthetic(context=76), None)


def test_an_error_of_a_worker_is_its_own() -> None:
    works = list(pending(BENCH, read_cases(BENCH, None), set()))
    bad = bench_with(model="/no/such/model", drafters=("ngram",))
    with (
        pytest.raises(InputError, match="/no/such/model"),
        open_workers(bad, [], 2, VirtualRuns.records) as run,
    ):
        list(run(works))


PROMPTS = [
    Prompt(prompt_id=str(number), domain=domain, turns=(text,))
    for number, (domain, text) in enumerate([("a", "1 2"), ("b", "3")])
]


def cases_of(cache: Path | None, new_tokens: int = 6) -> list[PlainCase]:
    return plain_cases(ModelFiles(BUNDLED), PROMPTS, make_samplings((0.0, 1.0), (3,)), new_tokens, cache)


def test_answers_that_are_kept_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "answers.json"
    found = cases_of(cache)
    found_as = [f"{case.prompt_id} {case.sampling.temperature}" for case in found]
    assert found_as == ["0 0.0", "1 0.0", "0 1.0", "1 1.0"]
    assert all(len(case.answer) == 6 or case.is_stopped for case in found)
    kept = cache.read_text()
    assert len(json.loads(kept)) == 4
    monkeypatch.setattr(StepByStep, "generate", lambda *_: pytest.fail("an answer was made again"))
    assert cases_of(cache) == found
    assert cache.read_text() == kept
    with pytest.raises(pytest.fail.Exception, match="made again"):
        cases_of(cache, new_tokens=7)


def test_an_interruption_keeps_the_answers_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    generate = StepByStep.generate

    def twice(*args: object) -> tuple[int, ...]:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(1)
        return generate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(StepByStep, "generate", twice)
    with pytest.raises(KeyboardInterrupt):
        cases_of(tmp_path / "answers.json")
    assert len(json.loads((tmp_path / "answers.json").read_text())) == 2
    made.clear()
    assert len(cases_of(tmp_path / "answers.json")) == 4
    assert len(made) == 2


@pytest.mark.parametrize("text", ['{"a": [1.5]}', "[]", "{"])
def test_a_file_that_holds_no_answers_is_no_cache(tmp_path: Path, text: str) -> None:
    (tmp_path / "answers.json").write_text(text)
    with pytest.raises(InputError, match=r"answers\.json:"):
        cases_of(tmp_path / "answers.json")
    assert (tmp_path / "answers.json").read_text() == text
