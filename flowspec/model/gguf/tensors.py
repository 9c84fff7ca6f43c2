"""The tensors of a GGUF file under the names of transformers, unpacked one by one, block of rows by block of
rows.

Which tensor is which, and what llama.cpp's converter did to it (the heads' rows of Llama in another order,
Gemma's norms plus one), is transformers' own knowledge: its name map and its tensor processors are asked for
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flowspec.errors import InputError
from flowspec.model.arithmetic.operations import as_q8_0
from flowspec.model.arithmetic.packed import FORMS, PANEL, packed
from flowspec.model.families import PLAIN_ROOT, Family, MtpLayout, check_family, config_of_mtp
from flowspec.model.gguf import gemma4, linear_attention
from flowspec.model.gguf.blocks import panels_of
from flowspec.model.gguf.config import FACTORS
from flowspec.model.gguf.file import SMALL, GgufFile, GgufTensor, tell_gguf_version
from flowspec.model.gguf.names import NEXTN, NEXTN_NAMES
from flowspec.model.layer_by_layer import LAYER_INPUT
from flowspec.model.linear_attention import take_stored_fading
from flowspec.model.spec import spec_of
from flowspec.model.tensors import ROUNDED_ANEW, PlacedTensors, check_shape

_CONVERTED_AS = {"smollm3": "llama", "granite": "llama", "olmoe": "qwen3moe"}
"""Architectures that transformers' processors do not know, by one whose tensors llama.cpp's converter treats
alike."""
CONVOLUTIONS = (".shortconv.conv.weight", linear_attention.CONVOLUTION)
"""How names end of a convolution's weights: `[width, length]` in a file, `[width, 1, length]` in
transformers."""
_SHARED_GATE = ".ffn_gate_inp_shexp.weight"
"""A matrix of one row, which some files hold as a vector."""
BLOCK_NUMBERS = 1 << 20
"""So many are unpacked at once."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of transformers is in the file: a tensor there, or of a mixture's tensor one expert's
    part, or one layer's of a tensor that is for all layers."""

    tensor: str
    expert: int | None = None
    layer: int | None = None


def _converted_name(name: str) -> str:
    """As llama.cpp's converter looks it up: experts are joined, a router's bias is one, and sinks are
    weights."""
    name = name.replace(".experts.{}.", ".experts.").replace("_correction_bias", "_correction.bias")
    return f"{name}.weight" if name.endswith(".sinks") else name


def _is_small(tensor: GgufTensor) -> bool:
    """Whether layers multiply by it in packed form even where the file does not pack it."""
    return any(map(tensor.name.__contains__, SMALL))


def _guessing_blocks(config: Any, family: Family) -> tuple[str, ...]:
    """How tensors begin of layers behind the last one, which guess tokens that follow."""
    count = getattr(config, family.mtp.count, 0) or 0 if family.mtp else 0
    return tuple(f"blk.{config.num_hidden_layers + place}." for place in range(count))


