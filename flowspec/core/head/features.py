"""The target's features at the head: each stage that captures any sends its own, and drafters get those of a
node when all have come.

They are matched by node, so the ways that they take, and that of the verdict, may differ in length. Drafters
get them along the output's path, up to the parent of its newest token; until then they are kept. Nodes are
told apart by their ids in a whole conversation, so what a stage sent in the last epoch counts in the next
one, as far as its node is still on the path.

Pure. Features shape guesses and nothing else: an answer waits for none.
"""

from __future__ import annotations

from typing import Any

from flowspec.core.head.events import FeaturesArrived, TakeFeatures
from flowspec.core.head.request import Request
from flowspec.core.protocol.cluster_messages import Assign
from flowspec.core.protocol.messages import Features
from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.errors import PeerError
from flowspec.tree import NodeState

LATE_S = 0.2
"""For so long a drafter waits for features that it lacks, counted from the verdict, and methods that wait for
drafters wait with it. Then it goes on from its own predictions (`Request.predicted_max`), until all have
come: so a way that is slower than answers grow costs acceptance, and a stage that sends nothing costs
guesses, not the answer."""


def check_features(assign: Assign, hidden_size: int, features: Features, payload: Any) -> None:
    """Raises `PeerError` for a payload that is not what a stage was to capture; `hidden_size` 0: it is not
    known."""
    expected = (features.row_count, assign.captured * hidden_size, ACTIVATIONS[assign.dtype])
    found = None if payload is None else (payload.rows, payload.width, payload.dtype)
    if hidden_size and found != expected:
        raise PeerError(f"expected features of {expected} of stage {assign.stage + 1}, got {found}")


class FeatureDesk:
    """See the module; `capturing` are the stages that capture, by number, in pipeline order."""

    def __init__(self, capturing: tuple[int, ...]) -> None:
        self.capturing = capturing
        self._came: dict[int, dict[int, dict[int, Any]]] = {}  # request -> node -> stage -> row

    def take(self, event: FeaturesArrived, request: Request | None) -> None:
        """What a stage has sent; what no drafter will read is dropped. Raises `PeerError` for what no honest
        stage says."""
        features = event.features
        if event.stage not in self.capturing:
            raise PeerError(f"stage {event.stage + 1} sent features, but it was to capture nothing")
        if request is None:
            return  # the conversation is over
        tree, number = request.tree, features.request
        if features.epoch > request.opening.epoch:
            raise PeerError(
                f"expected features of epoch {request.opening.epoch} of request {number} at most, got "
                f"{features.epoch}"
            )
        if max(features.ids) >= len(tree):
            raise PeerError(
                f"features came of node {max(features.ids)} of request {number}, which there is not"
            )
        came = self._came.setdefault(number, {})
        for node, row in zip(features.ids, event.rows, strict=True):
            is_wanted = tree.state(node) is NodeState.SENT or (
                tree.state(node) is NodeState.COMMITTED and tree.position(node) >= request.featured
            )
            if is_wanted:
                came.setdefault(node, {})[event.stage] = row

    def complete(self, request: Request) -> TakeFeatures | None:
        """What drafters may have by now; it counts as given."""
        came, path, begin = self._came.get(request.number), request.tree.path, request.featured
        while came and request.featured < len(path) - 1:
            if len(came.get(path[request.featured], ())) < len(self.capturing):
                break
            request.featured += 1
        if not came or request.featured == begin:
            return None
        nodes = tuple(path[begin : request.featured])
        found = [came.pop(node) for node in nodes]
        return TakeFeatures(
            request=request.number,
            epoch=request.opening.epoch,
            nodes=nodes,
            rows=tuple(tuple(own[stage] for stage in self.capturing) for own in found),
        )

    def forget_dead(self, request: Request) -> None:
        """An epoch begins: what is not on the path is of no use any more."""
        came, state = self._came.get(request.number, {}), request.tree.state
        for node in [node for node in came if state(node) is NodeState.DEAD]:
            del came[node]

    def forget(self, request: int) -> None:
        """A conversation is over."""
        self._came.pop(request, None)

    def begin(self, capturing: tuple[int, ...]) -> None:
        """The stages are others: what they captured comes again."""
        self.capturing = capturing
        self._came.clear()

    def validate(self, requests: dict[int, Request]) -> None:
        """What is true between two events; raises `AssertionError`."""
        assert set(self._came) <= set(requests), "features are kept of conversations that are over"
        for number, came in self._came.items():
            request = requests[number]
            path = request.tree.path
            assert set(came).isdisjoint(path[: request.featured]), (
                f"features of request {number} are kept that drafters have"
            )
            lacking = path[request.featured : len(path) - 1]
            assert not self.capturing or not lacking or len(came.get(lacking[0], ())) < len(self.capturing), (
                f"features of request {number} are kept that drafters lack"
            )
