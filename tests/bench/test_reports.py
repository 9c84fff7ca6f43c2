"""Whatever was run comes out as tables, pages, pictures and traces; `lab/golden` records how they look."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flowspec.bench import html_report, plots, report, timeline
from flowspec.bench.config import Published
from flowspec.bench.outcome import Record
from flowspec.bench.plain import PlainCase
from flowspec.bench.setting import setting_of
from flowspec.bench.summary import summarise
from flowspec.bench.trace import Trace
from flowspec.bench.validation import show_validation, validate
from tests.bench.benches import boards, synthetic
from tests.bench.cases import made
from tests.bench.records import record

CASE: PlainCase = made("a", (2, 3))
SECONDS = {"ar": 5.0, "chunk-pp (published)": 4.0, "tree-sd tuned": 3.0, "continuous": 2.0}
PNG = b"\x89PNG\r\n\x1a\n"


def records(testbeds: int = 1, methods: dict[str, float] = SECONDS, prompts: str = "ab") -> list[Record]:
    return [
        record(name, prompt, 10, seconds, testbed=f"{testbed + 2} boards", temperature=temperature)
        for testbed in range(testbeds)
        for temperature in (0.0, 1.0)
        for prompt in prompts
        for name, seconds in methods.items()
    ]


RUNS = {
    "nothing": [],
    "plain decoding alone": records(methods={"ar": 1.0}),
    "no plain decoding": records(methods={"pipedec": 2.0, "continuous": 1.0}),
    "one prompt": records(prompts="a"),
    "no tokens": [record("continuous", "a", 0, 0.0), record("ar", "a", 0, 0.0)],
    "several testbeds": records(testbeds=4),
}


def summary_of(records: list[Record]) -> dict[str, Any]:
    known = Published(testbed="2 boards", temperature=0.0, reference="ar", tokens_per_s={"ar": 4.0})
    bench = synthetic(testbeds=(boards(2, name="2 boards"),), published=(known,))
    setting = setting_of(bench, [CASE], ["bench", "--experiment", "by <hand>"])
    found = summarise("by <hand>", "simulated", records)
    return found | {"setting": setting, "validation": validate(bench, records)}


@pytest.mark.parametrize("name", RUNS)
def test_every_report_comes_out_whatever_was_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = summary_of(RUNS[name])
    page = str(html_report.page(summary, tmp_path))
    report.show(summary)
    show_validation(summary["validation"], "simulated", "1 prompt")
    said = capsys.readouterr().out
    for text in (page, said, report.markdown(summary)):
        assert "simulated world" in text.lower(), "nothing is taken for a measurement"
        assert "None" not in text
        assert "nan" not in text.replace("Jetson Orin Nano", "").replace("orin-nano", "")
    assert "by &lt;hand&gt;" in page
    assert max(map(len, said.splitlines())) <= 80
    assert ("2.50" in page) == (name in ("one prompt", "several testbeds"))


def test_a_page_holds_its_pictures_names_nothing_outside_and_tells_wrong_answers(tmp_path: Path) -> None:
    (tmp_path / "timeline.png").write_bytes(PNG)
    wrong = [*records(), record("continuous", "c", 10, 2.0, agreement="wrong")]
    html_report.write_report(summary_of(wrong), tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "1 of 17 answers differ" in page
    assert page.count('src="data:image/png;base64,') == 1
    assert not re.search(r"href|http|url\(|<script|@import", page)


def test_pictures_come_out_whatever_was_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"

    def is_drawn() -> bool:
        found = path.read_bytes()
        path.unlink()
        return found.startswith(PNG)

    for name in ("nothing", "no plain decoding", "several testbeds"):
        plots.speedup(summarise("by hand", "simulated", RUNS[name]), path)
        assert is_drawn()
    timeline.draw({"ar": Trace()}, path, name="by hand", world="cluster", stages=2)
    assert is_drawn()
