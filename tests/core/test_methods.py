"""What each method decides: a head whose stages and drafter are played by hand, exact commands out."""

from __future__ import annotations

import pytest

from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.methods import METHODS, default_method, make_method
from flowspec.core.methods.continuous import (
    AGE_WEIGHT,
    BACKLOG_SEGMENTS,
    SEGMENT_NODES_UNKNOWN,
    VALUE_MIN,
    Continuous,
)
from flowspec.core.methods.lockstep import LockStep
from flowspec.core.protocol import limits
from flowspec.tree import NodeState
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
    hops,
    is_ordered,
    kinds,
    opens,
    sends,
    sends_all,
    wakes,
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


def test_chunk_pp_sends_its_chunks_back_to_back_none_empty_and_learns_when_all_are_back() -> None:
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


def test_pipedec_sends_a_missed_root_at_once_and_waits_for_a_whole_level() -> None:
    head = pipedec()
    root = len(head.tree())
    assert head.back({2: MISS}) == [emits(MISS), commits(root, base=3), sends(root), drafts(root)]
    assert [head.back(), head.back()] == [[], []], "what is dead comes back empty"
    assert head.back({root: MISS}) == [emits(MISS), sends(root + 1)]
    assert head.propose(falling(2)) == [drafts(root + 1)], "the answer below a root that has passed"
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


# ------------------------------------------------------------------------------------------------- continuous


def timed(head: ScriptedHead, *points: tuple[int, float], rate: float = 0.0) -> ScriptedHead:
    """As if segments of so many rows had taken each stage so long, and tokens had come at this rate."""
    for rows, seconds in points:
        head.core.costs.learn(
            hops(head.core.stage_count, rows, seconds), rows, -head.core.stage_count * seconds, 0.0
        )
    if rate:
        head.core.costs.emitted(1, -1.0, is_busy=True, is_missed=True)
        head.core.costs.emitted(round(rate), 0.0, is_busy=True, is_missed=False)
        assert head.core.costs.rate == pytest.approx(round(rate))
    return head


def test_continuous_sends_the_most_valuable_nodes_and_few_while_nothing_was_timed() -> None:
    head = ScriptedHead(Continuous(segment_nodes=4))
    assert head.ask() == [opens(), sends(0, 1, 2), drafts(0, 1, 2)]
    said = head.propose({2: [(10, 0.6), (11, 0.2), (12, 0.1)]})
    assert said == [sends(3, 4, 5), drafts(3, 4, 5)]
    said = head.propose({3: [(20, 0.5), (21, 0.2)], 4: [(22, 0.9)], 5: [(23, 0.5), (24, 0.4)]})
    # 0.3, 0.18, 0.12, 0.05 and 0.04: the first four, which are nodes 6, 8, 7 and 9
    assert said[0] == sends(6, 8, 7, 9)
    assert head.back({2: 10, 3: 20}) == [emits(10), commits(3, base=3)]
    head = ScriptedHead(Continuous(segment_nodes=64, width=40))
    head.ask()
    said = head.propose({2: [(token, 0.02) for token in range(40)]})
    assert len(said[0][1][1]) == SEGMENT_NODES_UNKNOWN
    known = timed(ScriptedHead(Continuous(segment_nodes=24, width=40)), (1, 0.01))
    known.ask()
    assert len(known.propose({2: [(token, 0.02) for token in range(40)]})[0][1][1]) == 24


def test_continuous_sends_a_missed_root_at_once_with_the_best_below_it() -> None:
    head = ScriptedHead(Continuous())
    head.ask()
    head.propose({2: [(10, 0.6)]})
    assert head.back({2: MISS}) == [emits(MISS), commits(4, base=3), sends(4)], (
        "the drafter is at work elsewhere"
    )
    assert head.propose({3: [(11, 0.5)]}) == [drafts(4)], "what it says of the dead is nothing"
    # A child that was drafted and not sent is the root now: with it goes what was drafted below it.
    head = timed(ScriptedHead(Continuous(segment_nodes=2)), (1, 1 / 64), (2, 1 / 64))
    head.ask()
    assert head.propose({2: [(10, 0.5), (11, 0.45), (12, 0.4)]}) == [
        sends(3, 4),
        drafts(3, 4, 5),
        wakes(1 / 64),
    ]
    assert head.propose({3: [(13, 0.1)], 5: [(14, 0.9), (15, 0.1)]})[0][0] == "draft"
    assert head.back({2: 12}) == [emits(12), commits(5, base=3), sends(5, 7)]


