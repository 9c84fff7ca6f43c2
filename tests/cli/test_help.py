"""Help: for who types nothing, with examples first and rare flags apart, in 80 columns; and `flowspec
completion`: what Tab does in bash, and scripts for other shells.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from flowspec.cli import examples
from flowspec.cli.commands import COMMANDS, build_parser
from flowspec.cli.completion import SHELLS
from flowspec.cli.parser import Parser, Rare
from tests.cli.pseudo_terminal import COLUMNS, shown
from tests.cli.running import Run


def test_the_bare_command_prints_help_as_the_word_help_does(run: Run) -> None:
    text = run().out
    assert text == run("help").out == run("--help").out
    assert text.index("examples:") < text.index("usage:")
    assert all(f"\n    {name}" in text for name in COMMANDS)
    assert run("help", "keygen").out == run("keygen", "--help").out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_begins_with_examples_and_has_its_rare_flags_apart(
    command: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    usual, whole = run(command, "--help").out, run(command, "--help-all").out
    for text in (usual, whole):
        assert max(map(len, text.splitlines())) <= COLUMNS
        assert 0 < text.index("examples:") < text.index("usage:") < text.index("--help-all")
    parser = build_parser([command]).commands[command]
    rare = [each for each in parser._actions if isinstance(each.help, Rare)]
    assert rare, "--log-file and --check are"
    assert f"{len(rare)} more flags" in usual
    listed = {text: set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)) for text in (usual, whole)}
    assert listed[whole] - listed[usual] == {each.option_strings[0] for each in rare}


def test_every_command_has_examples_which_can_be_typed() -> None:
    for line in (line for each in (examples.FIRST, *examples.OF_COMMAND.values()) for line, _ in each):
        words = shlex.split(line.partition(" > ")[0])[1:]
        assert build_parser(words[:1]).parse_args(words).command == words[0], line
    words = ["generate", "chat"]
    assert build_parser(words[:1]).parse_args(words).prompt == "chat", "a prompt may be a command's name"


def test_names_are_not_broken_at_their_hyphens_in_a_terminal() -> None:
    lines = shown("generate", "--help")
    assert max(map(len, lines)) <= COLUMNS
    assert any("flowspec-paper" in line for line in lines)
    assert [line for line in lines if line.endswith("-")] == []


def test_a_parser_without_rare_flags_says_nothing_of_them() -> None:
    parser = Parser(prog="tool", description="Does it.")
    parser.add_argument("--plain", help="all of it")
    assert parser.format_help() == parser.whole_help()
    assert parser.format_help().startswith("Does it.\n\nusage: tool [FLAGS]\n")


TYPED = {
    "flowspec ge": {"generate"},
    "flowspec generate --max": {"--max-new-tokens"},
    "flowspec chat --method c": {"continuous", "cosine", "chunk-pp"},
    "flowspec help do": {"doctor"},
    "flowspec generate --record recor": {"recording.json"},
    "flowspec chat --drafter draft-m": {"draft-math"},
    "flowspec chat --drafter rec": {"recording.json"},
}
BASH = """
source "$1"
read -ra COMP_WORDS <<< "$2"
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$2 COMP_POINT=${#2}
_shtab_flowspec flowspec "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_command_and_says_where_it_goes_as_the_document_does(
    shell: str, run: Run
) -> None:
    text = run("completion", shell).out
    assert all(name in text for name in (*COMMANDS, "max-new-tokens", "ignore-eos"))
    (usage,) = [line for line in text.splitlines() if line.startswith("# Usage:")]
    document = (Path(__file__).parents[2] / "docs" / "install.md").read_text("utf-8")
    assert usage.removeprefix("# Usage: ") in document.splitlines()


def test_tab_completes_commands_flags_choices_and_files(run: Run, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(run("completion", "bash").out)
    (tmp_path / "recording.json").touch()
    for typed, expected in TYPED.items():
        command = ["bash", "-c", BASH, "bash", "./script", typed]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
        assert (set(done.stdout.split()), done.stderr) == (expected, ""), typed
