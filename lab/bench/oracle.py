"""The least time in which an answer could have come, and its share of the time that it took:
`python -m lab.bench.oracle --experiment NAME`.

The oracle has the guesses of an answer, and no others. It knows the answer, and which guesses are right. It
sends the answer's tokens in order, as many in a segment and whenever it likes, and never a wrong one; a token
that the drafter said and the method never believed is as good as any. It hears of verdicts the moment they
are at the head, and nothing but segments takes the stations' time. What it may not do:

- *Send what is not there.* A token is there when it is known (the segment that carried the token before it is
  back), or from when it is guessed. A token that nobody guessed before it was known costs it a trip, too.
- *Guess otherwise.* The drafter is asked for a guess as long as in the answer after what that may have waited
  for: the token before it being there, or a verdict that came between. Of these the oracle has the one that
  is earliest in its own time (a verdict never before the token that the guess is below). The pass then takes
  as long as it did. So the drafter makes up no time by leaving out wrong branches; but where it was asked
  because of a verdict, it is asked earlier if the verdict is.
- *Change costs.* A station (a stage, a link, the head) carries segments one by one, in the order in which
  they were sent, and takes as long for so many rows as it does.

No schedule with those guesses is faster than what `earliest_s` computes. Let `here(k)` and `known(k)` be when
token k is there and known in some schedule, `through(s, k)` when station s is through with the segment that
carries it. By induction over k all three are no earlier than what is computed:

1. `here(k)` is the earlier of `known(k)` and of sums and minima of earlier ones, and grows with each.
2. A segment with token k carries the last n of the first k for some n, and perhaps later ones, which only add
   time. It is at station s after `here(k)` and what n rows take until there, and s is through with the first
   k - n before it begins. So `through(s, k)` is at least the later of the two and what n rows take at s; the
   least of this over n is what is computed.
3. `known(k + 1)` is at least that and what n rows take from s to the head, for every s. So the greatest over
   all s of the least over n is a bound, too.

The answer is one of these schedules, at costs that waits and wrong rows only raise. The bound may be lower
than any schedule: each token has the best one for itself, and segments wait at one station only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from flowspec.bench.cases import PlainCase
from flowspec.bench.console import progress
from flowspec.bench.drafters import depths_of
from flowspec.bench.engine import Engine, Work, open_workers, works_of
from flowspec.bench.experiment import Setup, Testbed
from flowspec.bench.report import format_percent, place
from flowspec.bench.simulated import cluster_of, run_many
from flowspec.core.head.events import Draft, Drafted, Emit, SegmentTimed, SendToFirstStage
from flowspec.core.protocol.messages import Segment
from flowspec.errors import InputError, UnexpectedError
from flowspec.plan.timing import LinkSpec
from flowspec.sim.device import DeviceSpec
from flowspec.sim.record import HEAD
from flowspec.sim.world import Cluster, Handled
from lab.bench.experiment import engine_of, make_parser, pick_study
from lab.command import run_command, show


class SeenToken(NamedTuple):
    """A token of an answer, by the head's clock: when it was `known`, when it was `here` as a guess, and when
    the drafter was `asked` for that. One that was not guessed before it was known was asked for and here when
    it was known."""

    known_s: float
    here_s: float
    asked_s: float


class Station(NamedTuple):
    """What carries one segment at a time, for so many seconds by its rows, and then hands it on `delay_s`
    later. `stage` is its number where it is one."""

    busy_s: Callable[[int], float]
    delay_s: float = 0.0
    stage: int | None = None


# ------------------------------------------------------------------------------------------ the bound


def earliest_s(
    tokens: Sequence[SeenToken], stations: Sequence[Station], free_s: Sequence[float]
) -> list[float]:
    """When an oracle knows each of an answer's tokens, at the earliest.

    The first one it knows when that was known: it comes of the prompt, with which each of the `stations`, in
    their order from the head and back to it, is busy until `free_s`.
    """
    count = len(tokens) - 1
    # [stations, rows]; where more rows are quicker, fewer are taken to be as quick
    busy_s = np.array([[each.busy_s(rows) for rows in range(1, count + 1)] for each in stations])
    busy_s = np.minimum.accumulate(busy_s[:, ::-1], axis=1)[:, ::-1]
    passed_s = np.cumsum(busy_s + np.array([[each.delay_s] for each in stations]), axis=0)
    before_s = np.vstack([np.zeros((1, count)), passed_s[:-1]])
    after_s = passed_s[-1] - before_s - busy_s
    through_s = np.empty((len(stations), count + 1))
    through_s[:, 0] = free_s
    known_s, here_s = [tokens[0].known_s], list[float]()
    for sent in range(1, count + 1):  # the first so many tokens, of which the last n are in the last segment
        here_s.append(_here_s(tokens, known_s, here_s))
        begins_s = np.maximum(through_s[:, :sent][:, ::-1], here_s[-1] + before_s[:, :sent])
        ends_s = begins_s + busy_s[:, :sent]
        through_s[:, sent] = ends_s.min(axis=1)
        back_s = float((ends_s + after_s[:, :sent]).min(axis=1).max())
        known_s.append(max(back_s, known_s[-1]))
    return known_s


def _here_s(tokens: Sequence[SeenToken], known_s: Sequence[float], here_s: Sequence[float]) -> float:
    """When the next token is there: `known_s` are those that are known up to it, `here_s` those before it."""
    at = len(here_s)
    token = tokens[at]
    if token.here_s >= token.known_s:
        return known_s[at]
    if at == 0:  # nothing before it is earlier than it was
        return token.here_s
    parent = tokens[at - 1]
    asked_here_s = here_s[-1] + token.asked_s - parent.here_s
    for verdict in range(at - 1, -1, -1):
        if tokens[verdict].known_s < parent.here_s:
            break  # the token before was there later, and is what the guess waited for
        if tokens[verdict].known_s <= token.asked_s:
            after_s = max(here_s[-1], known_s[verdict]) + token.asked_s - tokens[verdict].known_s
            asked_here_s = min(asked_here_s, after_s)
    return min(known_s[at], asked_here_s + token.here_s - token.asked_s)


def stations_of(cluster: Cluster, context: int) -> list[Station]:
    """The way to each stage with the stage, the way back, the head, for an answer behind `context` tokens. Of
    messages the payload alone is counted, and the first stage's are tokens."""
    link, row_bytes = cluster.data, cluster.row_bytes
    assert isinstance(link, LinkSpec), "an experiment's links are alike"
    assert row_bytes is not None

    def way(row_bytes: int) -> Station:
        return Station(lambda rows: link.transfer_s(rows * row_bytes), link.delay_s)

    def stage_s(device: DeviceSpec, rows: int) -> float:
        return device.curve.seconds(rows, context) + device.sampling.seconds(rows)

    stations = []
    for number, device in enumerate(cluster.devices):
        stations += [way(row_bytes if number else 0), Station(partial(stage_s, device), stage=number)]
    last_states = cluster.captured[-1] if cluster.captured else 0  # the verdict comes behind them
    head = Station(lambda rows: cluster.head_s + cluster.verifying.seconds(rows))
    return [*stations, way(last_states * row_bytes + cluster.returned_row_bytes), head]


