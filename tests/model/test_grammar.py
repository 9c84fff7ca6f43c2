"""Masks of grammars, against languages that are small enough to be written out; and the last slice computes
them while its layers run: the same tokens are drawn, a dead row is asked nothing, and nothing runs on."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Grammar, Sampling
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.core.stage.events import RunLayers
from flowspec.core.text_before import TextBefore
from flowspec.draft.ranking import Ranker
from flowspec.errors import InputError
from flowspec.model import sampler
from flowspec.model.ahead import Ahead
from flowspec.model.grammar import SIZE_MAX, check_size, size_of
from flowspec.model.sampler import Sampler
from flowspec.model.slice import Slice
from flowspec.validation import checked
from tests.checkpoints import VOCABULARY_SIZE
from tests.model.slices import job_of, load_stages, part_of
from tests.model.test_sampler import naive_draw
from tests.nightly import nightly

pytest.importorskip("llguidance")

from flowspec.model.grammar import (
    GrammarMasks,
    GrammarVocabulary,
    Mask,
    check_grammar,
    common_beginning,
    is_whole,
)

END, OTHER_END, MARK, PADDING = 0, 1, 2, 3
BYTES = tuple(bytes([byte]) for byte in range(256))
WORDS = (
    b"ab",
    b"ba",
    b"abab",
    b'{"',
    b'":',
    b'": ',
    b'",',
    b', "',
    b"tr",
    b"true",
    b"\xc3\xa9",
    b"a\xc3",
    b"ab",
)
TEXTS = (b"", b"", b"", b"", *BYTES, *WORDS)
"""Two tokens that end an answer, a mark, padding, every byte, and words; one of them twice."""
VOCABULARY = GrammarVocabulary(TokenBytes(TEXTS))


def grammar(kind: str, text: str, ends: tuple[int, ...] = (END, OTHER_END)) -> Grammar:
    return Grammar(kind=kind, text=text, ends=ends)


def written(values: Iterable[object]) -> set[bytes]:
    """JSON documents in every way that the grammar may write them: with a space behind a comma or a colon, or
    without."""
    found = set()
    for value in values:
        pieces = re.split("([\x00\x01])", json.dumps(value, separators=("\x00", "\x01"), ensure_ascii=False))
        ways = [{"\x00": (",", ", "), "\x01": (":", ": ")}.get(piece, (piece,)) for piece in pieces]
        found |= {"".join(way).encode() for way in itertools.product(*ways)}
    return found


LANGUAGES = {
    ("regex", "(ab){1,3}|b?"): {b"ab", b"abab", b"ababab", b"b", b""},
    ("regex", "é|aé?"): {"é".encode(), b"a", "aé".encode()},
    ("regex", r"[a\-b]\.\n"): {b"a.\n", b"-.\n", b"b.\n"},
    ("lark", 'start: x | "b" start_b\nx: "a" | "ab"\nstart_b: /b{2}/'): {b"a", b"ab", b"bbb"},
    ("json_schema", '{"enum": ["ab", "a", true, 12]}'): {b'"ab"', b'"a"', b"true", b"12"},
    ("json_schema", '{"type": "array", "items": {"type": "boolean"}, "maxItems": 1}'): written(
        [[], [True], [False]]
    ),
    (
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "properties": {"a": {"const": 12}, "b": {"type": "null"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        ),
    ): written([{"a": 12}, {"a": 12, "b": None}]),
}


def may_follow(language: set[bytes], text: bytes, texts: Sequence[bytes] = TEXTS) -> set[int]:
    """By the definition: what leaves the text the beginning of one of the language, or ends it."""
    found = {
        token
        for token, own in enumerate(texts)
        if own and any(whole.startswith(text + own) for whole in language)
    }
    return found | ({END, OTHER_END} if text in language else set())


def ids(masks: GrammarMasks, path: Sequence[int]) -> set[int]:
    return set(np.flatnonzero(masks.allowed(path)).tolist())


def text_of(path: Sequence[int], texts: Sequence[bytes] = TEXTS) -> bytes:
    return b"".join(texts[token] for token in path)


def paths_of(language: set[bytes], texts: Sequence[bytes] = TEXTS) -> list[tuple[int, ...]]:
    """Every way to write the beginning of a text in tokens."""
    found: list[tuple[int, ...]] = []
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        path = waiting.pop()
        found.append(path)
        follow = may_follow(language, text_of(path, texts), texts) - {END, OTHER_END}
        waiting += [(*path, token) for token in sorted(follow)]
    return found


@pytest.mark.parametrize("spec", LANGUAGES, ids=lambda spec: spec[1][:30])
def test_a_mask_is_what_can_still_become_a_text_of_the_language_and_else_the_end(
    spec: tuple[str, str],
) -> None:
    """On every path there is, and in an order that goes back and forth between branches."""
    language = LANGUAGES[spec]
    masks = GrammarMasks(grammar(*spec), VOCABULARY)
    paths = paths_of(language)
    assert len(paths) > len(language)
    for path in random.Random(1).sample(paths, min(len(paths), nightly(300, len(paths)))):
        text = text_of(path)
        assert ids(masks, path) == may_follow(language, text), path
        assert masks.is_whole(path) == (text in language)
    # And what is asked there changes nothing of what is asked elsewhere.
    for path in filter(lambda path: len(path) <= 2, paths):
        allowed = may_follow(language, text_of(path))
        wrong = next(token for token in (4 + ord("z"), MARK, END, len(TEXTS)) if token not in allowed - {END})
        for gone in ((*path, wrong), (*path, wrong, 4 + ord("a"))):
            assert ids(masks, gone) == {END, OTHER_END}
            assert not masks.is_whole(gone)
        assert ids(masks, path) == allowed


def test_marks_are_where_a_reply_names_them_and_nowhere_else() -> None:
    """By the definition again, where two special tokens are written as bytes that are in no text."""
    marks = {PADDING: b"\xf8", MARK: b"\xf9"}
    texts = [marks.get(token, b"" if text in marks.values() else text) for token, text in enumerate(TEXTS)]
    text = 'start: /b?/ mark_0 ("ab" mark_1 | mark_1 "a"){1,2} | "a"'
    ways = {b"ab\xf9", b"\xf9a"}
    language = {b"a"} | {
        before + b"\xf8" + one + more for before in (b"", b"b") for one in ways for more in (*ways, b"")
    }
    bound = structs.replace(grammar("reply", text), marks=tuple(marks))
    masks = GrammarMasks(bound, VOCABULARY)
    paths = paths_of(language, texts)
    random.Random(1).shuffle(paths)
    for path in paths:
        written = text_of(path, texts)
        assert ids(masks, path) == may_follow(language, written, texts), path
        assert masks.is_whole(path) == is_whole(bound, VOCABULARY.tokens, path) == (written in language)
    gone = next(path for path in paths if PADDING not in path and path)
    assert ids(masks, (*gone, MARK)) == {END, OTHER_END}
    assert len(paths) > 50


def test_only_a_reply_has_marks_and_none_that_ends_an_answer() -> None:
    with pytest.raises(ValueError, match="marks: expected none but in a reply"):
        structs.replace(grammar("regex", "a"), marks=(MARK,))
    for marks in ((MARK, MARK), (END,), (-1,)):
        with pytest.raises(ValueError, match="marks"):
            checked(structs.replace(grammar("reply", "start: mark_0"), marks=marks))
    with pytest.raises(InputError, match=r"lark: .*mark_0"):
        check_grammar("lark", "start: mark_0")


def test_at_a_limit_a_mask_is_still_that_of_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked before makes states that count against the limit, or that need not be made again."""
    given_up = begun_anew = 0
    anew = GrammarMasks._start_anew

    def start_anew(masks: GrammarMasks) -> None:
        nonlocal begun_anew
        begun_anew += 1
        anew(masks)

    monkeypatch.setattr(GrammarMasks, "_start_anew", start_anew)
    for most in (40, 80, 150, 300):
        monkeypatch.setattr("flowspec.model.grammar.LEXER_STATES_MAX", most)
        bound = grammar("regex", ".{0,60}ab.{0,60}(a|b)*a(a|b){6}")
        warm = GrammarMasks(bound, VOCABULARY)
        rng = random.Random(most)
        path: list[int] = []
        for _ in range(30):
            for other in rng.sample(range(4, 100), 3):  # wrong guesses beside the path
                warm.allowed([*path, other])
            before = begun_anew
            here = ids(warm, path)
            given_up += begun_anew - before == 2
            assert here == ids(GrammarMasks(bound, VOCABULARY), path)
            follow = sorted(here - {END, OTHER_END})
            if not follow:
                break
            path.append(rng.choice(follow))
    assert given_up
    assert begun_anew > 4 * 30 + 2 * given_up, "some limit was reached by what other paths had made"


