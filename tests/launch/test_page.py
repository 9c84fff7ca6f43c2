"""Links of the README and the documents lead somewhere, and the package's page has none that lead nowhere."""

from __future__ import annotations

import configparser
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.launch.scripts import ROOT

DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "flowspec/demo/README.md",
]
LINK = re.compile(r"(?<!\!)\[[^\]]+\]\(([^)\s]+)\)")


def page(text: str) -> str:
    spec = spec_from_file_location("flowspec_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: str = module.page(text)
    return found


def anchors(path: Path) -> set[str]:
    """What headings of a document are called in links."""
    lines = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(path: Path) -> None:
    lost = []
    for target in LINK.findall(path.read_text("utf-8")):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (heading and heading not in anchors(file)):
            lost.append(target)
    assert lost == []


def test_the_page_names_files_where_the_readme_links_to_them() -> None:
    text = (
        "![a\npicture](docs/a.png)\n\nSee [docs/a.md](docs/a.md#x), [the\nrules](docs/b.md), [us](#us) and "
        "[PyPI](https://pypi.org)."
    )
    expected = "See `docs/a.md`, the\nrules (`docs/b.md`), [us](#us) and [PyPI](https://pypi.org)."
    assert page(text).startswith(expected)
    found = page((ROOT / "README.md").read_text("utf-8"))
    assert [target for target in LINK.findall(found) if not target.startswith(("https://", "#"))] == []
    assert "](docs/" not in found
    assert found.endswith("source package.\n")


def test_all_that_the_page_names_is_in_the_source_package() -> None:
    taken = re.findall(r"^(?:graft|include) (.*)$", (ROOT / "MANIFEST.in").read_text("utf-8"), re.MULTILINE)
    for target in LINK.findall((ROOT / "README.md").read_text("utf-8")):
        first = target.partition("#")[0].partition("/")[0]
        assert first in ("", "https:", "flowspec", *" ".join(taken).split())
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    assert "long_description" not in config["metadata"], "setup.py makes it"
