"""What an earlier run learnt, as types, with bounds: it comes from a file that may have been edited.

Each class that learns has a `state_dict`, and a `load_state_dict`, which takes that of an earlier run: all of
it, or nothing, with `Misfit`. Some are their own state.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

COUNT_MAX = 10**12

Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
Number = Annotated[float, Meta(ge=0, le=1e30)]


class Learnt(Struct, kw_only=True, forbid_unknown_fields=True):
    """A state that goes on changing."""
