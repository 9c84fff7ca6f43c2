"""Checkpoints of the hub whose matrices other tools quantised: what `quantization_config` says of them, a
scheme that layers can compute with or a refusal by name, and their tensors under the names that they would
have without: a matrix is read from the tensors that stand in its place, block of outputs by block of outputs.

The fields are those that the tools write: gptqmodel and AutoGPTQ (`gptq`), AutoAWQ (`awq`), llm-compressor
(`compressed-tensors`), transformers' and DeepSeek's `fp8`, and GPT-OSS's `mxfp4`. Levels and scales go into
panels (`arithmetic/packed.py`) as they are, so a weight is the file's, but for a scale that has more digits
than float16. What has no form of its own is rounded to one: embedding and `lm_head`, which these tools leave
in 16 bits, floats of 8 bits, and inputs that belong to groups in no order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import DTYPES, F32, I64, Numbers, fill_up, narrowed, widened
from flowspec.model.arithmetic.packed import FORMS, GROUP, LEVELS_FLOAT, Levels
from flowspec.model.tensors import ROUNDED_ANEW, Tensors
from flowspec.model.weight_files import FLOATS8

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


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each four bits of a word are of, the lowest bits first."""
HALVES = np.array(LEVELS_FLOAT, np.int16)
"""What floats of 4 bits are, in halves."""
Portion = tuple[Numbers, Numbers]
"""Of some outputs: numbers `[outputs, in]`, and scales `[outputs, groups]`."""


