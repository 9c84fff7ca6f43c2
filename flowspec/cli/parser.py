"""Reads command lines: help begins with examples, rare flags stand in that of `--help-all` only, and what is
wrong is said in one line, with what may be meant."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from flowspec.cli.terminal import note
from flowspec.errors import meant

HELP_ALL = "--help-all"
ROOM = 2
"""Columns that argparse leaves free at the right."""


class Rare(str):
    """The help of a flag that few need."""


class Parser(argparse.ArgumentParser):
    """A command's parser. No abbreviations, which would change meaning as flags are added.

    `examples` are command lines, each with what it does. `commands` are the parsers of subcommands.
    """

    def __init__(
        self, *, description: str = "", examples: Sequence[tuple[str, str]] = (), **settings: Any
    ) -> None:
        super().__init__(**settings, allow_abbrev=False, formatter_class=_Formatter)
        self.about, self.examples = description, examples
        self.commands: dict[str, Parser] = {}

    def error(self, message: str) -> NoReturn:
        note(f"{self.prog}: {message} (see {self.prog} --help)")
        self.exit(2)

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        if action.type is Path and not text:  # which would be the working folder
            raise argparse.ArgumentError(action, "expected a path, got an empty text")
        return super()._get_value(action, text)

    @property
    def flags(self) -> list[str]:
        """All of them, rare ones too."""
        return [flag for action in self._actions for flag in action.option_strings]

    def format_help(self) -> str:
        """What `--help` prints."""
        rare = {action: action.help for action in self._actions if isinstance(action.help, Rare)}
        for action in rare:
            action.help = argparse.SUPPRESS
        text = self.whole_help()
        for action, hidden in rare.items():
            action.help = hidden
        more = f"\n{len(rare)} more flags, which few need: {self.prog} {HELP_ALL}\n"
        return text + more if rare else text

    def whole_help(self) -> str:
        """What `--help-all` prints."""
        width = shutil.get_terminal_size().columns - ROOM
        given = [action for action in self._actions if not action.option_strings]
        words = [f"[{each.metavar}]" if each.nargs == "?" else str(each.metavar) for each in given]
        self.usage = " ".join((self.prog, "[FLAGS]", *words))
        examples = ["examples:"] if self.examples else []
        for line, about in self.examples:
            examples += [f"  {line}", *(f"      {each}" for each in _filled(about, width - 6))]
        parts = (_filled(self.about, width), examples, [super().format_help()])
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, with what may be meant."""
        if action.choices is None or value in action.choices:
            return
        known = [str(each) for each in action.choices]
        hint = meant(str(value), known)
        if action.dest == "command":
            raise argparse.ArgumentError(None, f"there is no command {value!r:.80}{hint}")
        raise argparse.ArgumentError(action, f"expected one of {', '.join(known)}, got {value!r:.80}{hint}")


class HelpAll(argparse.Action):
    """`--help-all`."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.whole_help(), end="")
        parser.exit()


def _filled(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


class _Formatter(argparse.HelpFormatter):
    """Breaks no name at its hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _filled(" ".join(text.split()), width)
