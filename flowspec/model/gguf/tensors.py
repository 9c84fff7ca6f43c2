"""The tensors of a GGUF file under the names of transformers, unpacked block of rows by block of rows.

Which tensor is which, `names.py` says, and `conversions.py` what llama.cpp's converter did to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import F32, I64, Numbers
from flowspec.model.arithmetic.packed import Levels
from flowspec.model.families import PLAIN_ROOT, Family
from flowspec.model.gguf.blocks import levels_of
from flowspec.model.gguf.config import FACTORS, GUESSING
from flowspec.model.gguf.conversions import CONVOLUTIONS, Conversion
from flowspec.model.gguf.file import SMALL, GgufFile, GgufTensor, Rows
from flowspec.model.gguf.names import (
    LAYER_TABLE,
    NEXTN,
    NEXTN_NAMES,
    OF_ALL_LAYERS,
    OF_KEYS_AND_VALUES,
    names_in_layers,
    names_outside,
)
from flowspec.model.layer_by_layer import layer_part
from flowspec.model.parts import LAYER_INPUT
from flowspec.model.tensors import ROUNDED_ANEW, Tensors

_SHARED_GATE = ".ffn_gate_inp_shexp.weight"
"""A matrix of one row, which some files hold as a vector."""
_IN_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]*)\.(.+)")


class _Place(NamedTuple):
    """Where a tensor of transformers is in the file: a tensor there, or of a mixture's tensor one expert's
    part, or one layer's of a tensor that is for all layers."""

    tensor: str
    expert: int | None = None
    layer: int | None = None

    @property
    def axis(self) -> int | None:
        """Along which layers' parts lie one after another."""
        return None if self.layer is None else int(self.tensor == LAYER_TABLE)