# ------------------------------------------------------------------------------------------ what happened


class TokenLog:
    """Of one answer behind `length` tokens; `watch` is given every event. A guess is there once a drafter has
    said it, whatever the head thinks of it, or when it is sent, if nobody said it. `prompt` is the trip of
    the segment that carried the prompt's last token."""

    prompt: SegmentTimed

    def __init__(self, length: int) -> None:
        self._length = length
        self._last = self._prompt_segment = -1
        self._asked_s: dict[tuple[int, int], float] = {}
        self._ids: dict[tuple[int, int], int] = {}
        self._guessed_s: dict[tuple[int, int], tuple[float, float]] = {}
        self._known: list[tuple[int, float]] = []

    def watch(self, handled: Handled) -> None:
        event, now_s = handled.event, handled.now_s
        if isinstance(event, Drafted):
            asked_s = self._asked_s.pop((event.drafter, event.job), now_s)
            for proposal in event.proposals:
                for token in proposal.tokens:
                    self._guessed_s.setdefault((proposal.node, token), (now_s, asked_s))
        for command in handled.commands if handled.place == HEAD else ():
            if isinstance(command, Draft):
                self._asked_s[command.drafter, command.job] = now_s
                self._learn(command.segment, now_s, is_sent=False)
            elif isinstance(command, SendToFirstStage):
                self._learn(command.segment, now_s, is_sent=True)
            elif isinstance(command, Emit):
                self._known += [(token, now_s) for token in command.tokens]
            elif isinstance(command, SegmentTimed) and command.segment == self._prompt_segment:
                self.prompt = command

    def _learn(self, segment: Segment, now_s: float, *, is_sent: bool) -> None:
        for part in segment.parts:
            rows = zip(part.ids, part.parents, part.tokens, part.positions, strict=True)
            for node, parent, token, position in rows:
                if position >= self._length:
                    self._ids[parent, token] = node
                    self._guessed_s.setdefault((parent, token), (now_s, now_s))
                elif position == self._length - 1 and is_sent:
                    self._last, self._prompt_segment = node, segment.segment

    def tokens(self) -> list[SeenToken]:
        """Of the whole answer, in order."""
        tokens, node = [], self._last
        for token, known_s in self._known:
            here_s, asked_s = self._guessed_s.get((node, token), (known_s, known_s))
            tokens.append(SeenToken(known_s, *(min(each, known_s) for each in (here_s, asked_s))))
            node = self._ids.get((node, token), -1)
        return tokens