class PrequantisedTensors(Tensors):
    """Matrices and other parameters of a checkpoint whose own tensors are `raw`."""

    def __init__(self, model: str, scheme: Scheme, raw: Tensors) -> None:
        self.model, self._scheme, self._raw = model, scheme, raw
        main, beside = TENSORS[scheme.layout]
        own = set(raw)
        self.names = self._files = dict[str, tuple[str, ...]]()
        """Of each name the tensors of the checkpoint, of which that of the levels is the first."""
        for name in sorted(own):
            stem, _, leaf = name.rpartition(".")
            around = [each for other in beside if (each := f"{stem}.{other}") in own]
            if leaf == main and around:
                self._files[f"{stem}.weight"] = (name, *around)
            elif leaf not in beside:
                self._files.setdefault(name, (name,))

    def files_of(self, name: str) -> tuple[str, ...]:
        own = self._files.get(name, (name,))
        return tuple(file for each in own for file in self._raw.files_of(each))

    def shape(self, name: str) -> tuple[int, ...]:
        if not self._is_quantised(name):
            return self._raw.shape(name)
        main, each = self._files[name][0], self._scheme.numbers_of_a_word
        shape = self._raw.shape(main)
        if len(shape) != 2:
            self._refuse(main, f"has the shape {list(shape)}; expected a matrix")
        rows, columns = shape
        by_layout = {GPTQ: (columns, rows * each), AWQ: (columns * each, rows)}
        return by_layout.get(self._scheme.layout, (rows, columns * each))

    def load(self, name: str, shape: tuple[int, ...]) -> Numbers:
        """Raises `InputError` for levels whose scales are missing, too."""
        if self._is_quantised(name):
            return super().load(name, shape)
        found = self._raw.load(name, shape)
        if found.dtype.kind != "f" and found.dtype != DTYPES["bfloat16"]:
            scales = " or ".join(TENSORS[self._scheme.layout][1])
            self._refuse(name, f"holds levels ({found.dtype}), but the checkpoint has no {scales} for it")
        return found

    @np.errstate(all="ignore")  # what is no number shows by itself
    def rows(self, name: str, first: int, end: int) -> Numbers:
        if not self._is_quantised(name):
            return super().rows(name, first, end)
        read = self._floats if self._scheme.layout == FLOATS else self._whole_numbers
        numbers, scales = read(name, slice(first, end))
        if self._scheme.layout == FOURS:
            numbers, scales = HALVES[numbers], np.ldexp(np.float32(0.5), scales.astype(np.int32) - 127)
        groups = widened(numbers).reshape(*scales.shape, -1)
        return (groups * scales[..., None]).reshape(numbers.shape)

    def form(self, name: str) -> str:
        if len(self.shape(name)) != 2:
            return ""
        return self._scheme.form if self._is_quantised(name) else ROUNDED_ANEW

    def is_rounded_anew(self, name: str) -> bool:
        return not self._is_quantised(name) or self._scheme.is_rounded_anew

    def levels(self, name: str, first: int, end: int) -> Levels:
        """Raises `InputError` for a level that the config does not tell of."""
        form, (whole, scales) = FORMS[self._scheme.form], self._whole_numbers(name, slice(first, end))
        if form.has_exponents:
            return Levels(levels=whole.reshape(len(whole), -1, GROUP), scales=scales)
        least, most, end_level = int(whole.min()), int(whole.max()), (1 << form.bits) - form.offset
        if least < -form.offset or most >= end_level:
            self._refuse(
                name,
                f"has levels from {least} to {most}, of which its config (symmetric, bits) does not tell: "
                f"expected {-form.offset} to {end_level - 1}",
            )
        levels = fill_up((whole + form.offset).astype(np.uint8), GROUP, form.offset)
        levels = levels.reshape(len(whole), -1, GROUP)
        each = np.repeat(narrowed(scales, "float16"), levels.shape[1] // scales.shape[1], 1)
        if not np.isfinite(each).all():
            self._refuse(name, f"has a scale that no weight has: {scales.max():g}")
        return Levels(levels=levels, scales=each)

    def _refuse(self, tensor: str, problem: str) -> NoReturn:
        raise InputError(f"{tensor} of {self.model!r} {problem}")

    def _is_quantised(self, name: str) -> bool:
        return len(self._files.get(name, ())) > 1

    def _whole_numbers(self, name: str, some: slice) -> Portion:
        """Levels less those that stand for zero, or MXFP4's floats of 4 bits, with their exponents. A matrix
        has a column for each output in GPTQ, for eight of them in AWQ, and a row in the others."""
        scheme, (outputs, inputs) = self._scheme, self.shape(name)
        bits, each, count = scheme.bits, scheme.numbers_of_a_word, some.stop - some.start
        words = slice(some.start // each, -(-some.stop // each))  # in which these outputs are
        groups, zeros = inputs // scheme.group if scheme.group else 1, None
        if scheme.group and inputs % scheme.group:
            self._refuse(name, f"has {inputs} inputs, which are no groups of {scheme.group}")

        def load(leaf: str, shape: tuple[int, ...]) -> Numbers:
            return self._raw.load(name.removesuffix("weight") + leaf, shape)

        if scheme.layout == FOURS:
            pairs = load("weight_packed", (outputs, inputs // 2))[some]
            exponents = load("weight_scale", (outputs, groups))[some].astype(np.uint8)
            return np.stack([pairs & 15, pairs >> 4], 2).reshape(count, -1), exponents
        if scheme.layout == AWQ:
            whole = _of_words(load("qweight", (inputs, outputs // each))[:, words], bits, AWQ_ORDER).T
            zeros = _of_words(load("qzeros", (groups, outputs // each))[:, words], bits, AWQ_ORDER).T
        elif scheme.layout == GPTQ:
            whole = _of_words(load("qweight", (inputs // each, outputs))[:, some].T, bits)
            zeros = _of_words(load("qzeros", (groups, outputs // each))[:, words], bits)[:, :count].T
            zeros += scheme.zeros_less_one
        elif scheme.layout == PACKED:
            whole = _of_words(load("weight_packed", (outputs, inputs // each))[some], bits)
            if tuple(load("weight_shape", (2,)).tolist()) != (outputs, inputs):
                self._refuse(name, f"has another weight_shape; expected {[outputs, inputs]}")
            if scheme.is_symmetric:
                whole -= np.int16(1 << bits - 1)
            else:
                zeros = load("weight_zero_point", (-(-outputs // each), groups))[words].T
                zeros = _of_words(zeros, bits)[:, :count].T
        else:
            whole = load("weight", (outputs, inputs))[some].astype(np.int16)
            if not scheme.is_symmetric:
                zeros = load("weight_zero_point", (outputs, groups))[some]
        if scheme.layout in (AWQ, GPTQ):
            scales = widened(load("scales", (groups, outputs))[:, some].T)
        else:
            scales = self._scales(name, f"{name}_scale", groups, some)
        places = self._places(name, groups)
        if zeros is not None:
            whole -= zeros[:, places]
        return whole, scales[:, places] if scheme.has_order else scales

    def _places(self, name: str, groups: int) -> I64:
        """The group of each input; raises `InputError` for a tensor that says otherwise than the config."""
        inputs = self.shape(name)[1]
        in_order = np.arange(inputs) // (inputs // groups)
        tensor = next((each for each in self._files[name] if each.endswith("g_idx")), "")
        if not tensor:
            return in_order
        found = self._raw.load(tensor, (inputs,)).astype(np.int64)
        if not ((found >= 0) & (found < groups)).all():
            self._refuse(tensor, f"has other groups; expected those from 0 to {groups - 1}")
        if not self._scheme.has_order and not np.array_equal(found, in_order):
            self._refuse(tensor, "has groups in no order; its config (desc_act, actorder) tells of none")
        return found

    def _floats(self, name: str, some: slice) -> Portion:
        outputs, inputs = shape = self.shape(name)
        words, scales = self._raw.load(name, shape)[some], self._files[name][1]
        numbers = FLOATS8[words] if words.dtype == np.uint8 else widened(words)
        if self._scheme.block is None:
            return numbers, self._scales(name, scales, 1, some)
        rows, columns = self._scheme.block
        blocks = widened(self._raw.load(scales, (-(-outputs // rows), -(-inputs // columns))))
        own = blocks[np.arange(some.start, some.stop) // rows]
        return numbers, np.repeat(own, columns, 1)[:, :inputs]

    def _scales(self, name: str, tensor: str, groups: int, some: slice) -> F32:
        """Float32 `[outputs, groups]`; one for all is stored as one number."""
        stored, outputs = self._raw.shape(tensor), self.shape(name)[0]
        if math.prod(stored) == 1:
            one = widened(self._raw.load(tensor, stored)).reshape(1, 1)
            return np.broadcast_to(one, (some.stop - some.start, groups))
        expected = (outputs, groups) if len(stored) == 2 or groups > 1 else (outputs,)
        return widened(self._raw.load(tensor, expected)[some]).reshape(-1, groups)


def _of_words(words: Numbers, bits: int, order: tuple[int, ...] = ()) -> npt.NDArray[np.int16]:
    """Whole numbers from 0 on, `[rows, numbers]`, of int32 `[rows, words]`; of a word the lowest bits first,
    or in this `order`."""
    octets = np.ascontiguousarray(words, np.int32).view(np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    found = octets[..., None] >> shifts & (1 << bits) - 1
    if order:
        found = found.reshape(-1, len(order))[:, np.argsort(order)]
    return found.reshape(len(words), -1).astype(np.int16)
