"""The report on one page: what it names, and that it needs nothing beside it."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flowspec.bench import html_report
from flowspec.bench.config import Published
from flowspec.bench.outcome import Record
from flowspec.bench.plain import PlainCase
from flowspec.bench.setting import setting_of
from flowspec.bench.summary import summarise
from flowspec.bench.validation import validate
from flowspec.core.protocol.messages import Sampling
from tests.bench.benches import boards, synthetic
from tests.bench.records import record

COMMAND = ["bench", "--experiment", "by hand", "--limit", "2"]
CASE = PlainCase(
    prompt_id="a",
    domain="chat",
    prompt=(1,),
    sampling=Sampling(),
    new_tokens_max=9,
    stop_ids=frozenset(),
    answer=(2, 3),
)
RECORDS = [
    record(name, prompt, 10, seconds, acceptance=acceptance)
    for name, seconds, acceptance in (("ar", 5.0, 1.0), ("continuous", 2.0, 2.5))
    for prompt in "ab"
]


def summary_of(records: list[Record]) -> dict[str, Any]:
    bench = synthetic(testbeds=(boards(2, name="two boards"), boards(1, "raspberry-pi-5", "a Pi")))
    return summarise("by <hand>", "simulated", records) | {"setting": setting_of(bench, [CASE], COMMAND)}


class Words(HTMLParser):
    """The text of a page, and that its tags are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += f"{data} "


def test_a_report_names_what_was_run_and_what_came_of_it(tmp_path: Path) -> None:
    said = Words(html_report.page(summary_of(RECORDS), tmp_path)).text
    for text in (
        "by <hand>",
        "On 1 prompt only, continuous is 2.50 times as fast as plain decoding: 5.00 instead of 2.00 tokens",
        "simulated world : virtual time, computed from device profiles and not measured on such devices",
        "flowspec bench --experiment 'by hand' --limit 2",
        "right with probability 0.6",
        "2.50 tokens per segment sent (continuous, two boards, temperature 0)",
        "two boards : 2x jetson-orin-nano as stages, jetson-orin-nano as the head; links of 150 Mbit/s",
        "a Pi : raspberry-pi-5 as stages",
        "all 4 answers are plain decoding's, token for token",
        "flowspec 0.1.0, python 3.",
        "Speed-up over plain decoding",
        "2.50 [2.50, 2.50]",
    ):
        assert text in said


def test_what_explains_several_tables_is_said_once_below_the_last(tmp_path: Path) -> None:
    warm = [
        record(name, "a", 10, seconds, temperature=1.0)
        for name, seconds in (("ar", 5.0), ("continuous", 2.0))
    ]
    said = Words(html_report.page(summary_of([*RECORDS, *warm]), tmp_path)).text
    assert said.count("What explains it: two boards") == 2
    assert said.count("Rows dropped: of those computed") == 1
    assert said.index("Rows dropped: of those computed") > said.rindex("What explains it")


def test_the_template_is_as_wide_as_code() -> None:
    assert max(map(len, html_report.TEMPLATE.read_text("utf-8").splitlines())) <= 110


def test_published_figures_stand_beside_the_measured_ones(tmp_path: Path) -> None:
    known = Published(
        testbed="two boards", temperature=0.0, reference="ar", tokens_per_s={"ar": 4.0, "continuous": 9.0}
    )
    bench = synthetic(testbeds=(boards(2, name="two boards", slowdown=1.31),), published=(known,))
    said = Words(
        html_report.page(summary_of(RECORDS) | {"validation": validate(bench, RECORDS)}, tmp_path)
    ).text
    assert "Beside published figures testbed: method published tokens/s" in said
    assert "two boards: continuous 9.00 5.00 2.25 2.50 +11% 1.31 (head 1)" in said
    assert "Speed-up: over ar." in said


def test_a_report_needs_nothing_beside_it(tmp_path: Path) -> None:
    picture = b"\x89PNG of a timeline"
    (tmp_path / "timeline.png").write_bytes(picture)
    html_report.write_report(summary_of(RECORDS), tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert re.findall(r'src="([^"]*)"', page) == [
        f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    ]
    assert not re.search(r"href|http|url\(|<script|@import", page)


def test_a_wrong_answer_is_said(tmp_path: Path) -> None:
    wrong = [*RECORDS, record("continuous", "c", 10, 2.0, agreement="wrong")]
    said = Words(html_report.page(summary_of(wrong), tmp_path)).text
    assert "1 of 5 answers differ from plain decoding's" in said


@pytest.mark.parametrize("records", [[], RECORDS[:2], [record("pipedec", "a", 10, 1.0)]])
def test_without_a_comparison_there_is_a_report_too(tmp_path: Path, records: list[Record]) -> None:
    said = Words(html_report.page(summary_of(records), tmp_path)).text
    assert "times as fast" not in said
    assert "interval" not in said


def test_a_headline_over_many_prompts_names_no_number() -> None:
    many = summary_of(RECORDS)
    many["setting"]["prompts"] = 5
    assert str(html_report.headline(many)).startswith("continuous is 2.50 times")


def test_several_settings_are_told_from_the_least_to_the_most() -> None:
    hot = [
        record(name, "a", 10, seconds, temperature=1.0)
        for name, seconds in (("ar", 5.0), ("continuous", 4.0))
    ]
    found = html_report.headline(summary_of([*RECORDS, *hot]))
    assert (
        found
        == "On 1 prompt only, continuous is 1.25 to 2.50 times as fast as plain decoding, in 2 settings."
    )
