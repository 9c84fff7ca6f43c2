"""Running experiments: complete, resumed after anything, the same however many processes there are, and never
in another one's folder. Plain answers are made once and kept in a file.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from flowspec.bench.cases import PlainCase, Prompt, make_samplings, plain_cases, read_cases, warm_up_cases
from flowspec.bench.engine import Engine, all_keys, in_order, open_pool, open_workers, run_simulated, works_of
from flowspec.bench.experiment import Experiment, Setup
from flowspec.bench.records import (
    EXACT,
    EXPERIMENT,
    RESULTS,
    Record,
    hold_folder,
    open_folder,
    read_records,
    write_records,
)
from flowspec.errors import FlowSpecError, InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.step_by_step import StepByStep
from tests.bench.benches import Steps, boards, synthetic
from tests.bench.records import record

SETUPS = (
    Setup(name="ar", method="ar"),
    Setup(name="small", method="continuous", options={"segment_nodes": 8}),
)
TINY = synthetic(setups=SETUPS, testbeds=(boards(2), boards(1, "raspberry-pi-5", "a Pi")))
CASES = read_cases(TINY, None)
changed = partial(structs.replace, TINY)


def finish(out: Path, jobs: int = 1) -> tuple[list[Record], Steps]:
    """All records, and what was done for those that were missing."""
    open_folder(TINY, out)
    step = Steps()
    records = run_simulated(TINY, CASES, read_records(out / RESULTS, Record), out, jobs, step)
    return records, step  # type: ignore[return-value]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The records of a run that nothing interrupted, in its order."""
    out = tmp_path_factory.mktemp("whole") / "deep" / "er"
    found, step = finish(out)
    assert read_records(out / RESULTS, Record) == found
    assert step.told == [("answers", 1)] * 16
    return found


def test_every_answer_has_one_whole_record_however_many_processes_there_are(
    whole: list[Record], tmp_path: Path
) -> None:
    assert len(whole) == len(all_keys(TINY, CASES)) == 16
    for one in whole:
        assert (one.world, one.agreement, one.finish_reason) == ("simulated", EXACT, "length")
        assert (one.new_tokens, one.tokens_per_s) == (12, 11 / one.decode_s)
        assert min(one.network_bytes, one.energy_j, one.events, one.rows, one.tau_s) > 0
    ordered = in_order(TINY, CASES, whole[::-1])
    assert [one.key[:4] for one in ordered] == [
        (place, name, prompt, temperature)
        for place in ("boards", "a Pi")
        for temperature in (0.0, 1.0)
        for prompt in ("1", "2")
        for name in ("ar", "small")
    ]
    found, step = finish(tmp_path, jobs=2)
    for some in (found, read_records(tmp_path / RESULTS, Record)):
        assert in_order(TINY, CASES, some) == ordered
    assert step.answers == 16


def test_a_run_goes_on_where_it_was_even_after_half_a_line(whole: list[Record], tmp_path: Path) -> None:
    def interrupt(text: str, answers: int) -> None:
        raise KeyboardInterrupt  # the first of two in a task, then the other

    path = tmp_path / RESULTS
    open_folder(TINY, tmp_path)
    for done in range(3):
        with pytest.raises(KeyboardInterrupt):
            run_simulated(TINY, CASES, whole[:done], tmp_path, 1, interrupt)
        assert read_records(path, Record) == whole[: done + 1], "it is on disk before anybody hears of it"
    text = path.read_text()
    for half in (1, 200):
        path.write_text(text + text[:half])
        found, step = finish(tmp_path)
        assert step.answers == 13
        assert found == read_records(path, Record) == whole, "what heads learnt is the same, too"


