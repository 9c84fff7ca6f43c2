"""In which form a model replies: where it thinks, and how it writes calls of tools.

What a model does is recognised by its chat template and its special tokens, never by its name; the formats
are those of the families' publishers. This table is the only place that knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from flowspec.model.reply.calls import read_named, read_objects, read_xml
from flowspec.model.reply.parts import (
    CHANNEL,
    CONSTRAIN,
    MESSAGE,
    ChannelReader,
    Incoming,
    Kind,
    Part,
    Reading,
    Tool,
    Tools,
)
from flowspec.model.reply.parts import MARKS as CHANNEL_MARKS

Piece = str | tuple[str, ...]
"""A text; or what may be left out: a text, and behind it what regular expressions match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How calls are written: the first of the `marks`, `opening`, calls with `between` between them, and
    `closing`; a call is `begin`, in which `{name}` is the tool's, its arguments, and `end`.

    `marks` begin a call; `read` reads on behind one. `others`: texts within calls that may be special tokens.
    `is_bare`: a call may also stand alone, where the reply begins. `is_last`: nothing may follow, for it
    might be read as one more call. `id_chars`: of a call's id, which the template checks; 0: any.
    """

    marks: tuple[str, ...]
    others: tuple[str, ...] = ()
    read: Callable[[Incoming, str, Tools], Reading] = read_objects
    is_bare: bool = False
    opening: tuple[Piece, ...] = ()
    begin: tuple[Piece, ...] = ('{"name": "{name}", "arguments": ',)
    has_xml_arguments: bool = False
    end: str = "}"
    between: str = ", "
    closing: str = ""
    is_last: bool = False
    id_chars: int = 0


CHANNELS = CallFormat(  # GPT-OSS, whose replies `parts.py` reads
    marks=(*CHANNEL_MARKS, CONSTRAIN),
    begin=(f"{CHANNEL}commentary to=functions.{{name}} {CONSTRAIN}json{MESSAGE}",),
    end="",
)
XML = CallFormat(  # Qwen3-Coder, Qwen3.5
    marks=("<tool_call>", "<function="),
    others=("</tool_call>",),
    read=read_xml,
    begin=("\n<function={name}>\n",),
    has_xml_arguments=True,
    end="</function>\n</tool_call>",
    between="\n<tool_call>",
)
JSON_LIST = CallFormat(  # Granite 3, whose list ends with the reply
    marks=("<|tool_call|>", "<tool_call>"),
    others=("<|/tool_call|>",),
    read=partial(read_objects, end="<|/tool_call|>"),
    opening=("[",),
    closing="]",
    is_last=True,
)
CLOSED_JSON_LIST = replace(JSON_LIST, closing="]<|/tool_call|>", is_last=False)  # Phi-4-mini
MISTRAL = CallFormat(  # of tokenizer versions above 7; up to it are lists, and the next ones have ids
    marks=("[TOOL_CALLS]",),
    others=("[ARGS]", "[CALL_ID]"),
    read=read_named,
    begin=("{name}", "[ARGS]"),
    end="",
    between="[TOOL_CALLS]",
    id_chars=9,
)
MISTRAL_LIST = replace(
    MISTRAL,
    opening=((" ",), "["),
    begin=JSON_LIST.begin,
    end="}",
    between=", ",
    closing="]",
    is_last=True,
)
MISTRAL_WITH_IDS = replace(MISTRAL, begin=("{name}", ("[CALL_ID]", "/[a-zA-Z0-9]{9}/"), "[ARGS]"))
HERMES = CallFormat(  # Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4
    marks=("<tool_call>",),
    others=("</tool_call>",),
    read=partial(read_objects, end="</tool_call>"),
    begin=('\n{"name": "{name}", "arguments": ',),
    end="}\n</tool_call>",
    between="\n<tool_call>",
)
BARE_JSON = CallFormat(  # Llama 3.1, 3.2 and 3.3
    marks=("<|python_tag|>",),
    is_bare=True,
    begin=('{"name": "{name}", "parameters": ',),
    between="; ",
    is_last=True,
)


class Thoughts(NamedTuple):
    """The texts around thoughts, which only begin a reply."""

    begin: str
    end: str


THOUGHTS = (
    Thoughts("<|channel>thought", "<channel|>"),  # Gemma 4
    Thoughts("[THINK]", "[/THINK]"),  # Mistral
    Thoughts("<think>", "</think>"),  # Qwen3, SmolLM3, GLM, and others
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyForm:
    """How the parts of one reply are told apart.

    `thoughts`: what stands around thoughts; `is_thinking`: the prompt ends within one. `calls`: the format of
    calls, where tools may be called, which are `tools`; `is_single`: the reply ends with the first call.
    `is_either`: a reply that does not begin with a call has none. `is_bound`: what begins as a call is one,
    or the reply ends within it. `is_in_channels`: the model writes messages in channels.
    """

    thoughts: Thoughts | None = None
    is_thinking: bool = False
    calls: CallFormat | None = None
    tools: Tools = field(default_factory=dict)
    is_single: bool = False
    is_either: bool = False
    is_bound: bool = False
    is_in_channels: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that have to be seen, also where they are special tokens."""
        if self.is_in_channels:
            return CHANNELS.marks
        found: tuple[str, ...] = ()
        if self.thoughts is not None:  # of Gemma's beginning only a part is a token
            found = (self.thoughts.begin.removesuffix("thought"), self.thoughts.end)
        return found if self.calls is None else (*found, *self.calls.marks, *self.calls.others)

    def reader(self) -> TagReader | ChannelReader:
        if self.is_in_channels:
            return ChannelReader(has_calls=self.calls is not None)
        return TagReader(self)


