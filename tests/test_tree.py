"""The token tree behaves as a naive table of nodes under any order of drafting, sending, committing and
rewinding."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowspec.tree import CHANCE_MIN, NodeState, TokenTree

TOKENS = st.integers(0, 4)
CHANCES = st.sampled_from([0.0, 0.1, 0.5, 0.5, 0.9, 1.0]) | st.floats(0, 1)
NEARLY = 1e-9
"""Values are sums of logarithms inside and products here."""


class TreeAgainstTable(RuleBasedStateMachine):
    """`table` holds `[parent, token, position, chance, state]` per node; everything else is searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = TokenTree()
        self.table: list[list] = []
        self.path: list[int] = []

    def living(self) -> list[int]:
        return [n for n, row in enumerate(self.table) if row[4] in (NodeState.DRAFTED, NodeState.SENT)]

    def drafted(self) -> list[int]:
        return [n for n in self.living() if self.table[n][4] == NodeState.DRAFTED]

    def below(self, node: int, ancestor: int) -> bool:
        while node > ancestor:
            node = self.table[node][0]
        return node == ancestor

    def value(self, node: int) -> float:
        """The product of the chances from below the root down."""
        product = 1.0
        while node != self.path[-1]:
            product *= max(self.table[node][3], CHANCE_MIN)
            node = self.table[node][0]
        return product

    @initialize(prompt=st.lists(TOKENS, min_size=1, max_size=3))
    def begin(self, prompt: list[int]) -> None:
        self.grow_path(prompt)

    @precondition(lambda self: not self.living())
    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=3))
    def grow_path(self, tokens: list[int]) -> None:
        added = self.tree.extend_path(tokens)
        assert added == list(range(len(self.table), len(self.table) + len(tokens)))
        for node, token in zip(added, tokens, strict=True):
            self.table.append(
                [self.path[-1] if self.path else -1, token, len(self.path), 1.0, NodeState.COMMITTED]
            )
            self.path.append(node)

    @precondition(lambda self: self.path and len(self.living()) < 24)
    @rule(data=st.data(), token=TOKENS, chance=CHANCES)
    def draft(self, data: st.DataObject, token: int, chance: float) -> None:
        parent = data.draw(st.sampled_from([self.path[-1], *self.living()]))
        twin = [n for n in self.living() if self.table[n][:2] == [parent, token]]
        assert self.tree.child(parent, token) == (twin[0] if twin else None)
        if twin:
            with pytest.raises(AssertionError, match="already has a child"):
                self.tree.add(parent, token, chance)
            return
        assert self.tree.add(parent, token, chance) == len(self.table)
        self.table.append([parent, token, self.table[parent][2] + 1, chance, NodeState.DRAFTED])

    @precondition(lambda self: self.path)
    @rule(count=st.integers(0, 8), value_min=st.sampled_from([0.0, 0.3, 0.5, 1.0]), share=st.floats(0, 1))
    def send_best(self, count: int, value_min: float, share: float) -> None:
        chosen = self.tree.best_unsent(count, value_min)
        drafted = self.drafted()
        assert set(chosen) <= set(drafted)
        assert len(set(chosen)) == len(chosen)
        for index, node in enumerate(chosen):  # parents first, and closed: no parent is left unsent
            assert self.table[node][0] not in drafted or self.table[node][0] in chosen[:index]
        # No set of nodes, closed or not, can be worth more than the largest values of all.
        values = [self.value(n) for n in chosen]
        assert values == pytest.approx(
            sorted(map(self.value, drafted), reverse=True)[: len(chosen)], rel=NEARLY, abs=0
        )
        assert all(value >= value_min * (1 - NEARLY) for value in values)
        left = [n for n in drafted if n not in chosen and self.value(n) >= value_min * (1 + NEARLY)]
        assert not left or len(chosen) == count, "nothing that is worth it stays behind while there is room"
        for index, node in enumerate(chosen):  # between equals the older one goes first
            assert not [
                n for n in chosen[index:] if n < node and self.table[n][0::3] == self.table[node][0::3]
            ]
        sent = chosen[: round(share * len(chosen))]
        self.tree.mark_sent(sent)
        for node in sent:
            self.table[node][4] = NodeState.SENT

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from([n for n in self.living() if self.table[n][0] == self.path[-1]]))
        dead = [n for n in self.living() if not self.below(n, node)]
        assert self.tree.commit(node) == dead
        self.path.append(node)
        self.table[node][4] = NodeState.COMMITTED
        for victim in dead:
            self.table[victim][4] = NodeState.DEAD

    @precondition(lambda self: self.living())
    @rule(data=st.data(), chance=CHANCES)
    def revalue(self, data: st.DataObject, chance: float) -> None:
        node = data.draw(st.sampled_from(self.living()))
        is_moved = max(chance, CHANCE_MIN) != max(self.table[node][3], CHANCE_MIN)
        moved = self.tree.revalue(node, chance)
        assert sorted(moved) == ([n for n in self.living() if self.below(n, node)] if is_moved else [])
        assert all(self.table[n][0] not in moved[index:] for index, n in enumerate(moved)), "parents first"
        self.table[node][3] = chance

    @precondition(lambda self: self.drafted())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(self.drafted()))
        dead = [n for n in self.living() if self.below(n, node)]
        assert self.tree.drop(node) == dead
        for victim in dead:
            self.table[victim][4] = NodeState.DEAD

    @precondition(lambda self: self.path)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, len(self.path)))
        self.tree.rewind(length)
        for node in [*self.living(), *self.path[length:]]:
            self.table[node][4] = NodeState.DEAD
        del self.path[length:]

    @invariant()
    def equal(self) -> None:
        tree, living = self.tree, self.living()
        rows = [[tree.parent(n), tree.token(n), tree.position(n), tree.state(n)] for n in range(len(tree))]
        assert rows == [[parent, token, position, state] for parent, token, position, _, state in self.table]
        assert tree.path == self.path
        assert tree.committed_length == len(self.path)
        assert tree.alive == set(living) == set(tree.living())
        assert [n for n in range(len(tree)) if tree.is_alive(n)] == living
        assert tree.alive_count == len(living)
        assert tree.sent_alive == len(living) - len(self.drafted())
        assert tree.committed_tokens() == [self.table[n][1] for n in self.path]
        assert all(tree.position(node) == index for index, node in enumerate(self.path))
        if self.path:
            unsent = sorted(map(self.value, self.drafted()), reverse=True)
            assert [tree.unsent_value(rank + 1) for rank in range(len(unsent) + 1)] == pytest.approx(
                [*unsent, 0.0], rel=NEARLY, abs=0
            )
            for node in (self.path[-1], *living):
                assert tree.value(node) == pytest.approx(self.value(node), rel=NEARLY, abs=0)
                assert tree.depth(node) == self.table[node][2] - len(self.path) + 1
                assert tree.children(node) == [n for n in living if self.table[n][0] == node]