def test_what_the_vocabulary_cannot_write_or_would_lose_is_not_allowed() -> None:
    spaced = GrammarVocabulary(TokenBytes((b"", b" a", b"a", b" ", b" b"), drops_first_space=True))
    masks = GrammarMasks(grammar("regex", " ?a b?", (0,)), spaced)
    assert ids(masks, ()) == {2}
    assert ids(masks, (2,)) == {3, 4}
    assert ids(GrammarMasks(grammar("regex", " a", (0,)), spaced), ()) == {0}
    poor = GrammarVocabulary(TokenBytes((b"", b"a", b"c")))
    masks = GrammarMasks(grammar("regex", "abc|ac", (0,)), poor)
    assert ids(masks, ()) == {1}
    assert ids(masks, (1,)) == {2}
    stuck = GrammarMasks(grammar("regex", "abc", (0,)), poor)
    assert ids(stuck, (1,)) == {0}
    assert not stuck.is_whole((1,))


def among(sampling: Sampling, allowed: Sequence[int], size: int) -> Sampling:
    """The same without a grammar, by tokens that are never drawn."""
    others = tuple(token for token in range(size) if token not in allowed)
    return structs.replace(sampling, grammar=None, suppress_tokens=others)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"top_p": 0.3}, {"min_p": 0.2}], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_drawn_is_drawn_among_the_allowed_tokens(
    temperature: float, filters: dict[str, float]
) -> None:
    """Filters look at these alone, whether they are one, a few or many."""
    language = {b"ab", b"abab", b"ababab", b"b", b""}
    bound = grammar("regex", "(ab){1,3}|b?")
    wide = grammar("regex", "[^x]*y", (END,))
    rng = np.random.default_rng(4)
    size = len(TEXTS) + 7
    for seed in range(nightly(8, 40)):
        logits = rng.normal(0, 3, size).astype(np.float32)
        sampling = Sampling(temperature=temperature, seed=seed, grammar=bound, **filters)
        for path in ((), (4 + ord("a"),), (256 + 4,), (4 + ord("b"),)):
            allowed = sorted(may_follow(language, text_of(path)))
            text = TextBefore(np.array([9, 9, *path]), 2)
            sampler = Sampler(sampling, size, VOCABULARY)
            drawn = sampler.draw(logits, 2 + len(path), text)
            assert drawn == naive_draw(logits, among(sampling, allowed, size), 2 + len(path))
            assert Sampler(sampling, size).draw(logits, 2, text) in (END, OTHER_END)
        free = structs.replace(sampling, grammar=wide)
        mask = GrammarMasks(wide, VOCABULARY).allowed(())
        allowed = np.flatnonzero(mask).tolist()
        assert len(allowed) > 100
        drawn = Sampler(free, size, VOCABULARY).draw(logits, 1, TextBefore(np.array([9]), 1))
        assert drawn == naive_draw(logits, among(free, allowed, size), 1)


