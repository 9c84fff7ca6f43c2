"""Experiments, tuned methods and device profiles with anything wrong in them: each is read, or refused by one
line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.bench.experiments import read_experiment, read_setups
from flowspec.plan.profile import read_profile
from flowspec.plan.speed import completed, profile_of, speed_of
from flowspec.plan.tables import shipped_files
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


def read(folder: Path, tables: Any) -> None:
    path = folder / "all.toml"
    path.write_bytes(toml_file(tables))
    bench = read_experiment(path)
    assert bench.setups
    for testbed in bench.testbeds:
        assert sum(testbed.layers) == testbed.shape.layers
        assert min(testbed.layers) >= 1


def test_the_files_that_are_changed_are_whole(folder: Path) -> None:
    read(folder, EXPERIMENT)
    assert len(read_setups(folder / "tuned.toml")) == len(TUNED["method"])
    assert read_profile(folder / "board.toml").tflops["float32"]


@given(mutants(EXPERIMENT))
def test_any_experiment_is_read_or_refused(folder: Path, tables: Any) -> None:
    with one_line_at_most():
        read(folder, tables)


@given(mutants(TUNED))
def test_any_tuned_methods_are_read_or_refused(folder: Path, tables: Any) -> None:
    path = folder / "other.toml"
    path.write_bytes(toml_file(tables))
    with one_line_at_most():
        assert read_setups(path)


@given(mutants(BOARD))
def test_any_profile_is_read_and_told_or_refused(folder: Path, tables: Any) -> None:
    path = folder / "b.toml"
    path.write_bytes(toml_file(tables))
    with one_line_at_most():
        profile = read_profile(path)
        told = profile_of(speed_of(profile, "given"), 1 << 30)
        for precision in ("float32", "int4"):
            assert completed(told, precision).rates(precision).tflops > 0


@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
def test_any_bytes_are_refused(folder: Path, content: bytes) -> None:
    path = folder / "c.toml"
    path.write_bytes(content)
    for reader in (read_experiment, read_setups, read_profile):
        with one_line_at_most():
            reader(path)
