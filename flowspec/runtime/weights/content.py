"""What a slice is: all that its arithmetic follows from. By this, and nothing else, is a slice kept and given
again.

A head's word for a model (its name, its fingerprint) is only what that head calls it. Two heads mean the same
slice when the tensors that it is made of have the same digests, and are put together in the same way.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from flowspec.core.protocol.cluster_messages import Assign
from flowspec.core.protocol.device_messages import ModelOffer, TensorEntry
from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.model.weights import Span


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a head says of its model: config and architecture, and the names of all tensors."""

    offer: ModelOffer
    names: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of all of it: which tensors a slice is made of, and how, follows from this."""
        said = [self.offer.config, self.offer.gguf, sorted(self.names)]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceContent:
    """A slice's content. `model` is a `ModelDescription.digest`, or names what the hub has (`hub_content`),
    whose `tensors` are none.

    Equal contents give the same bits. `called` is what the head called the model: its name and fingerprint,
    which prove nothing.
    """

    model: str
    span: Span
    dtype: str
    arithmetic: str = ""
    cache: str = CACHE_AUTO
    tensors: tuple[TensorEntry, ...] = ()
    called: tuple[str, str] = field(default=("", ""), compare=False)

    def is_of(self, model: str, span: Span, assign: Assign) -> bool:
        """Whether only the tensors remain to be compared."""
        own = (self.model, self.span, self.dtype, self.arithmetic, self.cache)
        return own == (model, span, assign.dtype, assign.arithmetic, assign.cache)

    def agrees_with(self, other: SliceContent) -> bool:
        """Whether layers that both slices have are the same, tensor by tensor."""
        own = (self.model, self.dtype, self.arithmetic)
        if own != (other.model, other.dtype, other.arithmetic):
            return False
        known = {entry.name: entry for entry in self.tensors}
        return all(known.get(entry.name, entry) == entry for entry in other.tensors)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.tensors)


def content_of(
    word: ModelDescription, span: Span, assign: Assign, entries: Iterable[TensorEntry]
) -> SliceContent:
    """The content of a slice that is made of these tensors."""
    tensors = tuple(sorted(entries, key=lambda entry: entry.name))
    called = (assign.model, assign.fingerprint)
    return SliceContent(
        model=word.digest,
        span=span,
        dtype=assign.dtype,
        arithmetic=assign.arithmetic,
        cache=assign.cache,
        tensors=tensors,
        called=called,
    )


def hub_content(assign: Assign, span: Span) -> SliceContent:
    """The content of a slice that this device has from the hub itself: the fingerprint, as found here, names
    the revision."""
    model = f"hub {assign.model} {assign.fingerprint}"
    return SliceContent(
        model=model, span=span, dtype=assign.dtype, arithmetic=assign.arithmetic, cache=assign.cache
    )
