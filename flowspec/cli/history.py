"""Line editing at a chat's prompt, with what was typed in earlier chats."""

from __future__ import annotations

import contextlib
import sys

from flowspec.folders import state_folder

HISTORY_LINES_MAX = 1000


@contextlib.contextmanager
def line_history():  # type: ignore[no-untyped-def]
    """Line editing with a history that lasts from chat to chat, where the terminal has it."""
    try:
        import readline
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    path = state_folder() / "history"
    readline.set_history_length(HISTORY_LINES_MAX)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
