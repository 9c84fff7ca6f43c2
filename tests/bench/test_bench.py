"""Running experiments: complete, resumed after anything, the same however many processes there are, and never
in another one's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.bench import bench as bench_module
from flowspec.bench import virtual_runs, workers
from flowspec.bench.bench import (
    RESULTS,
    TUNED_FILE,
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
from flowspec.bench.plain import PlainCase
from flowspec.bench.virtual_runs import VirtualRuns, Work, open_workers
from flowspec.errors import FlowSpecError, InputError
from flowspec.model.files import BUNDLED
from tests.bench.benches import boards, synthetic
from tests.bench.records import record

SETUPS = (
    Setup(name="ar", method="ar"),
    Setup(name="small", method="continuous", options={"segment_nodes": 8}),
)
BENCH = synthetic(setups=SETUPS, testbeds=(boards(2), boards(1, "raspberry-pi-5", "a Pi")))


class Steps:
    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def __call__(self, text: str, answers: int) -> None:
        self.told.append((text, answers))


def finish(bench: Bench, out: Path, jobs: int = 1, step: Steps | None = None) -> list[Record]:
    done = open_out(bench, out)
    return run_simulated(bench, read_cases(bench, None), done, out, jobs, step or Steps())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The records of a run that nothing interrupted, in its order."""
    out = tmp_path_factory.mktemp("whole") / "deep" / "er"
    step = Steps()
    found = finish(BENCH, out, step=step)
    assert read_records(out / RESULTS) == found
    assert step.told == [("answers", 1)] * 16
    return found


def test_every_answer_has_one_whole_record(whole: list[Record]) -> None:
    assert len(whole) == total(BENCH, read_cases(BENCH, None)) == 16
    assert len({one.key for one in whole}) == 16
    assert {one.key[:4] for one in whole} == {
        (place, name, prompt, temperature)
        for place in ("boards", "a Pi")
        for name in ("ar", "small")
        for prompt in ("1", "2")
        for temperature in (0.0, 1.0)
    }
    for one in whole:
        assert (one.world, one.agreement, one.finish_reason) == ("simulated", EXACT, "length")
        assert (one.new_tokens, one.tokens_per_s) == (12, 11 / one.decode_s)
        assert min(one.network_bytes, one.energy_j, one.events, one.rows, one.tau_s) > 0


def test_two_processes_find_the_same_as_one(whole: list[Record], tmp_path: Path) -> None:
    step = Steps()
    found = finish(BENCH, tmp_path, 2, step)
    cases = read_cases(BENCH, None)
    assert in_order(BENCH, cases, found) == in_order(BENCH, cases, whole)
    assert in_order(BENCH, cases, read_records(tmp_path / RESULTS)) == in_order(BENCH, cases, whole)
    assert sum(answers for _, answers in step.told) == 16
    assert [one.key[:4] for one in in_order(BENCH, cases, whole[::-1])] == [
        (place, name, prompt, temperature)
        for place in ("boards", "a Pi")
        for temperature in (0.0, 1.0)
        for prompt in ("1", "2")
        for name in ("ar", "small")
    ]


@pytest.mark.parametrize(("left", "half"), [(0, 200), (3, 1), (16, 0)])
def test_a_run_goes_on_where_it_was_even_after_half_a_line(
    whole: list[Record], tmp_path: Path, left: int, half: int
) -> None:
    open_out(BENCH, tmp_path)
    write_records(tmp_path / RESULTS, whole)
    lines = (tmp_path / RESULTS).read_text().splitlines(keepends=True)
    text = "".join(lines[:left]) + (lines[left][:half] if left < 16 else "")
    (tmp_path / RESULTS).write_text(text)
    step = Steps()
    found = finish(BENCH, tmp_path, step=step)
    assert sum(answers for _, answers in step.told) == 16 - left
    assert found == whole, "what heads learnt is the same, too"
    assert (tmp_path / RESULTS).read_text() == "".join(lines)


def test_an_interruption_leaves_what_is_done_on_disk(whole: list[Record], tmp_path: Path) -> None:
    def interrupt(text: str, answers: int) -> None:
        raise KeyboardInterrupt  # the first of two in a task, then the other

    for done in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            run_simulated(BENCH, read_cases(BENCH, None), open_out(BENCH, tmp_path), tmp_path, 1, interrupt)
        assert read_records(tmp_path / RESULTS) == whole[:done]


def test_records_of_several_writers_at_once_are_all_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    long = [record("ar", str(at) * 20_000, 1, 1.0) for at in range(8)]  # of several writes each
    with ThreadPoolExecutor(len(long)) as pool:
        list(pool.map(lambda one: [write_records(path, [one]) for _ in range(20)], long))
    found = read_records(path)
    assert len(found) == 20 * len(long)
    assert all(found.count(one) == 20 for one in long)


