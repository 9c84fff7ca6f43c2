"""The parts of the recordings, by name.

Each is a module that sees what FlowSpec does: `observe(place, name)` gives observations, one after the other,
and takes at most ten minutes on two cores. What a *timed* part sees are numbers that no two runs have alike:
it is run in turns from this tree and from the recorded commit's, and ratios are compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lab.golden.place import Place
from lab.golden.recording import Absent, Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`rounds`: how often a timed part runs from each tree; 0: its values are compared as they are.

    `tolerance`: by how much a number may be worse, by patterns of keys of which the first that fits counts;
    where none does, it is `timed.TOLERANCE`.
    """

    name: str
    about: str
    rounds: int = 0
    tolerance: Mapping[str, float] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """That of `speed` sees `speed-llama`, too."""
        return f"lab.golden.{self.name.partition('-')[0]}"

    @property
    def is_timed(self) -> bool:
        return self.rounds > 0

    def observe(self, place: Place) -> Iterator[Observation | Absent]:
        found: Iterator[Observation | Absent] = importlib.import_module(self.module).observe(place, self.name)
        return found


RATES = {"*cpu ms a token": 0.15, "*": 0.2}

PARTS = {
    part.name: part
    for part in (
        Part(
            name="tokens",
            about="answers of the toy: methods, precisions, stages, kills, resumes, copies, schemas",
        ),
        Part(name="tokens-smollm2", about="the same of SmolLM2-135M-Instruct"),
        Part(name="logits", about="digests of logits by family and precision"),
        Part(name="commands", about="screens and JSON of each command"),
        Part(name="refusals", about="what is said of 60 wrong inputs"),
        Part(name="api", about="documents of 40 requests, a page's recording"),
        Part(name="tables", about="experiments in virtual time"),
        Part(
            name="speed",
            about="tokens/s of the toy and of SmolLM2, by one and two threads",
            rounds=3,
            tolerance=RATES,
        ),
        Part(
            name="speed-llama",
            about="the same of a Llama of 1.24 G parameters with made weights",
            rounds=2,
            tolerance=RATES,
        ),
        Part(
            name="pauses",
            about="pauses by part and kind of loss",
            rounds=2,
            tolerance={"*/pause s": 0.3, "*/away s": 0.3, "killed head/*": 0.3, "*": 0.5},
        ),
        Part(
            name="starts",
            about="time to the first answer, by part",
            rounds=2,
            tolerance={"*cpu s": 0.2, "*": 0.3},
        ),
        Part(
            name="room",
            about="memory of processes, disk of an installation",
            rounds=2,
            tolerance={"disk/*": 0.02, "*": 0.05},
        ),
        Part(
            name="costs",
            about="a hop, the head's thinking, a matrix and a layer in each precision",
            rounds=3,
            tolerance={"hop/p50 ms": 0.3, "hop/p99 ms": 1.0, "*": 0.15},
        ),
    )
}
