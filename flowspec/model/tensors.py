"""The tensors of a model by name, whatever files hold them: their shapes, where they lie, and the numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import I64, Numbers, fill, room
from flowspec.model.arithmetic.packed import FORMS, PANEL, Levels, Panels, packed
from flowspec.model.rounding import as_q8_0

ROUNDED_ANEW = "Q8_0"
"""The form of a matrix that has none of its own, among others that are packed: numbers in 16 bits or more,
floats of 8 bits, groups in no order."""
BLOCK_NUMBERS = 1 << 20
"""So many are unpacked at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where a tensor lies: `size_bytes` of `path` from `offset` on."""

    path: Path
    offset: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]


class Extents(Protocol):
    def __iter__(self) -> Iterator[str]: ...
    def extent(self, name: str) -> Extent: ...


class Tensors(ABC):
    """Shapes of a model's tensors, and the tensors themselves, one at a time.

    `names` are those that transformers has for them. Numbers are numpy's, and bfloat16 are their bits,
    uint16. A source of tensors has its own `load`, or `rows`.
    """

    model = ""
    source = "config.json"
    """What shapes follow from."""
    names: Collection[str] = ()

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape; nothing is loaded. Raises `InputError` where the model has no such tensor."""

    def load(self, name: str, shape: tuple[int, ...]) -> Numbers:
        """A tensor, to be read only. Raises `InputError` where it has another shape."""
        made = np.empty(shape, np.float32)
        self.copy_together({name: made})
        return made

    def files_of(self, name: str) -> tuple[str, ...]:
        """The tensors that it is read from, by the names that files have for them."""
        return (name,)

    def form(self, name: str) -> str:
        """ggml's name of the form in which a file packs a tensor, one of `arithmetic.packed.FORMS`; empty for
        one of numbers, or packed in another way."""
        return ""

    def is_rounded_anew(self, name: str) -> bool:
        """Whether `panels` are but the nearest that its form has to what `load` gives."""
        return False

    def input_order(self, name: str) -> I64 | None:
        """Which of a matrix's inputs each one of its `panels` is, int64 `[in]`; None: they are the same."""
        return None

    def rows(self, name: str, first: int, end: int) -> Numbers:
        """Some rows of a tensor. Only while they are held, what was read counts as this process's memory."""
        return self.load(name, self.shape(name))[first:end]

    def levels(self, name: str, first: int, end: int) -> Levels:
        """Some rows of a matrix that is not rounded anew."""
        raise NotImplementedError

    def check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """Raises `InputError` for a tensor that has not the shape that follows from `source`."""
        if tuple(expected) != self.shape(name):
            raise InputError(
                f"tensor {name} of {self.model!r}: expected shape {list(expected)} by {self.source}, got "
                f"{list(self.shape(name))}"
            )

    def element_count(self, name: str) -> int:
        return math.prod(self.shape(name))

    def copy_into(self, name: str, part: Numbers) -> None:
        """Copies a tensor into `part`, in its dtype. Checks the shape."""
        self.copy_together({name: part})

    def copy_together(self, parts: Mapping[str, Numbers]) -> None:
        """`copy_into` of several of one shape, by name; what the files have of them in turns is read once."""
        for name, part in parts.items():
            self.check_shape(name, part.shape)
        for first, end in _blocks([part.shape for part in parts.values()]):
            for name, part in parts.items():
                fill(part[first:end], self.rows(name, first, end))

    def packed_bytes(self, name: str) -> int:
        outputs, inputs = self.shape(name)
        return FORMS[self.form(name)].panel_bytes(inputs, outputs)

    def panels(self, name: str, shape: tuple[int, ...]) -> Panels:
        """A matrix that has a `form`, as it is packed: panels. Raises `InputError` where it has another
        shape."""
        return self.panels_together({name: shape})[name]

    def panels_together(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Panels]:
        """`panels` of several of one shape, by name; what the files have of them in turns is read once."""
        found = {}
        for name, shape in shapes.items():
            self.check_shape(name, shape)
            form, (outputs, inputs) = FORMS[self.form(name)], shape
            size = -(-outputs // PANEL), -(-inputs // form.unit), form.unit_bytes
            found[name] = room(size, np.uint8)
        for first, end in _blocks([*shapes.values()]):
            for name, panels in found.items():
                is_anew = self.is_rounded_anew(name)
                levels = as_q8_0(self.rows(name, first, end)) if is_anew else self.levels(name, first, end)
                own = packed(FORMS[self.form(name)], levels)
                panels[first // PANEL : first // PANEL + len(own)] = own
        return found


def _blocks(shapes: list[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Whole panels of rows, from one to another, of tensors that all have the first of these shapes."""
    for rows, *inputs in shapes[:1]:
        step = max(PANEL, BLOCK_NUMBERS // max(1, math.prod(inputs)) // PANEL * PANEL)
        for first in range(0, rows, step):
            yield first, min(rows, first + step)


MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def _asked(method: MethodT) -> MethodT:
    """What is said where a tensor comes from."""

    def ask(self: TensorsOver, name: str, *given: Any) -> Any:
        source, own = self.place(name)
        return getattr(source, method.__name__)(own, *given)

    return cast(MethodT, ask)


class TensorsOver(Tensors):
    def __init__(self, raw: Tensors) -> None:
        self._raw = raw
        self.names = dict.fromkeys(raw)

    def place(self, name: str) -> tuple[Tensors, str]:
        return self._raw, name

    shape = _asked(Tensors.shape)
    load = _asked(Tensors.load)
    files_of = _asked(Tensors.files_of)
    form = _asked(Tensors.form)
    is_rounded_anew = _asked(Tensors.is_rounded_anew)
    input_order = _asked(Tensors.input_order)
    rows = _asked(Tensors.rows)
    levels = _asked(Tensors.levels)
    check_shape = _asked(Tensors.check_shape)


class View(NamedTuple):
    """A part of a checkpoint's `tensor`: `of` it, which copies nothing and raises `InputError` where the
    whole cannot have it. A part of a matrix that is packed is packed, too, unless it is a table."""

    tensor: str
    of: Callable[[Numbers], Numbers]
    is_table: bool = False


class Views(TensorsOver):
    """Over the `raw` tensors of a checkpoint: views of some, by name, and the others as they are."""

    def __init__(self, model: str, raw: Tensors, views: Mapping[str, View]) -> None:
        super().__init__(raw)
        self._viewed = _Viewed(model, raw, views)
        wholes = {view.tensor for view in views.values()}
        self.names = dict.fromkeys([*(name for name in raw if name not in wholes), *views])

    def place(self, name: str) -> tuple[Tensors, str]:
        return self._viewed if name in self._viewed else self._raw, name


class _Viewed(Tensors):
    def __init__(self, model: str, raw: Tensors, views: Mapping[str, View]) -> None:
        self.model, self._raw, self.names = model, raw, views
        self._views = views

    def files_of(self, name: str) -> tuple[str, ...]:
        return self._raw.files_of(self._views[name].tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        tensor, of, _ = self._views[name]
        return of(np.broadcast_to(np.uint8(0), self._raw.shape(tensor))).shape

    def load(self, name: str, shape: tuple[int, ...]) -> Numbers:
        self.check_shape(name, shape)
        tensor, of, _ = self._views[name]
        return of(self._raw.load(tensor, self._raw.shape(tensor)))

    def form(self, name: str) -> str:
        tensor, _, is_table = self._views[name]
        return ROUNDED_ANEW if self._raw.form(tensor) and not is_table else ""

    def is_rounded_anew(self, name: str) -> bool:
        return bool(self.form(name))