def test_guesses_wait_for_the_window_but_a_missed_root_does_not() -> None:
    head = ScriptedHead(Continuous(window=2, segment_nodes=2))
    head.ask()
    assert head.propose({2: [(10, 0.5), (11, 0.3), (12, 0.1)]}) == [sends(3, 4), drafts(3, 4, 5)]
    assert head.propose({5: [(13, 0.5)]}) == [drafts(6)], "two segments are in flight"
    assert head.back({2: 12}) == [emits(12), commits(5, base=3), sends(5, 6)]
    assert head.propose({6: [(14, 0.5)]}) == [sends(7), drafts(7)], (
        "the segment of 3 and 4 is still in flight, but dead"
    )
    assert len(head.segments) == 3
    head = ScriptedHead(Continuous(window=1), drafter=None)
    head.ask(1, (5,))
    assert head.ask(2, (5,)) == [opens(2)], "the window holds one segment"
    assert head.back({0: 8}, request=1) == [emits(8, request=1), sends(1, request=1), sends(0, request=2)], (
        "nor does a prompt then"
    )
    assert head.back({1: 8}, request=1) == [emits(8, request=1), sends(2, request=1)]
    assert len(head.segments) == 2


def test_a_node_is_sent_while_its_value_pays_for_the_time_it_adds() -> None:
    """10 ms for each row: a node must be worth as many tokens as come in the time that it costs."""
    head = timed(ScriptedHead(Continuous()), (1, 0.010), (64, 0.640), rate=4)
    least = head.core.costs.rate * head.core.costs.marginal_s(2)
    assert 0.02 < least < 0.2
    head.ask()
    assert head.propose({2: [(10, 0.5), (11, 1.2 * least), (12, 0.8 * least), (13, 0.5 * least)]})[
        0
    ] == sends(3, 4)
    # With rows that cost nothing, everything above the least value is sent.
    free = timed(ScriptedHead(Continuous()), (1, 0.010), (64, 0.010), rate=4)
    free.ask()
    assert free.propose({2: [(10, 0.5), (11, 0.12), (12, 0.08), (13, 0.05), (14, 0.001)]})[0] == sends(
        3, 4, 5, 6
    )


def test_a_segment_is_followed_by_the_next_when_the_bottleneck_is_done_with_it() -> None:
    head = timed(ScriptedHead(Continuous(segment_nodes=2)), (1, 1 / 64), (2, 1 / 32))
    head.now_s = 5.0
    head.ask()
    assert head.propose({2: [(10, 0.5), (11, 0.3), (12, 0.1)]}) == [
        sends(3, 4),
        drafts(3, 4, 5),
        wakes(5 + 1 / 32),
    ]
    head.now_s += 1 / 128
    assert head.propose({}) == [], "the timer runs already"
    assert head.wake(5 + 1 / 33) == [wakes(5 + 1 / 32)], "too early: once more"
    assert head.wake(5 + 1 / 32) == [sends(5), wakes(5 + 1 / 32 + 1 / 64)]
    assert head.wake(5 + 1 / 32 + 1 / 64) == [], "nothing is left to send"


def test_requests_share_a_segment_with_the_roots_in_front() -> None:
    head = ScriptedHead(Continuous(window=3))
    assert head.ask(1, (5,)) == [opens(1), sends(0, request=1), drafts(0, request=1)]
    assert head.ask(2, (5,)) == [opens(2), sends(0, request=2)]
    assert head.propose({0: [(10, 0.5)]}) == [sends(1, request=1), ("draft", {2: (0,), 1: (1,)})]
    assert head.propose(lambda node: [(20, 0.5)] if node == 0 else []) == [drafts(1, request=2)], (
        "a guess of 2 waits for the window"
    )
    assert head.back({0: MISS}, request=1) == [
        emits(MISS, request=1),
        commits(2, base=1, request=1),
        sends_all({1: (2,), 2: (1,)}),
    ]
    assert head.back({0: 20}, request=2) == [emits(20, request=2), commits(1, base=1, request=2)]
    assert head.back() == [], "the dead guess of 1"
    assert head.back_all({1: {2: MISS}, 2: {1: MISS}}) == [
        emits(MISS, request=1),
        emits(MISS, request=2),
        sends_all({1: (3,), 2: (2,)}),
    ], "two roots that were missed at once go out at once"


def test_a_prompt_is_not_kept_waiting_by_roots_that_fill_the_window() -> None:
    head = ScriptedHead(Continuous(window=1), drafter=None)
    head.ask(1, (5,))
    head.ask(2, (5,))
    head.ask(3, range(5, 15))
    for _ in range(6):
        head.now_s += 0.01
        head.back_all({part.commit.request: dict.fromkeys(part.ids, MISS) for part in head.segments[0].parts})
    assert len(head.tokens[3]) >= 1, (
        "each root that comes back goes out again at once, and the prompt takes its turn all the same"
    )


def test_a_request_that_was_passed_over_gains_weight() -> None:
    head = timed(ScriptedHead(Continuous(segment_nodes=1, window=9)), (1, 1 / 64))
    head.ask(1, (5,))
    head.ask(2, (5,))
    assert AGE_WEIGHT == 0.25
    said = head.propose({0: [(10, 0.50), (11, 0.49), (12, 0.48)]})
    said += head.propose(lambda node: [(10, 0.45), (11, 0.44)] if node == 0 else [])
    for slot in range(1, 5):
        said += head.wake(slot / 64)
    sent = [dict(each[1]) for each in said if each[0] == "send"]
    assert sent == [{1: (1,)}, {2: (1,)}, {1: (2,)}, {2: (2,)}, {1: (3,)}], (
        "0.45 outweighs 0.49 once it has waited for a segment"
    )


