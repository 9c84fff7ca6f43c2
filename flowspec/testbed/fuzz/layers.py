"""What the layers of a fuzzed cluster compute: arithmetic."""

from __future__ import annotations

from flowspec.core.messages import Logprobs
from flowspec.testbed.fuzz.made_up import VOCABULARY
from flowspec.wire.codec import DTYPE_BYTES, Tensor


def next_token(token: int, position: int) -> int:
    """The token that this model draws."""
    return (3 * token + position) % VOCABULARY


def logprobs_of(count: int) -> Logprobs:
    """What it says of any token, and of so many others."""
    return Logprobs(chosen=-0.5, ids=tuple(range(count)), values=tuple(-0.5 - each for each in range(count)))


def payload_of(rows: int, width: int) -> Tensor:
    """Hidden states `[rows, width]`, all zero."""
    return Tensor(rows=rows, width=width, dtype="float32", data=bytes(rows * width * DTYPE_BYTES["float32"]))
