"""Loads in virtual time: a closed loop of users, exact, resumable, and told in right figures; and loads that
change in steps, with users who come and go, and drafters that are slow, lost and back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from flowspec.bench import simulated
from flowspec.bench.bench import read_cases
from flowspec.bench.config import AR, Bench, DeclaredDrafter, LoadStep, Setup
from flowspec.bench.load import LoadAnswer, LoadRecord, drawn, run_load
from flowspec.bench.load_runs import LoadWork, loads_of
from flowspec.bench.load_steps import (
    BINS,
    StepsRecord,
    dealt,
    run_step_load,
    starts_of,
)
from flowspec.bench.load_summary import figures, jain
from flowspec.bench.outcome import EXACT, WRONG, read_records, write_records
from flowspec.bench.synthetic import synthetic_cases
from flowspec.bench.virtual_runs import VirtualRuns
from flowspec.cli.main import main
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.sim.language import AnswerLanguage
from tests.bench.benches import STEPS, TOML, boards, synthetic

OURS = Setup(name="continuous", method="continuous")
CASES = synthetic_cases(7, [Sampling()], 10)
LOAD = TOML.replace("temperatures = [0, 1]", "users = [1, 3]\nanswers = 5").replace(
    "new_tokens = 12", "new_tokens = 4"
)


def load(users: int, setup: Setup = OURS) -> LoadRecord:
    (record,) = loads_of(
        VirtualRuns(synthetic(), CASES[:1]),
        LoadWork(users=users, cases=tuple(CASES), jobs=((boards(), setup),)),
    )
    return record


@pytest.mark.parametrize(
    ("setup", "users"),
    [(OURS, 1), (OURS, 3), (Setup(name=AR, method=AR), 3)],
    ids=lambda each: str(each)[:20],
)
def test_users_ask_the_next_prompt_the_moment_the_last_one_is_answered(setup: Setup, users: int) -> None:
    record = load(users, setup)
    assert [answer.prompt_id for answer in record.answers] == [case.prompt_id for case in CASES]
    assert {answer.agreement for answer in record.answers} == {EXACT}
    assert [answer.asked_s for answer in record.answers[:users]] == [0.0] * users
    for user in range(users):
        own = [answer for answer in record.answers if answer.user == user]
        assert [later.asked_s for later in own[1:]] == [answer.last_s for answer in own[:-1]]
    for answer in record.answers:
        assert sum(other.asked_s <= answer.asked_s < other.last_s for other in record.answers) == users
    assert record.key == ("boards", setup.name, users, 0.0, 0)
    assert all(0 < share <= 1 for share in record.stage_busy)


def test_an_answer_that_is_not_the_plain_one_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def tampered(answers: Any) -> AnswerLanguage:
        changed = dict(answers)
        changed[CASES[4].prompt] = (*CASES[4].answer[:-1], CASES[4].answer[-1] ^ 1)
        return AnswerLanguage(changed)

    monkeypatch.setattr(simulated, "AnswerLanguage", tampered)
    record = run_load(synthetic(), boards(), Setup(name=AR, method=AR), 2, CASES, [{}] * len(CASES))
    assert [answer.agreement == WRONG for answer in record.answers] == [False] * 4 + [True, False, False]


def test_prompts_are_dealt_like_cards() -> None:
    dealt = drawn(CASES, 16, 3)
    for deck in (dealt[:7], dealt[7:14]):
        assert sorted(case.prompt_id for case in deck) == sorted(case.prompt_id for case in CASES)
    assert drawn(CASES, 16, 3) == dealt != drawn(CASES, 16, 4)


def made(method: str, users: int, seconds: Sequence[float], *, drafters: int = 1) -> LoadRecord:
    """A load in which someone waits each of `seconds` for ten tokens, and then as long for the next."""
    answers = [
        LoadAnswer(
            user=user,
            prompt_id=f"{user}{turn}",
            domain="made",
            asked_s=turn * each_s,
            first_s=turn * each_s + 0.5,
            last_s=(turn + 1) * each_s,
            new_tokens=10,
            agreement=EXACT,
        )
        for turn in range(2)
        for user, each_s in enumerate(seconds)
    ]
    return LoadRecord(
        experiment="by hand",
        world="simulated",
        testbed="boards",
        method=method,
        users=users,
        temperature=0.0,
        seed=0,
        drafters=drafters,
        answers=answers,
        stage_busy=[0.5, 0.25],
        board_busy=[0.0, 0.125],
        network_bytes=400,
        energy_j=80.0,
        events=1,
        digest="00",
    )


def test_figures_are_what_they_say() -> None:
    record = made("a", 2, (1.0, 3.0))
    found = figures(record, made("a", 1, (0.5, 1.5)))
    assert found["tokens_per_s"] == pytest.approx(40 / 6)
    assert (found["latency_s"], found["latency_p95_s"]) == (2.0, pytest.approx(3.0))
    assert (found["first_token_s"], found["token_s"]) == (0.5, pytest.approx(0.2))
    assert found["fairness"] == pytest.approx((10 + 10 / 3) ** 2 / (2 * (10**2 + (10 / 3) ** 2)))
    assert found["fairness_to_alone"] == pytest.approx(1), (
        "who has the longer answers is not treated unfairly"
    )
    assert (figures(record)["fairness_to_alone"], found["wrong"]) == (None, 0)
    assert (found["energy_j_per_token"], found["network_bytes_per_token"]) == (2.0, 10.0)
    assert [jain(of) for of in ([2.0, 2.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0])] == pytest.approx([1, 0.25, 1])


@pytest.mark.parametrize(("text", "picture"), [(LOAD, "load.png"), (STEPS, "steps.png")])
def test_the_command_writes_loads_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, picture: str
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "load.toml").write_text(text.replace("new_tokens = 8", "new_tokens = 4"))
    out = tmp_path / "out"
    asked = ["bench", "--experiment", str(tmp_path / "load.toml"), "--out", str(out), "--json", "--jobs", "1"]
    assert main(asked) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["answers"] > 0
    assert summary["wrong"] == 0
    kept = {"experiment.json", "loads.jsonl", "report.html", "summary.json", "summary.md"}
    assert {path.name for path in out.iterdir()} == kept | {picture}
    path = out / "loads.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:50])
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)
    kind: Any = StepsRecord if text == STEPS else LoadRecord
    write_records(tmp_path / "again.jsonl", read_records(path, kind))
    assert (tmp_path / "again.jsonl").read_text() == path.read_text()
    path.write_text(json.dumps({**json.loads(lines[0]), "more": 1}) + "\n")
    with pytest.raises(InputError, match="results of this version"):
        read_records(path, kind)


SINGLE = Setup(name="continuous", method="continuous", drafters=("all",))
TEAM = Setup(name="cosine", method="cosine", drafters=("all", "code", "plays"))
DECLARED = (
    DeclaredDrafter(name="all", acceptance={"code": 0.5, "plays": 0.5}),
    DeclaredDrafter(name="code", acceptance={"code": 0.8, "plays": 0.3}),
    DeclaredDrafter(name="plays", acceptance={"code": 0.3, "plays": 0.8}),
)
IN_STEPS = (LoadStep(users=1, seconds=1.0), LoadStep(users=3, seconds=1.0), LoadStep(users=2, seconds=1.0))


def experiment(*steps: LoadStep, **changes: Any) -> Bench:
    plain: dict[str, Any] = {
        "setups": (SINGLE, TEAM),
        "drafters": tuple(each.name for each in DECLARED),
        "declared": DECLARED,
        "acceptance": 0.0,
        "temperatures": (0.0,),
        "limit": 12,
        "new_tokens": 10,
        "steps": steps or IN_STEPS,
        "silent_s": 0.5,
    }
    return synthetic(**(plain | changes))


def run(bench: Bench, setup: Setup) -> StepsRecord:
    runs = VirtualRuns(bench, ())
    return run_step_load(bench, boards(), setup, read_cases(bench, None), partial(runs.drafters, setup))


@pytest.fixture(scope="module")
def both() -> dict[str, StepsRecord]:
    return {setup.name: run(experiment(), setup) for setup in (SINGLE, TEAM)}


def test_in_each_step_so_many_users_ask_and_who_goes_waits_for_the_answer(
    both: dict[str, StepsRecord],
) -> None:
    record = both["cosine"]
    assert {answer.agreement for answer in record.answers} == {EXACT}
    starts = starts_of(IN_STEPS)
    for answer in record.answers:
        step, start_s, end_s = IN_STEPS[answer.step], starts[answer.step], starts[answer.step + 1]
        assert answer.user < step.users
        assert start_s <= answer.asked_s < end_s
        under_way = [other for other in record.answers if other.asked_s <= answer.asked_s < other.last_s]
        assert step.users <= len(under_way) <= 3
        assert len({other.user for other in under_way}) == len(under_way), "a user asks twice at once"
    first = [answer for answer in record.answers if answer.step == 1 and answer.turn == 0]
    assert sorted(answer.user for answer in first) == [0, 1, 2]
    assert all(answer.asked_s == starts[1] for answer in first if answer.user > 0)
    assert max(answer.last_s for answer in record.answers) > starts[-1], "the last ones are waited for"
    one, other = (
        {(each.step, each.user, each.turn): each.prompt_id for each in record.answers}
        for record in both.values()
    )
    assert len(one.keys() & other.keys()) > 3
    assert all(one[key] == other[key] for key in one.keys() & other.keys()), "whatever the setup"
    assert all(0 < share <= 1 for span in record.spans for share in span.stage_busy)


def test_nobody_is_given_what_another_has_and_domains_take_turns() -> None:
    cases = read_cases(experiment(limit=24), None)
    for turn in range(8):
        given = [dealt(cases, 4, 0, user, turn) for user in range(4)]
        assert len({case.prompt_id for case in given}) == 4
        assert [case.domain for case in given] == [["code", "plays"][(user + turn) % 2] for user in range(4)]
    own = [dealt(cases, 4, 0, 0, turn).prompt_id for turn in range(6)]
    assert len(set(own)) == 6
    assert own != [dealt(cases, 4, 1, 0, turn).prompt_id for turn in range(6)]


def test_a_drafter_is_slow_lost_and_back_as_the_steps_say() -> None:
    whole = LoadStep(users=2, seconds=3.0)
    slowed, without = structs.replace(whole, slow={"all": 50.0}), structs.replace(whole, lost=("all",))
    bench = experiment(whole, slowed, without, whole)
    record = run(bench, SINGLE)
    assert {answer.agreement for answer in record.answers} == {EXACT}
    usual, slow, lost, back = (span.asked["all"] for span in record.spans)
    assert 0 < sum(slow) < 0.5 * sum(usual)
    silent = int(BINS * bench.silent_s / whole.seconds) + 1
    assert sum(lost[silent:]) == 0
    assert sum(back) > 0.5 * sum(usual)
    rates = [sum(span.tokens) for span in record.spans]
    assert rates[2] < 0.8 * rates[0]
    assert rates[3] > 0.8 * rates[0]
