"""What records say together: rates, paired speed-ups with intervals, shares of the oracle, the cells of
`continuous`, and published figures beside measured ones.

Whatever was run comes out as tables, pages, pictures and traces; `lab/golden` records how they look.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from flowspec.bench import html_report, plots, report, timeline
from flowspec.bench.config import Published
from flowspec.bench.outcome import Record
from flowspec.bench.plain import PlainCase
from flowspec.bench.setting import setting_of
from flowspec.bench.summary import OVERALL, paired, rates, summarise, sums
from flowspec.bench.trace import Trace
from flowspec.bench.validation import show_validation, validate
from tests.bench.benches import boards, synthetic
from tests.bench.cases import made
from tests.bench.records import record


def summary_of(records: Sequence[Record]) -> dict[str, Any]:
    found = summarise("by hand", "simulated", records)
    assert json.loads(json.dumps(found, allow_nan=False)) == found, "summary.json holds it as it is"
    return found


def test_a_domains_rate_is_tokens_by_time_and_overall_is_the_harmonic_mean() -> None:
    whole, others = record("ar", "a", 10, 5.0), record("ar", "a", 5, 2.0, seed=2)
    assert sums([whole, others, structs.replace(others, repeat=1, decode_s=3.0)]) == {
        "chat": {"a": (20.0, 10.0)}
    }
    records = [whole, record("ar", "b", 2, 1.0), record("ar", "c", 8, 1.0, domain="sums")]
    short = [record("ar", "d", 0, 0.0), record("ar", "e", 3, 0.0)]
    assert rates(sums([*records, *short])) == {"chat": 2.0, "sums": 8.0, OVERALL: pytest.approx(3.2)}
    assert rates(sums(short)) == {}


def test_intervals_are_of_prompts_that_both_answered_drawn_for_both_at_once() -> None:
    chance = random.Random(1)
    slow = [record("ar", str(at), 30, chance.uniform(4, 10)) for at in range(12)]
    twice = [record("continuous", each.prompt_id, 30, each.decode_s / 2) for each in slow]
    ours = [record("continuous", "a", 30, 2.5, domain="sums"), record("continuous", "other", 10, 100.0)]
    theirs = [record("ar", "a", 30, 5.0, domain="sums"), record("ar", "b", 1, 9.0, domain="sums")]
    found = paired(sums([*twice, *ours]), sums([*slow, *theirs]))
    assert found["chat"] == pytest.approx({"ratio": 2.0, "low": 2.0, "high": 2.0})
    assert found["sums"]["ratio"] == 2.0
    assert [found[name]["low"] for name in ("sums", OVERALL)] == [None, None], "one prompt has no interval"
    assert paired(sums(slow), {}) == {}
    widths = []
    for count in (12, 240):
        drawn = (
            sums([record(method, str(at), 30, chance.uniform(5, 10)) for at in range(count)])
            for method in ("continuous", "ar")
        )
        interval = paired(*drawn)[OVERALL]
        assert interval["low"] < interval["ratio"] < interval["high"]
        widths.append(interval["high"] - interval["low"])
    assert widths[1] < widths[0] / 2


def test_speed_ups_are_over_ar_and_the_published_chunks() -> None:
    names = {"ar": 10.0, "chunk-pp": 4.0, "chunk-pp (published)": 5.0, "continuous": 2.0}
    table = summary_of([record(name, "a", 10, seconds) for name, seconds in names.items()])["tables"][0]
    assert table["methods"] == list(names)
    assert table["references"] == ["ar", "chunk-pp (published)"]
    assert table["speed_up"]["ar"]["continuous"][OVERALL]["ratio"] == 5.0
    assert table["speed_up"]["chunk-pp (published)"]["continuous"]["chat"]["ratio"] == 2.5


def test_statistics_are_means_over_answers_and_counts_per_token() -> None:
    first = {"S": 2.0, "rho": 0.5, "stage_busy": [1.0, 0.5], "dropped_rows": 4, "rows": 16, "oracle_s": 1.5}
    second = {"S": 4.0, "rho": 1.0, "stage_busy": [0.5, 0.0], "rows": 4, "oracle_s": None}
    third = {"S": 99.0, "rows": 0, "agreement": "wrong", "network_bytes": 210, "energy_j": 0.0}
    records = [
        record("continuous", "a", 9, 2.0, **first),
        record("continuous", "b", 29, 4.0, **second),
        record("continuous", "c", 0, 0.0, **third),
    ]
    found = summary_of(records)["tables"][0]["statistics"]["continuous"]
    assert (found["S"], found["rho"], found["stage_busy"], found["busy"]) == (3.0, 0.75, [0.75, 0.25], 0.5)
    assert (found["answers"], found["tokens"]) == (3, 41)
    assert found["dropped_per_100_rows"] == 20.0
    assert found["network_bytes_per_token"] == pytest.approx(10.0)
    assert found["energy_j_per_token"] == pytest.approx(6 / 41)
    assert found["oracle_share"] == found["own_oracle_share"] == pytest.approx(1.5 / 2.0)
    assert found["agreement"] == {"exact": 2, "wrong": 1}


def test_all_methods_are_judged_by_the_best_guesses_of_any() -> None:
    records = [
        record("ar", "a", 9, 10.0, oracle_s=10.0),
        record("ar", "b", 9, 10.0, oracle_s=9.0),
        record("tree-sd", "a", 9, 5.0, oracle_s=3.0),
        record("continuous", "a", 9, 4.0, oracle_s=2.0),
        record("continuous", "a", 9, 4.0, oracle_s=1.0, seed=2),
        record("pipedec", "a", 9, 4.0, oracle_s=0.5, agreement="wrong"),
    ]
    (table,) = summary_of(records)["tables"]
    shares = {
        method: (of["oracle_share"], of["own_oracle_share"]) for method, of in table["statistics"].items()
    }
    assert shares == {
        "ar": (pytest.approx((2 + 9) / 20), pytest.approx(19 / 20)),
        "tree-sd": (pytest.approx(2 / 5), pytest.approx(3 / 5)),
        "continuous": (pytest.approx(3 / 8), pytest.approx(3 / 8)),
        "pipedec": (None, None),
    }


def test_cells_say_where_continuous_stands() -> None:
    others = {"tree-sd tuned": 4.0, "pipedec tuned": 5.0, "flowspec-paper": 2.0}
    seconds = {"ar": 10.0, **others, "continuous": 2.5}
    cold = [record(name, "a", 10, each) for name, each in seconds.items()]
    hot = [record(name, "a", 10, 2 * each, temperature=1.0) for name, each in seconds.items()]
    found = summary_of([*hot, *cold])
    for name, domain in (("cells", "chat"), ("overall", OVERALL)):
        cells = [(each["temperature"], each["domain"]) for each in found[name]]
        assert cells == [(0.0, domain), (1.0, domain)]
    cell, last = found["cells"][0], found["overall"][-1]
    assert (cell["other"], cell["to_other"]["ratio"]) == ("flowspec-paper", 0.8)
    assert (cell["tuned"], cell["to_tuned"]["ratio"]) == ("tree-sd tuned", 1.6)
    assert (cell["paper"], cell["to_paper"]["ratio"]) == ("flowspec-paper", 0.8)
    assert cell["to_ar"]["ratio"] == 4.0
    assert cell["to_temperature_0"] is None
    assert last["to_temperature_0"]["ratio"] == 0.5
    slower = [(each["domain"], each["other"], each["ratio"]) for each in found["slower_than_other"]]
    assert slower == [("chat", "flowspec-paper", 0.8)] * 2, "all domains together are no cell more"
    assert found["below_ar"] == []
    slow = summary_of([record("ar", "a", 10, 1.0), record("continuous", "a", 10, 1.25)])
    assert [(each["domain"], each["ratio"]) for each in slow["below_ar"]] == [("chat", 0.8)]
    assert slow["cells"][0]["tuned"] is None


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


def test_a_rate_is_all_tokens_by_all_time_and_a_ratio_is_to_the_reference() -> None:
    assert validate(structs.replace(BENCH, published=(PUBLISHED,)), RECORDS) == [
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


CASE: PlainCase = made("a", (2, 3))
SECONDS = {"ar": 5.0, "chunk-pp (published)": 4.0, "tree-sd tuned": 3.0, "continuous": 2.0}
PNG = b"\x89PNG\r\n\x1a\n"


def records_of(testbeds: int = 1, methods: dict[str, float] = SECONDS, prompts: str = "ab") -> list[Record]:
    return [
        record(name, prompt, 10, seconds, testbed=f"{testbed + 2} boards", temperature=temperature)
        for testbed in range(testbeds)
        for temperature in (0.0, 1.0)
        for prompt in prompts
        for name, seconds in methods.items()
    ]


RUNS = {
    "nothing": [],
    "plain decoding alone": records_of(methods={"ar": 1.0}),
    "no plain decoding": records_of(methods={"pipedec": 2.0, "continuous": 1.0}),
    "one prompt": records_of(prompts="a"),
    "no tokens": [record("continuous", "a", 0, 0.0), record("ar", "a", 0, 0.0)],
    "several testbeds": records_of(testbeds=4),
}


def whole_summary(records: list[Record]) -> dict[str, Any]:
    known = Published(testbed="2 boards", temperature=0.0, reference="ar", tokens_per_s={"ar": 4.0})
    bench = synthetic(testbeds=(boards(2, name="2 boards"),), published=(known,))
    setting = setting_of(bench, [CASE], ["bench", "--experiment", "by <hand>"])
    found = summarise("by <hand>", "simulated", records)
    return found | {"setting": setting, "validation": validate(bench, records)}


@pytest.mark.parametrize("name", RUNS)
def test_every_report_comes_out_whatever_was_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = whole_summary(RUNS[name])
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
    wrong = [*records_of(), record("continuous", "c", 10, 2.0, agreement="wrong")]
    html_report.write_report(whole_summary(wrong), tmp_path)
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
