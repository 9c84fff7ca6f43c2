"""`--drafter` several times and `[[drafter]]` tables, with real daemons: where each model runs, and that
answers stay what they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowspec.cli.main import main
from tests.daemons import DaemonProcess, daemon_process

FEW = ("--context=120", "--max-new-tokens=12")


@pytest.fixture(scope="module")
def daemons() -> Iterator[list[DaemonProcess]]:
    with daemon_process("pi-1") as first, daemon_process("pi-2") as second, daemon_process("pi-3") as third:
        yield [first, second, third]


@pytest.fixture
def cluster(daemons: list[DaemonProcess], tmp_path: Path) -> Path:
    """Two devices for layers, evenly, and one for a drafter; another drafter is the head's."""
    path = tmp_path / "cluster.toml"
    layers = ("layers = [0, 4]\n", "layers = [4, 8]\n", "")
    tables = [
        f'[[device]]\nname = "{each.name}"\naddress = "{each.address}"\n{own}'
        for each, own in zip(daemons, layers, strict=True)
    ]
    path.write_text(
        "".join(tables)
        + '[[drafter]]\nmodel = "draft-math"\ndevice = "pi-3"\n'
        + '[[drafter]]\nmodel = "ngram"\ndevice = "head"\n'
    )
    return path


def answers(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["generate", "--json", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_cluster_file_says_what_drafts_and_where(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text(
        "What is 17 + 25?\nWrite a loop in Python.\nWho art thou?\nWhat is 3 * 9?\n"
    )
    asked = (
        f"--cluster={cluster}",
        f"--prompts={tmp_path / 'prompts.txt'}",
        "--dtype=float32",
        "--temperature=0.8",
        "--seed=3",
        *FEW,
    )
    expected = answers(capsys, *asked, "--method=ar")
    found = answers(capsys, *asked, "--parallel=4")
    assert [each["token_ids"] for each in found] == [each["token_ids"] for each in expected]
    assert {each["drafter"] for each in found} == {"draft-math, ngram"}
    assert [(each["name"], each["device"], each["is_there"]) for each in found[0]["drafters"]] == [
        ("draft-math", "pi-3", True),
        ("ngram", "head", True),
    ]
    assert found[0]["drafters"][0]["weight_bytes"] > 0
    assert [stage["name"] for stage in found[0]["stages"]] == ["pi-1", "pi-2"]
    (other,) = answers(capsys, f"--cluster={cluster}", "--drafter=draft", *FEW, "hi")
    assert [(each["name"], each["device"]) for each in other["drafters"]] == [("draft", "head")], (
        "a flag says otherwise"
    )


def test_a_person_is_told_where_drafters_run(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"--cluster={cluster}", *FEW, "hi"]) == 0
    assert "  pi-3: drafter draft-math, 3 MiB of weights, pid" in capsys.readouterr().err


def test_verify_takes_sets_of_drafters(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("--drafter=draft-math,ngram", "--drafter=draft-code,draft")
    few = ("--limit=1", "--temperatures=0", "--max-new-tokens=10", "--context=300", "--dtype=float32")
    status = main(["verify", "--json", f"--cluster={cluster}", *sets, *few])
    found = json.loads(capsys.readouterr().out)["exact"]
    assert (status, found["wrong"]) == (0, 0)
    free = [answer["drafter"] for answer in found["answers"] if not answer["is_bound"]]
    assert free == ["draft-math, ngram", "draft-code, draft"]


def test_verify_takes_chains_and_users(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever goes together: sets of drafters without a chain, each chain that is named, and a chosen one
    from each set."""
    sets = ("--drafter=draft,draft-code", "--chain=draft,mid", "--chain=auto")
    few = ("--limit=3", "--temperatures=0.7", "--max-new-tokens=8", "--context=300", "--dtype=float32")
    status = main(["verify", "--json", "--local=2", *sets, "--parallel=1,3", *few])
    found = json.loads(capsys.readouterr().out)["exact"]
    free = [answer for answer in found["answers"] if not answer["is_bound"]]
    assert (status, found["wrong"], len(free)) == (0, 0, 18)
    asked = [(answer["method"], answer["drafter"], answer["chain"], answer["users"]) for answer in free]
    assert asked == [
        (*what, users)
        for what in (
            ("cosine", "draft, draft-code", None),
            ("specrouter", "draft, mid", "draft,mid"),
            ("specrouter", "draft, draft-code", "auto"),
        )
        for users in (1, 1, 1, 3, 3, 3)
    ]


def test_the_doctor_looks_at_a_drafters_device_and_gives_it_no_layers(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["doctor", "--json", "--context=64", f"--cluster={cluster}"])
    found = json.loads(capsys.readouterr().out)
    assert (status, found["problems"]) == (0, 0)
    assert {each["name"]: each["layers"] for each in found["devices"]} == {
        "pi-1": [0, 4],
        "pi-2": [4, 8],
        "pi-3": None,
    }
    assert found["devices"][2]["facts"] is not None


def test_a_plan_has_no_layers_for_a_drafters_device(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "plan",
                "--json",
                f"--cluster={cluster}",
                "--devices=2x raspberry-pi-4",
                "--dtype=float32",
            ]
        )
        == 0
    )
    assert "pi-3" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafter=draft,bundled"], "each drafter once, got 'bundled' twice"),
        (["--drafter=draft,nonsense"], "there is no folder 'nonsense'"),
        (["--drafter=draft,mid", "--method=pipedec"], "pipedec makes use of 1 drafter, got 2: draft, mid"),
        (["--chain=draft,mid", "--method=continuous"], "--chain goes with method specrouter"),
        (["--drafter=" + ",".join(f"d{number}" for number in range(17))], "at most 16 drafters, got 17"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "hi"], ["verify"], ["chat"]])
def test_what_does_not_go_together_is_one_line(
    command: list[str], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_device_that_the_cluster_file_does_not_have_is_one_line(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.write_text(cluster.read_text() + '[[drafter]]\nmodel = "mid"\ndevice = "pi-9"\n')
    assert main(["generate", f"--cluster={cluster}", "hi"]) == 2
    assert capsys.readouterr().err.endswith(
        "drafter: device: expected head or one of pi-1, pi-2, pi-3, got 'pi-9'\n"
    )
