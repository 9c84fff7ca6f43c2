"""How a daemon comes to a slice: what the head means, where that is, whether it fits, and loading what is not
in memory yet."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from flowspec.core.cluster.daemon import SliceRoom, room_for
from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Assign
from flowspec.core.protocol.model_spec import ModelSpec, SlidingWindow
from flowspec.core.protocol.precision import CACHE_AUTO, cached_as
from flowspec.errors import ClusterError, FlowSpecError, InputError, NoRoomError
from flowspec.memory_claims import MemoryClaims
from flowspec.model.accelerator import accelerator_of
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.file import is_gguf
from flowspec.model.slice import Slice
from flowspec.model.weights import (
    SliceParts,
    Span,
    Weight,
    held_bytes,
    weight_bytes,
    weights_in,
    weights_of,
)
from flowspec.plan.memory import SliceMemory, cache_bytes, mib
from flowspec.plan.shape import layers_held
from flowspec.runtime.machine import Machine
from flowspec.runtime.weights.checked import INDEX, CheckedFiles, HubModel, LocalModel
from flowspec.runtime.weights.content import ModelDescription, SliceContent, content_of, hub_content
from flowspec.runtime.weights.from_hub import HubFetcher
from flowspec.runtime.weights.head_channel import QueuedHeadChannel
from flowspec.runtime.weights.receive import HeadChannel, ask_entries, ask_word
from flowspec.runtime.weights.rounded import StoredRounded, in_files, ready_weights
from flowspec.runtime.weights.store import WeightStore
from flowspec.runtime.weights.stored import StoredModel

log = logging.getLogger("flowspec.daemon")


@dataclass(frozen=True, slots=True)
class SliceSource:
    """What a slice is to be, and the model that it is loaded from: None where the slice that is kept is the
    same."""

    content: SliceContent
    files: ModelFiles | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a daemon may look for a model and keep what comes.

    Weights that a head sends are kept in `store` (None: none are taken), digests in `folder`; `fetcher`
    brings what the hub has (None: nothing).
    """

    store: WeightStore | None
    folder: Path | None
    fetcher: HubFetcher | None


@dataclass(frozen=True, slots=True)
class Held:
    """A slice in memory, and what it is."""

    part: Slice
    content: SliceContent


