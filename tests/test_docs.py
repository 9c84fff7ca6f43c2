"""Documents are 100 columns wide, and what they name is there: files, pictures, commands and their flags,
cluster files that can be read, and the words of messages."""

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
from flowspec.draft.kinds import WORDS
from flowspec.runtime.cluster_file import read_cluster
from lab import facts

ROOT = Path(__file__).parents[1]
WIDTH = 100
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("flowspec/**/*.md")])
FOLDERS = {path.name for place in (ROOT, ROOT / "flowspec") for path in place.iterdir() if path.is_dir()}
FILE = re.compile(rf"(?<![\w/.<-])((?:{'|'.join(FOLDERS)})(?:/[\w-]+)+\.(?:py|md|toml|txt|js))(?![\w-])")
"""A file of the source by its path, from the root or from `flowspec/`."""
PICTURE = re.compile(r"!\[[^\]]+\]\(([^)\s]+)\)")
PICTURE_BYTES_MAX = 2 * 2**20
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUOTE = re.compile(r"(?:^> .*\n)+", re.MULTILINE)


each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: str(each.relative_to(ROOT)))


@each_document
def test_lines_fit_the_width_but_for_tables_and_what_cannot_be_broken(document: Path) -> None:
    lines = document.read_text("utf-8").split("\n")
    wide = [
        line
        for line in lines
        if len(line) > WIDTH and not line.startswith("|") and " " in line.strip() and "](" not in line
    ]
    assert wide == []


@each_document
def test_the_files_that_are_named_are_there(document: Path) -> None:
    places = (ROOT, ROOT / "flowspec", document.parent)
    missing = {
        name
        for name in FILE.findall(document.read_text("utf-8"))
        if not name.endswith("/NAME.py") and not any((place / name).exists() for place in places)
    }
    assert missing == set()


@each_document
def test_pictures_are_there_and_small(document: Path) -> None:
    sizes = {
        name: (document.parent / name).stat().st_size
        for name in PICTURE.findall(document.read_text("utf-8"))
        if not name.startswith("http")
    }
    assert {name: size for name, size in sizes.items() if size > PICTURE_BYTES_MAX} == {}


def blocks(document: Path, language: str) -> Iterator[str]:
    for found, text in BLOCK.findall(document.read_text("utf-8")):
        if found == language:
            yield text


def commands(document: Path) -> Iterator[list[str]]:
    """The words of each line of a plain block that calls `flowspec` or a launcher."""
    for text in blocks(document, ""):
        for line in re.sub(r"\\\n\s*", " ", text).split("\n"):
            if re.match(r"(\.venv/bin/)?flowspec [a-z]|launch/\w", line):
                yield shlex.split(re.split(r" [|>&]", line)[0], comments=True)


@each_document
def test_commands_are_there_and_take_the_flags_that_are_shown(document: Path) -> None:
    for program, *words in commands(document):
        if program.startswith("launch/"):
            assert (ROOT / program).is_file(), program
        else:
            assert words[0] in (*COMMANDS, HELP), words
            _, unknown = build_parser(words[:1]).parse_known_args(words)
            assert unknown == [], words


def test_the_shortest_cluster_files_that_are_shown_can_be_read(tmp_path: Path) -> None:
    for name in ("README.md", "docs/boards.md"):
        (text,) = blocks(ROOT / name, "toml")
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
                found.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
                    )
                )
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


OURS = ("`continuous`", "`cosine`", "`specrouter`")


def parameters_of_the_table() -> Iterator[tuple[str, str, str]]:
    """Key, methods and default of each row."""
    text = (ROOT / "docs" / "methods.md").read_text("utf-8")
    key = methods = ""
    for line in text.partition("## Parameters")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] != "key":
            key, methods = cells[0] or key, ", ".join(OURS) if cells[1] == "the same" else cells[1]
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
