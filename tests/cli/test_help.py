"""Help: for who types nothing, with examples first and rare flags apart, in 80 columns; what may be meant."""

from __future__ import annotations

import re
import shlex

import pytest

from flowspec.cli import examples
from flowspec.cli.commands import COMMANDS, build_parser
from flowspec.cli.main import main
from flowspec.cli.parser import Parser, Rare
from tests.cli.pseudo_terminal import COLUMNS, shown


def told(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> str:
    """What a command prints that only tells of flags."""
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    assert ended.value.code == status
    found = capsys.readouterr()
    return found.err if status else found.out


def test_the_bare_command_prints_help_as_the_word_help_does(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys)
    assert text == told(capsys, "help") == told(capsys, "--help")
    assert text.index("examples:") < text.index("usage:")
    assert all(f"\n    {name}" in text for name in COMMANDS)


def test_help_for_a_command_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "help", "keygen") == told(capsys, "keygen", "--help")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_begins_with_examples_and_has_its_rare_flags_apart(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    usual, whole = told(capsys, command, "--help"), told(capsys, command, "--help-all")
    for text in (usual, whole):
        assert max(map(len, text.splitlines())) <= COLUMNS
        assert 0 < text.index("examples:") < text.index("usage:") < text.index("--help-all")
    parser = build_parser([command]).commands[command]
    rare = [each for each in parser._actions if isinstance(each.help, Rare)]
    assert rare, "--log-file and --check are"
    assert f"{len(rare)} more flags, which few need: flowspec {command} --help-all" in usual
    listed = {text: set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)) for text in (usual, whole)}
    assert listed[whole] - listed[usual] == {each.option_strings[0] for each in rare}


@pytest.mark.parametrize(
    "line", [line for each in (examples.FIRST, *examples.OF_COMMAND.values()) for line, _ in each]
)
def test_every_example_can_be_typed(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0])[1:]
    assert build_parser(words[:1]).parse_args(words).command == words[0]


def test_every_command_has_examples() -> None:
    assert examples.OF_COMMAND.keys() == set(COMMANDS)


def test_names_are_not_broken_at_their_hyphens_in_a_terminal() -> None:
    lines = shown("generate", "--help")
    assert max(map(len, lines)) <= COLUMNS
    assert any("flowspec-paper" in line for line in lines)
    assert [line for line in lines if line.endswith("-")] == []


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["chatt"], "flowspec: there is no command 'chatt'; did you mean chat? (see flowspec --help)"),
        (["help", "genrate"], "there is no command 'genrate'; did you mean generate?"),
        (["fly"], "flowspec: there is no command 'fly' (see flowspec --help)"),
        (["--versoin"], "flowspec: unrecognized argument --versoin; did you mean --version?"),
        (
            ["generate", "--max-tokens", "5", "hi"],
            "unrecognized argument --max-tokens; did you mean --max-new-tokens?",
        ),
        (
            ["generate", "--max-tokens=5", "hi"],
            "unrecognized argument --max-tokens; did you mean --max-new-tokens?",
        ),
        (["generate", "-n", "5", "hi"], "unrecognized argument -n; did you mean --max-new-tokens?"),
        (["generate", "--promt", "hi"], "unrecognized argument --promt; did you mean --prompt?"),
        (["generate", "--top_k=5", "hi"], "unrecognized argument --top_k; did you mean --top-k?"),
        (["chat", "--method", "continous"], "--method: expected one of continuous, "),
        (["chat", "--method", "continous"], "got 'continous'; did you mean continuous?"),
        (["completion", "ksh"], "argument SHELL: expected one of bash, zsh, fish, got 'ksh'"),
    ],
)
def test_what_may_be_meant_is_told_in_one_line(
    args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = told(capsys, *args, status=2).splitlines()
    assert expected in line


def test_a_prompt_may_be_a_commands_name() -> None:
    words = ["generate", "chat"]
    assert build_parser(words[:1]).parse_args(words).prompt == "chat"


def test_a_parser_without_rare_flags_says_nothing_of_them() -> None:
    parser = Parser(prog="tool", description="Does it.")
    parser.add_argument("--plain", help="all of it")
    assert parser.format_help() == parser.whole_help()
    assert parser.format_help().startswith("Does it.\n\nusage: tool [FLAGS]\n")
