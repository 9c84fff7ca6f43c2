"""A load in virtual time: a closed loop of users, each of whom asks the next prompt the moment the last one
is answered.

All setups are asked the same prompts in the same order, drawn from a seed, so that domains mix. Every answer
is compared with the plain one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from flowspec.bench.config import Bench, Setup, Testbed
from flowspec.bench.drafter_for_each import DrafterForEach
from flowspec.bench.plain import PlainCase
from flowspec.bench.recording import agreement_of, energy_of
from flowspec.bench.simulated import Drafters, build, busy_of, submit_of
from flowspec.core.head.events import Finished, Forget
from flowspec.core.head.head import Experience
from flowspec.draft.protocol import Drafter
from flowspec.draft.text import TextDrafter
from flowspec.sim.record import HEAD
from flowspec.sim.world import Handled, World
from flowspec.validation import Document

LoadKey = tuple[str, str, int, float, int]


class LoadAnswer(Document, frozen=True, kw_only=True):
    """One answer of a load, in instants of its world's clock."""

    user: int
    prompt_id: str
    domain: str
    asked_s: float
    first_s: float
    last_s: float
    new_tokens: int
    agreement: str

    @property
    def whole_s(self) -> float:
        """From the question to the last token."""
        return self.last_s - self.asked_s


class LoadRecord(Document, frozen=True, kw_only=True):
    """One load as the harness keeps it: `answers` in the order in which they were asked for, and what the
    devices did meanwhile.

    `drafters` is how many models beside the target there are; `stage_busy` and `board_busy` are shares of the
    time of each stage, and of the head followed by the testbed's boards for drafters.
    """

    experiment: str
    world: str
    testbed: str
    method: str
    users: int
    temperature: float
    seed: int
    drafters: int
    answers: list[LoadAnswer]
    stage_busy: list[float]
    board_busy: list[float]
    network_bytes: int
    energy_j: float
    events: int
    digest: str

    @property
    def key(self) -> LoadKey:
        """What tells one load of an experiment from all others."""
        return (self.testbed, self.method, self.users, self.temperature, self.seed)


def drawn(cases: Sequence[PlainCase], count: int, seed: int) -> list[PlainCase]:
    """So many cases in an order by chance: all of them once, then all again in another order."""
    chance = random.Random(seed)
    found: list[PlainCase] = []
    while len(found) < count:
        found += chance.sample(list(cases), len(cases))
    return found[:count]


def run_load(
    bench: Bench,
    testbed: Testbed,
    setup: Setup,
    users: int,
    cases: Sequence[PlainCase],
    drafters: Sequence[Drafters],
    experience: Experience | None = None,
) -> LoadRecord:
    """So many users have all cases answered, in this order, each with its `drafters`; with `experience`
    as in `simulated.run`."""
    together = {name: _for_all([each[name] for each in drafters]) for name in drafters[0]}
    loop = _ClosedLoop(cases)
    loop.world = build(testbed, setup, cases, together, bench.context, experience, loop)
    for user in range(min(users, len(cases))):
        loop.ask(user, 0.0)
    loop.world.run()
    return _record(bench, testbed, setup, users, cases, together, loop)


def _for_all(drafters: Sequence[Drafter]) -> Drafter:
    """One for all cases: one that guesses from texts takes them all, as at a head, and may remember them."""
    return drafters[0] if isinstance(drafters[0], TextDrafter) else DrafterForEach(drafters)


class _ClosedLoop:
    """Asks, and hears when an answer ends. Requests are numbered as the cases are."""

    world: World

    def __init__(self, cases: Sequence[PlainCase]) -> None:
        self.asked: list[tuple[int, float]] = []
        self._cases = cases

    def ask(self, user: int, now_s: float) -> None:
        if len(self.asked) < len(self._cases):
            request = len(self.asked)
            self.asked.append((user, now_s))
            self.world.at(now_s, submit_of(self._cases[request], request))

    def __call__(self, handled: Handled) -> None:
        if handled.place == HEAD:
            for command in handled.commands:
                if isinstance(command, Finished):
                    self.world.at(handled.now_s, Forget(request=command.request))
                    self.ask(self.asked[command.request][0], handled.now_s)


def _record(
    bench: Bench,
    testbed: Testbed,
    setup: Setup,
    users: int,
    cases: Sequence[PlainCase],
    drafters: Drafters,
    loop: _ClosedLoop,
) -> LoadRecord:
    world, sampling = loop.world, cases[0].sampling
    answers = [_answer(world, request, case, *loop.asked[request]) for request, case in enumerate(cases)]
    whole_s = max(answer.last_s for answer in answers)
    stages_s = [device.busy_s for device in world.devices]
    boards_s = busy_of(testbed, drafters, world)
    return LoadRecord(
        experiment=bench.name,
        world=bench.world,
        testbed=testbed.name,
        method=setup.name,
        users=users,
        temperature=sampling.temperature,
        seed=sampling.seed,
        drafters=len(drafters),
        answers=answers,
        stage_busy=[seconds / whole_s for seconds in stages_s],
        board_busy=[seconds / whole_s for seconds in _by_board(testbed, boards_s)],
        network_bytes=world.bytes_sent,
        energy_j=energy_of(testbed, whole_s, stages_s, boards_s),
        events=world.events,
        digest=world.digest.hex(),
    )


def _by_board(testbed: Testbed, busy_s: Mapping[int | None, float]) -> list[float]:
    apart = [number for number, board in enumerate(testbed.boards) if board.device is not None]
    return [busy_s.get(number, 0.0) for number in (None, *apart)]


def _answer(world: World, request: int, case: PlainCase, user: int, asked_s: float) -> LoadAnswer:
    (answer,) = world.answers[request]
    assert answer.end is not None, "the world came to rest without an end of an answer"
    times_s = answer.times_s or [answer.ended_s]
    return LoadAnswer(
        user=user,
        prompt_id=case.prompt_id,
        domain=case.domain,
        asked_s=asked_s,
        first_s=times_s[0],
        last_s=times_s[-1],
        new_tokens=len(answer.tokens),
        agreement=agreement_of(case, tuple(answer.tokens), answer.end.reason),
    )
