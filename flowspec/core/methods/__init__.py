"""The decoding methods, by name. `docs/methods.md` says what each takes from which paper and where it differs."""

from __future__ import annotations

from flowspec.core.methods.ar import Autoregressive
from flowspec.core.methods.base import Method
from flowspec.core.methods.continuous import Continuous
from flowspec.core.methods.lockstep import LockStep
from flowspec.core.methods.pipedec import Levels
from flowspec.core.methods.rounds import Chunks, TreeRounds

METHODS = ("continuous", "ar", "tree-sd", "chunk-pp", "pipedec", "flowspec-paper")
TREE_NODES_DEFAULT = 64
TREE_DEPTH_DEFAULT = 6


def make_method(name: str, *, nodes: int | None = None, depth: int | None = None, width: int | None = None) -> Method:
    """A method for one head. `nodes`, `depth` and `width` shape the trees of the methods that have fixed ones (None: their defaults)."""
    shape = {key: value for key, value in (("nodes", nodes), ("depth", depth), ("width", width)) if value is not None}
    if name == "ar":
        return Autoregressive()
    if name == "tree-sd":
        return TreeRounds(**{"nodes": TREE_NODES_DEFAULT, "depth": TREE_DEPTH_DEFAULT, **shape})
    if name == "chunk-pp":
        return Chunks(**{"nodes": 80, "depth": 6, **shape})
    if name == "flowspec-paper":
        return LockStep(**shape)
    own_width = {} if width is None else {"width": width}
    if name == "pipedec":
        return Levels(**own_width, **({} if nodes is None else {"level_nodes": nodes}))
    assert name == "continuous", f"no method {name}"
    return Continuous(**own_width, **({} if nodes is None else {"segment_nodes": nodes}))
