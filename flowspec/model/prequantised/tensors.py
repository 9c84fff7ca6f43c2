"""The tensors of a quantised checkpoint under the names that it would have without: a matrix is read from the
tensors that stand in its place, block of outputs by block of outputs.

Levels and scales go into panels (`arithmetic/packed.py`) as they are, so a weight is the file's, but for a
scale that has more digits than float16. What has no form of its own is rounded to one: embedding and
`lm_head`, which these tools leave in 16 bits, floats of 8 bits, and inputs that belong to groups in no order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import F32, Numbers, fill, fill_up, narrowed, room, widened
from flowspec.model.arithmetic.levels import as_q8_0
from flowspec.model.arithmetic.packed import FORMS, GROUP, LEVELS_FLOAT, PANEL, Levels, packed
from flowspec.model.prequantised.scheme import AWQ, FLOATS, FOURS, GPTQ, PACKED, TENSORS, Scheme
from flowspec.model.safetensors_file import FLOATS8, floats8
from flowspec.model.tensors import ROUNDED_ANEW, Panels, Tensors, check_shape

WEIGHT = ".weight"
BLOCK_NUMBERS = 1 << 20
"""So many weights are unpacked at once."""
WORD_BITS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each four bits of a word are of, the lowest bits first."""
Whole = npt.NDArray[np.int16]
Tensor = Callable[[str, tuple[int, ...]], Numbers]
"""One of a matrix's tensors by the end of its name, of an expected shape."""
Portion = tuple[Numbers, F32]
"""Numbers, most often whole ones, `[outputs, in]` and float32 scales, `[outputs, groups]`, of some
outputs."""