def test_biases_count_as_long_as_they_leave_a_token() -> None:
    bound = grammar("regex", "a|b", (END,))
    a, b = 4 + ord("a"), 4 + ord("b")
    logits = np.zeros(len(TEXTS), dtype=np.float32)
    logits[b], logits[7] = 1.0, 9.0
    text = TextBefore(np.array([9]), 1)

    def drawn(**fields: Any) -> int:
        return Sampler(Sampling(grammar=bound, **fields), len(TEXTS), VOCABULARY).draw(logits, 1, text)

    assert drawn() == b
    assert drawn(logit_bias=((a, 2.0),)) == a
    assert drawn(suppress_tokens=(b,)) == a
    assert drawn(suppress_tokens=(a, b)) == b
    ranker = Ranker(len(TEXTS))
    ranker.take_grammars(VOCABULARY)
    (children,) = ranker.best(logits[None], [(Sampling(grammar=bound), 1)], 4, [text])
    assert children.tokens == (b, a)
    some = Ranker(len(TEXTS), ids=np.array([5, 7, a]))
    some.take_grammars(VOCABULARY)
    (children,) = some.best(logits[None, [5, 7, a]], [(Sampling(grammar=bound), 1)], 4, [text])
    assert children.tokens == (a,)
    some.take_grammars(None)
    (children,) = some.best(logits[None, [5, 7, a]], [(Sampling(grammar=bound), 1)], 2, [text])
    assert children.tokens == (7, 5)


