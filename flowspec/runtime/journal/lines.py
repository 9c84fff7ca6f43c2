"""What a journal says, and its lines: one JSON object each, in the order in which things happened.

The first line is the `Setting`. Then for each answer a line `ask` (what fixes it), lines `tokens` as they
were committed, and a line `end`. A last line that is not whole was being written when the head was ended, and
does not count. Knows no files.

A prompt is written as what it adds to the text before it, so a journal grows with its dialogue and not with
its square.

Every line ends with its own number and a checksum of all that is before it: a bit that flipped on an old
card, or a line that is missing or there twice, would otherwise give other tokens in silence.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from flowspec.core.head.request import common_prefix
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Grammar, Sampling
from flowspec.core.protocol.precision import ACTIVATIONS, CACHE_AUTO, CACHES
from flowspec.core.protocol.types import Line, Name
from flowspec.errors import InputError, first_line
from flowspec.runtime.question import Question
from flowspec.runtime.session import Limits
from flowspec.validation import Document, decode_json, expect

FORMAT = 6
"""Also raised when another version would draw other tokens from the same seed.

Lines of format 1 had no checksums; format 2 had no arithmetic, format 3 no `cache`.
"""
Tokens = Annotated[
    tuple[Annotated[int, Meta(ge=0, le=limits.VOCABULARY_MAX)], ...], Meta(max_length=limits.CONTEXT_MAX)
]
End = Annotated[str, Meta(pattern="^(stop|length|cancelled)$", description="one of stop, length, cancelled")]


class Setting(Document, frozen=True, kw_only=True):
    """What all answers of a journal share: whose they are, and the model with all that moves its tokens.

    All is computed with one `arithmetic` (`core.cluster.agreement`). It began on the devices of the file
    `cluster` (empty: of none), or on so many `local` processes (0: not told); it may go on elsewhere.
    """

    journal: int = FORMAT
    command: Literal["generate", "chat"]
    model: Line
    fingerprint: Name
    dtype: str
    context: Annotated[int, Meta(ge=1, le=limits.CONTEXT_MAX)]
    arithmetic: Name = ""
    cache: str = CACHE_AUTO
    cluster: Line = ""
    local: Annotated[int, Meta(ge=0, le=limits.STAGES_MAX)] = 0

    def __post_init__(self) -> None:
        expect(self.dtype in ACTIVATIONS, "dtype", self.dtype, f"one of {', '.join(ACTIVATIONS)}")
        expect(self.cache in CACHES, "cache", self.cache, f"one of {', '.join(CACHES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A question with its answer so far, and how that ended (nothing: it did not).

    `user` and `system` are what was said in a chat; the question's prompt is what the model saw, as a chat
    template made it on that day. `text` is the whole answer's, None without a tokenizer.
    """

    question: Question
    user: str = ""
    system: str = ""
    end: End | None = None
    text: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the answer came to its own end."""
        return self.end in ("stop", "length")

    @property
    def known(self) -> tuple[int, ...]:
        return (*self.question.prompt, *self.question.answered)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalContent:
    """A journal as it was read: questions and answers before the last one, and that one.

    It has so many whole `lines`, which have `size_bytes`; with a `damage` more came behind them.
    """

    setting: Setting
    earlier: tuple[tuple[str, str], ...]
    last: Entry | None
    lines: int
    size_bytes: int
    damage: str = ""

    def messages(self) -> list[dict[str, str]]:
        """The dialogue of a chat; a question whose answer did not end is not part of it."""
        ended = self.last is not None and self.last.end
        turns = (
            *self.earlier,
            *([(self.last.user, self.last.text or "")] if self.last is not None and ended else []),
        )
        return [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]


# ------------------------------------------------------------------------------------------------- lines


def _by_name(kind: type, **others: Any) -> Any:
    """The same fields as an object that has them by name, whatever the wire makes of them."""
    hints = get_type_hints(kind, include_extras=True) | others
    fields = [
        (name, hints[name], *([] if each.default is each.empty else [each.default]))
        for name, each in inspect.signature(kind).parameters.items()
    ]
    return msgspec.defstruct(kind.__name__, fields, bases=(Document,), frozen=True, kw_only=True)


if TYPE_CHECKING:  # type checkers cannot read a type that is made of another's hints
    _Sampling = Any
else:
    _Grammar = _by_name(Grammar)
    _Sampling = _by_name(Sampling, grammar=_Grammar | None)
    """A field that is not there is off, as in the version that wrote the line; one that is not known here
    would draw other tokens."""


class Ask(Document, frozen=True, kw_only=True):
    """A question, whose prompt begins with what the answer before it had by its end: so much is to `keep`."""

    keep: Annotated[int, Meta(ge=0)]
    prompt: Tokens
    sampling: _Sampling
    new_tokens_max: Annotated[int, Meta(ge=1, le=limits.ID_MAX)]
    stop_ids: frozenset[int]
    stops: tuple[Annotated[str, Meta(min_length=1)], ...]
    user: str
    system: str


class Row(Document, frozen=True, kw_only=True, omit_defaults=True):
    """What a line says, without its seal: one of these, with an `end` the answer's text.

    An `arithmetic` is in journals of before it could change: the last one counts.
    """

    ask: Ask | None = None
    tokens: Tokens | None = None
    end: End | None = None
    text: str | None = None
    arithmetic: Name | None = None

    def __post_init__(self) -> None:
        said = [each for each in (self.ask, self.tokens, self.end, self.arithmetic) if each is not None]
        expect(len(said) == 1, "line", f"{len(said)} of them", "a question, tokens or an end")


def ask_row(entry: Entry, before: Sequence[int]) -> Row:
    """The question, `before` being the whole text of the answer before it."""
    question, keep = entry.question, common_prefix(before, entry.question.prompt)
    ask = Ask(
        keep=keep,
        prompt=tuple(question.prompt[keep:]),
        sampling=msgspec.convert(question.sampling, _Sampling, from_attributes=True),
        new_tokens_max=question.limits.new_tokens_max,
        stop_ids=question.limits.stop_ids,
        stops=tuple(question.stops),
        user=entry.user,
        system=entry.system,
    )
    return Row(ask=ask)


def _entry(ask: Ask, before: tuple[int, ...]) -> Entry:
    expect(ask.keep <= len(before), "keep", ask.keep, f"at most {len(before)}")
    prompt = before[: ask.keep] + ask.prompt
    expect(bool(prompt), "prompt", prompt, "at least one token")
    drawn, grammar = asdict(ask.sampling), ask.sampling.grammar
    sampling = Sampling(**{**drawn, "grammar": grammar and Grammar(**asdict(grammar))})
    limit = Limits(new_tokens_max=ask.new_tokens_max, stop_ids=ask.stop_ids)
    question = Question(prompt=prompt, sampling=sampling, limits=limit, stops=ask.stops)
    return Entry(question=question, user=ask.user, system=ask.system)


def sealed(row: Any, number: int) -> bytes:
    """The line `number` of a journal, the first one being 1."""
    body = msgspec.json.encode(row, order="deterministic")[:-1] + _count(number)
    return body + _seal(body) + b"\n"


def _count(number: int) -> bytes:
    return b',"line":%d' % number


def _seal(body: bytes) -> bytes:
    return b',"crc":"%08x"}' % zlib.crc32(body)


_SEAL_BYTES = len(_seal(b""))


# ------------------------------------------------------------------------------------------------- reading


class _Format(msgspec.Struct):
    journal: int


def read_lines(data: bytes, name: str) -> JournalContent:
    """Reads a journal, up to a damaged line. Raises `InputError`, naming `name` and the line, for what no
    journal holds."""
    *lines, _torn = data.split(b"\n")
    if not lines:
        raise InputError(f"{name}: expected a journal, got nothing that is whole; ask again")
    damage, rows, number = "", list[bytes](), 1
    earlier: list[tuple[str, str]] = []
    last: Entry | None = None
    tokens: list[int] = []  # of the last answer
    try:
        if (found := decode_json(lines[0], _Format).journal) != FORMAT:
            raise InputError(
                f"{name} is a journal of format {found}, expected {FORMAT}: another version of flowspec "
                "wrote it; resume it with that one, or ask again"
            )
        for line in lines:
            if damage := _damage(line, len(rows) + 1):
                damage = f"{name} line {len(rows) + 1} is damaged: {damage}"
                break
            rows.append(line[:-_SEAL_BYTES].removesuffix(_count(len(rows) + 1)) + b"}")
        if not rows:
            raise InputError(f"{damage}; nothing before it can be gone on with, ask again")
        setting = decode_json(rows[0], Setting)
        for line in rows[1:]:
            number += 1
            row = decode_json(line, Row)
            if row.ask is not None:
                is_first = setting.command == "chat" or last is None
                expect(is_first, "ask", "a second question", "one in a journal of generate")
                last = _answered(last, tokens, setting)
                if last is not None and last.end:
                    earlier.append((last.user, last.text or ""))
                last, tokens = _entry(row.ask, () if last is None else last.known), []
            elif row.arithmetic is not None:
                setting = msgspec.structs.replace(setting, arithmetic=row.arithmetic)
            elif last is None or last.end:
                raise ValueError(f"expected a question, got {line[:80]!r}")
            elif row.tokens is not None:
                tokens += row.tokens
            else:
                last = replace(last, end=row.end, text=row.text)
        last = _answered(last, tokens, setting)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise InputError(
            f"{name} line {number}: expected a journal of flowspec: {first_line(error)}"
        ) from None
    return JournalContent(
        setting=setting,
        earlier=tuple(earlier),
        last=last,
        lines=len(rows),
        size_bytes=sum(len(line) + 1 for line in lines[: len(rows)]),
        damage=damage,
    )


def _damage(line: bytes, number: int) -> str:
    """What is wrong with a line as it lies on the disk, nothing if nothing is; what it says is not looked
    at."""
    body = line[:-_SEAL_BYTES]
    if line[len(body) :] != _seal(body):
        return "its checksum does not fit"
    return "" if body.endswith(_count(number)) else f"it should be line {number} by its own count, and is not"


def _answered(entry: Entry | None, tokens: list[int], setting: Setting) -> Entry | None:
    """The answer with all its tokens; a prompt alone may exceed the context, and is refused when it is asked
    again."""
    if entry is None or not tokens:
        return entry
    asked, known = entry.question.limits, len(entry.question.prompt) + len(tokens)
    most = min(asked.new_tokens_max, limits.CONTEXT_MAX)
    expect(len(tokens) <= most, "tokens", f"{len(tokens)} entries", f"at most {most}")
    expect(asked.stop_ids.isdisjoint(tokens), "tokens", tokens, "none that ends the answer")
    expect(known <= setting.context, "tokens", known, f"at most {setting.context} with the prompt")
    return replace(entry, question=replace(entry.question, answered=tuple(tokens)))
