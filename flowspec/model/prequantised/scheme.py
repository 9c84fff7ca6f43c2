"""What a checkpoint's `quantization_config` says of its matrices: a scheme that layers can compute with, or a
refusal by name.

The fields are those that the tools write: gptqmodel and AutoGPTQ (`gptq`), AutoAWQ (`awq`), llm-compressor
(`compressed-tensors`), transformers' and DeepSeek's `fp8`, and GPT-OSS's `mxfp4`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flowspec.errors import InputError
from flowspec.model.arithmetic.packed import GROUP
from flowspec.model.tensors import ROUNDED_ANEW

QUANTISED = ("quantization_config", "compression_config")
"""Fields of a config.json that tell of it."""
GPTQ, AWQ, PACKED, WHOLE, FLOATS, FOURS = "gptq", "awq", "packed", "whole", "floats", "floats-of-4-bits"
"""Layouts of a matrix, each a set of tensors in its place."""
TENSORS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    GPTQ: ("qweight", ("scales", "qzeros", "g_idx")),
    AWQ: ("qweight", ("scales", "qzeros")),
    PACKED: ("weight_packed", ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")),
    WHOLE: ("weight", ("weight_scale", "weight_zero_point")),
    FLOATS: ("weight", ("weight_scale", "weight_scale_inv")),
    FOURS: ("weight_packed", ("weight_scale",)),
}
"""Of each layout: the tensor that holds the levels, and those that may stand beside it."""
_BITS = (2, 4, 8)
WORD_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the matrices of a checkpoint are quantised.

    A level has so many `bits`; `group` inputs in a row share a scale (0: all). `is_symmetric`: the level that
    stands for zero is the middle one; else each group has its own. `zeros_less_one`: as the first format of
    GPTQ stores them. `block`: outputs and inputs that share a scale, of floats. `has_order`: inputs belong to
    groups in no order.
    """

    layout: str
    bits: int = 8
    group: int = 0
    is_symmetric: bool = True
    zeros_less_one: bool = False
    block: tuple[int, int] | None = None
    has_order: bool = False

    @property
    def numbers_of_a_word(self) -> int:
        """How many numbers an entry of a packed tensor holds."""
        return 2 if self.layout == FOURS else WORD_BITS // self.bits

    @property
    def is_rounded_anew(self) -> bool:
        """Whether no form has all that the matrices may hold."""
        return self.layout == FLOATS or self.has_order

    @property
    def form(self) -> str:
        """The smallest of `FORMS` that has all levels less those that stand for zero, so that nothing is
        rounded; else `ROUNDED_ANEW`."""
        if self.is_rounded_anew:
            return ROUNDED_ANEW
        if self.layout == FOURS:
            return "MXFP4"
        least, most = self.range
        for name, bits in (("Q4_0", 4), ("Q5_0", 5), ("Q8_0", 8)):
            if -(1 << bits - 1) <= least and most < 1 << bits - 1:
                return name
        raise AssertionError("refused when the config was read")

    @property
    def range(self) -> tuple[int, int]:
        """The least and the largest of all levels less those that stand for zero."""
        if self.is_symmetric:
            return -(1 << self.bits - 1), (1 << self.bits - 1) - 1
        return (-(1 << self.bits) if self.zeros_less_one else 1 - (1 << self.bits)), (1 << self.bits) - 1


def scheme_of(config: Mapping[str, Any], model: str) -> Scheme | None:
    """What a config.json says; None for a checkpoint of plain numbers. Raises `InputError` for what is not
    computed with."""
    given = next((found for name in QUANTISED if (found := config.get(name))), None)
    if not given:
        return None
    if not isinstance(given, Mapping):
        raise InputError(f"model {model!r}: quantization_config: expected a table, got {given!r:.80}")
    method = str(given.get("quant_method"))
    read = _READ.get(method)
    if read is None:
        raise InputError(
            f"model {model!r} is quantised by {method!r:.40}, which FlowSpec does not read; expected "
            f"{', '.join(_READ)}, a GGUF file, or the checkpoint it was made of with --dtype int4"
        )
    try:
        return read(given)
    except _Refusal as refusal:
        raise InputError(f"model {model!r} is quantised by {method}, but {refusal}") from None


class _Refusal(Exception):
    """Why a scheme is not computed with, as the end of a sentence."""


def _refuse_if(is_wrong: object, why: str) -> None:
    if is_wrong:
        raise _Refusal(why)


_MEASURED = "its inputs are rounded by scales that were measured before, which are not computed with"


def _gptq(given: Mapping[str, Any]) -> Scheme:
    kind = str(given.get("checkpoint_format") or given.get("format") or "gptq")
    is_known = kind in ("gptq", "gptq_v2")
    _refuse_if(not is_known, f"as {kind!r:.40}; expected the checkpoint_format gptq or gptq_v2")
    _refuse_if(given.get("dynamic"), "its layers are of several kinds (dynamic), which are not read")
    return _whole_numbers(
        layout=GPTQ,
        bits=given.get("bits"),
        group=given.get("group_size", -1),
        is_symmetric=_is(given, "sym", True),
        zeros_less_one=kind == "gptq",
        has_order=_is(given, "desc_act", False),
    )


def _awq(given: Mapping[str, Any]) -> Scheme:
    version, bits = str(given.get("version", "gemm")).lower(), given.get("bits", given.get("w_bit"))
    _refuse_if(version != "gemm", f"as version {version!r:.40}; expected gemm")
    _refuse_if(bits != 4, f"with {bits!r:.40} bits; expected 4")
    group = given.get("group_size", given.get("q_group_size"))
    return _whole_numbers(layout=AWQ, bits=bits, group=group, is_symmetric=not _is(given, "zero_point", True))


