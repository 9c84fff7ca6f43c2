"""The tensors of a GGUF file under the names of transformers, unpacked block of rows by block of rows.

Which tensor is which, `names.py` says. What llama.cpp's converter does to tensors is taken back. *Llama's*
heads turn pairs of numbers with the position: in a file the two of a pair are neighbours, elsewhere half a
head apart. *Norms* whose weights are added to 1 are stored with it. *Linear attention* (Qwen3.5): several
heads of values share one of keys. In transformers they lie beside each other; in a file all that are the
first of their head of keys come first, then all that are the second. Rows are brought back in order; so are
the inputs of the last matrix where it is unpacked, while one that stays packed takes its inputs in the file's
order, since a block may hold several heads'. How fast a state fades, A_log, is there as -e^A_log, which has
no exact logarithm: layers compute with it as it is (`names.STORED_FADING`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import DeltaRule, ModelSpec
from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import F32, I64, Numbers
from flowspec.model.arithmetic.packed import Levels
from flowspec.model.families import PLAIN_ROOT, check_family
from flowspec.model.gguf.blocks import levels_of
from flowspec.model.gguf.config import FACTORS
from flowspec.model.gguf.file import SMALL, GgufTensor, Octets
from flowspec.model.gguf.names import OF_ALL_LAYERS, checkpoint_names
from flowspec.model.layer_by_layer import layer_part
from flowspec.model.parts import LAYER_INPUT
from flowspec.model.tensors import ROUNDED_ANEW, Tensors

_CONVOLUTIONS = (".shortconv.conv.weight", ".ssm_conv1d.weight")
"""`[width, length]` in a file, `[width, 1, length]` in transformers."""
_SHARED_GATE = ".ffn_gate_inp_shexp.weight"
"""A matrix of one row, which some files hold as a vector."""
_TURNED = ("llama", "smollm3", "granite")
_OF_VALUES = (".attn_gate.weight", ".attn_qkv.weight", ".ssm_conv1d.weight")
"""What has rows for values; before them some have rows for queries and keys."""
_OF_HEADS = (".ssm_alpha.weight", ".ssm_beta.weight", ".ssm_a", ".ssm_dt.bias")
"""What has one row for each head."""
_OWN_NORM = ".ssm_norm.weight"
"""Which checkpoints, too, have as it is multiplied with."""
_KEYS_AND_VALUES = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")


class Conversion:
    """Of an architecture's tensors, for a model of that spec."""

    def __init__(self, architecture: str, spec: ModelSpec) -> None:
        self._is_one_larger = spec.norm == "1 + weights"
        layer = spec.layers[0]
        is_turned = architecture in _TURNED
        self._turned = {".attn_q.": layer.heads, ".attn_k.": layer.kv.count} if is_turned else {}
        mixers = [each.dense.mixer for each in spec.layers if each.dense is not None]
        self._rule = next((mixer for mixer in mixers if isinstance(mixer, DeltaRule)), None)

    def undone(self, numbers: Numbers, tensor: str) -> Numbers:
        """The numbers of a file's `tensor` as checkpoints have them. What is done to a matrix is an order of
        its rows."""
        if self._is_one_larger and tensor.endswith("norm.weight") and not tensor.endswith(_OWN_NORM):
            return numbers - 1
        for part, heads in self._turned.items():
            if part in tensor:
                pairs = numbers.reshape(heads, -1, 2, *numbers.shape[1:])
                return pairs.swapaxes(1, 2).reshape(numbers.shape)
        if self._rule is not None and tensor.endswith((*_OF_VALUES, *_OF_HEADS)):
            order = _order(self._rule, 1 if tensor.endswith(_OF_HEADS) else self._rule.value_width)
            first = len(numbers) - len(order)
            return np.concatenate([numbers[:first], numbers[first:][order]])
        return numbers

    def input_order(self, tensor: str) -> I64 | None:
        """Where in a row of the file each of a checkpoint's inputs is; None where it is in its place."""
        if self._rule is None or not tensor.endswith(".ssm_out.weight"):
            return None
        return _order(self._rule, self._rule.value_width)


def _order(rule: DeltaRule, width: int) -> I64:
    """Where each of a checkpoint's rows of values is in a file, of which each head has so many."""
    rows = np.arange(rule.heads * width).reshape(-1, rule.key_heads, width)
    return rows.swapaxes(0, 1).reshape(-1)


class _Place(NamedTuple):
    """Where a tensor of transformers is in the file: a tensor there, or a part of it. Parts lie one after
    another along an axis: those of experts, along which transformers' tensors have no axis, or of layers."""

    tensor: str
    part: int | None = None
    axis: int = 0


