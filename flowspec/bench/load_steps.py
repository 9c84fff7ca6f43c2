"""A load that changes, in virtual time: users who come and go in steps, while drafters are slow, lost, back.

Each user who is there asks the next prompt the moment the last one is answered; who goes waits for the answer
that is under way. In each step the prompts of all domains are dealt anew, and a user's place and turn say
which comes next, so what different setups are asked is the same however far each gets. Every answer is
compared with the plain one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from flowspec.bench.config import Bench, LoadStep, Setup, Testbed
from flowspec.bench.drafter_for_each import DrafterForEach
from flowspec.bench.load import LoadAnswer
from flowspec.bench.plain import PlainCase
from flowspec.bench.recording import agreement_of
from flowspec.bench.simulated import Drafters, build, submit_of
from flowspec.core.head.events import Draft, DrafterLost, DrafterRecovered, Emit, Finished, Forget
from flowspec.core.head.head import Experience
from flowspec.draft.protocol import Drafter
from flowspec.draft.text import TextDrafter
from flowspec.sim.record import HEAD
from flowspec.sim.world import Handled, World
from flowspec.validation import Document

BINS = 40
"""Spans of a step for which tokens are counted."""

StepsKey = tuple[str, str, float, int]
DraftersOf = Callable[[PlainCase], Drafters]
"""The models beside the target for one answer to a case."""


class StepAnswer(LoadAnswer, frozen=True, kw_only=True):
    """One answer, asked for in a step as the `turn`th there of its user."""

    step: int
    turn: int


class StepSpan(Document, frozen=True, kw_only=True):
    """What happened while a step lasted: in each of its `BINS` the `tokens` that came and the rows that each
    drafter was `asked` about, and for which share of the time each stage was busy."""

    tokens: list[int]
    asked: dict[str, list[int]]
    stage_busy: list[float]


class StepsRecord(Document, frozen=True, kw_only=True):
    """One load of steps as the harness keeps it; `drafters` is how many models beside the target there
    are."""

    experiment: str
    world: str
    testbed: str
    method: str
    temperature: float
    seed: int
    drafters: int
    answers: list[StepAnswer]
    spans: list[StepSpan]
    events: int
    digest: str

    @property
    def key(self) -> StepsKey:
        """What tells one load of an experiment from all others."""
        return (self.testbed, self.method, self.temperature, self.seed)


def starts_of(steps: Sequence[LoadStep]) -> list[float]:
    """When each begins, and when the last one ends."""
    return list(accumulate((step.seconds for step in steps), initial=0.0))


def dealt(cases: Sequence[PlainCase], users: int, step: int, user: int, turn: int) -> PlainCase:
    """What a user asks at a turn of a step: domains in turns, beginning with another one for the next user;
    of a domain's prompts, in an order by chance, nobody is given one that another has at this turn, as long
    as there are so many."""
    by_domain: dict[str, list[PlainCase]] = {}
    for case in cases:
        by_domain.setdefault(case.domain, []).append(case)
    domains = list(by_domain)
    at = (user + turn) % len(domains)
    own = by_domain[domains[at]]
    order = random.Random(f"{step} {domains[at]}").sample(range(len(own)), len(own))
    together = -(-users // len(domains))
    return own[order[(turn * together + user // len(domains)) % len(own)]]


def run_step_load(
    bench: Bench,
    testbed: Testbed,
    setup: Setup,
    cases: Sequence[PlainCase],
    drafters_of: DraftersOf,
    experience: Experience | None = None,
) -> StepsRecord:
    """The experiment's steps, of these cases; with `experience` as in `simulated.run`."""
    run = _Run(bench, testbed, setup, cases, drafters_of, experience)
    run.world.run()
    return run.record()