def test_a_drafter_that_never_hits_ends_with_segments_of_roots_only() -> None:
    head = ScriptedHead(Continuous(), stages=4)
    head.ask(count=500)
    while not head.ends:
        if head.job is not None:
            head.propose(lambda node: [(10, 0.6), (11, 0.3)])
        segment = head.segments[0]
        head.now_s += 0.050
        rows = segment.row_count
        head.back(
            {node: MISS for node in segment.parts[0].ids if node == head.tree().root},
            hops=hops(4, rows, 0.010 + 0.001 * rows),
        )
        assert head.now_s < 100, "the answer does not end"
    assert head.tokens[1] == [MISS] * 500
    assert max(head.rows()[1:20]) > 1, "it was given a chance"
    assert set(head.rows()[-250:]) == {1}


@pytest.mark.parametrize(
    ("name", "limit"), [(name, limit) for name in METHODS for limit in ("stop", "length", "context")]
)
def test_nothing_is_run_past_the_end_of_an_answer(name: str, limit: str) -> None:
    """With a drafter that is always right: the last token of an answer and what ends it are known without a
    row."""
    head = ScriptedHead(name, context=9 if limit == "context" else 100, drafter=DrafterTraits(context=100))
    chain = {"stop": 44}.get(limit, 20)
    head.ask(count=6 if limit == "length" else 90, stop_ids=frozenset([44]))

    def token_after(node: int) -> int:
        return chain if head.tree().position(node) == 8 else 20

    for _ in range(200):
        if head.ends:
            break
        if head.job is not None:
            head.propose(lambda node: [(token_after(node), 0.9), (21, 0.05)])
        elif head.segments:
            path = [node for node in head.segments[0].parts[0].ids if node >= 2 and _is_right(head, node)]
            head.back({node: token_after(node) for node in path})
        else:
            pytest.fail("nothing is under way")
    assert (head.tokens[1], head.ends[0].reason) == ([20] * 6, "stop" if limit == "stop" else "length")
    rows = [
        row
        for segment in head.sent
        for row in zip(segment.parts[0].ids, segment.parts[0].positions, strict=True)
    ]
    assert max(position for node, position in rows if limit != "stop" or _is_right(head, node)) == (
        8 if limit == "stop" else 7
    )
    assert all(token != 44 for segment in head.sent for token in segment.parts[0].tokens)


def _is_right(head: ScriptedHead, node: int) -> bool:
    """Whether all from the prompt down to a node are what the model says."""
    tree = head.tree()
    while tree.position(node) > 2:
        if tree.token(node) != 20:
            return False
        node = tree.parent(node)
    return True


def test_no_more_nodes_are_under_way_than_the_stages_have_slots_for() -> None:
    head = ScriptedHead(Continuous(window=60), stages=30)
    head.ask()
    for _ in range(60):
        if head.job is not None:
            head.propose(lambda node: [(token, 0.4) for token in range(3)])
        head.wake(head.now_s)
        assert head.tree().sent_alive <= limits.TREE_NODES_MAX
    assert head.tree().sent_alive == limits.TREE_NODES_MAX
    assert head.tree().alive_count > limits.TREE_NODES_MAX, "more is drafted"
    said = head.back({2: 2})
    assert kinds(said)[:3] == ["emit", "commit", "send"], "what died makes room"
    assert head.tree().sent_alive == min(head.tree().alive_count, limits.TREE_NODES_MAX)


def test_the_drafter_rests_when_the_next_segments_are_full_of_better_nodes() -> None:
    head = ScriptedHead(Continuous(window=1, batch=4))
    head.ask()
    passes = 0
    while head.job is not None:
        head.propose(lambda node: [(token, 0.3) for token in range(3)])
        passes += 1
        assert passes < 60
    tree, knows = head.tree(), head.request().drafter_states[0].knows
    unsent = sorted(
        (tree.value(node) for node in tree.living() if tree.state(node) is NodeState.DRAFTED), reverse=True
    )
    unasked = max(tree.value(node) for node in tree.living() if not knows(node))
    assert VALUE_MIN < unasked <= unsent[BACKLOG_SEGMENTS * 4 - 1]
    head.back({2: MISS})
    assert head.job is not None, "a new root is always worth a pass"


def test_no_timer_is_set_while_the_window_is_full() -> None:
    head = timed(ScriptedHead(Continuous(segment_nodes=2, window=2)), (1, 0.010), (2, 0.020))
    head.ask()
    assert head.propose({2: [(10, 0.5), (11, 0.3), (12, 0.1)]}) == [sends(3, 4), drafts(3, 4, 5)]
