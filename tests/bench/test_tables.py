"""Tables for a terminal: no word is broken, whatever the width."""

from __future__ import annotations

import pytest

from flowspec.bench import console

COLUMNS = ("device", "torch", "interface", "from here")
ROWS = [
    ("raspberry-pi-5-1", "2.13.0+cpu", "eth0, wired 1000 Mbit/s", "0.50 ms, 941 Mbit/s"),
    ("jetson", "2.9.1 (CUDA 13.0)", "-", "[bold]1[/]"),
]


@pytest.mark.parametrize("width", [140, 80, 60, 45])
def test_a_wide_table_goes_on_below_and_breaks_no_word(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PLAIN_WIDTH", width)
    console.show_table(COLUMNS, ROWS)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    for cell in (*COLUMNS, *(cell for row in ROWS for cell in row)):
        assert cell in text, "whole, and not as markup"
    tables = text.split("\n\n")
    assert len(tables) == {140: 1, 80: 2, 60: 2, 45: 3}[width]
    assert all(table.startswith("device") for table in tables)


def test_a_text_that_is_wider_than_the_terminal_is_broken_between_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PLAIN_WIDTH", 30)
    why = "another program listens at its address and does not answer"
    console.show_table(("name", "state"), [("pi", why)])
    assert [word for line in capsys.readouterr().out.splitlines()[1:] for word in line.split()][
        1:
    ] == why.split()


def test_numbers_stand_at_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    console.show("rates", ("method", "tokens/s"), [("ar", 1.5), ("ours", None)])
    assert capsys.readouterr().out.splitlines() == [
        "",
        "rates",
        "method  tokens/s",
        "ar         1.500",
        "ours           -",
    ]
