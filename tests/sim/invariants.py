"""What must hold after every event of every schedule, whatever was drawn. Looks into the cores, and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowspec.core import limits
from flowspec.core.events import Draft, Emit, Finished, HeadCommand, StageCommand, Submit, ToPipeline, ToStages, VerifiedArrived
from flowspec.core.messages import Commit, Part, Verified
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.fake_layers import FakeLayers
from flowspec.sim.record import HEAD
from flowspec.sim.world import Handled, World
from flowspec.tree import NodeState


class Invariants:
    """Watches one world. Verified segments that match none in flight, roots dropped and nodes admitted twice are the cores' own errors."""

    def __init__(self, world: World) -> None:
        self.world = world
        layers = world.layers
        assert isinstance(layers, FakeLayers)
        self._layers = layers
        self._sent: set[tuple[int, int]] = set()
        self._answering: set[int] = set()
        self._in_flight: dict[int, tuple[Part, ...]] = {}

    def check(self, handled: Handled) -> None:
        if handled.place == HEAD:
            self._check_head(handled)
        else:
            self._check_stage(handled.place)
        others = self.world.events - self.world.timers
        assert self.world.timers <= others + 10, f"{self.world.timers} timers beside {others} other events"

    # --------------------------------------------------------------------------------------------- the head

    def _check_head(self, handled: Handled) -> None:
        head = self.world.head
        if isinstance(handled.event, Submit):
            self._answering.add(handled.event.request)
        elif isinstance(handled.event, VerifiedArrived):
            self._check_verified(handled.event.verified)
            del self._in_flight[handled.event.verified.segment]
        for command in handled.commands:
            if isinstance(command, Emit):
                assert command.request in self._answering, f"request {command.request} emits outside an answer"
                assert command.tokens, "an empty Emit"
            elif isinstance(command, Finished):
                self._check_end(command.request, handled.commands)
                assert command.request in self._answering, f"request {command.request} ends twice"
                self._answering.discard(command.request)
            elif isinstance(command, ToPipeline):
                assert command.segment.row_count, "a segment without rows"
                self._in_flight[command.segment.segment] = command.segment.parts
                for part in command.segment.parts:
                    self._check_sent(part)
            elif isinstance(command, Draft):
                assert command.segment.row_count, "a draft without rows"
                assert 1 <= command.width <= limits.DRAFT_WIDTH_MAX
        assert head.in_flight <= head.flights_max, f"{head.in_flight} segments in flight"
        for request in head.requests():
            tree = request.tree
            sent = sum(tree.state(node) is NodeState.SENT for node in tree.living())
            assert sent == tree.sent_alive <= limits.TREE_NODES_MAX, f"{sent} living nodes sent of request {request.number}"
            assert tree.alive_count <= limits.DRAFT_NODES_MAX + 1, f"{tree.alive_count} living nodes of request {request.number}"
            waits = request.submit is not None and request.held and head.method.may_walk(request)
            assert not waits, f"a verified segment of request {request.number} may be looked at, but waits"
            assert request.computed <= tree.committed_length, "more computed than committed"

    def _check_end(self, number: int, commands: Sequence[HeadCommand | StageCommand]) -> None:
        """While the stages may have guesses of an answer to run, they learn that it is over."""
        told = [command.message for command in commands if isinstance(command, ToStages)]
        for request in [known for known in self.world.head.requests() if known.number == number]:
            now = (number, request.opening.epoch)
            parts = [part for some in self._in_flight.values() for part in some if (part.commit.request, part.commit.epoch) == now]
            guesses = [node for part in parts for node in part.ids if request.tree.state(node) is not NodeState.COMMITTED]
            is_told = any(isinstance(each, Commit) and (each.request, each.epoch, each.is_over) == (*now, True) for each in told)
            assert is_told or not guesses, f"no stage is told of the end of request {number}, which has guesses {guesses} in flight"

    def _check_verified(self, verified: Verified) -> None:
        """The last stage walks the output itself: what it reports is never dead."""
        known = {request.number: request for request in self.world.head.requests()}
        for part in verified.parts:
            request = known.get(part.request)
            if request is not None and request.opening.epoch == part.epoch:
                dead = [node for node in part.ids if request.tree.state(node) is NodeState.DEAD]
                assert not dead, f"segment {verified.segment} reports dead nodes {dead} of request {part.request}"

    def _check_sent(self, part: Part) -> None:
        """Each node goes out once, after its parent, and below nothing that is dead."""
        number = part.commit.request
        (request,) = (known for known in self.world.head.requests() if known.number == number)
        tree = request.tree
        assert part.commit.epoch == request.opening.epoch
        for node, parent, token, position, committed in zip(
            part.ids, part.parents, part.tokens, part.positions, part.committed, strict=True
        ):
            assert (number, node) not in self._sent, f"node {node} of request {number} is sent twice"
            assert position < self.world.head.context, f"node {node} of request {number} stands at {position}"
            assert (tree.parent(node), tree.token(node), tree.position(node)) == (parent, token, position)
            if not committed and node not in tree.path:
                assert parent in tree.path or (number, parent) in self._sent, f"node {node} of request {number} is sent before its parent"
            self._sent.add((number, node))

    # ------------------------------------------------------------------------------------------- the stages

    def _check_stage(self, index: int) -> None:
        """What the stage itself says is true, and its cache holds what it believes that it does."""
        stage, device = self.world.stages[index], self.world.devices[index]
        stage.validate()
        assert stage.queued <= self.world.head.flights_max, f"{stage.queued} segments wait at stage {index}"
        caches = self._layers.caches[index]
        for number, request in stage._requests.items():
            slots = request.slots
            if device.is_idle:
                assert number in caches, f"stage {index} has no cache for request {number}"
                cached, used = caches[number].positions, len(slots.position)  # a map is as long as was ever used
                same = np.array_equal(cached[:used], slots.position) and bool((cached[used:] < 0).all())
                assert same, f"stage {index}: slots and cache of request {number} differ"
        if device.is_idle:
            assert sorted(caches) == sorted(stage.requests()), f"stage {index} has caches without requests"

    # ----------------------------------------------------------------------------------------------- at rest

    def check_rest(self) -> None:
        """Nothing moves any more: everything is back, and every stage holds what the head believes it holds."""
        world = self.world
        assert not self._answering, f"requests {sorted(self._answering)} never ended"
        assert world.head.in_flight == 0, f"{world.head.in_flight} segments never came back"
        assert not world.is_drafting
        holding = world.head.admission.holding
        known = {request.number: request for request in world.head.requests() if holding(request.number).stages}
        for index, stage in enumerate(world.stages):
            assert world.devices[index].is_idle
            assert stage.queued == 0
            assert sorted(stage.requests()) == sorted(known), f"stage {index} holds other requests than the head"
            self._check_stage(index)
            for number, request in known.items():
                self._check_kept(index, number, request.tree.committed_tokens()[: min(request.computed, request.known_length)])
        lost = {number for board in world.boards for number in board.lost}
        for number, drafter in enumerate(world.drafters):
            if isinstance(drafter, FakeDrafter) and number not in lost:
                assert set(drafter.requests()) <= set(known), "the drafter holds requests that are forgotten"

    def _check_kept(self, index: int, number: int, tokens: list[int]) -> None:
        """What the head would keep for the next turn is there, committed or named by the Open to come."""
        slots, cache = self.world.stages[index]._requests[number].slots, self._layers.caches[index][number]
        committed = np.flatnonzero(slots.committed[: slots.high])
        held = dict(zip(cache.positions[committed].tolist(), cache.tokens[committed].tolist(), strict=True))
        kept = [held.get(position) for position in range(len(tokens))]
        assert kept == tokens, f"stage {index} does not hold what request {number} would keep"
