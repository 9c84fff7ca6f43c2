"""Whatever is wrong in an experiment's file, in a profile or with a flag is one line that names its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowspec.bench.experiments import read_experiment
from flowspec.bench.load_runs import pending
from flowspec.bench.profiles import read_profile
from flowspec.bench.rival_experiment import read_rivals
from flowspec.bench.synthetic import synthetic_cases
from flowspec.cli.bench_request import pick_experiment
from flowspec.cli.commands import build_parser
from flowspec.cli.main import main
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from tests.bench.benches import DATA, PROFILE, RIVALS, STEPS, TOML, synthetic

METHOD = '\n[[method]]\nname = "a"\nmethod = "tree-sd"\n'
SOME = METHOD + 'drafters = ["draft"]\n'
BOARD = '[[testbed.drafters]]\nmodels = ["mid"]\ndevice = "raspberry-pi-5"\nshape = "llama-68m"\n'
SEVERAL = TOML.replace(
    'model = "synthetic"\nacceptance = 0.6\n', 'drafters = ["draft", "mid", "draft-math"]\n'
)
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
    (read_rivals, RIVALS, REFUSED["rivals"]),
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


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (STEPS, ["--users", "2"]),
        (STEPS, ["--answers", "2"]),
        (STEPS, ["--world", "emulated"]),
        (RIVALS, ["--methods", "ar"]),
        (RIVALS, ["--acceptance", ".5"]),
        (RIVALS, ["--testbeds", "no"]),
    ],
)
def test_flags_that_a_kind_of_experiment_has_no_use_for_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, flags: list[str]
) -> None:
    (tmp_path / "exp.toml").write_text(text)
    out = tmp_path / "out"
    assert main(["bench", "--experiment", str(tmp_path / "exp.toml"), "--out", str(out), *flags]) == 2
    assert f"{flags[0]}:" in capsys.readouterr().err
    assert not out.exists()


def test_more_users_than_answers_are_refused() -> None:
    cases = synthetic_cases(1, [Sampling()], 4)
    with pytest.raises(InputError, match="--answers"):
        list(pending(synthetic(users=(6,), answers=5), cases, set()))
