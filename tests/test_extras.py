"""What is said where a package is missing."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

from flowspec import extras

ROOT = Path(__file__).parents[1]


def test_the_packages_are_those_of_the_extras() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    known = config["options.extras_require"]
    for extra, packages in extras.EXTRAS.items():
        named = [re.split(r"[<>=]", line)[0] for line in known[extra].split()]
        assert sorted(packages) == sorted(named)


def test_a_checkout_has_a_launcher_and_nobody_is_sent_to_a_name_that_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert extras.how_to_get("serve") == "run launch/install serve"
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    for extra, packages in extras.EXTRAS.items():
        assert extras.how_to_get(extra) == f"run pip install {' '.join(packages)}"