class GgufTensors(Tensors):
    """As over safetensors. Raises `InputError` for a file with tensors that the family's modules have no
    place for."""

    source = "the metadata"

    def __init__(
        self,
        model: str,
        architecture: str,
        config: Mapping[str, Any],
        spec: ModelSpec,
        names: Iterable[str],
        tensor: Callable[[str], GgufTensor],
    ) -> None:
        """`names` are those of the file's tensors, of which `tensor` gives any that is read; `architecture`
        is what the file calls it, `config` what it states."""
        self.model = model
        family = check_family(config, model)
        ahead = 0 if family.mtp is None else config.get(family.mtp.count) or 0
        self._tensor = tensor
        self._expert_count, self._layers = spec.experts, len(spec.layers)
        self._conversion = Conversion(architecture, spec)
        idle = {
            f"blk.{layer}.{part}"
            for layer, source in enumerate(spec.sources)
            for part in _KEYS_AND_VALUES
            if source != layer  # they may be there all the same
        }
        theirs = checkpoint_names(architecture, family, spec, has_mtp=ahead == 1)
        guessing = tuple(f"blk.{self._layers + block}." for block in range(min(ahead, limits.LAYERS_MAX)))
        self._places: dict[str, _Place] = {}
        for file_name in names:
            name = theirs.get(file_name, "")
            if kind := OF_ALL_LAYERS.get(file_name):
                for layer in range(self._layers):
                    part = () if kind == "norm" else (layer, int(kind == "table"))
                    stem = f"{PLAIN_ROOT.prefix}layers.{layer}.{LAYER_INPUT}"
                    self._places[f"{stem}.{kind}.weight"] = _Place(file_name, *part)
            elif file_name in idle:
                continue
            elif "{}" in name:
                each = range(self._expert_count)
                self._places |= {name.format(expert): _Place(file_name, expert) for expert in each}
            elif name:
                self._places[name] = _Place(file_name)
            elif file_name not in FACTORS and not file_name.startswith(guessing):
                raise InputError(
                    f"{model} holds {file_name}, for which transformers' {family.prefix} has no place: it is "
                    "of another architecture"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def files_of(self, name: str) -> tuple[str, ...]:
        return (self._places[name].tensor if name in self._places else name,)

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise InputError(
                f"model {self.model!r} has no tensor {name}; the file may be incomplete or of another family"
            )
        return self._places[name]

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        shape = self._tensor(place.tensor).shape
        if place.tensor.endswith(_CONVOLUTIONS):
            return (shape[0], 1, *shape[1:])
        if place.tensor.endswith(_SHARED_GATE):
            return (1, *shape[-1:])
        if place.part is None:
            return shape
        if place.tensor in OF_ALL_LAYERS:
            whole = np.broadcast_to(np.uint8(0), shape)
            return layer_part(self.model, place.tensor, place.axis, self._layers, place.part, whole).shape
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
        shape, place = self.shape(name), self._place(name)
        tensor = self._tensor(place.tensor)
        if len(shape) == 1:
            numbers = tensor.numbers() if place.part is None else tensor.numbers()[place.part]
            return self._conversion.undone(numbers, place.tensor)[first:end]
        block = tensor.unpack(self._packed_rows(name, first, end))
        inputs = self._conversion.input_order(place.tensor)
        return (block if inputs is None else block[:, inputs]).reshape(-1, *shape[1:])

    def levels(self, name: str, first: int, end: int) -> Levels:
        if self.is_rounded_anew(name):
            return super().levels(name, first, end)
        return levels_of(self.form(name), self._packed_rows(name, first, end), self.shape(name)[1])

    def form(self, name: str) -> str:
        return ROUNDED_ANEW if self.is_rounded_anew(name) else self._tensor(self._place(name).tensor).form

    def is_rounded_anew(self, name: str) -> bool:
        """Small matrices, by which layers multiply in packed form even where the file does not pack them."""
        tensor = self._tensor(self._place(name).tensor)
        return not tensor.form and any(map(tensor.name.__contains__, SMALL))

    def input_order(self, name: str) -> I64 | None:
        inputs = self._conversion.input_order(self._place(name).tensor)
        return None if inputs is None or self.is_rounded_anew(name) else inputs.argsort()

    def _packed_rows(self, name: str, first: int, end: int) -> Octets:
        """What was done to a matrix is an order of its rows, for which it need not be unpacked. The file is
        mapped anew each time, since pages that were read count as this process's until a map is dropped."""
        place, count = self._place(name), self.shape(name)[0]
        tensor, part = self._tensor(place.tensor), place.part or 0
        order = self._conversion.undone(np.arange(count)[:, None], place.tensor)[first:end, 0]
        packed = tensor.packed()
        if place.axis == 0:
            return packed[order + part * count]
        size, rest = divmod(packed.shape[1], self._layers)
        if rest or size % tensor.block_bytes:
            raise InputError(
                f"tensor {place.tensor} of {self.model!r} packs several layers' numbers together; expected "
                f"the width of a layer's part to be a multiple of a block's, got {self.shape(name)[1]}"
            )
        return packed[order, part * size : (part + 1) * size]
