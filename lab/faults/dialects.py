"""What devices of different arithmetics say: each has a language of its own, so a token shows who said it.

An answer is computed with one arithmetic, unless the head is allowed to go on with another. So what is
expected of it has *spans*: from which token on it is computed with which.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from zlib import crc32

from flowspec.core.head.events import Submit
from flowspec.core.protocol.messages import Logprobs
from flowspec.sim.language import HashLanguage
from tests.plain import plain_answer, plain_logprobs

PLAIN = "plain"
"""The arithmetic of the language itself, which every device has that is not told otherwise."""
Spans = Sequence[tuple[int, str]]


def spoken(language: HashLanguage, arithmetic: str) -> HashLanguage:
    """What a model says that is computed with this arithmetic."""
    return language if arithmetic in ("", PLAIN) else language.other(crc32(arithmetic.encode()))


def answer_of(language: HashLanguage, submit: Submit, context: int, spans: Spans) -> tuple[list[int], str]:
    """The whole answer whose tokens are computed so, and `stop` or `length`.

    What was answered before is taken as it is: the first span begins behind it.
    """
    text: list[int] = []
    reason = ""
    for start, arithmetic in spans:
        text = [*submit.answered, *text[len(submit.answered) : start]]
        more, reason = plain_answer(
            spoken(language, arithmetic),
            (*submit.prompt, *text),
            submit.sampling,
            new_tokens_max=submit.new_tokens_max - len(text),
            context=context,
            stop_ids=submit.stop_ids,
            answer_start=len(submit.prompt),
        )
        text += more
    return text, reason


def logprobs_of(
    language: HashLanguage,
    submit: Submit,
    tokens: Sequence[int],
    spans: Spans,
) -> list[Logprobs]:
    """What comes with the new `tokens` of an answer, if anything is wanted."""
    known = len(submit.answered)
    ends = [*spans, (known + len(tokens), "")]
    found: list[Logprobs] = []
    for (start, arithmetic), (end, _) in pairwise(ends):
        first, last = max(0, start - known), max(0, end - known)
        told = plain_logprobs(spoken(language, arithmetic), submit, tokens[:last])
        found += told[first:]
    return found
