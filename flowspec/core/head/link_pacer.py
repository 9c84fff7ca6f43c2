"""How many rows one segment carries: no more than every link brings over in `hold_s`.

Signs of life share a device's way out with what it sends to the next stage, and what the system has taken it
sends in order: nobody overtakes it. So a long message must not be there on a slow link. The head does not
send it: a prompt goes out in *portions*.

- Of a new pipeline nothing is known. The first portion is small, and goes alone. Where it passed quickly,
  what all links together took for it says how much may follow: a fast network pays one trip for that.
- Where it took long, its links may be slow, or far. The second portion has another size and goes alone, too:
  what a row more (or less) took on a link is its rate, and what all took alike is its distance.
- From then on what each segment took beyond the smallest one tells it again, what it waited for others
  included: where a link has become slow, portions become small, and few are on their way. What is guessed
  is bounded then, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol.messages import Hop

FIRST_BYTES = 8192
"""Of activations that the first portion of a new pipeline brings to each stage, where a row is no more: .7
seconds at 100 kbit/s."""
HOLD_S = 0.5
"""For how long a portion may keep a link busy."""
GROWTH = 4
"""Times the rows of the larger of two segments that were compared that the next portion may have."""
QUICK_MAX = 16
"""Times the rows of a segment that was quick that the next portion may have: where a rate is limited by a
token bucket, a short message shows nothing of it."""
WAITING_MAX = 4
"""Portions on their way at once where a link is slow: all may wait for the same one."""
WEIGHED_MIN = 3
"""Segments by which a link's rate is told to others."""
SHARE_UP = 0.1
"""Weight of the newest time where it is more than what was known: it may have waited for others."""
PROOFS = 2
"""Segments that must be back before several are on their way, unless the first one was quick."""


class LinkPacer:
    """Those of one pipeline: `first` rows at first, `most` of a prompt at most, in `hold_s`; without a
    `first` nothing is bounded but prompts."""

    def __init__(self, first: int | None, most: int, hold_s: float = HOLD_S) -> None:
        self.most = most
        self.rows = most if first is None else min(first, most)
        self._first = self.rows
        self._hold_s = hold_s
        self._is_free = first is None
        self._back = 0
        self._least: tuple[int, list[float]] | None = None
        self._weighed = 0
        self._rows_s: list[float] = []

    @property
    def is_proven(self) -> bool:
        """Whether several segments may be on their way; with all the rows allowed nothing is to be proven."""
        return self._back >= PROOFS or self.rows == self.most

    @property
    def are_bound(self) -> bool:
        """Whether segments are bounded: a link is slow, or not known."""
        return self.rows < self.most

    def may_follow(self, rows: int) -> bool:
        """Whether a segment may leave beside so many rows that are on their way."""
        if not self.is_proven:
            return rows == 0
        return not self.are_bound or rows < WAITING_MAX * self.rows

    @property
    def rows_s(self) -> list[float]:
        """What a row takes on each link where it waits for nobody, in seconds; none where no link bounds
        anything, or little was seen."""
        return self._rows_s if self.are_bound and self._weighed >= WEIGHED_MIN else []

    def learn(self, hops: Sequence[Hop], rows: int, sent_s: float, now_s: float) -> None:
        """A segment of so many rows that was sent at `sent_s` is back."""
        self._back += 1
        if self._is_free or not rows or not hops or any(hop.rows + hop.dead_in_queue != rows for hop in hops):
            return  # some of it was dropped on its way
        travels_s, left_s = [], sent_s  # on clocks that differ by the same at all times
        for hop in hops:
            travels_s.append(hop.received_s - left_s)
            left_s = hop.left_s
        travels_s.append(now_s - left_s)  # features come back with what was verified
        links_s = now_s - sent_s - sum(hop.spent_s for hop in hops)
        quick = int(rows * min(QUICK_MAX, self._hold_s / max(links_s, 1e-9)))
        if quick >= max(self.rows, 2 * rows):
            self.rows = min(self.most, quick)
            self._back = max(self._back, PROOFS)
        elif self._least is None:
            self.rows = min(self.most, rows // 2 or 2)
        elif rows != self._least[0]:
            self._weigh(rows, travels_s, *self._least)
        if self._least is None:
            self._least = rows, travels_s
        elif rows < self._least[0]:  # and waited for others where it took longer
            self._least = rows, [min(pair) for pair in zip(self._least[1], travels_s, strict=True)]
        elif rows == self._least[0]:
            self._least = rows, _undisturbed(self._least[1], travels_s)

    def _weigh(self, rows: int, travels_s: Sequence[float], least: int, least_s: Sequence[float]) -> None:
        """By what the slowest link took for this segment and for the smallest one: how many rows it brings
        over in time. A delay that is no hold, as any network has them, makes no portion smaller."""
        apart_s = [now_s - then_s for now_s, then_s in zip(travels_s, least_s, strict=True)]
        rows_s = [max(0.0, each / (rows - least)) for each in apart_s]
        larger = max(rows, least)
        if 2 * larger >= self._first:  # what is shorter shows little of a rate
            self._weighed += 1
            self._rows_s = _undisturbed(self._rows_s or rows_s, rows_s)
        found = max(
            1, min(self.most, max(self.rows, GROWTH * larger), int(self._hold_s / max(*rows_s, 1e-9)))
        )
        if found > self.rows or self._back <= PROOFS or max(apart_s) > self._hold_s:
            self.rows = found


def _undisturbed(known_s: Sequence[float], seen_s: Sequence[float]) -> list[float]:
    """What was known of each link, after another sight of it: what is less is so, what is more is believed by
    and by."""
    return [
        seen if seen < known else known + SHARE_UP * (seen - known)
        for known, seen in zip(known_s, seen_s, strict=True)
    ]