class GgufTensors(Tensors):
    """As over safetensors. Raises `InputError` for a file with tensors that the family's modules have no
    place for."""

    source = "the metadata"

    def __init__(
        self,
        model: str,
        architecture: str,
        names: Collection[str],
        tensor: Callable[[str], GgufTensor],
        spec: ModelSpec,
        family: Family,
        ahead: int = 0,
    ) -> None:
        """`names` are those of the file's tensors, of which `tensor` gives any that is read; `architecture`
        is what the file calls it. `ahead`: so many blocks behind the last layer guess tokens that follow."""
        self.model = model
        self._tensor = tensor
        self._expert_count, self._layers = spec.experts, len(spec.layers)
        self._conversion = Conversion(architecture, spec)
        idle = {
            f"blk.{layer}.{part}"
            for layer, source in enumerate(spec.sources)
            for part in OF_KEYS_AND_VALUES
            if source != layer  # they may be there all the same
        }
        known = [name for name in names if name not in idle]
        self._places = dict(self._find(family, architecture, spec, known, has_mtp=ahead == 1))
        guessing = tuple(f"blk.{self._layers + place}." for place in range(ahead))
        left = set(known) - {place.tensor for place in self._places.values()} - set(FACTORS)
        left -= {name for name in left if name.startswith(guessing)}
        if left:
            raise InputError(
                f"{model} holds {min(left)}, for which transformers' {family.prefix} has no place: it is of "
                "another architecture"
            )

    @staticmethod
    def of_file(file: GgufFile, spec: ModelSpec, family: Family) -> GgufTensors:
        architecture = file.metadata["general.architecture"]
        ahead = file.metadata.get(f"{architecture}.{GUESSING}", 0) if family.mtp is not None else 0
        names, tensor = file.tensors.keys(), file.tensors.__getitem__
        return GgufTensors(str(file.path), architecture, names, tensor, spec, family, ahead)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def files_of(self, name: str) -> tuple[str, ...]:
        return (self._places[name].tensor if name in self._places else name,)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        if place is None:
            raise InputError(
                f"model {self.model!r} has no tensor {name}; the file may be incomplete or of another family"
            )
        shape = self._tensor(place.tensor).shape
        if place.tensor.endswith(CONVOLUTIONS):
            return (shape[0], 1, *shape[1:])
        if place.tensor.endswith(_SHARED_GATE):
            return (1, *shape[-1:])
        if place.layer is not None:
            whole = np.broadcast_to(np.uint8(0), shape)
            return layer_part(self.model, place.tensor, place.axis, self._layers, place.layer, whole).shape
        if place.expert is None:
            return shape
        if shape[0] != self._expert_count:
            raise InputError(
                f"tensor {place.tensor} of {self.model!r}: expected {self._expert_count} experts by the "
                f"metadata, got {shape[0]}"
            )
        return shape[1:]

    def load(self, name: str, shape: tuple[int, ...]) -> F32:
        """In float32."""
        found = np.empty(shape, np.float32)
        self.copy_into(name, found)
        return found

    def rows(self, name: str, first: int, end: int) -> Numbers:
        shape, place = self.shape(name), self._places[name]
        tensor = self._tensor(place.tensor)
        if len(shape) == 1:
            numbers = tensor.numbers() if place.expert is None else tensor.numbers()[place.expert]
            return self._conversion.undone(numbers, place.tensor)[first:end]
        block = tensor.unpack(self._packed_rows(name, first, end))
        inputs = self._conversion.input_order(place.tensor)
        return (block if inputs is None else block[:, inputs]).reshape(-1, *shape[1:])

    def levels(self, name: str, first: int, end: int) -> Levels:
        if self.is_rounded_anew(name):
            return super().levels(name, first, end)
        form, (_, inputs) = self.form(name), self.shape(name)
        return levels_of(form, self._packed_rows(name, first, end), inputs)

    def form(self, name: str) -> str:
        return ROUNDED_ANEW if self.is_rounded_anew(name) else self._tensor(self._places[name].tensor).form

    def is_rounded_anew(self, name: str) -> bool:
        """Small matrices, by which layers multiply in packed form even where the file does not pack them."""
        tensor = self._tensor(self._places[name].tensor)
        return not tensor.form and any(map(tensor.name.__contains__, SMALL))

    def input_order(self, name: str) -> I64 | None:
        inputs = self._conversion.input_order(self._places[name].tensor)
        return None if inputs is None or self.is_rounded_anew(name) else inputs.argsort()

    def _packed_rows(self, name: str, first: int, end: int) -> Rows:
        """What was done to a matrix is an order of its rows, for which it need not be unpacked. The file is
        mapped anew each time, since pages that were read count as this process's until a map is dropped."""
        place, count = self._places[name], self.shape(name)[0]
        tensor = self._tensor(place.tensor)
        order = self._conversion.undone(np.arange(count)[:, None], place.tensor)[first:end, 0]
        part = place.layer if place.axis == 0 else place.expert
        packed = tensor.packed()
        if place.axis == 1:
            assert place.layer is not None
            size, rest = divmod(tensor.row_bytes, self._layers)
            if rest or size % tensor.block_bytes:
                raise InputError(
                    f"tensor {place.tensor} of {self.model!r} packs several layers' numbers together; "
                    "expected the width of a layer's part to be a multiple of a block's, got "
                    f"{tensor.shape[1] // self._layers}"
                )
            packed = packed[:, place.layer * size : (place.layer + 1) * size]
        return packed[order + (part or 0) * count]

    def _find(
        self, family: Family, architecture: str, spec: ModelSpec, names: Iterable[str], has_mtp: bool
    ) -> Iterator[tuple[str, _Place]]:
        """Names and places of those that are in the file; of experts one by one, as checkpoints hold them."""
        root, mtp = PLAIN_ROOT.prefix, family.mtp
        in_layers, in_mtp = names_in_layers(architecture, family, spec), dict[str, str]()
        outside = names_outside(architecture, family.last_norm)
        named = {tensor: root + name for tensor, name in outside.items()}
        named["output.weight"] = PLAIN_ROOT.lm_head
        if mtp is not None and has_mtp:
            stem = mtp.prefix.format(self._layers)
            in_mtp = {tensor: stem + mtp.layer + name for tensor, name in in_layers.items()}
            for part, leaf in NEXTN_NAMES.items():
                if own := getattr(mtp, part):
                    in_mtp[f"{NEXTN}{leaf}.weight"] = f"{stem}{own}.weight"
        for tensor in names:
            name = named.get(tensor)
            if found := _IN_BLOCK.fullmatch(tensor):
                block, leaf = int(found[1]), found[2]
                if block == self._layers:
                    name = in_mtp.get(leaf)
                elif block < self._layers and leaf in in_layers:
                    name = f"{root}layers.{block}.{in_layers[leaf]}"
            if name is not None and "{}" not in name:
                yield name, _Place(tensor)
            elif name is not None:
                for expert in range(self._expert_count):
                    yield name.format(expert), _Place(tensor, expert)
            if tensor in OF_ALL_LAYERS:
                kind = OF_ALL_LAYERS[tensor]
                for layer in range(self._layers):
                    own_layer = None if kind == "norm" else layer
                    yield f"{root}layers.{layer}.{LAYER_INPUT}.{kind}.weight", _Place(tensor, None, own_layer)
