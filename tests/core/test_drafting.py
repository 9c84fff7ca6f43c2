"""What the drafter is given, once and in order, and what its proposals become: by hand, and in any course of
drafting."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from flowspec.core.head.calibration import Calibrator
from flowspec.core.head.drafter_jobs import draft_part, expandable, most_valuable
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.fusion import Fusion
from flowspec.core.head.request import PREDICTED_MAX, Request
from flowspec.core.head.tree_growth import grow, learn, observe
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Expand, Proposed, Release, Segment
from flowspec.core.stage.drafter import DrafterCore
from flowspec.errors import PeerError
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.language import HashLanguage
from tests.core import stages
from tests.core.asked import (
    BELIEVED,
    PLAIN,
    ROWS_MAX,
    WANTS_FEATURES,
    asked,
    drafted,
    move,
    opening,
    part_of,
    propose,
    rows_of,
)

# ---------------------------------------------------------------------------------- what the drafter is given


def test_the_first_parts_bring_prompt_and_open_in_chunks_and_ask_about_the_root() -> None:
    request = asked(4)
    part = part_of(request, 3)
    assert rows_of(part) == [(0, True), (1, True), (2, True), (3, False)]
    assert (part.parents, part.tokens, part.positions) == ((-1, 0, 1, 2), (100, 101, 102, 103), (0, 1, 2, 3))
    assert (part.commit.base, part.commit.path) == (4, ())
    assert part.opening == request.drafter_states[0].opening
    assert part.opening is not None
    assert part.opening.slots == 1000 + limits.DRAFT_NODES_MAX
    assert draft_part(request, 0, PLAIN, [3], ROWS_MAX) is None, "asked already"
    request = asked(600)
    parts = [part_of(request, 599) for _ in range(3)]
    assert [len(part.ids) for part in parts] == [256, 256, 88]
    assert [node for part in parts for node in part.ids] == list(range(600))
    assert [sum(part.committed) for part in parts] == [256, 256, 87]
    assert request.drafter_states[0].pending == {599}
    exact = asked(257)
    assert rows_of(part_of(exact, 256))[-1] == (255, True), "a chunk that is full has no room for nodes"
    assert rows_of(part_of(exact, 256)) == [(256, False)]


def test_guesses_that_came_true_are_not_run_again_only_told() -> None:
    request = asked(3)
    child, _ = drafted(request, 2, (7, 0.6), (8, 0.3))
    (grandchild,) = drafted(request, child, (9, 0.5))
    assert (move(request, 7), move(request, 9)) == (child, grandchild)
    part = part_of(request, grandchild)
    assert (rows_of(part), part.commit.base, part.commit.path) == (
        [(grandchild, False)],
        3,
        (child, grandchild),
    )
    propose(request, grandchild, (4, 0.5))
    grow(request, 0.0, BELIEVED)
    part = part_of(request, *request.tree.children(grandchild))
    assert (part.commit.base, part.commit.path) == (5, ()), "a Commit tells what the ones before it have not"


def test_long_paths_are_told_in_several_and_too_long_prompts_not_drafted_for() -> None:
    request = asked(3)
    part_of(request, 2)
    grown = request.tree.extend_path([5] * (limits.COMMIT_PATH_MAX + 300))
    told, given = [], []
    while (part := draft_part(request, 0, PLAIN, [request.tree.root], ROWS_MAX)) is not None:
        assert part.commit.base == 3 + len(told)
        assert len(part.commit.path) <= limits.COMMIT_PATH_MAX
        told += part.commit.path
        given += part.ids
        assert max(part.positions) < 3 + len(told), "no row comes before the Commit that names it"
    assert (told, given) == (grown, grown)
    request = asked(20, drafter_context=19)
    assert request.drafter_states[0].opening is None
    assert not expandable(request, 0, DrafterTraits(context=19), 19)
    assert asked(19, drafter_context=19).drafter_states[0].opening is not None


@pytest.mark.parametrize(("featured", "may"), [(8, False), (9, True), (10, True)])
def test_a_drafter_that_wants_features_waits_for_those_of_the_path(featured: int, may: bool) -> None:
    request = asked(10, featured=featured)
    assert expandable(request, 0, WANTS_FEATURES, 9) is may
    assert expandable(request, 0, PLAIN, 9)
    child = request.tree.add(9, 7, 0.5)
    assert expandable(request, 0, WANTS_FEATURES, child) is may, "guesses of others do not lead past them"
    request.drafter_states[0].answered.add(9)
    assert expandable(request, 0, WANTS_FEATURES, child), "its own guesses go on from features of its own"
    late = asked(10, featured=9 - PREDICTED_MAX)
    late.wants_features = late.is_overdue = True
    assert expandable(late, 0, WANTS_FEATURES, 9), "some that are late it predicts itself"
    late.featured -= 1
    assert not expandable(late, 0, WANTS_FEATURES, 9), "not as many as that"
    assert not expandable(asked(1, featured=1), 0, WANTS_FEATURES, 0), "the first token has nothing before it"


# --------------------------------------------------------------------------------------- what becomes a node


def tokens_below(request: Request, node: int) -> list[int]:
    return [request.tree.token(child) for child in request.tree.children(node)]


def test_proposals_become_nodes_once_they_are_worth_it_and_none_behind_a_stop_token() -> None:
    request = asked(3)
    (child,) = drafted(request, 2, (7, 0.5), (8, 0.05), value_min=0.1)
    assert tokens_below(request, 2) == [7]
    part_of(request, child)
    propose(request, child, (1, 0.6), (2, 0.15), (3, 0.01))
    assert grow(request, 0.1, BELIEVED) == 1
    assert tokens_below(request, child) == [1]
    move(request, 7)
    assert grow(request, 0.1, BELIEVED) == 1
    assert tokens_below(request, child) == [1, 2], "the root came nearer, so it is worth twice as much"
    assert grow(request, 0.1, BELIEVED) == 0
    request = asked(3, stop_ids=frozenset([8, 9]))
    drafted(request, 2, (8, 0.5), (7, 0.3), (9, 0.1), (6, 0.1))
    assert tokens_below(request, 2) == [7, 6]


def test_the_calibrators_word_counts_where_there_is_one() -> None:
    fusion = Fusion([0])
    (calibrator,) = fusion.calibrators
    for _ in range(400):
        calibrator.observe(0.9, is_right=False)
    request, believed = asked(3), asked(3)
    for each in (request, believed):
        part_of(each, 2)
        propose(each, 2, (7, 0.9), (8, 0.09), fusion=fusion)
    assert (grow(request, 0.05, fusion), grow(believed, 0.05, BELIEVED)) == (0, 2)
    assert believed.tree.value(believed.tree.children(2)[0]) == pytest.approx(0.9)
    assert grow(request, 0.01, fusion) == 2
    assert request.tree.value(request.tree.children(2)[0]) == pytest.approx(calibrator.chance(0.9))


def test_the_tree_has_an_end() -> None:
    request = asked(3)
    nodes, tokens = [2], 0
    while nodes:
        node = nodes.pop(0)
        part_of(request, node)
        propose(request, node, *((tokens + token, 0.9) for token in range(limits.DRAFT_WIDTH_MAX)))
        tokens += limits.DRAFT_WIDTH_MAX
        if grow(request, 0.0, BELIEVED) < limits.DRAFT_WIDTH_MAX:
            break
        nodes += request.tree.children(node)
    assert request.tree.alive_count == limits.DRAFT_NODES_MAX
    move(request, 0)
    grow(request, 0.0, BELIEVED)
    assert request.tree.alive_count <= limits.DRAFT_NODES_MAX


def test_a_node_without_an_answer_is_not_asked_about_again() -> None:
    """The drafter's view may be ahead: there the node was dead."""
    request = asked(3)
    (child,) = drafted(request, 2, (7, 0.5))
    part_of(request, child)
    request.drafter_states[0].land({child}, request.is_living)
    assert not expandable(request, 0, PLAIN, child)
    assert grow(request, 0.0, BELIEVED) == 0


