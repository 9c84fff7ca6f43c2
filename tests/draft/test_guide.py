"""What a grammar says to drafters that look at texts: beside its masks, which are computed in another way."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("llguidance")

from flowspec.core.protocol.messages import Grammar, Sampling
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.draft.guide import CERTAIN, CERTAIN_MAX, LONGEST, Guide, Words, certain_of
from flowspec.draft.lookup import LookUp, LookUpDrafter
from flowspec.model.grammar import GrammarMasks, GrammarVocabulary, in_bytes, over_bytes, single_bytes
from tests.draft.trees import Teller, segment

BYTES = tuple(bytes([byte]) for byte in range(256))
PIECES = (
    b'{"',
    b"name",
    b'":',
    b'": ',
    b'", "',
    b"am",
    b"me",
    b"tr",
    b"true",
    b"\xc3\xa9",
    b" a",
    b"ab",
    b"ab",
)
TEXTS = (b"", b"", *BYTES, *PIECES)
TOKENS = TokenBytes(TEXTS)
END = 0
SPARSE = TokenBytes((b"", *(bytes([byte]) for byte in b'{}[]":, abeflmnrstu\xc3\xa9'), b'{"', b"name"))
"""Few tokens, so that often one alone can follow."""
GRAMMARS = (
    ("regex", "(ab){1,3}|b?é"),
    ("json_schema", '{"enum": ["ab", "a", true, "é"]}'),
    (
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "properties": {"name": {"enum": ["a", "ab", "tre"]}, "e": {"type": "boolean"}},
                "required": ["name", "e"],
                "additionalProperties": False,
            }
        ),
    ),
    ("json_schema", '{"type": "array", "items": {"type": "boolean"}, "maxItems": 2}'),
)
DOUBLED = "\n".join(
    ['start: "b" n0', *(f"n{depth}: n{depth + 1} n{depth + 1}" for depth in range(40)), 'n40: "a"']
)
"""A text of 2**40 letters."""


def bound(kind: str, text: str) -> Grammar:
    return Grammar(kind=kind, text=text, ends=(END,))


@pytest.mark.parametrize("tokens", [TOKENS, SPARSE, TokenBytes(TEXTS, drops_first_space=True)])
@pytest.mark.parametrize("spec", GRAMMARS, ids=str)
def test_guesses_are_among_what_the_masks_allow_and_certain_ones_are_all_of_it(
    spec: tuple[str, str], tokens: TokenBytes
) -> None:
    """Along random paths, and with everything that there is as what was found."""
    rng = random.Random(4)
    guide = Guide(bound(*spec), Words(tokens))
    masks = GrammarMasks(bound(*spec), GrammarVocabulary(tokens))
    every = [(token, 0.5) for token in range(len(tokens.texts))]
    certain = cuts = 0
    for _ in range(12):
        path: list[int] = []
        while True:
            allowed = set(np.flatnonzero(masks.allowed(path)).tolist())
            guesses = guide.guesses(path, every, 1 << 20)
            found = {token for token, _ in guesses}
            assert len(found) == len(guesses)
            if [share for _, share in guesses] == [CERTAIN]:
                assert found == allowed
                certain += 1
            else:
                assert found == allowed - {END}
                cuts += any(share == LONGEST for _, share in guesses)
            own = guide.guesses(path, (), 4)
            assert {token for token, _ in own} <= allowed
            assert len(own) <= 1
            if not allowed - {END} or (END in allowed and rng.random() < 0.3):
                break
            path.append(rng.choice(sorted(allowed - {END})))
    assert certain + cuts > 5
    if tokens is SPARSE:
        assert certain > 5


@pytest.mark.parametrize("tokens", [TOKENS, SPARSE])
@pytest.mark.parametrize("spec", GRAMMARS, ids=str)
def test_what_is_certain_is_what_masks_of_one_token_say_one_behind_the_other(
    spec: tuple[str, str], tokens: TokenBytes
) -> None:
    rng = random.Random(5)
    certain_here = certain_of(tokens)(bound(*spec))
    masks = GrammarMasks(bound(*spec), GrammarVocabulary(tokens))
    longest = 0
    for _ in range(10):
        path: list[int] = []
        while True:
            chain: list[int] = []
            while len(only := np.flatnonzero(masks.allowed([*path, *chain])).tolist()) == 1 and only != [END]:
                chain += only
            found = list(certain_here(path))
            assert found == chain[: len(found)], "nothing is certain that is not"
            assert bool(found) == bool(chain)
            longest = max(longest, len(found))
            allowed = sorted(set(np.flatnonzero(masks.allowed(path)).tolist()) - {END})
            if not allowed:
                break
            path.append(rng.choice(allowed))
    assert longest > 1 or tokens is TOKENS
    assert certain_here([len(tokens.texts)]) == []


@pytest.mark.parametrize("spec", GRAMMARS, ids=str)
def test_what_a_guide_was_asked_before_changes_nothing(spec: tuple[str, str]) -> None:
    """Answers that branch off from the one before, go back, and hold tokens without text."""
    rng = random.Random(str(spec))
    words, answer = Words(SPARSE), list[int]()
    guide, masks = Guide(bound(*spec), words), GrammarMasks(bound(*spec), GrammarVocabulary(SPARSE))
    for _ in range(60):
        answer = answer[: rng.choice([len(answer), rng.randint(0, len(answer))])]
        if rng.random() < 0.1:
            answer = [*answer, rng.choice([END, len(SPARSE.texts)]), 1]
        elif allowed := np.flatnonzero(masks.allowed(answer)).tolist():
            answer = [*answer, rng.choice(allowed)]
        fresh, found = Guide(bound(*spec), words), [(token, 0.5) for token in range(len(SPARSE.texts))]
        assert guide.certain(answer) == fresh.certain(answer)
        assert guide.guesses(answer, found, 99) == fresh.guesses(answer, found, 99)


def test_a_question_costs_what_is_new_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    guide, asked = Guide(bound("regex", "a*"), Words(TOKENS)), 0
    answer = [2 + ord("a")] * 5000

    def counted(grammar: Grammar, tokens: TokenBytes, token: int) -> Sequence[int]:
        nonlocal asked
        asked += 1
        return in_bytes(grammar, tokens, token)

    monkeypatch.setattr("flowspec.draft.guide.in_bytes", counted)
    assert guide.certain(answer) == []
    assert asked == len(answer)
    for length in (4990, 5000, 4999):
        assert guide.certain(answer[:length]) == []
    assert asked == len(answer) + 10


@pytest.mark.parametrize("spec", [("regex", "b?a{1000000}"), ("lark", DOUBLED)], ids=("counted", "doubled"))
def test_what_is_certain_for_very_long_is_asked_for_in_parts(spec: tuple[str, str]) -> None:
    guide = Guide(bound(*spec), Words(TOKENS))
    answer = [2 + ord("b")]
    assert len(guide.certain(answer)) == CERTAIN_MAX
    assert guide.guesses(answer, [], 1)
    masks = GrammarMasks(over_bytes(bound(*spec)), single_bytes())
    assert masks.forced(list(b"b"), 5) == list(b"aaaaa")


def test_behind_what_left_the_grammar_nothing_is_guessed() -> None:
    guide = Guide(bound("regex", "ab+"), Words(TOKENS))
    wrong = 2 + ord("x")
    assert guide.guesses([wrong], [(2 + ord("b"), 0.9)], 4) == []
    assert guide.guesses([END], [(2 + ord("a"), 0.9)], 4) == []
    assert guide.guesses([len(TEXTS)], [(2 + ord("a"), 0.9)], 4) == []
    assert guide.guesses([2 + ord("a")], [(len(TEXTS), 0.9)], 4)[0][0] == 2 + ord("b")


class Echo(LookUp):
    """Proposes the last token again, and one that stands for no text."""

    def propose(self, branch: Sequence[int], width: int) -> list[tuple[int, float]]:
        return [((*self.tokens, *branch)[-1], 0.75), (END, 0.25)][:width]


@pytest.mark.parametrize("knows_tokens", [True, False])
def test_a_drafter_guesses_by_the_answer_of_its_own_branch(knows_tokens: bool) -> None:
    """The prompt is no part of what the grammar binds."""
    drafter = LookUpDrafter(Echo)
    if knows_tokens:
        drafter.take_tokens(TOKENS)
    a, b, x = (2 + byte for byte in b"abx")
    teller = Teller(1, Sampling(grammar=bound("regex", "a+b?x")))
    teller.begin([x, a, b])
    first = teller.add(teller.root, a)
    second, other = teller.add(first, a), teller.add(first, b)

    def proposed(nodes: list[int]) -> dict[int, tuple[int, ...]]:
        part = teller.part(nodes, committed=teller.missing())
        return {proposal.node: proposal.tokens for proposal in drafter.draft(segment(part), 4)}

    if not knows_tokens:
        assert proposed([teller.root, first]) == {teller.root: (b, END), first: (a, END)}
        return
    assert proposed([teller.root, first, second, other]) == {
        teller.root: (a,),
        first: (a,),
        second: (a,),
        other: (x,),
    }
    teller.commit(first)
    below = teller.add(second, b)
    assert proposed([below]) == {below: (x,)}
    teller.sampling = Sampling()
    teller.begin([x, a], keep=1)
    assert proposed([teller.root]) == {teller.root: (a, END)}


def test_marks_of_a_reply_are_certain_where_the_masks_have_one_bit() -> None:
    words = (b"<", b">", b"a", b"b", b'{"a": ', b'{"', b"a", b"1", b"2", b"}", b"\n")
    tokens = TokenBytes((*words, b"", b"", b""))
    first, second, end = range(len(words), len(words) + 3)
    text = 'start: mark_0 "{\\"a\\": " /[12]/ "}" mark_1'
    grammar = Grammar(kind="reply", text=text, ends=(end,), marks=(first, second))
    guide, masks = Guide(grammar, Words(tokens)), GrammarMasks(grammar, GrammarVocabulary(tokens))
    whole = (first, 4, 7, 9, second)
    certain = 0
    for length in range(len(whole)):
        allowed = np.flatnonzero(masks.allowed(whole[:length])).tolist()
        guesses = guide.guesses(whole[:length], [(token, 0.5) for token in range(end)], 16)
        assert {token for token, _ in guesses} == set(allowed)
        certain += guesses == [(allowed[0], CERTAIN)]
        assert (guesses[0][1] == CERTAIN) == (len(allowed) == 1)
    assert certain == 3, "both marks, and the bracket before the second"
    assert guide.guesses(whole, [], 4) == []
