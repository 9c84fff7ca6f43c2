"""What a reply must be that calls tools by their schemas, or is a text of a format: a grammar of all that the
model writes, with free thoughts, in its own format. What it allows, the reader of the same form reads as
calls that the schemas allow, or as such a text.

A mark that is a token of its own is possible where the grammar names it, and nowhere else; one that the
vocabulary spells with other tokens is a text like any other. No free text has one, which would be read as it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flowspec.errors import InputError
from flowspec.model.grammar import check_grammar, rule_of
from flowspec.model.reply.arguments import arguments_of
from flowspec.model.reply.channels import CHANNEL, END, MESSAGE, START
from flowspec.model.reply.form import CHANNELS, CallFormat, ReplyForm
from flowspec.model.reply.parts import Tool
from flowspec.model.reply.rules import Rules, sequence

_SPACE = r"/[ \n]{0,4}/"  # before thoughts (GLM), and between them and what follows, if that is no text
_NO_OBJECT = r"/[\s\x1c-\x1f]*([^\s\x1c-\x1f{](?s:.*))?/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which of the tools may be called, whether one has to be (else the reply may be a text), and whether
    only one call may be; `answer`: kind and text of a `Grammar` by which the text is bound, too."""

    tools: tuple[Tool, ...] = ()
    is_required: bool = False
    is_single: bool = False
    answer: tuple[str, str] | None = None

    @property
    def is_free(self) -> bool:
        """Whether the reply may be any text."""
        return not self.is_required and self.answer is None


class BoundReply(NamedTuple):
    """A `Grammar` of kind `reply`, but for what ends it."""

    text: str
    marks: tuple[int, ...]


def bound_reply(form: ReplyForm, wanted: Wanted, tokens: Mapping[str, int], *, may_think: bool) -> BoundReply:
    """What binds a reply of this form. `tokens` are the special tokens by their names. `may_think`: it may
    begin with thoughts, if the model has any. Raises `InputError` for what cannot be obeyed."""
    rules = Rules(tokens, form.marks)
    if form.is_in_channels:
        start = _in_channels(rules, wanted)
    else:
        thoughts = _thoughts(rules, form, wanted, may_think=may_think)
        start = sequence(thoughts, _behind_thoughts(rules, form, wanted))
    return BoundReply(rules.grammar(start), tuple(rules.marks))


def may_think_first(form: ReplyForm, kind: str, text: str, *, may_think: bool) -> bool:
    """Whether a model may think before a text that this grammar allows: it can, the prompt has begun it or it
    `may_think`, and the text can be told from thoughts. True for what is in channels."""
    if form.is_in_channels:
        return True
    if form.thoughts is None or kind == "lark" or not (form.is_thinking or may_think):
        return False
    rules = Rules({}, ())
    try:
        if kind == "regex":
            check_grammar(kind, text)
            check_grammar("reply", rules.grammar(_text_of(rules, form, kind, text)))
    except InputError:
        return False
    return True


def _text_of(rules: Rules, form: ReplyForm, kind: str, text: str) -> str:
    """A text of a grammar. Where thoughts may stand before it, it begins neither as they do nor with the
    space behind them, which readers leave out; a document never does."""
    found = rule_of(kind, text)
    if kind != "regex" or form.thoughts is None:
        return rules.rule(found)
    begin = re.escape(form.thoughts.begin)
    return rules.text(first=rf"{found} & ~/([\s\x1c-\x1f]|{begin})(?s:.*)/")


def _thoughts(rules: Rules, form: ReplyForm, wanted: Wanted, *, may_think: bool) -> str:
    thoughts = form.thoughts
    if thoughts is None or not (form.is_thinking or may_think):
        return ""
    space = "" if wanted.is_free else _SPACE
    rest = sequence(rules.behind(rules.text([thoughts.end]), thoughts.end), space)
    return rest if form.is_thinking else f"({rules.behind(_SPACE, thoughts.begin)} {rest})?"


def _behind_thoughts(rules: Rules, form: ReplyForm, wanted: Wanted) -> str:
    calls = form.calls
    if calls is None:
        assert wanted.answer is not None
        return _text_of(rules, form, *wanted.answer)
    call, mark = _call(rules, calls, wanted.tools), calls.marks[0]
    is_one = wanted.is_single or (wanted.is_free and mark in calls.between)  # more have marks of their own
    more = "" if is_one else f"({rules.spelled(calls.between)} {call})*"
    block = sequence(rules.spelled(*calls.opening), call, more, rules.spelled(calls.closing))
    if not wanted.is_free:
        block = sequence("" if calls.is_bare else rules.spelled(mark), block)
        if wanted.is_required or wanted.answer is None:
            return block
        if calls.is_bare:
            raise InputError(
                "this model writes calls as JSON without a mark, as which an answer in JSON may begin"
            )
        return f"({block} | {rules.rule(rule_of(*wanted.answer))})"
    without = [*calls.marks, *(() if form.thoughts is None else (form.thoughts.begin,))]
    first = _NO_OBJECT if calls.is_bare else ""
    text = rules.text(without, first=first)
    head = rules.behind(text, mark)
    if calls.is_bare:
        return f"({_SPACE} {block} | {head} {block} | {text})"
    if wanted.is_single or calls.is_last:
        return f"({head} {block} | {text})"
    return f"({head} {block})* {text}"


def _call(rules: Rules, calls: CallFormat, tools: Sequence[Tool]) -> str:
    """A call of one of these, without the mark before it."""
    ways = []
    for name, arguments in arguments_of(rules, tools, calls.arguments).items():
        begin = [each.replace("{name}", name) if isinstance(each, str) else each for each in calls.begin]
        ways.append(sequence(rules.spelled(*begin), arguments, rules.spelled(calls.end)))
    return rules.rule(*ways)


def _in_channels(rules: Rules, wanted: Wanted) -> str:
    """Messages that are thoughts, and last a call or the text; no text is first where one must be called."""
    text = rules.text()

    def message(channel: str, body: str) -> str:
        return sequence(rules.spelled(f"{CHANNEL}{channel}{MESSAGE}"), body)

    before = [message("analysis", text), *([message("commentary", text)] if wanted.is_free else [])]
    last = [_call(rules, CHANNELS, wanted.tools)] if wanted.tools else []
    if not wanted.is_required:
        last.append(message("final", text if wanted.answer is None else rules.rule(rule_of(*wanted.answer))))
    begun = rules.spelled(f"{END}{START}assistant")
    return f"(({' | '.join(before)}) {begun})* ({' | '.join(last)})"
