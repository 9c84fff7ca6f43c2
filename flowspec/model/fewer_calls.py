"""Attention and MLP of a layer, as most families have them, in as few calls as they need.

transformers' code of both is a handful of views, transposes and look-ups around a few products, which with
one row take as long as what is computed. Where a module's own code computes what is written here, it takes
that code's place. Whether it does is tried on the module itself, with stand-ins for its matrices and norms
and for what attends, since transformers' code changes: bits have to be equal, and what the code tells the
attention is what it is told from here. A module that does anything else keeps its own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from flowspec.model.arithmetic import plain
from flowspec.model.arithmetic.operations import gated, turned
from flowspec.model.attention import TreeBatch, attended

SIZES = (1e-3, 1.0, 1e4)
"""Of the rows with which a module's code is tried: some code clips what is large."""
_TRIALS = ((torch.float32, SIZES), (torch.bfloat16, SIZES[1:]))
"""In float32 small differences show, in bfloat16 what code rounds less or more often. What code tells the
attention must not follow from how many rows there are."""
_TOLD = {"scaling": "scale", "sliding_window": "window", "softcap": "cap"}
"""What code may tell the attention that `attended` knows, by its name there."""
_UNTOLD = {"dropout", "tree", "position_ids"}
"""What it may tell beside, and nothing follows from."""
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_MATRICES, _NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
"""What is in an MLP, and what is in an attention."""
Call = Callable[..., Any]


def in_fewer_calls(
    part: Any, own: Call, functions: Mapping[str, str], rotary_is_partial: bool
) -> Call | None:
    """What computes the bits of a module's `own` code; None where that computes something else.

    `functions`: by an activation's class its name in `operations.function`.
    """
    names = set(part._modules)
    if names == _MLP:
        name = functions.get(type(part.act_fn).__name__)
        if name in plain.FUNCTIONS and _is_gated(part, own):
            return _method(_mlp, name=name)
    elif _MATRICES <= names <= _MATRICES | _NORMS:
        for turns in (True, False):
            told = _told(part, own, turns, rotary_is_partial)
            if told is not None:
                return _method(_attention, turns=turns, has_norms=bool(names & _NORMS), told=told)
    return None


def _method(call: Call, **given: Any) -> Call:
    """A function, so that a class binds it, of `call` with these arguments."""

    def method(self: Any, *args: Any, **others: Any) -> Any:
        return call(self, *args, **given, **others)

    return method


def _mlp(part: Any, x: torch.Tensor, *, name: str) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    found = part.down_proj(gated(part.gate_proj(rows), part.up_proj(rows), name))
    result: torch.Tensor = found.view(*x.shape[:-1], found.shape[-1])
    return result


