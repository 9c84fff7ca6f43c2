"""Single tokens and their log-probabilities as the API's documents have them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from flowspec.runtime.token_log import TokenLogprob


def name_of(content: bytes) -> str:
    """A token as text; one that is only a part of a character as `bytes:\\\\xe2\\\\x80`."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + re.sub("..", r"\\x\g<0>", content.hex())


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""

    def told(content: bytes, logprob: float) -> dict[str, Any]:
        return {"token": name_of(content), "logprob": logprob, "bytes": list(content)}

    content = [
        {
            **told(entry.content, entry.logprob),
            "top_logprobs": [told(other.content, other.logprob) for other in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a completion's choice; the token itself is among the likeliest, as in the API."""
    top = [
        {
            **{name_of(other.content): other.logprob for other in entry.top},
            name_of(entry.content): entry.logprob,
        }
        for entry in entries
    ]
    return {
        "tokens": [name_of(entry.content) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": [entry.offset for entry in entries],
    }