def _idle(config: Any) -> set[str]:
    """Tensors of keys and values in layers that attend to another's: they may be there all the same."""
    sharing = [layer for layer, source in enumerate(spec_of(config).sources) if source != layer]
    return {f"blk.{layer}.{part}" for layer in sharing for part in gemma4.OF_KEYS_AND_VALUES}


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
        config: Any,
    ) -> None:
        """`names` are those of the file's tensors, of which `tensor` gives any that is read; `architecture`
        is what the file calls it."""
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        family = check_family(config.to_dict(), model)
        self._model = model
        self._tensor = tensor
        self._expert_count, self._layers = spec_of(config).experts, config.num_hidden_layers
        converted_as = _CONVERTED_AS.get(architecture, architecture)
        processor: Any = TENSOR_PROCESSORS.get(converted_as, TensorProcessor)
        if architecture in linear_attention.ARCHITECTURES:
            processor = linear_attention.LinearAttention
        elif architecture == gemma4.ARCHITECTURE:
            processor = gemma4.Gemma4
        self._processor: Any = processor(config=config.to_dict())
        self._places = self._find(config, family, architecture, names)
        left = set(names) - {place.tensor for place in self._places.values()} - set(FACTORS)
        left -= {name for name in left if name.startswith(_guessing_blocks(config, family))}
        left -= _idle(config)
        if left:
            raise InputError(
                f"{model} holds {min(left)}, for which transformers' {family.prefix} has no place: it is of "
                "another architecture"
            )

    @staticmethod
    def of_file(file: GgufFile, config: Any) -> GgufTensors:
        architecture = file.metadata["general.architecture"]
        return GgufTensors(
            str(file.path), architecture, file.tensors.keys(), file.tensors.__getitem__, config
        )

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

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """In float32."""
        found = torch.empty(shape)
        self.copy_into(name, found)
        return found

    def copy_into(self, name: str, part: torch.Tensor) -> None:
        self.copy_together({name: part})

    def copy_together(self, parts: Mapping[str, torch.Tensor]) -> None:
        for names in self._by_rows(parts):
            self._copy({name: parts[name] for name in names})

    def _copy(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Copies tensors that lie in the same rows of the file."""
        for name, part in parts.items():
            check_shape(name, self._model, part.shape, self.shape(name), "the metadata")
        (name, part), *_ = parts.items()
        place = self._places[name]
        tensor = self._tensor(place.tensor)
        if part.dim() == 1 or place.tensor.endswith(CONVOLUTIONS):
            numbers = tensor.numbers() if place.expert is None else tensor.numbers()[place.expert]
            found = self._processor.process(weights=numbers, name=place.tensor).weights
            part.copy_(torch.from_numpy(found).view(part.shape))
            return
        rows, columns = part.shape
        order, inputs = self._order(place, rows), self._inputs(place)
        step = max(1, BLOCK_NUMBERS // columns)
        for first in range(0, rows, step):
            # anew: pages that were read count as this process's until the map is dropped
            packed_rows = tensor.packed()
            for name, part in parts.items():
                own = packed_rows[:, self._columns(self._places[name])]
                block = tensor.unpack(own[order[first : first + step]])
                if inputs is not None:
                    block = block[:, inputs]
                part[first : first + step].copy_(torch.from_numpy(block))

    def form(self, name: str) -> str:
        tensor = self._tensor(self._places[name].tensor)
        return ROUNDED_ANEW if not tensor.form and _is_small(tensor) else tensor.form

    def is_rounded_anew(self, name: str) -> bool:
        tensor = self._tensor(self._places[name].tensor)
        return not tensor.form and _is_small(tensor)

    def packed_bytes(self, name: str) -> int:
        outputs, inputs = self.shape(name)
        return FORMS[self.form(name)].panel_bytes(inputs, outputs)

    def panels(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.panels_together({name: shape})[name]

    def panels_together(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        found = {}
        for names in self._by_rows(shapes):
            for name in names:
                check_shape(name, self._model, shapes[name], self.shape(name), "the metadata")
            if self.is_rounded_anew(names[0]):
                (name,) = names
                found[name] = packed(FORMS[ROUNDED_ANEW], as_q8_0(self.load(name, shapes[name])))
            else:
                found |= self._panels(names, *shapes[names[0]])
        return found

    def _panels(self, names: Sequence[str], rows: int, columns: int) -> dict[str, torch.Tensor]:
        """Of matrices that lie in the same rows of the file."""
        place = self._places[names[0]]
        tensor, order = self._tensor(place.tensor), self._order(place, rows)
        step = max(PANEL, BLOCK_NUMBERS // columns // PANEL * PANEL)
        found: dict[str, torch.Tensor] = {}
        for first in range(0, rows, step):
            packed_rows = tensor.packed()
            for name in names:
                own = packed_rows[:, self._columns(self._places[name])]
                panels = panels_of(tensor.form, torch.from_numpy(own[order[first : first + step]]), columns)
                if first == 0:
                    found[name] = panels.new_empty((-(-rows // PANEL), *panels.shape[1:]))
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

    def input_order(self, name: str) -> torch.Tensor | None:
        inputs = None if self.is_rounded_anew(name) else self._inputs(self._places[name])
        return None if inputs is None else torch.from_numpy(inputs.argsort())

    def close(self) -> None:
        """Nothing to do: maps live as long as a tensor is read."""

    def _order(self, place: _Place, rows: int) -> npt.NDArray[np.int64]:
        """What was done to a matrix is an order of its rows, for which it need not be unpacked."""
        order = self._processor.process(weights=np.arange(rows)[:, None], name=place.tensor).weights[:, 0]
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

    def _inputs(self, place: _Place) -> npt.NDArray[np.int64] | None:
        """Where in a row of the file each input is, if not in its place."""
        asked = getattr(self._processor, "input_order", None)
        found: npt.NDArray[np.int64] | None = None if asked is None else asked(place.tensor)
        return found

    def _find(
        self, config: Any, family: Family, architecture: str, names: Collection[str]
    ) -> dict[str, _Place]:
        """Place by name, of those that are in the file; of experts one by one, as checkpoints hold them."""
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

        tell_gguf_version()
        layers = []
        for index in range(config.num_hidden_layers):
            with torch.device("meta"):
                layer = family.piece("DecoderLayer")(config, index)
            if architecture in linear_attention.ARCHITECTURES and hasattr(layer, "linear_attn"):
                take_stored_fading(layer)
            for name in layer.state_dict():
                layers += [f"{PLAIN_ROOT.prefix}layers.{index}.{each}" for each in _single(family, name)]
        outside = [f"{PLAIN_ROOT.prefix}{each}.weight" for each in ("embed_tokens", family.last_norm)]
        named = {
            self._processor.preprocess_name(_converted_name(name)): name
            for name in (*outside, *layers, PLAIN_ROOT.lm_head)
        }
        ahead = _guessing_blocks(config, family)
        if family.mtp is not None and len(ahead) == 1:
            named |= self._named_ahead(config, family, family.mtp)
        # transformers looks through a whole model's modules for names; these are all there are
        model = SimpleNamespace(config=config, state_dict=lambda: list(named), named_children=tuple)
        found = get_gguf_hf_weights_map(
            model, self._processor, architecture, config.num_hidden_layers + len(ahead)
        )
        places = {}
        for tensor, renamed in found.items():
            name = named[renamed]
            if tensor not in names:
                continue
            if "{}" not in name:
                places[name] = _Place(tensor)
            else:
                for expert in range(self._expert_count):
                    places[name.format(expert)] = _Place(tensor, expert)
        if family.mtp is not None and len(ahead) == 1:
            stem = family.mtp.prefix.format(config.num_hidden_layers)
            for part, leaf in NEXTN_NAMES.items():
                tensor, own = f"{ahead[0]}{NEXTN}{leaf}.weight", getattr(family.mtp, part)
                if own and tensor in names:
                    places[f"{stem}{own}.weight"] = _Place(tensor)
        for kind, tensor in gemma4.OF_ALL_LAYERS.items():
            if tensor in names:
                for layer in range(config.num_hidden_layers):
                    name = f"{PLAIN_ROOT.prefix}layers.{layer}.{LAYER_INPUT}.{kind}.weight"
                    places[name] = _Place(tensor, layer=None if tensor == gemma4.NORM else layer)
        return places

    def _named_ahead(self, config: Any, family: Family, layout: MtpLayout) -> dict[str, str]:
        """The names that a checkpoint has for the decoder layer in its MTP layer, by those that llama.cpp's
        converter looks up, which are of one layer more."""
        with torch.device("meta"):
            layer = family.piece("DecoderLayer")(config_of_mtp(config), 0)
        block = f"{PLAIN_ROOT.prefix}layers.{config.num_hidden_layers}."
        prefix = layout.prefix.format(config.num_hidden_layers) + layout.layer
        return {
            self._processor.preprocess_name(_converted_name(block + each)): prefix + each
            for name in layer.state_dict()
            for each in _single(family, name)
        }


def _single(family: Family, name: str) -> list[str]:
    """What files may call a layer's parameter, or what it is made of, with `{}` for an expert.

    Single matrices come last: some of transformers' processors give both of their tensors the joined name.
    """
    ways = family.ways_to_stack(name) or ((family.renamed.get(name, name),),)
    return list(dict.fromkeys(each for way in reversed(ways) for each in way))
