"""Where the time goes by which an answer is later than an oracle's (`flowspec.bench.oracle`).

    python -m tests.perf.oracle_gap [--experiment NAME-OR-FILE] [--method NAME] [--prompts FILE ...]
        [--limit N] [--temperatures 0,1] [--json]

The oracle's time is reckoned again and again, each time with less that it may do better than the method:

- *not sent*: without the guesses that the method did not send before they were known;
- *passed over*: besides, no guess goes out before it did where other segments went without it meanwhile;
- *late*: no guess goes out before it did;
- *rest*: what is left to the time that the answer took. Wrong rows make segments longer, corrections wait,
  and tokens were shared out among segments otherwise than is best.

Each is told as a share of the time that the answers took, and so is the oracle's own. *unsaid* is the share
of tokens that no drafter said before they were known: each costs the oracle a trip, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from flowspec.bench.bench import read_cases, warm_up_cases
from flowspec.bench.config import OURS, Bench
from flowspec.bench.console import progress, show
from flowspec.bench.experiments import find_experiment, pick_setups, read_experiment
from flowspec.bench.guesses import depths_of
from flowspec.bench.oracle import SeenToken, Station
from flowspec.bench.simulated import experiment, stations_of
from flowspec.bench.trace import Trace, oracle_s
from flowspec.bench.virtual_runs import VirtualRuns, Work
from tests.command import Parser, run_command

ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Of one answer, or of several together: seconds after first tokens, and counts of later tokens."""

    took_s: float = 0.0
    oracle_s: float = 0.0
    sent_s: float = 0.0
    not_passed_s: float = 0.0
    in_time_s: float = 0.0
    tokens: int = 0
    unsaid: int = 0

    def __add__(self, other: Gap) -> Gap:
        ours, theirs = asdict(self), asdict(other)
        return Gap(**{name: ours[name] + theirs[name] for name in ours})

    def shares(self) -> dict[str, float]:
        """Of the time that was taken; they are 1 together, but for `unsaid`, which is of the tokens."""
        seconds = {
            "oracle": self.oracle_s,
            "not sent": self.sent_s - self.oracle_s,
            "passed over": self.not_passed_s - self.sent_s,
            "late": self.in_time_s - self.not_passed_s,
            "rest": self.took_s - self.in_time_s,
        }
        shares = {name: each_s / self.took_s for name, each_s in seconds.items()}
        return shares | {"unsaid": self.unsaid / self.tokens}


def only_sent(token: SeenToken) -> SeenToken:
    """The same, but not guessed if it was not sent as a guess."""
    is_sent = token.sent_s is not None and token.sent_s < token.known_s
    return token if is_sent else replace(token, here_s=token.known_s, asked_s=None)


def when_sent(token: SeenToken) -> SeenToken:
    """The same, but not there before it was sent, if that was as a guess."""
    token = only_sent(token)
    if not token.is_guessed or token.sent_s is None:
        return token
    return replace(token, here_s=max(token.here_s, token.sent_s))


def in_order(tokens: Sequence[SeenToken]) -> list[SeenToken]:
    """The same, but none is there, or asked for, before the one that it follows."""
    found: list[SeenToken] = []
    for token in tokens:
        if found and token.asked_s is not None:
            here_s = min(max(token.here_s, found[-1].here_s), token.known_s)
            asked_s = min(max(token.asked_s, found[-1].here_s), here_s)
            token = replace(token, here_s=here_s, asked_s=asked_s)
        found.append(token)
    return found


def gap_of(trace: Trace, stations: Sequence[Station]) -> Gap | None:
    """None for an answer without an oracle's time."""
    tokens = trace.log.tokens()
    departures = [trip.sent_s for trip in trace.trips]

    def is_passed_over(token: SeenToken) -> bool:
        return token.sent_s is not None and any(token.here_s <= each < token.sent_s for each in departures)

    def least_s(seen: Sequence[SeenToken]) -> float:
        return oracle_s(trace, stations, in_order(seen)) or 0.0

    if oracle_s(trace, stations) is None:
        return None
    return Gap(
        took_s=tokens[-1].known_s - tokens[0].known_s,
        oracle_s=least_s(tokens),
        sent_s=least_s([only_sent(each) for each in tokens]),
        not_passed_s=least_s(
            [when_sent(each) if is_passed_over(each) else only_sent(each) for each in tokens]
        ),
        in_time_s=least_s([when_sent(each) for each in tokens]),
        tokens=len(tokens) - 1,
        unsaid=sum(not each.is_guessed for each in tokens[1:]),
    )


def gaps_of(bench: Bench) -> Iterator[tuple[tuple[float, str], Gap]]:
    """By temperature and domain, of each answer of the experiment's first method on its first testbed."""
    testbed, setup = bench.testbeds[0], bench.setups[0]
    cases = read_cases(bench, None)
    runs = VirtualRuns(bench, warm_up_cases(bench, cases))
    with progress("answers", len(cases)) as step:
        for number, case in enumerate(cases):
            drafters = runs.drafters(setup, case)
            made = experiment(testbed, setup, bench.context, list(drafters), depths_of(drafters.values()))
            (found,) = runs.runs(Work(number=number, case=case, jobs=((testbed, setup),)))
            gap = gap_of(found.trace, stations_of(made, len(case.prompt)))
            if gap is not None:
                yield (case.sampling.temperature, case.domain), gap
            step(f"{case.domain} {case.prompt_id}")


def command(args: argparse.Namespace) -> int:
    bench = read_experiment(find_experiment(args.experiment))
    bench = replace(
        bench,
        setups=pick_setups(bench.setups, [args.method])[:1],
        prompts=tuple(args.prompts or bench.prompts),
        limit=args.limit or bench.limit,
        temperatures=args.temperatures or bench.temperatures,
    )
    sums: dict[tuple[float, str], Gap] = {}
    for (temperature, domain), gap in gaps_of(bench):
        for key in ((temperature, domain), (temperature, ALL)):
            sums[key] = sums.get(key, Gap()) + gap
    if args.json:
        found = [
            {"temperature": temperature, "domain": domain, **asdict(gap), "shares": gap.shares()}
            for (temperature, domain), gap in sums.items()
        ]
        print(json.dumps(found))
        return 0
    for temperature in dict.fromkeys(temperature for temperature, _ in sums):
        here = {domain: gap for (at, domain), gap in sums.items() if at == temperature}
        rows = [
            [domain, *(f"{100 * each:.1f}%" for each in gap.shares().values())]
            for domain, gap in here.items()
        ]
        show(f"{args.method}, temperature {temperature:g} (simulated)", ["", *here[ALL].shares()], rows)
    return 0


def temperatures(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.oracle_gap", __doc__)
    parser.add_argument("--experiment", default="paper-bundled", help="default: %(default)s")
    parser.add_argument("--method", default=OURS, help="default: %(default)s")
    parser.add_argument("--prompts", action="append", metavar="FILE", help="may be repeated")
    parser.add_argument("--temperatures", type=temperatures, metavar="T,T", help="default: the experiment's")
    parser.whole("--limit", None, "prompts per file")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
