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
from flowspec.model.accelerator import importing

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
        others = {"flowspec[head]", "flowspec[hub]", *["llguidance"] * (extra == "serve")}
        assert {*modules} == {*named[extra]} - others
    all_of_them = re.fullmatch(r"flowspec\[(.+)\]", named["all"][0])
    assert all_of_them is not None
    assert {*all_of_them[1].split(","), "grammars", "hub"} == extras.EXTRAS.keys(), "others bring these"


def test_an_extra_is_got_into_the_environment_that_lacks_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install = extras.ROOT / "launch/install"
    monkeypatch.setattr(sys, "prefix", str(extras.ROOT / ".venv"))
    monkeypatch.chdir(extras.ROOT)
    assert extras.how_to_get("serve") == "run launch/install serve"
    monkeypatch.chdir(tmp_path)
    assert extras.how_to_get("serve") == f"run {install} serve"
    monkeypatch.setattr(sys, "prefix", "/home/pi/flowspec/venv")
    assert extras.how_to_get("hub") == f"run FLOWSPEC_VENV=/home/pi/flowspec/venv {install} hub"
    monkeypatch.setattr(extras, "ROOT", tmp_path)  # where it is no checkout
    assert extras.how_to_get("serve") == f"run {sys.executable} -m pip install 'flowspec[serve]'"


def test_what_is_of_no_extra_is_an_error_of_its_own() -> None:
    assert extras.missing_part(ModuleNotFoundError("none", name="flowspec.none")) is None
    with pytest.raises(ModuleNotFoundError), importing():
        import flowspec.none  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        extras.imported("flowspec.none")
    with pytest.raises(ModuleNotFoundError), importing():  # which is installed
        raise ModuleNotFoundError("there is none", name="transformers.none")


def test_a_module_of_an_extra_is_missing_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda package: False)
    missing = pytest.raises(
        extras.MissingPartError, match=r"transformers is not .* head: run .*install.* head$"
    )
    with missing, importing():
        raise ModuleNotFoundError("there is none", name="transformers")


@pytest.mark.parametrize("command", commands.COMMANDS)
def test_a_stage_has_the_commands_of_a_device_and_names_the_extra_of_others(command: str) -> None:
    """Where no module of an extra can be imported."""
    hidden = [module for modules in extras.EXTRAS.values() for module in modules]
    code = f"""
import sys
from flowspec import extras
class Absent:
    def find_spec(self, name, *_unused):
        if name in {hidden}:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Absent())
extras.is_installed = lambda package: False
from flowspec.cli.main import main
sys.exit(main([{command!r}, "--help"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    if command in STAGE:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        extra = "serve" if command == "serve" else "head"
        told = rf"\w+ is not installed; it is of the extra {extra}: run .*install.* {extra}\n"
        assert done.returncode == 2
        assert re.fullmatch(f"flowspec {command}: {told}", done.stderr)
