"""What setup.cfg cannot say: the package's page is README.md, without its pictures and its links to files of
the source.

A link that is relative leads nowhere on PyPI, and the source is not published at an address that could be
named.
"""

import re
from pathlib import Path

from setuptools import setup

RELATIVE = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")
"""A link to a file of the source: its text, and the file."""
PICTURE = re.compile(r"!\[[^\]]+\]\((?!https?://)[^)]+\)\n*")
WHERE = "\nFiles that are named here are in FlowSpec's source package.\n"


def page(readme: str) -> str:
    """The README without pictures, and with the names of files where it links to them."""

    def named(link: re.Match[str]) -> str:
        text, file = link.groups()
        return f"`{file}`" if file.endswith(text) else f"{text} (`{file}`)"

    return RELATIVE.sub(named, PICTURE.sub("", readme)) + WHERE


if __name__ == "__main__":
    readme = (Path(__file__).parent / "README.md").read_text("utf-8")
    setup(long_description=page(readme), long_description_content_type="text/markdown")
