"""Finds a model's files, in a local folder or on the hub, and reads single tensors from them by memory map.

A GGUF file is a model by itself: its metadata stands for config.json and tokenizer (`gguf_config.py`,
`gguf.py`). A hub model is fetched file by file (`hub.py`), so a stage downloads only the shards that hold its
tensors.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flowspec.core.protocol import limits
from flowspec.errors import InputError, first_line
from flowspec.model.config_bounds import check_built, check_config
from flowspec.model.families import decoder_config, raw_decoder_config
from flowspec.model.hub import hub_file
from flowspec.model.json_files import read_json
from flowspec.model.safetensors_file import read_header

if TYPE_CHECKING:
    import torch

    from flowspec.model.gguf_file import GgufFile

BUNDLED = "bundled"
DEMO_FOLDER = Path(__file__).parent.parent / "demo"
DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
MAPPED_BYTES_MAX = 32 << 20
_SAMPLE_BYTES = 1 << 16
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def bundled_folder(name: str) -> Path:
    """Folder of a model that is shipped with FlowSpec: `target`, `mid`, `draft`, `draft-math`, ..."""
    return DEMO_FOLDER / name


def bundled_models() -> tuple[str, ...]:
    """The names of the models that are shipped with FlowSpec, beside `bundled` itself."""
    return tuple(
        sorted(path.parent.name for path in DEMO_FOLDER.glob("*/config.json") if path.parent.name != "target")
    )


def canonical_name(model: str) -> str:
    """The name other devices should use: `bundled` or another that is shipped, an absolute folder or GGUF
    file, or a hub id."""
    return (
        str(Path(model).resolve())
        if model != BUNDLED and (os.path.isdir(model) or (is_gguf(model) and os.path.isfile(model)))
        else model
    )


def is_gguf(model: str) -> bool:
    """Whether a model's name is that of a GGUF file, here or on the hub."""
    return model.endswith(".gguf")


