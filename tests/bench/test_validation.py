"""Beside published figures: rates, ratios and how far they are apart, for as much as was run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowspec.bench.config import Published
from flowspec.bench.outcome import Record
from flowspec.bench.validation import lines_of, markdown, show_validation, validate
from tests.bench.benches import boards, synthetic
from tests.bench.records import record

PUBLISHED = Published(
    testbed="two boards",
    temperature=0.0,
    reference="chunk-pp",
    tokens_per_s={"chunk-pp": 5.0, "ar": 2.0},
    fitted=True,
)
RECORDS = [
    record("chunk-pp", "a", 10, 2.0),
    record("chunk-pp", "b", 50, 8.0),
    record("ar", "a", 30, 10.0),
    record("ar", "a", 30, 1.0, temperature=1.0),
    record("ar", "a", 30, 1.0, testbed="elsewhere"),
    record("continuous", "a", 30, 1.0),
]


BENCH = synthetic(testbeds=(boards(name="two boards", slowdown=1.31),))


def rows(records: list[Record], *published: Published) -> list[dict[str, object]]:
    return validate(replace(BENCH, published=published or (PUBLISHED,)), records)


def test_a_rate_is_all_tokens_by_all_time_and_a_ratio_is_to_the_reference() -> None:
    assert rows(RECORDS) == [
        {
            "testbed": "two boards",
            "temperature": 0.0,
            "method": method,
            "published_tokens_per_s": published,
            "tokens_per_s": pytest.approx(found),
            "published_ratio": pytest.approx(published / 5),
            "ratio": pytest.approx(found / 6),
            "deviation": pytest.approx((found / 6) / (published / 5) - 1),
            "rate_deviation": pytest.approx(found / published - 1),
            "fitted": method == "chunk-pp",
            "reference": "chunk-pp",
            "slowdown": 1.31,
            "head_slowdown": 1.0,
        }
        for method, published, found in (("chunk-pp", 5.0, 6.0), ("ar", 2.0, 3.0))
    ]


def test_answers_without_a_second_token_do_not_count() -> None:
    short = [record("ar", "b", 0, 0.0), record("ar", "c", -1, 0.0), record("chunk-pp", "b", 0, 0.0)]
    assert rows([*RECORDS, *short]) == rows(RECORDS)
    assert rows(short) == []


def test_what_was_not_run_has_no_row() -> None:
    assert rows([]) == []
    assert rows([each for each in RECORDS if each.method != "chunk-pp"]) == [], (
        "without the reference there is no ratio"
    )
    assert [row["method"] for row in rows([each for each in RECORDS if each.method != "ar"])] == ["chunk-pp"]


def test_every_published_table_has_its_rows_and_the_fitted_ones_are_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hot = Published(testbed="two boards", temperature=1.0, reference="ar", tokens_per_s={"ar": 20.0})
    found = rows(RECORDS, PUBLISHED, hot)
    assert [(row["temperature"], row["method"], row["ratio"]) for row in found] == [
        (0.0, "chunk-pp", 1.0),
        (0.0, "ar", pytest.approx(0.5)),
        (1.0, "ar", 1.0),
    ]
    show_validation(found, "simulated", "1 prompt")
    said = capsys.readouterr().out
    assert "two boards, beside published figures; slowdown 1.31 (head 1)" in said
    assert max(map(len, said.splitlines())) <= 80
    assert "with all prompts: of 1 prompt these columns mean next to nothing." in " ".join(said.split())
    lines = [line.split() for line in said.splitlines()]
    assert ["chunk-pp", "*", "5.00", "6.00", "1.00", "1.00", "+0%"] in lines
    assert ["ar", "2.00", "3.00", "0.40", "0.50", "+25%"] in lines
    assert ["ar", "at", "temperature", "1", "20.0", "30.0", "1.00", "1.00", "+0%"] in lines


def test_the_summary_has_the_table_with_the_fitted_slowdown() -> None:
    found = rows(RECORDS)
    assert lines_of(found)[0] == [
        "two boards: chunk-pp *",
        *("5.00", "6.00", "1.00", "1.00", "+0%", "1.31 (head 1)"),
    ]
    said = markdown(found, "simulated", "")
    assert "## Beside published figures (simulated)" in said
    assert "| two boards: ar | 2.00 | 3.00 | 0.40 | 0.50 | +25% | 1.31 (head 1) |" in said
    assert markdown([], "simulated", "") == ""
