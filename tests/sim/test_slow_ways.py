"""Devices whose way into the network is slow: what they send to the next stage must not hold up their signs
of life."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from lab.faults.play import FaultError, Play
from lab.faults.schedule import HEAL_S, HOLD_SHARE, SILENT_S, Fault, draw
from tests.broken_builds import sends_prompts_whole

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