def test_records_that_are_appended_never_stick_to_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    one, two = record("ar", "a", 1, 1.0), record("ar", "b", 1, 1.0)
    for before in ("", '{"half', json.dumps("x" * 10_000)[:-1]):
        path.write_text(before)
        write_records(path, [one])
        assert read_records(path) == [one]
        with path.open("a") as file:
            file.write('{"method": "ar", "prom')
        assert read_records(path) == [one]
        write_records(path, [two])
        assert read_records(path) == [one, two]
    write_records(path, [])
    assert read_records(path) == [one, two]
    with pytest.raises(InputError, match=r"expected a file that can be written \(Is a directory\)"):
        write_records(tmp_path, [one])


@pytest.mark.parametrize("text", ['{"a": 1}\n', "[]\n", "nonsense\n", "\x00\n", "near-tie"])
def test_a_file_that_holds_no_records_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.jsonl"
    if text == "near-tie":
        write_records(path, [record("ar", "a", 1, 1.0, agreement=text)])
    else:
        path.write_text(text)
    with pytest.raises(InputError, match=r"r\.jsonl: expected (results|answers)"):
        read_records(path)


def test_the_folder_of_another_experiment_is_refused_with_what_is_different(tmp_path: Path) -> None:
    open_out(BENCH, tmp_path)
    write_records(tmp_path / RESULTS, [record("ar", "a", 1, 1.0)])
    narrow = replace(BENCH.testbeds[0], link=replace(BENCH.testbeds[0].link, bandwidth_mbps=100))
    for changed, what in (
        (replace(BENCH, new_tokens=13), "new_tokens: expected 12, got 13"),
        (replace(BENCH, limit=None), "limit:"),
        (replace(BENCH, temperatures=(0.0, 0.5)), "temperatures 2:"),
        (replace(BENCH, testbeds=BENCH.testbeds[:1]), "testbeds:"),
        (replace(BENCH, prompts=("a", "b")), "prompts:"),
        (replace(BENCH, testbeds=(narrow, BENCH.testbeds[1])), "testbeds 1 link bandwidth_mbps:"),
        (replace(BENCH, name="other"), "name:"),
        (replace(BENCH, setups=SETUPS[:1]), "methods:"),
        (replace(BENCH, setups=(SETUPS[0], replace(SETUPS[1], options={}))), "setups small options"),
    ):
        with pytest.raises(InputError, match=rf"--out: .* another experiment \({what}") as caught:
            open_out(changed, tmp_path)
        assert "\n" not in str(caught.value)
    assert len(open_out(BENCH, tmp_path)) == 1, "it is as it was"


def test_an_experiment_may_come_back_with_more_methods(tmp_path: Path) -> None:
    open_out(BENCH, tmp_path)
    write_records(tmp_path / RESULTS, [record("ar", "a", 1, 1.0)])
    tuned = Setup(name="tree-sd tuned", method="tree-sd", testbeds=("boards",))
    more = replace(BENCH, setups=(*SETUPS, tuned))
    assert len(open_out(more, tmp_path)) == 1
    with pytest.raises(InputError, match=r"methods: expected ar, small, tree-sd tuned, got ar, small"):
        open_out(BENCH, tmp_path)
    assert len(open_out(BENCH, tmp_path, to_be_tuned=True)) == 1
    with pytest.raises(InputError, match="new_tokens"):
        open_out(replace(BENCH, new_tokens=13), tmp_path, to_be_tuned=True)
    with pytest.raises(InputError, match="methods: expected ar, small, got ar"):
        open_out(replace(BENCH, setups=SETUPS[:1]), tmp_path, to_be_tuned=True)
    assert len(open_out(more, tmp_path)) == 1


def test_a_folder_without_results_is_anybodys(tmp_path: Path) -> None:
    open_out(BENCH, tmp_path)
    assert open_out(replace(BENCH, new_tokens=13), tmp_path) == []
    assert json.loads((tmp_path / EXPERIMENT).read_text())["new_tokens"] == 13
    (tmp_path / TUNED_FILE).touch()
    with pytest.raises(InputError, match="new_tokens: expected 13, got 12"):
        open_out(BENCH, tmp_path)
    for text in ("{", "[]", "{}"):
        (tmp_path / EXPERIMENT).write_text(text)
        with pytest.raises(InputError, match="expected what an earlier run wrote"):
            open_out(BENCH, tmp_path)
    (tmp_path / EXPERIMENT).unlink()
    with pytest.raises(InputError, match="expected what an earlier run wrote"):
        open_out(BENCH, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"--out: .*/file \(File exists\)"):
        open_out(BENCH, tmp_path / "file")


