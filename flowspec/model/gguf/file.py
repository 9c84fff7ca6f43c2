"""A GGUF file: its metadata, each tensor's type, shape and place, and the numbers in single rows of a tensor.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Numbers are unpacked by the gguf
package. Its reader is not used: it keeps several objects for each entry of a vocabulary.
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line
from flowspec.model.arithmetic.arrays import F32
from flowspec.model.arithmetic.packed import FORMS
from flowspec.model.damage import GGUF_MAGIC, instead
from flowspec.model.tensors import Extent

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DIMENSIONS_MAX = 4
_ALIGNMENT = 32
_LENGTH = struct.Struct("<Q")
_SAMPLING = "general.sampling."
_SAMPLING_FIELDS = {
    **{name: name for name in ("top_k", "top_p", "min_p", "xtc_probability", "mirostat")},
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "repetition_penalty_window",
}
"""What generation configs call the numbers by which llama.cpp samples."""
GGUF_ONLY = {"repetition_penalty_window": -1, "xtc_probability": 0.0, "mirostat": 0, "sampler_order": ""}
"""Fields that no generation_config.json has, each with the value that switches it off."""
SMALL = (".ssm_alpha.", ".ssm_beta.", ".ffn_gate_inp_shexp.", "per_layer_model_proj.")
"""Of names of small matrices that are rounded where a file does not pack them: how a state fades, what it
takes, the share of the expert that every row runs through, and what layers take of a token's embedding."""
_LOOSE = (".ffn_gate_inp.", ".shortconv.conv.", ".ssm_conv1d.", *SMALL)
"""Of names of matrices that need not be packed: routers and weights of convolutions, too."""
Octets = npt.NDArray[np.uint8]
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.DOTALL | re.IGNORECASE)


def is_gguf(model: str) -> bool:
    """Whether a model's name is that of a GGUF file, here or on the hub."""
    return model.lower().endswith(".gguf")