class SliceLoad:
    """Comes to the slice of one Assign, step by step: `find` it, then `load` it. Each raises `FlowSpecError`
    where it cannot go on.

    The `line` goes to the head that assigns it.
    """

    def __init__(
        self, assign: Assign, span: Span, machine: Machine, channel: QueuedHeadChannel, claims: MemoryClaims
    ) -> None:
        self.rate = 0.0
        """Bytes of weights in a second, once something was loaded."""
        self._assign = assign
        self._span = span
        self._machine = machine
        self._channel = channel
        self._claims = claims
        store = None if machine.cache_bytes == 0 else WeightStore(machine.cache_dir, machine.cache_bytes)
        fetcher = None
        if machine.uses_hub and store is not None:
            fetcher = HubFetcher(assign.model, channel, machine.cache_bytes)
        self._places = Places(store=store, folder=machine.cache_dir, fetcher=fetcher)
        self._source: SliceSource | None = None

    @property
    def _files(self) -> ModelFiles:
        files = None if self._source is None else self._source.files
        assert files is not None, "a slice is found first, and only one that is not in memory is loaded"
        return files

    def find(self, held: Sequence[Held]) -> Held | None:
        """The slice in memory that the head means, if one of these is it."""
        contents = [each.content for each in held]
        source = self._source = find_source(self._assign, self._span, contents, self._channel, self._places)
        return next((each for each in held if source.files is None and each.content == source.content), None)

    def kept_of(self, held: Sequence[Held]) -> SliceParts | None:
        """Of these slices the parts that the one that was found has, too: of that with the most."""
        assert self._source is not None, "a slice is found first"
        content = self._source.content
        found = [each.part.kept_for(self._span) for each in held if each.content.agrees_with(content)]
        return max(found, key=held_bytes, default=None)

    def need(self, kept: SliceParts | None, device: str) -> SliceMemory:
        """The memory that it takes beside what is `kept`, as far as that is known before it is fetched."""
        assign = self._assign
        need = slice_memory(
            self._files,
            self._span,
            assign.dtype,
            assign.context,
            assign.nodes_max,
            assign.cache,
            assign.sliding_window,
        )
        return need if kept is None else replace(need, weight_bytes=need.weight_bytes - held_bytes(kept))

    def fetch(self) -> None:
        """Has the files of a model of the hub here."""
        if isinstance(self._files, HubModel):
            fetch_missing(self._files, self._span, self._places.fetcher)

    def check(self, kept: SliceParts | None, device: str) -> int:
        """`check_memory` for it."""
        machine, need = self._machine, self.need(kept, device)
        limit_bytes, sharers = machine.memory_bytes, machine.sharers
        return check_memory(need, self._span, self._assign, device, limit_bytes, self._claims, sharers)

    def load(self, kept: SliceParts | None, device: str) -> tuple[Held, int]:
        """The slice, what is `kept` taken over, and how many bytes of it the head sent."""
        assert self._source is not None, "a slice is found first"
        files, tell = self._files, partial(self._channel.tell, "loading")
        lacking_bytes = self.need(kept, device).weight_bytes
        with self._ready(kept, device) as (received_bytes, rounded):
            began_s = time.monotonic()
            assign = self._assign
            part = Slice.load(
                *(files, self._span, assign.dtype, device, tell, rounded, kept),
                arithmetic=assign.arithmetic,
                cache=assign.cache,
            )
            self.rate = lacking_bytes / max(time.monotonic() - began_s, 1e-3)
        return Held(part, self._source.content), received_bytes

    def stock(self, kept: SliceParts | None, device: str) -> int:
        """Has all that `load` would read here, checked and read once; how many bytes the head sent for it."""
        files = self._files
        with self._ready(kept, device) as (received_bytes, _):
            if isinstance(files, CheckedFiles):
                names = sorted(in_files(files, self._weights(kept, device)))
                for number, name in enumerate(names):
                    self._channel.tell("checking", number / len(names))
                    files.check(name)
        return received_bytes

    @contextlib.contextmanager
    def _ready(self, kept: SliceParts | None, device: str) -> Iterator[tuple[int, StoredRounded | None]]:
        files, assign = self._files, self._assign
        weights = slice_weights(files, self._span, assign.dtype, kept)
        try:
            with ready_weights(
                files, weights, self._assign.dtype, self._places.store, self._channel
            ) as ready:
                yield ready
        finally:
            if isinstance(files, CheckedFiles):
                files.end()

    def _weights(self, kept: SliceParts | None, device: str) -> list[Weight]:
        return slice_weights(self._files, self._span, self._assign.dtype, kept)


def find_source(
    assign: Assign,
    span: Span,
    kept: Sequence[SliceContent],
    channel: HeadChannel,
    places: Places,
) -> SliceSource:
    """Finds out what the head means, by the digests of the tensors that it has, and where that is.

    That may be one of those that are `kept`. From the hub a model comes with hashes of its own, and the head,
    which may not have the weights, is not asked. Raises `FlowSpecError` where the model cannot be had.
    """
    from_hub = hub_content(assign, span)
    if from_hub in kept:
        return SliceSource(from_hub, None)
    word: ModelDescription | None = None
    called = (assign.model, assign.fingerprint)
    if likely := [each for each in kept if each.called == called and each.span == span]:
        word = ask_word(channel)
        if (found := _find_kept(likely, word, span, assign, channel)) is not None:
            return SliceSource(found, None)
    here, why = _look_here(assign, span, channel, places)
    if isinstance(here, HubModel):
        return SliceSource(from_hub, here)
    if why is not None and places.store is None:
        raise why
    if word is None:
        word = ask_word(channel)
        if (found := _find_kept(kept, word, span, assign, channel)) is not None:
            return SliceSource(found, None)
    if here is not None and not _is_same(here, word):
        here, why = (
            None,
            ClusterError(f"model {assign.model!r} here has another config or other tensors than the head's"),
        )
    if here is not None:
        here.learn(ask_entries(word, _needed(here, span), channel))
        return SliceSource(content_of(word, span, assign, here.entries.values()), here)
    assert why is not None, "it is here, or there is a reason"
    if places.store is None:
        raise why
    log.info("%s; asking the head for the weights", why)
    offered = offered_model(assign, span, word, channel, places.store)
    return SliceSource(content_of(word, span, assign, offered.entries.values()), offered)


def _find_kept(
    kept: Sequence[SliceContent],
    word: ModelDescription,
    span: Span,
    assign: Assign,
    channel: HeadChannel,
) -> SliceContent | None:
    """The slice that is kept and is the one that the head means, tensor by tensor."""
    for each in kept:
        if not each.is_of(word.digest, span, assign):
            continue
        if content_of(word, span, assign, ask_entries(word, each.names, channel)) == each:
            return each
    return None


