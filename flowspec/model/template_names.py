"""What a chat template looks at: a name that it does not have would be ignored without a word."""

from __future__ import annotations

from dataclasses import dataclass

import jinja2

from flowspec.errors import InputError, first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateNames:
    """`variables` are the names that stand for themselves, `fields` those behind a dot, and texts in quotes,
    by which fields are asked for, too."""

    variables: frozenset[str]
    fields: frozenset[str]


def names_in(template: str) -> TemplateNames:
    """The names in a template. It is cut into words and not understood, so tags that transformers adds to
    Jinja do no harm. Raises `InputError` for what is no template."""
    variables: set[str] = set()
    fields: set[str] = set()
    is_field = False
    try:
        for _, kind, word in jinja2.Environment(autoescape=False).lex(template):
            if kind == "name":
                (fields if is_field else variables).add(word)
            elif kind == "string":
                fields.add(word[1:-1])
            if kind != "whitespace":
                is_field = kind == "operator" and word == "."
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the model's chat template cannot be read: {first_line(error)}") from None
    return TemplateNames(variables=frozenset(variables), fields=frozenset(fields))
