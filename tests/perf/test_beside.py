"""Methods on a real local cluster: medians and ratios are those of the rates, and answers must be equal."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from flowspec.errors import InputError
from flowspec.model.files import BUNDLED
from flowspec.model.prompts import Prompt
from flowspec.runtime.session import ClusterOptions, Session
from flowspec.runtime.token_stream import Timing
from tests.perf import beside
from tests.perf.beside import Timed

STATISTICS: dict[str, Any] = {
    "rows_computed": 50,
    "dead_in_queue": 5,
    "dead_between_layers": 1,
    "dead_late": 0,
    "stage_busy": [0.5, 0.25],
    "tokens_per_commit": 2.0,
    "share_in_flight": 0.5,
    "nodes_sent": 9,
    "draft_s": 0.5,
    "head_s": 0.25,
    "decode_s": 2.0,
}


def timed(prompt: str, method: str, rate: float) -> Timed:
    about = Prompt(prompt_id=prompt, domain="made", turns=("x",))
    return Timed(prompt=about, method=method, tokens=(1, 2), tokens_per_s=rate, statistics=STATISTICS)


def test_ratios_are_of_medians_by_prompt() -> None:
    found = [timed("a", "continuous", rate) for rate in (10.0, 30.0, 20.0)] + [
        timed("a", "ar", rate) for rate in (5.0, 10.0, 90.0)
    ]
    found += [
        timed("b", "continuous", 8.0),
        timed("b", "ar", 2.0),
        timed("short", "continuous", 0.0),
        timed("short", "ar", 0.0),
    ]
    said = beside.report(found)
    assert said["world"] == "cluster (local)"
    assert [(each["prompt"], each["ratio"]) for each in said["prompts"]] == [
        ("a", {"continuous / ar": 2.0}),
        ("b", {"continuous / ar": 4.0}),
    ]
    assert said["ratio"] == {"continuous / ar": 3.0}
    assert said["tokens_per_s"] == {"continuous": 14.0, "ar": 6.0}
    explained = said["statistics"]["ar"]
    assert (explained["dead_in_queue"], explained["dead_between_layers"], explained["stage_busy"]) == (
        10,
        2,
        [0.5, 0.25],
    )
    with pytest.raises(InputError, match="more --tokens"):
        beside.report([timed("short", "ar", 0.0)])


def test_a_cluster_answers_with_each_method_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "few.jsonl").write_text(
        json.dumps({"category": "plays", "turns": ["Continue the play:\nDUKE:\nWho comes so late?"]})
    )
    options = ["--prompts", str(tmp_path / "few.jsonl"), "--rounds", "1", "--tokens", "8", "--json"]
    with beside.open_cluster(ClusterOptions(model=BUNDLED, dtype="float32", local=2)) as cluster:
        monkeypatch.setattr(beside, "open_cluster", lambda options: contextlib.nullcontext(cluster))
        assert beside.main(options) == 0
        said = json.loads(capsys.readouterr().out)

        real = beside.answer

        def changed(session: Session, *rest: Any) -> tuple[Timing, dict[str, Any]]:
            timing, report = real(session, *rest)
            if session.decoding.method == "ar":
                timing.new_tokens[-1] += 1
            return timing, report

        monkeypatch.setattr(beside, "answer", changed)
        assert beside.main(options) == 1
        assert "ar answers prompt 1 (plays) otherwise than continuous" in capsys.readouterr().err
    assert list(said["tokens_per_s"]) == ["continuous", "ar"]
    assert said["ratio"]["continuous / ar"] == pytest.approx(
        said["tokens_per_s"]["continuous"] / said["tokens_per_s"]["ar"]
    )
    assert said["statistics"]["ar"]["tokens_per_commit"] == 1
    assert said["statistics"]["ar"]["nodes_sent"] == 7
    assert len(said["statistics"]["continuous"]["stage_busy"]) == 2
    beside.show_report(said)
    assert "median" in capsys.readouterr().out


def test_wrong_flags_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert beside.main(["--temperature", "-1"]) == 2
    assert "--temperature" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        beside.main(["--method", "best"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_first_of_each_domain() -> None:
    prompts = [Prompt(prompt_id=domain, domain=domain, turns=("1",)) for domain in "ab"]
    assert beside.first_of_each([*prompts, *prompts], 1) == prompts
    assert beside.first_of_each([*prompts, *prompts], None) == [*prompts, *prompts]
