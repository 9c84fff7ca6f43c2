"""What a reply must be that calls tools by their schemas, or is a text of a format: a grammar of all that the
model writes, with its thoughts, in its own format. What it allows, the reader of the same form reads as calls
that the schemas allow, or as such a text.

- A mark that is a token of its own is possible where the grammar names it, and nowhere else; one that the
  vocabulary spells with other tokens is a text like any other. No free text has a mark in it as a text, since
  it would be read as one.
- Thoughts are free, up to their end.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from flowspec.errors import InputError
from flowspec.model.grammar import check_grammar, rule_of
from flowspec.model.reply.call_shape import Rules, arguments_of, check_sizes, json_arguments
from flowspec.model.reply.channels import CHANNEL, CONSTRAIN, END, FINAL, MESSAGE, START
from flowspec.model.reply.form import ReplyForm
from flowspec.model.reply.parts import Tool

_SPACE = r"/[ \n]{0,4}/"
"""Before thoughts (GLM), and between them and what follows, if that is no text."""
_NO_OBJECT = r"/[\s\x1c-\x1f]*([^\s\x1c-\x1f{](?s:.*))?/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which of the tools may be called, whether one has to be (else the reply may be a text), and whether
    only one call may be; `answer`: kind and text of a `Grammar` by which the text is bound, too."""

    tools: tuple[Tool, ...] = ()
    is_required: bool = False
    is_single: bool = False
    answer: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class BoundReply:
    """A `Grammar` of kind `reply`, but for what ends it."""

    text: str
    marks: tuple[int, ...]


def bound_reply(
    form: ReplyForm, wanted: Wanted, tokens: Mapping[str, int], template: str, *, may_think: bool
) -> BoundReply:
    """What binds a reply of this form. `tokens` are the special tokens by their names. `may_think`: it may
    begin with thoughts, if the model has any. Raises `InputError` for what cannot be obeyed."""
    check_sizes(wanted.tools)
    rules = Rules(tokens, form.marks)
    if form.is_in_channels:
        start = _in_channels(rules, form, wanted, tokens)
    else:
        known = {each for each in form.marks if each in tokens or each in template}
        is_free = not wanted.is_required and wanted.answer is None
        thoughts = _thoughts(rules, form, may_think=may_think, space="" if is_free else _SPACE)
        start = f"{thoughts} {_behind_thoughts(rules, form, wanted, known)}".strip()
    return BoundReply(rules.grammar(start), rules.marks)


def bound_text(form: ReplyForm, kind: str, text: str, tokens: Mapping[str, int]) -> BoundReply:
    """A reply of this form, without calls, of which the text is one that a grammar allows: in the final
    channel, or behind thoughts, if there are any. Raises `InputError` for what cannot be obeyed."""
    wanted = Wanted(answer=(kind, text))
    return bound_reply(replace(form, calls=None), wanted, tokens, "", may_think=True)


def may_think_first(form: ReplyForm, kind: str, text: str, *, may_think: bool) -> bool:
    """Whether a model may think before a text that this grammar allows: it can, the prompt has begun it or it
    `may_think`, and the text can be told from thoughts. True for what is in channels."""
    if form.is_in_channels:
        return True
    if form.thoughts is None or kind == "lark" or not (form.is_thinking or may_think):
        return False
    if kind != "regex":
        return True
    rules = Rules({}, ())
    try:
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
    return rules.text((), first=rf"{found} & ~/([\s\x1c-\x1f]|{begin})(?s:.*)/")


def _thoughts(rules: Rules, form: ReplyForm, *, may_think: bool, space: str) -> str:
    thoughts = form.thoughts
    if thoughts is None or not (form.is_thinking or may_think):
        return ""
    rest = f"{rules.text_up_to(thoughts.end, [thoughts.end])} {space}".rstrip()
    return rest if form.is_thinking else f"({rules.behind(_SPACE, thoughts.begin)} {rest})?"


def _behind_thoughts(rules: Rules, form: ReplyForm, wanted: Wanted, known: Collection[str]) -> str:
    if form.calls is None:
        assert wanted.answer is not None
        return _text_of(rules, form, *wanted.answer)
    shape, is_bare = form.calls.shape(known), form.calls.is_bare
    call, mark = shape.call(rules, wanted.tools), rules.spelled(shape.mark)
    between = rules.spelled(shape.between)
    if shape.is_each:
        block = call
        more = f"({between} {mark} {call})*"
    else:
        more = "" if wanted.is_single else f"({between} {call})*"
        block = f"{rules.spelled(*shape.opening)} {call} {more} {rules.spelled(shape.closing)}".strip()
        more = ""
    calls = f"{'' if is_bare else mark} {block} {'' if wanted.is_single else more}".strip()
    if wanted.is_required:
        return calls
    if wanted.answer is not None:
        if is_bare:
            raise InputError(
                "this model writes calls as JSON without a mark, as which an answer in JSON may begin"
            )
        return f"({calls} | {rules.rule(rule_of(*wanted.answer))})"
    without = [*form.calls.marks, *(() if form.thoughts is None else (form.thoughts.begin,))]
    first = _NO_OBJECT if is_bare else ""
    head, text = rules.text_up_to(shape.mark, without, first=first), rules.text(without, first=first)
    if is_bare:
        return f"({_SPACE} {block} | {head} {block} | {text})"
    if wanted.is_single or shape.is_last:
        return f"({head} {block} | {text})"
    return f"({head} {block})* {text}"


# ----------------------------------------------------------------------------------------------- channels


def _in_channels(rules: Rules, form: ReplyForm, wanted: Wanted, tokens: Collection[str]) -> str:
    """Messages that are thoughts, and last a call or the text; where one has to be called no other text may
    come first."""
    begun, ended = rules.spelled(f"{END}{START}assistant"), rules.text(())

    def message(header: str, body: str) -> str:
        return f"{rules.spelled(CHANNEL + header + MESSAGE)} {body}"

    thought = f"{message('analysis', ended)} {begun}"
    if not wanted.is_required and wanted.answer is None:
        thought = f"{thought} | {message('commentary', ended)} {begun}"
    last = []
    if wanted.tools:
        last.append(_channel_calls(rules, wanted.tools, tokens))
    if not wanted.is_required:
        last.append(message(FINAL, ended if wanted.answer is None else rules.rule(rule_of(*wanted.answer))))
    return f"({thought})* ({' | '.join(last)})"


def _channel_calls(rules: Rules, tools: Sequence[Tool], tokens: Collection[str]) -> str:
    form = f"{CONSTRAIN}json" if CONSTRAIN in tokens else "json"
    found = []
    for tool in tools:
        begin = rules.spelled(f"{CHANNEL}commentary to=functions.{tool.name} {form}{MESSAGE}")
        found.append(f"{begin} {arguments_of(rules, tool, json_arguments)}")
    return rules.one_of(found)
