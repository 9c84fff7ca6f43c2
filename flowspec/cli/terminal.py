"""Standard output and error: what others wrote is made `visible` on a terminal, and messages are broken
between words to its width; a pipe gets all as it is, a message in one line unless `COLUMNS` is set.

`python -m flowspec.cli.terminal` does so with the lines of its standard input, for scripts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import IO

from flowspec.cli.visible import visible

WORDS_BEHIND = {"flowspec": 1, "launch/": 1, "pip": 2, "sudo": 2}
"""How a command to copy begins, and how many words belong to it in any case."""
ENDS = (",", ";", ":", ")")
"""What a command to copy does not end with: behind it the sentence goes on."""


class TypedInterrupt(KeyboardInterrupt):
    """Ctrl-C where no answer comes that it would stop."""


def terminal_size() -> os.terminal_size:
    """Of the terminal that standard output is, as it is now: `COLUMNS` does not follow a resize."""
    found = os.get_terminal_size(sys.stdout.fileno())
    return os.terminal_size((found.columns or 80, found.lines or 24))


def fit_for(stream: IO[str], text: str) -> str:
    """Text as it goes to a stream."""
    return visible(text) if stream.isatty() else text


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
    if _shown_end != "\n" and _is_one_place():
        show("\n")
    print(broken_for(sys.stderr, text), file=sys.stderr, flush=True)


def _is_one_place() -> bool:
    """Whether standard output and error are the same terminal, file or pipe."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


def tell(text: str) -> None:
    """A message that is a result, on standard output."""
    print(broken_for(sys.stdout, text), flush=True)


def broken_for(stream: IO[str], text: str) -> str:
    """A message as it goes to a stream."""
    if stream.isatty():
        return broken(visible(text), _columns(stream))
    asked = os.environ.get("COLUMNS", "") if stream is sys.stdout else ""
    return broken(text, int(asked)) if asked.isdecimal() and int(asked) else text


def _columns(stream: IO[str]) -> int:
    """A terminal's width without its last column, behind which a cursor is not the same for all of them."""
    for each in (stream, sys.__stdout__):  # a chat puts another in the stream's place while it draws
        with contextlib.suppress(OSError):
            if each is not None:
                return (os.get_terminal_size(each.fileno()).columns or 80) - 1
    return 79


def broken(text: str, width: int) -> str:
    """Lines that fit, the rest of each indented: broken between words, but not inside a command to copy, nor
    in a word that is longer, as a path may be."""
    return "\n".join(_broken_line(line, width) for line in text.split("\n"))


def _broken_line(line: str, width: int) -> str:
    from rich.cells import cell_len  # only here: a daemon has no other use for it

    if cell_len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    lines: list[str] = []
    begun = ""
    for unit in _units(line.split()):
        if not begun:
            begun = indent + unit
        elif cell_len(begun) + 1 + cell_len(unit) <= width:
            begun += f" {unit}"
        else:
            lines.append(begun)
            begun = f"{indent}  {unit}"
    return "\n".join([*lines, begun])


def _units(words: list[str]) -> Iterator[str]:
    """Words, and commands to copy in one piece."""
    at = 0
    while at < len(words):
        end = at + 1
        sure = _words_behind(words[at].lstrip("(`'\""))
        while sure is not None and end < len(words) and not words[end - 1].endswith(ENDS):
            is_quoted = " ".join(words[at:end]).count('"') % 2
            if end - at > sure and not is_quoted and not _is_argument(words[end], words[end - 1]):
                break
            end += 1
        yield " ".join(words[at:end])
        at = end


def _words_behind(word: str) -> int | None:
    """How many more words a command has for sure that begins with this one; None: no command does."""
    return WORDS_BEHIND.get("launch/" if word.startswith("launch/") else word)


def _is_argument(word: str, before: str) -> bool:
    """Whether a word belongs to the command that stands before it: a flag, its value, a file's name."""
    return word.startswith(("-", "'", '"')) or before.startswith("-") or "/" in word or "." in word[:-1]


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
