"""An answer that another head takes over at any of its tokens: the rest is the same, and so is the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from flowspec.core.head.events import Submit
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.timing import Curve
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.experiment import Experiment
from flowspec.sim.language import HashLanguage
from tests.pipeline import ask
from tests.sim.swarm import plain

CONTEXT = 28
PROMPT = (3, 1, 4, 1, 5)
LANGUAGE = HashLanguage(24, seed=9)
SAMPLED = Sampling(temperature=1.0, seed=11)


@dataclass
class StopAt:
    """Ends the answer after these tokens in a row; like the runtime's rule for strings it looks at each token
    once."""

    wanted: tuple[int, ...]
    seen: list[int] = field(default_factory=list)

    def stops_at(self, tokens: Sequence[int]) -> bool:
        self.seen += tokens[len(self.seen) :]
        return any(
            tuple(self.seen[at : at + len(self.wanted)]) == self.wanted for at in range(len(self.seen))
        )


def rest_of(method: str, submit: Submit) -> tuple[list[int], str]:
    """What a cluster answers that knows nothing but this, and why it ends."""
    experiment = Experiment(
        devices=(DeviceSpec(curve=Curve(base_s=0.01), layers=2),) * 3, method=method, context=CONTEXT
    )
    world = experiment.build(LANGUAGE, [FakeDrafter(LANGUAGE, 0.8, 1, context=CONTEXT)])
    world.at(0.0, submit)
    world.run()
    (answer,) = world.answers[submit.request]
    assert answer.end is not None
    return answer.tokens, answer.end.reason


WHOLE, _ = plain(LANGUAGE, ask(1, PROMPT, 20, sampling=SAMPLED), CONTEXT)
STOP = next(at for at, token in enumerate(WHOLE) if at > 5 and token not in WHOLE[:at])


@pytest.mark.parametrize(
    ("submit", "stop", "length", "reason"),
    [
        (ask(1, PROMPT, 12, sampling=SAMPLED), (), 12, "length"),
        (ask(1, PROMPT, 12, sampling=SAMPLED, stop_ids=frozenset([WHOLE[STOP]])), (), STOP, "stop"),
        (ask(1, PROMPT, 20, sampling=SAMPLED), tuple(WHOLE[6:10]), 10, "stop"),
        (ask(1, PROMPT, 200), (), CONTEXT - len(PROMPT), "length"),
    ],
    ids=["length", "a stop token", "a stop that began before the cut", "the context is full"],
)
def test_an_answer_goes_on_from_every_cut_and_ends_in_the_same_way(
    submit: Submit, stop: tuple[int, ...], length: int, reason: str
) -> None:
    def fresh(answered: Sequence[int] = ()) -> Submit:
        return replace(submit, answered=tuple(answered), stop_rule=StopAt(stop) if stop else None)

    whole, why = plain(LANGUAGE, fresh(), CONTEXT)
    assert (len(whole), why) == (length, reason)
    for cut in range(length + 1):
        method = ("continuous", "flowspec-paper", "tree-sd")[cut % 3]
        assert rest_of(method, fresh(whole[:cut])) == (whole[cut:], reason), f"cut after {cut} tokens"
