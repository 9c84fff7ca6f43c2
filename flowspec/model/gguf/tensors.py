"""The tensors of a GGUF file under the names of transformers, unpacked one by one, block of rows by block of
rows.

Which tensor is which, `names.py` says, and `conversions.py` what llama.cpp's converter did to it (the heads'
rows of Llama in another order, Gemma's norms plus one).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import F32, Numbers, fill, in_room, room
from flowspec.model.arithmetic.levels import as_q8_0
from flowspec.model.arithmetic.packed import FORMS, PANEL, packed
from flowspec.model.families import PLAIN_ROOT, Family
from flowspec.model.gguf import gemma4, linear_attention
from flowspec.model.gguf.blocks import panels_of
from flowspec.model.gguf.config import FACTORS, GUESSING
from flowspec.model.gguf.conversions import Conversion, LargerNorms, TurnedPairs
from flowspec.model.gguf.file import SMALL, GgufFile, GgufTensor
from flowspec.model.gguf.names import NEXTN, NEXTN_NAMES, names_in_layers, names_outside
from flowspec.model.layer_by_layer import LAYER_INPUT
from flowspec.model.tensors import ROUNDED_ANEW, Panels, PlacedTensors, check_shape

CONVERSIONS: Mapping[str, type[Conversion]] = {
    **dict.fromkeys(("llama", "smollm3", "granite"), TurnedPairs),
    **dict.fromkeys(("gemma2", "gemma3"), LargerNorms),
    **dict.fromkeys(linear_attention.ARCHITECTURES, linear_attention.LinearAttention),
}
"""Of architectures whose tensors are not in files as in checkpoints."""
CONVOLUTIONS = (".shortconv.conv.weight", linear_attention.CONVOLUTION)
"""How names end of a convolution's weights: `[width, length]` in a file, `[width, 1, length]` in
transformers."""
_SHARED_GATE = ".ffn_gate_inp_shexp.weight"
"""A matrix of one row, which some files hold as a vector."""
_IN_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]*)\.(.+)")
BLOCK_NUMBERS = 1 << 20
"""So many are unpacked at once."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of transformers is in the file: a tensor there, or of a mixture's tensor one expert's
    part, or one layer's of a tensor that is for all layers."""

    tensor: str
    expert: int | None = None
    layer: int | None = None


def _is_small(tensor: GgufTensor) -> bool:
    """Whether layers multiply by it in packed form even where the file does not pack it."""
    return any(map(tensor.name.__contains__, SMALL))


