"""Documents are 100 columns wide, and the files that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WIDTH = 100
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("flowspec/**/*.md")])
FOLDERS = {path.name for place in (ROOT, ROOT / "flowspec") for path in place.iterdir() if path.is_dir()}
FILE = re.compile(rf"(?<![\w/.<-])((?:{'|'.join(FOLDERS)})(?:/[\w-]+)+\.(?:py|md|toml|txt|js))(?![\w-])")
"""A file of the source by its path, from the root or from `flowspec/`."""


def named(document: Path) -> Path:
    return document.relative_to(ROOT)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: str(named(each)))
def test_lines_fit_the_width_but_for_tables_and_what_cannot_be_broken(document: Path) -> None:
    lines = document.read_text("utf-8").split("\n")
    wide = [
        line
        for line in lines
        if len(line) > WIDTH and not line.startswith("|") and " " in line.strip() and "](" not in line
    ]
    assert wide == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: str(named(each)))
def test_the_files_that_are_named_are_there(document: Path) -> None:
    places = (ROOT, ROOT / "flowspec", document.parent)
    missing = {
        name
        for name in FILE.findall(document.read_text("utf-8"))
        if not name.endswith("/NAME.py") and not any((place / name).exists() for place in places)
    }
    assert missing == set()
