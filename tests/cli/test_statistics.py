"""The statistics of an answer fit a terminal, however large its figures, and a chat shows them when asked."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from flowspec.cli import statistics
from flowspec.core.head.hop_sums import reported
from flowspec.core.head.statistics import Statistics
from flowspec.core.protocol.messages import HOP_ROWS, HOP_SECONDS, Hop
from tests import warm


def report(stages: int, scale: int) -> dict[str, Any]:
    """An answer of `4 * scale` tokens in `2 * scale` segments that took `scale` tenths of a second."""
    found = Statistics(stage_count=stages, submitted_s=1000.0)
    found.nodes_drafted, found.dropped_alive = 100 * scale, 30 * scale
    found.draft_passes, found.draft_rows, found.draft_s, found.calibration_error = (
        3 * scale,
        40 * scale,
        scale / 20,
        0.123,
    )
    hop = Hop(
        received_s=0,
        queued_s=0.01,
        compute_s=0.03,
        own_s=0.001,
        rows=32,
        dead_in_queue=8,
        dead_between_layers=4,
        dead_late=2,
    )
    for _ in range(2 * scale):
        found.sent(64, 10)
        found.landed((hop,) * stages, 1.0, 2.0)
    for number in range(scale):
        found.emitted(4, 1000.5 + number / 10)
    found.tokens_in_flight = 4 * scale - 1
    return {**found.report(), "head_s": scale / 100}


@pytest.mark.parametrize("stages", [1, 4, 16, 64])
@pytest.mark.parametrize("scale", [1, 50, 5000])
def test_no_line_is_wider_than_a_terminal(stages: int, scale: int) -> None:
    lines = statistics.lines(report(stages, scale))
    assert [line for line in lines if len(line) > statistics.WIDTH] == []
    assert " ".join(lines).count("%") == stages + 1, "one for each stage, and rho"


def test_what_was_counted_is_said() -> None:
    text = " ".join(" ".join(statistics.lines(report(2, 50))).split())
    for figure in (
        "100 after the prompt, of which 49 gave",
        "4.00 at a time",
        "window 10.0",
        "1.96 per segment",
    ):
        assert figure in text
    for figure in (
        "5000 drafted, 6400 sent, 1500 given up alive",
        "6400 run by the stages",
        "2800 dropped dead",
        "1600 in queues",
    ):
        assert figure in text
    assert "800 between layers, 400 after the last layer" in text
    assert "100% were in flight (rho)" in text
    assert "all stages: waiting 2.00, computing 6.00, own work 0.20; links 191.80, head 0.50" in text
    assert "150 passes, 2000 rows, 2.50 s; calibration error 0.123" in text


def test_every_figure_of_a_hop_is_said_and_reported() -> None:
    found = report(2, 50)
    text = " ".join(" ".join(statistics.lines(found)).split())
    for name, told in HOP_SECONDS.items():
        assert f"{told} {found[reported(name)]:.2f}" in text
    for name, told in HOP_ROWS.items():
        assert f"{found[reported(name)]} {told}" in text


def test_a_wait_for_room_is_told_where_there_was_one() -> None:
    assert not any("waited" in line for line in statistics.lines(report(2, 50)))
    assert "waited     2.25 s until the devices had memory for it" in statistics.lines(
        {**report(2, 50), "waited_s": 2.25}
    )


def test_an_answer_without_a_segment_has_a_line_too() -> None:
    assert statistics.lines({**Statistics(stage_count=2).report(), "head_s": 0.0}) == [
        "no segments were sent after the prompt"
    ]


def test_a_chat_shows_them_for_its_last_answer() -> None:
    command = [sys.executable, "-m", "flowspec.cli.main", "chat", "--local", "2", "--temperature", "0"]
    lines = "/stats\nWhat is 2 + 3?\n/stats\n/stats all\n/stats some\n/quit\n"
    done = warm.run(command, input=lines, capture_output=True, text=True, timeout=120, check=True)
    before, after = done.stdout.split("tokens/s, first after", 1)
    assert "Nothing was answered yet; /stats all tells more." in before
    first, last = after.split("/stats all tells more.\n")
    assert len(first.splitlines()[2:]) == 2, "figures, an empty line, and then two"
    assert "The last answer came at " in first
    assert "expected /stats or /stats all, got some" in last
    shown = [line.split()[0] for line in after.splitlines() if line[:11].strip() and line[9:11] == "  "]
    assert shown[:9] == [
        "prompt",
        "answer",
        "segments",
        "tokens",
        "nodes",
        "rows",
        "stages",
        "drafter",
        "seconds",
    ]
    assert all(len(line) <= 80 for line in after.splitlines())


def test_of_prompts_of_earlier_runs_no_text_is_shown() -> None:
    class Learnt:
        drafters = ("draft",)

        def expertise_report(self) -> list[dict[str, Any]]:
            return [
                {"answers": 3, "best": "draft", "worth": {"draft": 0.8}, "example": example}
                for example in ([], [5, 6])
            ]

    table = statistics.expertise_table(Learnt(), None)  # type: ignore[arg-type]
    assert table is not None
    assert list(table.columns[0].cells) == ["(in earlier runs)", "5 6"]
