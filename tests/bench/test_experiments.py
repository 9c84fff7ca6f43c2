"""Experiment files: every shipped one reads, and every wrong thing in one, or in a flag, is one line that
says where and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.bench.config import CLUSTER, EMULATED, SIMULATED, Bench, Setup
from flowspec.bench.experiments import experiment_folders, find_experiment, pick_setups, read_experiment
from flowspec.bench.rival_experiment import is_of_rivals
from flowspec.cli.bench_request import pick_experiment
from flowspec.cli.commands import build_parser
from flowspec.core.methods import METHODS
from flowspec.draft.kinds import WORDS
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED
from tests.bench.benches import TOML

SHIPPED = sorted(path for path in experiment_folders()[0].glob("*.toml") if not is_of_rivals(path))
METHOD = '\n[[method]]\nname = "a"\nmethod = "tree-sd"\n'
PUBLISHED = (
    '\n[[published]]\ntestbed = "two boards"\nreference = "ar"\n'
    "tokens_per_s = { ar = 2.0, continuous = 4.0 }\n"
)
TESTBED = TOML[TOML.index("[[testbed]]") :]


def read(tmp_path: Path, text: str) -> Bench:
    path = tmp_path / "exp.toml"
    path.write_text(text)
    return read_experiment(path)


def refusal(tmp_path: Path, text: str) -> str:
    """What is said about a file, without its name."""
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(f"{tmp_path}/exp.toml: ")
    return said.removeprefix(f"{tmp_path}/exp.toml: ")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_experiment_reads(path: Path) -> None:
    bench = read_experiment(path)
    assert find_experiment(path.stem) == path
    assert (bench.name, bench.world) == (path.stem, SIMULATED)
    for testbed in bench.testbeds:
        assert sum(testbed.layers) == testbed.shape.layers
        assert min(testbed.layers) >= 1


def test_the_experiments_that_are_promised_are_there() -> None:
    assert {path.stem for path in SHIPPED} >= {
        "cosine",
        "acceptance",
        "coupling",
        "floor",
        "matrix",
        "paper",
        "paper-bundled",
        "specrouter",
        "suffix",
        "teams",
    }
    cosine, specrouter = (read_experiment(find_experiment(name)) for name in ("cosine", "specrouter"))
    for bench in (cosine, specrouter):
        (testbed,) = bench.testbeds
        assert len(testbed.devices) == 4
        assert sorted(name for board in testbed.boards for name in board.models) == sorted(bench.drafters)
    assert [board.device is None for board in cosine.testbeds[0].boards] == [False, False]
    assert len({device.name for device in cosine.testbeds[0].devices}) == 4
    assert [setup.drafters for setup in specrouter.setups[1:]] == [
        (),
        ("draft",),
        ("mid",),
        ("draft", "mid"),
        ("draft", "mid"),
    ]
    coupling = read_experiment(find_experiment("coupling"))
    assert [
        (one.method, one.options.get("nodes", one.options.get("segment_nodes")), one.coupled)
        for one in coupling.setups
    ] == [
        (method, nodes, coupled)
        for method, nodes in (("tree-sd", 16), ("tree-sd", 32), ("continuous", 16))
        for coupled in (True, False)
    ]
    assert coupling.testbeds == read_experiment(find_experiment("paper-bundled")).testbeds
    assert [
        (testbed.slowdown, testbed.head_slowdown)
        for testbed in read_experiment(find_experiment("paper")).testbeds[:2]
    ] == [
        (1.31, 1.31),
        (3.63, 1.31),
    ]


def test_what_a_file_says_is_what_is_run(tmp_path: Path) -> None:
    (tmp_path / "board.toml").write_text(
        (experiment_folders()[0].parents[1] / "devices" / "raspberry-pi-5.toml").read_text()
    )
    text = TOML.replace('"2 x jetson-orin-nano"', '"3 x board.toml", "jetson-orin-nano"').replace(
        "acceptance = 0.6\n", ""
    )
    text = text.replace(
        '"synthetic"',
        '"some/model"\nprompts = ["shipped", "own.jsonl"]\nseeds = [3, 4, 3]\ndrafter = "ngram"\nlocal = 3',
    )
    bench = read(
        tmp_path,
        text.replace("[0, 1]", "[0, 1, 0]")
        + 'jitter_ms = 2\nhead_ms = 1\nslowdown = 1.5\nhead = "board.toml"\n'
        + METHOD,
    )
    (testbed,) = bench.testbeds
    assert [device.name for device in testbed.devices] == ["board", "board", "board", "jetson-orin-nano"], (
        "files lie beside the experiment"
    )
    assert (testbed.head.name, testbed.head_s, testbed.slowdown, testbed.head_slowdown) == (
        "board",
        0.001,
        1.5,
        1.5,
    )
    assert (testbed.link.bandwidth_mbps, testbed.link.delay_s, testbed.link.jitter_s) == (150, 0.001, 0.002)
    assert testbed.drafter_shape.name == "eagle-tinyllama-1.1b"
    assert bench.prompts == ("shipped", str(tmp_path / "own.jsonl"))
    assert (bench.model, bench.drafters, bench.limit, bench.local) == ("some/model", ("ngram",), 2, 3)
    assert (bench.temperatures, bench.seeds) == ((0.0, 1.0), (3, 4)), "each once"
    assert bench.setups == (
        Setup(name="ar", method="ar"),
        Setup(name="continuous", method="continuous"),
        Setup(name="a", method="tree-sd"),
    )


def test_a_head_is_the_first_device_unless_one_is_named(tmp_path: Path) -> None:
    bench = read(tmp_path, TOML.replace('"2 x jetson-orin-nano"', '"raspberry-pi-5", "jetson-orin-nano"'))
    assert bench.testbeds[0].head.name == "raspberry-pi-5"


def test_tuned_methods_are_read_from_their_file_and_stay_on_their_testbeds(tmp_path: Path) -> None:
    tuned = '[[method]]\nname = "tree-sd tuned"\nmethod = "tree-sd"\ntestbeds = ["{}"]\nnodes = {}\n'
    (tmp_path / "tuned.toml").write_text(tuned.format("two boards", 8) + tuned.format("elsewhere", 16))
    bench = read(tmp_path, 'tuned = "tuned.toml"\n' + TOML)
    assert [(one.name, dict(one.options), one.testbeds) for one in bench.setups[2:]] == [
        ("tree-sd tuned", {"nodes": 8}, ("two boards",)),
        ("tree-sd tuned", {"nodes": 16}, ("elsewhere",)),
    ]
    assert [one.runs_on("two boards") for one in bench.setups] == [True, True, True, False]
    (tmp_path / "tuned.toml").write_text(tuned.format("elsewhere", 8) * 2)
    with pytest.raises(
        InputError,
        match=r"tuned\.toml: method: expected each name once on a testbed, got 'tree-sd tuned' twice",
    ):
        read(tmp_path, 'tuned = "tuned.toml"\n' + TOML)
    (tmp_path / "tuned.toml").unlink()
    with pytest.raises(
        InputError, match=r"tuned\.toml: expected tuned methods, but it cannot be read \(No such file"
    ):
        read(tmp_path, 'tuned = "tuned.toml"\n' + TOML)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('name = "tiny"', "speed = 3", "unknown key 'speed'; expected acceptance, answers, cluster"),
        ('name = "tiny"', 'name = ""', "name: expected a printable text, got ''"),
        ('name = "tiny"', "name = [", "expected TOML, got "),
        (
            'name = "tiny"',
            'world = "dream"',
            "world: expected one of simulated, emulated, cluster, got 'dream'",
        ),
        ("limit = 2", "limit = 0", "limit: expected a whole number from 1 to 1000000, got 0"),
        ("limit = 2", "limit = 1.5", "limit: expected a whole number from 1"),
        ("limit = 2", "local = 0", "local: expected a whole number from 1"),
        ("limit = 2", 'repeat = "2"', "repeat: expected a whole number from 1 to 1000000, got '2'"),
        ("limit = 2", "seeds = [1.5]", "seeds: expected a list of whole numbers from 0, got [1.5]"),
        ("limit = 2", "seeds = [-1]", "seeds: expected a list of numbers from 0, got [-1]"),
        ("limit = 2", "seeds = []", "seeds: expected a list of numbers from 0, got []"),
        ("new_tokens = 12", "new_tokens = -3", "new_tokens: expected a whole number from 1"),
        ("[0, 1]", "[]", "temperatures: expected a list of numbers from 0, got []"),
        ("[0, 1]", "[nan]", "temperatures: expected a list of numbers from 0, got [nan]"),
        ("[0, 1]", "[inf]", "temperatures: expected a list of numbers from 0, got [inf]"),
        ("[0, 1]", "[-1]", "temperatures: expected a list of numbers from 0, got [-1]"),
        ("[0, 1]", "1", "temperatures: expected a list of numbers from 0, got 1"),
        ("acceptance = 0.6", "", "acceptance: expected a number above 0 to 0.99, got nothing"),
        ("acceptance = 0.6", "acceptance = 1", "acceptance: expected a number above 0 to 0.99, got 1"),
        ("acceptance = 0.6", "acceptance = nan", "acceptance: expected a number above 0 to 0.99, got nan"),
        (
            "acceptance = 0.6",
            'acceptance = 0.6\ndrafter = "ngram"',
            "drafter: expected nothing for model 'synthetic', which has no use for it",
        ),
        (
            "acceptance = 0.6",
            'acceptance = 0.6\ndrafters = ["draft"]',
            "drafters: expected nothing for model 'synthetic'",
        ),
        (
            "acceptance = 0.6",
            'acceptance = 0.6\nprompts = ["shipped"]',
            "prompts: expected nothing for model 'synthetic'",
        ),
        (
            'model = "synthetic"',
            "",
            "acceptance: expected nothing for model 'bundled', which has no use for it, got 0.6",
        ),
        (
            'model = "synthetic"\nacceptance = 0.6',
            "prompts = []",
            "prompts: expected a list of printable texts, got []",
        ),
        ('["ar", "continuous"]', "[]", "methods: expected a list of printable texts, got []"),
        (
            '["ar", "continuous"]',
            '["ar", "best"]',
            f"methods: expected names among {', '.join(METHODS)}, got ['ar', 'best']",
        ),
        (
            '["ar", "continuous"]',
            '["ar", "ar"]',
            "method: expected each name once on a testbed, got 'ar' twice",
        ),
        (
            'methods = ["ar", "continuous"]',
            "",
            "methods: expected a list of methods, or tables [[method]], got nothing",
        ),
        (TESTBED, "", "testbed: expected at least one table, in testbed = [...] or as [[testbed]]"),
        (TESTBED, TESTBED * 2, "testbed: expected each name once, got 'two boards' twice"),
        ('name = "two boards"\n', "", "testbed 1: name: expected a printable text, got nothing"),
        (
            'name = "two boards"',
            'name = "x"\nslow = 1',
            "testbed 1: unknown key 'slow'; expected bandwidth_mbps, devices",
        ),
        ('"2 x jetson-orin-nano"', "", "testbed 1: devices: expected a list of printable texts, got []"),
        (
            '"2 x jetson-orin-nano"',
            '"0 x a"',
            'testbed 1: devices: expected names such as "jetson-orin-nano" or "4 x jetson-orin-nano", got',
        ),
        (
            '"2 x jetson-orin-nano"',
            '"jetson"',
            "testbed 1: devices: device: expected a .toml file or one of ",
        ),
        (
            '"2 x jetson-orin-nano"',
            '"23 x raspberry-pi-5"',
            "testbed 1: devices: 23 devices but only 22 layers",
        ),
        (
            '["2 x jetson-orin-nano"]',
            '["raspberry-pi-5"]\nhead = "x"',
            "testbed 1: head: device: expected a .toml file or one of",
        ),
        (
            '["2 x jetson-orin-nano"]',
            '["raspberry-pi-5"]\nhead = 3',
            "testbed 1: head: expected a printable text, got 3",
        ),
        ("= 150", "= 0", "testbed 1: bandwidth_mbps: expected a number above 0, got 0"),
        ("= 150", "= inf", "testbed 1: bandwidth_mbps: expected a number above 0, got inf"),
        ("= 150", '= "fast"', "testbed 1: bandwidth_mbps: expected a number above 0, got 'fast'"),
        ("latency_ms = 1", "latency_ms = -1", "testbed 1: latency_ms: expected a number from 0, got -1"),
        ("latency_ms = 1", "jitter_ms = nan", "testbed 1: jitter_ms: expected a number from 0, got nan"),
        ("latency_ms = 1", "slowdown = 0", "testbed 1: slowdown: expected a number above 0, got 0"),
        (
            "latency_ms = 1",
            'precision = "int3"',
            "testbed 1: precision: expected one of float32, bfloat16, float16, int8, int4, gguf, got 'int3'",
        ),
        ('"tinyllama-1.1b"', '"gpt-9"', "testbed 1: shape: expected one of llama-2-7b,"),
        (
            '"tinyllama-1.1b"',
            '"tinyllama-1.1b"\ndrafter_shape = "tiny"',
            "testbed 1: drafter_shape: shape: expected one of",
        ),
    ],
    ids=lambda value: value.replace("\n", " ")[:30],
)
def test_a_wrong_file_is_one_line_with_table_key_and_what_was_expected(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    assert old in TOML
    assert refusal(tmp_path, TOML.replace(old, new, 1)).startswith(expected)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            METHOD.replace("tree-sd", "tree"),
            f"method 1: method: expected one of {', '.join(METHODS)}, got 'tree'",
        ),
        (
            METHOD.replace('method = "tree-sd"', ""),
            f"method 1: method: expected one of {', '.join(METHODS)}, got nothing",
        ),
        (METHOD.replace('name = "a"', ""), "method 1: name: expected a printable text, got nothing"),
        (
            METHOD.replace('"a"', '"a, b"'),
            "method 1: name: expected one without commas, which part names after --methods, got 'a, b'",
        ),
        (
            METHOD + "count = 3",
            "method 1: unknown key 'count'; expected chain, coupled, depth, drafters, method",
        ),
        (METHOD + "nodes = 0", "method 1: nodes: expected a whole number from 1 to 256, got 0"),
        (METHOD + "nodes = 257", "method 1: nodes: expected a whole number from 1 to 256, got 257"),
        (METHOD + "width = 17", "method 1: width: expected a whole number from 1 to 16, got 17"),
        (
            METHOD.replace("tree-sd", "continuous") + "value_min = 1.5",
            "method 1: value_min: expected a number from 0 to 1, got 1.5",
        ),
        (METHOD + "coupled = 1", "method 1: coupled: expected true or false, got 1"),
        (METHOD + METHOD, "method: expected each name once on a testbed, got 'a' twice"),
        (METHOD.replace('"a"', '"ar"'), "method: expected each name once on a testbed, got 'ar' twice"),
        (
            METHOD + 'testbeds = ["two boards"]\n' + METHOD,
            "method: expected each name once on a testbed, got 'a' twice",
        ),
        (METHOD + "testbeds = []", "method 1: testbeds: expected a list of printable texts, got []"),
        (
            METHOD + 'testbeds = ["three boards"]',
            "method 1: testbeds: expected names among two boards, got ['three boards']",
        ),
        ("\nmethod = 3", "testbed 1: unknown key 'method'"),
        (PUBLISHED.replace("two boards", "x"), "published 1: testbed: expected one of two boards, got 'x'"),
        (
            PUBLISHED.replace('"ar"', '"tree-sd"'),
            "published 1: reference: expected one of ar, continuous, got 'tree-sd'",
        ),
        (
            PUBLISHED.replace("ar = 2.0", "best = 2.0"),
            "published 1: tokens_per_s: expected rates of at least one of the methods ar; continuous",
        ),
        (
            PUBLISHED.replace("ar = 2.0, continuous = 4.0", ""),
            "published 1: tokens_per_s: expected rates of at least one of the methods",
        ),
        (PUBLISHED.replace("2.0", "0"), "published 1: tokens_per_s: ar: expected a number above 0, got 0"),
        (PUBLISHED + "fitted = 1", "published 1: fitted: expected true or false, got 1"),
        (PUBLISHED + "temperature = -1", "published 1: temperature: expected a number from 0, got -1"),
    ],
    ids=lambda value: value.replace("\n", " ")[-40:],
)
def test_wrong_methods_and_published_figures_are_refused_too(
    tmp_path: Path, more: str, expected: str
) -> None:
    assert refusal(tmp_path, TOML + more).startswith(expected)


def test_a_name_may_come_twice_where_testbeds_differ(tmp_path: Path) -> None:
    text = (
        TOML
        + TESTBED.replace("two boards", "three")
        + METHOD
        + 'testbeds = ["three"]\n'
        + METHOD
        + 'testbeds = ["two boards"]\nnodes = 3\n'
    )
    bench = read(tmp_path, text)
    assert [sum(setup.runs_on(place) for setup in bench.setups) for place in ("two boards", "three")] == [
        3,
        3,
    ]


def test_a_cluster_needs_no_testbed(tmp_path: Path) -> None:
    text = TOML.replace(TESTBED, "").replace(
        'model = "synthetic"\nacceptance = 0.6', 'world = "cluster"\ncluster = "boards.toml"'
    )
    bench = read(tmp_path, text)
    assert (bench.world, bench.testbeds, bench.cluster) == (CLUSTER, (), tmp_path / "boards.toml")


def test_setups_are_picked_by_name_and_methods_by_theirs() -> None:
    twice = [Setup(name="a b", method="ar", testbeds=(place,)) for place in "xy"]
    paper = Setup(name="pipedec (published)", method="pipedec", published=True)
    known = (*twice, paper)
    assert pick_setups(known, ["a b", "a b"]) == tuple(twice)
    assert pick_setups(known, ["pipedec", "a b"]) == (Setup(name="pipedec", method="pipedec"), *twice)
    for name in ("best", "", "AR"):
        with pytest.raises(
            InputError,
            match=r"--methods: expected names among a b, pipedec \(published\), continuous, .*, got ",
        ) as caught:
            pick_setups(known, ["a b", name])
        assert repr(name) in str(caught.value)


def pick(*flags: str) -> Bench:
    return pick_experiment(build_parser(["bench"]).parse_args(["bench", *flags]))


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "tiny.toml").write_text(TOML)
    return str(tmp_path / "tiny.toml")


def test_flags_override_the_experiment(tiny: str) -> None:
    plain = read_experiment(Path(tiny))
    assert pick("--experiment", tiny) == plain
    assert pick() == read_experiment(find_experiment("paper-bundled"))
    found = pick(
        *(
            "--experiment",
            tiny,
            "--model",
            BUNDLED,
            "--drafter",
            "random",
            "--limit",
            "3",
            "--temperatures",
            "0.5",
            "--seeds",
            "7,8,7",
        ),
        *(
            "--max-new-tokens",
            "5",
            "--prompts",
            "shipped",
            "--prompts",
            "b.jsonl",
            "--methods",
            "pipedec,ar",
            "--testbeds",
            "two boards",
        ),
    )
    assert (found.model, found.drafters, found.limit, found.temperatures, found.seeds) == (
        BUNDLED,
        ("random",),
        3,
        (0.5,),
        (7, 8),
    )
    assert (found.new_tokens, found.prompts) == (5, ("shipped", "b.jsonl"))
    assert [setup.name for setup in found.setups] == ["pipedec", "ar"]
    assert found.testbeds == plain.testbeds
    assert pick("--experiment", tiny, "--model", BUNDLED).drafters == (BUNDLED,)
    assert (
        pick("--experiment", tiny, "--world", "emulated", "--model", BUNDLED, "--repeat", "3").world
        == EMULATED
    )


def test_a_synthetic_drafter_is_as_often_right_as_the_flag_says(tiny: str) -> None:
    assert (pick("--experiment", tiny).acceptance, pick("--experiment", tiny).profile) == (0.6, None)
    assert pick("--experiment", tiny, "--acceptance", "0.86").acceptance == 0.86
    profiled = Path(tiny).with_name("profiled.toml")
    profiled.write_text(Path(tiny).read_text().replace("acceptance = 0.6", 'profile = "eagle3"'))
    assert pick("--experiment", str(profiled)).profile is not None
    flat = pick("--experiment", str(profiled), "--acceptance", "0.7")
    assert (flat.acceptance, flat.profile) == (0.7, None)
    matrix, acceptance = (read_experiment(find_experiment(name)) for name in ("matrix", "acceptance"))
    assert acceptance.testbeds == matrix.testbeds


def test_a_cluster_of_flags_is_not_the_experiments(tiny: str, tmp_path: Path) -> None:
    text = TOML.replace('model = "synthetic"\nacceptance = 0.6', 'world = "cluster"\ncluster = "boards.toml"')
    (tmp_path / "boards.toml").touch()
    Path(tiny).write_text(text)
    own = pick("--experiment", tiny)
    assert (len(own.testbeds), own.cluster) == (1, tmp_path / "boards.toml")
    local = pick("--experiment", tiny, "--local", "2")
    assert (local.testbeds, local.cluster, local.local) == ((), None, 2)
    assert pick("--experiment", tiny, "--cluster", "x.toml").cluster == Path("x.toml")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--temperatures", "nan"], "--temperatures: temperature: expected 0, or 0.001 to 100.0, got nan"),
        (["--temperatures", "0,-1"], "--temperatures: temperature: expected 0, or 0.001 to 100.0, got -1.0"),
        (["--seeds", "3,-2"], "--seeds: expected whole numbers from 0, got -2"),
        (["--testbeds", "two boards,x"], "--testbeds: expected names among two boards, got 'x'"),
        (["--testbeds", ""], "--testbeds: expected names among two boards, got ''"),
        (["--methods", ""], "--methods: expected names among ar, continuous"),
        (["--drafter", "ngram"], "--drafter: expected none with model synthetic"),
        (["--prompts", "shipped"], "--prompts: expected none with model synthetic"),
        (["--repeat", "2"], "--repeat: virtual time gives the same figures every time; expected 1, got 2"),
        (
            ["--local", "2"],
            "--cluster and --local are for --world cluster; the experiment's world is simulated",
        ),
        (
            ["--world", "emulated", "--tune"],
            "--tune works in virtual time: expected --world simulated, got emulated",
        ),
        (
            ["--model", "bundled", "--drafter", "draft", "--drafter", "mid", "--tune"],
            "--tune finds parameters for one drafter; expected",
        ),
        (["--jobs", "65"], "--jobs: expected at most 64, got 65"),
        (["--acceptance", "1"], "--acceptance: expected a share above 0, up to 0.99, got 1"),
        (["--acceptance", "nan"], "--acceptance: expected a share above 0, up to 0.99, got nan"),
        (
            ["--acceptance", ".5", "--profile", "eagle3"],
            "expected one of --profile and --acceptance, got both",
        ),
        (
            ["--model", "bundled", "--acceptance", ".5"],
            "--acceptance is for a synthetic drafter; expected an experiment with model "
            "synthetic, got 'bundled'",
        ),
        (
            ["--model", "bundled", "--drafter", "/no/such"],
            f"--drafter: expected bundled, {', '.join(WORDS)}, one of block, draft, draft-code",
        ),
        (
            ["--model", "bundled", "--drafter", "none", "--drafter", "ngram"],
            "--drafter: expected none alone, got none, ngram",
        ),
        (
            ["--model", "bundled", "--drafter", "synthetic"],
            f"--drafter: expected bundled, {', '.join(WORDS)}, one of block, draft, draft-code",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_one_line(tiny: str, flags: list[str], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        pick("--experiment", tiny, *flags)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_experiments_that_cannot_be_run_as_asked_are_refused(tiny: str) -> None:
    with pytest.raises(
        InputError,
        match=r"--experiment: expected a file or one of acceptance, cosine, .*paper.*, got 'nothing'",
    ):
        pick("--experiment", "nothing")
    with pytest.raises(
        InputError, match="--model: synthetic is for experiments that say its `acceptance`, or"
    ):
        pick("--experiment", "paper-bundled", "--model", "synthetic")
    Path(tiny).write_text(TOML + TESTBED.replace("two boards", "three") + METHOD + 'testbeds = ["three"]\n')
    with pytest.raises(InputError, match="expected a method that is run on one of the testbeds, got none"):
        pick("--experiment", tiny, "--methods", "a", "--testbeds", "two boards")
    bare = TOML.replace(TESTBED, "").replace('model = "synthetic"\nacceptance = 0.6', 'world = "cluster"')
    Path(tiny).write_text(bare)
    assert pick("--experiment", tiny).local == 4
    with pytest.raises(
        InputError, match="--world simulated: expected an experiment with a testbed, got 'tiny' without one"
    ):
        pick("--experiment", tiny, "--world", "simulated")
