"""A GGUF file: its metadata, each tensor's type, shape and place, and the numbers in single rows of a tensor.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Numbers are unpacked by the gguf
package. Its reader is not used: it keeps several objects for each entry of a vocabulary. 128000 tokens and
280000 merges took it 22 s and 640 MB; here they take 0.1 s and next to no memory.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.damage import GGUF_MAGIC, instead
from flowspec.model.gguf.names import parts_of
from flowspec.model.tensors import Extent

_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DIMENSIONS_MAX = 4
_ALIGNMENT = 32
_LENGTH = struct.Struct("<Q")
_PART_COUNT, _PART_NUMBER, _TENSOR_COUNT = "split.count", "split.no", "split.tensors.count"
_SAMPLING = "general.sampling."
_SAMPLING_FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repetition_penalty_window",
    "xtc_probability": "xtc_probability",
    "mirostat": "mirostat",
}
"""What generation configs call the numbers by which llama.cpp samples."""
GGUF_ONLY = {"repetition_penalty_window": -1, "xtc_probability": 0.0, "mirostat": 0, "sampler_order": ""}
"""Fields that no generation_config.json has, each with the value that switches it off."""
_EMBEDDING, _OUTPUT, _BIAS = "token_embd.weight", "output.weight", ".bias"
SMALL = (".ssm_alpha.", ".ssm_beta.", ".ffn_gate_inp_shexp.", "per_layer_model_proj.")
"""Of names of small matrices that are rounded where a file does not pack them: how a state fades, what it
takes, the share of the expert that every row runs through, and what layers take of a token's embedding."""
_LOOSE = (".ffn_gate_inp.", ".shortconv.conv.", ".ssm_conv1d.", *SMALL)
"""Of names of matrices that need not be packed: routers and weights of convolutions, too."""
Rows = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTexts:
    """A list of `count` texts in the metadata, from byte `start` to byte `end` of the file `path`.

    Vocabularies are most of a header, and who loads weights does not need them: they are read when asked for.
    """

    path: Path
    start: int
    end: int
    count: int

    def read(self) -> list[str]:
        """Raises `InputError` when they are no UTF-8, or the file is not there any more."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.end - self.start)
            texts, at = [], 0
            for _ in range(self.count):
                (length,) = _LENGTH.unpack_from(data, at)
                at += _LENGTH.size + length
                texts.append(data[at - length : at].decode())
            return texts
        except (OSError, ValueError, struct.error) as error:
            raise InputError(
                f"cannot read the texts in the header of {self.path}: {first_line(error)}; copy it again"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor(Extent):
    """A packed tensor: `shape` as torch orders it, `dtype` the name of its ggml type.

    A row takes `row_bytes`, numbers that are packed together take `block_bytes`.
    """

    name: str
    row_bytes: int
    block_bytes: int

    @staticmethod
    def at(name: str, shape: tuple[int, ...], kind: int, path: Path, offset: int) -> GgufTensor:
        """One of ggml's type of that number; raises `ValueError` for a shape that the type cannot have,
        `InputError` for a type that cannot be read."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        known = kind in set(GGMLQuantizationType)
        if not known or not _is_readable(kind):
            label = GGMLQuantizationType(kind).name if known else f"of type {kind}"
            raise InputError(
                f"{path}: tensor {name} is {label}, which the gguf package cannot read; convert the model to "
                "another type"
            )
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if shape[-1] % block:
            raise ValueError(f"tensor {name} has rows of {shape[-1]} in blocks of {block}")
        row_bytes = shape[-1] // block * block_bytes
        return GgufTensor(
            path=path,
            offset=offset,
            size_bytes=math.prod(shape[:-1]) * row_bytes,
            dtype=GGMLQuantizationType(kind).name,
            shape=shape,
            name=name,
            row_bytes=row_bytes,
            block_bytes=block_bytes,
        )

    @staticmethod
    def stored(name: str, shape: tuple[int, ...], dtype: str, path: Path) -> GgufTensor:
        """A tensor alone in a file; raises `ValueError` for one that no GGUF file could hold."""
        from gguf import GGMLQuantizationType

        is_known = dtype in GGMLQuantizationType.__members__
        if not is_known or not 1 <= len(shape) <= _DIMENSIONS_MAX or 0 in shape:
            raise ValueError(f"tensor {name} is {dtype:.20} {list(shape)}")
        return GgufTensor.at(name, shape, GGMLQuantizationType[dtype], path, 0)

    @property
    def form(self) -> str:
        """The name of its type where layers compute with that as it is; else empty."""
        return self.dtype if self.dtype in FORMS else ""

    def packed(self) -> Rows:
        """The bytes `[rows, row bytes]`, memory-mapped; raises `InputError` when the file is not there any
        more, or shorter."""
        size = math.prod(self.shape[:-1]), self.row_bytes
        try:
            return np.memmap(self.path, np.uint8, "r", self.offset, size)
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot read {self.name} in {self.path}: {first_line(error)}; start again"
            ) from None

    def numbers(self) -> F32:
        """The values of a small tensor, of its shape."""
        return self.unpack(np.array(self.packed())).reshape(self.shape)

    def unpack(self, rows: Rows) -> F32:
        """The values `[rows, columns]` of some packed rows."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        values: F32 = dequantize(rows, GGMLQuantizationType[self.dtype])
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """`metadata` holds numbers, texts, lists of numbers, and where lists of texts are; of several parts the
    first one's.

    `headers` says of each part how many bytes come before its tensors.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    headers: dict[Path, int]

    @staticmethod
    def read(path: Path) -> GgufFile:
        """Reads a file, or all parts of which `path` is the first.

        Raises `InputError` for a file that is missing, broken or cut short, or holds a type of tensor that
        cannot be read.
        """
        first = _read_part(path)
        count = first.metadata.get(_PART_COUNT, 1)
        if count in (0, 1):
            return first
        names = parts_of(path.name)
        if len(names) != count:
            raise InputError(
                f"{path} is one of {count!r:.40} parts, but its name does not say which; expected all of "
                "them in one folder as NAME-00001-of-0000N.gguf, as they were published"
            )
        if path.name != names[0]:
            raise InputError(f"{path} is one of {count} parts; give the first, {names[0]}")
        parts = [first, *(_read_part(path.with_name(name)) for name in names[1:])]
        for number, part in enumerate(parts):
            if (part.metadata.get(_PART_COUNT), part.metadata.get(_PART_NUMBER)) != (count, number):
                raise InputError(
                    f"{part.path} is not part {number + 1} of {count} by what is in it; copy it again"
                )
        tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
        if len(tensors) != first.metadata.get(_TENSOR_COUNT, len(tensors)):
            raise InputError(
                f"{path} and its parts hold {len(tensors)} tensors, expected "
                f"{first.metadata[_TENSOR_COUNT]}; copy them again"
            )
        headers = {part.path: size for part in parts for size in part.headers.values()}
        return GgufFile(path=path, metadata=first.metadata, tensors=tensors, headers=headers)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def generation_config(self) -> dict[str, Any]:
        """What the file says of sampling, as a generation_config.json would; empty where it says nothing.
        Raises `InputError` for what is no number."""
        found: dict[str, Any] = {}
        for key, name in _SAMPLING_FIELDS.items():
            if (value := self.metadata.get(_SAMPLING + key)) is None:
                continue
            if type(value) not in (int, float) or not math.isfinite(value):
                raise InputError(f"{self.path}: {_SAMPLING}{key}: expected a number, got {value!r:.40}")
            found[name] = float(str(np.float32(value))) if type(value) is float else value
        if order := self.metadata.get(f"{_SAMPLING}sequence"):
            found["sampler_order"] = order
        if found.get("repetition_penalty", 1.0) == 1.0:
            found.pop("repetition_penalty_window", None)  # of nothing
        if found.get("temperature", 1.0) > 0 and found.keys() - GGUF_ONLY.keys() - {"repetition_penalty"}:
            found["do_sample"] = True
        return found

    @property
    def loose_matrix(self) -> str:
        """A matrix that is not packed, or not in one of `FORMS`; empty where there is none.

        Those that are `_LOOSE`, and an embedding that is no output, are multiplied by nothing that packs
        them; biases of experts are no matrices.
        """
        for name, tensor in self.tensors.items():
            is_output = name != _EMBEDDING or _OUTPUT not in self.tensors
            is_loose = any(map(name.__contains__, _LOOSE)) or name.endswith(_BIAS)
            if len(tensor.shape) > 1 and is_output and not is_loose and not tensor.form:
                return name
        return ""

    def extent(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            raise InputError(f"{self.path} has no tensor {name}")
        return self.tensors[name]


def _read_part(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).file()
    except FileNotFoundError:
        raise InputError(
            f"there is no file {path}; expected all parts of the model beside each other"
        ) from None
    except (OSError, ValueError, OverflowError, IndexError, struct.error) as error:
        raise InputError(f"{path} is not a GGUF file{instead(path, error)}") from None


class _Reader:
    """Walks through a file from its beginning."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def file(self) -> GgufFile:
        if self._data[: len(GGUF_MAGIC)] != GGUF_MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = len(GGUF_MAGIC)
        version, tensor_count, entry_count = self._numbers("IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, expected 2 or 3")
        if entry_count > limits.GGUF_ENTRIES_MAX or tensor_count > limits.TENSORS_MAX:
            raise ValueError(f"it says that it has {entry_count} entries and {tensor_count} tensors")
        metadata = {self._text(): self._value(*self._numbers("I")) for _ in range(entry_count)}
        places = [self._place() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"an alignment of {alignment!r:.40}")
        size = -(-self._at // alignment) * alignment
        tensors = {
            name: GgufTensor.at(name, shape, kind, self._path, size + offset)
            for name, shape, kind, offset in places
        }
        end = max((tensor.offset + tensor.size_bytes for tensor in tensors.values()), default=self._at)
        if len(self._data) < end:
            raise InputError(
                f"{self._path} is incomplete: expected {end} bytes, got {len(self._data)}; copy it again"
            )
        if (
            metadata.get(_PART_COUNT, 1) not in (0, 1)
            and self._data[end : end + alignment].find(GGUF_MAGIC) >= 0
        ):
            raise InputError(
                f"{self._path} is several parts of a GGUF model one behind another; expected each in a file "
                "of its own, NAME-00001-of-0000N.gguf, or one that llama-gguf-split --merge makes of them"
            )
        return GgufFile(path=self._path, metadata=metadata, tensors=tensors, headers={self._path: size})

    def _take(self, count: int) -> bytes:
        self._skip(count)
        return self._data[self._at - count : self._at]

    def _skip(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise InputError(
                f"{self._path} ends within its header, after {len(self._data)} bytes: it is incomplete or "
                "damaged; copy it again"
            )
        self._at += count

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", self._take(struct.calcsize(f"<{layout}")))

    def _text(self) -> str:
        (length,) = self._numbers("Q")
        if length > limits.GGUF_TEXT_BYTES_MAX:
            raise ValueError(f"a text of {length} bytes")
        return self._take(length).decode()

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"metadata of type {kind}")
        of, count = self._numbers("IQ")
        if count > limits.VOCABULARY_MAX:
            raise ValueError(f"a list of {count} entries")
        if of in _NUMBERS:
            layout = _NUMBERS[of]
            return list(struct.unpack(f"<{count}{layout}", self._take(count * struct.calcsize(f"<{layout}"))))
        if of != _STRING:
            raise ValueError(f"a list of type {of}")
        return self._texts(count)

    def _texts(self, count: int) -> GgufTexts:
        start = self._at
        for _ in range(count):
            self._skip(_LENGTH.size)
            self._skip(_LENGTH.unpack_from(self._data, self._at - _LENGTH.size)[0])
        return GgufTexts(path=self._path, start=start, end=self._at, count=count)

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape, type and distance from the first one."""
        name = self._text()
        (dimensions,) = self._numbers("I")
        if not 1 <= dimensions <= _DIMENSIONS_MAX:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        sizes = self._numbers(f"{dimensions}Q")
        kind, offset = self._numbers("IQ")
        return name, sizes[::-1], kind, offset


def tell_gguf_version() -> None:
    """
    Gives the gguf package the version by which transformers judges it.

    transformers finds the distribution of a module by name, which on Python 3.10 fails for gguf; it then asks
    the module.
    """
    import gguf

    if not hasattr(gguf, "__version__"):
        gguf.__version__ = version("gguf")  # type: ignore[attr-defined]


@functools.cache
def _is_readable(kind: int) -> bool:
    """Whether the gguf package has code that turns this type into numbers."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    of = GGMLQuantizationType(kind)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[of][1]), np.uint8), of)
    except NotImplementedError:
        return False
    return True