def parts_of(gguf: str) -> list[str]:
    """The names of all files of a GGUF model by one's name: `m-00001-of-00003.gguf` has two others, other
    names have none."""
    found = _PART.fullmatch(gguf)
    if found is None:
        return [gguf]
    return [f"{found[1]}-{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1)]


class ModelFiles:
    """The files of one model; nothing is read or fetched before it is asked for, and nothing ever fetched
    unless it `may_fetch`.

    `folder` is None for one on the hub.
    """

    def __init__(self, model: str, *, may_fetch: bool = True) -> None:
        self.model = model
        self._may_fetch = may_fetch
        self.folder: Path | None = None
        self._local_gguf: Path | None = None
        self._hub_gguf = ""
        if model == BUNDLED:
            self.folder = bundled_folder("target")
        elif os.path.isdir(model):  # unlike Path.is_dir, also False for names that no file system takes
            self.folder = Path(model)
            self._local_gguf = _only_gguf(self.folder)
        elif model in bundled_models():  # a folder of that name here wins, as with names of the hub
            self.folder = bundled_folder(model)
        elif is_gguf(model) and os.path.isfile(model):
            self._local_gguf = Path(model)
            self.folder = self._local_gguf.parent
        elif is_gguf(model):
            if _is_path(model) or model.count("/") < 2:
                raise InputError(
                    "expected a GGUF file, here or on the hub as owner/name/file.gguf, but there is no file "
                    f"{model!r}"
                )
            self._hub_gguf = model.split("/", 2)[2]
        elif os.path.isfile(model):
            raise InputError(
                f"expected a model folder, a GGUF file or a hub id such as owner/name, but {model!r} is a "
                "file "
                "whose name does not end in .gguf"
            )
        elif _is_path(model) or model.count("/") != 1:
            raise InputError(
                "expected a model folder, a GGUF file or a hub id such as owner/name, but there is no "
                f"folder {model!r}"
            )

    @functools.cached_property
    def gguf(self) -> Path | None:
        """The path of a model that is a GGUF file, of the first one where there are several parts; fetched
        from the hub if need be."""
        if not self._hub_gguf:
            return self._local_gguf
        repository = self.model.removesuffix(f"/{self._hub_gguf}")
        for part in parts_of(self._hub_gguf):
            if hub_file(repository, part, may_fetch=self._may_fetch) is None:
                raise InputError(
                    f"there is no file {self.model!r} here, and {repository!r} on the hub has no {part}"
                )
        return hub_file(repository, self._hub_gguf, may_fetch=False)

    @functools.cached_property
    def _gguf(self) -> GgufFile:
        from flowspec.model.gguf_file import GgufFile

        assert self.gguf is not None
        return GgufFile.read(self.gguf)

    @property
    def gguf_architecture(self) -> str:
        """What a GGUF file calls its architecture; empty for other models."""
        return "" if self.gguf is None else str(self._gguf.metadata.get("general.architecture"))

    def path(self, name: str) -> Path:
        """The local path of a file that must be there; fetched from the hub if need be."""
        found = self.find(name)
        if found is None:
            hint = "" if self.folder is not None else "; a GGUF file there is named owner/name/file.gguf"
            raise InputError(
                f"model {self.model!r} has no {name}; expected config.json, safetensors weights and a "
                f"tokenizer in it{hint}"
            )
        return found

    def find(self, name: str) -> Path | None:
        """As `path`, but None when the model has no such file; a GGUF file has no others beside it."""
        if self._hub_gguf or self._local_gguf is not None:
            return None
        if self.folder is not None:
            return self.folder / name if (self.folder / name).is_file() else None
        return hub_file(self.model, name, may_fetch=self._may_fetch)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is one in the form that fast tokenizers have, or in a GGUF file's metadata."""
        if self.gguf is not None:
            return "tokenizer.ggml.tokens" in self._gguf.metadata
        return self.find("tokenizer.json") is not None

    def raw_config(self) -> dict[str, Any]:
        """config.json as it is, without transformers and its imports; of a multimodal model the decoder's
        part of it."""
        if self.gguf is not None:
            from flowspec.model.gguf_config import config_of

            path, raw = self.gguf, config_of(self._gguf)
            check_config(raw, path)
        else:
            path = self.path("config.json")
            whole = read_json(path)
            check_config(whole, path)
            raw = raw_decoder_config(whole)
        layer_count = raw.get("num_hidden_layers")
        if type(layer_count) is not int or not 1 <= layer_count <= limits.LAYERS_MAX:
            raise InputError(
                f"{path}: num_hidden_layers: expected 1 to {limits.LAYERS_MAX}, got {layer_count!r:.80}"
            )
        context = raw.get("max_position_embeddings", limits.CONTEXT_MAX)
        if type(context) is not int or context < 2:
            raise InputError(
                f"{path}: max_position_embeddings: expected a number from 2, got {context!r:.80}"
            )
        return raw

    def check_weights(self) -> None:
        """Raises `InputError` when weight files of a local folder are missing or cut short; fetches nothing
        from the hub."""
        if self.gguf is not None:
            _ = self._gguf
        elif self.folder is not None:
            for name in sorted(set(self.weight_map().values())):
                read_header(self.path(name))

    def config(self) -> Any:
        """The transformers config, of a multimodal model that of its decoder."""
        from transformers import AutoConfig

        if self.gguf is not None:
            name, read = "metadata", functools.partial(AutoConfig.for_model, **self.raw_config())
        else:
            self.raw_config()  # its checks come before transformers builds what the file asks for
            folder = self.path("config.json").parent
            name, read = (
                "config.json",
                functools.partial(
                    AutoConfig.from_pretrained, folder, local_files_only=True, trust_remote_code=False
                ),
            )
        try:
            config = decoder_config(read(), self.model)
            check_built(config, self.model)
            return config
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - transformers lets out whatever it meets in a broken file
            text = " ".join(str(error).split())  # some of these errors say what is wrong on their second line
            raise InputError(f"cannot read the {name} of {self.model!r}: {text:.200}") from None

    def weight_map(self) -> dict[str, str]:
        """Tensor name -> file name, for one safetensors file or sharded ones, or a GGUF file."""
        if self.gguf is not None:
            return dict.fromkeys(self.tensors(), self.gguf.name)
        index = self.find("model.safetensors.index.json")
        if index is not None:
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict) or not all(
                isinstance(file, str) and Path(file).name == file for file in shards.values()
            ):
                raise InputError(
                    f"{index} is broken: expected a weight_map of tensor names to file names beside it, got "
                    f"{shards!r:.80}"
                )
            return dict(shards)
        if self.find("model.safetensors") is None:
            raise InputError(
                f"model {self.model!r} has no model.safetensors (or model.safetensors.index.json); other "
                "formats are not loaded: a .bin or .pt "
                "file is a pickle, which may run code (docs/security.md tells how to convert one)"
            )
        return dict.fromkeys(read_header(self.path("model.safetensors")), "model.safetensors")

    def tensors(self) -> TensorIndex:
        if self.gguf is not None:
            from flowspec.model.gguf import GgufTensors

            return GgufTensors.of_file(self._gguf, self.config())
        return TensorIndex(self)

    def extents(self) -> Extents:
        """The tensors under the names that they have in the files, and where each lies."""
        return TensorIndex(self) if self.gguf is None else self._gguf

    def config_text(self) -> str:
        """config.json, or what stands for it."""
        return (
            self.path("config.json").read_text("utf-8")
            if self.gguf is None
            else json.dumps(self.raw_config())
        )

    def fingerprint(self) -> str:
        """Names the content: config, tensor layout, and samples of every weight file (for the hub, its
        revision).

        Equal on all devices that hold the same model, and cheap: a retrained model of the same shape differs.
        """
        if self.gguf is not None:
            digest = hashlib.sha256()
            for path, size in self._gguf.headers.items():
                with path.open("rb") as file:
                    digest.update(file.read(size))
                _add_samples(digest, path)
            return digest.hexdigest()[:32]
        config = self.path("config.json")
        digest = hashlib.sha256(config.read_bytes())
        if self.folder is None:
            digest.update(config.resolve().parent.name.encode() + config.parent.name.encode())
            return digest.hexdigest()[:32]
        for name in sorted(set(self.weight_map().values())):
            path = self.path(name)
            digest.update(f"{name} {path.stat().st_size}".encode())
            _add_samples(digest, path)
        return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where a tensor lies: `size_bytes` of `path` from `offset` on."""

    path: Path
    offset: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]


class Extents(Protocol):
    """Names of tensors, and where each lies."""

    def __iter__(self) -> Iterator[str]: ...
    def extent(self, name: str) -> Extent: ...


class TensorIndex:
    """Shapes and sizes of a model's tensors, and the tensors themselves, one at a time."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._file_of = files.weight_map()
        self._headers: dict[str, dict[str, Any]] = {}
        self._open: dict[str, Any] = {}
        self._mapped_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the file's header; nothing is loaded."""
        return tuple(self._entry(name)["shape"])

    def element_count(self, name: str) -> int:
        return math.prod(self.shape(name))

    def in_file(self, name: str) -> str:
        """The name that the tensor has in its file."""
        return name

    def extent(self, name: str) -> Extent:
        """Where the tensor lies as raw bytes, little-endian and row-major. Raises `InputError` for a header
        that contradicts itself."""
        entry = self._entry(name)
        file = self._file_of[name]
        path = self._files.path(file)
        ends = [other["data_offsets"][1] for other in self._headers[file].values()]
        begin, end = entry["data_offsets"][:2]
        size_bytes = self.element_count(name) * DTYPE_BYTES[entry["dtype"]]
        if type(begin) is not int or begin < 0 or end - begin != size_bytes:
            raise InputError(
                f"{path}: {name}: expected {size_bytes} bytes by its shape, got the offsets "
                f"{entry['data_offsets']}"
            )
        # The header's check made sure that the data end where the file does.
        return Extent(
            path=path,
            offset=path.stat().st_size - max(ends) + begin,
            size_bytes=size_bytes,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
        )

    def load(self, name: str, shape: tuple[int, ...]) -> Any:
        """A torch tensor over the memory-mapped file, to be copied before the next call. Checks the shape.

        Maps are dropped every so often: pages of a file that were read count as this process's memory until
        then.
        """
        from safetensors import SafetensorError, safe_open

        entry = self._expect(name, shape)
        file = self._file_of[name]
        try:
            if self._mapped_bytes > MAPPED_BYTES_MAX:
                self.close()
            self._mapped_bytes += self.element_count(name) * DTYPE_BYTES[entry["dtype"]]
            if file not in self._open:
                self._open[file] = safe_open(self._files.path(file), framework="pt")
            return self._open[file].get_tensor(name)
        except SafetensorError as error:
            raise InputError(f"cannot read {name} of {self._files.model!r}: {first_line(error)}") from None

    def copy_into(self, name: str, part: torch.Tensor) -> None:
        """Copies a tensor into `part`, in its dtype. Checks the shape."""
        part.copy_(self.load(name, tuple(part.shape)))

    def close(self) -> None:
        """Drops the memory maps."""
        self._open.clear()
        self._mapped_bytes = 0

    def _expect(self, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """The entry of a tensor that must have this shape."""
        entry = self._entry(name)
        if tuple(entry["shape"]) != shape:
            raise InputError(
                f"tensor {name} of {self._files.model!r}: expected shape {list(shape)} by config.json, got "
                f"{entry['shape']}"
            )
        return entry

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._file_of:
            raise InputError(
                f"model {self._files.model!r} has no tensor {name}; the folder may be incomplete or of "
                "another family"
            )
        file = self._file_of[name]
        if file not in self._headers:
            self._headers[file] = read_header(self._files.path(file))
        entry = self._headers[file].get(name)
        if entry is None:
            raise InputError(
                f"{file} of {self._files.model!r} should hold {name} by its index, but does not; copy it "
                "again"
            )
        if entry["dtype"] not in DTYPE_BYTES:
            raise InputError(
                f"tensor {name} of {self._files.model!r} is {entry['dtype']}; expected one of "
                f"{', '.join(DTYPE_BYTES)}"
            )
        return dict(entry)


def _is_path(model: str) -> bool:
    return Path(model).is_absolute() or model.startswith((".", "~"))


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has one, in one part or several, and no safetensors."""
    found = sorted(path.name for path in folder.glob("*.gguf"))
    is_one = bool(found) and (len(found) == 1 or found == parts_of(found[0]))
    return folder / found[0] if is_one and not any(folder.glob("*.safetensors")) else None


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        for part in range(8):
            file.seek(max(0, (size - _SAMPLE_BYTES) * part // 7))
            digest.update(file.read(_SAMPLE_BYTES))
