"""Loads in virtual time: a closed loop of users, exact, resumable, and with right figures; and loads that
change in steps, with users who come and go, and drafters that are slow, lost and back.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowspec.bench import simulated
from flowspec.bench.cases import read_cases, synthetic_cases
from flowspec.bench.engine import Engine, Work
from flowspec.bench.experiment import AR, DrafterPlacement, LoadStep, Setup
from flowspec.bench.records import EXACT, WRONG, LoadRecord, read_records, write_records
from flowspec.bench.simulated import Load, LoadedWorld, scheduled_case, shuffle_cases
from flowspec.bench.statistics import jain, load_figures
from flowspec.cli.main import main
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.plan.shape import find_shape
from flowspec.sim.language import AnswerLanguage
from tests.bench.benches import STEPS, TOML, boards, synthetic
from tests.bench.records import load_record

OURS = Setup(name="continuous", method="continuous")
PLAIN = Setup(name=AR, method=AR)
CASES = tuple(synthetic_cases(7, [Sampling()], 10))
LOAD = TOML.replace("temperatures = [0, 1]", "users = [1, 3]\nanswers = 5")


@pytest.mark.parametrize(("setup", "users"), [(OURS, 1), (OURS, 3), (PLAIN, 3)])
def test_users_ask_the_next_prompt_the_moment_the_last_one_is_answered(setup: Setup, users: int) -> None:
    work = Work(asked=Load(cases=CASES, users=users), jobs=((boards(), setup),))
    ((record,),) = Engine(synthetic(), CASES[:1]).records(work)
    assert isinstance(record, LoadRecord)
    assert [answer.prompt_id for answer in record.answers] == [case.prompt_id for case in CASES]
    assert {answer.agreement for answer in record.answers} == {EXACT}
    assert [answer.asked_s for answer in record.answers[:users]] == [0.0] * users
    for user in range(users):
        own = [answer for answer in record.answers if answer.user == user]
        assert [later.asked_s for later in own[1:]] == [answer.last_s for answer in own[:-1]]
    for answer in record.answers:
        assert sum(other.asked_s <= answer.asked_s < other.last_s for other in record.answers) == users
    assert record.key == ("boards", setup.name, "step 0", 0.0, 0, users)
    assert record.tokens == sum(answer.new_tokens for answer in record.answers)
    assert record.seconds == max(answer.last_s for answer in record.answers)
    assert all(0 < share <= 1 for share in record.stage_busy)


def test_an_answer_that_is_not_the_plain_one_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def tampered(answers: Any) -> AnswerLanguage:
        changed = dict(answers)
        changed[CASES[4].prompt] = (*CASES[4].answer[:-1], CASES[4].answer[-1] ^ 1)
        return AnswerLanguage(changed)

    monkeypatch.setattr(simulated, "AnswerLanguage", tampered)
    (record,) = LoadedWorld(
        synthetic(), boards(), PLAIN, Load(cases=CASES, users=2), lambda case: {}
    ).records()
    assert [answer.agreement == WRONG for answer in record.answers] == [False] * 4 + [True, False, False]


def test_prompts_are_dealt_like_cards_and_domains_take_turns() -> None:
    order = shuffle_cases(CASES, 16, 3)
    for deck in (order[:7], order[7:14]):
        assert sorted(case.prompt_id for case in deck) == sorted(case.prompt_id for case in CASES)
    assert shuffle_cases(CASES, 16, 3) == order != shuffle_cases(CASES, 16, 4)
    cases = synthetic_cases(24, [Sampling()], 1, domains=("code", "plays"))
    for turn in range(8):
        given = [scheduled_case(cases, 4, 0, user, turn) for user in range(4)]
        assert len({case.prompt_id for case in given}) == 4, "nobody is given what another has"
        assert [case.domain for case in given] == [["code", "plays"][(user + turn) % 2] for user in range(4)]
    own, other = ([scheduled_case(cases, 4, step, 0, turn).prompt_id for turn in range(6)] for step in (0, 1))
    assert len(set(own)) == 6
    assert own != other


def test_figures_are_what_they_say() -> None:
    record = load_record("a", 2, (1.0, 3.0))
    found = load_figures(record, load_record("a", 1, (0.5, 1.5)))
    assert found["tokens_per_s"] == pytest.approx(40 / 6)
    assert (found["latency_s"], found["latency_p95_s"]) == (2.0, pytest.approx(3.0))
    assert (found["first_token_s"], found["token_s"]) == (0.5, pytest.approx(0.2))
    assert found["fairness"] == pytest.approx((10 + 10 / 3) ** 2 / (2 * (10**2 + (10 / 3) ** 2)))
    assert found["fairness_to_alone"] == pytest.approx(1), "longer answers are no unfairness"
    assert (load_figures(record)["fairness_to_alone"], found["wrong"]) == (None, 0)
    assert (found["energy_j_per_token"], found["network_bytes_per_token"]) == (2.0, 10.0)
    assert [jain(of) for of in ([2.0, 2.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0])] == pytest.approx([1, 0.25, 1])


@pytest.mark.parametrize("text", [LOAD, STEPS], ids=["users", "steps"])
def test_the_command_writes_loads_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "load.toml").write_text(text.replace("new_tokens = 12", "new_tokens = 4"))
    out = tmp_path / "out"
    asked = ["bench", "--experiment", str(tmp_path / "load.toml"), "--out", str(out), "--json", "--jobs", "1"]
    assert main(asked) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["answers"] > 0
    assert summary["wrong"] == 0
    made = {"experiment.json", "results.jsonl", "report.html", "summary.json", "summary.md", "load.png"}
    assert {path.name for path in out.iterdir()} == made
    path = out / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    path.write_text("".join(lines[:1]) + lines[1][:50])
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)
    write_records(tmp_path / "again.jsonl", read_records(path, LoadRecord))
    assert (tmp_path / "again.jsonl").read_text() == path.read_text()
    path.write_text(json.dumps({**json.loads(lines[0]), "more": 1}) + "\n")
    with pytest.raises(InputError, match="results of this version"):
        read_records(path, LoadRecord)


# ------------------------------------------------------------------------------------------ steps

FAR = DrafterPlacement(
    models=("b",),
    shape=find_shape("eagle-tinyllama-1.1b"),
    device=boards().head,
)
SINGLE = Setup(name="continuous", method="continuous", drafters=("b",))
TEAM = Setup(name="cosine", method="cosine", drafters=("a", "b"))


def run_steps(setup: Setup, *steps: LoadStep) -> list[LoadRecord]:
    experiment = synthetic(drafters=("a", "b"), steps=steps, limit=12, temperatures=(0.0,), silent_s=0.5)
    load = Load(cases=tuple(read_cases(experiment, None, domains=("code", "plays"))), steps=steps)
    make = partial(Engine(experiment, ()).drafters, setup)
    records = LoadedWorld(experiment, boards(boards=(FAR,)), setup, load, make).records()
    assert {answer.agreement for record in records for answer in record.answers} == {EXACT}
    return records


def test_in_each_step_so_many_users_ask_and_who_goes_waits_for_the_answer() -> None:
    steps = [LoadStep(users=users, seconds=1.0) for users in (1, 3, 2)]
    records = run_steps(TEAM, *steps)
    assert [(record.step, record.users, record.seconds) for record in records] == [
        (1, 1, 1.0),
        (2, 3, 1.0),
        (3, 2, 1.0),
    ]
    answers = [answer for record in records for answer in record.answers]
    for record in records:
        for answer in record.answers:
            assert answer.user < record.users
            assert record.step - 1 <= answer.asked_s < record.step
            under_way = [other.user for other in answers if other.asked_s <= answer.asked_s < other.last_s]
            assert record.users <= len(under_way) <= 3
            assert len(set(under_way)) == len(under_way), "a user asks twice at once"
        assert all(0 < share <= 1 for share in record.stage_busy)
    first = {answer.user: answer for answer in records[1].answers[::-1]}
    assert sorted(first) == [0, 1, 2]
    assert first[1].asked_s == first[2].asked_s == 1.0
    assert max(answer.last_s for answer in answers) > 3.0, "the last ones are waited for"
    for own, others in zip(records, run_steps(SINGLE, *steps), strict=True):
        for user in range(own.users):
            asked, other = (
                [answer.prompt_id for answer in record.answers if answer.user == user]
                for record in (own, others)
            )
            count = min(len(asked), len(other))
            assert count > 1
            assert asked[:count] == other[:count], "whatever the setup"


def test_a_drafter_is_slow_lost_and_back_as_the_steps_say() -> None:
    usual, slow, lost, back = run_steps(
        SINGLE,
        LoadStep(users=2, seconds=3.0),
        LoadStep(users=2, seconds=3.0, slow={"b": 50.0}),
        LoadStep(users=2, seconds=3.0, lost=("b",)),
        LoadStep(users=2, seconds=3.0),
    )
    assert (slow.label, lost.label) == ("2 users, b 50 times as slow", "2 users, b lost")
    assert max(slow.tokens, lost.tokens) < 0.6 * usual.tokens
    assert back.tokens > 0.8 * usual.tokens
    head, *busy = zip(*(each.board_busy for each in (usual, slow, lost, back)), strict=True)
    assert head == (0.0,) * 4, "it is on another board"
    ((before, slowed, gone, again),) = busy
    assert gone < 0.05 < min(before, again)
    assert before < slowed <= 1
