"""Finds a model's files, in a local folder or on the hub.

A GGUF file is a model by itself: its metadata stands for config.json and tokenizer (`gguf/`). A hub model is
fetched file by file (`hub.py`), so a stage downloads only the shards that hold its tensors.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.core.protocol.precision import ACTIVATIONS, FILED
from flowspec.errors import InputError, first_line
from flowspec.folders import read_text
from flowspec.model.accelerator import importing
from flowspec.model.damage import GGUF_MAGIC, advice, check_inside, read_head, read_json
from flowspec.model.families import FAMILIES, check_family, decoder_config, raw_decoder_config
from flowspec.model.gguf.config import config_of
from flowspec.model.gguf.file import GgufFile, is_gguf, parts_of
from flowspec.model.gguf.tensors import GgufTensors
from flowspec.model.hub import hub_file
from flowspec.model.joined_tensors import joined_experts, layer_views
from flowspec.model.prequantised import PrequantisedTensors, Scheme, scheme_of
from flowspec.model.spec import check_built, check_config, family_of, spec_of
from flowspec.model.tensors import Extents, Tensors, Views
from flowspec.model.weight_files import LEVELS, NUMBERS, SafetensorsTensors, check_written, read_header

BUNDLED = "bundled"
TOY = "bundled toy of 11 million parameters"
"""What it is, where somebody asks it."""
TOY_TOLD = (
    f"the {TOY}: outside of sums, code and plays it talks nonsense; a real model: --model Qwen/Qwen3-0.6B"
)
TOYS = ("block", "draft-code", "draft-math", "draft-plays", "eagle", "eagle3", "mid")
"""Toy models other than the bundled pair, which have a package of their own; in a checkout all are there."""
DEMO_FOLDER = Path(__file__).parent.parent / "demo"
_SAMPLE_BYTES = 1 << 16
_KINDS = {
    **{"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"},
    **{"list[int]": "a list of them", "NoneType": "null"},
}
"""In words, what transformers expects a field to be."""


def bundled_folder(name: str) -> Path:
    return DEMO_FOLDER / name


def bundled_models() -> tuple[str, ...]:
    """The names of the bundled models, beside `bundled` itself."""
    names = (path.parent.name for path in DEMO_FOLDER.glob("*/config.json"))
    return tuple(sorted(name for name in names if name != "target"))


def canonical_name(model: str) -> str:
    """The name other devices should use: `bundled` or another bundled model, an absolute folder or GGUF
    file, or a hub id."""
    is_here = model != BUNDLED and (os.path.isdir(model) or _is_local_gguf(model))
    return str(Path(model).resolve()) if is_here else model


class ModelFiles:
    """The files of one model; nothing is read or fetched before it is asked for, and nothing ever fetched
    unless it `may_fetch`.

    `folder` is None for one on the hub.
    """

    def __init__(self, model: str, *, may_fetch: bool = True) -> None:
        self.model, self._may_fetch = model, may_fetch
        self.folder: Path | None = None
        self._local_gguf: Path | None = None
        self._hub_gguf = ""
        is_hub_name = not Path(model).is_absolute() and not model.startswith((".", "~"))
        if model == BUNDLED:
            self.folder = bundled_folder("target")
        elif os.path.isdir(model):  # unlike Path.is_dir, also False for names that no file system takes
            self.folder = Path(model)
            self._local_gguf = _only_gguf(self.folder)
        elif model in bundled_models():  # a folder of that name here wins, as with names of the hub
            self.folder = bundled_folder(model)
        elif _is_local_gguf(model):
            self._local_gguf = Path(model)
            self.folder = self._local_gguf.parent
        elif is_gguf(model) and is_hub_name and model.count("/") >= 2:
            self._hub_gguf = model.split("/", 2)[2]
        elif is_gguf(model) or os.path.isfile(model) or not is_hub_name or model.count("/") != 1:
            problem = f"there is no folder {model!r}"
            if os.path.isfile(model):
                reason = advice(Path(model), "")
                problem = f"the file {model!r} is no model{reason and f'; {reason}'}"
            elif is_gguf(model):
                problem = f"there is no file {model!r}; on the hub one is owner/name/file.gguf"
            raise InputError(
                f"expected a model folder, a GGUF file or a hub id such as Qwen/Qwen3-0.6B, but {problem}"
            )

    @functools.cached_property
    def gguf(self) -> Path | None:
        """The path of a model that is a GGUF file, of the first one where there are several parts; fetched
        from the hub if need be."""
        if not self._hub_gguf:
            return self._local_gguf
        repository, found = self.model.removesuffix(f"/{self._hub_gguf}"), {}
        for part in parts_of(self._hub_gguf):
            found[part] = hub_file(repository, part, may_fetch=self._may_fetch)
            if found[part] is None:
                raise InputError(
                    f"there is no file {self.model!r} here, and {repository!r} on the hub has no {part}"
                )
        return found[self._hub_gguf]

    @functools.cached_property
    def gguf_file(self) -> GgufFile:
        assert self.gguf is not None
        return GgufFile.read(self.gguf)

    @functools.cached_property
    def scheme(self) -> Scheme | None:
        """How another tool quantised a checkpoint of safetensors; None where none did. Raises `InputError`
        for what is not computed with."""
        return None if self.gguf is not None else scheme_of(self.raw_config(), self.model)

    @property
    def is_packed(self) -> bool:
        """Whether layers can compute with the model as its files pack it."""
        if self.gguf is None:
            return self.scheme is not None
        return not self.gguf_file.loose_matrix

    def filed_sizes(self) -> dict[str, int]:
        """What tensors take in memory as the files pack them; others are of 16 bits."""
        tensors = self.tensors()
        return {
            name: tensors.packed_bytes(name) if tensors.form(name) else 2 * tensors.element_count(name)
            for name in tensors
        }

    @property
    def filed_bytes(self) -> float:
        """What a weight takes on average as the files pack it; 0 where they do not."""
        if not self.is_packed:
            return 0.0
        tensors, sizes = self.tensors(), self.filed_sizes()
        return sum(sizes.values()) / sum(tensors.element_count(name) for name in sizes)

    def precision_beside(self, dtype: str) -> str:
        """The precision in which this model runs beside one that runs in `dtype`."""
        return dtype if dtype != FILED or self.is_packed else ACTIVATIONS[dtype]

    @property
    def gguf_architecture(self) -> str:
        """What a GGUF file calls its architecture; empty for other models."""
        return "" if self.gguf is None else str(self.gguf_file.metadata.get("general.architecture"))

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
        if self.folder is None:
            return hub_file(self.model, name, may_fetch=self._may_fetch)
        path = self.folder / name
        if not path.is_file():
            return None
        check_inside(path, self.folder)
        return path

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is one in the form that fast tokenizers have, or in a GGUF file's metadata."""
        if self.gguf is not None:
            return "tokenizer.ggml.tokens" in self.gguf_file.metadata
        return self.find("tokenizer.json") is not None

    def raw_config(self) -> dict[str, Any]:
        """config.json as it is, without transformers and its imports; of a multimodal model the decoder's
        part of it.

        Raises `InputError` for numbers that no model has; where such a config is of a family that is not
        supported, for that. Families are checked where the model is run: a draft head may be of another.
        """
        path = self.gguf or self.path("config.json")
        whole = read_json(path) if self.gguf is None else config_of(self.gguf_file)
        try:
            check_config(whole, path)
            raw = raw_decoder_config(whole)
            for name, least, otherwise in (("num_hidden_layers", 1, None), ("max_position_embeddings", 2, 2)):
                value = raw.get(name, otherwise)
                if type(value) is not int or value < least:  # what is too large has been refused
                    raise InputError(f"{path}: {name}: expected a number from {least}, got {value!r:.80}")
            return raw
        except InputError:
            check_family(whole, self.model)  # another family's fields have other names and meanings
            raise

    def check_weights(self) -> None:
        """Raises `InputError` when weight files of a local folder are missing, cut short or never written to
        their end; fetches nothing from the hub."""
        if self.gguf is not None:
            check_written(self.gguf_file.tensors.values())
        else:
            for path in self._weight_paths():
                check_written(read_header(path).values())

    def config(self) -> Any:
        """The transformers config, of a multimodal model that of its decoder."""
        with importing():
            from transformers import CONFIG_MAPPING

        raw, name = self.raw_config(), "metadata"  # checked before transformers builds what the file asks for
        if self.gguf is None:
            raw, name = read_json(self.path("config.json")), "config.json"
        kind = raw.get("model_type")
        try:
            if kind not in CONFIG_MAPPING:
                raise ValueError(f"model_type: expected one that transformers knows, got {kind!r:.80}")
            config = decoder_config(CONFIG_MAPPING[kind].from_dict(raw), self.model)
            check_built(config, self.model)
            return config
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - transformers lets out whatever it meets in a broken file
            # Some of these errors say what is wrong on their second line.
            line = first_line(ValueError(" ".join(str(error).split())))
            line = re.sub(r"^Class validation error for validator '\w+': \w+: ", "", line)
            for kinds in (r"expected (\w+),", r"with value .* any type in \((.*?)\)"):
                if field := re.search(rf"[Ff]ield '(\w+)' {kinds}", line):
                    types = (each.strip("<>'").removeprefix("class '") for each in field[2].split(", "))
                    expected = " or ".join(_KINDS.get(each, each) for each in types)
                    line = f"{field[1]}: expected {expected}, got {self.raw_config().get(field[1])!r:.80}"
            raise InputError(f"cannot read the {name} of {self.model!r}: {line}") from None

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """What the model computes. Raises `InputError` for what is not supported."""
        config = self.config()
        family_of(config, self.model)
        return spec_of(config, str(self.gguf or Path(self.folder or self.model, "config.json")))

    def file_map(self) -> dict[str, str]:
        """Tensor name -> file name, by the names that safetensors files have."""
        if (index := self.find("model.safetensors.index.json")) is None:
            if (whole := self.find("model.safetensors")) is None:
                raise InputError(
                    f"model {self.model!r} has no model.safetensors (or model.safetensors.index.json); other "
                    "formats are not loaded: a .bin or .pt "
                    "file is a pickle, which may run code (docs/security.md tells how to convert one)"
                )
            return dict.fromkeys(read_header(whole), whole.name)
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in shards.values()
        ):
            raise InputError(
                f"{index} is broken: expected a weight_map of tensor names to file names beside it, got "
                f"{shards!r:.80}"
            )
        return dict(shards)

    def tensors(self) -> Tensors:
        if self.gguf is not None:
            model, config, found = str(self.gguf), self.raw_config(), self.gguf_file.tensors
            return GgufTensors(model, self.gguf_architecture, config, self.spec, found, found.__getitem__)
        return self.under_scheme(self._safetensors())

    def under_scheme(self, raw: Tensors) -> Tensors:
        """The tensors that a checkpoint's `raw` ones stand for."""
        model, config = self.model, self.raw_config()
        family = FAMILIES.get(str(config.get("model_type")))
        if family is not None and (family.joins_experts or (family.stacked and self.scheme is not None)):
            in_turns = family.joins_experts
            raw = Views(model, raw, joined_experts(model, raw, self.spec.experts, in_turns=in_turns))
        if self.scheme is not None:
            raw = PrequantisedTensors(model, self.scheme, raw)
        if family is not None and family.has_layer_inputs:
            raw = Views(model, raw, layer_views(model, raw, config["num_hidden_layers"]))
        return raw

    def extents(self) -> Extents:
        """The tensors under the names that they have in the files, and where each lies."""
        return self._safetensors() if self.gguf is None else self.gguf_file

    def _safetensors(self) -> SafetensorsTensors:
        return SafetensorsTensors(self.model, self.file_map(), self.path, self.dtypes)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those that the tensors of safetensors files may have."""
        return NUMBERS if self.scheme is None else (*NUMBERS, *LEVELS)

    def config_text(self) -> str:
        return read_text(self.path("config.json")) if self.gguf is None else json.dumps(self.raw_config())

    def fingerprint(self) -> str:
        """Names the content: config, tensor layout, and samples of every weight file (for the hub, its
        revision).

        Equal on all devices that hold the same model, and cheap: a retrained model of the same shape differs.
        """
        digest = hashlib.sha256()
        if self.gguf is not None:
            for path, size in self.gguf_file.headers.items():
                with path.open("rb") as file:
                    digest.update(file.read(size))
                _add_samples(digest, path)
            return digest.hexdigest()[:32]
        config = self.path("config.json")
        digest.update(config.read_bytes())
        if self.folder is None:
            digest.update(config.resolve().parent.name.encode() + config.parent.name.encode())
        for path in self._weight_paths():
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            _add_samples(digest, path)
        return digest.hexdigest()[:32]

    def _weight_paths(self) -> list[Path]:
        return [] if self.folder is None else [*map(self.path, sorted(set(self.file_map().values())))]


def _is_local_gguf(model: str) -> bool:
    """By its name or, as Ollama's blobs have no names, its first bytes."""
    return os.path.isfile(model) and (is_gguf(model) or read_head(Path(model)).startswith(GGUF_MAGIC))


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has one, in one part or several, and no safetensors."""
    found = sorted(path.name for path in folder.iterdir() if is_gguf(path.name))
    is_one = bool(found) and (len(found) == 1 or found == parts_of(found[0]))
    return folder / found[0] if is_one and not any(folder.glob("*.safetensors")) else None


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        for part in range(8):
            file.seek(max(0, (size - _SAMPLE_BYTES) * part // 7))
            digest.update(file.read(_SAMPLE_BYTES))
