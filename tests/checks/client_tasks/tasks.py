"""What all clients are asked, and how it is looked at."""

from __future__ import annotations

import json
from typing import Any

KEY = "none"
SUM = "What is 17 + 25?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 999} for name in ("first", "result")},
    "required": ["first", "result"],
    "additionalProperties": False,
}
WEATHER = "What is the weather in Paris?"
FOUND = "It rains."
"""What the tool says; the model then says `ANSWER`."""
ANSWER = "It rains in Paris."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
DESCRIPTION = "The weather of a city"


def check_sum(text: str | None) -> str:
    """The bundled model can add."""
    assert text is not None
    assert "42" in text, text
    return text


def check_form(found: Any) -> str:
    """An object that the schema allows; what is in it the bundled model does not know."""
    assert set(found) == {"first", "result"}, found
    assert all(type(each) is int and 0 <= each <= 999 for each in found.values()), found
    return json.dumps(found)


def check_weather(text: str | None, cities: list[str]) -> str:
    """The tool was asked about this city, once, and the answer is what was said of it."""
    assert cities == ["Paris"], cities
    assert text == ANSWER, text
    return text
