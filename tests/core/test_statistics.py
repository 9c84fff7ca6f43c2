"""The figures of an answer follow from what was counted, and an answer of nothing has figures too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowspec.core.head.statistics import Statistics
from flowspec.core.protocol.messages import Hop


def hop(
    compute_s: float,
    *,
    queued_s: float = 0.0,
    own_s: float = 0.0,
    rows: int = 8,
    dead: tuple[int, int, int] = (0, 0, 0),
) -> Hop:
    return Hop(
        received_s=0.0,
        queued_s=queued_s,
        compute_s=compute_s,
        own_s=own_s,
        rows=rows,
        dead_in_queue=dead[0],
        dead_between_layers=dead[1],
        dead_late=dead[2],
    )


def picked(report: dict[str, Any], *names: str) -> list[Any]:
    return [report[name] for name in names]


def test_tokens_are_counted_by_segment_and_by_commit() -> None:
    found = Statistics(
        stage_count=2,
        submitted_s=10.0,
        nodes_drafted=50,
        dropped_alive=3,
        draft_passes=7,
        draft_rows=41,
        draft_s=0.25,
    )
    for window in (3, 4, 4, 5):
        found.sent(6, window)
    found.emitted(1, 12.0)
    found.emitted(4, 12.5)
    found.emitted(5, 13.5)
    found.tokens_in_flight = 6
    report = found.report()
    assert picked(
        report, "segments", "committing_segments", "nodes_sent", "nodes_drafted", "dropped_alive"
    ) == [4, 2, 24, 50, 3]
    assert picked(report, "tokens_per_commit", "acceptance_length", "window") == [
        4.5,
        2.25,
        4.0,
    ]
    assert report["share_in_flight"] == pytest.approx(6 / 9, abs=1e-4), "of the tokens after the first"
    assert picked(report, "prefill_s", "decode_s") == [2.0, 1.5]
    assert picked(report, "draft_passes", "draft_rows", "draft_s") == [7, 41, 0.25]


def test_the_tokens_of_a_prompt_come_from_no_segment_after_it() -> None:
    """`/stats` told of 14 segments, of which 15 gave tokens; a lost pipeline's prompt is sent once more."""
    found = Statistics(stage_count=2)
    for number in range(4):
        found.emitted(1, float(number))
        found.sent(1, 1)
        if number == 2:
            found.lost(0.5, 2.5)
            found.admitted(2.7)
    report = found.report()
    assert picked(report, "segments", "committing_segments", "tokens_per_commit") == [4, 2, 1.0]


def test_the_time_of_a_segment_is_shared_by_what_each_request_had_in_it() -> None:
    found = Statistics(stage_count=2, submitted_s=1.0)
    found.landed([hop(0.2, queued_s=0.1, own_s=0.05, dead=(4, 2, 0)), hop(0.4, dead=(0, 0, 8))], 1.0, 1.0)
    found.landed([hop(0.2, queued_s=0.1, own_s=0.05, dead=(4, 2, 0)), hop(0.4, dead=(0, 0, 8))], 0.25, 1.0)
    found.emitted(2, 3.0)
    report = found.report()
    assert picked(report, "compute_s", "queued_s", "stage_own_s", "link_s") == pytest.approx(
        [0.75, 0.125, 0.0625, 0.3125]
    )
    assert report["stage_busy"] == pytest.approx([0.25 / 2, 0.5 / 2])
    assert picked(report, "rows_computed", "dead_in_queue", "dead_between_layers", "dead_late") == [
        20,
        5,
        2,
        10,
    ]


def test_clocks_that_differ_give_no_negative_time_on_links() -> None:
    found = Statistics(stage_count=1)
    found.landed([hop(0.5)], 1.0, 0.4)
    found.landed([hop(0.1)], 1.0, 0.3)
    assert found.report()["link_s"] == pytest.approx(0.2)


@pytest.mark.parametrize("tokens", [0, 1])
def test_an_answer_of_hardly_anything_has_figures_too(tokens: int) -> None:
    found = Statistics(stage_count=3, submitted_s=4.0)
    if tokens:
        found.emitted(tokens, 4.0)
    report = found.report()
    assert picked(report, "tokens_per_commit", "acceptance_length", "share_in_flight", "window") == [
        0,
        0,
        0,
        0,
    ]
    assert picked(report, "prefill_s", "decode_s", "stage_busy") == [0, 0, []]
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_every_time_is_part_of_the_report_and_nothing_is_negative() -> None:
    found = Statistics(stage_count=1, submitted_s=100.0)
    report = found.report()
    assert all(value >= 0 for value in report.values() if not isinstance(value, list)), report
