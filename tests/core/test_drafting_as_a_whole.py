"""Any course of drafting: each node goes to the drafter once, after its parent, and the path is told in
full."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.head.drafter_jobs import draft_part, expandable, most_valuable
from flowspec.core.head.fusion import Fusion
from flowspec.core.head.request import Request
from flowspec.core.head.tree_growth import grow, learn, observe
from flowspec.core.protocol.messages import Segment
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.language import HashLanguage
from tests.core.asked import PLAIN, asked, move, opening

VALUE_MIN = 0.02
STEPS = st.lists(
    st.tuples(st.sampled_from(["draft", "draft", "move", "move", "turn"]), st.integers(0, 99)),
    min_size=8,
    max_size=40,
)


@settings(max_examples=150)
@given(STEPS, st.integers(1, 12), st.sampled_from([1, 3, 200]))
def test_a_drafter_is_given_each_node_once_after_its_parent_and_is_told_the_whole_path(
    steps: list[tuple[str, int]], prompt: int, rows_max: int
) -> None:
    """The simulator's drafter insists on that: it fails for a row whose prefix it lacks, or that comes
    twice."""
    drafter = FakeDrafter(HashLanguage(20, 3), 0.5, 3)
    request = asked(prompt)
    tree, drafter_state, fusion = request.tree, request.drafter_states[0], Fusion([0], is_calibrated=False)
    epoch = 0
    for number, (step, choice) in enumerate(steps):
        if step == "draft":
            nodes = sorted(
                node
                for node in (tree.root, *most_valuable(request, 0, PLAIN, 3))
                if expandable(request, 0, PLAIN, node)
            )
            part = draft_part(request, 0, PLAIN, nodes, rows_max)
            if part is not None:
                waiting = set(drafter_state.pending)
                for proposal in drafter.draft(Segment(segment=number, parts=(part,)), 3):
                    learn(request, 0, proposal, fusion)
                drafter_state.land(waiting, request.is_living)
                assert waiting <= drafter_state.answered
        elif step == "move":
            children = tree.children(tree.root)
            observe(request, tree.root, choice, fusion)
            move(
                request,
                tree.token(children[choice % len(children)]) if children and choice % 5 else 90 + choice % 7,
            )
        else:
            epoch += 1
            drafter_state.advance(tree)
            keep = max(0, tree.committed_length - 1 - choice % 4 * (choice % 3))
            tree.rewind(keep)
            tree.extend_path([200 + epoch])
            request.candidates.clear()
            drafter_state.begin(
                opening(keep + 1, epoch=epoch, keep=keep, root=tree.root), keep, PLAIN.context
            )
        grow(request, VALUE_MIN, fusion)
        assert_grown(request)
        assert_ranked(request)


def assert_grown(request: Request) -> None:
    """Every proposal below a living node that is worth it by now is a node."""
    tree = request.tree
    for node, found in request.candidates.offers.items():
        if request.is_living(node):
            worth = {
                token
                for token, confidence in found[0]
                if tree.value(node) * min(1.0, confidence) > VALUE_MIN * 1.000001
            }
            assert worth <= {tree.token(child) for child in tree.children(node)}


def assert_ranked(request: Request) -> None:
    """The best nodes to ask about are the best of all that may be asked about."""
    tree = request.tree
    may = sorted(
        (tree.value(node) for node in tree.living() if expandable(request, 0, PLAIN, node)), reverse=True
    )
    assert [tree.value(node) for node in most_valuable(request, 0, PLAIN, 4)] == pytest.approx(may[:4])
