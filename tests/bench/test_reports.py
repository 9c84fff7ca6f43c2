"""Whatever was run comes out as tables, pages, pictures and traces; `lab/golden` records how they look."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from flowspec.bench import chain_report, console, html_report, plots, report, timeline
from flowspec.bench.chains import compare
from flowspec.bench.config import Published
from flowspec.bench.outcome import Record
from flowspec.bench.plain import PlainCase
from flowspec.bench.setting import setting_of
from flowspec.bench.summary import summarise
from flowspec.bench.trace import Trace
from flowspec.bench.validation import show_validation, validate
from flowspec.errors import InputError
from tests.bench.benches import boards, synthetic
from tests.bench.cases import made
from tests.bench.records import record
from tests.bench.test_summary import CHAINED, CHAINS
from tests.bench.test_timeline import by_hand

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


def test_a_page_holds_its_pictures_and_names_nothing_outside(tmp_path: Path) -> None:
    (tmp_path / "timeline.png").write_bytes(PNG)
    html_report.write_report(summary_of(RUNS["one prompt"]), tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count('src="data:image/png;base64,') == 1
    assert not re.search(r"href|http|url\(|<script|@import", page)


def test_a_wrong_answer_is_told(tmp_path: Path) -> None:
    wrong = [*records(), record("continuous", "c", 10, 2.0, agreement="wrong")]
    assert "1 of 17 answers differ" in str(html_report.page(summary_of(wrong), tmp_path))


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
    for trace in (Trace(), by_hand()):
        timeline.draw({"ar": trace}, path, name="by hand", world="cluster", stages=2)
        assert is_drawn()
    assert chain_report.draw(CHAINED, CHAINS, path)
    assert is_drawn()
    assert not chain_report.draw(CHAINED, [each for each in CHAINS if each.method != "chosen"], path)
    assert not path.exists()
    assert "| chosen by the best fixed chain |" in chain_report.markdown(
        compare(CHAINED, CHAINS), "simulated"
    )


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="launch/install plots"):
        plots.speedup(summarise("by hand", "simulated", records()), tmp_path / "speedup.png")


def test_a_chrome_trace_has_every_pass_and_token() -> None:
    found = timeline.chrome({"ar": by_hand()})
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    rows = [event["args"]["alive"] + event["args"]["dead"] for event in spans if "alive" in event["args"]]
    assert sum(rows) == sum(hop.rows for trip in by_hand().trips for hop in trip.hops)
    assert sum(event.get("args", {}).get("tokens", 0) for event in found["traceEvents"]) == 3


@pytest.mark.parametrize("width", [140, 45])
def test_a_wide_table_goes_on_below_and_breaks_no_word(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PLAIN_WIDTH", width)
    cells = ("raspberry-pi-5-1", "2.13.0+cpu", "eth0, wired 1000 Mbit/s", "[bold]1[/]")
    console.show_table(("device", "torch", "interface", "from here"), [cells])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert all(cell in text for cell in cells), "whole, and not as markup"


def test_progress_is_a_line_now_and_then_at_the_rate_of_this_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 1.0, 61.0, 62.0, 0.0, 99.0))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress("starting", 9, 4) as step:
        step("first", 0)
        step("second", 1)
        step("third", 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "second (5 of 9, about 5 min left)"
    with console.progress("starting", 9, quiet=True) as step:
        step("first")
    assert capsys.readouterr().err == ""
