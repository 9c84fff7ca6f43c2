"""Experiments, tuned methods and device profiles with anything wrong in them: each is read, or refused by one
line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.bench.experiment import read_experiment, read_setups
from flowspec.plan.profile import completed, profile_of, read_profile, speed_of
from flowspec.plan.tables import shipped_files
from tests.bench.benches import STEPS
from tests.mutations import mutants, one_line_at_most, toml_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BOARD = tomllib.loads(shipped_files("devices")["raspberry-pi-5"].read_text())
TUNED = tomllib.loads(shipped_files("configs/tuned")["paper-bundled"].read_text())
EXPERIMENT = tomllib.loads((Path(__file__).parents[1] / "data" / "experiment.toml").read_text())
"""Whatever an experiment may say."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experiment")
    (made / "board.toml").write_bytes(toml_file(BOARD))
    (made / "tuned.toml").write_bytes(toml_file(TUNED))
    return made


def read_whole(path: Path) -> None:
    experiment = read_experiment(path)
    assert experiment.setups
    for testbed in experiment.testbeds:
        assert sum(testbed.layers) == testbed.shape.layers
        assert min(testbed.layers) >= 1


def read_board(path: Path) -> None:
    profile = profile_of(speed_of(read_profile(path), "given"), 1 << 30)
    for precision in ("float32", "int4"):
        assert completed(profile, precision).rates(precision).tflops > 0


READERS: dict[str, tuple[dict[str, Any], Callable[[Path], object]]] = {
    "experiment": (EXPERIMENT, read_whole),
    "schedule": (tomllib.loads(STEPS), read_whole),
    "tuned": (TUNED, read_setups),
    "board": (BOARD, read_board),
}


@pytest.mark.parametrize("kind", READERS)
@given(data=st.data())
def test_any_file_is_read_or_refused(folder: Path, kind: str, data: st.DataObject) -> None:
    tables, read = READERS[kind]
    path = folder / "changed.toml"
    path.write_bytes(toml_file(tables))
    read(path)
    path.write_bytes(toml_file(data.draw(mutants(tables))))
    with one_line_at_most():
        read(path)


@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_any_bytes_are_refused(folder: Path, content: bytes) -> None:
    path = folder / "c.toml"
    path.write_bytes(content)
    for _, read in READERS.values():
        with one_line_at_most():
            read(path)