def _look_here(
    assign: Assign, span: Span, channel: HeadChannel, places: Places
) -> tuple[LocalModel | HubModel | None, FlowSpecError | None]:
    """The model on this device or on the hub, if by its fingerprint it seems to be the head's; else why
    not."""

    def step(size: int) -> None:
        channel.tell("checking", 0.0)

    try:
        here: LocalModel | HubModel
        if ModelFiles(assign.model, may_fetch=False).folder is not None or is_gguf(assign.model):
            here = _known(LocalModel(assign.model, folder=places.folder, step=step), assign)
            _check_fingerprint(here, assign)
        else:
            hub = _known(HubModel(assign.model, folder=places.folder, step=step), assign)
            here = _look_in_cache(hub, assign, span, places.fetcher)
        _check_layers(here, assign)
        return here, None
    except FlowSpecError as error:
        return None, error


FilesT = TypeVar("FilesT", bound=ModelFiles)


def _known(files: FilesT, assign: Assign) -> FilesT:
    """With the head's word for what the model computes, so that no config is read here."""
    if assign.spec is None:
        raise ClusterError(f"the head did not say what {assign.model!r} computes; expected Assign.spec")
    files.spec = assign.spec
    return files


def _look_in_cache(model: HubModel, assign: Assign, span: Span, fetcher: HubFetcher | None) -> HubModel:
    """A model of the hub, its config and index here and the head's; its weights, too, unless there is a
    `fetcher`."""
    try:
        _check_fingerprint(model, assign)
    except FlowSpecError:
        if fetcher is None:
            raise
        fetcher.get_json("config.json")
        _check_fingerprint(model, assign)
    _check_layers(model, assign)
    if not model.has_index and fetcher is not None:
        fetcher.get_json(INDEX)
    if fetcher is None and (missing := model.missing(_needed(model, span))):
        raise InputError(
            f"{missing[0]} of {assign.model!r} is not in the hub's cache here, and this daemon fetches "
            "nothing from there"
        )
    return model


def _check_fingerprint(files: ModelFiles, assign: Assign) -> None:
    found = files.fingerprint()
    if found != assign.fingerprint:
        raise ClusterError(
            f"model {assign.model!r} on this device ({found[:8]}) is not the head's "
            f"({assign.fingerprint[:8]})"
        )


def fetch_missing(files: HubModel, span: Span, fetcher: HubFetcher | None) -> None:
    """Has the files of weights of a slice here. Raises `InputError` where that cannot be, or is more than
    there is room for."""
    if fetcher is not None and (missing := files.missing(_needed(files, span))):
        log.info("fetching %s of %s from the hub", ", ".join(missing), files.model)
        fetcher.get_weights(missing)


def _is_same(here: LocalModel, word: ModelDescription) -> bool:
    """Whether all but the tensors' values is what the head has."""
    if (here.config_text(), here.gguf_architecture) != (word.offer.config, word.offer.gguf):
        return False
    return set(here.extents()) == set(word.names)


def offered_model(
    assign: Assign, span: Span, word: ModelDescription, channel: HeadChannel, store: WeightStore
) -> StoredModel:
    """The model as the head offers it, the tensors of the slice known but not there yet."""
    model = _known(StoredModel(assign.model, word.offer, word.names, store), assign)
    _check_layers(model, assign)
    for entry in ask_entries(word, _needed(model, span), channel):
        model.add(entry)
    return model


def _needed(files: ModelFiles, span: Span) -> set[str]:
    """The tensors that a slice is made of, by their names in the files.

    Nothing else is asked of these: where a head sends them, only names are known yet.
    """
    return in_files(files, weights_of(files.spec, span, files.tensors()))


def _check_layers(files: ModelFiles, assign: Assign) -> None:
    layer_count = files.raw_config()["num_hidden_layers"]
    if layer_count != assign.layer_count:
        raise ClusterError(
            f"model {assign.model!r} has {layer_count} layers, the head expects {assign.layer_count}"
        )


def slice_weights(
    files: ModelFiles,
    span: Span,
    dtype: str,
    kept: SliceParts | None = None,
) -> list[Weight]:
    """The parameters of a slice that are not `kept`; nothing is loaded."""
    found = weights_in(files.spec, span, files.tensors(), dtype)
    return [weight for weight in found if kept is None or weight.owner not in kept]


