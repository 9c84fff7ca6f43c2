"""The tensors of a GGUF file under the names of transformers, unpacked block of rows by block of rows.

Which tensor is which, `checkpoint_names` says; blocks are spread out into levels and scales without a loss
(the layouts of ggml's `block_q4_0`, `block_q4_K` and so on). What llama.cpp's converter does to tensors is
taken back. *Llama's*
heads turn pairs of numbers with the position: in a file the two of a pair are neighbours, elsewhere half a
head apart. *Norms* whose weights are added to 1 are stored with it. *Linear attention* (Qwen3.5): several
heads of values share one of keys. In transformers they lie beside each other; in a file all that are the
first of their head of keys come first, then all that are the second. Rows are brought back in order; so are
the inputs of the last matrix where it is unpacked, while one that stays packed takes its inputs in the file's
order, since a block may hold several heads'. How fast a state fades, A_log, is there as -e^A_log, which has
no exact logarithm: layers compute with it as it is (`STORED_FADING`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import DeltaRule, ModelSpec
from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import I64, Numbers
from flowspec.model.arithmetic.packed import FORMS, GROUP, Form, Levels
from flowspec.model.families import PLAIN_ROOT, Family, check_family
from flowspec.model.gguf.config import FACTORS, LAYER_TABLE
from flowspec.model.gguf.file import SMALL, GgufTensor, Octets
from flowspec.model.joined_tensors import layer_part
from flowspec.model.layer import LAYER_INPUT, Layer
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
        self._is_one_larger, first = spec.norm == "1 + weights", spec.layers[0]
        turned = {".attn_q.": first.heads, ".attn_k.": first.kv.count}
        self._turned = turned if architecture in _TURNED else {}
        mixers = [each.dense.mixer for each in spec.layers if each.dense is not None]
        self._rule = next((mixer for mixer in mixers if isinstance(mixer, DeltaRule)), None)
        idle = {
            f"blk.{layer}.{part}"
            for layer, source in enumerate(spec.sources)
            for part in _KEYS_AND_VALUES
            if source != layer  # they may be there all the same
        }
        theirs = checkpoint_names(architecture, family, spec, has_mtp=ahead == 1)
        guessing = tuple(f"blk.{self._layers + block}." for block in range(min(ahead, limits.LAYERS_MAX)))
        self.names = self._places = dict[str, _Place]()
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

    def rows(self, name: str, first: int, end: int) -> Numbers:
        shape, place = self.shape(name), self._place(name)
        tensor = self._tensor(place.tensor)
        if len(shape) == 1:
            numbers = tensor.numbers() if place.part is None else tensor.numbers()[place.part]
            return self.undone(numbers, place.tensor)[first:end]
        block = tensor.unpack(self._packed_rows(name, first, end))
        inputs = self._input_places(place.tensor)
        return (block if inputs is None else block[:, inputs]).reshape(-1, *shape[1:])

    def levels(self, name: str, first: int, end: int) -> Levels:
        return levels_of(self.form(name), self._packed_rows(name, first, end), self.shape(name)[1])

    def form(self, name: str) -> str:
        return ROUNDED_ANEW if self.is_rounded_anew(name) else self._tensor(self._place(name).tensor).form

    def is_rounded_anew(self, name: str) -> bool:
        """Small matrices, by which layers multiply in packed form even where the file does not pack them."""
        tensor = self._tensor(self._place(name).tensor)
        return not tensor.form and any(map(tensor.name.__contains__, SMALL))

    def input_order(self, name: str) -> I64 | None:
        inputs = self._input_places(self._place(name).tensor)
        return None if inputs is None or self.is_rounded_anew(name) else inputs.argsort()

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

    def _input_places(self, tensor: str) -> I64 | None:
        """Where in a row of the file each of a checkpoint's inputs is; None where it is in its place."""
        if self._rule is None or not tensor.endswith(".ssm_out.weight"):
            return None
        return _order(self._rule, self._rule.value_width)

    def _packed_rows(self, name: str, first: int, end: int) -> Octets:
        """What was done to a matrix is an order of its rows, for which it need not be unpacked. The file is
        mapped anew each time, since pages that were read count as this process's until a map is dropped."""
        place, count = self._place(name), self.shape(name)[0]
        tensor, part = self._tensor(place.tensor), place.part or 0
        order = self.undone(np.arange(count)[:, None], place.tensor)[first:end, 0]
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