class Bound(NamedTuple):
    """The times after the first token of an answer to a prompt with a seed: those that it took, and that an
    oracle takes."""

    testbed: str
    temperature: float
    method: str
    answer: tuple[str, int]
    decode_s: float
    oracle_s: float


def bounds_of(engine: Engine, work: Work) -> Iterator[Sequence[Any]]:
    for testbed, setup in work.jobs if len(work.case.answer) > 1 else ():
        yield [bound_of(engine, testbed, setup, work.case)]


def bound_of(engine: Engine, testbed: Testbed, setup: Setup, case: PlainCase) -> Bound:
    context, length, sampling = engine.experiment.context, len(case.prompt), case.sampling
    log, drafters = TokenLog(length), engine.drafters(setup, case)
    experience = engine.learnt(testbed, setup, sampling.temperature)
    world = run_many(testbed, setup, [case], drafters, context, experience, log.watch)
    (answer,) = world.answers[0]
    if answer.end is None or not case.is_answered_by(tuple(answer.tokens), answer.end.reason):
        raise UnexpectedError(f"{setup.name} gave another answer than plain decoding to {case.prompt_id}")
    cluster = cluster_of(testbed, setup, context, list(drafters), depths_of(drafters.values()))
    stations, at_s, free_s = stations_of(cluster, length), log.prompt.sent_s, []
    for busy_s, delay_s, stage in stations:  # when each is through with the prompt
        at_s += busy_s(log.prompt.rows) if stage is None else log.prompt.hops[stage].spent_s
        free_s.append(at_s)
        at_s += delay_s
    known_s, times_s = earliest_s(log.tokens(), stations, free_s), answer.times_s
    took_s, oracle_s = times_s[-1] - times_s[0], known_s[-1] - known_s[0]
    asked = (case.prompt_id, sampling.seed)
    return Bound(testbed.name, sampling.temperature, setup.name, asked, took_s, oracle_s)


def shares_of(bounds: Sequence[Bound], testbed: str, temperature: float) -> dict[str, dict[str, float]]:
    """By method the oracle's time by its own: with the best guesses of any method, and with its `own`."""
    least: dict[tuple[str, int], float] = {}
    by_method: dict[str, list[Bound]] = {}
    for each in (each for each in bounds if each[:2] == (testbed, temperature)):
        least[each.answer] = min(each.oracle_s, least.get(each.answer, each.oracle_s))
        by_method.setdefault(each.method, []).append(each)
    shares = {}
    for method, some in by_method.items():
        took_s = sum(each.decode_s for each in some)
        own = sum(each.oracle_s for each in some) / took_s
        shares[method] = {"oracle": sum(least[each.answer] for each in some) / took_s, "own": own}
    return shares


def command(args: argparse.Namespace) -> int:
    study = pick_study(args)
    if study.is_load:
        raise InputError("--users: the oracle judges single answers; expected none")
    cases = study.cases(None)
    works = works_of(study, cases)
    bounds: list[Bound] = []
    with (
        progress("answers", len(works), quiet=args.json) as step,
        open_workers(engine_of(study, cases), max(1, min(args.jobs, len(works)))) as run_all,
    ):
        for some in run_all(bounds_of, works):
            bounds += some
            step("answers", 1)
    tables: list[dict[str, Any]] = [
        {"testbed": testbed, "temperature": temperature, "shares": shares_of(bounds, testbed, temperature)}
        for testbed, temperature in dict.fromkeys(each[:2] for each in bounds)
    ]
    if args.json:
        print(json.dumps(tables))
        return 0
    for table in tables:
        rows = [[name, *map(format_percent, each.values())] for name, each in table["shares"].items()]
        show(place(table), ["method", "oracle", "own"], rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(make_parser("lab.bench.oracle", __doc__), command, argv)


if __name__ == "__main__":
    sys.exit(main())
