"""What an experiment's file and flags say is what is run; whatever is wrong in a file or with a flag is one
line that names its place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowspec.bench.cases import synthetic_cases
from flowspec.bench.engine import works_of
from flowspec.bench.experiment import (
    AUTO,
    CLUSTER,
    EMULATED,
    FIXED,
    FOLDER,
    SIMULATED,
    SYNTHETIC,
    Experiment,
    find_experiment,
    read_experiment,
)
from flowspec.cli.bench import pick_experiment
from flowspec.cli.commands import build_parser
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED
from flowspec.plan.tables import shipped_files
from flowspec.plan.timing import LinkSpec
from tests.bench.benches import STEPS, TOML, synthetic

METHOD = '\n[[method]]\nname = "{}"\nmethod = "{}"\n'
TESTBED = TOML[TOML.index("[[testbed]]") :]
SEVERAL = TOML.replace(
    'model = "synthetic"\nacceptance = 0.6\n', 'drafters = ["draft", "mid", "draft-math"]\n'
).replace('"ar", "continuous"', '"ar", "tree-sd", "continuous"')
SOME = METHOD.format("a", "tree-sd") + 'drafters = ["draft"]\n'
BOARD = '[[testbed.drafters]]\nmodels = ["mid"]\ndevice = "raspberry-pi-5"\nshape = "llama-68m"\n'
DATA = Path(__file__).parents[1] / "data" / "bench" / "refusals.json"
REFUSED: dict[str, list[list[Any]]] = json.loads(DATA.read_text())
"""By what they are about: what is replaced in a file, by what, and the message; of methods what is added."""


def read(tmp_path: Path, text: str) -> Experiment:
    path = tmp_path / "exp.toml"
    path.write_text(text)
    return read_experiment(path)


@pytest.mark.parametrize("name", sorted(shipped_files(FOLDER)))
def test_shipped_experiments_are_read(name: str) -> None:
    found = read_experiment(find_experiment(name))
    assert (found.name, found.world) == (name, SIMULATED)
    assert all(sum(testbed.layers) == testbed.shape.layers for testbed in found.testbeds)
    assert all(min(testbed.layers) >= 1 for testbed in found.testbeds)


def test_what_a_file_says_is_what_is_run(tmp_path: Path) -> None:
    board = shipped_files("devices")["raspberry-pi-5"]
    (tmp_path / "board.toml").write_text(board.read_text())
    text = TOML.replace('"2 x jetson-orin-nano"', '"3 x board.toml", "jetson-orin-nano"')
    text = text.replace("acceptance = 0.6\n", "").replace("[0, 1]", "[0, 1, 0]")
    own = 'prompts = ["shipped", "own.jsonl"]\nseeds = [3, 4, 3]\ndrafter = "ngram"\nlocal = 3'
    text = text.replace('"synthetic"', f'"some/model"\n{own}')
    more = 'jitter_ms = 2\nhead_ms = 1\nslowdown = 1.5\nhead = "board.toml"\n'
    found = read(tmp_path, text + more + METHOD.format("a", "tree-sd"))
    (testbed,) = found.testbeds
    assert [device.name for device in testbed.devices] == ["board"] * 3 + ["jetson-orin-nano"]
    assert (testbed.head.name, testbed.head_s) == ("board", 0.001)
    assert (testbed.slowdown, testbed.head_slowdown) == (1.5, 1.5)
    assert testbed.link == LinkSpec(bandwidth_mbps=150, delay_s=0.001, jitter_s=0.002)
    assert testbed.drafter_shape is not None
    assert testbed.drafter_shape.name == "eagle-tinyllama-1.1b"
    assert found.prompts == ("shipped", str(tmp_path / "own.jsonl")), "files lie beside the experiment"
    assert (found.model, found.drafters, found.limit, found.local) == ("some/model", ("ngram",), 2, 3)
    assert (found.temperatures, found.seeds) == ((0.0, 1.0), (3, 4)), "each once"
    named = [(setup.name, setup.method) for setup in found.setups]
    assert named == [("ar", "ar"), ("continuous", "continuous"), ("a", "tree-sd")]
    steps = read(tmp_path, STEPS).steps
    assert [step.label for step in steps] == ["1 user", "2 users, synthetic 3 times as slow, synthetic lost"]


def test_tuned_methods_are_read_from_their_file_and_stay_on_their_testbeds(tmp_path: Path) -> None:
    tuned = METHOD.format("tree-sd tuned", "tree-sd") + 'testbeds = ["{}"]\nnodes = {}\n'
    (tmp_path / "tuned.toml").write_text(tuned.format("two boards", 8) + tuned.format("elsewhere", 16))
    found = read(tmp_path, 'tuned = "tuned.toml"\n' + TOML)
    assert found.testbeds[0].head.name == "jetson-orin-nano", "the first device, unless one is named"
    kinds = [(dict(one.options), one.runs_on("two boards")) for one in found.setups]
    assert kinds == [({}, True), ({}, True), ({"nodes": 8}, True), ({"nodes": 16}, False)]
    (tmp_path / "tuned.toml").write_text(tuned.format("elsewhere", 8) * 2)
    with pytest.raises(InputError, match=r"tuned\.toml: method: .* 'tree-sd tuned' twice"):
        read(tmp_path, 'tuned = "tuned.toml"\n' + TOML)


def test_a_setup_uses_the_drafters_that_it_names_or_as_many_as_it_can(tmp_path: Path) -> None:
    named = {"some": 'drafters = ["draft-math", "draft"]', "mid": 'chain = ["mid"]', "all": 'chain = "auto"'}
    tables = (METHOD.format(name, "continuous") + key for name, key in (*named.items(), ("no", "chain = []")))
    found = read(tmp_path, SEVERAL + "\n".join(tables))
    assert {setup.name: (found.drafters_of(setup), setup.chain) for setup in found.setups} == {
        "ar": ((), ""),
        "tree-sd": (("draft",), ""),
        "continuous": (("draft", "mid", "draft-math"), ""),
        "some": (("draft-math", "draft"), ""),
        "mid": (("mid",), FIXED),
        "all": (("draft", "mid", "draft-math"), AUTO),
        "no": ((), FIXED),
    }


def test_drafters_boards_are_named_or_the_heads(tmp_path: Path) -> None:
    table = '[[testbed.drafters]]\nmodels = ["{}"]\n'
    text = BOARD + table.format("draft") + 'device = "jetson-orin-nano"\n'
    text += table.format("draft-math") + 'shape = "qwen3-0.6b"\n'
    (testbed,) = read(tmp_path, SEVERAL + text).testbeds
    assert [(each.shape.name, each.device and each.device.name) for each in testbed.boards] == [
        ("llama-68m", "raspberry-pi-5"),
        ("eagle-tinyllama-1.1b", "jetson-orin-nano"),
        ("qwen3-0.6b", None),
    ]


PARSER = build_parser(["bench"])


def pick(*flags: str) -> Experiment:
    return pick_experiment(PARSER.parse_args(["bench", *flags]))


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "tiny.toml").write_text(TOML)
    return str(tmp_path / "tiny.toml")


def test_flags_override_the_experiment(tiny: str) -> None:
    plain = read_experiment(Path(tiny))
    assert pick("--experiment", tiny) == plain
    assert pick() == read_experiment(find_experiment("paper-bundled"))
    assert pick("--experiment", tiny, "--acceptance", "0.86").acceptance == 0.86
    flags = "--drafter random --limit 3 --temperatures 0.5 --seeds 7,8,7 --max-new-tokens 5 --prompts shipped"
    more = f"--prompts b.jsonl --methods pipedec,ar --model {BUNDLED}"
    found = pick("--experiment", tiny, *flags.split(), *more.split(), "--testbeds", "two boards")
    assert (found.model, found.drafters, found.limit) == (BUNDLED, ("random",), 3)
    assert (found.temperatures, found.seeds) == ((0.5,), (7, 8))
    assert (found.new_tokens, found.prompts) == (5, ("shipped", "b.jsonl"))
    assert [setup.name for setup in found.setups] == ["pipedec", "ar"]
    assert found.testbeds == plain.testbeds
    found = pick("--experiment", tiny, "--world", "emulated", "--model", BUNDLED, "--repeat", "3")
    assert (found.drafters, found.world) == ((BUNDLED,), EMULATED)


def test_flags_take_the_place_of_the_files_cluster(tiny: str, tmp_path: Path) -> None:
    text = TOML.replace('model = "synthetic"\nacceptance = 0.6', 'world = "cluster"')
    boards = tmp_path / "boards.toml"
    boards.write_text('[[device]]\nname = "one"\naddress = "127.0.0.1:7701"\n')
    Path(tiny).write_text('cluster = "boards.toml"\n' + text)
    own = pick("--experiment", tiny)
    assert (own.world, len(own.testbeds), own.cluster) == (CLUSTER, 1, boards)
    local = pick("--experiment", tiny, "--local", "2")
    assert (local.testbeds, local.cluster, local.local) == ((), None, 2)
    assert pick("--experiment", tiny, "--cluster", str(boards)).testbeds == ()
    with pytest.raises(InputError, match=r"^x\.toml: "):
        pick("--experiment", tiny, "--cluster", "x.toml")
    Path(tiny).write_text(text)
    assert pick("--experiment", tiny).testbeds == (), "processes of this machine are no boards"
    Path(tiny).write_text(text.replace(TESTBED, ""))
    bare = pick("--experiment", tiny)
    assert (bare.testbeds, bare.local) == ((), 4), "a cluster needs no testbed"
    with pytest.raises(InputError, match=r"tiny\.toml: testbed: .* got nothing"):
        pick("--experiment", tiny, "--world", "simulated")


def line_of(error: pytest.ExceptionInfo[InputError]) -> str:
    (line,) = str(error.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("base", "rows"),
    [
        (TOML, REFUSED["entries"]),
        (TOML, [[TOML, TOML + more, line] for more, line in REFUSED["methods"]]),
        (SEVERAL + BOARD + SOME, REFUSED["drafters"]),
        (STEPS, REFUSED["steps"]),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_with_its_place(
    tmp_path: Path, base: str, rows: list[list[str]]
) -> None:
    read(tmp_path, base)
    for old, new, line in rows:
        assert old in base
        with pytest.raises(InputError) as caught:
            read(tmp_path, base.replace(old, new, 1))
        assert line_of(caught).startswith(f"{tmp_path / 'exp.toml'}: {line}"), (old, new, str(caught.value))


@pytest.mark.parametrize(("text", "kind"), [(TOML, "flags"), (STEPS, "flags of steps")])
def test_flags_that_do_not_fit_are_refused(tiny: str, text: str, kind: str) -> None:
    Path(tiny).write_text(text)
    for flags, line in REFUSED[kind]:
        with pytest.raises(InputError) as caught:
            pick("--experiment", tiny, *flags)
        assert line_of(caught).removeprefix(f"{tiny}: ").startswith(line), flags


def test_a_synthetic_model_needs_to_know_how_often_it_is_right() -> None:
    with pytest.raises(InputError, match=r"paper-bundled\.toml: acceptance: .*--acceptance, got nothing"):
        pick("--model", "synthetic")
    picked = pick("--model", "synthetic", "--acceptance", "0.5")
    assert (picked.drafters, picked.acceptance) == ((SYNTHETIC,), 0.5)


def test_what_nobody_could_run_is_refused(tiny: str) -> None:
    only = METHOD.format("a", "tree-sd") + 'testbeds = ["three"]\n'
    Path(tiny).write_text(TOML + TESTBED.replace("two boards", "three") + only)
    with pytest.raises(InputError, match="a method that is run on one of the testbeds"):
        pick("--experiment", tiny, "--methods", "a", "--testbeds", "two boards")
    with pytest.raises(InputError, match="--answers"):
        works_of(synthetic(users=(6,), answers=5), synthetic_cases(1, [Sampling()], 4))
