"""Streaming text is broken between words, whatever pieces it comes in, and loses nothing but white space at
breaks: not by a live line, nor by what is told meanwhile, nor where the terminal is resized."""

from __future__ import annotations

import itertools
import random
import re
import sys
from os import terminal_size

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from flowspec.cli import streaming
from flowspec.cli.streaming import AnswerView, WordWrap, errors_to
from tests.cli.terminal import Terminal

WORDS = ["a", "word", "x" * 30, "\n", "\n\n", " ", "longer-word"]
SIZES = [(20, 6), (30, 9), (12, 5), (60, 12), (25, 3)]


def wrapped(pieces: list[str], width: int) -> str:
    wrap = WordWrap(width)
    return "".join([*(wrap.push(piece) for piece in pieces), wrap.push("", is_last=True)])


def test_words_stay_whole_and_letters_count_as_wide_as_they_are() -> None:
    pieces = ["The quick bro", "wn fox\n\n  jumps over ", "it"]
    assert wrapped(pieces, 12) == "The quick\nbrown fox\n\n  jumps over\nit"
    assert wrapped(["中文 中文 中文 ab"], 9) == "中文 中文\n中文 ab"


@given(st.lists(st.text(alphabet="ab中 \n", max_size=12), max_size=12), st.integers(4, 20))
def test_no_line_is_too_long_and_no_word_is_lost(pieces: list[str], width: int) -> None:
    text = "".join(pieces)
    shown = wrapped(pieces, width)
    assert shown == wrapped([text], width), "the pieces do not matter"
    assert "".join(shown.split()) == "".join(text.split())
    assert all(cell_len(line.rstrip()) <= width for line in shown.split("\n") if line.split())


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live line changes with the text alone."""
    monkeypatch.setattr(streaming, "EVERY_S", 1e6)


def size_of(terminal: Terminal) -> terminal_size:
    return terminal_size((terminal.columns, terminal.lines))


def pieces_of(chances: random.Random) -> list[str]:
    text = "".join(chances.choice(WORDS) + chances.choice(["", " "]) for _ in range(120))
    ends = sorted({0, len(text), *(chances.randrange(len(text)) for _ in range(60))})
    return [text[begin:end] for begin, end in itertools.pairwise(ends)]


@pytest.mark.parametrize("seed", range(6))
def test_a_live_line_and_what_is_told_leave_the_text_as_it_is(seed: int) -> None:
    """Any text in any pieces, from any row of the screen on: with the line and the notes in between, and
    without them, the same stays on the screen."""
    chances = random.Random(seed)
    columns, lines = chances.choice([20, 30]), chances.choice([6, 9])
    plain, terminal = Terminal(columns, lines), Terminal(columns, lines)
    before = "before\n" * chances.randrange(8)
    plain.write(before)
    terminal.write(before)
    count = 0

    def live() -> str:
        nonlocal count
        count += 1
        return f"busy {count}"

    pieces = pieces_of(chances)
    with AnswerView(terminal, lambda: size_of(terminal), live) as view:  # type: ignore[arg-type]
        for number, piece in enumerate(pieces):
            view.show(piece)
            if number % 7 == 3:
                view.write(f"(note {number})\n")
            with view._lock:
                assert any(row.startswith("busy ") for row in terminal.rows) or not count
                assert sum("busy" in row for row in terminal.whole) <= 1, "the line is left behind"
    plain.write(wrapped(pieces, columns - 1) + "\n")
    assert [row for row in terminal.whole if not row.startswith("(note ")] == plain.whole
    assert sum(row.startswith("(note ") for row in terminal.whole) == len(range(3, len(pieces), 7))
    assert terminal.cursor.x == 0
    assert count > 20


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("live", [None, lambda: "busy" * 3])
@pytest.mark.parametrize("seed", range(4))
def test_resizing_loses_no_word(seed: int, live: None) -> None:
    chances = random.Random(seed)
    terminal = Terminal(*chances.choice(SIZES))
    pieces = pieces_of(chances)
    with AnswerView(terminal, lambda: size_of(terminal), live) as view:  # type: ignore[arg-type]
        for number, piece in enumerate(pieces):
            view.show(piece)
            if number % 5 == 1:
                columns, lines = chances.choice(SIZES)
                terminal.resize(lines, columns)
            if number % 7 == 3:
                view.write(f"(note{number})\n")
    shown = "".join("".join(terminal.whole).split())
    assert re.sub(r"\(note\d+\)", "", shown) == "".join("".join(pieces).split())
    assert shown.count("(note") == len(range(3, len(pieces), 7))


@pytest.mark.usefixtures("still")
def test_what_comes_after_a_note_begins_no_line_with_a_blank() -> None:
    terminal = Terminal(40, 8)
    with AnswerView(terminal, lambda: size_of(terminal)) as view:  # type: ignore[arg-type]
        view.show("It was a dark night ")
        view.write("(device b is lost)\n")
        view.show("and it rained. ")
        terminal.resize(8, 12)  # the line stands on several rows now, and is not written again
        view.write("(b is back)\n")
        view.show("The end")
    assert terminal.text.startswith("(device b is lost) It was a dar k night and it rained.")
    assert terminal.whole[-2:] == ["(b is back)", "The end"]


def test_standard_error_is_handed_on_in_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(40, 8)
    with AnswerView(terminal, lambda: size_of(terminal)) as view:  # type: ignore[arg-type]
        print("one two three", "four", file=view, flush=True)
        view.write("half")
        assert terminal.whole == ["one two three four"]
        monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
        with errors_to(view):
            print("to a file", file=sys.stderr)
    assert terminal.whole == ["one two three four"]
