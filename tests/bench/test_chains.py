"""Chains of models beside each other: latencies on what all answered, the ratios that matter, and which chain
was at work when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowspec.bench.chain_report import draw, markdown
from flowspec.bench.chains import MIX, compare, label
from flowspec.bench.config import AUTO, FIXED, Bench, Setup
from flowspec.cli.main import main
from tests.bench.benches import synthetic
from tests.bench.records import record

SETUPS = (
    Setup(name="ar", method="ar"),
    Setup(name="plain", method="continuous", chain=FIXED, drafters=()),
    Setup(name="draft", method="continuous", chain=FIXED, drafters=("draft",)),
    Setup(name="mid", method="continuous", chain=FIXED, drafters=("mid",)),
    Setup(name="both", method="continuous", chain=FIXED, drafters=("draft", "mid")),
    Setup(name="chosen", method="continuous", chain=AUTO, drafters=("draft", "mid")),
    Setup(name="other", method="tree-sd"),
)
SECONDS = {  # of decoding; each answer waits .5 s for its first token
    "ar": {"easy": 7.5, "hard": 7.5},
    "plain": {"easy": 7.5, "hard": 6.5},
    "draft": {"easy": 1.5, "hard": 4.5},
    "mid": {"easy": 2.5, "hard": 3.5},
    "both": {"easy": 0.5, "hard": 5.5},
    "chosen": {"easy": 0.5, "hard": 2.5},
    "other": {"easy": 0.1, "hard": 0.1},
}
CHAINS = [[0, 0.0, ["draft"], "first"], [4, 1.0, [0, 1], "7% sooner"], [9, 2.0, [], "no use"]]
RECORDS = [
    record(name, f"{domain} {prompt}", 20, seconds, domain=domain, chains=CHAINS if name == "chosen" else [])
    for name, by_domain in SECONDS.items()
    for domain, seconds in by_domain.items()
    for prompt in range(2)
]


def bench() -> Bench:
    return synthetic(setups=SETUPS)


def test_a_chosen_chain_is_compared_with_the_best_of_each_kind() -> None:
    (table,) = compare(bench(), RECORDS)
    assert list(table["latency_s"]) == ["ar", "plain", "draft", "mid", "both", "chosen"]
    assert table["latency_s"]["chosen"] == {"easy": 1.0, "hard": 3.0, MIX: 2.0}
    assert set(table["chosen"]) == {"chosen"}
    found = table["chosen"]["chosen"]
    assert found["easy"] == {
        "to_fixed": {"other": "both", "ratio": 1.0},
        "to_two": {"other": "draft", "ratio": 0.5},
        "to_plain": {"other": "ar", "ratio": 0.125},
    }
    assert found["hard"]["to_fixed"] == {"other": "mid", "ratio": 0.75}
    assert found["hard"]["to_plain"] == {"other": "plain", "ratio": 3 / 7}
    assert found[MIX]["to_two"] == {"other": "draft", "ratio": 2 / 3.5}
    text = markdown([table], "simulated")
    assert "| chosen by the best fixed chain | 1.000 (both) | 0.750 (mid) |" in text


def test_only_answers_that_all_gave_count() -> None:
    fewer = [one for one in RECORDS if (one.method, one.prompt_id) != ("mid", "hard 1")]
    more = [*fewer, record("mid", "hard 7", 20, 99.0, domain="hard")]
    (table,) = compare(bench(), more)
    assert table["latency_s"]["mid"] == {"easy": 3.0, "hard": 4.0, MIX: pytest.approx(10 / 3)}


def test_without_chains_there_is_nothing_to_compare() -> None:
    assert compare(synthetic(setups=(SETUPS[0], SETUPS[-1])), RECORDS) == []
    alone = synthetic(setups=(SETUPS[0], SETUPS[5]))
    (table,) = compare(alone, [one for one in RECORDS if one.method in ("ar", "chosen")])
    assert table["chosen"]["chosen"]["easy"]["to_fixed"] is None


def test_chains_go_by_names() -> None:
    assert [label(SETUPS[5], models) for models in ([], [1], ["mid"], [0, 1])] == [
        "plain",
        "mid",
        "mid",
        "draft + mid",
    ]


def test_the_chains_at_work_are_drawn_where_any_was_chosen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw(bench(), RECORDS, tmp_path / "chains.png")
    assert (tmp_path / "chains.png").read_bytes()[:4] == b"\x89PNG"
    assert not draw(bench(), [one for one in RECORDS if one.method != "chosen"], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_the_command_compares_chains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    methods = "plain,mid,draft+mid,specrouter"
    asked = [
        "--methods",
        methods,
        "--limit",
        "1",
        "--max-new-tokens",
        "4",
        "--out",
        str(tmp_path / "out"),
        "--jobs",
        "1",
    ]
    assert main(["bench", "--experiment", "specrouter", "--json", *asked]) == 0
    (table,) = json.loads(capsys.readouterr().out)["chains"]
    assert list(table["latency_s"]) == methods.split(",")
    assert table["chosen"]["specrouter"][MIX]["to_two"]["other"] == "mid"
    assert main(["bench", "--experiment", "specrouter", *asked]) == 0
    assert (
        "70B on four boards, temperature 0 (simulated): seconds per answer, mean" in capsys.readouterr().out
    )
    assert "## Chains: 70B on four boards" in (tmp_path / "out" / "summary.md").read_text()