def parts_of(gguf: str) -> list[str]:
    """The names of all files of a GGUF model by one's name: `m-00001-of-00003.gguf` has two others, other
    names have none."""
    found = _NUMBERED.fullmatch(gguf)
    if found is None:
        return [gguf]
    return [f"{found[1]}-{number:05}-of-{found[3]}{found[4]}" for number in range(1, int(found[3]) + 1)]


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
            why = f"{first_line(error)}; copy it again"
            raise InputError(f"cannot read the texts in the header of {self.path}: {why}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor(Extent):
    """A packed tensor: `shape` as torch orders it, `dtype` the name of its ggml type."""

    name: str

    @staticmethod
    def at(name: str, shape: tuple[int, ...], dtype: str, path: Path, offset: int = 0) -> GgufTensor:
        """Raises `ValueError` for a shape that no tensor of the type has, `InputError` for a type that is not
        read."""
        numbers, block_bytes = _block_of(dtype)
        if not numbers:
            raise InputError(
                f"{path}: tensor {name} is {dtype}, which the gguf package cannot read; convert the model to "
                "another type"
            )
        if not 1 <= len(shape) <= _DIMENSIONS_MAX or 0 in shape or shape[-1] % numbers:
            raise ValueError(f"tensor {name} is {dtype} {list(shape)}")
        size = math.prod(shape) // numbers * block_bytes
        return GgufTensor(path=path, offset=offset, size_bytes=size, dtype=dtype, shape=shape, name=name)

    @property
    def form(self) -> str:
        """The name of its type where layers compute with that as it is; else empty."""
        return self.dtype if self.dtype in FORMS else ""

    @property
    def block_bytes(self) -> int:
        return _block_of(self.dtype)[1]

    def packed(self) -> Octets:
        """The bytes `[rows, row bytes]`, memory-mapped; raises `InputError` when the file is not there any
        more, or shorter."""
        count = math.prod(self.shape[:-1])
        try:
            return np.memmap(self.path, np.uint8, "r", self.offset, (count, self.size_bytes // count))
        except (OSError, ValueError) as error:
            why = f"{first_line(error)}; start again"
            raise InputError(f"cannot read {self.name} in {self.path}: {why}") from None

    def numbers(self) -> F32:
        return self.unpack(np.array(self.packed())).reshape(self.shape)

    def unpack(self, rows: Octets) -> F32:
        """The values `[rows, columns]` of some packed rows."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        return np.asarray(dequantize(rows, GGMLQuantizationType[self.dtype]), np.float32)


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
        count = first.metadata.get("split.count", 1)
        if count in (0, 1):
            return first
        names = parts_of(path.name)
        if len(names) != count or path.name != names[0]:
            raise InputError(
                f"{path} is one of {count!r:.40} parts, or several behind one another; give the first, with "
                "all of them in one folder as NAME-00001-of-0000N.gguf, as published"
            )
        for number, name in enumerate(names):
            part = _read_part(path.with_name(name)) if number else first
            if (part.metadata.get("split.count"), part.metadata.get("split.no")) != (count, number):
                wrong = f"is not part {number + 1} of {count} by what is in it; copy it again"
                raise InputError(f"{part.path} {wrong}")
            first.tensors.update(part.tensors)
            first.headers.update(part.headers)
        return first

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def extent(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            raise InputError(f"{self.path} has no tensor {name}")
        return self.tensors[name]

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
        loose = (*_LOOSE, ".bias", *(["token_embd.weight"] if "output.weight" in self.tensors else []))
        for name, tensor in self.tensors.items():
            if len(tensor.shape) > 1 and not tensor.form and not any(map(name.__contains__, loose)):
                return name
        return ""


def _read_part(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).file()
    except FileNotFoundError:
        wanted = "expected all parts of the model beside each other"
        raise InputError(f"there is no file {path}; {wanted}") from None
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise InputError(f"{path} is not a GGUF file{instead(path, error)}") from None


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def file(self) -> GgufFile:
        if self._take(len(GGUF_MAGIC)) != GGUF_MAGIC:
            raise ValueError("it does not begin with GGUF")
        version, tensor_count, entry_count = self._numbers("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}, expected 2 or 3")
        if entry_count > limits.GGUF_ENTRIES_MAX or tensor_count > limits.TENSORS_MAX:
            raise ValueError(f"it says that it has {entry_count} entries and {tensor_count} tensors")
        metadata = {self._text(): self._value(*self._numbers("I")) for _ in range(entry_count)}
        places = [(self._text(), self._shape(), *self._numbers("IQ")) for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"an alignment of {alignment!r:.40}")
        size = -(-self._at // alignment) * alignment
        tensors = {
            name: GgufTensor.at(name, shape, _type_name(kind), self._path, size + offset)
            for name, shape, kind, offset in places  # from the first one on
        }
        end = max((tensor.offset + tensor.size_bytes for tensor in tensors.values()), default=self._at)
        if (has := len(self._data)) < end:
            raise InputError(f"{self._path} is incomplete: expected {end} bytes, got {has}; copy it again")
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
        is_list = kind == _ARRAY
        of, count = self._numbers("IQ") if is_list else (kind, 1)
        if of not in (_STRING, *_NUMBERS) or count > limits.VOCABULARY_MAX:
            raise ValueError(f"{count} values of type {of}")
        if of != _STRING:
            found = self._numbers(f"{count}{_NUMBERS[of]}")
            return list(found) if is_list else found[0]
        if not is_list:
            return self._text()
        start = self._at
        for _ in range(count):
            self._skip(_LENGTH.size)
            self._skip(_LENGTH.unpack_from(self._data, self._at - _LENGTH.size)[0])
        return GgufTexts(path=self._path, start=start, end=self._at, count=count)

    def _shape(self) -> tuple[int, ...]:
        (dimensions,) = self._numbers("I")
        if dimensions > _DIMENSIONS_MAX:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        return self._numbers(f"{dimensions}Q")[::-1]


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    return next((each.name for each in GGMLQuantizationType if each == kind), f"of type {kind}")


@functools.lru_cache
def _block_of(dtype: str) -> tuple[int, int]:
    """How many numbers are packed together in ggml's type of that name, and into how many bytes; no numbers
    for a type that the gguf package does not unpack."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType[dtype]
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (KeyError, NotImplementedError):
        return 0, 0
    return GGML_QUANT_SIZES[kind]


def tell_gguf_version() -> None:
    """Gives the gguf package the version by which transformers judges it, which on Python 3.10 does not find
    the distribution, and asks the module."""
    import gguf

    if not hasattr(gguf, "__version__"):
        gguf.__version__ = version("gguf")  # type: ignore[attr-defined]


class Kind(NamedTuple):
    """What an entry may be: in words, and whether a value is."""

    words: str
    accepts: Callable[[Any], bool]


NUMBER = Kind("a number other than 0", lambda value: type(value) in (int, float) and 0 < abs(value) < inf)
COUNT = Kind("a whole number above 0", lambda value: type(value) is int and value > 0)
TEXT = Kind("a text", lambda value: type(value) is str)
TRUTH = Kind("true or false", lambda value: type(value) is bool)
TEXTS = Kind("a list of texts", lambda value: type(value) is GgufTexts)
NEEDED: Any = object()
"""As a default: the entry must be there."""
_HARMLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
_NEUTRAL = {
    "attention.causal": True,
    **dict.fromkeys(("attention.shared_kv_layers", "attention.sliding_window"), 0),
    **dict.fromkeys(("embedding_length_per_layer_input", "expert_count", "expert_shared_count"), 0),
    **dict.fromkeys(("expert_used_count", "expert_weights_norm", "nextn_predict_layers"), 0),
    "rope.scaling.factor": 0,
}
"""Keys with the value that says no more than without them."""


def count_where(words: str, accepts: Callable[[int], bool]) -> Kind:
    return Kind(words, lambda value: COUNT.accepts(value) and accepts(value))


def one_of(values: Collection[Any]) -> Kind:
    return Kind(f"one of {', '.join(map(str, values))}", lambda value: value in list(values))


def list_of(words: str, count: int, accepts: Callable[[list[Any]], bool]) -> Kind:
    """A list of so many numbers, which are as `words` and `accepts` say."""
    return Kind(words, lambda value: type(value) is list and len(value) == count and accepts(value))


class Stated:
    """The entries of a file whose keys begin with `prefix`."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.file, self._prefix = file, prefix
        said = ((key.removeprefix(prefix), key, value) for key, value in file.metadata.items())
        self._entries = {
            name: value for name, key, value in said if name != key and _NEUTRAL.get(name) != value
        }
        self._left = self._entries.keys() - _HARMLESS

    def take(self, key: str, default: Any = NEEDED, kind: Kind = NUMBER) -> Any:
        """An entry's value, or the default where it has none. Raises `InputError` for one of another kind."""
        self._left.discard(key)
        value = self._entries.get(key)
        if value is None and default is not NEEDED:
            return default
        if not kind.accepts(value):
            self.refuse(key, kind.words, "nothing" if value is None else f"{value!r:.80}")
        return value

    def refuse(self, key: str, expected: str, got: str) -> NoReturn:
        raise InputError(
            f"{self.file.path}: {self._prefix}{key}: expected {expected}, got {got}; convert the model again "
            "with a new llama.cpp, or take another file"
        )

    def check_all_taken(self) -> None:
        """Raises `InputError` for an entry that nobody took: it may change the arithmetic."""
        for key in sorted(self._left):
            said = f"sets {self._prefix}{key} to {self._entries[key]!r:.40}"
            raise InputError(f"{self.file.path} {said}, which FlowSpec does not apply; expected none")