class TagReader(Incoming):
    """Tells thoughts, text and calls between tags apart, however the text is cut. The space around thoughts
    and behind calls is none of the text. No part of a mark is handed on before it is known to be none."""

    def __init__(self, form: ReplyForm) -> None:
        super().__init__()
        self._form = form
        self._reading = self._read()
        self.is_thinking = form.thoughts is not None and form.is_thinking
        """Whether what comes next is a thought, as far as is known."""

    def push(self, text: str, *, is_mark: bool = False) -> list[Part]:
        """Takes more text, or the name of a special token, which is a mark; returns what is known now."""
        self.text += text
        next(self._reading, None)
        found, self.parts = self.parts, []
        return found

    def finish(self) -> list[Part]:
        """At the reply's end: what was held back."""
        self.is_over = True
        return self.push("")

    def _read(self) -> Iterator[None]:
        form, calls, thoughts = self._form, self._form.calls, self._form.thoughts
        marks = () if calls is None else calls.marks
        bare = ("{",) if calls is not None and calls.is_bare else ()
        begin, is_behind = "", self.is_thinking
        if not self.is_thinking:
            begin = yield from self._beginning(bare if thoughts is None else (thoughts.begin, *bare))
        if thoughts is not None and (self.is_thinking or begin == thoughts.begin):
            self.text = self.text.lstrip()[len(begin) :]
            self.is_thinking = is_behind = True
            yield from self._hand_on("thought", (thoughts.end,), is_behind=True)
            self.is_thinking = False
            begin = yield from self._beginning(bare)
        mark, is_call = "", begin in bare
        while True:
            if not is_call:
                if form.is_either and not (yield from self._beginning(marks)):
                    marks = ()
                mark = yield from self._hand_on("content", marks, is_behind=is_behind)
            if calls is None or not (mark or is_call):
                return
            no_call = yield from calls.read(self, mark, form.tools)
            if not (form.is_bound and self.is_over):
                self.say("content", no_call)
            is_call, is_behind = False, not no_call

    def _beginning(self, texts: Sequence[str]) -> Reading:
        """With which of these texts the reply goes on, but for space; empty: with none."""
        while True:
            text = self.text.lstrip()
            found = next((each for each in texts if text.startswith(each)), "")
            if found or not any(each.startswith(text) for each in texts):
                return found
            if self.is_over:
                if self._form.is_bound:  # it would have gone on with it
                    self.text = self.text.removesuffix(text)
                return ""
            yield

    def _hand_on(self, kind: Kind, marks: Sequence[str], *, is_behind: bool) -> Reading:
        """Hands text on up to one of the marks, which is returned; empty: the reply has none. Text that
        `is_behind` thoughts or a call has no space before it."""
        while True:
            if is_behind:
                self.text = self.text.lstrip()
            places = [(at, mark) for mark in marks if (at := self.text.find(mark)) >= 0]
            at, mark = min(places, default=(len(self.text) - unfinished(self.text, marks), ""))
            if self.is_over and not mark and not (kind == "content" and self._form.is_bound):
                at = len(self.text)
            text = self.text[:at]
            if kind == "thought":
                text = text.rstrip()
            self.say(kind, text)
            self.take(at + len(mark) if mark else len(text))
            is_behind = is_behind and not text
            if mark or self.is_over:
                return mark
            yield


def unfinished(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    sizes = range(min(len(text), max(map(len, marks), default=0)), 0, -1)
    return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def is_in_channels(vocabulary: Collection[str]) -> bool:
    """Whether a model with these special tokens writes messages in channels."""
    return all(mark in vocabulary for mark in CHANNEL_MARKS)


def format_of(template: str, vocabulary: Collection[str]) -> CallFormat | None:
    """How a model with this chat template and these special tokens writes calls; None: that is not known."""
    known = "\n".join((template, *vocabulary))
    if is_in_channels(vocabulary):
        return CHANNELS
    if "<arg_key>" in template:  # GLM-4.5 and later, whose calls stand between Hermes's marks and are no JSON
        return None
    if "<function=" in template:
        return XML
    if "<|tool_call|>" in template:
        return CLOSED_JSON_LIST if "<|/tool_call|>" in known else JSON_LIST
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" not in known:
            return MISTRAL_LIST
        return MISTRAL_WITH_IDS if "[CALL_ID]" in known else MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in known or '"parameters": dictionary of argument name' in template:
        return BARE_JSON
    return None


def thoughts_of(template: str) -> Thoughts | None:
    """What stands around the thoughts of a model with this chat template; None for one that has none."""
    return next((found for found in THOUGHTS if found.begin in template or found.end in template), None)


def form_of(
    template: str, vocabulary: Collection[str], prompt: str, tools: Sequence[Tool], *, is_single: bool = False
) -> ReplyForm | None:
    """The form of the reply to a prompt (as text); None for text alone. That of tools must be known."""
    has_channels = is_in_channels(vocabulary)
    thoughts = None if has_channels else thoughts_of(template)
    if not (tools or thoughts or has_channels):
        return None
    return ReplyForm(
        thoughts=thoughts,
        is_thinking=thoughts is not None and prompt.rstrip().endswith(thoughts.begin),
        calls=format_of(template, vocabulary) if tools else None,
        tools={tool.name: tool for tool in tools},
        is_single=is_single,
        is_in_channels=has_channels,
    )
