"""Print a script that completes flowspec's commands, flags and files in bash, zsh or fish.

It holds all that it needs, so that Tab starts no Python, and is made anew after an update.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shtab

from flowspec.cli import commands
from flowspec.draft.registry import WORDS
from flowspec.model.files import BUNDLED, bundled_models

PLACES = {
    "bash": "~/.local/share/bash-completion/completions/flowspec",
    "zsh": "~/.zfunc/_flowspec      # ~/.zfunc in fpath, before compinit",
    "fish": "~/.config/fish/completions/flowspec.fish",
}
"""Where each shell looks for the script."""
SHELLS = tuple(PLACES)
FILES = ("model", "log_file", "experiment", "prompts")
"""Flags that take files, beside those whose type is a path."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """Completes every flag of every command; files for the flags that take one."""
    parser = commands.build_parser(commands.COMMANDS)
    for each in (parser, *parser.commands.values()):
        for action in each._actions:
            if action.dest == "drafter":
                vars(action)["complete"] = _names_and_files((BUNDLED, *WORDS, *bundled_models()))
            elif action.type is Path or action.dest in FILES:
                vars(action)["complete"] = shtab.FILE
    text = str(shtab.complete(parser, shell))
    usage = f"# Usage: flowspec completion {shell} > {PLACES[shell]}\n"  # shtab's names other folders
    return re.sub(r"^# Usage:.*\n(#.*\n)*", lambda match: usage, text, count=1, flags=re.MULTILINE)


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