def _compressed(given: Mapping[str, Any]) -> Scheme:
    status = given.get("quantization_status", "compressed")
    is_final = status in ("compressed", "frozen")
    _refuse_if(not is_final, f"its quantization_status is {status!r:.40}; expected compressed")
    for name in ("kv_cache_scheme", "transform_config"):
        _refuse_if(given.get(name), f"it asks for a {name}, which is not computed with")
    sparsity = _table(given, "sparsity_config")
    _refuse_if(sparsity.get("format", "dense") != "dense", "its matrices are sparse, which is not read")
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _Refusal(f"its config_groups say nothing, got {groups!r:.80}")
    found = {_group(each, str(given.get("format"))) for each in groups.values()}
    _refuse_if(len(found) > 1, "its layers are of several kinds (config_groups), which are not read")
    return found.pop()


def _table(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name) or {}
    if not isinstance(value, Mapping):
        raise _Refusal(f"its {name} is no table, got {value!r:.80}")
    return value


_FORMATS: Mapping[tuple[str, str], str] = {
    ("pack-quantized", "int"): PACKED,
    ("int-quantized", "int"): WHOLE,
    ("naive-quantized", "int"): WHOLE,
    ("float-quantized", "float"): FLOATS,
    ("naive-quantized", "float"): FLOATS,
    ("mxfp4-pack-quantized", "float"): FOURS,
}
"""compressed-tensors' layouts, by format and type of number."""


def _group(given: Any, whole_format: str) -> Scheme:
    """One of compressed-tensors' config_groups; what it does not say of its format the whole does."""
    weights = given.get("weights") if isinstance(given, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _Refusal(f"a group of its layers has no weights that are quantised, got {given!r:.80}")
    name, kind = str(given.get("format") or whole_format), str(weights.get("type", "int"))
    known = ", ".join(dict.fromkeys(name for name, _ in _FORMATS))
    layout = _FORMATS.get((name, kind), "")
    _refuse_if(not layout, f"in the format {name!r:.40} of {kind!r:.40}; expected {known}")
    activations = _table(given, "input_activations")
    _refuse_if(activations and activations.get("dynamic") is not True, _MEASURED)
    rounds_outputs = given.get("output_activations")
    _refuse_if(rounds_outputs, "its outputs are rounded, too, which is not computed with")
    rounds_anew = weights.get("dynamic")
    _refuse_if(rounds_anew, "its weights are rounded anew each time, which is not computed with")
    strategy, bits, group = str(weights.get("strategy")), weights.get("num_bits"), weights.get("group_size")
    if layout == FOURS:
        is_usual = (bits, strategy, group) == (4, "group", 32)
        _refuse_if(not is_usual, f"in floats of {bits!r:.40} bits; expected 4, in groups of 32")
        return _mxfp4(given)
    if layout == FLOATS:
        _refuse_if(bits != 8, f"in floats of {bits!r:.40} bits; expected 8")
        if strategy == "block":
            return Scheme(layout=FLOATS, block=_block(weights.get("block_structure")))
        is_known = strategy in ("tensor", "channel")
        _refuse_if(not is_known, f"by {strategy!r:.40}; expected tensor, channel or block")
        return Scheme(layout=FLOATS)
    is_known = strategy in ("tensor", "channel", "group")
    _refuse_if(not is_known, f"by {strategy!r:.40}; expected tensor, channel or group")
    return _whole_numbers(
        layout=layout,
        bits=bits,
        group=group if strategy == "group" else -1,
        is_symmetric=_is(weights, "symmetric", True),
        has_order=str(weights.get("actorder")).lower() == "group",
    )


def _fp8(given: Mapping[str, Any]) -> Scheme:
    floats, block = given.get("fmt", "e4m3"), given.get("weight_block_size")
    _refuse_if(floats != "e4m3", f"in the floats {floats!r:.40}; expected e4m3")
    _refuse_if(given.get("activation_scheme", "dynamic") != "dynamic", _MEASURED)
    return Scheme(layout=FLOATS, block=None if block is None else _block(block))


def _mxfp4(given: Mapping[str, Any]) -> Scheme:
    """Which matrices are not quantised (`modules_to_not_convert`), their tensors tell."""
    return Scheme(layout=FOURS, bits=4, group=32)


_READ: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _whole_numbers(*, bits: Any, group: Any, is_symmetric: bool, **more: Any) -> Scheme:
    is_known = type(bits) is int and bits in _BITS
    _refuse_if(not is_known, f"with {bits!r:.40} bits; expected {', '.join(map(str, _BITS))}")
    has_zeros = not is_symmetric and bits == 8
    _refuse_if(has_zeros, "with 8 bits and a zero of its own for each group; expected symmetric ones")
    is_size = type(group) is int and (group == -1 or (group >= GROUP and group % GROUP == 0))
    _refuse_if(not is_size, f"in groups of {group!r:.40} inputs; expected a multiple of {GROUP}, or -1")
    return Scheme(bits=bits, group=max(0, group), is_symmetric=is_symmetric, **more)


def _block(given: Any) -> tuple[int, int]:
    is_pair = isinstance(given, list | tuple) and len(given) == 2
    if not is_pair or not all(type(size) is int and size >= 1 for size in given):
        raise _Refusal(f"in blocks of {given!r:.40}; expected two numbers")
    return given[0], given[1]


def _is(given: Mapping[str, Any], name: str, default: bool) -> bool:
    found = given.get(name, default)
    if type(found) is not bool:
        raise _Refusal(f"{name} is {found!r:.40}; expected true or false")
    return found
