"""The commands of `flowspec`: picks one, and turns errors into one line and an exit status.

A command's module is imported when it is picked: a daemon loads nothing of the harness.
Exit status: 0 done, 1 the work failed or differed, 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import io
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from flowspec import checking
from flowspec.cli.terminal import LogFormatter, note
from flowspec.errors import FlowSpecError, InputError
from flowspec.interruption import INTERRUPTED, hear_signals
from flowspec.version import __version__

COMMANDS = (
    "daemon",
    "chat",
    "generate",
    "serve",
    "verify",
    "bench",
    "top",
    "plan",
    "profile",
    "devices",
    "doctor",
    "keygen",
)
"""Each is a module beside this one: `add_arguments` declares its flags, `run` does its work."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the flags in one line; no abbreviations, which would change meaning as flags
    are added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)
        self.commands: dict[str, Parser] = {}

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def build_parser(argv: Sequence[str]) -> Parser:
    """A parser for a command line: with the flags of the command that it names, and only the names of the
    others."""
    picked = _picked(argv)
    parser = Parser(
        prog="flowspec",
        description="Run one language model across several small devices, exactly as in one piece.",
        epilog="Start with: flowspec chat   (a bundled model on four local processes)",
    )
    parser.add_argument("--version", action="version", version=f"flowspec {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in COMMANDS:
        if name != picked:
            subparsers.add_parser(name, help=_summary(name) if picked is None else None)
            continue
        command = subparsers.add_parser(name, description=_summary(name))
        _module(name).add_arguments(command)
        group = command.add_argument_group("logging")
        group.add_argument("-v", "--verbose", action="store_true", help="tell more on standard error")
        group.add_argument("--log-file", metavar="FILE", help="write the log to FILE instead")
        group.add_argument(
            "--check",
            action="store_true",
            help="check FlowSpec's own state after every event (slower); end if it is wrong",
        )
    parser.commands = dict(subparsers.choices)
    return parser


def load(argv: Sequence[str]) -> None:
    """Imports what the command that a command line names is made of."""
    if (picked := _picked(argv)) is not None:
        _module(picked)


def _picked(argv: Sequence[str]) -> str | None:
    return next((each for each in argv if each in COMMANDS), None)


def _module(command: str) -> Any:
    return importlib.import_module(f"flowspec.cli.{command}")


def _summary(command: str) -> str:
    """What a command does: its module's first paragraph, which is read without importing the module."""
    source = Path(__file__).with_name(f"{command}.py").read_text("utf-8")
    return " ".join((ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].split())


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of a command; one that it does not have is told of by that command, with the one that may be
    meant."""
    parser = build_parser(argv)
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        parser.error("expected a command, such as: flowspec chat")
    if unknown:
        command = parser.commands[args.command]
        flags = [each.partition("=")[0] for each in unknown if each.startswith("-")]
        wrong = (flags or unknown)[0]
        meant = (
            difflib.get_close_matches(wrong, re.findall(r"--[a-z-]+", command.format_help()), n=1)
            if flags
            else []
        )
        command.error(f"unrecognized argument {wrong}" + (f"; is {meant[0]} meant?" if meant else ""))
    return args


def start_logging(args: argparse.Namespace) -> None:
    """A daemon logs its events always, the other commands when asked to."""
    level = logging.INFO if args.verbose or args.command == "daemon" else logging.WARNING
    form = "%(asctime)s %(levelname)-7s %(message)s"
    if args.log_file:
        try:
            logging.basicConfig(level=level, format=form, filename=args.log_file)
        except OSError as error:
            raise InputError(
                f"--log-file: expected a file that can be written, got {args.log_file} ({error.strerror})"
            ) from None
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(LogFormatter(form, "%H:%M:%S"))
        logging.basicConfig(level=level, handlers=[handler])
    for noisy in ("httpx", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    for noisy in (
        "HF_HUB_VERBOSITY",
        "TRANSFORMERS_VERBOSITY",
    ):  # both set the levels of their loggers when imported
        os.environ.setdefault(noisy, "warning" if args.verbose else "error")


def run(argv: Sequence[str]) -> int:
    """Runs one command; returns its exit status. Raises `OSError` where its output cannot be written."""
    args = _parsed(argv)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(
            errors="surrogateescape"
        )  # as in arguments; the tokenizer refuses what is not UTF-8
    if args.command != "daemon":
        hear_signals()
    if args.check:
        checking.turn_on()
    try:
        start_logging(args)
        return int(_module(args.command).run(args))
    except FlowSpecError as error:
        if error.report is not None and getattr(args, "json", False):
            print(json.dumps(error.report))
        else:
            note(f"flowspec {args.command}: {error}")
        return error.exit_status
    except KeyboardInterrupt:
        note(f"flowspec {args.command}: interrupted")
        return INTERRUPTED
