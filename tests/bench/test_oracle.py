"""The oracle's bound beside all schedules that there are, tried one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.bench import trace
from flowspec.bench.config import Setup
from flowspec.bench.oracle import SeenToken, Station, earliest_s
from flowspec.bench.simulated import run as run_case
from flowspec.bench.synthetic import Synthetic, synthetic_cases
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.shape import find_shape
from tests.bench.benches import boards, drafters, synthetic

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
            SeenToken(known_s=known, here_s=here, asked_s=asked if here < known else None)
            for known, here, asked in zip(self.known_s, self.here_s, self.asked_s, strict=True)
        ]
        stations = [
            Station(busy_s=lambda rows, of=of: of[rows - 1], delay_s=delay_s) for of, delay_s in self.stations
        ]
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
        busy_s = busy_s if draw(st.booleans()) else itertools.accumulate(busy_s)
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
    found: list[Run] = []

    def spy(tokens: Sequence[SeenToken], stations: Sequence[Station], free_s: Sequence[float]) -> list[float]:
        rows = range(1, len(tokens))
        run = Run(
            known_s=tuple(each.known_s for each in tokens),
            here_s=tuple(each.here_s for each in tokens),
            asked_s=tuple(each.here_s if each.asked_s is None else each.asked_s for each in tokens),
            stations=tuple((tuple(map(each.busy_s, rows)), each.delay_s) for each in stations),
            free_s=tuple(free_s),
        )
        found.append(run)
        return earliest_s(tokens, stations, free_s)

    monkeypatch.setattr(trace, "earliest_s", spy)
    testbed = boards(stages, shape=find_shape("llama-2-7b"), drafter_shape=find_shape("eagle-llama-2-7b"))
    setup = Setup(name=method, method=method)
    for case in synthetic_cases(2, [Sampling()], 10):
        made = drafters(setup, Synthetic(0.7, 1024).begin(case))
        record = run_case(synthetic(), testbed, setup, case, made).record
        best_s = min(known_s[-1] for known_s in found[-1].schedules()) - found[-1].known_s[0]
        assert record.oracle_s is not None
        assert 0.9 * best_s <= record.oracle_s <= best_s * (1 + 1e-9)
        assert best_s <= record.decode_s * (1 + 1e-9)
        assert any(here < known for here, known in zip(found[-1].here_s, found[-1].known_s, strict=True))
