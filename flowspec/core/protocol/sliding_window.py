"""What layers with a sliding window hold of a request: they never look further back than the window, so older
keys and values are given back.

Who goes back (an edited turn, another answer to the same question) goes on behind what is kept, and needs the
window before that place. So such layers hold `BACK_TOKENS` more than their window. Further back nobody can
go: there the text is read again from its beginning, since a key in the window depends, layer by layer, on all
that is before it.

A short convolution sees as many positions as it is long, and holds its inputs in the same way.

A stage decides by what it has run, the head by the most that any stage can have run: it never keeps what a
stage has given back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowspec.core.protocol import limits
from flowspec.core.protocol.checks import check_range

CONVOLUTION = "conv"
"""What transformers' configs call layers that are short convolutions, of the length `conv_L_cache`."""
BACK_TOKENS = 1024
"""How far a request can go back at least without being read again: about one turn with its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """A row at position p sees those above p - `tokens`. What lies more than `back` before that is given
    back, `step` positions at a time."""

    tokens: int
    back: int = BACK_TOKENS
    step: int = limits.CACHE_BLOCK_SLOTS

    def __post_init__(self) -> None:
        for name in ("tokens", "step"):
            check_range(name, getattr(self, name), 1, limits.CONTEXT_MAX)
        check_range("back", self.back, 0, limits.CONTEXT_MAX)

    @property
    def slots(self) -> int:
        """The most that a layer holds of a request: what may be seen, how far one can go back, what is not
        given back yet, a tree, and the segment that runs."""
        return self.tokens + self.back + self.step + limits.TREE_NODES_MAX + limits.NODES_PER_SEGMENT_MAX

    def given_back(self, length: int) -> int:
        """Positions below this are held no more once `length` positions of the output's path were run."""
        return max(0, length - self.tokens - self.back) // self.step * self.step

    def may_keep(self, keep: int, given_back: int) -> bool:
        """Whether the rows behind the first `keep` positions find all that they see."""
        return keep == 0 or given_back == 0 or keep + 1 - self.tokens >= given_back


def window_for(tokens: int, context: int) -> SlidingWindow | None:
    """What layers with a window of so many tokens (0: there are none) hold of requests with such a context at
    a stage; None where holding less would save nothing."""
    window = SlidingWindow(tokens=tokens) if tokens else None
    return window if window is not None and window.slots < context + limits.TREE_NODES_MAX else None


def windows_of(config: Any) -> tuple[int, ...]:
    """How many positions each layer of a transformers config sees, itself counted; 0: all."""
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None) or ("sliding_attention",) * config.num_hidden_layers
    seen = {"sliding_attention": window, CONVOLUTION: getattr(config, "conv_L_cache", 0)}
    return tuple(seen.get(kind, 0) for kind in types)


def convolutions_of(config: Any) -> tuple[bool, ...]:
    """Which layers of a transformers config are short convolutions: they hold an input in each slot, and no
    keys and values."""
    types = getattr(config, "layer_types", None) or ("",) * config.num_hidden_layers
    return tuple(kind == CONVOLUTION for kind in types)
