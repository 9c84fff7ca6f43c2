"""The pause of a switch to another pipeline, in virtual time: what devices load for it they load beside the
pipeline that works, if they have memory for both.

Every token is compared with the plain answer when it is emitted.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from flowspec.core.cluster.membership import SWITCH_S
from flowspec.core.head.events import Submit
from flowspec.plan.timing import Curve
from flowspec.sim.device import DeviceSpec
from lab.faults.play import Play
from lab.faults.schedule import Schedule
from tests.sim.test_heat import schedule

ASKED_S, GONE_S, BACK_S, LAST_S = 35.0, 40.0, 60.0, 85.0
LOAD_S = 2.0
"""What a layer takes to load: the second device lacks 4 of 8 when the first is back."""
HOT_S = 45.0


def scene(spare_layers: int) -> Schedule:
    """Three boards alike with 24 layers, and one user; an answer is never over for long."""
    drawn = schedule(changed_s=10.0)
    first = replace(drawn.dialogues[0].first, new_tokens_max=60)
    return replace(
        drawn,
        spec=DeviceSpec(curve=Curve(base_s=0.3), layers=4),
        load_s=LOAD_S,
        spare_layers=spare_layers,
        membership_timeouts=replace(drawn.membership_timeouts, calm_s=3.0),
        dialogues=(replace(drawn.dialogues[0], first=first, at_s=ASKED_S),),
    )


class Switching(Play):
    """Answers until `LAST_S`. The first device is gone for a while, or with `heat` the second gets hot."""

    def __init__(self, spare_layers: int, heat: float = 1.0) -> None:
        super().__init__(scene(spare_layers))
        if heat > 1:
            for daemon in self.daemons.values():
                daemon.is_by_layers = True
            self.clock.at(HOT_S, lambda: self.daemons["pi-1"].be_hot(heat))
            return
        gone = self.daemons["pi-0"]
        self.clock.at(GONE_S, gone.crash)
        self.clock.at(BACK_S, gone.start)

    def _look(self) -> None:
        """Faults begin after all is well here, which the oracle does not know."""

    def _ended(self, request: int) -> None:
        """The same question again, at once."""
        submit = self.cluster.answers[request][-1].submit
        if self.clock.now_s >= LAST_S:
            self._waiting -= 1
            return
        sampling = replace(submit.sampling, seed=submit.sampling.seed + 1)
        again: Submit = replace(submit, sampling=sampling, answered=())
        self.cluster.at(self.clock.now_s, again)

    def notes(self) -> list[str]:
        return [text for _, who, text in self.story if who == "head"]

    def pause_s(self, from_s: float) -> float:
        """The longest time without a token after `from_s`."""
        at_s = [when_s for when_s, _, text in self.story if text.startswith("emits") and when_s >= from_s]
        return max(after_s - before_s for before_s, after_s in itertools.pairwise(at_s))


def switch_s(run: Switching) -> float:
    """What the note says that changing the pipeline took."""
    (note,) = [text for text in run.notes() if text.startswith("changing the pipeline took")]
    return float(note.split()[4])


@pytest.mark.parametrize("heat", [1.0, 2.0], ids=["a device is back", "a device is hot"])
def test_new_layers_are_loaded_beside_the_pipeline_where_there_is_memory_for_both(heat: float) -> None:
    run = Switching(24, heat)
    run.run()
    assert switch_s(run) < 0.2
    assert run.pause_s(BACK_S if heat == 1 else HOT_S) < SWITCH_S
    fired = run.fired()
    assert fired["daemon: beside"] >= 2
    assert fired["member: loads then"] == 0
    assert run.cluster.membership.lost == []


@pytest.mark.parametrize("heat", [1.0, 2.0], ids=["a device is back", "a device is hot"])
def test_without_memory_for_both_they_are_loaded_in_the_switch(heat: float) -> None:
    run = Switching(0, heat)
    run.run()
    assert switch_s(run) > LOAD_S
    fired = run.fired()
    assert fired["member: loads then"] == 1
    assert run.cluster.membership.lost == []


def test_what_must_be_loaded_in_the_switch_may_be_more_than_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the time until a further plan may be made."""
    run = Switching(0, 2.0)
    run.cluster.membership.timeouts = replace(run.cluster.membership.timeouts, again_s=8.0)
    run.run()
    assert run.fired()["member: too dear"] > 0
    assert [text for text in run.notes() if text.startswith("changing the pipeline took")] == []


@pytest.mark.parametrize("fault", ["the device", "a member", "the head"])
def test_an_unfinished_preparation_is_given_up_and_the_answers_stay_exact(fault: str) -> None:
    run = Switching(24)
    at_s = BACK_S + 4.0  # the second device takes 8 s to load
    if fault == "the head":
        run.clock.at(at_s, run.cluster.process.stop)
        run.clock.at(at_s + 20.0, run.cluster.process.go_on)
    else:
        victim = run.daemons["pi-0" if fault == "the device" else "pi-1"]
        run.clock.at(at_s, victim.crash)
        run.clock.at(at_s + 1.0, victim.start)
    run.run()
    if fault == "a member":
        assert any("device pi-1 is lost" in note for note in run.notes())
    else:
        assert run.fired()["daemon: given up"] >= 1
    assert run.cluster.membership.lost == []
