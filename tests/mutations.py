"""Valid files made wrong by field, for property tests: entries changed, left out, doubled, renamed, nested or
taken from elsewhere.

What `lab/fuzz/mutate.py` does to frames, for what JSON and TOML hold; Hypothesis draws, and so
shrinks, the mutations.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from flowspec.errors import InputError

DEPTHS = (1, 1, 1, 150)
"""Lists around a value: also more than any reader takes."""
HUGE = int("9" * 4299)
"""As many digits as Python turns into a number."""
ODD = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**53, 2**63, 2**64, 10**30, HUGE),
    *(0.0, 0.5, -1.0, 1e-308, 1e308, math.inf, -math.inf, math.nan),
    *(
        "",
        "x",
        "1",
        "\x00",
        "two\nlines",
        "\x1b[2J",
        "\u202e",
        "\ud800",
        "\U0001f600",
        "../x",
        "{{ x }}",
        "x" * 5000,
    ),
    *([], [[]], [None], [0, 0], {}, {"a": 1}, {"": {}}),
)
REFUSAL_CHARS_MAX = 12_000
Entry = tuple[Any, Any]
"""A list or an object, and the index or key of one of its entries."""


@contextlib.contextmanager
def one_line_at_most() -> Iterator[None]:
    """What is done within may be refused by one line, and by nothing else."""
    said = ""
    try:
        yield
    except InputError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
    assert len(said) < REFUSAL_CHARS_MAX


def entries(value: Any) -> list[Entry]:
    """All entries of a value, and those within them."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [entry for key in keys for entry in ((value, key), *entries(value[key]))]


@st.composite
def mutants(draw: st.DrawFn, value: Any, most: int = 3) -> Any:
    """`value` with one to `most` of its entries wrong."""
    root = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        found = entries(root)
        if not found:
            break
        owner, key = draw(st.sampled_from(found))
        other, place = draw(st.sampled_from(found))
        way = draw(st.sampled_from(["odd", "odd", "near", "remove", "double", "take", "nest", "rename"]))
        if way == "odd":
            owner[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
        elif way == "near" and type(owner[key]) in (int, float):
            owner[key] += draw(st.sampled_from([-1, 1, 7, -256, 1 << 20]))
        elif way == "near" and isinstance(owner[key], str):
            at = draw(st.integers(0, len(owner[key])))
            owner[key] = owner[key][:at] + draw(st.characters()) + owner[key][at + draw(st.integers(0, 1)) :]
        elif way == "remove":
            del owner[key]
        elif way == "double" and isinstance(owner, list):
            owner.insert(key, copy.deepcopy(owner[key]))
        elif way == "rename" and isinstance(owner, dict):
            owner[draw(st.sampled_from([str(place), "", "x", "\x00"]))] = owner.pop(key)
        elif way == "nest":
            for _ in range(draw(st.sampled_from(DEPTHS))):
                owner[key] = [owner[key]]
        else:
            owner[key] = copy.deepcopy(other[place])
    return root


def toml(value: Any) -> str:
    """A value in TOML; JSON's way to write texts is TOML's as well."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(bool(value)).lower()
    return (
        json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        if isinstance(value, str)
        else str(value)
    )


def toml_file(tables: dict[str, Any]) -> bytes:
    """A whole file, a line for each of its keys."""
    return "".join(f"{toml(key)} = {toml(item)}\n" for key, item in tables.items()).encode(
        "utf-8", "surrogatepass"
    )
