"""A layer's experts that a checkpoint holds in one tensor for each matrix, under the names that they would
have one by one. So they are read, sent and packed as those of any mixture.

GPT-OSS's, as transformers saves them: inputs first, and the outputs of gate and up in turns. As they are
published: outputs first, also in turns, as MXFP4, of which these are compressed-tensors' names.

Those of other families in a checkpoint that a tool quantised: outputs first, gate above up, in floats of 8
bits with scales (transformers), or in 16 bits because the tool left them (gptqmodel). Gate and up stay one
matrix, since a block of outputs that share a scale may reach from one into the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import Numbers
from flowspec.model.tensors import PartsOfTensors, Tensors

_JOINED = re.compile(r"(.+\.experts\.)(gate_up|down)_proj(|_bias|_blocks|_scales)")
_NUMBERS, _BLOCKS = "", "_blocks"
_LEAVES = {_NUMBERS: "weight", "_bias": "bias", _BLOCKS: "weight_packed", "_scales": "weight_scale"}
_AXES = {_NUMBERS: 3, "_bias": 2, _BLOCKS: 4, "_scales": 3}
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}


@dataclass(frozen=True, slots=True)
class _Place:
    """One expert's part of a tensor that ends with `suffix`: of its outputs every `step`-th from `first`."""

    tensor: str
    suffix: str
    expert: int
    first: int
    step: int


class JoinedExperts(PartsOfTensors[_Place]):
    """Over the `raw` tensors of a checkpoint whose layers have so many `experts`; all others as they are."""

    def __init__(self, model: str, raw: Tensors, experts: int) -> None:
        super().__init__(model, raw)
        self._experts = experts
        for tensor in raw:
            found = _JOINED.fullmatch(tensor)
            if found is None:
                self._places[tensor] = None
                continue
            stem, kind, suffix = found.groups()
            parts = _PARTS[kind]
            for expert in range(experts):
                for first, part in enumerate(parts):
                    name = f"{stem}{expert}.{part}_proj.{_LEAVES[suffix]}"
                    self._places[name] = _Place(tensor, suffix, expert, first, len(parts))

    def _shape_of(self, place: _Place) -> tuple[int, ...]:
        whole = self._raw.shape(place.tensor)
        outputs = whole[-1 if place.suffix == _NUMBERS else 1] if len(whole) > 1 else 0
        if len(whole) != _AXES[place.suffix] or whole[0] != self._experts or outputs % place.step:
            raise InputError(
                f"tensor {place.tensor} of {self._model!r}: expected {self._experts} experts and "
                f"{_AXES[place.suffix]} axes by config.json, got the shape {list(whole)}"
            )
        outputs //= place.step
        if place.suffix == _NUMBERS:
            return outputs, whole[1]
        if place.suffix == _BLOCKS:
            return outputs, whole[2] * whole[3]
        return outputs, *whole[2:]

    def _part(self, place: _Place, whole: Numbers) -> Numbers:
        part = whole[place.expert]
        if place.suffix == _NUMBERS:
            part = part.T
        part = part[place.first :: place.step]
        return part.reshape(len(part), -1) if place.suffix == _BLOCKS else part


_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(|_scale_inv)")


@dataclass(frozen=True, slots=True)
class _Expert:
    """One expert's part of a tensor."""

    tensor: str
    expert: int


class StackedExperts(PartsOfTensors[_Expert]):
    """As `JoinedExperts`, of families whose matrices have their outputs first."""

    def __init__(self, model: str, raw: Tensors, experts: int) -> None:
        super().__init__(model, raw)
        self._experts = experts
        for tensor in raw:
            found = _STACKED.fullmatch(tensor)
            if found is None or not experts:  # what no module has a place for is to be seen
                self._places[tensor] = None
                continue
            stem, kind, suffix = found.groups()
            for expert in range(experts):
                self._places[f"{stem}.{expert}.{kind}.weight{suffix}"] = _Expert(tensor, expert)

    def _shape_of(self, place: _Expert) -> tuple[int, ...]:
        whole = self._raw.shape(place.tensor)
        if not whole or whole[0] != self._experts:
            raise InputError(
                f"tensor {place.tensor} of {self._model!r}: expected {self._experts} experts by config.json, "
                f"got the shape {list(whole)}"
            )
        return whole[1:]

    def _part(self, place: _Expert, whole: Numbers) -> Numbers:
        return whole[place.expert]
