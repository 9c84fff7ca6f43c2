"""What is said where a package is missing."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

from flowspec import extras


def test_the_packages_are_those_of_the_extras(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = configparser.ConfigParser()
    config.read(extras.ROOT / "setup.cfg", "utf-8")
    assert extras.how_to_get("serve") == "run launch/install serve"
    monkeypatch.setattr(extras, "ROOT", tmp_path)  # where it is no checkout
    for extra, packages in extras.EXTRAS.items():
        named = [re.split(r"[<>=]", line)[0] for line in config["options.extras_require"][extra].split()]
        assert sorted(packages) == sorted(named)
        assert extras.how_to_get(extra) == f"run pip install {' '.join(packages)}"
