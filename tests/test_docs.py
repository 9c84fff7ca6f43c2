"""What documents name is there: files, headings, pictures, commands and their flags, cluster files that can
be read, and the words of messages."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from flowspec.cli.commands import COMMANDS, HELP, build_parser
from flowspec.core.methods import METHODS, make_method
from flowspec.draft.registry import WORDS
from flowspec.runtime.cluster_file import read_cluster
from lab import facts

ROOT = Path(__file__).parents[1]
WIDTH = 100
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("flowspec/**/*.md")])
FOLDERS = {path.name for place in (ROOT, ROOT / "flowspec") for path in place.iterdir() if path.is_dir()}
FILE = re.compile(rf"(?<![\w/.<-])((?:{'|'.join(FOLDERS)})(?:/[\w-]+)+\.(?:py|md|toml|txt|js))(?![\w-])")
"""A file of the source by its path, from the root or from `flowspec/`."""
LINK = re.compile(r"\[[^\]]+\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
"""A link or a picture: its file, and a heading in it."""
BYTES_MAX = 2 * 2**20
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUOTE = re.compile(r"(?:^> .*\n)+", re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """What headings of a document are called in links."""
    lines = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def blocks(text: str, language: str) -> Iterator[str]:
    for found, block in BLOCK.findall(text):
        if found == language:
            yield block


def commands(text: str) -> Iterator[list[str]]:
    """The words of each line of a plain block that calls `flowspec` or a launcher."""
    for block in blocks(text, ""):
        for line in re.sub(r"\\\n\s*", " ", block).split("\n"):
            if re.match(r"(\.venv/bin/)?flowspec [a-z]|launch/\w", line):
                yield shlex.split(re.split(r" [|>&]", line)[0], comments=True)


def is_there(document: Path, name: str, heading: str) -> bool:
    file = document.parent / name if name else document
    if not file.exists() or (file.is_file() and file.stat().st_size > BYTES_MAX):
        return False
    return not heading or heading in anchors(file)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: str(each.relative_to(ROOT)))
def test_a_document_fits_the_width_and_names_what_is_there(document: Path) -> None:
    text = document.read_text("utf-8")
    unbroken = (line for line in text.split("\n") if not line.startswith("|") and "](" not in line)
    assert [line for line in unbroken if len(line) > WIDTH and " " in line.strip()] == []
    places = (ROOT, ROOT / "flowspec", document.parent)
    named = (name for name in FILE.findall(text) if not name.endswith("/NAME.py"))
    assert [name for name in named if not any((place / name).exists() for place in places)] == []
    links = ((name, heading) for name, heading in LINK.findall(text) if not name.startswith("http"))
    assert [link for link in links if not is_there(document, *link)] == []
    for program, *words in commands(text):
        if program.startswith("launch/"):
            assert (ROOT / program).is_file(), program
        else:
            assert words[0] in (*COMMANDS, HELP), words
            _, unknown = build_parser(words[:1]).parse_known_args(words)
            assert unknown == [], words


def test_the_shortest_cluster_files_that_are_shown_can_be_read(tmp_path: Path) -> None:
    for name in ("README.md", "docs/boards.md"):
        (text,) = blocks((ROOT / name).read_text("utf-8"), "toml")
        path = tmp_path / "cluster.toml"
        path.write_text(text, "utf-8")
        assert [device.address for device in read_cluster(path)] == ["192.168.1.21:7700", "192.168.1.22:7700"]


@cache
def words_of_the_source() -> str:
    """All texts of the source; `…` where something is put in."""
    found = [path.read_text("utf-8") for path in (ROOT / "launch").iterdir() if path.is_file()]
    for path in (ROOT / "flowspec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(" ".join(text.split()) for text in found)


def test_messages_that_troubleshooting_goes_by_are_those_of_the_source() -> None:
    quotes = QUOTE.findall((ROOT / "docs/troubleshooting.md").read_text("utf-8"))
    assert len(quotes) > 20
    pieces = [
        piece.strip()
        for quote in quotes
        for piece in " ".join(quote.removeprefix("> ").replace("\n> ", " ").split()).split("…")
    ]
    assert [piece for piece in pieces if piece.strip(" .,;:") and piece not in words_of_the_source()] == []


def test_the_commands_page_has_every_drafter_that_goes_by_a_word() -> None:
    text = (ROOT / "docs/cli.md").read_text("utf-8")
    assert [word for word in WORDS if f"`{word}`" not in text] == []


def parameters_of_the_table() -> Iterator[tuple[str, str, str]]:
    """Key, methods and default of each row."""
    text = (ROOT / "docs" / "methods.md").read_text("utf-8")
    key = methods = ""
    for line in text.partition("## Parameters")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] != "key":
            ours = "`continuous`, `cosine`, `specrouter`"
            key, methods = cells[0] or key, ours if cells[1] == "the same" else cells[1]
            yield key, methods, cells[2]


def test_every_parameter_of_a_method_is_in_the_table_with_its_default() -> None:
    rows = list(parameters_of_the_table())
    for name in METHODS:
        kind = type(make_method(name))
        for each in kind.parameters:
            signatures = [inspect.signature(base.__init__).parameters for base in kind.__mro__[:-1]]
            default = next(found[each.name].default for found in signatures if each.name in found)
            told = {None: "none", True: "true"}.get(default, str(default))
            assert any(
                f"`{each.name}`" in key
                and told in shown.split()
                and (f"`{name}`" in methods or "all" in methods)
                for key, methods, shown in rows
            ), f"{name}: {each.name}, {told}"


def test_numbers_that_code_defines_are_its_own_in_documents(capsys: pytest.CaptureFixture[str]) -> None:
    status = facts.main(["--check"])
    assert (capsys.readouterr().out, status) == ("", 0)
    text = "A <!--LEASE_S-->4<!---->\ns, <!--serve.guard.BODY_BYTES_MAX-->8\nMiB<!---->, <!--no.X-->1<!---->"
    assert list(facts.wrong(text)) == ["1: LEASE_S is 5, not 4", "3: no.X is no name that code defines"]
