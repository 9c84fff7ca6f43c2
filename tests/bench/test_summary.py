"""What records say together: rates, paired speed-ups with intervals, the cells of `continuous`; and that it
is shown with its world."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from flowspec.bench import report
from flowspec.bench.outcome import Record
from flowspec.bench.summary import OVERALL, paired, rates, summarise, sums
from tests.bench.records import record

PROMPTS = [str(number) for number in range(12)]


def by_chance(method: str, speed: float, seed: int = 1, **changes: Any) -> list[Record]:
    chance = random.Random(seed)
    return [
        record(method, prompt, 30, 30 / speed * chance.uniform(0.6, 1.4), **changes) for prompt in PROMPTS
    ]


def summary_of(records: Sequence[Record]) -> dict[str, Any]:
    found = summarise("by hand", "simulated", records)
    assert json.loads(json.dumps(found, allow_nan=False)) == found, "summary.json holds it as it is"
    return found


def test_a_domains_rate_is_tokens_by_time_and_overall_is_the_harmonic_mean() -> None:
    records = [
        record("ar", "a", 10, 5.0),
        record("ar", "b", 2, 1.0),
        record("ar", "c", 8, 1.0, domain="sums"),
    ]
    short = [record("ar", "d", 0, 0.0), record("ar", "e", 3, 0.0)]
    assert rates(sums([*records, *short])) == {"chat": 2.0, "sums": 8.0, OVERALL: pytest.approx(3.2)}
    assert rates(sums(short)) == {}


def test_a_prompts_seeds_and_repeats_are_one() -> None:
    records = [
        record("ar", "a", 10, 5.0),
        record("ar", "a", 5, 2.0, seed=2),
        record("ar", "a", 5, 3.0, repeat=1),
    ]
    assert sums(records) == {"chat": {"a": (20.0, 10.0)}}


def test_the_interval_of_prompts_that_are_alike_is_a_point() -> None:
    ours = sums([record("continuous", prompt, 30, 2.0) for prompt in PROMPTS])
    theirs = sums([record("ar", prompt, 30, 5.0) for prompt in PROMPTS])
    assert paired(ours, theirs)[OVERALL] == pytest.approx({"ratio": 2.5, "low": 2.5, "high": 2.5})


def test_one_prompt_has_no_interval_and_neither_has_overall_with_such_a_domain() -> None:
    ours, theirs = (
        [
            *(record(method, prompt, 30, seconds) for prompt in PROMPTS),
            record(method, "a", 30, seconds, domain="sums"),
        ]
        for method, seconds in (("continuous", 2.0), ("ar", 5.0))
    )
    found = paired(sums(ours), sums(theirs))
    assert [(name, each["low"], each["high"]) for name, each in found.items()] == [
        ("chat", pytest.approx(2.5), pytest.approx(2.5)),
        ("sums", None, None),
        (OVERALL, None, None),
    ]
    assert report.times(found["sums"]) == "2.50"
    assert "None" not in report.markdown(summary_of([*ours, *theirs]))


def test_the_same_prompts_are_drawn_for_both_methods() -> None:
    slow = by_chance("ar", 4.0)
    twice = [record("continuous", each.prompt_id, 30, each.decode_s / 2) for each in slow]
    assert paired(sums(twice), sums(slow))["chat"] == pytest.approx({"ratio": 2.0, "low": 2.0, "high": 2.0})


def test_an_interval_holds_its_ratio_and_narrows_with_more_prompts() -> None:
    few, many = (
        paired(
            *(
                sums([each for seed in range(count) for each in _others(method, seed)])
                for method in ("continuous", "ar")
            )
        )[OVERALL]
        for count in (1, 20)
    )
    for found in (few, many):
        assert found["low"] < found["ratio"] < found["high"]
    assert many["high"] - many["low"] < (few["high"] - few["low"]) / 2


def _others(method: str, seed: int) -> list[Record]:
    """Twelve prompts more; methods differ by chance."""
    chance = random.Random(f"{method} {seed}")
    return [record(method, f"{seed} {prompt}", 30, chance.uniform(5, 10)) for prompt in PROMPTS]


def test_only_prompts_that_both_answered_are_compared() -> None:
    ours = sums([record("continuous", "a", 10, 1.0), record("continuous", "b", 10, 100.0)])
    theirs = sums(
        [record("ar", "a", 10, 2.0), record("ar", "c", 10, 1.0), record("ar", "d", 10, 1.0, domain="sums")]
    )
    found = paired(ours, theirs)
    assert list(found) == ["chat", OVERALL]
    assert found["chat"]["ratio"] == 2.0
    assert paired(ours, {}) == {}


def test_a_summary_is_the_same_in_every_run_and_order() -> None:
    records = [
        *by_chance("ar", 4.0),
        *by_chance("continuous", 9.0, seed=2),
        *by_chance("continuous", 8.0, seed=3, domain="sums"),
    ]
    found = summary_of(records)
    assert summary_of(records) == found
    table, again = found["tables"][0], summary_of([*records[:12], *reversed(records[12:])])["tables"][0]
    assert again["speed_up"] == table["speed_up"]


def test_speed_ups_are_over_ar_and_the_published_chunks() -> None:
    names = {"ar": 10.0, "chunk-pp": 4.0, "chunk-pp (published)": 5.0, "continuous": 2.0}
    table = summary_of([record(name, "a", 10, seconds) for name, seconds in names.items()])["tables"][0]
    assert table["methods"] == list(names)
    assert table["references"] == ["ar", "chunk-pp (published)"]
    assert table["speed_up"]["ar"]["continuous"][OVERALL]["ratio"] == 5.0
    assert table["speed_up"]["chunk-pp (published)"]["continuous"]["chat"]["ratio"] == 2.5
    plain = summary_of(
        [
            record(name, "a", 10, seconds)
            for name, seconds in names.items()
            if "(" not in name and name != "ar"
        ]
    )
    assert plain["tables"][0]["references"] == ["chunk-pp"]


def test_statistics_are_means_over_answers_and_counts_per_token() -> None:
    records = [
        record(
            "continuous",
            "a",
            9,
            2.0,
            S=2.0,
            rho=0.5,
            stage_busy=[1.0, 0.5],
            dropped_rows=4,
            rows=16,
            oracle_s=1.5,
        ),
        record(
            "continuous",
            "b",
            29,
            4.0,
            S=4.0,
            rho=1.0,
            stage_busy=[0.5, 0.0],
            rows=4,
            agreement="exact",
            oracle_s=None,
        ),
        record("continuous", "c", 0, 0.0, S=99.0, rows=0, agreement="wrong", network_bytes=210, energy_j=0.0),
    ]
    found = summary_of(records)["tables"][0]["statistics"]["continuous"]
    assert (found["S"], found["rho"], found["stage_busy"], found["busy"]) == (3.0, 0.75, [0.75, 0.25], 0.5)
    assert (found["answers"], found["tokens"]) == (3, 41)
    assert found["dropped_per_100_rows"] == 20.0
    assert (found["network_bytes_per_token"], found["energy_j_per_token"]) == (
        pytest.approx(10.0),
        pytest.approx(6 / 41),
    )
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
    seconds = {
        "ar": 10.0,
        "tree-sd tuned": 4.0,
        "pipedec tuned": 5.0,
        "flowspec-paper": 2.0,
        "continuous": 2.5,
    }
    cold = [record(name, "a", 10, each) for name, each in seconds.items()]
    hot = [record(name, "a", 10, 2 * each, temperature=1.0) for name, each in seconds.items()]
    found = summary_of([*hot, *cold])
    for name, domain in (("cells", "chat"), ("overall", OVERALL)):
        assert [(each["temperature"], each["domain"]) for each in found[name]] == [
            (0.0, domain),
            (1.0, domain),
        ]
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


def test_a_cell_below_ar_is_told() -> None:
    found = summary_of([record("ar", "a", 10, 1.0), record("continuous", "a", 10, 1.25)])
    assert [(each["domain"], each["ratio"]) for each in found["below_ar"]] == [("chat", 0.8)]
    assert found["cells"][0]["tuned"] is None


def test_experiments_without_continuous_references_or_answers_have_summaries_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for records in (
        [],
        [record("pipedec", "a", 10, 1.0)],
        [record("continuous", "a", 0, 0.0), record("ar", "a", 0, 0.0)],
    ):
        found = summary_of(records)
        assert found["cells"] == []
        assert report.markdown(found).startswith("# by hand: **SIMULATED world**")
        report.show(found)
    assert "simulated world: virtual time" in capsys.readouterr().out


def test_nothing_is_said_of_a_comparison_that_was_not_made() -> None:
    alone = summary_of([record("continuous", "a", 10, 1.0)])
    assert alone["cells"]
    assert "is slower than" not in report.markdown(alone)
    beside_ar = report.markdown(summary_of([record("continuous", "a", 10, 1.0), record("ar", "a", 10, 2.0)]))
    assert "is slower than plain decoding in 0 of 1 cell." in beside_ar


def test_markdown_says_the_world_and_holds_the_tables() -> None:
    records = [
        *by_chance("ar", 4.0),
        *by_chance("chunk-pp (published)", 5.0, seed=2),
        *by_chance("continuous", 3.0, seed=3),
    ]
    text = report.markdown(summary_of(records))
    assert text.splitlines()[0] == "# by hand: **SIMULATED world**"
    assert "not measured on such devices" in text
    for head in (
        "Speed-up over `ar`:",
        "Speed-up over `chunk-pp (published)`:",
        "tau, ms",
        "is slower than plain decoding in 1 of 1 cell:",
    ):
        assert head in text
    tables = [[line for line in block.splitlines() if line.startswith("|")] for block in text.split("\n\n")]
    for table in filter(None, tables):
        assert len({line.count("|") for line in table}) == 1, "every row has the columns of its head"
    assert "nan" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.5, "0.50"),
        (9.994, "9.99"),
        (9.999, "10.0"),
        (12.34, "12.3"),
        (99.99, "100"),
        (1234.5, "1234"),
    ],
)
def test_rates_have_three_digits(value: float | None, text: str) -> None:
    assert report.rate(value) == text


def test_the_terminal_has_room_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("ar", "chunk-pp (published)", "flowspec-paper (published)", "continuous")
    records = [
        record(name, prompt, 1000, 1 / speed, oracle_s=0.1)
        for speed, name in enumerate(names, 1)
        for prompt in "ab"
    ]
    report.show(summary_of(records))
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0].startswith("by hand, simulated world: virtual time")
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("continuous  "))
    assert row.split() == ["continuous", "4000", "4.00", "2.00", "[2.00-2.00]", "1.00", "0.00", "38%", "40%"]
    assert "x chunk-pp: over chunk-pp (published)" in " ".join(said.split())
    report.show(summary_of([each for each in records if each.method in ("ar", "continuous")]))
    assert "chunk-pp" not in capsys.readouterr().out


def test_the_terminal_says_on_which_devices_and_by_what_guesses(capsys: pytest.CaptureFixture[str]) -> None:
    records = [record("ar", "a", 1, 1.0, temperature=1.0)]
    found = {**summary_of(records), "world": "cluster"}
    local = {"devices": {"2 local processes": "on this machine"}, "model": "bundled"}
    report.show({**found, "setting": local})
    said = capsys.readouterr().out
    assert "cluster world: real processes in real time\ndevices: 2 local processes on this machine\n" in said
    assert "at every temperature" not in said
    report.show({**summary_of(records), "setting": {"model": "synthetic"}})
    said = capsys.readouterr().out
    assert "devices:" not in said
    assert "the synthetic drafter is right as often at every temperature" in " ".join(said.split())
