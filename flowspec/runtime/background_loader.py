"""Makes ready for another pipeline beside the one that works: its slice is loaded in a thread of its own.

Layers that stay are taken over, so only the others are loaded, at low priority: passes go on meanwhile. What
was made ready is kept until the next Assign, which finds it by its digests. Where there is no memory for both
slices all that is to be loaded is fetched, checked and read once, and it is told how long loading will take.

Conversations come first: a cache that needs the memory takes it, and the slice is loaded later.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from flowspec.core.cluster.daemon import Loaded, SliceRoom
from flowspec.core.protocol.cluster_messages import Assign, Error
from flowspec.core.protocol.device_messages import WeightAnswer
from flowspec.errors import ClusterError, NoRoomError
from flowspec.memory_claims import MemoryClaims
from flowspec.plan.memory import mib
from flowspec.runtime.heap import give_back
from flowspec.runtime.machine import Machine
from flowspec.runtime.weights.head_channel import HeadQuestion, LoadProgress, QueuedHeadChannel

if TYPE_CHECKING:
    from flowspec.model.slice import Slice
    from flowspec.runtime.loading import Held

log = logging.getLogger("flowspec.daemon")

NICENESS = 10
"""Of the thread that loads; passes have 0."""
USUAL_RATE = 200e6
"""Bytes of weights that are loaded in a second, as long as none were."""

Tell = Callable[[int, Loaded | LoadProgress | HeadQuestion], None]
Fail = Callable[[int, Assign, BaseException], None]


class BackgroundLoader:
    """See the module. The poller begins, delivers and ends; the compute thread takes, and makes room.

    `tell` and `fail` are told how it goes, with the number of the assignment that it is for; they may be
    called in any thread.
    """

    def __init__(self, machine: Machine, tell: Tell, fail: Fail, claims: MemoryClaims) -> None:
        self.rate = USUAL_RATE
        """Bytes of weights that are loaded in a second, as was seen last."""
        self._machine = machine
        self._claims = claims
        self._tell = tell
        self._fail = fail
        self._assignment_id = 0
        self._channel = QueuedHeadChannel(lambda result: None)
        self._thread: threading.Thread | None = None
        self._spare: Held | None = None
        self._taken_bytes = 0
        self._is_crowded = False

    def begin(self, assignment_id: int, assign: Assign, serving: Held) -> None:
        """Makes ready for `assign` beside the slice that is `serving`, and for nothing else any more."""
        self.end(self._assignment_id)
        self._assignment_id, before = assignment_id, self._thread
        channel = self._channel = QueuedHeadChannel(lambda result: self._tell(assignment_id, result))
        channel.begin(assignment_id)
        work = partial(self._run, assignment_id, assign, serving, channel, before)
        thread = threading.Thread(target=work, name="beside", daemon=True)
        self._thread = thread
        thread.start()

    def deliver(self, assignment_id: int, answer: WeightAnswer | Error, data: bytes | memoryview) -> bool:
        """An answer of the head's; whether it is for this."""
        if assignment_id == self._assignment_id:
            self._channel.deliver(assignment_id, answer, data)
        return assignment_id == self._assignment_id

    def end(self, assignment_id: int) -> None:
        """Goes on no longer; what is loaded stays."""
        if assignment_id == self._assignment_id:
            self._channel.hang_up(assignment_id)

    def take(self) -> Held | None:
        """What was made ready, if anything was. From here on nothing is."""
        self.end(self._assignment_id)
        if self._thread is not None:
            self._thread.join()
        spare, self._spare, self._thread = self._spare, None, None
        self._taken_bytes = 0
        return spare

    def make_room(self, part: Slice, request_bytes: int) -> None:
        """Caches of so many bytes are opened: if caches might need its memory, what is ready is given up."""
        if not self._taken_bytes or part.cache_bytes_max is None:
            return
        caches_bytes = part.opened_bytes + request_bytes
        if caches_bytes + self._taken_bytes > part.cache_bytes_max:
            log.info("conversations need the %s in which layers were made ready", mib(self._taken_bytes))
            self._is_crowded, self._taken_bytes = True, 0
            self.end(self._assignment_id)
            if self._thread is not None:
                self._thread.join()
            self._spare = None
            give_back()

    def _run(
        self,
        assignment_id: int,
        assign: Assign,
        serving: Held,
        channel: QueuedHeadChannel,
        before: threading.Thread | None,
    ) -> None:
        if sys.platform == "linux":  # elsewhere it would be the whole process's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        if before is not None:
            before.join()
        self._is_crowded, self._taken_bytes = False, 0
        try:
            self._tell(assignment_id, self._make(assign, serving, channel))
        except BaseException as error:  # noqa: BLE001 - the top of a thread: who is told makes a line of it
            self._taken_bytes = 0
            self._fail(assignment_id, assign, error)
        finally:
            give_back()

    def _make(self, assign: Assign, serving: Held, channel: QueuedHeadChannel) -> Loaded:
        from flowspec.model.weights import Span, held_bytes
        from flowspec.runtime.loading import SliceLoad, room_beside

        span = Span(first=assign.first_layer, end=assign.end_layer, count=assign.layer_count)
        load = SliceLoad(assign, span, self._machine, channel, self._claims)
        spare, self._spare = self._spare, None
        found = load.find([serving] if spare is None else [serving, spare])
        if found is not None:
            if found is not serving:
                both = serving.part.kept_for(span)
                self._spare, self._taken_bytes = found, found.part.weight_bytes - held_bytes(both)
            return _made(found.part)
        del spare
        kept, device = load.kept_of([serving]), serving.part.device
        for is_fetched in (False, True):  # only what fits is fetched, and more is known of it then
            if is_fetched:
                load.fetch()
            need = load.need(kept, device)
            room = room_beside(need, kept, serving.part, self._machine)
            if room is SliceRoom.NONE:
                layers, needed = f"layers {span.first} to {span.end - 1}", mib(need.total_bytes)
                advice = "give this device fewer layers, or use a smaller --context"
                raise NoRoomError(
                    f"{layers} need {needed} beside what is kept, more than there is here; {advice}"
                )
        load_s = need.weight_bytes / self.rate
        if room is SliceRoom.AFTER:
            text = "no memory for %s beside the layers that run: they are loaded when those are done"
            log.info(text, mib(need.weight_bytes))
            return _made(serving.part, received_bytes=load.stock(kept, device), load_s=load_s)
        self._taken_bytes = need.weight_bytes
        try:
            self._spare, received_bytes = load.load(kept, device)
        except ClusterError:
            if not self._is_crowded:
                raise
            return _made(serving.part, load_s=load_s)
        self.rate = load.rate
        return _made(self._spare.part, received_bytes=received_bytes)


def _made(part: Slice, *, received_bytes: int = 0, load_s: float = 0.0) -> Loaded:
    """Caches are none of it: what there is for them is known when the slice is taken."""
    return Loaded(
        weight_bytes=part.weight_bytes,
        cache_slots=0,
        received_bytes=received_bytes,
        hidden_size=part.spec.hidden,
        carried=part.carried_width,
        vocabulary_size=part.spec.vocabulary,
        reused=False,
        load_s=load_s,
    )
