"""Streaming text is broken between words, whatever pieces it comes in, and loses nothing but white space at
breaks: not by a live line, nor by what is told meanwhile, nor where the terminal is resized."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from flowspec.cli.console import AnswerView
from tests.cli.terminal import Terminal

WORDS = ["a", "word", "x" * 30, "\n", "\n\n", " ", "longer-word"]
SIZES = [(20, 8), (30, 9), (12, 8), (60, 12), (25, 10)]


class Screen:
    """A terminal, its console, and the view of an answer in it."""

    def __init__(self, columns: int, lines: int, status: Callable[[], str] | None = None) -> None:
        self.terminal = Terminal(columns, lines)
        self.console = Console(file=self.terminal, force_terminal=True, _environ={})  # type: ignore[arg-type]
        self.console.size = (columns, lines)  # type: ignore[assignment]
        self.view = AnswerView(self.console, status)
        self.view._live.auto_refresh = False  # the live line changes with the text alone

    def resize(self, columns: int, lines: int) -> None:
        self.terminal.resize(lines, columns)
        self.console.size = (columns, lines)  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def noting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error is the terminal: what is told is shown with the text."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def shown(pieces: list[str], width: int) -> list[str]:
    """The rows of an answer of these pieces, in a terminal that is one column wider."""
    screen = Screen(width + 1, 24)
    with screen.view as view:
        for piece in pieces:
            view.show(piece)
    terminal = screen.terminal
    assert terminal.cursor.x == 0
    past = ["".join(row[at].data for at in range(max(row, default=-1) + 1)).rstrip() for row in terminal.past]
    return [*past, *terminal.rows[: terminal.cursor.y]]


def test_words_stay_whole_and_letters_count_as_wide_as_they_are() -> None:
    pieces = ["The quick bro", "wn fox\n\n  jumps over ", "it"]
    assert shown(pieces, 12) == ["The quick", "brown fox", "", "  jumps over", "it"]
    assert [row.replace(" ", "") for row in shown(["中文 中文 中文 ab"], 9)] == ["中文中文", "中文ab"]


@given(st.lists(st.text(alphabet="ab中 \n", max_size=12), max_size=12), st.integers(4, 20))
def test_no_line_is_too_long_and_no_word_is_lost(pieces: list[str], width: int) -> None:
    text = "".join(pieces)
    rows = shown(pieces, width)
    assert rows == shown([text], width), "the pieces do not matter"
    assert "".join("".join(rows).split()) == "".join(text.split())
    assert all(cell_len(row) <= width for row in rows)


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
    count = 0

    def status() -> str:
        nonlocal count
        count += 1
        return f"busy {count}"

    screen = Screen(columns, lines, status)
    terminal = screen.terminal
    terminal.write("before\n" * chances.randrange(8))
    before = len(terminal.whole)
    pieces = pieces_of(chances)
    with screen.view as view:
        for number, piece in enumerate(pieces):
            view.show(piece)
            if number % 7 == 3:
                tell(f"(note {number})")
            assert any(row.startswith("busy ") for row in terminal.rows)
            assert sum("busy" in row for row in terminal.whole) <= 1, "the line is left behind"
    notes = [row for row in terminal.whole if row.startswith("(note ")]
    text = [row for row in terminal.whole if row not in notes]
    assert text[before:] == [row for row in shown(pieces, columns - 1) if row]
    assert len(notes) == len(range(3, len(pieces), 7))
    assert terminal.cursor.x == 0
    assert count > 20


@pytest.mark.parametrize("status", [None, lambda: "busy" * 3])
@pytest.mark.parametrize("seed", range(4))
def test_resizing_loses_no_word(seed: int, status: Callable[[], str] | None) -> None:
    chances = random.Random(seed)
    screen = Screen(*chances.choice(SIZES), status)
    pieces = pieces_of(chances)
    with screen.view as view:
        for number, piece in enumerate(pieces):
            view.show(piece)
            if number % 5 == 1:
                screen.resize(*chances.choice(SIZES))
            if number % 7 == 3:
                tell(f"(note{number})")
    found = "".join("".join(screen.terminal.whole).split())
    assert re.sub(r"\(note\d+\)", "", found) == "".join("".join(pieces).split())
    assert found.count("(note") == len(range(3, len(pieces), 7))


@pytest.mark.parametrize("seed", range(4))
def test_a_terminal_that_is_lower_than_what_is_drawn_loses_no_word_either(seed: int) -> None:
    """What has scrolled out cannot be drawn anew, so there some are twice."""
    chances = random.Random(seed)
    screen = Screen(30, 9, lambda: "")
    pieces = pieces_of(chances)
    with screen.view as view:
        for piece in pieces:
            view.show(piece)
            screen.resize(*chances.choice([(12, 5), (25, 3), (30, 9)]))
    letters = iter("".join("".join(screen.terminal.whole).split()))
    assert [each for each in "".join("".join(pieces).split()) if each not in letters] == []


def test_standard_error_is_handed_on_in_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(40, 8)
    with screen.view as view:
        view.show("It was a dark night ")
        print("one two three", "four", file=sys.stderr, flush=True)
        sys.stderr.write("half")
        assert screen.terminal.whole == ["one two three four", "It was a dark night"]
    monkeypatch.undo()
    screen = Screen(40, 8)
    with screen.view:
        tell("to a file")
    assert screen.terminal.whole == []