def test_what_comes_true_teaches_and_is_done_with() -> None:
    fusion = Fusion([0])
    (calibrator,) = fusion.calibrators
    request = asked(3)
    drafted(request, 2, (7, 0.6), (8, 0.3), (9, 0.004), value_min=0.01)
    observe(request, 2, 8, fusion)
    observe(request, 2, 8, fusion)
    expected = Calibrator.empty()
    for confidence, is_right in ((0.6, False), (0.3, True), (0.004, False)):
        expected.observe(confidence, is_right=is_right)
    assert [calibrator.chance(each) for each in (0.6, 0.3, 0.004)] == [
        expected.chance(each) for each in (0.6, 0.3, 0.004)
    ]
    assert (request.candidates.offers, request.candidates.grown) == ({}, {})


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


# ----------------------------------------------------------------------------------------- a daemon's drafter


def job(number: int, *requests: int, releases: tuple[int, ...] = ()) -> Expand:
    (none,) = stages.segment(0, []).parts
    parts = tuple(
        structs.replace(none, commit=stages.commit(base=1, request=request)) for request in requests
    )
    given_up = tuple(Release(request=request) for request in releases)
    return Expand(segment=Segment(segment=number, parts=parts, releases=given_up), width=4)


def done(number: int) -> Proposed:
    return Proposed(job=number, proposals=(), compute_s=0.5)


def test_jobs_and_releases_go_to_the_drafter_and_answers_to_the_head() -> None:
    core = DrafterCore()
    assert core.handle(job(7, 1, 2), 10.0) == (job(7, 1, 2),)
    assert (core.running_s(12.5), core.done, core.queued) == (2.5, 0, 0)
    release = Release(request=1)
    assert core.handle(release, 12.0) == (release,), "in order behind the job that runs"
    assert core.requests() == [2]
    assert core.handle(done(7), 13.0) == (done(7),)
    assert (core.running_s(14.0), core.done) == (0.0, 1)
    core.handle(job(8, 3, releases=(2,)), 15.0)
    assert core.requests() == [3]


def test_what_no_correct_head_asks_of_a_drafter_is_refused() -> None:
    core = DrafterCore()
    core.handle(job(0, 1), 0.0)
    with pytest.raises(PeerError, match="job 1 came while job 0 runs"):
        core.handle(job(1, 1), 0.0)
    core, sent = DrafterCore(), job(0, 1)
    copying = stages.opening(keep=1, source=2)
    parts = tuple(structs.replace(part, opening=copying) for part in sent.segment.parts)
    with pytest.raises(PeerError, match="request 1 begins with a copy"):
        core.handle(structs.replace(sent, segment=structs.replace(sent.segment, parts=parts)), 0.0)
    core.handle(sent, 0.0)
    core = DrafterCore()
    for number in range(limits.REQUESTS_MAX):
        core.handle(job(number, number), 0.0)
        core.handle(done(number), 0.0)
    with pytest.raises(PeerError, match=f"at most {limits.REQUESTS_MAX} requests"):
        core.handle(job(1000, 1000), 0.0)
