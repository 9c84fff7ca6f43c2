"""Standard output and error: what others wrote is made `visible` on a terminal, and messages are broken
between words to its width; a pipe gets all as it is, a message in one line unless `COLUMNS` is set.

`python -m flowspec.cli.terminal` does so with the lines of its standard input, for scripts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from typing import IO

CONTROL = re.compile("(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All of C0 but tabs and ends of lines, DEL, C1, and what changes the direction of text."""
GAP = r"(?<![,;:)])\ "
"""Between words of a command; behind one of these marks the sentence goes on."""
ARGUMENT = rf"""(?: -\S*(?:{GAP}(?![-"])\S+)? | "[^"]*"?\S* | '\S* | \S*/\S* | \S*\.\S+ )"""
"""A flag with its value, a quoted text, a file."""
UNIT = re.compile(
    rf"""[(`'"]* (?: launch/\S* | (?: flowspec | (?:pip|sudo) (?:{GAP}\S+)? )(?!\S) )
    (?: {GAP}(?:{ARGUMENT}|\S+) (?:{GAP}{ARGUMENT})* )? | \S+""",
    re.VERBOSE,
)
"""A word, or a command to copy."""


class TypedInterrupt(KeyboardInterrupt):
    """Ctrl-C where no answer comes that it would stop."""


def visible(text: str) -> str:
    """Text with its control characters as they are written in Python, `\\x1b` for an escape: a model's text,
    another device's error or a journal may hold what sets the clipboard, or moves the cursor."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def fit_for(stream: IO[str], text: str) -> str:
    """Text as it goes to a stream."""
    return visible(text) if stream.isatty() else text


def terminal_size(stream: IO[str] | None = None) -> os.terminal_size:
    """Of the terminal that a stream, or standard output, is now: `COLUMNS` does not follow a resize."""
    found = os.get_terminal_size((stream or sys.stdout).fileno())
    return os.terminal_size((found.columns or 80, found.lines or 24))


_shown_end = "\n"
"""With what the pieces of an answer that `show` printed end."""


def show(text: str) -> None:
    """A piece of an answer, on standard output."""
    global _shown_end
    print(fit_for(sys.stdout, text), end="", flush=True)
    _shown_end = text[-1:] or _shown_end


def end_line() -> None:
    """What comes next on standard output begins a line."""
    if _shown_end != "\n":
        show("\n")


def note(text: str) -> None:
    """A message beside the answer, on standard error; on a line of its own where both are shown in one
    place."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file
        if os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno()):
            end_line()
    print(broken_for(sys.stderr, text), file=sys.stderr, flush=True)


def tell(text: str) -> None:
    """A message that is a result, on standard output."""
    print(broken_for(sys.stdout, text), flush=True)


def broken_for(stream: IO[str], text: str) -> str:
    """A message as it goes to a stream."""
    if not stream.isatty():
        asked = os.environ.get("COLUMNS", "") if stream is sys.stdout else ""
        width = int(asked) if asked.isdecimal() else 0
        return broken(text, width) if width else text
    width = 79
    with contextlib.suppress(OSError):
        width = terminal_size(stream).columns - 1  # terminals differ in what a full row does
    return broken(visible(text), width)


def broken(text: str, width: int) -> str:
    """Lines that fit, the rest of each indented: broken between words, but not inside a command to copy, nor
    in a word that is longer, as a path may be."""
    from rich.cells import cell_len  # only here: a daemon has no other use for it

    out: list[str] = []
    for line in text.split("\n"):
        if cell_len(line) <= width:
            out.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        first, *units = UNIT.findall(" ".join(line.split())) or [""]
        out.append(indent + first)
        for unit in units:
            if cell_len(f"{out[-1]} {unit}") <= width:
                out[-1] += f" {unit}"
            else:
                out.append(f"{indent}  {unit}")
    return "\n".join(out)


class LogHandler(logging.Handler):
    """Lines of a log on what standard error is at the time: a chat puts another in its place while it
    draws."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            note(self.format(record))
        except Exception:  # noqa: BLE001 - as logging's own handlers do: a log line never ends its caller
            self.handleError(record)


def main() -> None:
    for line in sys.stdin.buffer:
        text = visible(line.decode("utf-8", "backslashreplace"))
        with contextlib.suppress(ImportError):  # a Python without our libraries shows whole lines
            text = broken_for(sys.stdout, text)
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
