"""Print a script that completes flowspec's commands, flags and files in bash, zsh or fish.

It holds all that it needs, so that Tab starts no Python, and is made anew after an update.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import shtab

from flowspec.cli import commands
from flowspec.cli.parser import Parser
from flowspec.draft.kinds import WORDS
from flowspec.model.files import BUNDLED, bundled_models

PLACES = {
    "bash": "~/.local/share/bash-completion/completions/flowspec",
    "zsh": "~/.zfunc/_flowspec      # ~/.zfunc in fpath, before compinit",
    "fish": "~/.config/fish/completions/flowspec.fish",
}
"""Where each shell looks for the script."""
SHELLS = tuple(PLACES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """Completes every flag of every command; files for the flags that take one."""
    parser = commands.build_parser(commands.COMMANDS)
    for each in (parser, *parser.commands.values()):
        for action in _of_files(each):
            names = (BUNDLED, *WORDS, *bundled_models()) if action.dest == "drafter" else ()
            vars(action)["complete"] = _names_and_files(names) if names else shtab.FILE
    return _placed(str(shtab.complete(parser, shell)), shell)


def _placed(text: str, shell: str) -> str:
    """With our own words on where the script goes in the place of shtab's, which name other folders."""
    lines = text.splitlines(keepends=True)
    start = next(at for at, line in enumerate(lines) if line.startswith("# Usage:"))
    end = next(at for at in range(start, len(lines)) if not lines[at].startswith("#"))
    usage = f"# Usage: flowspec completion {shell} > {PLACES[shell]}\n"
    return "".join([*lines[:start], usage, *lines[end:]])


def _names_and_files(names: Sequence[str]) -> dict[str, Any]:
    """What completes one of these names, or a file."""
    known = " ".join(names)
    bash = f'_flowspec_drafters() {{ compgen -W \'{known}\' -- "$1"; compgen -f -- "$1"; }}\n'
    zsh = f"_flowspec_drafters() {{ _alternative 'names:name:({known})' 'files:file:_files' }}\n"
    return {
        "preamble": {"bash": bash, "zsh": zsh},
        "bash": "_flowspec_drafters",
        "zsh": "_flowspec_drafters",
        "fish": f"(printf '%s\\n' {known}; __fish_complete_path (commandline -ct))",
    }


def _of_files(parser: Parser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if action.type is Path or action.dest in ("model", "drafter", "log_file", "experiment", "prompts"):
            yield action
