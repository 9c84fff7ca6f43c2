"""In which form a model replies: where it thinks, and how it writes calls of tools.

What a model does is recognised by its chat template and its special tokens, never by its name; the formats
are those of the families' publishers. This table is the only place that knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from flowspec.model.reply.call_shape import CallShape, Maybe, xml_arguments
from flowspec.model.reply.channels import CONSTRAIN, ChannelReader
from flowspec.model.reply.channels import MARKS as CHANNEL_MARKS
from flowspec.model.reply.json_calls import JsonCalls, NamedCalls
from flowspec.model.reply.parts import CallReader, Part, PartReader, Tool, new_call_id, unfinished
from flowspec.model.reply.xml_calls import XmlCalls

Tools = Mapping[str, Tool]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How calls are written.

    `signs`: a template that has one of these texts, or a vocabulary that has one of the `tokens`, is of this
    format. `marks` begin a call; `read` makes what reads on behind one. `is_bare`: a call may also stand
    alone, at the beginning of the reply. `others`: texts within calls that may be special tokens. `shape`:
    how a grammar has them, by which of the marks and others the template or the vocabulary has. `id_chars`: a
    call's id has so many letters and digits, which the template checks; 0: any.
    """

    name: str
    signs: tuple[str, ...]
    tokens: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    read: Callable[[str, Tools], CallReader]
    is_bare: bool = False
    others: tuple[str, ...] = ()
    shape: Callable[[Collection[str]], CallShape]
    id_chars: int = 0

    def new_id(self) -> str:
        """An id for a call, as the model's template takes it back."""
        return new_call_id(self.id_chars)


def _objects(end: str) -> Callable[[str, Tools], CallReader]:
    return lambda mark, tools: JsonCalls(mark, end)


def _no_reader(mark: str, tools: Tools) -> CallReader:
    raise AssertionError("channels have a reader of their own")


def _no_shape(known: Collection[str]) -> CallShape:
    raise AssertionError("channels have a grammar of their own")


def _always(shape: CallShape) -> Callable[[Collection[str]], CallShape]:
    return lambda known: shape


def _json_list(known: Collection[str]) -> CallShape:
    """Granite's ends with the reply, Phi's with a mark."""
    end = "<|/tool_call|>"
    return CallShape(
        mark=next(each for each in ("<|tool_call|>", "<tool_call>") if each in known),
        opening=("[",),
        begin=('{"name": "{name}", "arguments": ',),
        end="}",
        between=", ",
        closing=f"]{end}" if end in known else "]",
        is_last=end not in known,
    )


def _mistral(known: Collection[str]) -> CallShape:
    """A list up to tokenizer version 7, then names with arguments, first with ids between them."""
    if "[ARGS]" not in known:
        return CallShape(
            mark="[TOOL_CALLS]",
            opening=(Maybe(" "), "["),
            begin=('{"name": "{name}", "arguments": ',),
            end="}",
            between=", ",
            closing="]",
            is_last=True,
        )
    with_id = (Maybe("[CALL_ID]", "[a-zA-Z0-9]{9}"),) if "[CALL_ID]" in known else ()
    return CallShape(
        mark="[TOOL_CALLS]",
        begin=("{name}", *with_id, "[ARGS]"),
        end="",
        is_each=True,
    )


