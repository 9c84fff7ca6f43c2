"""What fault schedules come to, seed by seed. Worker processes import this by name, which they cannot do with
the command itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec.core.cluster import daemon, forming, membership
from flowspec.core.head import head, remote_drafter
from flowspec.core.stage import stage
from lab.faults.play import FaultError, Play
from lab.faults.schedule import draw

RULES_SEEDS = 5000
"""So many schedules bring every rule about: the rarest fires in one of five hundred."""
RULES = {
    f"{core}: {rule}": text
    for core, rules in (
        ("member", membership.RULES),
        ("pipeline", forming.RULES),
        ("head", head.RULES),
        ("drafter", remote_drafter.RULES),
        ("daemon", daemon.RULES),
        ("stage", stage.RULES),
    )
    for rule, text in rules.items()
}


@dataclass(slots=True)
class Tally:
    """What a number of seeds came to: failures by seed, how often which fault and how many pipelines
    occurred, and sessions that ended as they should."""

    seeds: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    pipelines: int = 0
    given_up: int = 0
    answers: int = 0
    tokens: int = 0
    fired: Counter[str] = field(default_factory=Counter)

    @property
    def idle_rules(self) -> list[str]:
        """Rules that never fired, where there were seeds enough for all."""
        return [rule for rule in RULES if not self.fired[rule]] if self.seeds >= RULES_SEEDS else []

    def add(self, other: Tally) -> None:
        for name in ("seeds", "pipelines", "given_up", "answers", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures.update(other.failures)
        self.faults.update(other.faults)
        self.fired.update(other.fired)


def play(seeds: Sequence[int]) -> Tally:
    tally = Tally(seeds=len(seeds))
    for seed in seeds:
        run = Play(draw(seed))
        try:
            run.run()
        except FaultError as error:
            tally.failures[seed] = str(error)
        tally.faults.update(fault.kind for fault in run.schedule.faults)
        tally.pipelines += run.cluster.pipelines
        tally.given_up += run.has_given_up
        tally.fired.update(run.fired())
        for answers in run.cluster.answers.values():
            tally.answers += len(answers)
            tally.tokens += sum(len(answer.tokens) for answer in answers)
    return tally
