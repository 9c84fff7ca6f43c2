"""The compute thread of a daemon: loads slices and drafters and runs jobs, one after another, while the
poller keeps listening.

Work goes in by `post`, results come back on `results` with a wake-up. torch, where one is needed, is imported
on the first Assign. The slice of a next pipeline is loaded beside, by a thread of its own (`loading.py`).

Whatever fails here ends the assignment that it was done for, and nothing else: an error that nobody foresaw
is logged with its traceback, the slice that met it is forgotten, and the next head's work is done as ever.
Only what ends the process (SIGILL, an abort) ends a daemon.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from flowspec.core.cluster.daemon import Loaded
from flowspec.core.protocol.cluster_messages import Assign, Error, Loading
from flowspec.core.protocol.device_messages import WeightAnswer, WeightQuestion
from flowspec.core.protocol.messages import Expand, Proposed, Release
from flowspec.core.stage.events import (
    ClearSlots,
    CloseCache,
    LayersDone,
    OpenCache,
    RunLayers,
)
from flowspec.core.stage.slots import slots_in
from flowspec.errors import ClusterError, FlowSpecError, NoRoomError, UnexpectedError, first_line
from flowspec.memory_claims import MemoryClaims
from flowspec.model.accelerator import find, is_gpu_lost, is_out_of_memory
from flowspec.model.arithmetic.arrays import DTYPES, Array
from flowspec.model.arithmetic.compiled import use_threads
from flowspec.model.engines import run_trial, shown_to
from flowspec.model.grammar import GrammarVocabulary, library_version
from flowspec.model.slice import Slice
from flowspec.runtime.emulation import DeviceEmulation, Pacer
from flowspec.runtime.heap import free_cycles, give_back, keep_for_good
from flowspec.runtime.loading import BackgroundLoader, LoadedSlice, SliceLoad, cache_memory, check_memory
from flowspec.runtime.machine import Machine
from flowspec.runtime.transport import Wake
from flowspec.runtime.weights.transfer import HeadChannel
from flowspec.wire.codec import Tensor

if TYPE_CHECKING:
    from flowspec.draft.base import Drafter

log = logging.getLogger("flowspec.daemon")

SWITCH_INTERVAL_S = 0.0002
"""How long the compute thread may keep the interpreter from the poller thread; Python's 5 ms would be a hop's
p99."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFailed:
    """The work could not be done; `error` tells why in one line."""

    error: FlowSpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """A bug at the head: not an expected error. A daemon outlives it (`UnexpectedError`)."""

    error: BaseException


Result = Loaded | Loading | WeightQuestion | WorkFailed | LayersDone | Proposed
Work = Assign | RunLayers | OpenCache | ClearSlots | CloseCache | Expand | Release


