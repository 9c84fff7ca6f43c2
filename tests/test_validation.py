"""Types of what comes from outside: what fits, and the line that says what does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Struct

from flowspec.validation import Document, Misfit, checked, decode_json, expect, fit

Count = Annotated[int, Meta(ge=1, le=10)]


class Part(Document, frozen=True, kw_only=True):
    name: Annotated[str, Meta(max_length=3)]
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        expect(self.name != "bad", "name", self.name, "another name")


class Row(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    count: Count
    kind: Literal["a", "b"] = "a"


class Dog(Document, frozen=True, kw_only=True, tag_field="type", tag="dog"):
    age: int


class Cat(Document, frozen=True, kw_only=True, tag_field="type", tag="cat"):
    lives: Count


class Box(Document, frozen=True, kw_only=True):
    size: int
    kind: Literal["box"]
    name: Literal["b"] = "b"

    def __post_init__(self) -> None:
        expect(self.size != 5, "size", self.size, "another size", "odd")


class Whole(Document, frozen=True, kw_only=True):
    parts: Annotated[tuple[Part, ...], Meta(max_length=2)] = ()
    rows: tuple[Row, ...] = ()
    limit: Annotated[float, Meta(ge=0, le=5, description="0 to 5 seconds")] | None = None
    pets: tuple[Dog | Cat, ...] = ()
    boxes: tuple[Box, ...] = ()
    pet: Literal["none"] | Dog | Cat = "none"
    names: Annotated[list[str], Meta(min_length=1, max_length=2)] | None = None
    either: Annotated[int | list[int], Meta(description="a number, or some")] | None = None
    text: str | list[Part] = ""
    pair: tuple[int, float] = (0, 0.0)
    by_name: Mapping[str, Count] = msgspec.field(default_factory=dict)
    flag: bool = False
    loss: Annotated[float, Meta(ge=-1.0, lt=0.5)] = 0
    notes: Annotated[dict[str, str], Meta(max_length=1)] | None = None


WRONG: list[tuple[Any, str]] = [
    ({"parts": 1}, "parts: expected a list of at most 2 entries, got 1"),
    ({"parts": [{"name": "a"}] * 3}, "parts: expected a list of at most 2 entries, got 3 entries"),
    ({"parts": [{}]}, "parts[0].name: expected a string of at most 3 characters, got nothing"),
    ({"parts": [{"name": "long"}]}, "parts[0].name: expected a string of at most 3 characters, got 'long'"),
    ({"parts": [{"name": "bad"}]}, "parts[0].name: expected another name, got 'bad'"),
    ({"parts": [{"nmae": "a"}]}, "parts[0]: unknown key 'nmae'; expected name, share; did you mean name?"),
    (
        {"parts": [{"name": "a", "share": 0}]},
        "parts[0].share: expected a number above 0 and at most 1, got 0",
    ),
    ({"parts": [{"name": "a"}, None]}, "parts[1]: expected an object, got None"),
    ({"rows": [[1], [11]]}, "rows[1].count: expected a whole number from 1 to 10, got 11"),
    ({"rows": [[True]]}, "rows[0].count: expected a whole number from 1 to 10, got True"),
    ({"rows": [[1, "c"]]}, "rows[0].kind: expected one of a, b, got 'c'"),
    ({"rows": [[1, "b", 3]]}, "rows[0]: expected 2 entries, got 3 entries"),
    ({"rows": [{}]}, "rows[0]: expected Row, got {}"),
    ({"limit": 6}, "limit: expected 0 to 5 seconds, got 6"),
    ({"limit": float("nan")}, "limit: expected 0 to 5 seconds, got nan"),
    ({"limit": 10**400}, "limit: expected 0 to 5 seconds, got 1000"),
    ({"limit": 10**5000}, "limit: expected 0 to 5 seconds, got a int"),
    ({"pets": [{"type": "cat", "lives": 0}]}, "pets[0].lives: expected a whole number from 1 to 10, got 0"),
    ({"pets": [{"type": "bird", "lives": 0}]}, "pets[0].type: expected one of dog, cat, got 'bird'"),
    ({"pets": [{"lives": 1}]}, "pets[0].type: expected one of dog, cat, got nothing"),
    ({"pet": {"type": "dog"}}, "pet.age: expected a whole number, got nothing"),
    ({"names": []}, "names: expected a list of 1 to 2 entries, got []"),
    ({"loss": 1}, "loss: expected a number from -1 and below 0.5, got 1"),
    ({"notes": {"a": "", "b": ""}}, "notes: expected an object of at most 1 fields, got {'a': '', 'b': ''}"),
    ({"boxes": [{"kind": "bag", "liters": 5}]}, "boxes[0].kind: expected box, got 'bag'"),
    ({"boxes": [{"kind": "box", "liters": 5}]}, "boxes[0]: unknown key 'liters'; expected kind, name, size"),
    ({"either": "x"}, "either: expected a number, or some, got 'x'"),
    ({"either": ["x"]}, "either[0]: expected a whole number, got 'x'"),
    ({"text": [{"name": 1}]}, "text[0].name: expected a string of at most 3 characters, got 1"),
    ({"text": 1}, "text: expected a string or a list, got 1"),
    ({"pair": [1, "x"]}, "pair[1]: expected a number, got 'x'"),
    ({"pair": [1]}, "pair: expected a list of 2 entries, got [1]"),
    ({"by_name": {"a": 1, "b": 0}}, "by_name.b: expected a whole number from 1 to 10, got 0"),
    ({"by_name": {"a\nb" * 50: 0}}, "by_name.'a\\nba\\nb"),
    ({"flag": 1}, "flag: expected true or false, got 1"),
    ([], "expected an object, got []"),
]


@pytest.mark.parametrize(("data", "line"), WRONG, ids=[line[:40] for _, line in WRONG])
def test_what_does_not_fit_is_told_in_one_line(data: Any, line: str) -> None:
    with pytest.raises(Misfit) as caught:
        fit(data, Whole)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ({"flag": 1}, "type"),
        ({"parts": 1}, "type"),
        ({"parts": [1]}, "type"),
        ({"parts": [{"name": "a"}] * 3}, "value"),
        ({"parts": [{"name": "bad"}]}, "value"),
        ({"rows": [[1, "c"]]}, "value"),
        ({"rows": [[1, 5]]}, "type"),
        ({"rows": [[11]]}, "value"),
        ({"pet": "some"}, "value"),
        ({"pet": 1}, "type"),
        ({"boxes": [{"kind": "box", "size": 5}]}, "odd"),
    ],
)
def test_another_type_is_told_from_another_value(data: Any, kind: str) -> None:
    with pytest.raises(Misfit) as caught:
        fit(data, Whole)
    assert caught.value.kind == kind


@pytest.mark.parametrize("place", [0, 1, 99, 256, 999])
def test_the_first_that_does_not_fit_is_found_in_a_long_list(place: int) -> None:
    pets = [{"type": "dog", "age": each} for each in range(1000)]
    numbers = {f"a{each}": 1 for each in range(1000)}
    wrong = {"type": "dog", "age": "x"}
    with pytest.raises(Misfit) as caught:
        fit({"pets": [*pets[:place], *[wrong] * (1000 - place)]}, Whole)
    assert caught.value.path == ("pets", place, "age")
    with pytest.raises(Misfit) as caught:
        fit({"by_name": numbers | {f"a{place}": 0, "a999": -1}}, Whole)
    assert caught.value.path == ("by_name", f"a{place}")


def test_what_fits_is_taken() -> None:
    whole = fit({"parts": [{"name": "a"}], "rows": [[3]], "limit": 2, "pair": [1, 2]}, Whole)
    assert (whole.parts[0].share, whole.rows, whole.limit) == (1.0, (Row(3, "a"),), 2.0)


def test_a_place_is_counted_as_people_count() -> None:
    with pytest.raises(Misfit) as caught:
        fit({"parts": [{"name": "a"}, {"name": "a", "share": 2}]}, Whole)
    assert caught.value.place == "parts 2: share"
    assert caught.value.path == ("parts", 1, "share")


def test_json_is_fitted_and_what_is_no_json_told_apart() -> None:
    assert decode_json(b'{"flag": true}', Whole).flag
    with pytest.raises(Misfit, match="flag: expected true or false, got 0"):
        decode_json(b'{"flag": 0}', Whole)
    for text, why in (
        (b'{"limit": NaN}', "NaN is no JSON"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"limit": 1e999}', "a number that floats cannot hold"),
        (b'{"limit": "a", "text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"limit": ', "Expecting value: line 1 column 11"),
        (b"\xff", "can't decode byte 0xff"),
    ):
        with pytest.raises(msgspec.DecodeError, match=why):
            decode_json(text, Whole)
    with pytest.raises((RecursionError, Misfit)):
        decode_json(b'{"parts":' + b"[" * 100_000, Whole)


def test_what_the_program_builds_is_checked_on_demand() -> None:
    assert checked(Part(name="a")) == Part(name="a")
    with pytest.raises(Misfit, match="name: expected another name, got 'bad'"):
        Part(name="bad")  # a rule holds at once, a bound when it is asked
    with pytest.raises(Misfit, match="share: expected a number above 0"):
        checked(Part(name="a", share=2.0))
    with pytest.raises(Misfit, match="name: expected a string"):
        checked(Part(name=7))  # type: ignore[arg-type]
