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
Given = Mapping[str, Any]


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
        """How many numbers an entry of a matrix's tensor holds."""
        return {FOURS: 2, WHOLE: 1, FLOATS: 1}.get(self.layout, 32 // self.bits)

    @property
    def is_rounded_anew(self) -> bool:
        """Whether no form has all that the matrices may hold."""
        return self.layout == FLOATS or self.has_order

    @property
    def form(self) -> str:
        """The smallest of `FORMS` that has all levels less those that stand for zero, which may take a bit
        more, so that nothing is rounded; else `ROUNDED_ANEW`."""
        if self.is_rounded_anew:
            return ROUNDED_ANEW
        bits = self.bits + (not self.is_symmetric)
        return "MXFP4" if self.layout == FOURS else "Q4_0" if bits <= 4 else "Q5_0" if bits == 5 else "Q8_0"


_MXFP4 = Scheme(layout=FOURS, bits=4, group=32)


def scheme_of(config: Given, model: str) -> Scheme | None:
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
    except ValueError as error:
        raise InputError(f"model {model!r} is quantised by {method}, but its {error}") from None


def _one_of(name: str, value: Any, *expected: Any) -> Any:
    """The value of a field. Raises `ValueError` where it is not computed with, as all here do."""
    if not any(type(value) is type(each) and value == each for each in expected):
        raise ValueError(f"{name} is {value!r:.80}; expected {' or '.join(map(str, expected))}")
    return value


def _refuse_if_set(given: Given, *names: str) -> None:
    for name in names:
        if given.get(name):
            raise ValueError(f"{name} is {given[name]!r:.80}, which is not computed with; expected none")


def _table(given: Given, name: str) -> Given:
    """That of a field; empty where there is none."""
    found = given.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} is {found!r:.80}; expected a table")
    return found


def _gptq(given: Given) -> Scheme:
    kind = given.get("checkpoint_format") or given.get("format") or "gptq"
    _one_of("checkpoint_format", kind, "gptq", "gptq_v2")
    _refuse_if_set(given, "dynamic")
    return _whole_numbers(
        layout=GPTQ,
        bits=given.get("bits"),
        group=given.get("group_size", -1),
        is_symmetric=_one_of("sym", given.get("sym", True), True, False),
        zeros_less_one=kind == "gptq",
        has_order=_one_of("desc_act", given.get("desc_act", False), True, False),
    )


def _awq(given: Given) -> Scheme:
    _one_of("version", str(given.get("version", "gemm")).lower(), "gemm")
    bits = _one_of("bits", given.get("bits", given.get("w_bit")), 4)
    group = given.get("group_size", given.get("q_group_size"))
    has_zeros = _one_of("zero_point", given.get("zero_point", True), True, False)
    return _whole_numbers(layout=AWQ, bits=bits, group=group, is_symmetric=not has_zeros)


def _compressed(given: Given) -> Scheme:
    status = given.get("quantization_status", "compressed")
    _one_of("quantization_status", status, "compressed", "frozen")
    _refuse_if_set(given, "kv_cache_scheme", "transform_config")
    _one_of("sparsity_config.format", _table(given, "sparsity_config").get("format", "dense"), "dense")
    groups = _table(given, "config_groups")
    found = {_group(_table(groups, name), given.get("format")) for name in groups}
    _one_of("number of unlike config_groups", len(found), 1)
    return found.pop()


_FORMATS = {
    "pack-quantized of int": PACKED,
    "int-quantized of int": WHOLE,
    "naive-quantized of int": WHOLE,
    "float-quantized of float": FLOATS,
    "naive-quantized of float": FLOATS,
    "mxfp4-pack-quantized of float": FOURS,
}
"""compressed-tensors' layouts, by format and type of number."""


def _group(given: Given, whole_format: Any) -> Scheme:
    """One of compressed-tensors' config_groups; what it does not say of its format the whole does."""
    weights = _table(given, "weights")
    kind = f"{given.get('format') or whole_format} of {weights.get('type', 'int')}"
    layout = _FORMATS[_one_of("format", kind, *_FORMATS)]
    activations = _table(given, "input_activations")
    _one_of("input_activations.dynamic", not activations or activations.get("dynamic"), True)
    _refuse_if_set(given, "output_activations")
    _refuse_if_set(weights, "dynamic")
    bits, strategy, group = (weights.get(name) for name in ("num_bits", "strategy", "group_size"))
    if layout == FOURS:
        _one_of("num_bits, strategy and group_size", (bits, strategy, group), (4, "group", 32))
        return _MXFP4
    if layout == FLOATS:
        _one_of("num_bits", bits, 8)
        has_blocks = _one_of("strategy", strategy, "tensor", "channel", "block") == "block"
        return Scheme(layout=FLOATS, block=_block(weights.get("block_structure")) if has_blocks else None)
    _one_of("strategy", strategy, "tensor", "channel", "group")
    return _whole_numbers(
        layout=layout,
        bits=bits,
        group=group if strategy == "group" else -1,
        is_symmetric=_one_of("symmetric", weights.get("symmetric", True), True, False),
        has_order=str(weights.get("actorder")).lower() == "group",
    )


def _fp8(given: Given) -> Scheme:
    _one_of("fmt", given.get("fmt", "e4m3"), "e4m3")
    _one_of("activation_scheme", given.get("activation_scheme", "dynamic"), "dynamic")
    block = given.get("weight_block_size")
    return Scheme(layout=FLOATS, block=None if block is None else _block(block))


_READ: dict[str, Callable[[Given], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "mxfp4": lambda given: _MXFP4,  # which matrices are not, their tensors tell
}


def _whole_numbers(*, bits: Any, group: Any, is_symmetric: bool, **more: Any) -> Scheme:
    _one_of("number of bits", bits, 2, 4, *([8] if is_symmetric else []))
    if type(group) is not int or (group != -1 and (group < GROUP or group % GROUP)):
        raise ValueError(f"group_size is {group!r:.40}; expected a multiple of {GROUP}, or -1")
    return Scheme(bits=bits, group=max(0, group), is_symmetric=is_symmetric, **more)


def _block(given: Any) -> tuple[int, int]:
    is_pair = isinstance(given, list | tuple) and len(given) == 2
    if not is_pair or not all(type(size) is int and size >= 1 for size in given):
        raise ValueError(f"block is {given!r:.40}; expected two numbers")
    return given[0], given[1]
