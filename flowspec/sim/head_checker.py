"""What a head does from one event to the next, which its state alone does not show; of its state,
`HeadCore.validate` tells."""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.head.events import (
    Draft,
    Emit,
    Finished,
    HeadCommand,
    HeadEvent,
    SendToFirstStage,
    Submit,
    VerifiedArrived,
)
from flowspec.core.head.head import HeadCore
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import SegmentPart, Verified
from flowspec.tree import NodeState


class HeadChecker:
    """Watches one head. Its stages are honest, unless `is_honest` says that somebody tampers with what they
    say."""

    def __init__(self, *, is_honest: bool = True) -> None:
        self._is_honest = is_honest
        self._sent: dict[int, tuple[int, set[int]]] = {}
        self.answering: set[int] = set()
        """Who asked, and was not told of an end."""

    def check(self, head: HeadCore, event: HeadEvent, commands: Sequence[HeadCommand]) -> None:
        """An event was handled, and led to these commands; raises `AssertionError`."""
        if isinstance(event, Submit):
            self.answering.add(event.request)
        elif isinstance(event, VerifiedArrived) and self._is_honest:
            _check_verified(head, event.verified)
        for command in commands:
            if isinstance(command, Emit):
                assert command.request in self.answering, f"request {command.request} emits outside an answer"
                assert command.tokens, "an empty Emit"
            elif isinstance(command, Finished):
                assert command.request in self.answering, f"request {command.request} ends twice"
                self.answering.discard(command.request)
            elif isinstance(command, SendToFirstStage):
                assert command.segment.row_count, "a segment without rows"
                for part in command.segment.parts:
                    self._check_sent(head, part)
            elif isinstance(command, Draft):
                assert command.segment.row_count, "a draft without rows"
                assert 1 <= command.width <= limits.DRAFT_WIDTH_MAX, (
                    f"a draft of {command.width} guesses at each node"
                )

    def _check_sent(self, head: HeadCore, part: SegmentPart) -> None:
        """Each node goes out once in an epoch, after its parent, and below nothing that is dead."""
        number, epoch = part.commit.request, part.commit.epoch
        (request,) = (known for known in head.requests() if known.number == number)
        tree = request.tree
        assert epoch == request.opening.epoch, (
            f"a part of epoch {epoch} goes out, request {number} is at {request.opening.epoch}"
        )
        if self._sent.get(number, (-1,))[0] != epoch:
            self._sent[number] = (epoch, set())
        sent = self._sent[number][1]
        for node, parent, token, position, committed in zip(
            part.ids, part.parents, part.tokens, part.positions, part.committed, strict=True
        ):
            # Of one whose token was changed on the way the stages drop, and the head sends it again.
            assert node not in sent or not self._is_honest, f"node {node} of request {number} is sent twice"
            assert position < head.context, f"node {node} of request {number} stands at {position}"
            assert (tree.parent(node), tree.token(node), tree.position(node)) == (parent, token, position), (
                f"node {node} of request {number} goes out as another one"
            )
            if not committed and tree.state(node) is not NodeState.COMMITTED:
                is_out = parent in sent or tree.state(parent) is NodeState.COMMITTED
                assert is_out, f"node {node} of request {number} is sent before its parent"
            sent.add(node)


def _check_verified(head: HeadCore, verified: Verified) -> None:
    """The last stage walks the output itself: what it reports is never dead."""
    known = {request.number: request for request in head.requests()}
    for part in verified.parts:
        request = known.get(part.request)
        if request is not None and request.opening.epoch == part.epoch:
            dead = [node for node in part.ids if request.tree.state(node) is NodeState.DEAD]
            assert not dead, f"segment {verified.segment} reports dead nodes {dead} of request {part.request}"
