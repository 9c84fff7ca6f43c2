"""How a daemon comes to a slice: what the head means, where that is, whether it fits, and loading what is not
in memory yet; also beside a slice that runs."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from flowspec.core.cluster.daemon import Loaded, SliceRoom, room_for
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Assign
from flowspec.core.protocol.device_messages import TensorEntry
from flowspec.core.protocol.model_spec import ModelSpec, SlidingWindow
from flowspec.core.protocol.precision import CACHE_AUTO, cached_as
from flowspec.errors import ClusterError, FlowSpecError, InputError, NoRoomError
from flowspec.memory_claims import MemoryClaims
from flowspec.model.accelerator import accelerator_of
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.file import is_gguf
from flowspec.model.slice import Slice
from flowspec.model.weights import SliceParts, Span, Weight, held_bytes, weight_bytes, weights_in, weights_of
from flowspec.plan.memory import SliceMemory, cache_bytes, mib
from flowspec.plan.shape import layers_held
from flowspec.runtime.heap import give_back
from flowspec.runtime.machine import Machine
from flowspec.runtime.weights.sources import HeadSource, HubSource, ReadyWeights, Source, ready_weights
from flowspec.runtime.weights.store import WeightStore
from flowspec.runtime.weights.transfer import HeadChannel, Manifest

NICENESS = 10
"""Of the thread that loads beside a slice that runs; passes have 0."""
USUAL_RATE = 200e6
"""Bytes of weights that are loaded in a second, as long as none were."""
OnEnd = Callable[[Loaded | BaseException], None]
"""Called with what came of making a slice ready."""
Work = tuple[threading.Thread, HeadChannel]
log = logging.getLogger("flowspec.daemon")


# ---------------------------------------------------------------------------------------------- slices


@dataclass(frozen=True, slots=True)
class SliceContent:
    """All that a slice's arithmetic follows from: by this, and nothing else, is a slice kept and given again.

    Two heads mean the same slice when its `tensors` have the same digests and are put together in the same
    way: `model` is a `Manifest.digest`. What the hub has it names itself; of that `tensors` are none. By name
    and fingerprint (`called`) a head only says what it calls the model.
    """

    model: str
    span: Span
    dtype: str
    arithmetic: str
    cache: str
    called: tuple[str, str] = field(compare=False)
    tensors: tuple[TensorEntry, ...] = ()

    def agrees_with(self, other: SliceContent) -> bool:
        """Whether layers that both slices have are the same, tensor by tensor."""
        own = (self.model, self.dtype, self.arithmetic)
        known = {entry.name: entry for entry in self.tensors}
        is_same = own == (other.model, other.dtype, other.arithmetic)
        return is_same and all(known.get(entry.name, entry) == entry for entry in other.tensors)


@dataclass(frozen=True, slots=True)
class LoadedSlice:
    """A slice in memory, and what it is."""

    part: Slice
    content: SliceContent

    def report(self, *, received_bytes: int = 0, load_s: float = 0.0) -> Loaded:
        """Caches are none of it: what there is for them is known when the slice is taken."""
        return Loaded(
            weight_bytes=self.part.weight_bytes,
            cache_slots=0,
            received_bytes=received_bytes,
            hidden_size=self.part.spec.hidden,
            carried=self.part.carried_width,
            vocabulary_size=self.part.spec.vocabulary,
            reused=False,
            load_s=load_s,
        )


class SliceLoad:
    """Comes to the slice of one Assign, step by step: `find` it, `reuse` parts of others, `check` that there
    is memory, `fetch` files, then `load` it. Each raises `FlowSpecError` where it cannot go on.

    `channel` leads to the head that assigns it.
    """

    def __init__(self, assign: Assign, machine: Machine, channel: HeadChannel, claims: MemoryClaims) -> None:
        self.rate = 0.0
        """Bytes of weights in a second, once something was loaded."""
        self.span = Span(first=assign.first_layer, end=assign.end_layer, count=assign.layer_count)
        self._assign, self._machine, self._channel, self._claims = assign, machine, channel, claims
        has_store = machine.cache_bytes != 0
        self._store = WeightStore(machine.cache_dir, machine.cache_bytes) if has_store else None
        self._source: Source | None = None
        self._kept: SliceParts = {}

    # ------------------------------------------------------------------------------------------ finding

    def find(self, held: Sequence[LoadedSlice]) -> LoadedSlice | None:
        """The slice in memory that the head means, if one of these is it; else finds out where that is.

        From the hub a model comes with hashes of its own, and the head, which may not have the weights, is
        not asked.
        """
        called = (self._assign.model, self._assign.fingerprint)
        self._content = self._content_of("hub {} {}".format(*called))
        for each in held:
            if each.content == self._content:
                return each
        is_likely = any((each.content.called, each.content.span) == (called, self.span) for each in held)
        if is_likely and (found := self._same_of(held)) is not None:
            return found
        source = self._look()
        if not isinstance(source, HubSource):
            if (found := self._same_of(held)) is not None:
                return found
            source.learn(self._channel.ask_entries(self._needed(source) & self._manifest.names))
            own = self._content_of(self._manifest.digest)
            self._content = replace(own, tensors=tuple(source.entries.values()))
        self._source = source
        return None

    @functools.cached_property
    def _manifest(self) -> Manifest:
        return self._channel.ask_manifest()

    def _content_of(self, model: str) -> SliceContent:
        assign, called = self._assign, (self._assign.model, self._assign.fingerprint)
        return SliceContent(model, self.span, assign.dtype, assign.arithmetic, assign.cache, called)

    def _same_of(self, held: Sequence[LoadedSlice]) -> LoadedSlice | None:
        """That of these slices which is the one that the head means, tensor by tensor."""
        wanted = self._content_of(self._manifest.digest)
        for each in held:
            own = each.content.tensors
            is_likely = replace(each.content, tensors=()) == wanted
            if is_likely and tuple(self._channel.ask_entries(entry.name for entry in own)) == own:
                return each
        return None

    def _look(self) -> Source:
        """The model on this device or on the hub, if it seems to be the head's; else as the head has it."""
        model, channel, folder = self._assign.model, self._channel, self._machine.cache_dir
        limit_bytes = self._machine.cache_bytes if self._machine.uses_hub else 0
        try:
            here: Source = HubSource(model, channel, folder, limit_bytes)
            if here.folder is not None or is_gguf(model):
                here = Source(model, channel, folder)
            here.look(self._assign)
            if isinstance(here, HubSource) and limit_bytes == 0:
                here.fetch(self._needed(here))  # the head is asked for what is not there
        except FlowSpecError as error:
            return self._look_at_head(error)
        if isinstance(here, HubSource) or here.manifest() == self._manifest:
            return here
        text = f"model {model!r} here has another config or other tensors than the head's"
        return self._look_at_head(ClusterError(text))

    def _look_at_head(self, reason: FlowSpecError) -> Source:
        if self._store is None:
            raise reason
        log.info("%s; asking the head for the weights", reason)
        source = HeadSource(self._assign.model, self._channel, self._manifest, self._store)
        source.look(self._assign)
        return source

    def _needed(self, source: Source) -> set[str]:
        """The tensors that the slice is made of. Nothing else is asked of these: where a head sends them,
        only names are known yet."""
        return source.names_of(weights_of(source.spec, self.span, source.tensors()))

    # ------------------------------------------------------------------------------------------ loading

    @property
    def _found(self) -> Source:
        assert self._source is not None, "only what was found and is not in memory is loaded"
        return self._source

    def reuse(self, held: Sequence[LoadedSlice]) -> None:
        """Takes over the parts that it has in common with one of these slices: with that of the most."""
        found = [each.part.kept_for(self.span) for each in held if each.content.agrees_with(self._content)]
        self._kept = max(found, key=held_bytes, default={})
        self.kept_bytes = held_bytes(self._kept)

    def need(self) -> SliceMemory:
        """The memory that it takes beside what is reused, as far as that is known before it is fetched."""
        assign = self._assign
        sizes = (assign.dtype, assign.context, assign.nodes_max, assign.cache, assign.sliding_window)
        return slice_memory(self._found, self.span, *sizes, kept=self._kept)

    def check(self, device: str) -> int:
        """`check_memory` for it."""
        return check_memory(self.need(), self._assign, device, self._machine, self._claims)

    def fetch(self) -> None:
        """Has the files of a model of the hub here."""
        self._found.fetch(self._needed(self._found))

    def load(self, device: str) -> tuple[LoadedSlice, int]:
        """The slice, and how many bytes of it the head sent."""
        assign, lacking_bytes = self._assign, self.need().weight_bytes
        with self._ready() as (_, received_bytes, rounded):
            began_s = time.monotonic()
            progress = functools.partial(self._channel.show, "loading")
            given = (self._found, self.span, assign.dtype, device, progress, rounded, self._kept)
            part = Slice.load(*given, assign.arithmetic, assign.cache)
            self.rate = lacking_bytes / max(time.monotonic() - began_s, 1e-3)
        return LoadedSlice(part, self._content), received_bytes

    def prefetch(self) -> int:
        """Has all that `load` would read here, checked and read once; how many bytes the head sent for it."""
        with self._ready() as (names, received_bytes, _):
            for number, name in enumerate(sorted(names)):
                self._found.show_checking(number / len(names))
                self._found.check(name)
        return received_bytes

    def _ready(self) -> AbstractContextManager[ReadyWeights]:
        weights = slice_weights(self._found, self.span, self._assign.dtype, self._kept)
        return ready_weights(self._found, weights, self._assign.dtype, self._store)


