"""Devices whose way into the network is slow: what they send to the next stage must not hold up their signs
of life."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.faults.play import FaultError, Play
from lab.faults.schedule import HEAL_S, HOLD_SHARE, SILENT_S, Fault, Schedule, draw
from tests.broken_builds import sends_prompts_whole

SEEDS = 40


def slow_everywhere(seed: int) -> Schedule:
    """All that is wrong is that every device's way out and in is slow; prompts may go out in one segment."""
    drawn = draw(seed)
    faults = [Fault(kind="narrow", at_s=0.0, for_s=HEAL_S, where=(device,)) for device in drawn.devices]
    return replace(
        drawn,
        places=(None,) * len(drawn.qualities),
        membership_timeouts=replace(drawn.membership_timeouts, silent_s=SILENT_S),
        bounds=replace(drawn.bounds, prefill_chunk=128, prefill_first=1, hold_s=HOLD_SHARE * SILENT_S),
        faults=tuple(faults),
    )


def test_nobody_is_lost_where_all_links_are_slow() -> None:
    plays = []
    for seed in range(SEEDS):
        play = Play(slow_everywhere(seed))
        play.run()
        plays.append(play)
    assert not any(play.fired()["member: silent"] for play in plays)
    assert sum(play.fired()["head: slow portion"] for play in plays) > SEEDS


def test_a_head_that_sends_a_prompt_at_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the schedules above some fail."""
    sends_prompts_whole(monkeypatch)
    found = []
    for seed in range(SEEDS):
        try:
            Play(slow_everywhere(seed)).run()
        except FaultError as error:
            found.append(str(error))
    assert any("is lost, though nothing was wrong with it" in text for text in found), found
