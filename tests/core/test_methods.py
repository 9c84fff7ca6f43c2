"""What each method but `continuous` decides: a head whose stages and drafter are played by hand, exact
commands out."""

from __future__ import annotations

import pytest

from flowspec.core.methods import METHODS, default_method, make_method
from flowspec.core.methods.lockstep import LockStep
from flowspec.core.protocol import limits
from tests.core.scripted_head import (
    MISS,
    NOTHING,
    Said,
    ScriptedHead,
    commits,
    drafts,
    emits,
    ends,
    falling,
    is_ordered,
    kinds,
    opens,
    sends,
    sends_all,
)


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_made_by_name_and_without_a_drafter_all_decode_plainly(name: str) -> None:
    assert make_method(name).name == name
    head = ScriptedHead(make_method(name), drafter=None)
    assert head.ask(count=3) == [opens(), sends(0, 1, 2)]
    assert head.back({2: 8}) == [emits(8), sends(3)]
    assert head.back({3: 9}) == [emits(9), sends(4)]
    assert head.back({4: 8}) == [emits(8), ends("length")]


def test_where_none_is_named_a_method_suits_what_there_is() -> None:
    assert default_method() == "continuous"
    assert default_method(has_team=True) == "cosine"
    assert default_method(has_team=True, has_chain=True) == default_method(has_chain=True) == "specrouter"


# ----------------------------------------------------------------------------------------------------------
# ar


def test_ar_fills_its_window_with_prompts_and_the_roots_that_wait() -> None:
    head = ScriptedHead("ar", stages=2)
    said = [each for request in range(1, 6) for each in head.ask(request, (5,))]
    assert [each for each in said if each[0] == "send"] == [
        sends(0, request=request) for request in (1, 2, 3)
    ], "one more than stages"
    assert head.back({0: 8}, request=1) == [emits(8, request=1), sends(1, request=1)]
    assert head.back({0: 8}, request=2) == [emits(8, request=2), sends(0, request=4)], (
        "prompts and answers take turns"
    )
    assert head.back({0: 8}, request=3) == [emits(8, request=3), sends_all({2: (1,), 3: (1,)})], (
        "roots that wait share a segment"
    )
    assert head.back({1: 8}, request=1) == [emits(8, request=1), sends(0, request=5)]
    assert head.back({0: 8}, request=4) == [emits(8, request=4), sends_all({1: (2,), 4: (1,)})]


# -----------------------------------------------------------------------------------------------------
# tree-sd


def tree_sd(nodes: int = 5) -> ScriptedHead:
    """A beam of 2 that is 2 deep, its prompt answered with token 8: the root is node 3, of which the drafter
    is asked."""
    head = ScriptedHead(make_method("tree-sd", nodes=nodes, depth=2, width=2))
    assert head.ask() == [opens(), sends(0, 1, 2)], "nothing is drafted for a root that is not known"
    assert head.back({2: 8}) == [emits(8), drafts(0, 1, 2, 3)]
    return head


def test_tree_sd_sends_the_whole_tree_when_its_beam_is_complete_and_not_before() -> None:
    head = tree_sd()
    assert head.give(NOTHING) == [], "nothing is sent while the drafter is at work"
    assert head.propose({3: [(10, 0.6), (11, 0.32)]}) == [drafts(4, 5)]
    assert head.give(NOTHING) == []
    assert head.propose({4: [(20, 0.5), (21, 0.4)], 5: [(22, 0.9)]}) == [drafts(6, 8)], (
        "the two best of three"
    )
    assert head.propose({6: [(30, 0.5)], 8: [(31, 0.1)]}) == [sends(3, 4, 5, 6, 8)]
    values = [head.tree().value(node) for node in (4, 5, 6, 8, 7, 9)]
    assert values == pytest.approx([0.6, 0.32, 0.3, 0.288, 0.24, 0.15]), "the root and the four best"


def test_tree_sd_does_nothing_while_its_segment_is_out_and_drafts_anew_when_it_is_back() -> None:
    head = tree_sd()
    head.propose({3: [(10, 0.6), (11, 0.32)]})
    head.propose({4: [(20, 0.5), (21, 0.4)], 5: []})
    assert head.propose({6: [], 7: []}) == [sends(3, 4, 5, 6, 7)]
    assert head.job is None
    assert head.back({3: 10, 4: 21, 7: 50}) == [emits(10, 21, 50), drafts(8)], (
        "what came true was run by the drafter as a guess"
    )
    assert head.job is not None
    assert (head.job.segment.parts[0].commit.base, head.job.segment.parts[0].commit.path) == (4, (4, 7, 8))
    assert head.propose({8: []}) == [sends(8)]


