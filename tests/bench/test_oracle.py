"""The oracle's bound beside all schedules that there are, tried one by one; and what a head's events tell of
when tokens were known and guessed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.bench.cases import synthetic_cases
from flowspec.bench.engine import Engine
from flowspec.bench.experiment import Setup
from flowspec.core.head.events import Draft, Drafted, Emit, SendToFirstStage
from flowspec.core.protocol.messages import Proposal, Sampling, Segment
from flowspec.plan.shape import find_shape
from flowspec.sim.record import HEAD
from lab.bench import oracle
from lab.bench.oracle import SeenToken, Station, TokenLog, bound_of, earliest_s
from tests.bench.benches import boards, synthetic
from tests.core.stages import commit, part_of

TOKENS_MAX = 7


@dataclass(frozen=True)
class Run:
    """A recorded answer by hand; of each station the seconds of 1, 2, ... rows and the delay behind it."""

    known_s: tuple[float, ...]
    here_s: tuple[float, ...]
    asked_s: tuple[float, ...]
    stations: tuple[tuple[tuple[float, ...], float], ...]
    free_s: tuple[float, ...]

    def bound_s(self) -> list[float]:
        tokens = [
            SeenToken(known, here, asked if here < known else here)
            for known, here, asked in zip(self.known_s, self.here_s, self.asked_s, strict=True)
        ]
        stations = [Station((0.0, *busy_s).__getitem__, delay_s) for busy_s, delay_s in self.stations]
        return earliest_s(tokens, stations, self.free_s)

    def schedules(self) -> Iterator[list[float]]:
        """When each token is known in every schedule that sends each segment as soon as may be."""
        sent = len(self.known_s) - 1
        for cuts in itertools.product((False, True), repeat=sent - 1):
            ends = [at for at, is_cut in enumerate((*cuts, True), 1) if is_cut]
            found = self._schedule(ends)
            if found is not None:
                yield found

    def _schedule(self, ends: Sequence[int]) -> list[float] | None:
        """Segments of the tokens before each of `ends`; None where one would have to carry what only it can
        tell."""
        known, here, free = {0: self.known_s[0]}, dict[int, float](), list(self.free_s)
        first = 0
        for end in ends:
            for token in range(first, end):
                ways = [known[token]] if token in known else []
                if self.here_s[token] < self.known_s[token]:
                    pass_s = self.here_s[token] - self.asked_s[token]
                    if token == 0:
                        ways.append(self.here_s[0])
                    else:
                        parent_s = self.here_s[token - 1]
                        ways.append(here[token - 1] + (self.asked_s[token] - parent_s) + pass_s)
                        ways += [
                            max(at_s, here[token - 1]) + (self.asked_s[token] - self.known_s[each]) + pass_s
                            for each, at_s in known.items()
                            if parent_s <= self.known_s[each] <= self.asked_s[token]
                        ]
                if not ways:
                    return None
                here[token] = min(ways)
            at_s = max(here[token] for token in range(first, end))
            for number, (busy_s, delay_s) in enumerate(self.stations):
                free[number] = max(at_s, free[number]) + busy_s[end - first - 1]
                at_s = free[number] + delay_s
            at_s = max(at_s, known[0])  # nothing overtakes the prompt
            known.update((token + 1, at_s) for token in range(first, end))
            first = end
        return [known[token] for token in range(len(self.known_s))]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    few = st.integers(0, 6)
    count = draw(st.integers(2, TOKENS_MAX))
    known, here, asked = [float(draw(few))], [0.0], [0.0]
    for _ in range(count - 1):
        known.append(known[-1] + draw(st.integers(0, 12)))
        asked.append(here[-1] + draw(st.integers(0, 9)))
        here.append(min(asked[-1] + draw(few), known[-1]) if draw(st.booleans()) else known[-1])
    stations = []
    for _ in range(draw(st.integers(1, 4))):
        busy_s = draw(st.lists(few, min_size=count, max_size=count))
        busy_s = busy_s if draw(st.booleans()) else list(itertools.accumulate(busy_s))
        stations.append((tuple(map(float, busy_s)), float(draw(few))))
    free = tuple(float(draw(few)) for _ in stations)
    return Run(tuple(known), tuple(here), tuple(asked), tuple(stations), free)


@given(runs())
def test_no_schedule_is_faster(run: Run) -> None:
    bound_s = run.bound_s()
    schedules = list(run.schedules())
    assert schedules, "one token a segment is always possible"
    for known_s in schedules:
        assert all(least <= each for least, each in zip(bound_s, known_s, strict=True))


@given(runs(), st.lists(st.integers(0, 6), min_size=TOKENS_MAX, max_size=TOKENS_MAX))
def test_at_one_station_it_is_the_best_schedule_where_no_guess_waits_for_a_verdict(
    run: Run, gaps: list[int]
) -> None:
    here_s = tuple(float(each) for each in itertools.accumulate(gaps[: len(run.known_s)]))
    alone = replace(
        run,
        known_s=(here_s[0], *(1000.0 + at for at in range(1, len(here_s)))),
        here_s=here_s,
        asked_s=here_s,
        stations=tuple((tuple(sorted(busy_s)), delay_s) for busy_s, delay_s in run.stations[:1]),
        free_s=run.free_s[:1],
    )
    best_s = [min(each) for each in zip(*alone.schedules(), strict=True)]
    assert alone.bound_s() == best_s


@pytest.mark.parametrize("method", ["continuous", "tree-sd", "pipedec"])
@pytest.mark.parametrize("stages", [1, 4])
def test_of_simulated_answers_the_best_of_all_schedules_is_hardly_slower(
    method: str, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Run] = []

    def spy(tokens: Sequence[SeenToken], stations: Sequence[Station], free_s: Sequence[float]) -> list[float]:
        rows = range(1, len(tokens))
        costs = tuple((tuple(map(each.busy_s, rows)), each.delay_s) for each in stations)
        known, here, asked = zip(*tokens, strict=True)
        runs.append(Run(known, here, asked, costs, tuple(free_s)))
        return earliest_s(tokens, stations, free_s)

    monkeypatch.setattr(oracle, "earliest_s", spy)
    testbed = boards(stages, shape=find_shape("llama-2-7b"), drafter_shape=find_shape("eagle-llama-2-7b"))
    engine = Engine(synthetic(acceptance=0.7), [])
    for case in synthetic_cases(2, [Sampling()], 10):
        bound = bound_of(engine, testbed, Setup(name=method, method=method), case)
        best_s = min(known_s[-1] for known_s in runs[-1].schedules()) - runs[-1].known_s[0]
        assert 0.9 * best_s <= bound.oracle_s <= best_s * (1 + 1e-9)
        assert best_s <= bound.decode_s * (1 + 1e-9)
        assert any(here < known for here, known in zip(runs[-1].here_s, runs[-1].known_s, strict=True))


def rows(number: int, *nodes: tuple[int, int, int, int]) -> Segment:
    """A segment of rows (id, parent, token, position)."""
    return Segment(segment=number, parts=(part_of(commit(base=2, request=0), nodes),))


def drafted(job: int, node: int, *tokens: int) -> Drafted:
    proposal = Proposal(request=0, epoch=0, node=node, tokens=tokens, confidences=(0.1,) * len(tokens))
    return Drafted(job=job, proposals=(proposal,), started_s=0.0, ended_s=0.0)


def test_a_guess_is_there_once_a_drafter_has_said_it_and_was_asked_for_with_its_job() -> None:
    """A prompt of two tokens, of which node 1 is the last, and what came then."""
    log = TokenLog(2)
    events: list[tuple[Any, list[Any], float]] = [
        (None, [SendToFirstStage(segment=rows(0, (0, -1, 7, 0), (1, 0, 8, 1)))], 0.0),
        (None, [Draft(job=0, segment=rows(0, (1, 0, 8, 1)), width=2)], 1.0),
        (drafted(0, 1, 10, 11), [Draft(job=1, segment=rows(1, (2, 1, 11, 2)), width=2)], 2.0),
        (drafted(8, 1, 11), [], 3.0),
        (drafted(1, 2, 21), [], 4.0),
        (None, [Emit(request=0, tokens=(11,))], 5.0),
        (None, [Emit(request=0, tokens=(21, 31))], 7.0),
        (None, [SendToFirstStage(segment=rows(2, (5, 2, 21, 3)))], 8.0),
    ]
    for event, commands, now_s in events:
        handled = SimpleNamespace(event=event, commands=commands, now_s=now_s, place=HEAD)
        log.watch(handled)  # type: ignore[arg-type]
    assert log.tokens() == [SeenToken(5.0, 2.0, 1.0), SeenToken(7.0, 4.0, 2.0), SeenToken(7.0, 7.0, 7.0)]
