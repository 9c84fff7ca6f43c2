"""The items that a response answers, page by page, as the API lists them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from flowspec.serve.refusals import ApiError, invalid
from flowspec.serve.responses.items import Item
from flowspec.serve.responses.request import INCLUDABLE

LIMIT_DEFAULT = 20
LIMIT_MAX = 100
ORDERS = ("desc", "asc")
_WHOLE = re.compile("[0-9]{1,3}")


def page_of(items: Sequence[Item], query: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """What a list says: at most `limit` of the items behind `after`, the last first unless `order` is asc.
    `query` are the names and values of the request. Raises `ApiError`."""
    limit, order, after = LIMIT_DEFAULT, ORDERS[0], None
    for name, value in query:
        if name == "limit":
            limit = int(value) if _WHOLE.fullmatch(value) else 0
            if not 1 <= limit <= LIMIT_MAX:
                raise invalid("limit", f"a whole number from 1 to {LIMIT_MAX}", value)
        elif name == "order":
            order = value
            if order not in ORDERS:
                raise invalid("order", " or ".join(ORDERS), value)
        elif name == "after":
            after = value
        elif name in ("include", "include[]"):  # no item has any of it
            if value not in INCLUDABLE:
                raise invalid("include", f"some of {', '.join(INCLUDABLE)}", value)
        else:
            text = f"{name!r:.80}: expected after, limit, order or include"
            raise ApiError(400, text, name[:80], "unknown_parameter")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise invalid("after", "the id of an item in this list", after)
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > limit,
    }