CHANNELS = CallFormat(
    name="channels",
    signs=(),
    read=_no_reader,
    shape=_no_shape,
)
"""GPT-OSS; recognised by the marks of `model/reply/channels.py`."""
FORMATS = (
    CallFormat(  # Qwen3-Coder, Qwen3.5
        name="XML",
        signs=("<function=",),
        marks=("<tool_call>", "<function="),
        read=XmlCalls,
        others=("</tool_call>",),
        shape=_always(
            CallShape(
                mark="<tool_call>",
                begin=("\n<function={name}>\n",),
                arguments=xml_arguments,
                end="</function>\n</tool_call>",
                between="\n",
                is_each=True,
            )
        ),
    ),
    CallFormat(  # Granite 3, Phi-4-mini
        name="JSON list",
        signs=("<|tool_call|>",),
        marks=("<|tool_call|>", "<tool_call>"),
        read=_objects("<|/tool_call|>"),
        others=("<|/tool_call|>",),
        shape=_json_list,
    ),
    CallFormat(  # Mistral, since tokenizer version 3
        name="Mistral",
        signs=("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]",),
        read=lambda mark, tools: NamedCalls(mark),
        others=("[ARGS]", "[CALL_ID]"),
        id_chars=9,
        shape=_mistral,
    ),
    CallFormat(  # Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4
        name="Hermes",
        signs=("<tool_call>",),
        marks=("<tool_call>",),
        read=_objects("</tool_call>"),
        others=("</tool_call>",),
        shape=_always(
            CallShape(
                mark="<tool_call>",
                begin=('\n{"name": "{name}", "arguments": ',),
                end="}\n</tool_call>",
                between="\n",
                is_each=True,
            )
        ),
    ),
    CallFormat(  # Llama 3.1, 3.2 and 3.3
        name="bare JSON",
        signs=("<|python_tag|>", '"parameters": dictionary of argument name'),
        tokens=("<|python_tag|>",),
        marks=("<|python_tag|>",),
        read=lambda mark, tools: JsonCalls(mark, names=() if mark else tuple(tools)),
        is_bare=True,
        shape=_always(
            CallShape(
                mark="<|python_tag|>",
                begin=('{"name": "{name}", "parameters": ',),
                end="}",
                between="; ",
                is_last=True,
            )
        ),
    ),
)
"""In the order in which they are looked for: those with signs that no other has come first."""
_UNREAD = "<arg_key>"
"""In templates of GLM-4.5 and later, whose calls stand between Hermes's marks and are no JSON."""


@dataclass(frozen=True, slots=True)
class Thoughts:
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
            return (*CHANNEL_MARKS, CONSTRAIN)
        thoughts = () if self.thoughts is None else (_first_token(self.thoughts.begin), self.thoughts.end)
        return (*thoughts, *(() if self.calls is None else (*self.calls.marks, *self.calls.others)))

    def reader(self) -> PartReader:
        """What reads one reply."""
        if self.is_in_channels:
            return ChannelReader(has_calls=self.calls is not None)
        return TagReader(self)


