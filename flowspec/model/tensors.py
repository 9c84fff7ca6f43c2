"""The tensors of a model by name, whatever files hold them: their shapes, where they lie, and the numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import Numbers, fill

ROUNDED_ANEW = "Q8_0"
"""The form of a matrix that has none of its own, among others that are packed: numbers in 16 bits or more,
floats of 8 bits, groups in no order."""
Panels = npt.NDArray[np.uint8]
"""`[panels, units, unit_bytes]`, as `arithmetic.packed` says."""


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
    """Shapes and sizes of a model's tensors, and the tensors themselves, one at a time.

    Names are those that transformers has for them. Numbers are numpy's, and bfloat16 are their bits, uint16.
    """

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def __iter__(self) -> Iterator[str]: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape; nothing is loaded. Raises `InputError` where the model has no such tensor."""

    def element_count(self, name: str) -> int:
        return math.prod(self.shape(name))

    def files_of(self, name: str) -> tuple[str, ...]:
        """The tensors that it is read from, by the names that files have for them."""
        return (name,)

    @abstractmethod
    def load(self, name: str, shape: tuple[int, ...]) -> Numbers:
        """A tensor, to be read only. Raises `InputError` where it has another shape."""

    def level_type(self, name: str) -> str:
        """What files call the dtype of a tensor of levels, which are no numbers without their scales; else
        empty."""
        return ""

    def copy_into(self, name: str, part: Numbers) -> None:
        """Copies a tensor into `part`, in its dtype. Checks the shape."""
        fill(part, self.load(name, part.shape))

    def copy_together(self, parts: Mapping[str, Numbers]) -> None:
        """`copy_into` of several, by name; what the files have of them in turns is read once."""
        for name, part in parts.items():
            self.copy_into(name, part)

    def form(self, name: str) -> str:
        """ggml's name of the form in which a file packs a tensor, one of `arithmetic.packed.FORMS`; empty for
        one of numbers, or packed in another way."""
        return ""

    def is_rounded_anew(self, name: str) -> bool:
        """Whether `panels` are but the nearest that its form has to what `load` gives."""
        return False

    def packed_bytes(self, name: str) -> int:
        """What a matrix that has a `form` takes so packed."""
        raise NotImplementedError

    def panels(self, name: str, shape: tuple[int, ...]) -> Panels:
        """A matrix that has a `form`, as it is packed: panels. Raises `InputError` where it has another
        shape."""
        raise NotImplementedError

    def panels_together(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Panels]:
        """`panels` of several, by name; what the files have of them in turns is read once."""
        return {name: self.panels(name, shape) for name, shape in shapes.items()}

    def input_order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Which of a matrix's inputs each one of its `panels` is, int64 `[in]`; None: they are the same."""
        return None


class Place(Protocol):
    """Where a tensor is found that has another name than files have for it."""

    @property
    def tensor(self) -> str:
        """The tensor that it is read from, or is a part of."""


PlaceT = TypeVar("PlaceT", bound=Place)


class PlacedTensors(Tensors, Generic[PlaceT]):
    """Tensors with names of their own; None is the place of one that keeps its name."""

    _places: Mapping[str, PlaceT | None]

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def files_of(self, name: str) -> tuple[str, ...]:
        place = self._places.get(name)
        return (name if place is None else place.tensor,)


class PartsOfTensors(PlacedTensors[PlaceT]):
    """Over the `raw` tensors of a checkpoint: parts of some, under the names of their places, and the others
    as they are."""

    def __init__(self, model: str, raw: Tensors) -> None:
        self._model = model
        self._raw = raw
        self._places: dict[str, PlaceT | None] = {}

    def files_of(self, name: str) -> tuple[str, ...]:
        (tensor,) = super().files_of(name)
        return self._raw.files_of(tensor)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        return self._raw.shape(name) if place is None else self._shape_of(place)

    def load(self, name: str, shape: tuple[int, ...]) -> Numbers:
        check_shape(name, self._model, shape, self.shape(name))
        place = self._places.get(name)
        if place is None:
            return self._raw.load(name, shape)
        return self._part(place, self._raw.load(place.tensor, self._raw.shape(place.tensor)))

    @abstractmethod
    def _shape_of(self, place: PlaceT) -> tuple[int, ...]:
        """Of a part; raises `InputError` where the whole cannot have it."""

    @abstractmethod
    def _part(self, place: PlaceT, whole: Numbers) -> Numbers:
        """Of the whole tensor."""

    def level_type(self, name: str) -> str:
        place = self._places.get(name)
        return self._raw.level_type(name if place is None else place.tensor)

    def copy_into(self, name: str, part: Numbers) -> None:
        if self._places.get(name) is None:
            self._raw.copy_into(name, part)
        else:
            super().copy_into(name, part)

    def form(self, name: str) -> str:
        return self._raw.form(name) if self._places.get(name) is None else ""

    def is_rounded_anew(self, name: str) -> bool:
        return self._places.get(name) is None and self._raw.is_rounded_anew(name)

    def packed_bytes(self, name: str) -> int:
        return self._raw.packed_bytes(name)

    def panels(self, name: str, shape: tuple[int, ...]) -> Panels:
        return self._raw.panels(name, shape)

    def input_order(self, name: str) -> npt.NDArray[np.int64] | None:
        return self._raw.input_order(name)


def check_shape(
    name: str, model: str, expected: Sequence[int], found: Sequence[int], source: str = "config.json"
) -> None:
    """Raises `InputError` for a tensor that has not the shape that follows from `source`."""
    if tuple(expected) != tuple(found):
        raise InputError(
            f"tensor {name} of {model!r}: expected shape {list(expected)} by {source}, got {list(found)}"
        )
