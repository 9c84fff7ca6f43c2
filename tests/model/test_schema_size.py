"""What schemas come to, against what can be counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from flowspec.errors import InputError
from flowspec.model.schema_size import SIZE_MAX, check_size, size_of

ITEMS = {"type": "array", "items": {"type": "integer"}, "maxItems": 100}


@pytest.mark.parametrize(
    ("schema", "size"),
    [
        ({}, 1),
        (ITEMS, 102),
        ({"type": "array", "minItems": 7, "maxItems": 5}, 8),
        ({"properties": {"minItems": {"type": "integer"}, "maxItems": ITEMS}}, 104),
        ({"enum": [{"minItems": 500}], "default": {"maxItems": 500}, "const": ITEMS}, 1),
        ({"minItems": 10**400}, SIZE_MAX + 1),
        ({"minItems": -5, "maxItems": "many"}, 1),
        # once, however often it is referred to
        ({"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}], "$defs": {"A": ITEMS}}, 105),
        ({"$ref": "#/$defs/A", "title": "a", "$defs": {"A": ITEMS}}, 103),
        # and wherever it is put together with more
        ({"$ref": "#/$defs/A", "minItems": 3, "$defs": {"A": ITEMS}}, 1 + 3 + 102 + 102),
        ({"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}], "$defs": {"A": ITEMS}}, 3 + 3 * 102),
        ({"allOf": [{"$ref": "#/items"}, {}], "items": {"$ref": "#/items/items", "items": ITEMS}}, None),
        ({"allOf": [{"$ref": "#"}, {"$ref": "#/allOf/1"}]}, None),
        ({"allOf": [{"$ref": "#/allOf/" + "9" * 5000}, {"$ref": "#/%25/x"}]}, None),
    ],
)
def test_schemas_and_items_are_counted(schema: dict[str, Any], size: int | None) -> None:
    found = size_of(schema)
    assert size is None or found == size


def test_what_doubles_with_each_step_is_counted_without_doubling() -> None:
    """2 to the 200th ways through it, in 200 schemas."""
    named: dict[str, Any] = {"A0": {"type": "integer"}}
    for place in range(200):
        both = {key: {"$ref": f"#/$defs/A{place}", "minimum": 1} for key in "xy"}
        named[f"A{place + 1}"] = {"type": "object", "properties": both}
    found = size_of({"$ref": "#/$defs/A200", "required": ["x"], "$defs": named})
    with pytest.raises(InputError, match="expected at most 16384 schemas and items"):
        check_size(found)


def test_a_place_elsewhere_cannot_be_counted() -> None:
    with pytest.raises(InputError, match="expected a \\$ref to a place here"):
        size_of({"$ref": "#anchor", "minItems": 3})
    assert size_of({"$ref": "#anchor"}) == 1
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(InputError, match="expected fewer schemas in schemas"):
        size_of(deep)