# ---------------------------------------------------------------------------------------------- memory


def slice_weights(files: ModelFiles, span: Span, dtype: str, kept: SliceParts | None = None) -> list[Weight]:
    """The parameters of a slice that are not `kept`; nothing is loaded."""
    found = weights_in(files.spec, span, files.tensors(), dtype)
    return [weight for weight in found if weight.owner not in (kept or {})]


def slice_memory(
    files: ModelFiles,
    span: Span,
    dtype: str,
    context: int,
    nodes_max: int = limits.TREE_NODES_MAX,
    cache: str = CACHE_AUTO,
    window: SlidingWindow | None = None,
    kept: SliceParts | None = None,
) -> SliceMemory:
    """The memory of a slice beside what is `kept`, from file headers; nothing is loaded. A tied embedding
    counts once per slice; caches are as in `cache_memory`."""
    weights = slice_weights(files, span, dtype, kept)
    own = cache_memory(files.spec, span, dtype, context, nodes_max, cache, window)
    return replace(own, weight_bytes=weight_bytes(weights, files.tensors(), dtype))


def cache_memory(
    spec: ModelSpec,
    span: Span,
    dtype: str,
    context: int,
    nodes_max: int,
    cache: str,
    window: SlidingWindow | None,
) -> SliceMemory:
    """The memory that a loaded slice takes in addition: caches for `context` tokens and `nodes_max` guesses,
    those of layers with a sliding window as far as `window` says (None: for all).

    Raises `InputError` for another window than the model's.
    """
    windows = spec.windows
    if window is not None and window.tokens != max(windows):
        raise InputError(
            f"expected a window of {max(windows)} positions, as the model's config.json has it, got "
            f"{window.tokens} from the head; run the same FlowSpec version everywhere"
        )
    size = cache_bytes(
        layers_held(spec.heads, windows, spec.inputs, spec.states, spec.sources, span.first, span.end),
        context=context,
        held=cached_as(cache, dtype),
        nodes_max=nodes_max,
        window=window,
        precision=dtype,
    )
    return SliceMemory(weight_bytes=0, cache_bytes=size)