DATA = json.loads((Path(__file__).parents[1] / "data/grammars.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [*DATA["refused"], ("json_schema", "[" * 5000, "got text that is no JSON document")],
    ids=lambda each: each[:30],
)
def test_what_cannot_be_obeyed_is_refused_in_one_line(kind: str, text: str, told: str) -> None:
    with pytest.raises(InputError) as found:
        check_grammar(kind, text)
    line = str(found.value)
    assert told in line
    assert line.startswith(f"{kind}: ")
    assert "\n" not in line
    assert len(line) < 300


@pytest.mark.parametrize(("schema", "place"), DATA["places of faults"], ids=str)
def test_the_place_of_a_fault_is_told(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InputError) as found:
        check_grammar("json_schema", json.dumps(schema))
    assert str(found.value).startswith(f"json_schema{place}: llguidance refuses it: ")


def largest(part: str, wrap: str) -> str:
    """As many parts as fit into the largest grammar."""
    count = (limits.GRAMMAR_BYTES_MAX - len(wrap)) // (len(part % 9999) + 1)
    return wrap % ",".join(part % number for number in range(1000, 1000 + min(count, 8999)))


HEAVY = {
    "enum": ("json_schema", largest('"v%d"', '{"enum": [%s]}')),
    "patterns": (
        "json_schema",
        largest('"p%d": {"type": "string", "pattern": "^(a|b)*a(a|b){9}$"}', '{"properties": {%s}}'),
    ),
    "deep": ("json_schema", '{"items":' * 7000 + "{}" + "}" * 7000),
    "counts": ("regex", "((((a{99}){99}){99}){99}){99}"),
    "behind": ("regex", "(a|b)*a(a|b){30}" * 1000),
    "words": ("regex", r"\w{1,9000}"),
}


@pytest.mark.parametrize("name", HEAVY)
def test_the_heaviest_are_refused_or_masked_in_bounded_time(name: str) -> None:
    kind, text = HEAVY[name]
    began_s, rng = time.process_time(), random.Random(3)
    with contextlib.suppress(InputError):
        check_grammar(kind, text)
        masks = GrammarMasks(grammar(kind, text), VOCABULARY)
        path: list[int] = []
        while len(path) < 20 and (follow := sorted(ids(masks, path) - {END, OTHER_END})):
            path.append(rng.choice(follow))
    assert time.process_time() - began_s < 25


def test_token_bytes_travel_as_they_are() -> None:
    tokens = TokenBytes(TEXTS, drops_first_space=True)
    assert TokenBytes.unpack(tokens.packed) == tokens
    assert TokenBytes.unpack(memoryview(tokens.packed)).digest == tokens.digest
    assert TokenBytes(TEXTS).digest != tokens.digest
    for broken in (b"", tokens.packed[:-1], tokens.packed + b"x", b"\xff" * 9, b"\x00" * 20):
        with pytest.raises(ValueError, match="tokens: expected"):
            TokenBytes.unpack(broken)
    with pytest.raises(ValueError, match="1024 bytes each"):
        TokenBytes((b"x" * 1025,))


def test_what_two_answers_both_begin_with() -> None:
    rng = random.Random(0)
    for _ in range(300):
        first = [rng.randrange(2) for _ in range(rng.randrange(12))]
        second = [*first[: rng.randrange(13)], *(rng.randrange(2) for _ in range(rng.randrange(4)))]
        whole = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        assert common_beginning(first, second) == common_beginning(second, first) == len(list(whole))


# --------------------------------------------------------------------------------------- sizes of schemas


@pytest.mark.parametrize(
    ("schema", "size"), [*DATA["sizes of schemas"], ({"minItems": 10**400}, SIZE_MAX + 1)]
)
def test_schemas_and_items_are_counted(schema: dict[str, Any], size: int | None) -> None:
    found = size_of(schema)
    assert size is None or found == size


def test_sizes_are_counted_without_doubling_and_only_of_places_here() -> None:
    """2 to the 200th ways through it, in 200 schemas."""
    named: dict[str, Any] = {"A0": {"type": "integer"}}
    for place in range(200):
        both = {key: {"$ref": f"#/$defs/A{place}", "minimum": 1} for key in "xy"}
        named[f"A{place + 1}"] = {"type": "object", "properties": both}
    found = size_of({"$ref": "#/$defs/A200", "required": ["x"], "$defs": named})
    with pytest.raises(InputError, match="expected at most 16384 schemas and items"):
        check_size(found)
    with pytest.raises(InputError, match="expected a \\$ref to a place here"):
        size_of({"$ref": "#anchor", "minItems": 3})
    assert size_of({"$ref": "#anchor"}) == 1
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(InputError, match="expected fewer schemas in schemas"):
        size_of(deep)


# ------------------------------------------------------------------------------------------------ masks ahead

PROMPT = (90, 91)
LETTERS = b"ab"
SPELLED = (b"", *(bytes([LETTERS[token % 2]]) * (1 + token // 2 % 3) for token in range(1, VOCABULARY_SIZE)))
"""Every token but the one that ends an answer writes one, two or three letters."""
BOUND = Sampling(temperature=1.0, seed=3, grammar=Grammar(kind="regex", text="(aab?|b){3,9}", ends=(0,)))
ROWS = 8


@pytest.fixture(scope="module")
def loaded(variant: Callable[[str], Path]) -> Slice:
    (found,) = load_stages(variant("llama-grouped"), 1)
    found.grammars = GrammarVocabulary(TokenBytes(SPELLED))
    return found


@pytest.fixture
def part(loaded: Slice, monkeypatch: pytest.MonkeyPatch) -> Slice:
    """As of a large vocabulary, on a machine with cores."""
    monkeypatch.setattr(sampler, "BESIDE_TOKENS_MIN", 1)
    monkeypatch.setattr(sampler.os, "sched_getaffinity", lambda of: {0, 1})
    return loaded


def job(request: int, sampling: Sampling = BOUND) -> tuple[RunLayers, list[tuple[int, ...]]]:
    """The prompt and, below it, guesses in two branches; and the path of each row of the answer."""
    tokens = [*PROMPT, 4, 2, 6, 1, 3, 9]
    parents = [-1, 0, 1, 2, 3, 1, 5, 6]
    paths: list[tuple[int, ...]] = []
    for token, above in zip(tokens, parents, strict=True):
        paths.append((*(paths[above] if above >= 0 else ()), token))
    own = part_of(
        request,
        tokens,
        parents,
        sampled=np.arange(ROWS) > 0,
        sampling=sampling,
        slot_tokens=np.array(tokens, dtype=np.int32),
        answer_start=len(PROMPT),
    )
    return job_of(own), [path[len(PROMPT) :] for path in paths]


def expected(part: Slice, request: int, dead: Sequence[int] = ()) -> list[int]:
    """What is drawn of each row that lives, with masks asked for at the draw."""
    run, paths = job(request)
    part.open_cache(request, 64)
    _, hidden = part.forward(run, None)
    part.close_cache(request)
    logits = part.logits(hidden)
    sampler = Sampler(BOUND, VOCABULARY_SIZE, part.grammars)
    drawn = [-1]
    for row in range(1, ROWS):
        position = len(PROMPT) + len(paths[row])
        drawn.append(sampler.draw(logits[row], position, TextBefore(np.array([*PROMPT, *paths[row]]), 2)))
    return [token for row, token in enumerate(drawn) if row not in dead]


def run_job(
    part: Slice, request: int, dead_rows: Callable[[], frozenset[int]] = frozenset
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    part.open_cache(request, 64)
    try:
        rows, _, tokens, _ = part.run(job(request)[0], None, dead_rows)
        return rows, tokens
    finally:
        part.close_cache(request)


class _Asked:
    """Notes which masks are asked for, and by which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, begin: Callable[[], None] = lambda: None) -> None:
        self.paths: list[tuple[int, ...]] = []
        self.threads: set[int] = set()
        true = GrammarMasks.allowed

        def allowed(masks: GrammarMasks, answer: Sequence[int]) -> Mask:
            begin()
            self.paths.append(tuple(answer))
            self.threads.add(threading.get_ident())
            return true(masks, answer)

        monkeypatch.setattr(GrammarMasks, "allowed", allowed)


def test_masks_are_asked_for_beside_the_layers_and_the_same_tokens_drawn(
    part: Slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = expected(part, 1)
    assert len(set(wanted)) > 3
    before = threading.active_count()
    asked = _Asked(monkeypatch)
    rows, tokens = run_job(part, 2)
    assert (rows, list(tokens)) == (tuple(range(ROWS)), wanted)
    assert asked.paths == job(2)[1][1:], "each row once, in order"
    assert threading.get_ident() not in asked.threads
    assert threading.active_count() == before


@pytest.mark.parametrize(("tokens_min", "cores"), [(VOCABULARY_SIZE + 1, {0, 1}), (1, {0})])
def test_where_a_thread_would_not_pay_there_is_none(
    part: Slice, monkeypatch: pytest.MonkeyPatch, tokens_min: int, cores: set[int]
) -> None:
    monkeypatch.setattr(sampler, "BESIDE_TOKENS_MIN", tokens_min)
    monkeypatch.setattr(sampler.os, "sched_getaffinity", lambda of: cores)
    asked = _Asked(monkeypatch)
    assert list(run_job(part, 9)[1]) == expected(part, 10)
    assert asked.threads == {threading.get_ident()}


def test_a_row_that_dies_on_the_way_needs_no_mask(part: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mask waits until layers have dropped rows."""
    wanted = expected(part, 3, dead=(3, 4, 7))
    dropped = threading.Event()
    layers = [0]

    def dead_rows() -> frozenset[int]:
        layers[0] += 1
        if layers[0] > 3:  # the layer before was told of them
            dropped.set()
        return frozenset({3, 4, 7}) if layers[0] > 1 else frozenset()

    def wait() -> None:
        assert dropped.wait(60)

    asked = _Asked(monkeypatch, wait)
    rows, tokens = run_job(part, 4, dead_rows)
    assert (rows, list(tokens)) == ((0, 1, 2, 5, 6), wanted)
    assert asked.paths == [path for row, path in enumerate(job(4)[1]) if row in (1, 2, 5, 6)]


def test_an_error_of_a_mask_is_the_pass_s(part: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    def allowed(masks: GrammarMasks, answer: Sequence[int]) -> Mask:
        raise ZeroDivisionError("of a mask")

    before = threading.active_count()
    with monkeypatch.context() as patched:
        patched.setattr(GrammarMasks, "allowed", allowed)
        with pytest.raises(ZeroDivisionError, match="of a mask"):
            run_job(part, 5)
    assert threading.active_count() == before
    assert run_job(part, 6)[1] == tuple(expected(part, 7))


# --------------------------------------------------------------------------- what is computed beside anything


class _OddError(Exception):
    pass


def test_nothing_runs_on_when_it_is_left() -> None:
    computed: list[int] = []
    begun, gate = threading.Event(), threading.Event()

    def compute(key: int) -> None:
        begun.set()
        assert gate.wait(60)
        computed.append(key)

    def leave() -> None:
        with Ahead({key: partial(compute, key) for key in range(9)}):
            assert begun.wait(60)
            raise _OddError

    before = threading.active_count()
    timer = threading.Timer(0.05, gate.set)
    timer.start()
    with pytest.raises(_OddError):
        leave()
    timer.join()
    assert threading.active_count() == before
    assert computed == [0], "what was begun is ended, and no more"
