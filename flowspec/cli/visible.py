"""What others wrote, fit for a terminal: control characters are shown and not sent; a text is only read.

A model's text may hold what sets the clipboard or a window's title, moves the cursor, or turns the order of
letters round; so may an error of another device, its log, or a journal.
"""

from __future__ import annotations

import re

_CONTROL = re.compile("(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All of C0 but tabs and ends of lines, DEL, C1, and what changes the direction of text."""


def visible(text: str) -> str:
    """Text with its control characters as they are written in Python: `\\\\x1b` for an escape."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