class TagReader:
    """A `PartReader` of thoughts, text and calls between tags.

    The space around thoughts and behind calls is none of the text. No part of a mark is handed on before it
    is known to be none.
    """

    def __init__(self, form: ReplyForm) -> None:
        self._form = form
        self._marks = () if form.calls is None else form.calls.marks
        self._thoughts = form.thoughts
        """Those with which the reply may still begin."""
        self._text = ""
        self._call: CallReader | None = None
        self._is_stripped = False
        """The text's beginning is behind a thought or a call."""
        self.is_thinking = form.thoughts is not None and form.is_thinking
        self._has_begun = False
        self._state = self._thought if self.is_thinking else self._begin
        self._out: list[Part] = []

    def push(self, text: str, *, is_mark: bool = False) -> list[Part]:
        self._text += text
        while self._text and self._state():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Part]:
        if self._call is not None:
            found = self._call.finish()
            self._out += [part for part in found if part.kind != "content" or not self._form.is_bound]
        elif self.is_thinking:
            self._say("thought", self._text.rstrip())
        else:
            text = self._text.lstrip() if self._is_stripped else self._text
            self._say("content", text[: len(text) - self._begun_mark(text)])
        self._text, self._call = "", None
        out, self._out = self._out, []
        return out

    def _begun_mark(self, text: str) -> int:
        """How many characters at the end of a reply are the beginning of a mark, and no text: what is bound
        would have gone on with it."""
        if not self._form.is_bound:
            return 0
        thoughts = self._thoughts if self._state == self._begin else None
        return unfinished(text, (*self._marks, *(() if thoughts is None else (thoughts.begin,))))

    # Each state takes of the text what it can, and returns whether there is more to do.

    def _begin(self) -> bool:
        """At the reply's beginning, where it may think, and behind thoughts; at both places it may call a
        tool without a mark."""
        thoughts = self._thoughts
        text = self._text.lstrip()
        if not text and (thoughts is not None or self._is_bare):
            return False
        if thoughts is not None and text.startswith(thoughts.begin):
            self._text = text[len(thoughts.begin) :]
            self.is_thinking, self._state = True, self._thought
            return True
        if thoughts is not None and thoughts.begin.startswith(text):
            return False
        if self._is_bare and text.startswith("{"):
            return self._open("")
        self._state = self._content
        return True

    @property
    def _is_bare(self) -> bool:
        return self._form.calls is not None and self._form.calls.is_bare

    def _thought(self) -> bool:
        thoughts = self._form.thoughts
        assert thoughts is not None
        at = self._text.find(thoughts.end)
        if at >= 0:
            self._say("thought", self._text[:at].rstrip())
            self._text = self._text[at + len(thoughts.end) :]
            self.is_thinking, self._is_stripped, self._has_begun = False, True, False
            self._state, self._thoughts = self._begin, None
            return True
        keep = unfinished(self._text, (thoughts.end,))
        sure = len(self._text[: len(self._text) - keep].rstrip())
        self._say("thought", self._text[:sure])
        self._text = self._text[sure:]
        return False

    def _content(self) -> bool:
        if self._is_stripped:
            self._text = self._text.lstrip()
            if not self._text:
                return False
        if self._form.is_either and not any(
            self._text.startswith(mark) or mark.startswith(self._text) for mark in self._marks
        ):
            self._marks = ()
        places = [(at, mark) for mark in self._marks if (at := self._text.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            self._say("content", self._text[:at])
            self._text = self._text[at + len(mark) :]
            return self._open(mark)
        sure = len(self._text) - unfinished(self._text, self._marks)
        self._say("content", self._text[:sure])
        self._is_stripped &= not sure
        self._text = self._text[sure:]
        return False

    def _open(self, mark: str) -> bool:
        assert self._form.calls is not None
        self._call = self._form.calls.read(mark, self._form.tools)
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        assert self._call is not None
        text, self._text = self._text, ""
        parts, rest = self._call.push(text)
        self._out += parts
        if rest is None:
            return False
        self._call, self._text, self._state = None, rest, self._content
        is_call = not parts or parts[-1].kind != "content"
        self._is_stripped = is_call
        return True

    def _say(self, kind: str, text: str) -> None:
        if kind == "thought" and not self._has_begun:
            text = text.lstrip()
        if text:
            self._has_begun = True
            self._out.append(Part("thought" if kind == "thought" else "content", text))


def is_in_channels(vocabulary: Collection[str]) -> bool:
    """Whether a model with these special tokens writes messages in channels."""
    return all(mark in vocabulary for mark in CHANNEL_MARKS)


def format_of(template: str, vocabulary: Collection[str]) -> CallFormat | None:
    """How a model with this chat template and these special tokens writes calls; None: that is not known."""
    if is_in_channels(vocabulary):
        return CHANNELS
    if _UNREAD in template:
        return None
    for found in FORMATS:
        if any(sign in template for sign in found.signs) or any(each in vocabulary for each in found.tokens):
            return found
    return None


def thoughts_of(template: str) -> Thoughts | None:
    """What stands around the thoughts of a model with this chat template; None for one that has none."""
    return next((found for found in THOUGHTS if found.begin in template or found.end in template), None)


def form_of(
    template: str,
    vocabulary: Collection[str],
    prompt: str,
    tools: Tools,
    *,
    is_single: bool = False,
) -> ReplyForm | None:
    """The form of the reply to a prompt (as text); None where it is text and nothing else.

    With tools, `template` must be of a known format.
    """
    has_channels = is_in_channels(vocabulary)
    thoughts = None if has_channels else thoughts_of(template)
    if not tools and thoughts is None and not has_channels:
        return None
    return ReplyForm(
        thoughts=thoughts,
        is_thinking=thoughts is not None and prompt.rstrip().endswith(thoughts.begin),
        calls=format_of(template, vocabulary) if tools else None,
        tools=tools,
        is_single=is_single,
        is_in_channels=has_channels,
    )


def _first_token(text: str) -> str:
    """Of a mark that goes on behind a special token, that."""
    return text[: text.index(">") + 1] if text.startswith("<|") else text
