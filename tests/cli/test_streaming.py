"""Streaming text is broken between words, whatever pieces it comes in, and loses nothing but white space at
breaks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.cli.streaming import WordWrap


def wrapped(pieces: list[str], width: int) -> str:
    wrap = WordWrap(width)
    return "".join([*(wrap.push(piece) for piece in pieces), wrap.finish()])


def test_words_stay_whole_and_line_ends_stay() -> None:
    assert (
        wrapped(["The quick bro", "wn fox\n\n  jumps over ", "it"], 12)
        == "The quick\nbrown fox\n\n  jumps over\nit"
    )


@given(st.lists(st.text(alphabet="ab \n", max_size=12), max_size=12), st.integers(4, 20))
def test_no_line_is_too_long_and_no_word_is_lost(pieces: list[str], width: int) -> None:
    text = "".join(pieces)
    shown = wrapped(pieces, width)
    assert shown == wrapped([text], width), "the pieces do not matter"
    assert "".join(shown.split()) == "".join(text.split())
    assert all(len(line.rstrip()) <= width for line in shown.split("\n") if len(line.split()) > 1)


@given(st.lists(st.text(max_size=12), max_size=12))
def test_without_a_width_nothing_changes(pieces: list[str]) -> None:
    assert wrapped(pieces, 0) == "".join(pieces)