def test_records_are_whole_whoever_writes_and_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    long = [record("ar", str(at) * 20_000, 1, 1.0) for at in range(8)]  # of several writes each
    with ThreadPoolExecutor(len(long)) as pool:
        list(pool.map(lambda one: write_records(path, [one]), long * 20))
    found = read_records(path, Record)
    assert len(found) == 20 * len(long)
    assert all(found.count(one) == 20 for one in long)
    one, two = record("ar", "a", 1, 1.0), record("ar", "b", 1, 1.0)
    for before in ("", '{"half', json.dumps("x" * 10_000)[:-1]):
        path.write_text(before)
        write_records(path, [one])
        with path.open("a") as file:
            file.write('{"method": "ar", "prom')
        assert read_records(path, Record) == [one]
        write_records(path, [two])
        assert read_records(path, Record) == [one, two]
    for place, reason in ((tmp_path, "Is a directory"), (Path("/dev/full"), "No space left on device")):
        with pytest.raises(InputError, match=rf"expected a file that can be written \({reason}\)"):
            write_records(place, [one])
    for text in ('{"a": 1}\n', "[]\n", "nonsense\n", "\x00\n", path.read_text().replace('"exact"', '"near"')):
        path.write_text(text)
        with pytest.raises(InputError, match=r"r\.jsonl: expected results"):
            read_records(path, Record)


def test_the_folder_of_another_experiment_is_refused_with_what_is_different(tmp_path: Path) -> None:
    open_folder(TINY, tmp_path)
    open_folder(changed(new_tokens=13), tmp_path)  # without results it is anybody's
    open_folder(TINY, tmp_path, "flowspec bench")
    write_records(tmp_path / RESULTS, [record("ar", "a", 1, 1.0)])
    narrow = replace(TINY.testbeds[0], link=replace(TINY.testbeds[0].link, bandwidth_mbps=100))
    for other, what in (
        (changed(new_tokens=13), "new_tokens: expected 12, got 13"),
        (changed(temperatures=(0.0, 0.5)), "temperatures 2:"),
        (changed(testbeds=(narrow, TINY.testbeds[1])), "testbeds 1 link bandwidth_mbps:"),
        (changed(setups=(SETUPS[0], replace(SETUPS[1], options={}))), "setups small options"),
        (changed(setups=SETUPS[:1]), "methods: expected ar, small, got ar"),
    ):
        expected = rf"--out: .* another experiment \({what}.*; go on with those by: flowspec bench;"
        with pytest.raises(InputError, match=expected) as caught:
            open_folder(other, tmp_path)
        assert "\n" not in str(caught.value)
    tuned = Setup(name="tree-sd tuned", method="tree-sd", testbeds=("boards",))
    open_folder(changed(setups=(*SETUPS, tuned)), tmp_path)  # it may come back with more methods
    with pytest.raises(InputError, match=r"methods: expected ar, small, tree-sd tuned, got ar, small"):
        open_folder(TINY, tmp_path)
    for text in ("{", "[]", "{}"):
        (tmp_path / EXPERIMENT).write_text(text)
        with pytest.raises(InputError, match="expected what an earlier run wrote"):
            open_folder(TINY, tmp_path)


def test_one_run_at_a_time_has_a_folder(tmp_path: Path) -> None:
    open_folder(TINY, tmp_path)
    with hold_folder(tmp_path), pytest.raises(InputError, match="another run is in"), hold_folder(tmp_path):
        pass
    with hold_folder(tmp_path):
        open_folder(TINY, tmp_path)


def test_more_users_than_answers_are_refused() -> None:
    with pytest.raises(InputError, match="9 users have 2 answers to wait for"):
        works_of(changed(users=(1, 9)), CASES)


def test_what_is_to_be_run_follows_methods_to_their_testbeds() -> None:
    only = Setup(name="small", method="tree-sd", testbeds=("a Pi",))
    some = changed(setups=(SETUPS[0], replace(SETUPS[1], testbeds=("boards",)), only))
    works = works_of(some, CASES)
    assert [one.case for one in works] == [case for case in CASES for _ in some.testbeds]
    methods = [(place.name, setup.method) for one in works[:2] for place, setup in one.jobs]
    assert methods[:2] == [("boards", "ar"), ("boards", "continuous")]
    assert methods[2:] == [("a Pi", "ar"), ("a Pi", "tree-sd")]
    keys = frozenset(all_keys(some, CASES))
    assert len(keys) == 16
    assert not works_of(some, CASES, keys)
    (rest,) = works_of(some, CASES, keys - {("a Pi", "small", "2", 0.0, 0, 0)})
    assert rest.jobs == ((some.testbeds[1], only),)


def test_heads_learn_from_the_first_case_and_one_from_the_middle_with_the_first_seed() -> None:
    cases = read_cases(synthetic(limit=5, seeds=(7, 8)), None)
    for count, prompts in ((2, "13"), (1, "1")):
        found = [(case.prompt_id, case.sampling.seed) for case in warm_up_cases(cases, count)]
        assert found == [(prompt, seed) for seed in (0, 7) for prompt in prompts]