# ----------------------------------------------------------------------------------------------------
# chunk-pp


def test_chunk_pp_sends_its_chunks_back_to_back_and_learns_when_all_are_back() -> None:
    head = ScriptedHead(make_method("chunk-pp", nodes=10, depth=1, width=5))
    head.ask()
    assert head.back({2: 8}) == [emits(8), drafts(0, 1, 2, 3)]
    assert head.propose(falling(5)) == [drafts(4, 5, 6, 7, 8)]
    said = head.propose({4: [(20, 0.9), (21, 0.05)], 5: [(22, 0.9)], 6: [(23, 0.9)]})
    assert said == [sends(3, 4), sends(5, 6), sends(7, 8), sends(9, 10), sends(11, 12)], (
        "of the best ten, by id: parents come first"
    )
    assert [head.back(drawn) for drawn in ({3: 0, 4: 20}, {}, {}, {9: 7})] == [[], [], [], []]
    assert head.back() == [emits(0, 20), emits(7), drafts(9, 13)]


def test_chunk_pp_has_no_empty_chunks() -> None:
    head = ScriptedHead(make_method("chunk-pp", nodes=10, depth=1, width=5))
    head.ask()
    head.back({2: 8})
    head.propose({3: [(10, 0.5), (11, 0.3)]})
    assert head.propose({}) == [sends(3), sends(4), sends(5)]


# -----------------------------------------------------------------------------------------------------
# pipedec


def pipedec() -> ScriptedHead:
    """Three stages with the prompt and two levels in them, the next one drafted; below each node 10 tokens,
    of value 0.5 and less."""
    head = ScriptedHead("pipedec", stages=3)
    assert head.ask() == [opens(), sends(0, 1, 2), drafts(0, 1, 2)], (
        "the drafter begins while the prompt is under way"
    )
    level = tuple(range(3, 13))
    assert head.propose(falling(10)) == [sends(*level), drafts(*level)]
    said = head.propose(falling(10))
    assert kinds(said) == ["send", "draft"]
    assert len(said[0][1][1]) == 16, "the best of a hundred"
    assert said[1][1] == said[0][1], "what was sent is what is expanded"
    assert head.propose(falling(10)) == [], "the pipeline is full"
    return head


def test_pipedec_sends_one_level_per_slot_and_no_more_than_16_nodes_of_it() -> None:
    head = pipedec()
    tree = head.tree()
    assert [tree.depth(node) for node in head.sent[2].parts[0].ids] == [2] * 16
    values = [tree.value(node) for node in head.sent[2].parts[0].ids]
    others = [
        tree.value(node)
        for node in tree.living()
        if tree.depth(node) == 2 and node not in head.sent[2].parts[0].ids
    ]
    assert min(values) >= max(others)
    said = head.back({2: 0})
    assert said[:2] == [emits(0), commits(3, base=3)], (
        "on control, for two segments are in flight that it prunes"
    )
    assert kinds(said[2:]) == ["send", "draft"]
    assert [tree.depth(node) for node in said[2][1][1]] == [2] * 16, "the third level: the root went down one"
    assert all(tree.is_alive(node) for node in said[2][1][1])


def test_pipedec_sends_a_root_that_it_missed_at_once() -> None:
    head = pipedec()
    root = len(head.tree())
    assert head.back({2: MISS}) == [emits(MISS), commits(root, base=3), sends(root), drafts(root)]
    assert [head.back(), head.back()] == [[], []], "what is dead comes back empty"
    assert head.back({root: MISS}) == [emits(MISS), sends(root + 1)]
    assert head.propose(falling(2)) == [drafts(root + 1)], "the answer below a root that has passed"


def test_pipedec_waits_until_all_of_the_last_level_is_drafted() -> None:
    head = ScriptedHead("pipedec", stages=8)
    head.ask()
    head.propose({2: [(10, 0.5), (11, 0.3)]})
    assert head.back({2: 10}) == [emits(10), commits(3, base=3)]
    assert head.propose({3: [], 4: []}) == [], "a level without children is the last"
    assert head.back({3: MISS}) == [emits(MISS), sends(5), drafts(5)]


