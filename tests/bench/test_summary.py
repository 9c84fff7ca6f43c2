"""What records say together: rates, paired speed-ups with intervals, the cells of `continuous`, chains of
models and loads.

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

from flowspec.bench import plots, report, timeline
from flowspec.bench.experiment import AUTO, FIXED, Experiment, Setup
from flowspec.bench.records import AnyRecord, Record, Trace
from flowspec.bench.statistics import OVERALL, paired, rates, summarise, sums
from flowspec.cli.bench import result_of
from tests.bench.benches import boards, synthetic
from tests.bench.cases import made
from tests.bench.records import load_record, record

TINY = synthetic(name="by <hand>", testbeds=(boards(name="2 boards"),))


def summary_of(records: Sequence[AnyRecord], experiment: Experiment = TINY) -> dict[str, Any]:
    found = summarise(experiment, records)
    assert json.loads(json.dumps(found, allow_nan=False)) == found, "summary.json holds it as it is"
    return found


def test_a_domains_rate_is_tokens_by_time_and_overall_is_the_harmonic_mean() -> None:
    whole, others = record("ar", "a", 10, 5.0), record("ar", "a", 5, 2.0, seed=2)
    together = sums([whole, others, structs.replace(others, repeat=1, decode_s=3.0)])
    assert together == {"chat": {"a": (20.0, 10.0)}}
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


def test_statistics_are_means_over_answers_and_counts_per_token() -> None:
    first = {"S": 2.0, "rho": 0.5, "stage_busy": [1.0, 0.5], "dropped_rows": 4, "rows": 16}
    second = {"S": 4.0, "rho": 1.0, "stage_busy": [0.5, 0.0], "rows": 4}
    third = {"S": 99.0, "rows": 0, "agreement": "wrong", "network_bytes": 210, "energy_j": 0.0}
    records = [
        record("continuous", "a", 9, 2.0, **first),
        record("continuous", "b", 29, 4.0, **second),
        record("continuous", "c", 0, 0.0, **third),
    ]
    found = summary_of(records)["tables"][0]["statistics"]["continuous"]
    assert (found["S"], found["rho"], found["stage_busy"], found["busy"]) == (3.0, 0.75, [0.75, 0.25], 0.5)
    assert (found["answers"], found["tokens"], found["dropped_per_100_rows"]) == (3, 41, 20.0)
    assert found["network_bytes_per_token"] == pytest.approx(10.0)
    assert found["energy_j_per_token"] == pytest.approx(6 / 41)
    assert found["agreement"] == {"exact": 2, "wrong": 1}


def test_cells_say_where_continuous_stands_and_speed_ups_are_over_ar_and_the_published_chunks() -> None:
    others = {"tree-sd tuned": 4.0, "pipedec tuned": 5.0, "flowspec-paper": 2.0}
    chunks = {"chunk-pp": 4.0, "chunk-pp (published)": 5.0}
    seconds = {"ar": 10.0, **others, **chunks, "continuous": 2.5}
    cold = [record(name, "a", 10, each) for name, each in seconds.items()]
    hot = [record(name, "a", 10, 2 * each, temperature=1.0) for name, each in seconds.items()]
    found = summary_of([*hot, *cold])
    table = found["tables"][0]
    assert (table["methods"], table["references"]) == (list(seconds), ["ar", "chunk-pp (published)"])
    assert table["speed_up"]["ar"]["continuous"][OVERALL]["ratio"] == 4.0
    assert table["speed_up"]["chunk-pp (published)"]["continuous"]["chat"]["ratio"] == 2.0
    for name, domain in (("cells", "chat"), ("overall", OVERALL)):
        cells = [(each["temperature"], each["domain"]) for each in found[name]]
        assert cells == [(0.0, domain), (1.0, domain)]
    cell, last = found["cells"][0], found["overall"][-1]
    assert (cell["other"], cell["to_other"]["ratio"]) == ("flowspec-paper", 0.8)
    assert (cell["tuned"], cell["to_tuned"]["ratio"]) == ("tree-sd tuned", 1.6)
    assert (cell["paper"], cell["to_paper"]["ratio"]) == ("flowspec-paper", 0.8)
    assert (cell["to_ar"]["ratio"], cell["to_temperature_0"]) == (4.0, None)
    assert last["to_temperature_0"]["ratio"] == 0.5
    slower = [(each["domain"], each["other"], each["ratio"]) for each in found["slower_than_other"]]
    assert slower == [("chat", "flowspec-paper", 0.8)] * 2, "all domains together are no cell more"
    assert found["below_ar"] == []
    slow = summary_of([record("ar", "a", 10, 1.0), record("continuous", "a", 10, 1.25)])
    assert [(each["domain"], each["ratio"]) for each in slow["below_ar"]] == [("chat", 0.8)]
    assert slow["cells"][0]["tuned"] is None


def chain(name: str, kind: str, *drafters: str) -> Setup:
    return Setup(name=name, method="continuous", chain=kind, drafters=drafters)


CHAINS = structs.replace(
    TINY,
    setups=(chain("a", FIXED, "x"), chain("ab", FIXED, "x", "y"), chain("best", AUTO, "x", "y")),
)
CHOSEN = [[0, 0.0, [0], ""], [4, 0.5, [0, 1], ""]]
OF_CHAINS = [
    record(name, prompt, 10, seconds, domain=domain, chains=CHOSEN * (name == "best"))
    for prompt, domain in (("1", "chat"), ("2", "sums"))
    for name, seconds in (("a", 3.5), ("ab", 1.5), ("best", 2.5))
]
LOADS = structs.replace(TINY, users=(1, 2))
OF_LOADS = [
    load_record(name, users, [users * seconds] * 2, drafters=drafters)
    for users in (1, 2)
    for name, seconds, drafters in (("ar", 4.0, 0), ("continuous", 2.0, 1), ("cosine", 1.0, 3))
]


def test_chains_are_compared_by_latency_and_loads_by_throughput_too() -> None:
    other = record("a", "3", 10, 99.0)  # which not all answered
    (table,) = summary_of([*OF_CHAINS, other], CHAINS)["chains"]
    assert table["latency_s"]["a"] == {"chat": 4.0, "sums": 4.0, "mix": 4.0}
    assert table["chosen"]["best"]["mix"] == {
        "to_fixed": {"other": "ab", "ratio": 1.5},
        "to_two": {"other": "a", "ratio": 0.75},
        "to_plain": None,
    }
    found = summary_of(OF_LOADS, LOADS)
    assert (found["answers"], found["wrong"]) == (24, 0)
    one, two = found["tables"][0]["loads"]
    assert (one["users"], two["users"], two["label"]) == (1, 2, "2 users")
    assert two["to_single"] == {"cosine": {"tokens_per_s": 2.0, "latency_s": 0.5}}
    assert two["to_ar"]["continuous"] == {"tokens_per_s": 2.0, "latency_s": 0.5}
    assert [each["methods"]["ar"]["tokens_per_s"] for each in (one, two)] == [5.0, 2.5]


# ------------------------------------------------------------------------------------------ what is shown

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


RUNS: dict[str, tuple[Experiment, Sequence[AnyRecord]]] = {
    "nothing": (TINY, []),
    "plain decoding alone": (TINY, records_of(methods={"ar": 1.0})),
    "no plain decoding": (TINY, records_of(methods={"pipedec": 2.0, "continuous": 1.0})),
    "one prompt": (TINY, records_of(prompts="a")),
    "no tokens": (TINY, [record("continuous", "a", 0, 0.0), record("ar", "a", 0, 0.0)]),
    "several testbeds": (TINY, records_of(testbeds=4)),
    "chains": (CHAINS, OF_CHAINS),
    "loads": (LOADS, OF_LOADS),
}


def whole_summary(experiment: Experiment, records: Sequence[AnyRecord]) -> dict[str, Any]:
    setting = report.setting_of(experiment, [made("a", (2, 3))], ["bench", "--experiment", "by <hand>"])
    return summary_of(records, experiment) | {"setting": setting}


@pytest.mark.parametrize("name", RUNS)
def test_every_report_comes_out_whatever_was_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    summary = whole_summary(*RUNS[name])
    report.write_report(summary, tmp_path)
    result_of(summary).print()
    page, shown = (tmp_path / "report.html").read_text("utf-8"), capsys.readouterr().out
    for text in (page, shown, report.markdown(summary)):
        assert "simulated world" in text.lower(), "nothing is taken for a measurement"
        assert "None" not in text
        assert "nan" not in text.replace("Jetson Orin Nano", "").replace("orin-nano", "")
    assert "by &lt;hand&gt;" in page
    assert max(map(len, shown.splitlines())) <= 80
    assert ("2.50" in page) == (name in ("one prompt", "several testbeds", "loads"))


def test_a_page_holds_its_pictures_names_nothing_outside_and_counts_wrong_answers(tmp_path: Path) -> None:
    (tmp_path / "timeline.png").write_bytes(PNG)
    wrong = [*records_of(), record("continuous", "c", 10, 2.0, agreement="wrong")]
    report.write_report(whole_summary(TINY, wrong), tmp_path)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "1 of 17 answers differ" in page
    assert page.count('src="data:image/png;base64,') == 1
    assert not re.search(r"href|http|url\(|<script|@import", page)


def test_pictures_come_out_whatever_was_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("nothing", "no plain decoding", "several testbeds"):
        plots.draw_speedup(summary_of(RUNS[name][1]), tmp_path / f"{name}.png")
    plots.draw_chains(CHAINS, OF_CHAINS, tmp_path / "chains.png")
    plots.draw_loads(summary_of(OF_LOADS, LOADS), tmp_path / "loads.png")
    timeline.draw_timeline({"ar": Trace()}, tmp_path / "t.png", name="by hand", world="cluster")
    assert [path.read_bytes().startswith(PNG) for path in tmp_path.iterdir()] == [True] * 6
    plots.draw_chains(TINY, records_of(), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists(), "none was chosen"