def leave(status: int) -> None:
    os._exit(status)


def test_an_error_of_a_worker_is_its_own_and_one_that_ends_early_is_one_line() -> None:
    bad = partial(Engine, changed(model="/no/such/model", drafters=("ngram",)), [])
    with pytest.raises(InputError, match="/no/such/model"), open_workers(bad, 2) as run:
        list(run(Engine.records, works_of(TINY, CASES)))
    with pytest.raises(FlowSpecError, match="a worker process ended"), open_pool(1) as pool:
        pool.submit(leave, 3).result()


# ------------------------------------------------------------------------------------------ prompts


def bundled(*prompts: Path, limit: int | None = None, context: int = 1024) -> Experiment:
    return synthetic(
        model=BUNDLED,
        drafters=(BUNDLED,),
        prompts=tuple(map(str, prompts)),
        temperatures=(0.0,),
        limit=limit,
        context=context,
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the model was asked, which answers the same to everything."""
    made: list[object] = []

    def answer(*ask: object) -> tuple[int, ...]:
        made.append(ask)
        return (7, 8)

    monkeypatch.setattr(StepByStep, "load", lambda *model: SimpleNamespace(generate=answer))
    return made


def write_prompts(path: Path, *domains: str, text: str = "Hello") -> Path:
    path.parent.mkdir(exist_ok=True)
    rows = [{"question_id": at, "category": each, "turns": [text]} for at, each in enumerate(domains, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.usefixtures("asked")
def test_a_limit_spreads_over_the_domains_of_each_file_and_prompts_are_named_apart(tmp_path: Path) -> None:
    one = write_prompts(tmp_path / "one.jsonl", "a", "a", "a", "b", "b", "c")
    two = write_prompts(tmp_path / "two.jsonl", "d")
    same = write_prompts(tmp_path / "x" / "one.jsonl", "a")

    def ids(limit: int | None, *paths: Path) -> list[str]:
        return [case.prompt_id for case in read_cases(bundled(*paths, limit=limit), None)]

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
    tmp_path: Path, asked: list[object]
) -> None:
    path = write_prompts(tmp_path / "one.jsonl", "a", text="Hello " * 40)
    (case,) = read_cases(bundled(path), None)
    length = len(case.prompt)
    assert len(read_cases(bundled(path, context=length + 12), None)) == 1
    asked.clear()
    for tight, said in (
        (bundled(path, context=40), rf"prompt 1 has {length} tokens, .* context of 40"),
        (synthetic(context=75), r"64 tokens, .* context of 75"),
    ):
        with pytest.raises(InputError, match=said):
            read_cases(tight, None)
    assert not asked
    assert read_cases(synthetic(context=76), None)


PROMPTS = [Prompt(prompt_id=name, domain=name, turns=(text,)) for name, text in (("a", "1 2"), ("b", "3"))]


def cases_of(cache: Path | None, new_tokens: int = 6) -> list[PlainCase]:
    return plain_cases(ModelFiles(BUNDLED), PROMPTS, make_samplings((0.0, 1.0), (3,)), new_tokens, cache)


def test_answers_are_made_once_though_interrupted_and_kept_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, generate, made = tmp_path / "answers.json", StepByStep.generate, list[int]()

    def twice(*args: object) -> tuple[int, ...]:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(1)
        return generate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(StepByStep, "generate", twice)
    with pytest.raises(KeyboardInterrupt):
        cases_of(cache)
    assert len(json.loads(cache.read_text())) == 2
    made.clear()
    found = cases_of(cache)
    assert len(made) == 2
    names = [f"{case.prompt_id} {case.sampling.temperature:g}" for case in found]
    assert names == ["a 0", "b 0", "a 1", "b 1"]
    assert all(len(case.answer) == 6 or case.is_stopped for case in found)
    kept = cache.read_text()
    assert cases_of(cache) == found
    assert cache.read_text() == kept
    with pytest.raises(KeyboardInterrupt):
        cases_of(cache, new_tokens=7)
    for text in ('{"a": [1.5]}', "[]", "{"):
        cache.write_text(text)
        with pytest.raises(InputError, match=r"answers\.json:"):
            cases_of(cache)
        assert cache.read_text() == text
