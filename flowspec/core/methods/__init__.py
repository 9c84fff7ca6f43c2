"""The decoding methods, by name. `docs/methods.md` says what each takes from which paper and where it
differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowspec.core.methods.ar import Autoregressive
from flowspec.core.methods.base import Method
from flowspec.core.methods.continuous import Continuous
from flowspec.core.methods.cosine import Cosine
from flowspec.core.methods.lockstep import LockStep
from flowspec.core.methods.pipedec import Levels
from flowspec.core.methods.rounds import Chunks, TreeRounds
from flowspec.core.methods.specrouter import SpecRouter

METHODS = ("continuous", "cosine", "specrouter", "ar", "tree-sd", "chunk-pp", "pipedec", "flowspec-paper")
TREE_NODES_DEFAULT = 64
TREE_DEPTH_DEFAULT = 6
CHUNKED_NODES_DEFAULT = 80


_CONTINUOUS = frozenset({"segment_nodes", "batch", "width", "value_min", "window", "window_slack"})
OPTIONS: Mapping[str, frozenset[str]] = {
    "ar": frozenset(),
    "tree-sd": frozenset({"nodes", "depth", "width"}),
    "chunk-pp": frozenset({"nodes", "depth", "width", "count"}),
    "pipedec": frozenset({"level_nodes", "width"}),
    "flowspec-paper": frozenset({"nodes", "expansion_nodes", "depth", "width"}),
    "continuous": _CONTINUOUS,
    "cosine": _CONTINUOUS | {"routing", "fusion", "count"},
    "specrouter": _CONTINUOUS | {"chain"},
}
"""The parameters of each method's own."""
_NODES = {
    "pipedec": "level_nodes",
    "continuous": "segment_nodes",
    "cosine": "segment_nodes",
    "specrouter": "segment_nodes",
}


def make_method(name: str, *, nodes: int | None = None, depth: int | None = None, **options: Any) -> Method:
    """A method for one head, with `options` among `OPTIONS`.

    `nodes` and `depth` shape the trees or segments of any method that has them (None: its defaults).
    """
    assert name in METHODS, f"no method {name}"
    for key, value in ((_NODES.get(name, "nodes"), nodes), ("depth", depth)):
        if value is not None and key in OPTIONS[name]:
            options.setdefault(key, value)
    assert options.keys() <= OPTIONS[name], f"{name} has {sorted(OPTIONS[name])}, got {sorted(options)}"
    if name == "ar":
        return Autoregressive()
    if name == "tree-sd":
        return TreeRounds(**{"nodes": TREE_NODES_DEFAULT, "depth": TREE_DEPTH_DEFAULT, **options})
    if name == "chunk-pp":
        return Chunks(**{"nodes": CHUNKED_NODES_DEFAULT, "depth": TREE_DEPTH_DEFAULT, **options})
    if name == "flowspec-paper":
        return LockStep(**options)
    makers: Mapping[str, Callable[..., Method]] = {
        "pipedec": Levels,
        "continuous": Continuous,
        "cosine": Cosine,
        "specrouter": SpecRouter,
    }
    return makers[name](**options)
