"""A prompt, and how to answer it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.protocol.messages import Sampling
from flowspec.model.reply.form import ReplyForm
from flowspec.runtime.session import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and how to answer it; `stops` are texts, `top_logprobs` is as in `Submit`. With a `form`,
    thoughts and calls are told apart from the text. Of its answer `answered` is known already.
    """

    prompt: Sequence[int]
    sampling: Sampling
    limits: Limits
    stops: Sequence[str] = ()
    top_logprobs: int = -1
    form: ReplyForm | None = None
    answered: tuple[int, ...] = ()
