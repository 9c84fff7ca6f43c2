"""The decoding methods: the one list of them. `docs/methods.md` says what each takes from which paper and
where it differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flowspec.core.methods.ar import Autoregressive
from flowspec.core.methods.base import Method
from flowspec.core.methods.continuous import Continuous, ContinuousState
from flowspec.core.methods.cosine import Cosine, CosineState
from flowspec.core.methods.lockstep import LockStep
from flowspec.core.methods.pipedec import Levels
from flowspec.core.methods.rounds import Chunks, TreeRounds
from flowspec.core.methods.specrouter import SpecRouter, SpecRouterState
from flowspec.errors import InputError

ALL: Sequence[type[Method]] = (
    Continuous,
    Cosine,
    SpecRouter,
    Autoregressive,
    TreeRounds,
    Chunks,
    Levels,
    LockStep,
)
"""Every method; where none is named, the first that suits."""
MethodState = ContinuousState | CosineState | SpecRouterState | None
"""What a method keeps between runs."""
_BY_NAME = {each.name: each for each in ALL}
METHODS = tuple(_BY_NAME)
DEFAULT = METHODS[0]
WITHOUT_GUESSES = next(each.name for each in ALL if not each.drafts)
"""Plain decoding, which every speed is measured against."""
CHAINED = tuple(each.name for each in ALL if each.takes_chain)
"""Those that verify through a chain of models where one is given."""
CHAIN = "chain"


def find_method(name: str) -> type[Method]:
    """A method's class, which declares what others must know of it; raises `InputError`."""
    if name not in _BY_NAME:
        raise InputError(f"method {name} is not in this version; expected {', '.join(METHODS)}")
    return _BY_NAME[name]


def default_method(*, has_team: bool = False, has_chain: bool = False) -> str:
    if has_chain:
        return CHAINED[0]
    return next(each.name for each in ALL if each.suits_team) if has_team else DEFAULT


def options_of(name: str) -> set[str]:
    """What `make_method` takes for a method, beside `nodes` and `depth`."""
    method = find_method(name)
    return {*(each.name for each in method.parameters), *([CHAIN] if method.takes_chain else [])}


def make_method(name: str, *, nodes: int | None = None, depth: int | None = None, **options: Any) -> Method:
    """A method for one head, with `options` among `options_of` its name.

    `nodes` and `depth` shape the trees or segments of any method that has them (None: its defaults).
    """
    method, known = find_method(name), options_of(name)
    for key, value in ((method.nodes_parameter, nodes), ("depth", depth)):
        if value is not None and key in known:
            options.setdefault(key, value)
    assert options.keys() <= known, f"{name} has {sorted(known)}, got {sorted(options)}"
    make: Callable[..., Method] = method
    return make(**options)