def slice_memory(
    files: ModelFiles,
    span: Span,
    dtype: str,
    context: int,
    nodes_max: int = limits.TREE_NODES_MAX,
    cache: str = CACHE_AUTO,
    window: SlidingWindow | None = None,
) -> SliceMemory:
    """The memory of a slice, from file headers; nothing is loaded. A tied embedding counts once per slice;
    caches have room for `context` tokens and `nodes_max` guesses, those of layers with a sliding window as
    far as `window` says (None: for all).

    Raises `InputError` for another window than the model's.
    """
    tensors = files.tensors()
    return SliceMemory(
        weight_bytes=weight_bytes(weights_in(files.spec, span, tensors, dtype), tensors, dtype),
        cache_bytes=_cache_bytes(files.spec, span, dtype, context, nodes_max, cache, window),
    )


def room_beside(need: SliceMemory, kept: SliceParts | None, serving: Slice, machine: Machine) -> SliceRoom:
    """Where a slice fits that takes `need` beside what is `kept` of the one that is `serving`."""
    here = accelerator_of(serving.device)
    free = here.free_bytes()
    if machine.memory_bytes is not None:
        free = min(free, machine.memory_bytes - here.taken_bytes())
    return room_for(
        new=need.weight_bytes,
        cache=need.cache_bytes,
        free=max(0, free) // machine.sharers,
        growth=serving.opened_bytes - serving.cache_bytes,
        given_up=serving.weight_bytes - (0 if kept is None else held_bytes(kept)) + serving.cache_bytes,
    )


def kept_memory(spec: ModelSpec, span: Span, assign: Assign) -> SliceMemory:
    """What a slice that is loaded takes in addition."""
    held = _cache_bytes(
        spec, span, assign.dtype, assign.context, assign.nodes_max, assign.cache, assign.sliding_window
    )
    return SliceMemory(weight_bytes=0, cache_bytes=held)


def _cache_bytes(
    spec: ModelSpec,
    span: Span,
    dtype: str,
    context: int,
    nodes_max: int,
    cache: str,
    window: SlidingWindow | None,
) -> int:
    windows = spec.windows
    if window is not None and window.tokens != max(windows):
        raise InputError(
            f"expected a window of {max(windows)} positions, as the model's config.json has it, got "
            f"{window.tokens} from the head; run the same FlowSpec version everywhere"
        )
    return cache_bytes(
        layers_held(spec.heads, windows, spec.inputs, spec.states, spec.sources, span.first, span.end),
        context=context,
        held=cached_as(cache, dtype),
        nodes_max=nodes_max,
        window=window,
        precision=dtype,
    )


def check_memory(
    need: SliceMemory,
    span: Span,
    assign: Assign,
    device: str,
    limit_bytes: int | None,
    claims: MemoryClaims,
    sharers: int = 1,
) -> int:
    """Refuses a slice that does not fit, before anything of it is loaded. Returns the bytes that are left for
    the caches of all requests.

    What other daemons of this machine are sure to need is theirs. Of what is left each of the `sharers`, or
    of the daemons that are here if they are more, gets its part for caches, as far as nobody else was
    promised it, and at least what one conversation takes.
    """
    here = accelerator_of(device)
    here.give_back()
    with claims.deciding():
        others = claims.untouched("sure")
        free_bytes, rest_bytes = here.free_bytes(others), here.free_bytes(claims.untouched("most"))
        allowed_bytes = None if limit_bytes is None else limit_bytes - here.taken_bytes()
        have = free_bytes if allowed_bytes is None else min(free_bytes, allowed_bytes)
        if need.total_bytes > have:
            smaller = "fewer layers" if assign.drafting is None else "a smaller drafter"
            taken_bytes = sum(others.values())
            theirs = f" beside {mib(taken_bytes)} that other daemons here still need" if taken_bytes else ""
            raise NoRoomError(
                f"layers {span.first} to {span.end - 1} need {mib(need.total_bytes)} "
                f"(weights {mib(need.weight_bytes)}, "
                f"cache {mib(need.cache_bytes)} for {assign.context} tokens), "
                f"but {mib(max(0, have))} are free here{theirs}; "
                f"give this device {smaller}, or use a smaller --context, --dtype or --cache"
            )
        part = min(rest_bytes, free_bytes // max(sharers, 1 + len(others)))
        if allowed_bytes is not None:
            part = min(part, allowed_bytes)
        most = max(need.total_bytes, part)
        if here.is_cpu:
            claims.promise(sure=need.total_bytes, most=most)
    return most - need.weight_bytes