def test_what_is_pending_follows_methods_to_their_testbeds() -> None:
    only = Setup(name="small", method="tree-sd", testbeds=("a Pi",))
    bench = replace(BENCH, setups=(SETUPS[0], replace(SETUPS[1], testbeds=("boards",)), only))
    cases = read_cases(bench, None)
    assert total(bench, cases) == 16
    works = list(pending(bench, cases, set()))
    assert [(one.number, one.case) for one in works] == [
        each for each in enumerate(cases) for _ in bench.testbeds
    ]
    assert [(place.name, setup.method) for one in works[:2] for place, setup in one.jobs] == [
        ("boards", "ar"),
        ("boards", "continuous"),
        ("a Pi", "ar"),
        ("a Pi", "tree-sd"),
    ]
    done = {
        (place.name, setup.name, one.case.prompt_id, one.case.sampling.temperature, one.case.sampling.seed, 0)
        for one in works[:4]
        for place, setup in one.jobs
    }
    done -= {("a Pi", "small", "2", 0.0, 0, 0)}
    rest = list(pending(bench, cases, done))
    assert [one.number for one in rest] == [1, 2, 2, 3, 3]
    assert rest[0].jobs == ((bench.testbeds[1], only),)


def test_heads_learn_from_the_first_case_and_one_from_the_middle_with_the_first_seed() -> None:
    bench = synthetic(limit=5, seeds=(7, 8))
    cases = read_cases(bench, None)

    def learnt(count: int = 2) -> list[tuple[str, float, int]]:
        found = warm_up_cases(bench, cases, count)
        return [(case.prompt_id, case.sampling.temperature, case.sampling.seed) for case in found]

    assert learnt() == [("1", 0.0, 0), ("3", 0.0, 0), ("1", 1.0, 7), ("3", 1.0, 7)]
    assert learnt(1) == [("1", 0.0, 0), ("1", 1.0, 7)]
    assert warm_up_cases(replace(bench, nothing_learnt=True), cases) == []


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


def write_prompts(path: Path, *domains: str, name: str = "question_id") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "".join(
            json.dumps({name: at, "category": domain, "turns": ["Hello"]}) + "\n"
            for at, domain in enumerate(domains, 1)
        )
    )
    return path


def test_a_limit_spreads_over_the_domains_of_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = write_prompts(tmp_path / "one.jsonl", "a", "a", "a", "b", "b", "c")
    two = write_prompts(tmp_path / "two.jsonl", "d")

    def ids(limit: int | None, *paths: Path) -> list[tuple[str, str]]:
        return [(case.prompt_id, case.domain) for case in answered(paths, monkeypatch, limit=limit)]

    assert ids(3, one) == [("1", "a"), ("4", "b"), ("6", "c")]
    assert ids(4, one) == [("1", "a"), ("2", "a"), ("4", "b"), ("6", "c")]
    assert ids(1, one) == [("1", "a")]
    assert len(ids(6, one)) == len(ids(600, one)) == len(ids(None, one)) == 6
    assert ids(2, one, two) == [("one 1", "a"), ("one 4", "b"), ("two 1", "d")]
    assert ids(2, one, one) == [("1", "a"), ("4", "b")], "a file that is named twice is taken once"


def test_prompts_of_several_files_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write_prompts(tmp_path / "x" / "one.jsonl", "a", "a")
    two = write_prompts(tmp_path / "y" / "one.jsonl", "a", "a")
    found = answered((one, two), monkeypatch)
    assert [case.prompt_id for case in found] == [
        f"{path} {number}" for path in (one, two) for number in (1, 2)
    ]
    one.write_text(one.read_text() * 2)
    with pytest.raises(InputError, match=r"one\.jsonl: question_id: .* '1' 2 times"):
        answered((one,), monkeypatch)
    with pytest.raises(InputError, match=r"no\.jsonl: .*No such file"):
        answered((tmp_path / "no.jsonl",), monkeypatch)


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


def die(do: object, work: Work) -> None:
    os._exit(1)


def test_an_error_of_a_worker_is_its_own_and_one_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = read_cases(BENCH, None)
    works = list(pending(BENCH, cases, set()))
    bad = replace(BENCH, model="/no/such/model", drafters=("ngram",))
    for jobs in (1, 2):
        with (
            pytest.raises(InputError, match="/no/such/model"),
            open_workers(bad, [], jobs, VirtualRuns.records) as run,
        ):
            list(run(works))
    monkeypatch.setattr(virtual_runs, "_do", die)
    with (
        pytest.raises(FlowSpecError, match="a worker process ended") as caught,
        open_workers(BENCH, [], 2, VirtualRuns.records) as run,
    ):
        list(run(works[:2]))
    assert caught.value.exit_status == 1


def test_nothing_is_started_where_nothing_is_missing(
    whole: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ProcessPoolExecutor", lambda *_: pytest.fail("processes for nothing"))
    assert run_simulated(BENCH, read_cases(BENCH, None), whole, tmp_path, 8, Steps()) == whole
    assert bench_module.read_records(tmp_path / RESULTS) == []
