"""A prompt, and how to answer it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.protocol.messages import Sampling
from flowspec.model.reply.form import ReplyForm
from flowspec.runtime.session import Limits

Changes = tuple[tuple[int, str], ...]
"""Other arithmetics than the one that an answer began with, each with the number of tokens before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and how to answer it; `stops` are texts, `top_logprobs` is as in `Submit`. With a `form`,
    thoughts and calls are told apart from the text.

    Of it `answered` is known already, which began with an `arithmetic` and went on with those of its
    `changes`.
    """

    prompt: Sequence[int]
    sampling: Sampling
    limits: Limits
    stops: Sequence[str] = ()
    top_logprobs: int = -1
    form: ReplyForm | None = None
    answered: tuple[int, ...] = ()
    arithmetic: str = ""
    changes: Changes = ()