class ComputeThread:
    """Runs work in order; only `trim` reaches into the running job.

    Work and results carry the number of the assignment they belong to, so that nothing of one head is taken
    for another's. With an `emulation` jobs last as long as on the device that it declares.
    """

    def __init__(self, machine: Machine, wake: Wake, emulation: DeviceEmulation | None = None) -> None:
        self.machine = machine
        self._emulation = emulation
        self._pacer: Pacer | None = None
        self.results: deque[tuple[int, Result]] = deque()
        self._wake = wake
        self._work: queue.SimpleQueue[tuple[int, Work] | None] = queue.SimpleQueue()
        self._assignment_id = 0
        self._failed_assignment_id = -1
        self.claims = MemoryClaims()
        """What this daemon was promised of the machine's memory; the poller joins, eases and leaves it."""
        self._channels: dict[int, HeadChannel] = {}
        self._beside = BackgroundLoader(machine, self.claims)
        self._held: LoadedSlice | None = None
        self._drafter: Drafter | None = None
        self._captured = 0
        self._grammars: GrammarVocabulary | None = None
        self._has_imports = False
        self._dead: tuple[tuple[int, int], frozenset[int]] = ((0, 0), frozenset())
        self.further: tuple[int, int, float] = (0, 0, 0.0)
        """Of which assignment which job last began or ended a layer, and when: another object each time."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._work.qsize()

    def post(self, assignment_id: int, work: Work) -> None:
        if isinstance(work, Assign):
            self._channels[assignment_id] = HeadChannel(partial(self._tell_of, assignment_id))
        self._work.put((assignment_id, work))

    def prepare(self, assignment_id: int, assign: Assign) -> None:
        """Loads another slice beside the one that runs, as far as there is memory for it."""
        on_end = partial(self._end_beside, assignment_id, assign)
        if self._held is None:
            on_end(ClusterError("the slice that ran was given up"))
            return
        channel = self._channels[assignment_id] = HeadChannel(partial(self._tell_of, assignment_id))
        self._beside.begin(assign, self._held, channel, on_end)

    def deliver(self, assignment_id: int, answer: WeightAnswer | Error, data: bytes | memoryview) -> None:
        """An answer to a question about weights of assignment `assignment_id`."""
        if (channel := self._channels.get(assignment_id)) is not None:
            channel.deliver(answer, data)

    def hang_up(self, assignment_id: int) -> None:
        """Assignment `assignment_id` has ended: whatever is loaded for it needs no longer be."""
        if (channel := self._channels.get(assignment_id)) is not None:
            channel.hang_up()

    def trim(self, assignment_id: int, job: int, rows: tuple[int, ...]) -> None:
        """Rows of the running job that are dead; it drops them at its next layer."""
        known = self._dead[1] if self._dead[0] == (assignment_id, job) else frozenset()
        self._dead = ((assignment_id, job), known | frozenset(rows))

    def stop(self, timeout_s: float) -> None:
        self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            self._assignment_id, work = item
            if self._assignment_id == self._failed_assignment_id:
                continue  # it was posted before the poller knew, and what it is for is gone
            try:
                self._do(work)
            except FlowSpecError as error:
                self._fail(error, work)
            except BaseException as error:  # the top of a thread: one head's work must not end the daemon
                if is_out_of_memory(error):
                    text = (
                        "out of memory; give this device fewer layers, or use a smaller --context or --dtype"
                    )
                    self._fail(NoRoomError(text), work)
                else:
                    log.exception("unexpected error %s", doing(work))
                    self._forget()
                    self._fail(unexpected(error, doing(work)), work)

    def _fail(self, error: FlowSpecError, work: Work) -> None:
        """Gives up the work; where the assignment has no slice, all that was posted for it behind, too."""
        if self._held is None or isinstance(work, Assign):
            self._failed_assignment_id = self._assignment_id
        self._tell(WorkFailed(error=error))

    def _forget(self) -> None:
        """No slice is held any more, nor anything that belongs to one."""
        self._held = self._drafter = None

    def _tell(self, result: Result) -> None:
        self._tell_of(self._assignment_id, result)

    def _tell_of(self, assignment_id: int, result: Result) -> None:
        self.results.append((assignment_id, result))
        self._wake.set()

    def _end_beside(self, assignment_id: int, assign: Assign, result: Loaded | BaseException) -> None:
        """What came of making ready beside the slice that runs, which is not touched by it."""
        self._channels.pop(assignment_id, None)
        if isinstance(result, Loaded):
            self._tell_of(assignment_id, result)
            return
        if is_out_of_memory(result):
            result = NoRoomError("out of memory beside the layers that run")
        elif not isinstance(result, FlowSpecError):
            log.error("unexpected error %s", doing(assign), exc_info=result)
            result = unexpected(result, doing(assign))
        self._tell_of(assignment_id, WorkFailed(error=result))

    def _do(self, work: Work) -> None:
        if isinstance(work, Assign):
            self._load(work)
            return
        assert self._held is not None, "work before a slice is loaded"
        part = self._held.part
        if isinstance(work, RunLayers):
            self._tell(self._run_layers(part, work))
        elif isinstance(work, Expand | Release):
            assert self._drafter is not None, "a drafter's work for a stage"
            self._draft(self._drafter, work)
        elif isinstance(work, OpenCache):
            self._beside.make_room(part, part.request_bytes(work.slots, work.window_slots))
            part.open_cache(work.request, work.slots, work.window_slots, work.copied)
        elif isinstance(work, ClearSlots):
            part.clear_slots(work)
        else:
            part.close_cache(work.request)
            give_back()

    def _draft(self, drafter: Drafter, work: Expand | Release) -> None:
        if isinstance(work, Release):
            drafter.release(work)
            give_back()
            return
        started_s = time.monotonic()
        proposals = drafter.draft(work.segment, work.width)
        self._tell(
            Proposed(job=work.segment.segment, proposals=proposals, compute_s=time.monotonic() - started_s)
        )

    def _run_layers(self, part: Slice, job: RunLayers) -> LayersDone:
        started_s = time.monotonic()
        payload = None if job.payload is None else to_array(job.payload, job.rows)
        running = (self._assignment_id, job.job)

        def dead_rows() -> frozenset[int]:
            self.further = (*running, time.monotonic())
            of, rows = self._dead
            return rows if of == running else frozenset()

        pacer = self._pacer
        if pacer is not None:
            pacer.begin(job.sampled, job.context, started_s)
        rows, states, next_tokens, logprobs = part.run(
            job, payload, dead_rows if pacer is None else partial(pacer.boundary, dead_rows)
        )
        ended_s = time.monotonic()
        width = self._captured * part.spec.hidden
        onward, captured = split(states, width, part.dtype) if rows else (None, ())
        if pacer is not None:
            ended_s = pacer.end(dead_rows)
        return LayersDone(
            job=job.job,
            rows=rows,
            payload=onward,
            next_tokens=next_tokens,
            started_s=started_s,
            ended_s=ended_s,
            logprobs=logprobs,
            captured=captured,
        )

    def _load(self, assign: Assign) -> None:
        channel = self._channels[self._assignment_id]
        try:
            self._try_kernels("float32", "cpu", channel)  # all else stands on it
            if not self._has_imports:
                self._has_imports = True
                keep_for_good()
            if self._emulation is not None:
                layers = assign.end_layer - assign.first_layer
                worked_s = 0.0 if self._pacer is None else self._pacer.worked_s
                self._pacer = Pacer(
                    self._emulation,
                    stage=assign.stage,
                    stages=assign.stages,
                    layers=layers,
                    worked_s=worked_s,
                )
            self._tell(self._find_and_load(assign, channel))
        finally:
            self._channels.pop(self._assignment_id)
            give_back()

    def _find_and_load(self, assign: Assign, channel: HeadChannel) -> Loaded:
        """Of a slice that is not in memory only what is not is loaded: layers that stay are taken over."""
        load = SliceLoad(assign, self.machine, channel, self.claims)
        held = [each for each in (self._held, self._beside.take()) if each is not None]
        if (found := load.find(held)) is not None:
            part = found.part
            self._held = found
            held.clear()
            part.close_all()
            free_cycles()
            sizes = (assign.context, assign.nodes_max, assign.cache, assign.sliding_window)
            need = cache_memory(part.spec, part.span, assign.dtype, *sizes)
            room_bytes = check_memory(need, assign, part.device, self.machine, self.claims)
            self._take_on(part, assign, room_bytes, channel)
            return _loaded(found, reused=True)
        load.reuse(held)
        held.clear()
        self._forget()
        free_cycles()
        give_back()
        use_threads(self.machine.threads)
        device = find(self.machine.device).device
        self._try_kernels(assign.dtype, device, channel)
        load.check(device)
        load.fetch()
        cache_bytes_max = load.check(device)  # of a model of the hub all names are known now
        self._held, received_bytes = load.load(device)
        self._beside.rate = load.rate
        self._take_on(self._held.part, assign, cache_bytes_max, channel)
        return _loaded(self._held, reused=False, received_bytes=received_bytes)

    def _try_kernels(self, dtype: str, device: str, channel: HeadChannel) -> None:
        """Makes sure that a precision runs right here; raises `InputError` where it does not."""
        with shown_to(lambda doing, share: channel.show("trying kernels", share)):
            run_trial(dtype, device)

    def _take_on(self, part: Slice, assign: Assign, cache_bytes_max: int, channel: HeadChannel) -> None:
        """Makes of loaded layers what is assigned, with nothing cached."""
        part.captures, self._captured = assign.captures, assign.captured
        part.grammars = self._grammars_of(assign, channel)
        part.cache_bytes_max = cache_bytes_max
        self._drafter = None
        if assign.drafting is not None:
            from flowspec.draft.language import LanguageModelDrafter  # most devices never draft

            self._drafter = LanguageModelDrafter(
                part,
                context=assign.context,
                vocabulary_size=assign.drafting.vocabulary,
                coupled=assign.drafting.coupled,
            )
            self._drafter.take_grammars(part.grammars)

    def _grammars_of(self, assign: Assign, channel: HeadChannel) -> GrammarVocabulary | None:
        """The vocabulary for masks, where they are wanted and this device can compute them; that of the last
        assignment is kept."""
        digest = assign.tokens_digest
        if not digest or not library_version():
            return None
        if self._grammars is None or self._grammars.tokens.digest != digest:
            self._grammars = GrammarVocabulary(channel.ask_tokens(digest, assign.tokens_bytes))
        return self._grammars


def split(states: Array, captured_width: int, dtype: str) -> tuple[Tensor | None, tuple[Tensor, ...]]:
    """Of what a slice made of rows `[rows, width]`: what goes to the next stage, None where there is nothing;
    and of each row what was captured, by itself, which stands last and is so wide."""
    width = states.shape[1] - captured_width
    onward = to_wire(states[:, :width], dtype) if width else None
    return onward, to_wire(states[:, width:], dtype).apart() if captured_width else ()


def _loaded(held: LoadedSlice, *, reused: bool, received_bytes: int = 0) -> Loaded:
    part = held.part
    assert part.cache_bytes_max is not None, "memory is checked before a slice is loaded"
    return replace(
        held.report(received_bytes=received_bytes),
        reused=reused,
        cache_slots=slots_in(part.cache_bytes_max, part.slot_bytes),
        slot_bytes=part.slot_bytes,
        windowed_bytes=part.windowed_slot_bytes,
        state_bytes=part.state_bytes,
        grammars="" if part.grammars is None else library_version(),
    )


def doing(work: Work) -> str:
    """What was being done when it failed, for a line to people."""
    if isinstance(work, Assign):
        layers = f"layers {work.first_layer} to {work.end_layer - 1}"
        what = layers if work.drafting is None else "the drafter"
        return f"while loading {what} in {work.dtype}"
    if isinstance(work, Expand):
        return "while drafting"
    return "while running layers" if isinstance(work, RunLayers) else "while making or closing a cache"


def unexpected(error: BaseException, during: str) -> UnexpectedError:
    """The one line about an error that nobody foresaw."""
    what = f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__
    advice = "see the daemon's log there, and report it"
    if is_gpu_lost(error):
        advice = f"start that daemon again, for its GPU takes no more work from it; {advice}"
    return UnexpectedError(f"unexpected error {during}: {what}; {advice}")


def to_array(tensor: Tensor, rows: tuple[int, ...]) -> Array:
    """The rows of a received payload `[rows, width]`."""
    flat = np.frombuffer(tensor.data, DTYPES[tensor.dtype])
    whole = flat.reshape(tensor.rows, tensor.width)
    return whole if rows == tuple(range(tensor.rows)) else whole[list(rows)]


def to_wire(states: Array, dtype: str) -> Tensor:
    """Rows `[rows, width]` as they travel."""
    rows, width = states.shape
    return Tensor(rows=rows, width=width, dtype=dtype, data=states.tobytes())