TestTreeAgainstTable = TreeAgainstTable.TestCase
TestTreeAgainstTable.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_long_chain_keeps_its_order_far_below_what_a_product_of_floats_can_hold() -> None:
    tree = TokenTree()
    assert tree.extend_path(range(300)) == list(range(300))
    chain = [tree.root]
    for depth in range(700):
        chain.append(tree.add(chain[-1], depth, 0.01))
    twin = tree.add(chain[-2], 999, 0.02)
    assert [tree.parent(node) for node in chain[1:]] == chain[:-1]
    assert [tree.token(node) for node in range(300)] == list(range(300))
    assert tree.position(chain[-1]) == 999
    assert tree.value(chain[-1]) == 0
    assert tree.best_unsent(1000) == [*chain[1:-1], twin, chain[-1]]


def test_our_own_mistakes_are_asserted() -> None:
    tree = TokenTree()
    prompt = tree.extend_path([1, 2])
    child = tree.add(tree.root, 3, 0.5)
    grandchild = tree.add(child, 4, 0.5)
    dead = tree.add(tree.root, 5, 0.1)
    with pytest.raises(AssertionError, match="no child of the root"):
        tree.commit(grandchild)
    with pytest.raises(AssertionError, match="nothing is drafted"):
        tree.extend_path([6])
    with pytest.raises(AssertionError, match="neither root nor alive"):
        tree.add(prompt[0], 6, 0.5)
    with pytest.raises(IndexError):
        tree.token(len(tree))
    for chance in (-0.1, 1.1, math.nan):
        with pytest.raises(AssertionError, match="expected a chance from 0 to 1"):
            tree.add(child, 9, chance)
    assert tree.commit(child) == [dead]
    with pytest.raises(AssertionError, match="not alive"):
        tree.commit(dead)
    with pytest.raises(AssertionError, match="neither root nor alive"):
        tree.add(dead, 6, 0.5)
    tree.mark_sent([dead])
    assert tree.state(dead) == NodeState.DEAD
