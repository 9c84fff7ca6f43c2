"""Beside transformers: its rates are counted as ours are, and all answers must be equal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowspec.bench.plain import PlainCase
from flowspec.model.files import BUNDLED
from flowspec.runtime.session import ClusterOptions, OpenCluster, open_cluster
from tests.perf import against
from tests.perf.against import ASSISTED, PLAIN, Said, StopWatch, Theirs


@pytest.fixture(scope="module")
def cluster() -> Iterator[OpenCluster]:
    with open_cluster(ClusterOptions(model=BUNDLED, dtype="float32", local=2)) as opened:
        yield opened


@pytest.fixture
def options(tmp_path: Path, cluster: OpenCluster, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "few.jsonl").write_text(
        json.dumps({"category": "plays", "turns": ["Continue the play:\nDUKE:\nWho comes so late?"]})
    )
    monkeypatch.setattr(against, "open_cluster", lambda options: contextlib.nullcontext(cluster))
    return ["--prompts", str(tmp_path / "few.jsonl"), "--rounds", "1", "--tokens", "24", "--json"]


def test_all_answer_in_turn_and_equally(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert against.main(options) == 0
    captured = capsys.readouterr()
    said = json.loads(captured.out)
    assert captured.err == ""
    assert (said["world"], said["stages"], said["threads_per_process"], said["dtype"]) == (
        "cluster (local)",
        2,
        1,
        "float32",
    )
    rates = said["tokens_per_s"]
    assert list(rates) == ["continuous", "ar", PLAIN, ASSISTED]
    assert all(rate > 0 for rate in rates.values())
    assert said["ratio"] == pytest.approx(
        {f"continuous / {name}": rates["continuous"] / rates[name] for name in list(rates)[1:]}
    )
    assert said["agreement"] == {key: {"exact": 1, "wrong": 0} for key in rates}
    assert list(said["statistics"]) == ["continuous", "ar"]
    assert said["statistics"]["ar"]["nodes_sent"] == 23
    against.show_report(said)
    assert f"{ASSISTED}: 1 exact, 0 wrong" in capsys.readouterr().out


def other(case: PlainCase) -> Said:
    """An answer with another token at its end."""
    tokens = (*case.new_tokens[:-1], case.new_tokens[-1] ^ 1)
    return Said(tokens=tokens, reason="length", tokens_per_s=1.0, statistics=against.NOTHING)


def test_a_wrong_answer_of_ours_ends_it(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(against, "ours", lambda cluster, method: contextlib.nullcontext(other))
    assert against.main(options) == 1
    assert "continuous answers prompt 1 (plays) otherwise than the plain model" in capsys.readouterr().err


def test_another_answer_of_theirs_is_counted(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Theirs, "ask", lambda self, case, is_assisted: other(case))
    assert against.main(options) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["agreement"][ASSISTED] == {"exact": 0, "wrong": 1}


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
