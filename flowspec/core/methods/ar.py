"""`ar`: plain pipelined decoding. Roots are in flight and nothing else; what every speed is measured
against."""

from __future__ import annotations

from flowspec.core.methods.base import Method


class Autoregressive(Method):
    name = "ar"
    drafts = False