def test_levels_of_many_stages_stay_below_what_the_stages_have_slots_for() -> None:
    head = ScriptedHead(make_method("pipedec", nodes=60), stages=20)
    head.ask()
    while head.job is not None:
        head.propose(falling(2, first=0.9))
        assert head.tree().sent_alive <= limits.TREE_NODES_MAX
    assert head.tree().sent_alive == limits.TREE_NODES_MAX
    said = head.back({2: 0})
    assert kinds(said)[:3] == ["emit", "commit", "send"], "what died makes room for the rest of a level"


# ----------------------------------------------------------------------------------------------
# flowspec-paper


def round_of(head: ScriptedHead, said: list[Said]) -> list[Said]:
    """The drafter works until something is sent; returns what is said with that."""
    while "send" not in kinds(said):
        assert kinds(said)[-1] == "draft"
        said = head.propose(falling(10))
    return said


def test_the_paper_cuts_the_first_tree_into_five_by_falling_score() -> None:
    head = ScriptedHead("flowspec-paper")
    said = head.ask()
    assert said == [opens(), sends(0, 1, 2), drafts(0, 1, 2)]
    said = round_of(head, said[2:])
    assert kinds(said) == ["send"] * 5
    sent = [each[1][1] for each in said]
    assert [len(nodes) for nodes in sent] == [16] * 5
    values = [head.tree().value(node) for nodes in sent for node in nodes]
    assert values == pytest.approx(sorted(values, reverse=True))
    assert is_ordered(head.tree(), [node for nodes in sent for node in nodes])
    rest = [
        head.tree().value(node) for node in head.tree().living() if all(node not in nodes for nodes in sent)
    ]
    assert max(rest) <= min(values) * (1 + 1e-9)
    # Where the output leaves the tree, a new round begins, with a root that is sent in front: 81 nodes.
    root = len(head.tree())
    said = head.back({2: MISS})
    assert said == [emits(MISS), commits(root, base=3), drafts(root)]
    assert head.tree().alive_count == 0, "all that is in flight is given up"
    sent = [each[1][1] for each in round_of(head, said)]
    assert [len(nodes) for nodes in sent] == [16, 16, 16, 16, 17]
    assert sent[0][0] == root


def test_a_turn_of_the_paper_walks_commits_drafts_and_sends_one_segment() -> None:
    head = ScriptedHead("flowspec-paper")
    round_of(head, head.ask()[2:])
    tree = head.tree()
    child = tree.child(2, 0)
    assert child is not None
    grandchild = tree.child(child, 1)
    assert grandchild in head.sent[1].parts[0].ids
    said = head.back({2: 0})
    assert said[:2] == [emits(0), commits(child, base=3)]
    assert kinds(said[2:]) == ["draft"]
    assert head.back({child: 1, grandchild: 0}) == [], "not looked at while the turn's tree grows"
    before = {node for segment in head.sent for node in segment.parts[0].ids}
    said = round_of(head, said)
    fresh = said[0][1][1]
    assert said[:2] == [sends(*fresh), emits(1, 0)], "the verified segment that waited makes the next turn"
    assert 0 < len(fresh) <= 64
    assert before.isdisjoint(fresh)


def test_the_papers_expansion_sends_what_is_new_among_the_best() -> None:
    head = ScriptedHead(LockStep(nodes=4, expansion_nodes=3, depth=1, width=2))
    assert head.ask()[-1] == drafts(0, 1, 2)
    assert head.propose({2: [(10, 0.6), (11, 0.32)]}) == [drafts(3, 4)]
    said = head.propose({3: [(20, 0.5), (21, 0.4)], 4: [(22, 0.9)]})
    assert said == [sends(3), sends(4), sends(5), sends(7)], "values 0.6, 0.32, 0.3 and 0.288"
    assert head.back({2: 10}) == [emits(10), commits(3, base=3), drafts(5, 6)]
    assert head.propose({5: [(30, 0.9)], 6: [(31, 0.1)]}) == [sends(6, 8)], (
        "of 5, 8 and 6, what is not under way"
    )


def test_a_round_of_the_paper_begins_with_a_tree_also_where_the_drafter_knows_its_root() -> None:
    head = ScriptedHead(LockStep(nodes=1, depth=1, width=2))
    head.ask()
    assert head.propose({2: [(10, 0.6), (11, 0.32)]}) == [drafts(3, 4)]
    assert head.propose({3: [], 4: [(22, 0.9)]}) == [sends(3)]
    said = head.back({2: 11})
    assert said[:2] == [emits(11), commits(4, base=3)]
    while kinds(said)[-1] == "draft":
        said = head.propose({})
    assert [segment.parts[0].tokens for segment in head.segments[-2:]] == [(11,), (22,)], (
        "the root, and what is known below it"
    )
