"""The package's page has no link that leads nowhere, and all that it names is in the source package."""

from __future__ import annotations

import configparser
import re
from importlib.util import module_from_spec, spec_from_file_location

from tests.launch.scripts import ROOT

LINK = re.compile(r"(?<!\!)\[[^\]]+\]\(([^)\s]+)\)")


def page(text: str) -> str:
    spec = spec_from_file_location("flowspec_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.page(text))


def test_the_page_names_files_where_the_readme_links_to_them() -> None:
    text = (
        "![a\npicture](docs/a.png)\n\nSee [docs/a.md](docs/a.md#x), [the\nrules](docs/b.md), [us](#us) and "
        "[PyPI](https://pypi.org)."
    )
    expected = "See `docs/a.md`, the\nrules (`docs/b.md`), [us](#us) and [PyPI](https://pypi.org)."
    assert page(text).startswith(expected)
    found = page((ROOT / "README.md").read_text("utf-8"))
    assert [target for target in LINK.findall(found) if not target.startswith(("https://", "#"))] == []
    assert found.endswith("source package.\n")


def test_all_that_the_page_names_is_in_the_source_package() -> None:
    taken = re.findall(r"^(?:graft|include) (.*)$", (ROOT / "MANIFEST.in").read_text("utf-8"), re.MULTILINE)
    for target in LINK.findall((ROOT / "README.md").read_text("utf-8")):
        first = target.partition("#")[0].partition("/")[0]
        assert first in ("", "https:", "flowspec", *" ".join(taken).split())
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", "utf-8")
    assert "long_description" not in config["metadata"], "setup.py makes it"