NEXTN = "nextn."
"""How names begin, in a block behind the last layer, of what an MTP layer has besides a decoder layer."""
NEXTN_NAMES = {
    "embedding": "enorm",
    "feature": "hnorm",
    "projection": "eh_proj",
    "last_norm": "shared_head_norm",
    "own_embedding": "embed_tokens",
    "own_lm_head": "shared_head_head",
}
"""What follows, by what `MtpLayout` calls it."""
OF_ALL_LAYERS = {
    LAYER_TABLE: "table",
    "per_layer_model_proj.weight": "projection",
    "per_layer_proj_norm.weight": "norm",
}
"""Of what the inputs are made that layers of Gemma 4 have of their own, and what a layer's part is called:
columns of the table, rows of the projection, and the norm, which is the same for all."""
STORED_FADING = "linear_attn.A"
"""What a checkpoint's tensor of a layer is called here that holds -e^A_log in the place of A_log."""
_OTHERWISE = {
    STORED_FADING: "ssm_a",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
"""What files call what the gguf package has no name for, by what it is called here."""


def checkpoint_names(architecture: str, family: Family, spec: ModelSpec, has_mtp: bool) -> dict[str, str]:
    """What checkpoints call a model's tensors, by what its GGUF files may call them; with `{}` for an expert
    where a tensor has all of them.

    Names are looked up as llama.cpp's converter does: experts are joined, and everything is a weight or a
    bias.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (kind,) = [key for key, value in MODEL_ARCH_NAMES.items() if value == architecture]
    table, layers, in_layers = get_tensor_name_map(kind, 1), len(spec.layers), dict[str, str]()
    for layer in dict.fromkeys(spec.layers):
        shape = Layer(spec=layer, family=family, hidden=spec.hidden, has_fading=True)
        for parameter in shape.parameters():
            ways = family.ways_to_stack(parameter) or ((family.renamed.get(parameter, parameter),),)
            for name in itertools.chain(*reversed(ways)):  # of matrices that may be joined, each by itself
                known = name.replace("experts.{}.", "experts.").replace(".dt_bias", ".dt_proj.bias")
                known = known.replace("_correction_bias", "_correction.bias")
                known += ".weight" if known.endswith(("sinks", "layer_scalar")) else ""
                stem, _, end = known.rpartition(".")
                if theirs := table.get_name(f"model.layers.0.{stem}"):
                    in_layers[f"{theirs.removeprefix('blk.0.')}.{end}"] = name
                if name in _OTHERWISE:
                    in_layers[_OTHERWISE[name]] = name
    found = {"output.weight": PLAIN_ROOT.lm_head}
    for name in ("embed_tokens", family.last_norm):
        found[f"{table.get_name(f'model.{name}')}.weight"] = f"{PLAIN_ROOT.prefix}{name}.weight"
    prefixes = [f"{PLAIN_ROOT.prefix}layers.{layer}." for layer in range(layers)]
    if family.mtp is not None and has_mtp:
        mtp, stem = family.mtp, family.mtp.prefix.format(layers)
        prefixes.append(stem + mtp.layer)
        for part, leaf in NEXTN_NAMES.items():
            if own := getattr(mtp, part):
                found[f"blk.{layers}.{NEXTN}{leaf}.weight"] = f"{stem}{own}.weight"
    for block, prefix in enumerate(prefixes):
        found |= {f"blk.{block}.{leaf}": prefix + name for leaf, name in in_layers.items()}
    return found


def levels_of(kind: str, rows: Octets, inputs: int) -> Levels:
    """Of a matrix of ggml's type `kind`, one of `FORMS`, from its rows in the file, `[out, row bytes]`."""
    form = FORMS[kind]
    blocks = rows.reshape(len(rows), inputs // form.unit, -1)  # [out, units, bytes of a block]
    if form.unit == GROUP:
        return _of_groups(form, blocks)
    return _of_sixteen_inputs(blocks) if form.halves == 2 else _of_eight_groups(form, blocks)


def _of_groups(form: Form, blocks: Octets) -> Levels:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, Q8_0 and MXFP4: a scale, in some a minimum (ggml adds it, a panel's is
    taken off), in some the fifth bit of each level, and levels."""
    if form.has_exponents:
        return Levels(scales=blocks[..., 0], levels=_nibbles(blocks[..., 1:]))
    if form.bits == 8:
        return Levels(scales=_halves(blocks, 0), levels=blocks[..., 2:] ^ 128)
    rest = blocks[..., 4:] if form.has_minimum else blocks[..., 2:]
    levels = _nibbles(rest[..., -GROUP // 2 :])
    if form.bits == 5:
        levels |= np.unpackbits(rest[..., :4], 2, bitorder="little") << 4
    minimums = -_halves(blocks, 2) if form.has_minimum else None
    return Levels(scales=_halves(blocks, 0), minimums=minimums, levels=levels)


def _of_eight_groups(form: Form, blocks: Octets) -> Levels:
    """Q4_K and Q5_K: a scale, a minimum, whole ones of groups, in Q5_K the fifth bit of each level, and
    levels: a group in the low halves of 32 bytes, the next in the high ones."""
    whole_scales, whole_minimums = _six_bits(blocks[..., 4:16])
    chunks = blocks[..., -128:].reshape(*blocks.shape[:2], 4, GROUP)
    levels = np.stack([chunks & 15, chunks >> 4], 3).reshape(*blocks.shape[:2], 8, GROUP)
    if form.bits == 5:
        places = np.arange(8, dtype=np.uint8)[:, None]
        levels |= (blocks[..., None, 16:48] >> places & 1) << 4
    return Levels(
        levels=levels.reshape(len(blocks), -1, GROUP),
        scales=_halves(blocks, 0),
        minimums=_halves(blocks, 2),
        whole_scales=whole_scales.reshape(len(blocks), -1, 1),
        whole_minimums=whole_minimums.reshape(len(blocks), -1),
    )


def _of_sixteen_inputs(blocks: Octets) -> Levels:
    """Q6_K, of 128 inputs: four bits in 64 bytes, of the first half in the low halves; two bits in 32
    bytes."""
    size = blocks.shape[:2]
    low, high = blocks[..., :128].reshape(*size, 2, 64), blocks[..., 128:192].reshape(*size, 2, 1, GROUP)
    fours = np.concatenate([low & 15, low >> 4], 3).reshape(*size, 2, 4, GROUP)
    twos = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return Levels(
        levels=(fours | twos << 4).reshape(len(blocks), -1, GROUP),
        scales=_halves(blocks, 208),
        whole_scales=np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(len(blocks), -1, 2),
    )


def _halves(blocks: Octets, at: int) -> npt.NDArray[np.float16]:
    """A float16 of each block, `[out, units]`."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(blocks: Octets) -> Octets:
    """Levels of four bits of 32 inputs, `[out, groups, 32]`: low halves of 16 bytes, then high ones."""
    return np.concatenate([blocks & 15, blocks >> 4], 2)


def _six_bits(twelve: Octets) -> tuple[Octets, Octets]:
    """Scales and minimums of eight groups, each `[out, units, 8]`: the first four in the low bits of eight
    bytes, the others in four bytes' halves and what is above those bits."""
    first, second, third = twelve[..., :4], twelve[..., 4:8], twelve[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], 2)
    return scales, np.concatenate([second & 63, third >> 4 | second >> 6 << 4], 2)