class _Run:
    """Asks, hears when an answer ends, and has each step happen. Requests are numbered as they are asked."""

    def __init__(
        self,
        bench: Bench,
        testbed: Testbed,
        setup: Setup,
        cases: Sequence[PlainCase],
        drafters_of: DraftersOf,
        experience: Experience | None,
    ) -> None:
        self._bench, self._testbed, self._setup = bench, testbed, setup
        self._cases, self._drafters_of = cases, drafters_of
        self._starts = starts_of(bench.steps)
        self._at = -1
        self._asked: list[tuple[int, int, int, PlainCase, float]] = []  # step, user, turn, what and when
        self._turns = Counter[tuple[int, int]]()
        self._waiting: set[int] = set()
        self._tokens = [[0] * BINS for _ in bench.steps]
        self._each: dict[str, list[Drafter]] = {name: [one] for name, one in drafters_of(cases[0]).items()}
        self._rows: dict[str, list[list[int]]] = {
            name: [[0] * BINS for _ in bench.steps] for name in self._each
        }
        self._busy_s: list[list[float]] = []
        together = {name: self._for_all(some) for name, some in self._each.items()}
        self._together: Drafters = together
        self._numbers = {name: number for number, name in enumerate(together)}
        self.world: World = build(testbed, setup, cases, together, bench.context, experience, self._watch)
        for some in self._each.values():
            some.clear()
        for step in range(len(bench.steps) + 1):
            self.world.clock.at(self._starts[step], partial(self._begin, step))

    @staticmethod
    def _for_all(drafters: list[Drafter]) -> Drafter:
        """One for all answers, also of those that are still to come: one that guesses from texts takes them
        all, as at a head, and may remember them."""
        return drafters[0] if isinstance(drafters[0], TextDrafter) else DrafterForEach(drafters)

    # ------------------------------------------------------------------------------------------ the steps

    def _begin(self, number: int) -> None:
        """A step begins; after the last one nobody asks any more."""
        self._busy_s.append([device.busy_until(self.world.clock.now_s) for device in self.world.devices])
        self._at = number
        if number == len(self._bench.steps):
            return
        step = self._bench.steps[number]
        before = self._bench.steps[number - 1] if number else None
        for name, drafter in self._numbers.items():
            self.world.board_of(drafter).slow(drafter, dict(step.slow).get(name, 1.0))
            was_lost = before is not None and name in before.lost
            if name in step.lost and not was_lost:
                self._lose(drafter)
            elif was_lost and name not in step.lost:
                self.world.at(self.world.clock.now_s, DrafterRecovered(drafter=drafter))
        for user in range(step.users):
            if user not in self._waiting:
                self._ask(user)

    def _lose(self, drafter: int) -> None:
        """Its board says no more from now on; the head hears of that when it has been silent for so long."""
        self.world.board_of(drafter).lose(drafter)
        self.world.at(self.world.clock.now_s + self._bench.silent_s, DrafterLost(drafter=drafter))

    def _ask(self, user: int) -> None:
        users = self._bench.steps[self._at].users
        turn = self._turns[self._at, user]
        self._turns[self._at, user] += 1
        case = dealt(self._cases, users, self._at, user, turn)
        for name, drafter in self._drafters_of(case).items():
            self._each[name].append(drafter)
        now_s = self.world.clock.now_s
        self._waiting.add(user)
        self._asked.append((self._at, user, turn, case, now_s))
        self.world.at(now_s, submit_of(case, len(self._asked) - 1))

    def _answered(self, request: int) -> None:
        user = self._asked[request][1]
        self._waiting.discard(user)
        self.world.at(self.world.clock.now_s, Forget(request=request))
        if self._at < len(self._bench.steps) and user < self._bench.steps[self._at].users:
            self._ask(user)

    # --------------------------------------------------------------------------------------- what is seen

    def _watch(self, handled: Handled) -> None:
        if handled.place != HEAD:
            return
        names = list(self._numbers)
        for command in handled.commands:
            if isinstance(command, Emit):
                self._count(self._tokens, len(command.tokens))
            elif isinstance(command, Draft):
                self._count(self._rows[names[command.drafter]], command.segment.row_count)
            elif isinstance(command, Finished):
                self._answered(command.request)

    def _count(self, counts: list[list[int]], more: int) -> None:
        if self._at < len(self._bench.steps):
            since_s = self.world.clock.now_s - self._starts[self._at]
            share = since_s / self._bench.steps[self._at].seconds
            counts[self._at][min(BINS - 1, int(share * BINS))] += more

    def record(self) -> StepsRecord:
        sampling = self._cases[0].sampling
        return StepsRecord(
            experiment=self._bench.name,
            world=self._bench.world,
            testbed=self._testbed.name,
            method=self._setup.name,
            temperature=sampling.temperature,
            seed=sampling.seed,
            drafters=len(self._numbers),
            answers=[self._answer(request) for request in range(len(self._asked))],
            spans=[self._span(step) for step in range(len(self._bench.steps))],
            events=self.world.events,
            digest=self.world.digest.hex(),
        )

    def _span(self, step: int) -> StepSpan:
        before_s, after_s = self._busy_s[step], self._busy_s[step + 1]
        seconds = self._bench.steps[step].seconds
        return StepSpan(
            tokens=self._tokens[step],
            asked={name: rows[step] for name, rows in self._rows.items()},
            stage_busy=[(after - before) / seconds for before, after in zip(before_s, after_s, strict=True)],
        )

    def _answer(self, request: int) -> StepAnswer:
        step, user, turn, case, asked_s = self._asked[request]
        (answer,) = self.world.answers[request]
        assert answer.end is not None, "the world came to rest without an end of an answer"
        times_s = answer.times_s or [answer.ended_s]
        return StepAnswer(
            step=step,
            user=user,
            turn=turn,
            prompt_id=case.prompt_id,
            domain=case.domain,
            asked_s=asked_s,
            first_s=times_s[0],
            last_s=times_s[-1],
            new_tokens=len(answer.tokens),
            agreement=agreement_of(case, tuple(answer.tokens), answer.end.reason),
        )
