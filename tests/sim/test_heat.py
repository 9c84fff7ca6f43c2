"""A device that heat slows down, in virtual time: one new plan between two answers, faster from then on, and
no wrong token.

Every token is compared with the plain answer when it is emitted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowspec.core.cluster.membership import MembershipTimeouts
from flowspec.core.head.events import Submit
from flowspec.core.head.flights import Bounds
from flowspec.core.methods import make_method
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.device import DeviceSpec
from lab.faults.cluster import FORMING_TIMEOUTS
from lab.faults.play import Play
from lab.faults.schedule import Dialogue, Schedule, draw

CONTEXT = 400
LAYERS = 24
HOT_S = 100.0
LAST_S = 420.0
NOTE = "going over to another plan"


def schedule(changed_s: float) -> Schedule:
    """Three boards that are alike take 120 ms a layer; one user asks, and asks again a second after each
    answer."""
    drawn = draw(1)
    first = Submit(
        request=0,
        prompt=(1, 2, 3, 4),
        new_tokens_max=30,
        sampling=Sampling(temperature=0.8, seed=3),
        stop_ids=frozenset(),
    )
    return replace(
        drawn,
        devices=("pi-0", "pi-1", "pi-2"),
        arithmetics={},
        spec=DeviceSpec(curve=Curve(base_s=2.88), layers=4),
        links=(LinkSpec(delay_s=0.001),) * 3,
        load_s=0.05,
        layer_count=LAYERS,
        devices_min=1,
        devices_max=3,
        queued_max=64,
        context=CONTEXT,
        bounds=Bounds(),
        membership_timeouts=MembershipTimeouts(
            silent_s=5.0,
            loading_silent_s=15.0,
            loading_s=60.0,
            stuck_s=60.0,
            probe_s=2.0,
            back_s=4.0,
            forgive_s=300.0,
        ),
        forming_timeouts=replace(FORMING_TIMEOUTS, changed_s=changed_s),
        method=lambda: make_method("continuous"),
        cache_slots=dict.fromkeys(("pi-0", "pi-1", "pi-2"), 100_000),
        draft_slots=100_000,
        qualities=(0.98,),
        levels=(0,),
        captures=(),
        drafting=(Curve(base_s=0.01),),
        places=(None,),
        dialogues=(Dialogue(first=first, at_s=0.0, turns=0, cancel_s=None, forget_s=None),),
        faults=(),
    )


class Heated(Play):
    """Answers until `last_s`, while a device takes so many times as long from `HOT_S` on."""

    def __init__(
        self, heat: float, until_s: float = 1e9, last_s: float = LAST_S, changed_s: float = 60.0
    ) -> None:
        super().__init__(schedule(changed_s))
        self.last_s = last_s
        for daemon in self.daemons.values():
            daemon.is_by_layers = True
        hot = self.daemons["pi-1"]
        self.clock.at(HOT_S, lambda: hot.be_hot(heat))
        self.clock.at(until_s, lambda: hot.be_hot(1.0))

    def _ended(self, request: int) -> None:
        """The same question again, in the same conversation."""
        submit = self.cluster.answers[request][-1].submit
        if self.clock.now_s >= self.last_s:
            self._waiting -= 1
            return
        sampling = replace(submit.sampling, seed=submit.sampling.seed + 1)
        self.cluster.at(self.clock.now_s + 1.0, replace(submit, sampling=sampling))

    def play(self) -> None:
        """To the end; whatever is wrong is raised."""
        self._run_until(lambda: self._waiting == 0, self.last_s + 100)
        for answer in self.cluster.answers[0]:
            self._check(answer)

    def rate(self, first_s: float, end_s: float) -> float:
        """Tokens a second of the answers that began and ended in between."""
        found = [
            each
            for each in self.cluster.answers[0]
            if first_s <= each.submitted_s and 0 < each.ended_s <= end_s
        ]
        return sum(len(each.tokens) for each in found) / sum(
            each.ended_s - each.submitted_s for each in found
        )

    def notes(self, text: str) -> list[float]:
        return [at_s for at_s, who, told in self.story if who == "head" and text in told]


def test_a_device_that_heat_slows_down_gets_fewer_layers_between_two_answers() -> None:
    run = Heated(1.4)
    run.play()
    (at_s,) = run.notes(NOTE)
    assert HOT_S + 60 < at_s < HOT_S + 180, "a minute of its work, and the end of an answer"
    assert not any(each.submitted_s < at_s < each.ended_s for each in run.cluster.answers[0]), (
        "between two answers"
    )
    assert run.cluster.pipelines == 2, "one new plan"
    assert [len(run.notes("changing the pipeline took")), run.notes("lost")] == [1, []]
    parts = {part.device: part.assign.end_layer - part.assign.first_layer for part in run.cluster.parts}
    assert parts["pi-1"] < 8 < parts["pi-0"]
    as_it_was = Heated(1.4, changed_s=1e9)
    as_it_was.play()
    assert as_it_was.cluster.pipelines == 1
    assert run.rate(HOT_S, at_s) < 0.9 * run.rate(0, HOT_S)
    assert run.rate(at_s, 1e9) > 1.05 * as_it_was.rate(at_s, 1e9)


@pytest.mark.parametrize("heat", [0.9, 1.15])
def test_what_is_less_than_a_fifth_changes_no_plan(heat: float) -> None:
    run = Heated(heat)
    run.play()
    assert (run.notes(NOTE), run.cluster.pipelines) == ([], 1)


def test_what_lasts_less_than_a_minute_changes_no_plan() -> None:
    run = Heated(2.0, until_s=HOT_S + 50)
    run.play()
    assert (run.notes(NOTE), run.cluster.pipelines) == ([], 1)


def test_a_device_that_has_cooled_down_gets_its_layers_back_but_not_at_once() -> None:
    run = Heated(1.4, until_s=HOT_S + 200, last_s=950.0)
    run.play()
    _, cool_s = run.notes(NOTE)
    assert cool_s > HOT_S + 60 + run.schedule.membership_timeouts.again_s
    parts = {part.device: part.assign.end_layer - part.assign.first_layer for part in run.cluster.parts}
    assert set(parts.values()) == {8}
