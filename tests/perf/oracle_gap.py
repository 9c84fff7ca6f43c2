"""Where the time goes by which an answer is later than an oracle's (`flowspec.bench.oracle`).

    python -m tests.perf.oracle_gap [--experiment NAME-OR-FILE] [--method NAME] [--prompts FILE ...]
        [--limit N] [--temperatures 0,1] [--testbed NAME] [--acceptance SHARE] [--json]

The oracle's time is reckoned again and again, each time with less that it may do better than the method:

- *not sent*: without the guesses that the method did not send before they were known;
- *passed over*: besides, no guess goes out before it did where other segments went without it meanwhile;
- *late*: no guess goes out before it did;
- *rest*: what is left to the time that the answer took. Wrong rows make segments longer, corrections wait,
  and tokens were shared out among segments otherwise than is best.

Each is told as a share of the time that the answers took, and so is the oracle's own. *unsaid* is the share
of tokens that no drafter said before they were known: each costs the oracle a trip, too.

A second table tells what had become of each token by the time that it was known (the verdict on the one
before it was back), as shares of all tokens: it was the drafter's best guess or another one, in flight or
not; the drafter had spoken of what may come there, and not guessed it; or had not spoken of it yet. What was
not in flight then was missed, and cost a trip.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from flowspec.bench.bench import read_cases, warm_up_cases
from flowspec.bench.config import OURS, Bench, Testbed
from flowspec.bench.console import progress, show
from flowspec.bench.experiments import ACCEPTANCE_MAX, find_experiment, pick_setups, read_experiment
from flowspec.bench.guesses import depths_of
from flowspec.bench.oracle import SeenToken, Station
from flowspec.bench.simulated import experiment, stations_of
from flowspec.bench.trace import Trace, oracle_s
from flowspec.bench.virtual_runs import VirtualRuns, Work
from flowspec.errors import InputError
from tests.command import Parser, run_command

ALL = "all"
FATES = (
    "best_in_flight",
    "other_in_flight",
    "best_not_sent",
    "other_not_sent",
    "not_guessed",
    "not_spoken_of",
)


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
    best_in_flight: int = 0
    other_in_flight: int = 0
    best_not_sent: int = 0
    other_not_sent: int = 0
    not_guessed: int = 0
    not_spoken_of: int = 0

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

    def fates(self) -> dict[str, float]:
        """Of the tokens, each of which had one of them; they are 1 together."""
        return {name.replace("_", " "): getattr(self, name) / self.tokens for name in FATES}


def was_in_flight(token: SeenToken) -> bool:
    """Whether it was sent as a guess."""
    return token.sent_s is not None and token.sent_s < token.known_s


def fate_of(token: SeenToken) -> str:
    """Which of `FATES` it had."""
    if token.rank is None:
        return "not_guessed" if token.has_spoken else "not_spoken_of"
    return f"{'best' if token.rank == 1 else 'other'}_{'in_flight' if was_in_flight(token) else 'not_sent'}"


def only_sent(token: SeenToken) -> SeenToken:
    """The same, but not guessed if it was not sent as a guess."""
    return token if was_in_flight(token) else replace(token, here_s=token.known_s, asked_s=None)


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
        **Counter(fate_of(each) for each in tokens[1:]),
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
        testbeds=(picked(bench, args.testbed),),
    )
    if args.acceptance is not None:
        if not bench.is_synthetic:
            raise InputError(
                f"--acceptance: expected an experiment with model synthetic, got {bench.model!r:.80}"
            )
        bench = replace(bench, acceptance=args.acceptance, profile=None)
    sums: dict[tuple[float, str], Gap] = {}
    for (temperature, domain), gap in gaps_of(bench):
        for key in ((temperature, domain), (temperature, ALL)):
            sums[key] = sums.get(key, Gap()) + gap
    if args.json:
        found = [
            {
                "temperature": temperature,
                "domain": domain,
                **asdict(gap),
                "shares": gap.shares(),
                "fates": gap.fates(),
            }
            for (temperature, domain), gap in sums.items()
        ]
        print(json.dumps(found))
        return 0
    for temperature in dict.fromkeys(temperature for temperature, _ in sums):
        here = {domain: gap for (at, domain), gap in sums.items() if at == temperature}
        for title, of in (("time", Gap.shares), ("tokens", Gap.fates)):
            rows = [
                [domain, *(f"{100 * each:.1f}%" for each in of(gap).values())] for domain, gap in here.items()
            ]
            show(
                f"{args.method}, temperature {temperature:g}, shares of {title} (simulated)",
                ["", *of(here[ALL])],
                rows,
            )
    return 0


def picked(bench: Bench, name: str | None) -> Testbed:
    """The testbed of this name, or the first one."""
    known = {testbed.name: testbed for testbed in bench.testbeds}
    if name is not None and name not in known:
        raise InputError(f"--testbed: expected one of {'; '.join(known)}, got {name!r:.80}")
    return bench.testbeds[0] if name is None else known[name]


def share(text: str) -> float:
    found = float(text)
    if not 0 < found <= ACCEPTANCE_MAX:
        raise argparse.ArgumentTypeError(f"expected a share above 0, up to {ACCEPTANCE_MAX:g}, got {text!r}")
    return found


def temperatures(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.oracle_gap", __doc__)
    parser.add_argument("--experiment", default="paper-bundled", help="default: %(default)s")
    parser.add_argument("--method", default=OURS, help="default: %(default)s")
    parser.add_argument("--prompts", action="append", metavar="FILE", help="may be repeated")
    parser.add_argument("--temperatures", type=temperatures, metavar="T,T", help="default: the experiment's")
    parser.add_argument("--testbed", metavar="NAME", help="default: the experiment's first")
    parser.add_argument("--acceptance", type=share, metavar="SHARE", help="of a synthetic drafter")
    parser.whole("--limit", None, "prompts per file")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