class PrequantisedTensors(Tensors):
    """Matrices and other parameters of a checkpoint whose own tensors are `raw`."""

    def __init__(self, model: str, scheme: Scheme, raw: Tensors) -> None:
        self._model = model
        self._scheme = scheme
        self._raw = raw
        main, beside = TENSORS[scheme.layout]
        own = set(raw)
        self._files: dict[str, tuple[str, ...]] = {}
        """Of each name the tensors of the checkpoint, that of the levels first."""
        for name in sorted(own):
            stem, _, leaf = name.rpartition(".")
            around = tuple(each for other in beside if (each := f"{stem}.{other}") in own)
            if leaf == main and around:
                self._files[stem + WEIGHT] = (name, *around)
            elif leaf not in beside:
                self._files.setdefault(name, (name,))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def files_of(self, name: str) -> tuple[str, ...]:
        return tuple(file for each in self._files.get(name, (name,)) for file in self._raw.files_of(each))

    def shape(self, name: str) -> tuple[int, ...]:
        if not self._is_quantised(name):
            return self._raw.shape(name)
        main, layout = self._files[name][0], self._scheme.layout
        shape, each = self._raw.shape(main), WORD_BITS // self._scheme.bits
        if layout == FOURS:
            each = 2
        if len(shape) != 2:
            raise InputError(f"{main} of {self._model!r}: expected a matrix, got the shape {list(shape)}")
        if layout == GPTQ:
            return shape[1], shape[0] * each
        if layout == AWQ:
            return shape[1] * each, shape[0]
        if layout in (PACKED, FOURS):
            return shape[0], shape[1] * each
        return shape

    def load(self, name: str, shape: tuple[int, ...]) -> Numbers:
        """A matrix that is quantised in float32."""
        if not self._is_quantised(name):
            return self._unscaled(name, shape)
        made = np.empty(shape, np.float32)
        self.copy_into(name, made)
        return made

    def copy_into(self, name: str, part: Numbers) -> None:
        if not self._is_quantised(name):
            fill(part, self._unscaled(name, part.shape))
            return
        check_shape(name, self._model, part.shape, self.shape(name))
        read = self._reader(name)
        for first, end in self._blocks(name):
            fill(part[first:end], _numbers(*read(first, end)))

    def form(self, name: str) -> str:
        if len(self.shape(name)) != 2:
            return ""
        return self._scheme.form if self._is_quantised(name) else ROUNDED_ANEW

    def is_rounded_anew(self, name: str) -> bool:
        """Whether `panels` are nearest to the numbers that `load` gives, rather than the same."""
        return not self._is_quantised(name) or self._scheme.layout == FLOATS or self._scheme.has_order

    def packed_bytes(self, name: str) -> int:
        outputs, inputs = self.shape(name)
        return FORMS[self.form(name)].panel_bytes(inputs, outputs)

    def panels(self, name: str, shape: tuple[int, ...]) -> Panels:
        check_shape(name, self._model, shape, self.shape(name))
        form, (outputs, inputs) = FORMS[self.form(name)], shape
        units = -(-inputs // form.unit)
        found: Panels = room((-(-outputs // PANEL), units, form.unit_bytes), np.uint8)
        if self._is_quantised(name):
            read = self._reader(name)
        else:
            numbers = self._unscaled(name, shape)

            def read(first: int, end: int) -> Portion:
                return numbers[first:end], np.ones((end - first, 1), np.float32)

        for first, end in self._blocks(name):
            portion = read(first, end)
            if self.is_rounded_anew(name):
                given = as_q8_0(_numbers(*portion))
            else:
                given = self._as_they_are(name, portion)
            panels = packed(form, given)
            found[first // PANEL : first // PANEL + len(panels)] = panels
        return found

    # ------------------------------------------------------------------------------------------- reading

    def _is_quantised(self, name: str) -> bool:
        return len(self._files.get(name, ())) > 1

    def _unscaled(self, name: str, shape: tuple[int, ...]) -> Numbers:
        """A tensor that is not quantised; raises `InputError` for levels whose scales are missing."""
        found = self._raw.load(name, shape)
        if kind := self._raw.level_type(name):
            raise InputError(
                f"{name} of {self._model!r} holds levels ({kind}), but the checkpoint has no "
                f"{' or '.join(TENSORS[self._scheme.layout][1])} for it"
            )
        return found

    def _blocks(self, name: str) -> Iterator[tuple[int, int]]:
        outputs, inputs = self.shape(name)
        step = max(PANEL, BLOCK_NUMBERS // max(1, inputs) // PANEL * PANEL)
        for first in range(0, outputs, step):
            yield first, min(outputs, first + step)

    def _as_they_are(self, name: str, portion: Portion) -> Levels:
        """Levels and scales for panels; raises `InputError` for a level that the config does not tell of."""
        whole, scales = portion
        form, groups = FORMS[self._scheme.form], -(-whole.shape[1] // GROUP)
        if form.has_exponents:
            return _as_floats(whole, scales)
        least, most = whole.min(), whole.max()
        if least < -form.offset or most >= (1 << form.bits) - form.offset:
            raise InputError(
                f"{name} of {self._model!r} has levels from {int(least)} to {int(most)}, of which its config "
                f"(symmetric, bits) does not tell: expected {-form.offset} to "
                f"{(1 << form.bits) - form.offset - 1}"
            )
        levels = fill_up((whole + form.offset).astype(np.uint8), GROUP, form.offset)
        each = np.repeat(narrowed(scales, "float16"), groups // scales.shape[1], 1)
        if not np.isfinite(each).all():
            raise InputError(f"{name} of {self._model!r} has a scale that no weight has: {scales.max():g}")
        return Levels(levels=levels.reshape(len(whole), -1, GROUP), scales=each)

    def _reader(self, name: str) -> Callable[[int, int], Portion]:
        """Gives the outputs from `first` to `end` of a matrix that is quantised."""
        scheme, shape = self._scheme, self.shape(name)
        own = {each.rpartition(".")[2]: each for each in self._files[name]}
        groups = 1 if not scheme.group else shape[1] // scheme.group
        if scheme.group and shape[1] % scheme.group:
            raise InputError(
                f"{name} of {self._model!r} has {shape[1]} inputs, which are no groups of {scheme.group}"
            )

        def tensor(leaf: str, expected: tuple[int, ...]) -> Numbers:
            if leaf not in own:
                raise InputError(f"model {self._model!r} has no {name.removesuffix(WEIGHT)}.{leaf}")
            return self._raw.load(own[leaf], expected)

        if scheme.layout in (GPTQ, AWQ):
            return self._by_inputs(tensor, own, shape, groups)
        if scheme.layout == FLOATS:
            return self._floats(tensor, own, shape)
        if scheme.layout == FOURS:
            return _fours(tensor, shape, groups)
        return self._by_outputs(tensor, own, shape, groups)

    def _by_inputs(
        self, tensor: Tensor, own: dict[str, str], shape: tuple[int, ...], groups: int
    ) -> Callable[[int, int], Portion]:
        """GPTQ and AWQ: a column for each output, or for eight of them."""
        scheme, (outputs, inputs) = self._scheme, shape
        each = WORD_BITS // scheme.bits
        zeros_shape = (groups, outputs // each)
        scales, zeros = tensor("scales", (groups, outputs)), tensor("qzeros", zeros_shape)
        is_awq = scheme.layout == AWQ
        words = tensor("qweight", (inputs, outputs // each) if is_awq else (inputs // each, outputs))
        places, is_in_order = self._places(tensor, "g_idx" if "g_idx" in own else "", inputs, groups)

        def read(first: int, end: int) -> Portion:
            if is_awq:
                columns = slice(first // each, -(-end // each))
                found = _of_words(words[:, columns], scheme.bits, AWQ_ORDER).T
                offsets = _of_words(zeros[:, columns], scheme.bits, AWQ_ORDER).T
            else:
                found = _of_words(words[:, first:end].T, scheme.bits)
                offsets = _of_words(zeros, scheme.bits)[:, first:end].T + scheme.zeros_less_one
            steps = widened(scales[:, first:end].T)
            return found - offsets[:, places], steps if is_in_order else steps[:, places]

        return read

    def _by_outputs(
        self,
        tensor: Tensor,
        own: dict[str, str],
        shape: tuple[int, ...],
        groups: int,
    ) -> Callable[[int, int], Portion]:
        """compressed-tensors' whole numbers: a row for each output."""
        scheme, (outputs, inputs) = self._scheme, shape
        each, middle = WORD_BITS // scheme.bits, 1 << scheme.bits - 1
        scales = self._scales(tensor, own, "weight_scale", (outputs, groups))
        zeros = None
        if scheme.layout == PACKED:
            words = tensor("weight_packed", (outputs, inputs // each))
            if tuple(tensor("weight_shape", (2,)).tolist()) != shape:
                raise InputError(f"model {self._model!r}: expected the weight_shape {list(shape)}")
            if not scheme.is_symmetric:
                packed_zeros = tensor("weight_zero_point", (-(-outputs // each), groups))
                zeros = _of_words(packed_zeros.T, scheme.bits)[:, :outputs].T
        else:
            words = tensor("weight", (outputs, inputs))
        leaf = "weight_g_idx" if "weight_g_idx" in own else ""
        places, is_in_order = self._places(tensor, leaf, inputs, groups)

        def read(first: int, end: int) -> Portion:
            part, steps = words[first:end], scales[first:end]
            whole = _of_words(part, scheme.bits) if scheme.layout == PACKED else part + np.int16(middle)
            whole = whole - (middle if zeros is None else zeros[first:end][:, places])
            return whole, steps if is_in_order else steps[:, places]

        return read

    def _places(
        self, tensor: Tensor, leaf: str, inputs: int, groups: int
    ) -> tuple[npt.NDArray[np.int64], bool]:
        """The group of each input, and whether groups are one after another; raises `InputError` for a tensor
        `leaf` that says otherwise than the config."""
        in_order = np.arange(inputs) // (inputs // groups)
        if not leaf:
            return in_order, True
        found = tensor(leaf, (inputs,)).astype(np.int64)
        if not ((found >= 0) & (found < groups)).all():
            raise InputError(f"{leaf} of {self._model!r}: expected groups from 0 to {groups - 1}")
        if not self._scheme.has_order and not np.array_equal(found, in_order):
            raise InputError(
                f"{leaf} of {self._model!r} has groups in no order, of which its config (desc_act, actorder) "
                "does not tell"
            )
        return found, not self._scheme.has_order

    def _floats(
        self,
        tensor: Tensor,
        own: dict[str, str],
        shape: tuple[int, ...],
    ) -> Callable[[int, int], Portion]:
        outputs, inputs = shape
        words, leaf = tensor("weight", shape), next(each for each in own if each != "weight")
        numbers = floats8 if self._raw.level_type(own["weight"]) == FLOATS8 else widened
        if self._scheme.block is None:
            scales = self._scales(tensor, own, leaf, (outputs, 1))
            return lambda first, end: (numbers(words[first:end]), scales[first:end])
        rows, columns = self._scheme.block
        blocks = widened(tensor(leaf, (-(-outputs // rows), -(-inputs // columns))))
        wide = np.repeat(blocks, columns, 1)[:, :inputs]
        return lambda first, end: (numbers(words[first:end]), wide[np.arange(first, end) // rows])

    def _scales(
        self,
        tensor: Tensor,
        own: dict[str, str],
        leaf: str,
        shape: tuple[int, int],
    ) -> F32:
        """Float32 `[outputs, groups]`; one for all is stored as one number, and as two where an expert's gate
        and up are one matrix of floats."""
        found = self._raw.shape(own[leaf]) if leaf in own else ()
        if math.prod(found) == 1:
            return np.broadcast_to(widened(tensor(leaf, found)).reshape(1, 1), shape)
        has_two = self._scheme.layout == FLOATS and own["weight"].endswith("gate_up_proj.weight")
        if has_two and found == (2, 1) and shape[1] == 1 and shape[0] % 2 == 0:
            return np.repeat(widened(tensor(leaf, found)), shape[0] // 2, 0)
        return widened(tensor(leaf, shape if len(found) == 2 else shape[:1])).reshape(shape)


def _fours(tensor: Tensor, shape: tuple[int, ...], groups: int) -> Callable[[int, int], Portion]:
    """MXFP4: two floats of 4 bits in a byte, and a power of two for 32 of them."""
    outputs, inputs = shape
    pairs = tensor("weight_packed", (outputs, inputs // 2))
    exponents = tensor("weight_scale", (outputs, groups)).astype(np.int32) - 127
    halves = np.array(LEVELS_FLOAT, np.int16)

    def read(first: int, end: int) -> Portion:
        some = pairs[first:end]
        four = np.stack([some & 15, some >> 4], 2).reshape(len(some), -1)
        return halves[four], np.ldexp(np.float32(0.5), exponents[first:end])

    return read


def _as_floats(halves: Whole, scales: F32) -> Levels:
    """Floats of 4 bits, in halves `[outputs, in]`, and powers of two `[outputs, groups]`, back in the bits
    that stand for them."""
    codes = np.zeros(2 * max(LEVELS_FLOAT) + 1, np.uint8)
    for code, level in enumerate(LEVELS_FLOAT):
        codes[level] = code if level else 0  # those below zero count from the end
    levels = codes[halves].reshape(len(halves), -1, GROUP)
    return Levels(levels=levels, scales=(np.frexp(scales)[1] + 127).astype(np.uint8))


def _of_words(words: Numbers, bits: int, order: tuple[int, ...] = ()) -> Whole:
    """Whole numbers from 0 on, `[rows, numbers]`, of int32 `[rows, words]`; of a word the lowest bits first,
    or in this `order`."""
    octets = np.ascontiguousarray(words, np.int32).view(np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    found = octets[..., None] >> shifts & (1 << bits) - 1
    if order:
        found = found.reshape(-1, len(order))[:, np.argsort(order)]
    return found.reshape(len(words), -1).astype(np.int16)


@np.errstate(all="ignore")  # what is no number shows by itself
def _numbers(whole: Numbers, scales: F32) -> F32:
    """Float32 `[outputs, in]`."""
    groups = widened(whole).reshape(*scales.shape, -1)
    return (groups * scales[..., None]).reshape(whole.shape)
