"""Prefixes by number: the same for the same tokens, whatever node they come from."""

from __future__ import annotations

from flowspec.core.protocol.messages import Commit, SegmentPart
from flowspec.sim.prefixes import EMPTY, Prefixes, PrefixView


def test_a_prefix_has_one_number() -> None:
    prefixes = Prefixes()
    chain = prefixes.chain([7, 8, 9])
    assert len(set(chain)) == 3
    assert prefixes.chain([7, 8, 9]) == chain
    assert prefixes.after(chain[0], 8) == chain[1] != prefixes.after(chain[0], 9)
    assert [prefixes.tokens(prefix) for prefix in (EMPTY, chain[0], chain[2])] == [[], [7], [7, 8, 9]]
    assert (prefixes.parent(chain[2]), prefixes.token(chain[2]), prefixes.length(chain[2])) == (
        chain[1],
        9,
        3,
    )


def part(request: int, rows: list[tuple[int, int, int]], committed: list[bool]) -> SegmentPart:
    """Rows of (node, parent, token)."""
    return SegmentPart(
        commit=Commit(request=request, epoch=0, base=1, path=()),
        opening=None,
        ids=tuple(node for node, _, _ in rows),
        parents=tuple(parent for _, parent, _ in rows),
        tokens=tuple(token for _, _, token in rows),
        positions=tuple(range(len(rows))),
        committed=tuple(committed),
    )


def test_a_view_knows_the_prefix_of_every_node_it_was_given_and_forgets_requests() -> None:
    view = PrefixView(Prefixes())
    (asked,) = view.take(part(1, [(0, -1, 5), (1, 0, 6), (4, 1, 7)], [True, True, False]))
    assert (asked[0], view.prefixes.tokens(asked[1])) == (4, [5, 6, 7])
    ((node, prefix),) = view.take(part(1, [(9, 4, 8)], [False]))
    assert (node, view.prefixes.tokens(prefix)) == (9, [5, 6, 7, 8])
    assert view.take(part(2, [(0, -1, 5), (1, 0, 6), (2, 1, 7)], [True, True, False])) == [(2, asked[1])], (
        "another request, the same prefix"
    )
    view.release(1)
    assert view.take(part(1, [(0, -1, 3)], [False])) == [(0, view.prefixes.after(EMPTY, 3))]
