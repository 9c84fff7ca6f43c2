"""The tensors of a quantised checkpoint under the names that it would have without: a matrix is read from the
tensors that stand in its place, block of outputs by block of outputs.

Levels and scales go into panels (`arithmetic/packed.py`) as they are, so a weight is the file's, but for a
scale that has more digits than float16. What has no form of its own is rounded to one: embedding and
`lm_head`, which these tools leave in 16 bits, floats of 8 bits, and inputs that belong to groups in no order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import DTYPES, F32, I64, Numbers, fill_up, narrowed, widened
from flowspec.model.arithmetic.packed import FORMS, GROUP, LEVELS_FLOAT, Levels
from flowspec.model.prequantised.scheme import AWQ, FLOATS, FOURS, GPTQ, PACKED, TENSORS, Scheme
from flowspec.model.safetensors_file import FLOATS8
from flowspec.model.tensors import ROUNDED_ANEW, Tensors

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each four bits of a word are of, the lowest bits first."""
HALVES = np.array(LEVELS_FLOAT, np.int16)
"""What floats of 4 bits are, in halves."""
Portion = tuple[Numbers, Numbers]
"""Of some outputs: numbers `[outputs, in]`, and scales `[outputs, groups]`."""


class PrequantisedTensors(Tensors):
    """Matrices and other parameters of a checkpoint whose own tensors are `raw`."""

    def __init__(self, model: str, scheme: Scheme, raw: Tensors) -> None:
        self.model = model
        self._scheme = scheme
        self._raw = raw
        main, beside = TENSORS[scheme.layout]
        own = set(raw)
        self._files: dict[str, tuple[str, ...]] = {}
        """Of each name the tensors of the checkpoint, of which that of the levels is the first."""
        for name in sorted(own):
            stem, _, leaf = name.rpartition(".")
            around = [each for other in beside if (each := f"{stem}.{other}") in own]
            if leaf == main and around:
                self._files[f"{stem}.weight"] = (name, *around)
            elif leaf not in beside:
                self._files.setdefault(name, (name,))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

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
        """A matrix that is quantised in float32. Raises `InputError` for levels whose scales are missing."""
        if self._is_quantised(name):
            made = np.empty(shape, np.float32)
            self.copy_into(name, made)
            return made
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
        if self.is_rounded_anew(name):
            return super().levels(name, first, end)
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
