"""What plain decoding says of a simulated language: the oracle that simulated clusters are compared with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from flowspec.core.head.events import StopRule, Submit
from flowspec.core.protocol.messages import Logprobs, Sampling
from flowspec.sim.language import Language, as_prefix


def plain_answer(
    language: Language,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    new_tokens_max: int,
    context: int,
    stop_ids: Collection[int] = (),
    stop_rule: StopRule | None = None,
    answer_start: int | None = None,
) -> tuple[list[int], str]:
    """What plain decoding says, token by token: the new tokens, and `stop` or `length`.

    A stop id is not part of the answer, the token at which a stop rule ends it is; prompt and answer fit the
    context. With `answer_start` the prompt ends with what is known of the answer, from there on.
    """
    start = len(prompt) if answer_start is None else answer_start
    tokens = np.empty(len(prompt) + new_tokens_max, dtype="<i4")
    tokens[: len(prompt)] = prompt
    new: list[int] = []
    while len(new) < new_tokens_max and len(prompt) + len(new) < context:
        end = len(prompt) + len(new)
        token = language.next_token(tokens[:end], sampling, start)
        if token in stop_ids:
            return new, "stop"
        tokens[end] = token
        new.append(token)
        if stop_rule is not None and stop_rule.stops_at(new):
            return new, "stop"
    return new, "length"


def plain_logprobs(language: Language, submit: Submit, tokens: Sequence[int]) -> list[Logprobs]:
    """What comes with the first new `tokens` of an answer, one for each; nothing if none are wanted."""
    if submit.top_logprobs < 0:
        return []
    path = as_prefix([*submit.prompt, *submit.answered, *tokens])
    first = len(path) - len(tokens)
    return [
        language.logprobs(path[: first + at], token, submit.top_logprobs) for at, token in enumerate(tokens)
    ]