def _attention(
    part: Any,
    hidden_states: torch.Tensor,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    tree: TreeBatch,
    turns: bool,
    has_norms: bool,
    told: Mapping[str, Any],
    attend: Callable[..., torch.Tensor] = attended,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """`[1, rows, hidden]` from hidden states of that shape, after their norm."""
    rows, width = hidden_states[0], part.head_dim
    by_head = (1, len(rows), -1, width)
    queries, keys, values = (each(rows).view(by_head) for each in (part.q_proj, part.k_proj, part.v_proj))
    if has_norms:
        queries, keys = part.q_norm(queries), part.k_norm(keys)
    queries, keys, values = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
    if turns:
        queries, keys = turned(queries, keys, *position_embeddings)
    found = attend(tree, part.layer_idx, queries[0].transpose(0, 1), keys[0], values[0], **told)
    return part.o_proj(found.flatten(1))[None], None


def _are_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """torch counts numbers of two types as equal."""
    return found.dtype == expected.dtype and torch.equal(found, expected)


class _StandIn:
    """A module with others in the place of its own."""

    def __init__(self, part: Any, **others: Any) -> None:
        self.__dict__.update(others)
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


def _rows(generator: torch.Generator, dtype: torch.dtype, sizes: Sequence[float]) -> torch.Tensor:
    """`[1, rows, 8]`, a row of each size."""
    rows = torch.randn((1, len(sizes), 8), generator=generator) * torch.tensor(sizes)[:, None]
    return rows.to(dtype)


def _is_gated(part: Any, own: Call) -> bool:
    return all(_is_gated_in(part, own, *trial) for trial in _TRIALS)


def _is_gated_in(part: Any, own: Call, dtype: torch.dtype, sizes: Sequence[float]) -> bool:
    x = _rows(torch.Generator().manual_seed(1), dtype, sizes)
    given = _StandIn(
        part,
        gate_proj=lambda rows: rows * 2 - 1,
        up_proj=lambda rows: rows.flip(-1),
        down_proj=lambda rows: rows * rows + 3,
        act_fn=lambda numbers: numbers + 7,
    )
    expected = ((x * 2 - 1) + 7) * x.flip(-1)
    expected = expected * expected + 3
    try:
        return _are_same(own(given, x), expected)
    except Exception:  # noqa: BLE001 - whatever its code wants that is not there
        return False


def _told(part: Any, own: Call, turns: bool, rotary_is_partial: bool) -> dict[str, Any] | None:
    """What the code tells the attention, if it computes what `_attention` does."""
    first, *others = (_told_in(part, own, turns, rotary_is_partial, *trial) for trial in _TRIALS)
    return first if all(each == first for each in others) else None


def _told_in(
    part: Any,
    own: Call,
    turns: bool,
    rotary_is_partial: bool,
    dtype: torch.dtype,
    sizes: Sequence[float],
) -> dict[str, Any] | None:
    width = getattr(part, "head_dim", None)
    if not isinstance(width, int) or width % 4:
        return None
    heads, kv_heads = (each.out_features // width for each in (part.q_proj, part.k_proj))
    generator = torch.Generator().manual_seed(1)
    x = _rows(generator, dtype, sizes)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    angle_width = width // 2 if rotary_is_partial else width
    angles = some(1, len(sizes), angle_width), some(1, len(sizes), angle_width)

    def matrix(outputs: int) -> Call:
        weights = some(outputs, 8)
        return lambda rows: (rows[..., None, :] * weights).sum(dim=-1)

    def norm(shift: float) -> Call:
        return lambda numbers: numbers * numbers.amax(dim=-1, keepdim=True) + shift

    by = some(heads * width)  # number by number, so that all are looked at
    given = _StandIn(
        part,
        q_proj=matrix(heads * width),
        k_proj=matrix(kv_heads * width),
        v_proj=matrix(kv_heads * width),
        o_proj=lambda rows: rows * by,
        q_norm=norm(1.0),
        k_norm=norm(2.0),
    )
    heard: list[tuple[torch.Tensor, ...]] = []
    told: dict[str, Any] = {}

    def hear(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Of `[rows, heads, width]` and twice `[kv_heads, rows, width]`."""
        heard.append((queries, keys, values))
        return queries * 3 + 1

    def interface(
        _module: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _mask: Any, **rest: Any
    ) -> tuple[torch.Tensor, None]:
        told.update(rest)
        return hear(queries[0].transpose(0, 1), keys[0], values[0])[None], None

    tree: Any = SimpleNamespace()
    try:
        code = inspect.unwrap(own)
        choice = SimpleNamespace(get_interface=lambda *_: interface)
        names = {**code.__globals__, "ALL_ATTENTION_FUNCTIONS": choice}
        tried = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
        tried.__kwdefaults__ = code.__kwdefaults__
        positions = torch.tensor([[7 * place + 3 for place in range(len(sizes))]])
        found, _ = tried(
            given,
            x,
            attention_mask=None,
            position_ids=positions,
            position_embeddings=angles,
            tree=tree,
        )
        expected, _ = _attention(
            given,
            x,
            position_embeddings=angles,
            tree=tree,
            turns=turns,
            has_norms="q_norm" in part._modules,
            told={},
            attend=lambda _tree, _layer, *rows: hear(*rows),
        )
    except Exception:  # noqa: BLE001 - whatever its code wants that is not there
        return None
    are_same = len(heard) == 2 and all(map(_are_same, *heard))
    unknown = {name for name, value in told.items() if value is not None} - _TOLD.keys() - _UNTOLD
    known = {_TOLD[name]: value for name, value in told.items() if name in _TOLD}
    are_numbers = all(value is None or isinstance(value, int | float) for value in known.values())
    if not are_same or unknown or not _are_same(found, expected) or "scaling" not in told:
        return None
    return known if are_numbers else None
