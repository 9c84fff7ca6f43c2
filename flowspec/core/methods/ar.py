"""`ar`: plain pipelined decoding. Roots are in flight and nothing else; what every speed is measured
against."""

from __future__ import annotations

from flowspec.core.methods.base import Plain


class Autoregressive(Plain):
    """One token of each request per trip."""

    name = "ar"
    drafts = False
