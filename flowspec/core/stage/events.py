"""What a stage is told and what it asks for. Tensors are opaque handles; nothing here knows their
type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import (
    Commit,
    Features,
    Logprobs,
    Open,
    Release,
    Sampling,
    Segment,
    Verified,
)
from flowspec.core.text_before import TextBefore


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentArrived:
    """`payload_bytes` is what the payload takes while the segment waits."""

    segment: Segment
    payload: Any
    received_s: float
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlArrived:
    message: Open | Commit | Release


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersDone:
    """A job ended: `rows` (of the job) survived; `payload` is `[len(rows), width]`, None on the last stage.
    `captured` is what a drafter wants of each row and this stage has, a handle for each (empty: nothing).

    `next_tokens` are the last stage's, -1 where none was asked for; `logprobs` are theirs, None where none
    was asked for (empty: nobody did).
    """

    job: int
    rows: tuple[int, ...]
    payload: Any
    next_tokens: tuple[int, ...]
    started_s: float
    ended_s: float
    logprobs: tuple[Logprobs | None, ...] = ()
    captured: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEnded:
    """The job that runs began its first layer, or ended one, at `at_s`; it runs on."""

    job: int
    at_s: float


StageEvent = SegmentArrived | ControlArrived | LayerEnded | LayersDone

# ---------------------------------------------------------------------------------------- a stage's commands


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowPart:
    """The same rows in the caches of layers with a sliding window, which have slots of their own."""

    slots: npt.NDArray[np.int64]  # [rows]
    held: npt.NDArray[np.int32]  # [window high]: whose node of the part's slots each holds, -1: none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobPart:
    """The rows of one request in a job: where they go in its cache and what they may see. Without a `window`
    all layers hold all. At positions below `committed` stand nodes of the output's path alone, these rows
    among them; 0 where that is not known. The answer begins at position `answer_start`."""

    request: int
    slots: npt.NDArray[np.int64]  # [rows]
    tokens: npt.NDArray[np.int64]  # [rows]
    positions: npt.NDArray[np.int64]  # [rows]
    key_positions: npt.NDArray[np.int32]  # [high]
    visible: npt.NDArray[np.bool_]  # [rows, high]
    sampled: npt.NDArray[np.bool_]  # [rows]: whose next token is asked for (on the last stage)
    sampling: Sampling
    top_logprobs: int = -1
    window: WindowPart | None = None
    committed: int = 0
    slot_tokens: npt.NDArray[np.int32] | None = None  # [high]: where tokens are drawn by the text before them
    answer_start: int = 0

    def text(self, row: int) -> TextBefore | None:
        """What stands before the token after a row, which is what the row sees; None where nobody needs
        it."""
        if self.slot_tokens is None:
            return None
        (slots,) = np.nonzero(self.visible[row])
        slots = slots[np.argsort(self.key_positions[slots], kind="stable")]
        return TextBefore(self.slot_tokens[slots].astype(np.int64), self.answer_start)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunLayers:
    """Run this stage's layers on rows `rows` of `payload` (on the first stage: on the tokens)."""

    job: int
    parts: tuple[JobPart, ...]
    payload: Any
    rows: tuple[int, ...]

    @property
    def context(self) -> int:
        """How many earlier tokens the rows see: those of its requests together. Keys and values of these are
        read."""
        return sum(int(part.positions.min()) for part in self.parts)

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        """Of all rows, `[rows]`: whose next token is asked for, so that `lm_head` runs on the last stage."""
        return np.concatenate([part.sampled for part in self.parts])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """These rows of the running job are dead: drop them at the next layer boundary."""

    job: int
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copied:
    """What a new cache begins with: what that of `source` holds in `slots` `[kept]` int64 goes into its first
    slots, in this order, and in layers with a sliding window so does that of `window_slots`; and with them
    states, as they are."""

    source: int
    slots: npt.NDArray[np.int64]
    window_slots: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCache:
    """Layers with a sliding window get `window_slots` of their own (0: `slots`, as all others). It is empty,
    or begins with what is `copied`."""

    request: int
    slots: int
    window_slots: int = 0
    copied: Copied | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearSlots:
    """Zero these slots before the next job: what a masked slot holds must be finite. `window_slots` are those
    of layers with a window.

    Where these were given back, `passed` are the window slots of the output's path from the first position
    that was held on, as far as a row sees back from the first that it may still follow. Before that, states
    of what was given back are kept as a snapshot ("take"), or are again what they were then ("restore").
    """

    request: int
    slots: tuple[int, ...]
    window_slots: tuple[int, ...] = ()
    passed: tuple[int, ...] = ()
    snapshot: Literal["", "take", "restore"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseCache:
    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSegment:
    """To the next hop: `rows` of `payload` (None: a header only)."""

    segment: Segment
    payload: Any
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendVerified:
    """To the head."""

    verified: Verified


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFeatures:
    """To the head: `rows` are what was captured of each node, as it came with `LayersDone`."""

    features: Features
    rows: tuple[Any, ...]


StageCommand = (
    RunLayers | Trim | OpenCache | ClearSlots | CloseCache | SendSegment | SendVerified | SendFeatures
)
