"""An answer that another head takes over at any of its tokens: the rest is the same, and so is how it
ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from flowspec.core.head.events import Submit
from flowspec.core.methods import METHODS
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.timing import Curve
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.experiment import Experiment
from flowspec.sim.language import HashLanguage
from tests.pipeline import ask
from tests.sim.swarm import plain

CONTEXT = 40
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
    world = experiment.build(
        LANGUAGE, [] if method == "ar" else [FakeDrafter(LANGUAGE, 0.8, 1, context=CONTEXT)]
    )
    world.at(0.0, submit)
    world.run()
    (answer,) = world.answers[submit.request]
    assert answer.end is not None
    return answer.tokens, answer.end.reason


def at_every_cut(method: str, submit: Submit, stop: tuple[int, ...] = ()) -> tuple[list[int], str]:
    """Takes the answer over at each of its tokens; returns the undisturbed one."""

    def fresh(answered: Sequence[int] = ()) -> Submit:
        return replace(submit, answered=tuple(answered), stop_rule=StopAt(stop) if stop else None)

    whole, reason = plain(LANGUAGE, fresh(), CONTEXT)
    for cut in range(len(whole) + 1):
        assert rest_of(method, fresh(whole[:cut])) == (whole[cut:], reason), f"cut after {cut} tokens"
    return whole, reason


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_an_answer_goes_on_from_every_cut(method: str, sampling: Sampling) -> None:
    whole, reason = at_every_cut(method, ask(1, PROMPT, 12, sampling=sampling))
    assert (len(whole), reason) == (12, "length")


def test_it_ends_at_the_same_stop_token() -> None:
    whole, _ = plain(LANGUAGE, ask(1, PROMPT, 12, sampling=SAMPLED), CONTEXT)
    stop = next(token for token in whole[5:] if token not in whole[:5])
    cut, reason = at_every_cut("continuous", ask(1, PROMPT, 12, sampling=SAMPLED, stop_ids=frozenset([stop])))
    assert (cut, reason) == (whole[: whole.index(stop)], "stop")


def test_it_ends_at_a_stop_that_began_before_the_cut() -> None:
    whole, _ = plain(LANGUAGE, ask(1, PROMPT, 20, sampling=SAMPLED), CONTEXT)
    cut, reason = at_every_cut("continuous", ask(1, PROMPT, 20, sampling=SAMPLED), stop=tuple(whole[6:10]))
    assert (cut, reason) == (whole[:10], "stop")


def test_it_ends_where_the_context_is_full() -> None:
    whole, reason = at_every_cut("continuous", ask(1, PROMPT, 200))
    assert (len(whole), reason) == (CONTEXT - len(PROMPT), "length")
