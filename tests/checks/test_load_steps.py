"""The load of steps with real processes: users come and go as its steps say, and no wrong answer and no error
passes. `python -m tests.checks.load_steps` runs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from flowspec.bench.outcome import EXACT, WRONG
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import FlowSpecError
from flowspec.runtime.session import Limits
from tests.checks.load_steps import Asked, StepFound, Users, main

TOKENS = (5, 6, 7)
LIMITS = Limits(new_tokens_max=3, stop_ids=frozenset())
WAIT_S = 60.0


@dataclass
class Batch:
    tokens: Sequence[int]


class Answer:
    """Its tokens come when the session lets them."""

    class End:
        reason = "length"

    end = End()

    def __init__(self, session: Any, tokens: Sequence[int]) -> None:
        self.may_end = threading.Event()
        self._session, self._tokens = session, tokens

    def __iter__(self) -> Iterator[Batch]:
        yield Batch(self._tokens[:1])
        assert self.may_end.wait(WAIT_S)
        yield Batch(self._tokens[1:])
        with self._session.lock:
            self._session.under_way -= 1


class FakeSession:
    """Counts who asks at once; each answer ends when it may."""

    def __init__(self, said: Sequence[int] = TOKENS, *, ends: bool = False) -> None:
        self.lock = threading.Lock()
        self.answers: list[Answer] = []
        self.under_way = 0
        self._said, self._ends = said, ends
        self._numbers = count()
        self.head = self

    def new_request(self) -> int:
        return next(self._numbers)

    def forget(self, request: int) -> None: ...

    def submit(self, prompt: Any, sampling: Any, limits: Any, request: int) -> Answer:
        answer = Answer(self, self._said)
        with self.lock:
            self.answers.append(answer)
            self.under_way += 1
            if self._ends:
                answer.may_end.set()
        return answer

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.answers[number].may_end.set()

    def end_all(self) -> None:
        """Also those that are still to be asked for."""
        with self.lock:
            self._ends = True
            self.end(*range(len(self.answers)))

    def wait_for(self, under_way: int, asked: int) -> None:
        until_s = time.monotonic() + WAIT_S
        while (self.under_way, len(self.answers)) != (under_way, asked):
            assert time.monotonic() < until_s, f"{self.under_way} under way of {len(self.answers)}"
            time.sleep(0.001)


def users_of(session: FakeSession, counts: Sequence[int]) -> Users:
    steps = [StepFound(method="m", users=users, seconds=1.0) for users in counts]
    asked = Asked((1, 2), Sampling(), TOKENS)
    return Users(session, [asked], LIMITS, steps)  # type: ignore[arg-type]


def test_users_come_and_go_and_who_goes_has_the_answer_to_its_end() -> None:
    session = FakeSession()
    users = users_of(session, (1, 3, 1))
    users.come(0)
    session.wait_for(1, 1)
    users.come(1)
    session.wait_for(3, 3)
    session.end(0)
    session.wait_for(3, 4)
    users.come(2)
    session.end(1, 2)
    session.wait_for(1, 4)
    session.end(3)
    session.wait_for(1, 5)
    session.end_all()
    users.go(WAIT_S)
    assert len(users.steps[0].verdicts) == 1
    assert len(users.steps[1].verdicts) == 3
    assert {verdict for step in users.steps for verdict in step.verdicts} == {EXACT}
    assert sum(step.tokens for step in users.steps) == 3 * len(session.answers)


def test_a_wrong_answer_is_told() -> None:
    session = FakeSession((5, 6, 8), ends=True)
    users = users_of(session, (1,))
    users.come(0)
    while not users.steps[0].verdicts:
        time.sleep(0.001)
    users.go(WAIT_S)
    assert set(users.steps[0].verdicts) == {WRONG}


def test_an_error_is_raised_where_users_are_waited_for() -> None:
    session = FakeSession()

    def broken(*args: Any, **more: Any) -> Answer:
        raise FlowSpecError("nobody is there")

    session.submit = broken  # type: ignore[method-assign]
    users = users_of(session, (1,))
    users.come(0)
    with pytest.raises(FlowSpecError, match="nobody is there"):
        users.go(WAIT_S)


def test_an_answer_that_does_not_end_is_told() -> None:
    session = FakeSession()
    users = users_of(session, (1,))
    users.come(0)
    session.wait_for(1, 1)
    with pytest.raises(FlowSpecError, match=r"an answer did not end within 0.01 s"):
        users.go(0.01)
    session.end_all()


def test_a_method_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--methods", "best"])
    assert ended.value.code == 2
    assert "expected all, or some of cosine,continuous, got 'best'" in capsys.readouterr().err
