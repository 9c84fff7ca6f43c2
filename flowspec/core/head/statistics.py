"""What happened to one answer's nodes and time: counted by the head, shown with every result.

The terms are those of `docs/methods.md`: S tokens per segment that commits any, rho the share of tokens that
were in flight when they were known; each of the others costs a whole trip. `chains` tells which models
drafted and judged from which token on, when that was decided, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flowspec.core.head.hop_sums import HopSums
from flowspec.core.protocol.messages import Hop


@dataclass(slots=True)
class Recoveries:
    """How often an answer lost its stages, and what that took.

    `detect_s` is for how long the lost ones had been silent, `load_s` from then until others were there,
    `prefill_s` until these had computed what was known and the next token came.
    """

    count: int = 0
    detect_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    _lost_s: float | None = None
    _formed_s: float | None = None

    @property
    def is_prefilling(self) -> bool:
        """Whether others are there, and compute what is known."""
        return self._formed_s is not None

    def lost(self, silent_s: float, now_s: float) -> None:
        if self._formed_s is not None:  # lost again before a token came: one recovery that takes longer
            self.prefill_s += now_s - self._formed_s
        else:
            self.count += 1
        self.detect_s += silent_s
        self._lost_s, self._formed_s = now_s, None

    def formed(self, now_s: float) -> None:
        """Others are there; nothing for an answer that was asked for meanwhile."""
        if self._lost_s is not None:
            self.load_s += now_s - self._lost_s
            self._lost_s, self._formed_s = None, now_s

    def emitted(self, now_s: float) -> None:
        if self._formed_s is not None:
            self.prefill_s += now_s - self._formed_s
            self._formed_s = None


@dataclass(slots=True)
class Statistics:
    """Counts and seconds of one answer; of segments shared with other requests its share by nodes sent."""

    stage_count: int
    submitted_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    tokens: int = 0
    tokens_of_prompt: int = 0
    segments: int = 0
    walks: int = 0
    committing_segments: int = 0
    tokens_in_flight: int = 0
    nodes_drafted: int = 0
    nodes_sent: int = 0
    dropped_alive: int = 0
    draft_passes: int = 0
    draft_rows: int = 0
    draft_s: float = 0.0
    hops: HopSums = field(default_factory=HopSums)
    link_s: float = 0.0
    windows: int = 0
    calibration_error: float = 0.0
    chains: list[tuple[int, float, tuple[int, ...], str]] = field(default_factory=list)
    recoveries: Recoveries = field(default_factory=Recoveries)

    @property
    def waited_s(self) -> float:
        """From its submission until there was room for its caches, and a pipeline."""
        return 0.0 if self.admitted_s is None else self.admitted_s - self.submitted_s

    def admitted(self, now_s: float) -> None:
        """There is room for its caches; where its stages were lost, at others."""
        self.recoveries.formed(now_s)
        if self.admitted_s is None:
            self.admitted_s = now_s

    def sent(self, nodes: int, window: int) -> None:
        self.segments += 1
        self.nodes_sent += nodes
        self.windows += window

    def landed(self, hops: Sequence[Hop], share: float, round_trip_s: float) -> None:
        """A segment came back, of whose nodes `share` were this request's."""
        self.hops.add(hops, share)
        self.link_s += share * max(0.0, round_trip_s - sum(hop.spent_s for hop in hops))

    def lost(self, silent_s: float, now_s: float) -> None:
        self.recoveries.lost(silent_s, now_s)
        self.hops.lost()

    def emitted(self, tokens: int, now_s: float) -> None:
        self.walks += 1
        self.committing_segments += (
            self.tokens > 0 and not self.recoveries.is_prefilling
        )  # else a prompt's gave them
        self.recoveries.emitted(now_s)
        if self.tokens == 0:
            self.first_token_s, self.tokens_of_prompt = now_s, tokens
        self.last_token_s = now_s
        self.tokens += tokens

    def report(self) -> dict[str, Any]:
        """All of it with what follows from it, as `--json` shows it."""
        first_s, last_s = (
            (self.first_token_s, self.last_token_s) if self.tokens else (self.submitted_s, self.submitted_s)
        )
        decode_s = last_s - first_s
        busy_s = max(last_s - self.submitted_s, 1e-9)
        later = self.tokens - self.tokens_of_prompt  # the prompt's segments gave the others
        return {
            "segments": self.segments,
            "committing_segments": self.committing_segments,
            "tokens_per_commit": _ratio(later, self.walks - 1),
            "acceptance_length": _ratio(later, self.segments),
            "share_in_flight": round(min(1.0, self.tokens_in_flight / max(1, self.tokens - 1)), 4),
            "nodes_drafted": self.nodes_drafted,
            "nodes_sent": self.nodes_sent,
            "dropped_alive": self.dropped_alive,
            "stage_busy": [round(seconds / busy_s, 4) for seconds in self.hops.by_stage("compute_s")],
            "window": _ratio(self.windows, self.segments),
            "calibration_error": round(self.calibration_error, 4),
            "draft_passes": self.draft_passes,
            "draft_rows": self.draft_rows,
            "waited_s": round(self.waited_s, 6),
            "prefill_s": round(max(0.0, first_s - self.submitted_s - self.waited_s), 6),
            "decode_s": round(decode_s, 6),
            "draft_s": round(self.draft_s, 6),
            **self.hops.report(),
            "link_s": round(self.link_s, 6),
            "chains": [
                [tokens, round(at_s - self.submitted_s, 6), list(chain), reason]
                for tokens, at_s, chain, reason in self.chains
            ],
            "recoveries": self.recoveries.count,
            "recovery_detect_s": round(self.recoveries.detect_s, 6),
            "recovery_load_s": round(self.recoveries.load_s, 6),
            "recovery_prefill_s": round(self.recoveries.prefill_s, 6),
        }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
