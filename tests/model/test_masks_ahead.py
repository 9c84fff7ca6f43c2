"""The last slice computes what a grammar allows while its layers run: the same tokens are drawn, nothing is
asked of a row that is dead, and nothing runs on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llguidance")

from flowspec.bench.checkpoints import VOCABULARY_SIZE
from flowspec.core.protocol.messages import Grammar, Sampling
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.core.stage.events import RunLayers
from flowspec.core.text_before import TextBefore
from flowspec.model import shaping
from flowspec.model.ahead import Ahead
from flowspec.model.grammar import GrammarMasks, GrammarVocabulary, Mask
from flowspec.model.sampler import Sampler
from flowspec.model.slice import Slice
from tests.model.slices import job_of, load_stages, part_of

PROMPT = (90, 91)
LETTERS = b"ab"
TEXTS = (b"", *(bytes([LETTERS[token % 2]]) * (1 + token // 2 % 3) for token in range(1, VOCABULARY_SIZE)))
"""Every token but the one that ends an answer writes one, two or three letters."""
BOUND = Sampling(temperature=1.0, seed=3, grammar=Grammar(kind="regex", text="(aab?|b){3,9}", ends=(0,)))
ROWS = 8


@pytest.fixture(scope="module")
def part(variant: Callable[[str], Path]) -> Slice:
    (found,) = load_stages(variant("llama-grouped"), 1)
    found.grammars = GrammarVocabulary(TokenBytes(TEXTS))
    return found


@pytest.fixture(autouse=True)
def _beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a large vocabulary, on a machine with cores."""
    monkeypatch.setattr(shaping, "BESIDE_TOKENS_MIN", 1)
    monkeypatch.setattr(shaping.os, "sched_getaffinity", lambda of: {0, 1})


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
    monkeypatch.setattr(shaping, "BESIDE_TOKENS_MIN", tokens_min)
    monkeypatch.setattr(shaping.os, "sched_getaffinity", lambda of: cores)
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
