"""What is said where a package is missing."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowspec import extras
from flowspec.cli import commands
from flowspec.model.imports import IMPORTING

STAGE = ("daemon", "keygen")
"""Commands that need no extra."""


def test_modules_are_those_of_the_extras(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = configparser.ConfigParser()
    config.read(extras.ROOT / "setup.cfg", "utf-8")
    named = {
        extra: [re.split(r"[<>=]", line)[0] for line in lines.split()]
        for extra, lines in config["options.extras_require"].items()
    }
    for extra, modules in extras.EXTRAS.items():
        others = {"flowspec[head]", "llguidance"} if extra == "serve" else set()
        assert {*modules} == {*named[extra]} - others
    all_of_them = re.fullmatch(r"flowspec\[(.+)\]", named["all"][0])
    assert all_of_them is not None
    assert {*all_of_them[1].split(","), "grammars"} == extras.EXTRAS.keys(), "serve has the grammars"
    assert extras.how_to_get("serve") == "run launch/install serve"
    monkeypatch.setattr(extras, "ROOT", tmp_path)  # where it is no checkout
    assert extras.how_to_get("serve") == "run pip install 'flowspec[serve]'"


def test_what_is_of_no_extra_is_an_error_of_its_own() -> None:
    assert extras.missing_part(ModuleNotFoundError("none", name="flowspec.none")) is None
    with pytest.raises(ModuleNotFoundError), IMPORTING:
        import flowspec.none  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        extras.imported("flowspec.none")
    missing = pytest.raises(extras.MissingPartError, match=r"transformers is not .*: run launch/install head")
    with missing, IMPORTING:
        raise ModuleNotFoundError("there is none", name="transformers.models")


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_a_stage_has_the_commands_of_a_device_and_names_the_extra_of_others(command: str) -> None:
    """Where no module of an extra can be imported."""
    hidden = [module for modules in extras.EXTRAS.values() for module in modules]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({hidden}))
from flowspec.cli.main import main
sys.exit(main([{command!r}, "--help"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    if command in STAGE:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 2
        assert re.fullmatch(
            rf"flowspec {command}: \w+ is not installed; it is of the extra head: run launch/install head\n",
            done.stderr,
        )
