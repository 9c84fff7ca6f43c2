"""A request and its drafter's mirror, made and moved on by hand."""

from __future__ import annotations

from flowspec.core.head.drafter_jobs import draft_part
from flowspec.core.head.drafter_state import DrafterState
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.fusion import Fusion
from flowspec.core.head.request import Request
from flowspec.core.head.statistics import Statistics
from flowspec.core.head.tree_growth import grow, learn
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Open, Proposal, Sampling, SegmentPart
from flowspec.tree import TokenTree
from tests.core import stages
from tests.pipeline import ask

PLAIN = DrafterTraits(context=1000)
WANTS_FEATURES = DrafterTraits(context=1000, needs_features=True)
ROWS_MAX = 256


def opening(
    length: int, *, epoch: int = 0, keep: int = 0, root: int | None = None, context: int = 1000
) -> Open:
    root, slots = length - 1 if root is None else root, context + limits.TREE_NODES_MAX
    return stages.opening(epoch=epoch, keep=keep, length=length, root=root, slots=slots, sampling=Sampling())


def asked(
    prompt: int = 4,
    *,
    context: int = 1000,
    drafter_context: int = 1000,
    new_tokens_max: int = 100,
    stop_ids: frozenset[int] = frozenset(),
    featured: int | None = None,
) -> Request:
    """A request whose prompt are tokens 100, 101, ... in nodes 0, 1, ...; all of it but the root is
    computed, and drafters have its features."""
    tree = TokenTree()
    tree.extend_path(range(100, 100 + prompt))
    drafter_state = DrafterState()
    drafter_state.begin(opening(prompt), 0, drafter_context)
    submit = ask(1, tree.committed_tokens(), new_tokens_max, stop_ids=stop_ids)
    return Request(
        tree=tree,
        submit=submit,
        opening=opening(prompt),
        context=context,
        unsent=prompt,
        computed=prompt - 1,
        featured=prompt - 1 if featured is None else featured,
        known_length=prompt,
        statistics=Statistics(stage_count=1),
        drafter_states=[drafter_state],
        weights=[1.0],
    )


BELIEVED = Fusion([0], is_calibrated=False)
"""The drafter's word is taken as it is."""


def part_of(request: Request, *nodes: int, rows_max: int = ROWS_MAX) -> SegmentPart:
    part = draft_part(request, 0, PLAIN, nodes, rows_max)
    assert part is not None
    return part


def rows_of(part: SegmentPart) -> list[tuple[int, bool]]:
    return list(zip(part.ids, part.committed, strict=True))


def propose(request: Request, node: int, *children: tuple[int, float], fusion: Fusion | None = None) -> None:
    """The drafter answers for a node it was asked about."""
    tokens, confidences = (
        tuple(token for token, _ in children),
        tuple(confidence for _, confidence in children),
    )
    proposal = Proposal(request=1, epoch=0, node=node, tokens=tokens, confidences=confidences)
    learn(request, 0, proposal, fusion or BELIEVED)
    request.drafter_states[0].land({node}, request.is_living)


def drafted(request: Request, node: int, *children: tuple[int, float], value_min: float = 0.0) -> list[int]:
    """Asks about a node and makes nodes of the answer; returns its children."""
    part_of(request, node)
    propose(request, node, *children)
    grow(request, value_min, BELIEVED)
    return request.tree.children(node)


def move(request: Request, token: int) -> int:
    """The root's next token is known; the head's part of it."""
    tree = request.tree
    node = tree.child(tree.root, token)
    if node is None:
        node = tree.add(tree.root, token, 1.0)
    request.forget(tree.commit(node))
    return node
