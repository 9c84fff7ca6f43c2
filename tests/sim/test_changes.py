"""Another plan while answers follow one another, in virtual time: for a device that heat slows down, and for
one that is back; and slow ways out, which must not hold up signs of life.

Every token is compared with the plain answer when it is emitted.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from msgspec import structs

from flowspec.core.cluster.membership import SWITCH_S
from flowspec.core.head.flights import Bounds
from flowspec.core.methods import make_method
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.device import DeviceSpec
from lab.faults.cluster import FORMING_TIMEOUTS
from lab.faults.play import FaultError, Play
from lab.faults.schedule import HEAL_S, HOLD_SHARE, SILENT_S, Dialogue, Fault, Schedule, draw
from tests.broken_builds import sends_prompts_whole
from tests.core.runs import MEMBERSHIP_TIMEOUTS
from tests.pipeline import ask

DEVICES = ("pi-0", "pi-1", "pi-2")
HOT_S, CHANGED_S = 50.0, 30.0
"""When a device gets hot, and for how long it must be so."""
GOING_OVER, CHANGING = "going over to another plan", "changing the pipeline took"


def schedule(pass_s: float, tokens: int, at_s: float = 0.0) -> Schedule:
    """Three boards that are alike, and one user."""
    first = ask(0, (1, 2, 3, 4), tokens, sampling=Sampling(temperature=0.8, seed=3))
    return replace(
        draw(1),
        devices=DEVICES,
        arithmetics={},
        spec=DeviceSpec(curve=Curve(base_s=pass_s), layers=4),
        links=(LinkSpec(delay_s=0.001),) * 3,
        load_s=0.05,
        layer_count=24,
        devices_min=1,
        devices_max=3,
        queued_max=64,
        context=400,
        bounds=Bounds(),
        membership_timeouts=replace(MEMBERSHIP_TIMEOUTS, stuck_s=60.0),
        forming_timeouts=replace(FORMING_TIMEOUTS, changed_s=CHANGED_S),
        method=lambda: make_method("continuous"),
        cache_slots=dict.fromkeys(DEVICES, 100_000),
        draft_slots=100_000,
        qualities=(0.98,),
        levels=(0,),
        captures=(),
        drafting=(Curve(base_s=0.01),),
        places=(None,),
        dialogues=(Dialogue(first=first, at_s=at_s, turns=0, cancel_s=None, forget_s=None),),
        faults=(),
    )


class Asking(Play):
    """The user asks the same again so long after each answer, until `last_s`."""

    def __init__(self, drawn: Schedule, last_s: float, pause_s: float) -> None:
        super().__init__(drawn)
        self.last_s, self.pause_s = last_s, pause_s

    def _ended(self, request: int) -> None:
        submit = self.cluster.answers[request][-1].submit
        if self.clock.now_s >= self.last_s:
            self._waiting -= 1
            return
        sampling = structs.replace(submit.sampling, seed=submit.sampling.seed + 1)
        self.cluster.at(self.clock.now_s + self.pause_s, replace(submit, sampling=sampling, answered=()))

    def notes(self, text: str) -> list[tuple[float, str]]:
        return [(at_s, told) for at_s, who, told in self.story if who == "head" and text in told]

    def layers(self) -> list[int]:
        """Of each device."""
        parts = {part.device: part.assign for part in self.cluster.parts}
        return [parts[name].end_layer - parts[name].first_layer for name in DEVICES]


# --------------------------------------------------------------------------------------------------- heat


class Heated(Asking):
    """A layer takes 60 ms; a second is between two answers."""

    def __init__(self) -> None:
        super().__init__(schedule(1.44, 30), last_s=160.0, pause_s=1.0)
        for daemon in self.daemons.values():
            daemon.is_by_layers = True
        self.clock.at(HOT_S, lambda: self.daemons["pi-1"].be_hot(1.4))
        self._run_until(lambda: self._waiting == 0, 300.0)
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


def test_a_device_that_heat_slows_down_gets_fewer_layers_between_two_answers() -> None:
    run = Heated()
    ((at_s, _),) = run.notes(GOING_OVER)
    assert HOT_S + CHANGED_S < at_s < HOT_S + CHANGED_S + 60, "and the end of an answer"
    assert not any(each.submitted_s < at_s < each.ended_s for each in run.cluster.answers[0])
    assert run.cluster.pipelines == 2, "one new plan"
    assert [len(run.notes(CHANGING)), run.notes("lost")] == [1, []]
    assert run.layers()[1] < 8 < run.layers()[0]
    assert run.rate(HOT_S, at_s) < 0.9 * run.rate(0, HOT_S)
    assert run.rate(at_s, 1e9) > 1.05 * run.rate(HOT_S, at_s)


# ----------------------------------------------------------------------------------------------- switches

ASKED_S, GONE_S, BACK_S, LAST_S = 35.0, 40.0, 60.0, 85.0
LOAD_S = 2.0
"""What a layer takes to load: the second device lacks 4 of 8 when the first is back."""


class Switching(Asking):
    """An answer is never over for long, and the first device is gone for a while."""

    def __init__(self, spare_layers: int) -> None:
        drawn = schedule(0.3, 60, ASKED_S)
        drawn = replace(
            drawn,
            load_s=LOAD_S,
            spare_layers=spare_layers,
            membership_timeouts=replace(drawn.membership_timeouts, calm_s=3.0),
        )
        super().__init__(drawn, last_s=LAST_S, pause_s=0.0)
        self.clock.at(GONE_S, self.daemons["pi-0"].crash)
        self.clock.at(BACK_S, self.daemons["pi-0"].start)

    def _look(self) -> None:
        """Faults begin after all is well here, which the oracle does not know."""

    def longest_pause_s(self) -> float:
        """The longest time without a token after the first device is back."""
        at_s = [when_s for when_s, _, text in self.story if text.startswith("emits") and when_s >= BACK_S]
        return max(after_s - before_s for before_s, after_s in itertools.pairwise(at_s))

    def switch_s(self) -> float:
        """What the note says that changing the pipeline took."""
        ((_, note),) = self.notes(CHANGING)
        return float(note.split()[4])


def test_new_layers_are_loaded_beside_the_pipeline_where_there_is_memory_for_both() -> None:
    run = Switching(24)
    run.run()
    assert run.switch_s() < 0.2
    assert run.longest_pause_s() < SWITCH_S
    fired = run.fired()
    assert fired["daemon: beside"] >= 2
    assert fired["member: loads then"] == 0
    assert run.cluster.membership.lost == []
    run = Switching(0)
    run.run()
    assert run.switch_s() > LOAD_S
    assert run.fired()["member: loads then"] == 1
    assert run.cluster.membership.lost == []


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
        assert run.notes("device pi-1 is lost")
    else:
        assert run.fired()["daemon: given up"] >= 1
    assert run.cluster.membership.lost == []


# -------------------------------------------------------------------------------------------------- slow ways

SEEDS = 12


def play_slow_everywhere() -> Counter[str]:
    """All that is wrong is that every device's way out and in is slow; prompts may go out in one segment.
    Returns how often each rule fired."""
    fired: Counter[str] = Counter()
    for seed in range(SEEDS):
        drawn = draw(seed)
        faults = [Fault(kind="narrow", at_s=0.0, for_s=HEAL_S, where=(device,)) for device in drawn.devices]
        play = Play(
            replace(
                drawn,
                places=(None,) * len(drawn.qualities),
                membership_timeouts=replace(drawn.membership_timeouts, silent_s=SILENT_S),
                bounds=replace(
                    drawn.bounds, prefill_chunk=128, prefill_first=1, hold_s=HOLD_SHARE * SILENT_S
                ),
                faults=tuple(faults),
            )
        )
        play.run()
        fired += play.fired()
    return fired


def test_nobody_is_lost_where_all_links_are_slow_unless_a_prompt_is_sent_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fired = play_slow_everywhere()
    assert not fired["member: silent"]
    assert fired["head: slow portion"] > SEEDS
    sends_prompts_whole(monkeypatch)
    with pytest.raises(FaultError, match="is lost, though nothing was wrong with it"):
        play_slow_everywhere()
