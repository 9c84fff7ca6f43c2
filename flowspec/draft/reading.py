"""Reading the parts of a drafter: its config, and their values from its own files and its target's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import DTYPES, room
from flowspec.model.engine import Engine
from flowspec.model.files import ModelFiles
from flowspec.model.parts import MATRICES, LayerShape, Matrix, Parameter, Plain, Shape
from flowspec.model.tensors import Tensors
from flowspec.model.weights import end_names

Shapes = Mapping[str, Shape | LayerShape]
"""Of a drafter's parts, by what files call them."""
Reader = Callable[[str, npt.NDArray[Any]], None]
"""Copies a tensor by its name into an array, in its dtype; raises `InputError`."""


def built_config(build: Callable[[], Any], drafter: str) -> Any:
    """A transformers config; raises `InputError` for what its class does not take, `drafter` being what it is
    called."""
    try:
        return build()
    except Exception as error:  # noqa: BLE001 - transformers lets out whatever it meets in a broken file
        raise InputError(
            f"cannot read the config.json of {drafter}: {' '.join(str(error).split()):.200}"
        ) from None


def parameters_of(shapes: Shapes) -> dict[str, Parameter]:
    """By their names in files."""
    found: dict[str, Parameter] = {}
    for stem, shape in shapes.items():
        if isinstance(shape, LayerShape):
            found |= {f"{stem}.{name}": each for name, each in shape.parameters().items()}
        else:
            found |= {stem + end: each for end, each in shape.parameters.items()}
    return found


def read_parts(shapes: Shapes, engine: Engine, eps: float, read: Reader) -> dict[str, Any]:
    """By the names of `shapes` parts, of a layer all of its own."""
    values = {}
    for name, parameter in parameters_of(shapes).items():
        kind = engine.dtype if parameter.role in MATRICES else "float32"
        array = room(parameter.shape, DTYPES[kind])
        read(name, array)
        held = engine.array(array)
        values[name] = (Plain(held),) if parameter.role == "matrix" else held
    found: dict[str, Any] = {}
    for stem, shape in shapes.items():
        if isinstance(shape, LayerShape):
            own = {name: values[f"{stem}.{name}"] for name in shape.parameters()}
            found[stem] = shape.parts(own, eps, engine)
        else:
            own = {end: values[stem + end] for end in shape.parameters}
            found[stem] = shape.part(own, eps, engine)
    return found


def embedding_rows(target: ModelFiles, tensors: Tensors, dtype: str) -> Matrix:
    """`rows_of` the target's embedding."""
    spec = target.spec
    embedding, _ = end_names(spec, tensors)
    return rows_of(tensors, embedding, (spec.vocabulary, spec.hidden), dtype)


def rows_of(tensors: Tensors, name: str, shape: tuple[int, int], dtype: str) -> Matrix:
    """A table of which rows are to be taken, on the CPU: over the mapped file, which needs no memory, or
    where the file's numbers are wider, in `dtype`."""
    table = tensors.load(name, shape)
    if table.itemsize > DTYPES[dtype].itemsize:
        narrow = np.empty(shape, DTYPES[dtype])
        tensors.copy_into(name, narrow)
        table = narrow
    return Plain(table)
