"""What an experiment's file and flags say is what is run; whatever is wrong in a file, in a profile or with a
flag is one line that names its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from flowspec.bench import profiles
from flowspec.bench.bench import read_cases
from flowspec.bench.config import AUTO, CLUSTER, EMULATED, FIXED, SIMULATED, Bench
from flowspec.bench.experiments import FOLDER, find_experiment, read_experiment
from flowspec.bench.load_runs import pending
from flowspec.bench.profiles import find_profile, profile_text, read_profile
from flowspec.bench.synthetic import synthetic_cases
from flowspec.cli.bench_request import pick_experiment
from flowspec.cli.commands import build_parser
from flowspec.cli.main import main
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED
from flowspec.plan.tables import shipped_files
from flowspec.plan.timing import LinkSpec
from tests.bench.benches import DATA, PROFILE, STEPS, TOML, synthetic

SHIPPED = sorted(shipped_files(FOLDER).values())
METHOD = '\n[[method]]\nname = "{}"\nmethod = "{}"\n'
TESTBED = TOML[TOML.index("[[testbed]]") :]
SEVERAL = TOML.replace(
    'model = "synthetic"\nacceptance = 0.6\n', 'drafters = ["draft", "mid", "draft-math"]\n'
).replace('"ar", "continuous"', '"ar", "tree-sd", "continuous"')


def read(tmp_path: Path, text: str) -> Bench:
    path = tmp_path / "exp.toml"
    path.write_text(text)
    return read_experiment(path)


def test_shipped_experiments_and_profiles_read() -> None:
    assert len(SHIPPED) > 10
    for path in SHIPPED:
        assert find_experiment(path.stem) == path
        found = read_experiment(path)
        assert (found.name, found.world) == (path.stem, SIMULATED)
        assert all(sum(testbed.layers) == testbed.shape.layers for testbed in found.testbeds)
        assert all(min(testbed.layers) >= 1 for testbed in found.testbeds)
        if found.declared and not found.steps:
            assert {case.domain for case in read_cases(found, None)} == set(found.declared[0].acceptance)
    for name in shipped_files(profiles.FOLDER):
        profile = find_profile(name)
        assert profile.source
        assert 0.0 in profile.temperatures


def test_what_a_file_says_is_what_is_run(tmp_path: Path) -> None:
    board = shipped_files("devices")["raspberry-pi-5"]
    (tmp_path / "board.toml").write_text(board.read_text())
    text = TOML.replace('"2 x jetson-orin-nano"', '"3 x board.toml", "jetson-orin-nano"')
    text = text.replace("acceptance = 0.6\n", "").replace("[0, 1]", "[0, 1, 0]")
    own = 'prompts = ["shipped", "own.jsonl"]\nseeds = [3, 4, 3]\ndrafter = "ngram"\nlocal = 3'
    text = text.replace('"synthetic"', f'"some/model"\n{own}')
    more = 'jitter_ms = 2\nhead_ms = 1\nslowdown = 1.5\nhead = "board.toml"\n'
    bench = read(tmp_path, text + more + METHOD.format("a", "tree-sd"))
    (testbed,) = bench.testbeds
    assert [device.name for device in testbed.devices] == ["board"] * 3 + ["jetson-orin-nano"]
    assert (testbed.head.name, testbed.head_s) == ("board", 0.001)
    assert (testbed.slowdown, testbed.head_slowdown) == (1.5, 1.5)
    assert testbed.link == LinkSpec(bandwidth_mbps=150, delay_s=0.001, jitter_s=0.002)
    assert testbed.drafter_shape.name == "eagle-tinyllama-1.1b"
    assert bench.prompts == ("shipped", str(tmp_path / "own.jsonl")), "files lie beside the experiment"
    assert (bench.model, bench.drafters, bench.limit, bench.local) == ("some/model", ("ngram",), 2, 3)
    assert (bench.temperatures, bench.seeds) == ((0.0, 1.0), (3, 4)), "each once"
    assert [(setup.name, setup.method) for setup in bench.setups] == [
        ("ar", "ar"),
        ("continuous", "continuous"),
        ("a", "tree-sd"),
    ]


def test_tuned_methods_are_read_from_their_file_and_stay_on_their_testbeds(tmp_path: Path) -> None:
    tuned = METHOD.format("tree-sd tuned", "tree-sd") + 'testbeds = ["{}"]\nnodes = {}\n'
    (tmp_path / "tuned.toml").write_text(tuned.format("two boards", 8) + tuned.format("elsewhere", 16))
    bench = read(tmp_path, 'tuned = "tuned.toml"\n' + TOML)
    assert bench.testbeds[0].head.name == "jetson-orin-nano", "the first device, unless one is named"
    assert [(dict(one.options), one.runs_on("two boards")) for one in bench.setups] == [
        ({}, True),
        ({}, True),
        ({"nodes": 8}, True),
        ({"nodes": 16}, False),
    ]
    (tmp_path / "tuned.toml").write_text(tuned.format("elsewhere", 8) * 2)
    with pytest.raises(InputError, match=r"tuned\.toml: method: .* 'tree-sd tuned' twice"):
        read(tmp_path, 'tuned = "tuned.toml"\n' + TOML)


def test_a_setup_uses_the_drafters_that_it_names_or_as_many_as_it_can(tmp_path: Path) -> None:
    more = "".join(
        METHOD.format(name, "continuous") + f"{key} = {value}\n"
        for name, key, value in (
            ("some", "drafters", '["draft-math", "draft"]'),
            ("mid", "chain", '["mid"]'),
            ("all", "chain", '"auto"'),
            ("none", "chain", "[]"),
        )
    )
    bench = read(tmp_path, SEVERAL + more)
    assert {setup.name: (bench.drafters_of(setup), setup.chain) for setup in bench.setups} == {
        "ar": ((), ""),
        "tree-sd": (("draft",), ""),
        "continuous": (("draft", "mid", "draft-math"), ""),
        "some": (("draft-math", "draft"), ""),
        "mid": (("mid",), FIXED),
        "all": (("draft", "mid", "draft-math"), AUTO),
        "none": ((), FIXED),
    }


def test_drafters_boards_have_their_own_links_or_the_testbeds(tmp_path: Path) -> None:
    table = '[[testbed.drafters]]\nmodels = ["{}"]\n'
    text = table.format("mid") + 'device = "raspberry-pi-5"\nshape = "llama-68m"\n'
    text += table.format("draft") + 'device = "jetson-orin-nano"\nbandwidth_mbps = 20\nlatency_ms = 3\n'
    text += 'precision = "int8"\n' + table.format("draft-math") + 'shape = "qwen3-0.6b"\n'
    (testbed,) = read(tmp_path, SEVERAL + text).testbeds
    far = LinkSpec(bandwidth_mbps=20, delay_s=0.003)
    assert [(each.shape.name, each.precision, each.link) for each in testbed.boards] == [
        ("llama-68m", "float16", testbed.link),
        ("eagle-tinyllama-1.1b", "int8", far),
        ("qwen3-0.6b", "float16", None),
    ]


def test_a_profile_that_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text(PROFILE)
    found = read_profile(tmp_path / "some.toml")
    assert (found.name, found.domains, found.temperatures) == ("some", ("code",), (0.0,))
    assert found.of("code", 0).shares == ((0.5, 0.75), (0.25, 0.5))
    again = tmp_path / "again.toml"
    again.write_text(profile_text(found))
    assert structs.replace(read_profile(again), name="some") == found
    bench = read(tmp_path, TOML.replace("acceptance = 0.6", 'profile = "some.toml"'))
    assert (bench.acceptance, bench.profile) == (0.0, found)


PARSER = build_parser(["bench"])


def pick(*flags: str) -> Bench:
    return pick_experiment(PARSER.parse_args(["bench", *flags]))


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "tiny.toml").write_text(TOML)
    return str(tmp_path / "tiny.toml")


def test_flags_override_the_experiment(tiny: str) -> None:
    plain = read_experiment(Path(tiny))
    assert pick("--experiment", tiny) == plain
    assert pick() == read_experiment(find_experiment("paper-bundled"))
    flags = "--drafter random --limit 3 --temperatures 0.5 --seeds 7,8,7 --max-new-tokens 5 --prompts shipped"
    more = "--prompts b.jsonl --methods pipedec,ar"
    found = pick(
        "--experiment", tiny, "--model", BUNDLED, *flags.split(), *more.split(), "--testbeds", "two boards"
    )
    assert (found.model, found.drafters, found.limit) == (BUNDLED, ("random",), 3)
    assert (found.temperatures, found.seeds) == ((0.5,), (7, 8))
    assert (found.new_tokens, found.prompts) == (5, ("shipped", "b.jsonl"))
    assert [setup.name for setup in found.setups] == ["pipedec", "ar"]
    assert found.testbeds == plain.testbeds
    found = pick("--experiment", tiny, "--world", "emulated", "--model", BUNDLED, "--repeat", "3")
    assert (found.drafters, found.world) == ((BUNDLED,), EMULATED)


def test_flags_take_the_place_of_the_files_acceptance_profile_and_cluster(tiny: str, tmp_path: Path) -> None:
    assert pick("--experiment", tiny, "--acceptance", "0.86").acceptance == 0.86
    Path(tiny).write_text(TOML.replace("acceptance = 0.6", 'profile = "eagle3"'))
    assert pick("--experiment", tiny).profile is not None
    flat = pick("--experiment", tiny, "--acceptance", "0.7")
    assert (flat.acceptance, flat.profile) == (0.7, None)
    text = TOML.replace('model = "synthetic"\nacceptance = 0.6', 'world = "cluster"')
    (tmp_path / "boards.toml").touch()
    Path(tiny).write_text('cluster = "boards.toml"\n' + text)
    own = pick("--experiment", tiny)
    assert (own.world, len(own.testbeds), own.cluster) == (CLUSTER, 1, tmp_path / "boards.toml")
    local = pick("--experiment", tiny, "--local", "2")
    assert (local.testbeds, local.cluster, local.local) == ((), None, 2)
    assert pick("--experiment", tiny, "--cluster", "x.toml").cluster == Path("x.toml")
    Path(tiny).write_text(text.replace(TESTBED, ""))
    bare = pick("--experiment", tiny)
    assert (bare.testbeds, bare.local) == ((), 4), "a cluster needs no testbed"
    with pytest.raises(InputError, match=r"--world simulated: .* got 'tiny' without one"):
        pick("--experiment", tiny, "--world", "simulated")


def test_experiments_that_cannot_be_run_as_asked_are_refused(tiny: str) -> None:
    with pytest.raises(InputError, match=r"--experiment: .*paper.*, got 'nothing'"):
        pick("--experiment", "nothing")
    with pytest.raises(InputError, match="--model: synthetic"):
        pick("--experiment", "paper-bundled", "--model", "synthetic")
    only = METHOD.format("a", "tree-sd") + 'testbeds = ["three"]\n'
    Path(tiny).write_text(TOML + TESTBED.replace("two boards", "three") + only)
    with pytest.raises(InputError, match="a method that is run on one of the testbeds"):
        pick("--experiment", tiny, "--methods", "a", "--testbeds", "two boards")


TREE = METHOD.format("a", "tree-sd")
SOME = TREE + 'drafters = ["draft"]\n'
BOARD = '[[testbed.drafters]]\nmodels = ["mid"]\ndevice = "raspberry-pi-5"\nshape = "llama-68m"\n'
ONE = '[[drafter]]\nname = "one"\nacceptance = { code = 0.5 }\n'
DECLARED = TOML.replace("acceptance = 0.6\n", "") + ONE
REFUSED: dict[str, list[list[Any]]] = json.loads((DATA / "refusals.json").read_text())
"""By what they are about: what is replaced in a file, by what, and what is told; of methods what is added."""
FILES: list[tuple[Callable[[Path], object], str, list[list[str]]]] = [
    (read_experiment, TOML, REFUSED["entries"]),
    (read_experiment, TOML, [[TOML, TOML + more, told] for more, told in REFUSED["methods"]]),
    (read_experiment, SEVERAL + BOARD + SOME, REFUSED["drafters"]),
    (read_experiment, DECLARED, REFUSED["declared"]),
    (read_experiment, STEPS, REFUSED["steps"]),
    (read_profile, PROFILE, REFUSED["profile"]),
]


def line_of(error: pytest.ExceptionInfo[InputError]) -> str:
    (line,) = str(error.value).splitlines()
    return line


@pytest.mark.parametrize(("read", "base", "rows"), FILES)
def test_what_is_wrong_in_a_file_is_told_with_its_place(
    tmp_path: Path, read: Callable[[Path], object], base: str, rows: list[list[str]]
) -> None:
    path = tmp_path / "exp.toml"
    path.write_text(base)
    read(path)
    for old, new, told in rows:
        assert old in base
        path.write_text(base.replace(old, new, 1))
        with pytest.raises(InputError) as caught:
            read(path)
        assert line_of(caught).startswith(f"{path}: {told}"), (old, new, str(caught.value))


def test_flags_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(TOML)
    parser = build_parser(["bench"])
    for flags, told in REFUSED["flags"]:
        asked = parser.parse_args(["bench", "--experiment", str(path), *flags])
        with pytest.raises(InputError) as caught:
            pick_experiment(asked)
        assert line_of(caught).startswith(told), flags


@pytest.mark.parametrize("flags", [["--users", "2"], ["--answers", "2"], ["--world", "emulated"]])
def test_flags_that_steps_have_no_use_for_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    (tmp_path / "exp.toml").write_text(STEPS)
    out = tmp_path / "out"
    assert main(["bench", "--experiment", str(tmp_path / "exp.toml"), "--out", str(out), *flags]) == 2
    assert f"{flags[0]}:" in capsys.readouterr().err
    assert not out.exists()


def test_more_users_than_answers_are_refused() -> None:
    cases = synthetic_cases(1, [Sampling()], 4)
    with pytest.raises(InputError, match="--answers"):
        list(pending(synthetic(users=(6,), answers=5), cases, set()))
