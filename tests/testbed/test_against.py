"""Beside transformers: its rates are counted as ours are, and all answers must be equal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowspec.model.files import BUNDLED
from flowspec.runtime.session import Cluster, ClusterOptions, open_cluster
from flowspec.testbed import against
from flowspec.testbed.against import ASSISTED, PLAIN, Said, StopWatch, Theirs
from flowspec.testbed.plain import Case


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with open_cluster(ClusterOptions(model=BUNDLED, dtype="float32", local=2)) as opened:
        yield opened


@pytest.fixture
def options(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "few.jsonl").write_text(json.dumps({"category": "plays", "turns": ["Continue the play:\nDUKE:\nWho comes so late?"]}))
    monkeypatch.setattr(against, "open_cluster", lambda options: contextlib.nullcontext(cluster))
    return ["--prompts", str(tmp_path / "few.jsonl"), "--rounds", "1", "--tokens", "24", "--json"]


def test_all_answer_in_turn_and_equally(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert against.main(options) == 0
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert captured.err == ""
    assert (said["world"], said["stages"], said["threads_per_process"], said["dtype"]) == ("cluster (local)", 2, 1, "float32")
    rates = said["tokens_per_s"]
    assert list(rates) == ["continuous", "ar", PLAIN, ASSISTED]
    assert all(rate > 0 for rate in rates.values())
    assert said["ratio"] == pytest.approx({f"continuous / {name}": rates["continuous"] / rates[name] for name in list(rates)[1:]})
    assert said["agreement"] == {key: {"exact": 1, "near-tie": 0} for key in rates}
    assert list(said["statistics"]) == ["continuous", "ar"]
    assert said["statistics"]["ar"]["nodes_sent"] == 23
    against.show_report(said)
    assert f"{ASSISTED}: 1 exact, 0 near-tie" in capsys.readouterr().out


def test_a_wrong_answer_ends_it(options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Theirs, case: Case, is_assisted: bool) -> Said:
        tokens = tuple(token + is_assisted for token in case.new_tokens)
        return Said(tokens=tokens, reason="length", tokens_per_s=1.0, statistics=against.NOTHING)

    monkeypatch.setattr(Theirs, "ask", wrong)
    assert against.main(options) == 1
    assert f"{ASSISTED} answers prompt 1 (plays) otherwise than the plain model" in capsys.readouterr().err


def test_their_rate_counts_what_comes_after_the_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter((5.0, 6.0, 7.0))
    monkeypatch.setattr(against.time, "monotonic", lambda: next(now_s))
    watch = StopWatch()
    watch.put(torch.zeros(1, 40))  # the prompt, as transformers does it
    watch.put(torch.zeros(1, 6))
    assert watch.tokens_per_s == 0
    watch.put(torch.zeros(1, 3))
    watch.put(torch.zeros(1))
    watch.end()
    assert watch.tokens_per_s == 2