class GgufTensors(PlacedTensors[_Place]):
    """As over safetensors. Raises `InputError` for a file with tensors that the family's modules have no
    place for."""

    _places: dict[str, _Place]

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
        self._model = model
        self._tensor = tensor
        self._expert_count, self._layers = spec.experts, len(spec.layers)
        self._conversion = CONVERSIONS.get(architecture, Conversion)(spec)
        guessing = tuple(f"blk.{self._layers + place}." for place in range(ahead))
        idle = {
            f"blk.{layer}.{part}"
            for layer, source in enumerate(spec.sources)
            for part in gemma4.OF_KEYS_AND_VALUES
            if source != layer  # they may be there all the same
        }
        known = [name for name in names if name not in idle]
        self._places = self._find(family, architecture, known, has_mtp=ahead == 1)
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

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        if place is None:
            raise InputError(
                f"model {self._model!r} has no tensor {name}; the file may be incomplete or of another family"
            )
        shape = self._tensor(place.tensor).shape
        if place.tensor.endswith(CONVOLUTIONS):
            return (shape[0], 1, *shape[1:])
        if place.tensor.endswith(_SHARED_GATE):
            return (1, *shape[-1:])
        if place.layer is not None:
            axis = self._axis(place)
            if len(shape) != 2 or shape[axis] % self._layers:
                raise InputError(
                    f"tensor {place.tensor} of {self._model!r}: expected equal parts for {self._layers} "
                    f"layers, got the shape {list(shape)}"
                )
            return tuple(size // (self._layers if each == axis else 1) for each, size in enumerate(shape))
        if place.expert is None:
            return shape
        if shape[0] != self._expert_count:
            raise InputError(
                f"tensor {place.tensor} of {self._model!r}: expected {self._expert_count} experts by the "
                f"metadata, got {shape[0]}"
            )
        return shape[1:]

    def load(self, name: str, shape: tuple[int, ...]) -> F32:
        """In float32."""
        found = np.empty(shape, np.float32)
        self.copy_into(name, found)
        return found

    def copy_into(self, name: str, part: Numbers) -> None:
        self.copy_together({name: part})

    def copy_together(self, parts: Mapping[str, Numbers]) -> None:
        for names in self._by_rows(parts):
            self._copy({name: parts[name] for name in names})

    def _copy(self, parts: Mapping[str, Numbers]) -> None:
        """Copies tensors that lie in the same rows of the file."""
        for name, part in parts.items():
            check_shape(name, self._model, part.shape, self.shape(name), "the metadata")
        (name, part), *_ = parts.items()
        place = self._places[name]
        tensor = self._tensor(place.tensor)
        if part.ndim == 1 or place.tensor.endswith(CONVOLUTIONS):
            numbers = tensor.numbers() if place.expert is None else tensor.numbers()[place.expert]
            fill(part, self._conversion.undone(numbers, place.tensor).reshape(part.shape))
            return
        rows, columns = part.shape
        order, inputs = self._order(place, rows), self._conversion.input_order(place.tensor)
        step = max(1, BLOCK_NUMBERS // columns)
        for first in range(0, rows, step):
            # anew: pages that were read count as this process's until the map is dropped
            packed_rows = tensor.packed()
            for name, part in parts.items():
                own = packed_rows[:, self._columns(self._places[name])]
                block = tensor.unpack(own[order[first : first + step]])
                if inputs is not None:
                    block = block[:, inputs]
                fill(part[first : first + step], block)

    def form(self, name: str) -> str:
        tensor = self._tensor(self._places[name].tensor)
        return ROUNDED_ANEW if not tensor.form and _is_small(tensor) else tensor.form

    def is_rounded_anew(self, name: str) -> bool:
        tensor = self._tensor(self._places[name].tensor)
        return not tensor.form and _is_small(tensor)

    def packed_bytes(self, name: str) -> int:
        outputs, inputs = self.shape(name)
        return FORMS[self.form(name)].panel_bytes(inputs, outputs)

    def panels(self, name: str, shape: tuple[int, ...]) -> Panels:
        return self.panels_together({name: shape})[name]

    def panels_together(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Panels]:
        found = {}
        for names in self._by_rows(shapes):
            for name in names:
                check_shape(name, self._model, shapes[name], self.shape(name), "the metadata")
            if self.is_rounded_anew(names[0]):
                (name,) = names
                found[name] = in_room(packed(FORMS[ROUNDED_ANEW], as_q8_0(self.load(name, shapes[name]))))
            else:
                found |= self._panels(names, *shapes[names[0]])
        return found

    def _panels(self, names: Sequence[str], rows: int, columns: int) -> dict[str, Panels]:
        """Of matrices that lie in the same rows of the file."""
        place = self._places[names[0]]
        tensor, order = self._tensor(place.tensor), self._order(place, rows)
        step = max(PANEL, BLOCK_NUMBERS // columns // PANEL * PANEL)
        found: dict[str, Panels] = {}
        for first in range(0, rows, step):
            packed_rows = tensor.packed()
            for name in names:
                own = packed_rows[:, self._columns(self._places[name])]
                panels = panels_of(tensor.form, own[order[first : first + step]], columns)
                if first == 0:
                    found[name] = room((-(-rows // PANEL), *panels.shape[1:]), np.uint8)
                found[name][first // PANEL : first // PANEL + len(panels)] = panels
        return found

    def _by_rows(self, names: Iterable[str]) -> Iterable[list[str]]:
        """Names in groups: of a tensor whose rows hold all layers side by side those of all layers, of others
        each alone."""
        groups: dict[str, list[str]] = {}
        for name in names:
            place = self._places.get(name)
            is_beside_others = place is not None and place.layer is not None and self._axis(place) == 1
            groups.setdefault(place.tensor if place and is_beside_others else f"alone {name}", []).append(
                name
            )
        return groups.values()

    def input_order(self, name: str) -> npt.NDArray[np.int64] | None:
        is_anew, tensor = self.is_rounded_anew(name), self._places[name].tensor
        inputs = None if is_anew else self._conversion.input_order(tensor)
        return None if inputs is None else inputs.argsort()

    def _order(self, place: _Place, rows: int) -> npt.NDArray[np.int64]:
        """What was done to a matrix is an order of its rows, for which it need not be unpacked."""
        order = self._conversion.undone(np.arange(rows)[:, None], place.tensor)[:, 0]
        part = place.expert if place.layer is None or self._axis(place) else place.layer
        found: npt.NDArray[np.int64] = order + (part or 0) * rows
        return found

    def _columns(self, place: _Place) -> slice:
        """Which bytes of each row: all, or one layer's part."""
        tensor = self._tensor(place.tensor)
        if place.layer is None or self._axis(place) == 0:
            return slice(None)
        size, rest = divmod(tensor.row_bytes, self._layers)
        if rest or size % tensor.block_bytes:
            raise InputError(
                f"tensor {place.tensor} of {self._model!r} packs several layers' numbers together; expected "
                "the width of a layer's part to be a multiple of a block's, got "
                f"{tensor.shape[1] // self._layers}"
            )
        return slice(place.layer * size, (place.layer + 1) * size)

    @staticmethod
    def _axis(place: _Place) -> int:
        """Along which layers' parts lie one after another."""
        return 1 if place.tensor == gemma4.TABLE else 0

    def _find(
        self, family: Family, architecture: str, names: Iterable[str], has_mtp: bool
    ) -> dict[str, _Place]:
        """Place by name, of those that are in the file; of experts one by one, as checkpoints hold them."""
        root, mtp = PLAIN_ROOT.prefix, family.mtp
        in_layers, in_mtp = names_in_layers(architecture), dict[str, str]()
        named = {
            tensor: root + name for tensor, name in names_outside(architecture, family.last_norm).items()
        }
        named["output.weight"] = PLAIN_ROOT.lm_head
        if mtp is not None and has_mtp:
            stem = mtp.prefix.format(self._layers)
            in_mtp = {tensor: stem + mtp.layer + name for tensor, name in in_layers.items()}
            for part, leaf in NEXTN_NAMES.items():
                if own := getattr(mtp, part):
                    in_mtp[f"{NEXTN}{leaf}.weight"] = f"{stem}{own}.weight"
        places: dict[str, _Place] = {}
        for tensor in names:
            name = named.get(tensor)
            if found := _IN_BLOCK.fullmatch(tensor):
                block, leaf = int(found[1]), found[2]
                if block == self._layers:
                    name = in_mtp.get(leaf)
                elif block < self._layers and leaf in in_layers:
                    name = f"{root}layers.{block}.{in_layers[leaf]}"
            if name is not None and "{}" not in name:
                places[name] = _Place(tensor)
            elif name is not None:
                places |= {
                    name.format(expert): _Place(tensor, expert) for expert in range(self._expert_count)
                }
            for kind, of_all in gemma4.OF_ALL_LAYERS.items():
                for layer in range(self._layers if tensor == of_all else 0):
                    own_name = f"{root}layers.{layer}.{LAYER_INPUT}.{kind}.weight"
                    places[own_name] = _Place(tensor, layer=None if tensor == gemma4.NORM else layer)
        return places
