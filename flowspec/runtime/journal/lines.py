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

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from flowspec.core.head.request import common_prefix
from flowspec.core.protocol import limits
from flowspec.core.protocol.checks import check, check_all, check_range, check_text
from flowspec.core.protocol.messages import SAMPLING_FIELDS, Grammar, Sampling
from flowspec.core.protocol.precision import ACTIVATIONS, CACHE_AUTO, CACHES
from flowspec.errors import InputError, first_line
from flowspec.validation import as_dict, checked

FORMAT = 6
"""Also raised when another version would draw other tokens from the same seed.

Lines of format 1 had no checksums; format 2 had no arithmetic, format 3 no `cache`.
"""
COMMANDS = ("generate", "chat")
ENDS = ("stop", "length", "cancelled")
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all answers of a journal share: whose they are, and the model with all that moves its tokens.

    All is computed with one `arithmetic` (`core.cluster.agreement`). It began on the devices of the file
    `cluster` (empty: of none), or on so many `local` processes (0: not told); it may go on elsewhere.
    """

    command: str
    model: str
    fingerprint: str
    dtype: str
    context: int
    arithmetic: str = ""
    cache: str = CACHE_AUTO
    cluster: str = ""
    local: int = 0

    def __post_init__(self) -> None:
        check(self.command in COMMANDS, "command", self.command, ", ".join(COMMANDS))
        check_text("model", self.model, limits.TEXT_CHARS_MAX)
        check_text("fingerprint", self.fingerprint)
        check_text("arithmetic", self.arithmetic)
        check(self.dtype in ACTIVATIONS, "dtype", self.dtype, ", ".join(ACTIVATIONS))
        check(self.cache in CACHES, "cache", self.cache, ", ".join(CACHES))
        check_range("context", self.context, 1, limits.CONTEXT_MAX)
        check_text("cluster", self.cluster, limits.TEXT_CHARS_MAX)
        check_range("local", self.local, 0, limits.STAGES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An answer: what fixes it, its tokens so far, and how it ended (nothing: it did not).

    `user` and `system` are what was said in a chat; `prompt` is what the model saw, as a chat template made
    it on that day. `text` is the whole answer's, None without a tokenizer.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    new_tokens_max: int
    stop_ids: frozenset[int]
    stops: tuple[str, ...] = ()
    user: str = ""
    system: str = ""
    tokens: tuple[int, ...] = ()
    end: str = ""
    text: str | None = None

    def __post_init__(self) -> None:
        check(bool(self.prompt), "prompt", self.prompt, "at least one token")
        check_all("prompt", self.prompt, 0, limits.VOCABULARY_MAX, limits.CONTEXT_MAX)
        check_range("new_tokens_max", self.new_tokens_max, 1, limits.ID_MAX)
        check_all(
            "tokens", self.tokens, 0, limits.VOCABULARY_MAX, min(self.new_tokens_max, limits.CONTEXT_MAX)
        )
        check(not self.stop_ids.intersection(self.tokens), "tokens", self.tokens, "none that ends the answer")
        check(all(self.stops), "stops", self.stops, "texts that are not empty")
        check(self.end in ("", *ENDS), "end", self.end, ", ".join(ENDS))

    @property
    def is_finished(self) -> bool:
        """Whether the answer came to its own end."""
        return self.end in ("stop", "length")

    @property
    def known(self) -> tuple[int, ...]:
        return self.prompt + self.tokens


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


# ------------------------------------------------------------------------------------------------- writing


Row = Mapping[str, Any]
"""What a line says, without its seal."""


def setting_row(setting: Setting) -> Row:
    return {"journal": FORMAT, **asdict(setting)}


def ask_row(entry: Entry, before: Sequence[int]) -> Row:
    """The question, `before` being the whole text of the answer before it."""
    keep = common_prefix(before, entry.prompt)
    fields: dict[str, Any] = {
        "keep": keep,
        "prompt": entry.prompt[keep:],
        "sampling": as_dict(entry.sampling),
        "new_tokens_max": entry.new_tokens_max,
        "stop_ids": sorted(entry.stop_ids),
        "stops": entry.stops,
        "user": entry.user,
        "system": entry.system,
    }
    return {"ask": fields}


def tokens_row(tokens: Sequence[int]) -> Row:
    return {"tokens": list(tokens)}


def end_row(reason: str, text: str | None) -> Row:
    return {"end": reason, "text": text}


def sealed(row: Row, number: int) -> bytes:
    """The line `number` of a journal, the first one being 1."""
    body = json.dumps({**row, "line": number}, separators=(",", ":")).encode()[:-1]
    return body + _seal(body) + b"\n"


def _seal(body: bytes) -> bytes:
    return b',"crc":"%08x"}' % zlib.crc32(body)


_SEAL_BYTES = len(_seal(b""))


# ------------------------------------------------------------------------------------------------- reading


def read_lines(data: bytes, name: str) -> JournalContent:
    """Reads a journal, up to a damaged line. Raises `InputError`, naming `name` and the line, for what no
    journal holds."""
    *lines, _torn = data.split(b"\n")
    if not lines:
        raise InputError(f"{name}: expected a journal, got nothing that is whole; ask again")
    _check_format(lines[0], name)
    damage, whole = "", len(lines)
    for place, line in enumerate(lines):
        if damage := _damage(line, place + 1):
            damage, whole = f"{name} line {place + 1} is damaged: {damage}", place
            break
    if not whole:
        raise InputError(f"{damage}; nothing before it can be gone on with, ask again")
    lines = lines[:whole]
    number = 1
    earlier: list[tuple[str, str]] = []
    last: Entry | None = None
    tokens: list[int] = []  # of the last answer
    try:
        setting = _setting(_row(lines[0]))
        for line in lines[1:]:
            number += 1
            row = _row(line)
            if "ask" in row:
                check(
                    setting.command == "chat" or last is None,
                    "ask",
                    "a second question",
                    "one in a journal of generate",
                )
                last = _answered(last, tokens, setting)
                if last is not None and last.end:
                    earlier.append((last.user, last.text or ""))
                last, tokens = _ask(_field(row, "ask", dict), () if last is None else last.known), []
            elif "arithmetic" in row:  # in journals of before it could change: the last one counts
                setting = replace(setting, arithmetic=_text(row, "arithmetic"))
            elif last is None or last.end:
                raise ValueError(f"expected a question, got {line[:80]!r}")
            elif "tokens" in row:
                tokens += _numbers(row, "tokens")
            else:
                text = None if row.get("text") is None else _text(row, "text")
                last = replace(last, end=_text(row, "end"), text=text)
                check(bool(last.end), "end", last.end, ", ".join(ENDS))
        last = _answered(last, tokens, setting)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{name} line {number}: expected a journal of flowspec: {first_line(error)}"
        ) from None
    return JournalContent(
        setting=setting,
        earlier=tuple(earlier),
        last=last,
        lines=whole,
        size_bytes=sum(len(line) + 1 for line in lines),
        damage=damage,
    )


def _check_format(line: bytes, name: str) -> None:
    """Raises `InputError` for the first line of another format, or of none."""
    try:
        found = _field(_row(line), "journal", int)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} line 1: expected a journal of flowspec: {first_line(error)}") from None
    if found != FORMAT:
        raise InputError(
            f"{name} is a journal of format {found}, expected {FORMAT}: another version of flowspec wrote "
            "it; "
            "resume it with that one, or ask again"
        )


def _damage(line: bytes, number: int) -> str:
    """What is wrong with a line as it lies on the disk, nothing if nothing is; what it says is not looked
    at."""
    body = line[:-_SEAL_BYTES]
    if line[len(body) :] != _seal(body):
        return "its checksum does not fit"
    counted = b',"line":%d' % number
    return "" if body.endswith(counted) else f"it should be line {number} by its own count, and is not"


def _answered(entry: Entry | None, tokens: list[int], setting: Setting) -> Entry | None:
    """The answer with all its tokens; a prompt alone may exceed the context, and is refused when it is asked
    again."""
    if entry is None or not tokens:
        return entry
    whole = replace(entry, tokens=tuple(tokens))
    check(
        len(whole.known) <= setting.context,
        "tokens",
        len(whole.known),
        f"at most {setting.context} with the prompt",
    )
    return whole


def _row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {line[:80]!r}")
    return row


def _setting(row: dict[str, Any]) -> Setting:
    names = ("command", "model", "fingerprint", "dtype", "arithmetic", "cache")
    texts = {name: _text(row, name) for name in names}
    where: dict[str, Any] = {"cluster": "", "local": 0} | row  # journals of before say nothing of it
    return Setting(
        **texts,
        context=_field(row, "context", int),
        cluster=_text(where, "cluster"),
        local=_field(where, "local", int),
    )


def _ask(row: dict[str, Any], before: tuple[int, ...]) -> Entry:
    keep = _field(row, "keep", int)
    check_range("keep", keep, 0, len(before))
    stops = _field(row, "stops", list)
    return Entry(
        prompt=before[:keep] + tuple(_numbers(row, "prompt")),
        sampling=_sampling(_field(row, "sampling", dict)),
        new_tokens_max=_field(row, "new_tokens_max", int),
        stop_ids=frozenset(_numbers(row, "stop_ids")),
        stops=tuple(_text({"stops": stop}, "stops") for stop in stops),
        user=_text(row, "user"),
        system=_text(row, "system"),
    )


def _sampling(row: dict[str, Any]) -> Sampling:
    """A field that is not there is off, as in the version that wrote the line; one that is not known here
    would draw other tokens."""
    known = list(Sampling.__struct_fields__)
    unknown = [name for name in row if name not in known]
    check(not unknown, "sampling", unknown, ", ".join(known))
    found: dict[str, Any] = {
        name: _real(row, name) if kind is float else _field(row, name, kind)
        for name, kind in SAMPLING_FIELDS.items()
        if name in row
    }
    if "suppress_tokens" in row:
        found["suppress_tokens"] = tuple(_numbers(row, "suppress_tokens"))
    if "logit_bias" in row:
        found["logit_bias"] = tuple(map(_pair, _field(row, "logit_bias", list)))
    if row.get("grammar") is not None:
        grammar = _field(row, "grammar", dict)
        kind, text = _field(grammar, "kind", str), _field(grammar, "text", str)
        marks = tuple(_numbers(grammar, "marks")) if "marks" in grammar else ()
        found["grammar"] = Grammar(kind=kind, text=text, ends=tuple(_numbers(grammar, "ends")), marks=marks)
    return checked(Sampling(**found))


def _pair(pair: Any) -> tuple[int, float]:
    if type(pair) is not list or len(pair) != 2:
        raise ValueError(f"logit_bias: expected pairs of a token id and a number, got {pair!r:.80}")
    return _field({"logit_bias": pair[0]}, "logit_bias", int), _real({"logit_bias": pair[1]}, "logit_bias")


def _field(row: Mapping[str, Any], name: str, kind: type[Kind]) -> Kind:
    value = row.get(name)
    if type(value) is not kind:  # True is no number here
        raise ValueError(f"{name}: expected {kind.__name__}, got {value!r:.80}")
    return value


def _text(row: Mapping[str, Any], name: str) -> str:
    value = _field(row, name, str)
    value.encode()  # half a surrogate pair could not be shown
    return value


def _real(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if type(value) is int else _field(row, name, float)


def _numbers(row: Mapping[str, Any], name: str) -> list[int]:
    values = _field(row, name, list)
    if not all(type(value) is int for value in values):
        raise ValueError(f"{name}: expected whole numbers, got {values!r:.80}")
    return values