def room_beside(need: SliceMemory, kept_bytes: int, serving: Slice, machine: Machine) -> SliceRoom:
    """Where a slice fits that takes `need` beside the `kept_bytes` of the one that is `serving`."""
    here = accelerator_of(serving.device)
    free = here.free_bytes()
    if machine.memory_bytes is not None:
        free = min(free, machine.memory_bytes - here.taken_bytes())
    return room_for(
        new=need.weight_bytes,
        cache=need.cache_bytes,
        free=max(0, free) // machine.sharers,
        growth=serving.opened_bytes - serving.cache_bytes,
        given_up=serving.weight_bytes - kept_bytes + serving.cache_bytes,
    )


def check_memory(
    need: SliceMemory, assign: Assign, device: str, machine: Machine, claims: MemoryClaims
) -> int:
    """Refuses a slice that does not fit, before anything of it is loaded. Returns the bytes that are left for
    the caches of all requests.

    What other daemons of this machine are sure to need is theirs. Of what is left each of the sharers, or of
    the daemons that are here if they are more, gets its part for caches, as far as nobody else was promised
    it, and at least what one conversation takes.
    """
    here = accelerator_of(device)
    here.give_back()
    with claims.deciding():
        others = claims.untouched("sure")
        free_bytes, rest_bytes = here.free_bytes(others), here.free_bytes(claims.untouched("most"))
        limit_bytes = machine.memory_bytes
        allowed_bytes = sys.maxsize if limit_bytes is None else limit_bytes - here.taken_bytes()
        have = min(free_bytes, allowed_bytes)
        if need.total_bytes > have:
            smaller = "fewer layers" if assign.drafting is None else "a smaller drafter"
            taken_bytes = sum(others.values())
            theirs = f" beside {mib(taken_bytes)} that other daemons here still need" if taken_bytes else ""
            raise NoRoomError(
                f"layers {assign.first_layer} to {assign.end_layer - 1} need {mib(need.total_bytes)} "
                f"(weights {mib(need.weight_bytes)}, "
                f"cache {mib(need.cache_bytes)} for {assign.context} tokens), "
                f"but {mib(max(0, have))} are free here{theirs}; "
                f"give this device {smaller}, or use a smaller --context, --dtype or --cache"
            )
        part = min(rest_bytes, free_bytes // max(machine.sharers, 1 + len(others)), allowed_bytes)
        most = max(need.total_bytes, part)
        if here.is_cpu:
            claims.promise(sure=need.total_bytes, most=most)
    return most - need.weight_bytes


# ------------------------------------------------------------------------------------------ background


class BackgroundLoader:
    """Makes ready for another pipeline beside the one that works, in a thread of its own.

    Only layers that do not stay are loaded, at low priority: passes go on meanwhile. What was made ready is
    kept until the next Assign, which finds it by its digests. Where there is no memory for both slices all is
    fetched, checked and read once, and it is told how long loading will take. Conversations come first: a
    cache that needs the memory takes it, and the slice is loaded later.

    The poller begins; the compute thread takes, and makes room.
    """

    def __init__(self, machine: Machine, claims: MemoryClaims) -> None:
        self.rate = USUAL_RATE
        """Bytes of weights that are loaded in a second, as was seen last."""
        self._machine, self._claims = machine, claims
        self._work: Work | None = None
        self._spare: LoadedSlice | None = None
        self._taken_bytes = 0
        self._is_crowded = False

    def begin(self, assign: Assign, serving: LoadedSlice, channel: HeadChannel, on_end: OnEnd) -> None:
        """Makes ready for `assign` beside the slice that is `serving`, and for nothing else any more."""
        before, given = self._work, (assign, serving, channel, on_end)
        if before is not None:
            before[1].hang_up()
        thread = threading.Thread(target=self._run, args=(before, *given), name="beside", daemon=True)
        self._work = thread, channel
        thread.start()

    def take(self) -> LoadedSlice | None:
        """What was made ready, if anything was. From here on nothing is."""
        while (work := self._work) is not None:  # the poller may begin another meanwhile
            thread, channel = work
            channel.hang_up()
            thread.join()
            if self._work is work:
                self._work = None
        spare, self._spare, self._taken_bytes = self._spare, None, 0
        return spare

    def make_room(self, part: Slice, request_bytes: int) -> None:
        """Caches of so many bytes are opened: if caches might need its memory, what is ready is given up."""
        if not self._taken_bytes or part.cache_bytes_max is None:
            return
        if part.opened_bytes + request_bytes + self._taken_bytes > part.cache_bytes_max:
            log.info("conversations need the %s in which layers were made ready", mib(self._taken_bytes))
            self._is_crowded = True
            self.take()
            give_back()

    def _run(
        self, before: Work | None, assign: Assign, serving: LoadedSlice, channel: HeadChannel, on_end: OnEnd
    ) -> None:
        if sys.platform == "linux":  # elsewhere it would be the whole process's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        if before is not None:
            before[0].join()
        self._is_crowded, self._taken_bytes = False, 0
        try:
            on_end(self._make(assign, serving, channel))
        except BaseException as error:  # noqa: BLE001 - the top of a thread: who is told makes a line of it
            self._taken_bytes = 0
            on_end(error)
        finally:
            give_back()

    def _make(self, assign: Assign, serving: LoadedSlice, channel: HeadChannel) -> Loaded:
        load, part = SliceLoad(assign, self._machine, channel, self._claims), serving.part
        spare, self._spare = self._spare, None
        found = load.find([serving] if spare is None else [serving, spare])
        kept_bytes = held_bytes(part.kept_for(load.span))
        if found is not None:
            if found is not serving:
                self._spare, self._taken_bytes = found, found.part.weight_bytes - kept_bytes
            return found.report()
        del spare
        load.reuse([serving])
        for is_fetched in (False, True):  # only what fits is fetched, and more is known of it then
            if is_fetched:
                load.fetch()
            need = load.need()
            room = room_beside(need, load.kept_bytes, part, self._machine)
            if room is SliceRoom.NONE:
                raise NoRoomError(
                    f"layers {load.span.first} to {load.span.end - 1} need {mib(need.total_bytes)} beside "
                    "what is kept, more than there is here; give this device fewer layers, or use a smaller "
                    "--context"
                )
        load_s = need.weight_bytes / self.rate
        if room is SliceRoom.AFTER:
            text = "no memory for %s beside the layers that run: they are loaded when those are done"
            log.info(text, mib(need.weight_bytes))
            return serving.report(received_bytes=load.prefetch(), load_s=load_s)
        self._taken_bytes = need.weight_bytes
        try:
            self._spare, received_bytes = load.load(part.device)
        except ClusterError:
            if not self._is_crowded:
                raise
            return serving.report(load_s=load_s)
        self.rate = load.rate
        return self._spare.report(received_bytes=received_bytes)
