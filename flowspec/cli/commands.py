"""The commands of `flowspec`: picks one, and turns errors into one line and an exit status.

A command's module is imported when it is picked: a daemon loads nothing of the harness.
Exit status: 0 done, 1 the work failed or differed, 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import json
import logging
import os
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from flowspec import checking
from flowspec.cli import examples
from flowspec.cli.parser import HELP_ALL, HelpAll, Parser, Rare
from flowspec.cli.terminal import LogHandler, note
from flowspec.errors import FlowSpecError, InputError, meant
from flowspec.extras import missing_part
from flowspec.interruption import INTERRUPTED, hear_signals
from flowspec.repeats import LOG_FORM, LOG_TIME, RepeatHandler
from flowspec.version import __version__

COMMANDS = tuple(examples.OF_COMMAND)
"""Each is a module here: `add_arguments` declares its flags, `run` does its work."""
HELP = "help"
FLAGS_ELSEWHERE = {
    "-n": "--max-new-tokens",
    "--n-predict": "--max-new-tokens",
    "-c": "--context",
    "--ctx-size": "--context",
    "--max-model-len": "--context",
    "--temp": "--temperature",
}
"""Other programs' names of a flag, where they are not alike."""


def build_parser(picked: Collection[str] | None = None) -> Parser:
    """The parser of `flowspec`: with the flags of the commands that are picked and the names of the others,
    where none is picked with what each does."""
    parser = Parser(
        prog="flowspec",
        description="Run one language model across several small devices, exactly as in one piece.",
        examples=examples.FIRST,
        epilog="flowspec help COMMAND tells about one of them.",
    )
    parser.add_argument("--version", action="version", version=f"flowspec {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    helps = subparsers.add_parser(HELP, help="Tell how a command is used.")
    helps.add_argument("topic", metavar="COMMAND", nargs="?", choices=COMMANDS)
    for name in COMMANDS:
        is_picked = name in (picked or ())
        text = _summary(name) if is_picked or not picked else ""  # reads its file
        lines = examples.OF_COMMAND[name]
        command = subparsers.add_parser(name, help=text or None, description=text, examples=lines)
        if is_picked:
            text = "show all flags, also those that few need"
            command.add_argument(HELP_ALL, action=HelpAll, nargs=0, help=text)
            _module(name).add_arguments(command)
            group = command.add_argument_group("logging")
            group.add_argument("-v", "--verbose", action="store_true", help="tell more on standard error")
            group.add_argument("--log-file", metavar="FILE", help=Rare("write the log to FILE instead"))
            text = Rare("check FlowSpec's own state after every event (slower); end if it is wrong")
            group.add_argument("--check", action="store_true", help=text)
    parser.commands = dict(subparsers.choices)
    return parser


def load(argv: Sequence[str]) -> None:
    """Imports what the command that a command line names is made of."""
    for command in _find_command(argv):
        with contextlib.suppress(ModuleNotFoundError):  # it is said when the command runs
            _module(command)


def _find_command(argv: Sequence[str]) -> list[str]:
    """The command that a command line names, if it does."""
    return [each for each in argv if each in COMMANDS][:1]


def _module(command: str) -> Any:
    return importlib.import_module(f"flowspec.cli.{command}")


def _summary(command: str) -> str:
    """What a command does: its module's first paragraph, which is read without importing the module."""
    source = Path(__file__).with_name(f"{command}.py").read_text("utf-8")
    return " ".join((ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].split())


def _suggest(flag: str, asked: Parser) -> str:
    """As `meant`, with what other programs call it."""
    known = FLAGS_ELSEWHERE.get(flag)
    if flag in ("--threads", "-t") and "--local" in asked.flags:
        return ": flowspec daemon has it; each process of --local has one thread"
    if flag in ("--prompt", "-p") and asked.prog.endswith(" chat"):
        return ": a chat asks for what you say; flowspec generate answers one prompt"
    return f"; did you mean {known}?" if known in asked.flags else meant(flag, asked.flags)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of a command; it refuses one that it does not have, with the one that may be meant."""
    if not argv or argv[0] == HELP:
        argv = [*argv[1:], "--help"]
    parser = build_parser(_find_command(argv))
    args, unknown = parser.parse_known_args(argv)
    asked = parser if args.command is None else parser.commands[args.command]
    if unknown:
        flags = [each.partition("=")[0] for each in unknown if each.startswith("-")]
        if not flags and getattr(args, "prompt", None) is not None:
            prompt = " ".join([args.prompt, *unknown])
            asked.error(
                f"expected one prompt, got {1 + len(unknown)} words; quote them: {shlex.quote(prompt):.80}"
            )
        hint = _suggest(flags[0], asked) if flags else ""
        asked.error(f"unrecognized argument {(flags or unknown)[0]}{hint}")
    if args.command is None:
        asked.error("expected a command, such as: flowspec chat")
    return args


def start_logging(args: argparse.Namespace) -> None:
    """A daemon logs its events always, the other commands when asked to."""
    level = logging.INFO if args.verbose or args.command == "daemon" else logging.WARNING
    if args.log_file:
        try:
            handler: logging.Handler = logging.FileHandler(args.log_file, errors="backslashreplace")
        except OSError as error:
            expected = f"a file that can be written, got {args.log_file} ({error.strerror})"
            raise InputError(f"--log-file: expected {expected}") from None
    else:
        handler = LogHandler()
    handler.setFormatter(logging.Formatter(LOG_FORM, None if args.log_file else LOG_TIME))
    logging.basicConfig(level=level, handlers=[RepeatHandler(handler)])
    if args.verbose and args.command == "daemon":  # of ours alone, for libraries tell much
        logging.getLogger("flowspec").setLevel(logging.DEBUG)
    for noisy in ("httpx", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    for noisy in ("HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY"):  # which they read when imported
        os.environ.setdefault(noisy, "warning" if args.verbose else "error")


def run(argv: Sequence[str]) -> int:
    """Runs one command; returns its exit status. Raises `OSError` where its output cannot be written."""
    try:
        return _run(_parse(argv), argv)
    except ModuleNotFoundError as error:
        command = " ".join(_find_command(argv))
        if (missing := missing_part(error, command)) is None:
            raise
        note(f"flowspec {command}: {missing}")
        return missing.exit_status


def _run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    args.words = list(argv)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # the tokenizer refuses what is not UTF-8
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
    except KeyboardInterrupt as stop:  # what it says, if anything, is what is kept and how to go on
        note("; ".join(filter(None, (f"flowspec {args.command}: interrupted", str(stop)))))
        return INTERRUPTED
