"""`--drafter` several times and `[[drafter]]` tables, with real daemons: where each model runs, and that
answers stay what they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flowspec.bench import faithfulness
from tests.cli.running import Run
from tests.daemons import DaemonProcess, cluster_file, daemon_process

FEW = ("--context=120", "--max-new-tokens=12")


@pytest.fixture(scope="module")
def daemons() -> Iterator[list[DaemonProcess]]:
    with daemon_process("pi-1") as first, daemon_process("pi-2") as second, daemon_process("pi-3") as third:
        yield [first, second, third]


@pytest.fixture
def cluster(daemons: list[DaemonProcess], tmp_path: Path) -> Path:
    """Two devices for layers, evenly, and one for a drafter; another drafter is the head's."""
    addresses = {each.name: each.address for each in daemons}
    fields = {"pi-1": "layers = [0, 4]\n", "pi-2": "layers = [4, 8]\n"}
    path = cluster_file(tmp_path, addresses, fields=fields)
    with path.open("a") as file:
        file.write('[[drafter]]\nmodel = "draft-math"\ndevice = "pi-3"\n')
        file.write('[[drafter]]\nmodel = "ngram"\ndevice = "head"\n')
    return path


def test_the_cluster_file_says_what_drafts_and_where(cluster: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "prompts.txt").write_text(
        "What is 17 + 25?\nWrite a loop in Python.\nWho art thou?\nWhat is 3 * 9?\n"
    )
    one = ("generate", "--json", f"--cluster={cluster}", *FEW)
    asked = (*one, f"--prompts={tmp_path / 'prompts.txt'}", "--dtype=float32", "--temperature=.8", "--seed=3")
    expected = run(*asked, "--method=ar").answers
    found = run(*asked, "--parallel=4").answers
    assert [each["token_ids"] for each in found] == [each["token_ids"] for each in expected]
    assert {each["drafter"] for each in found} == {"draft-math, ngram"}
    assert [(each["name"], each["device"], each["is_there"]) for each in found[0]["drafters"]] == [
        ("draft-math", "pi-3", True),
        ("ngram", "head", True),
    ]
    assert found[0]["drafters"][0]["weight_bytes"] > 0
    assert [stage["name"] for stage in found[0]["stages"]] == ["pi-1", "pi-2"]
    (other,) = run(*one, "--drafter=draft", "hi").answers
    drafters = [(each["name"], each["device"]) for each in other["drafters"]]
    assert drafters == [("draft", "head")], "a flag says otherwise"


def test_verify_takes_sets_of_drafters_chains_and_users(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes together: sets of drafters without a chain, each chain that is named, and a chosen one
    from each set."""
    monkeypatch.setattr(faithfulness, "TOKENS", 100)
    sets = ("--drafter=draft,draft-code", "--chain=draft,mid", "--chain=auto")
    few = ("--limit=2", "--temperatures=0.7", "--max-new-tokens=6", "--context=300", "--dtype=float32")
    found = run("verify", "--json", "--local=1", *sets, "--parallel=2", *few).json["exact"]
    free = [answer for answer in found["answers"] if not answer["is_bound"]]
    assert (found["wrong"], len(free)) == (0, 6)
    asked = [(answer["method"], answer["drafter"], answer["chain"], answer["users"]) for answer in free]
    assert (
        asked[::2]
        == asked[1::2]
        == [
            ("cosine", "draft, draft-code", None, 2),
            ("specrouter", "draft, mid", "draft,mid", 2),
            ("specrouter", "draft, draft-code", "auto", 2),
        ]
    )


def test_the_doctor_looks_at_a_drafters_device_and_gives_it_no_layers(cluster: Path, run: Run) -> None:
    found = run("doctor", "--json", "--context=64", f"--cluster={cluster}").json
    assert found["problems"] == 0
    layers = {each["name"]: each["layers"] for each in found["devices"]}
    assert layers == {"pi-1": [0, 4], "pi-2": [4, 8], "pi-3": None}
    assert found["devices"][2]["facts"] is not None
    planned = ("plan", "--json", f"--cluster={cluster}", "--devices=2x raspberry-pi-4", "--dtype=float32")
    assert "pi-3" not in run(*planned).out
