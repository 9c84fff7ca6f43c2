"""When each token of an answer was known, and when it was there as a guess before that, as the head of any
world sees it."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.bench.oracle import SeenToken
from flowspec.core.head.events import Draft, Drafted, Emit, HeadCommand, HeadEvent, SendToFirstStage, Submit
from flowspec.core.protocol.messages import SegmentPart


class TokenLog:
    """Of the newest answer that was asked for; `watch` is given every event of the head with the commands it
    led to.

    A guess is there once a drafter has said it, whatever the head thinks of it, or when it is sent, if nobody
    said it.
    """

    def __init__(self) -> None:
        self._asked_s: dict[tuple[int, int], float] = {}
        self._begin(-1, 0)

    def _begin(self, request: int, length: int) -> None:
        self._request = request
        self._length = length
        self._last = -1
        self.prompt_segment = -1
        """Which segment carried the prompt's last token."""
        self._ids: dict[tuple[int, int], int] = {}
        self._here_s: dict[tuple[int, int], tuple[float, float | None, int | None]] = {}
        self._spoken_s: dict[int, float] = {}
        self._sent_s: dict[tuple[int, int], float] = {}
        self._known: list[tuple[int, float]] = []

    def watch(self, event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        if isinstance(event, Submit):
            self._begin(event.request, len(event.prompt))
        elif isinstance(event, Drafted):
            asked_s = self._asked_s.pop((event.drafter, event.job), None)
            for proposal in event.proposals:
                if proposal.request == self._request:
                    self._spoken_s.setdefault(proposal.node, now_s)
                    for rank, token in enumerate(proposal.tokens, 1):
                        self._here_s.setdefault((proposal.node, token), (now_s, asked_s, rank))
        for command in commands:
            if isinstance(command, SendToFirstStage):
                for part in command.segment.parts:
                    self._learn(part, now_s, command.segment.segment)
            elif isinstance(command, Draft):
                self._asked_s[command.drafter, command.job] = now_s
                for part in command.segment.parts:
                    self._learn(part, now_s)
            elif isinstance(command, Emit) and command.request == self._request:
                self._known += [(token, now_s) for token in command.tokens]

    def _learn(self, part: SegmentPart, now_s: float, segment: int | None = None) -> None:
        if part.commit.request != self._request:
            return
        for node, parent, token, position in zip(
            part.ids, part.parents, part.tokens, part.positions, strict=True
        ):
            if position >= self._length:
                self._ids[parent, token] = node
                self._here_s.setdefault((parent, token), (now_s, None, None))
                if segment is not None:
                    self._sent_s.setdefault((parent, token), now_s)
            elif position == self._length - 1 and segment is not None:
                self._last, self.prompt_segment = node, segment

    def tokens(self) -> list[SeenToken]:
        """Of the whole answer, in order. Empty where it cannot be followed, as after a pipeline was lost."""
        found: list[SeenToken] = []
        node: int | None = self._last
        for token, known_s in self._known:
            if node is None:
                return []
            here_s, asked_s, rank = self._here_s.get((node, token), (known_s, None, None))
            is_guessed = here_s < known_s
            found.append(
                SeenToken(
                    known_s=known_s,
                    here_s=here_s if is_guessed else known_s,
                    asked_s=asked_s if is_guessed else None,
                    sent_s=self._sent_s.get((node, token)),
                    rank=rank if is_guessed else None,
                    has_spoken=self._spoken_s.get(node, known_s) < known_s,
                )
            )
            node = self._ids.get((node, token))
        return found
