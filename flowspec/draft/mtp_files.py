"""Which checkpoints have an MTP layer ("multi-token prediction"), and its tensors under the names of a model
of one layer, as which it is loaded (`mtp_head.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flowspec.errors import InputError
from flowspec.model.families import FAMILIES, PLAIN_ROOT, Family, MtpLayout
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.tensors import NEXTN, NEXTN_NAMES
from flowspec.model.tensors import Tensors, TensorsOver

NONE = "has none that FlowSpec reads"
_LAYER = f"{PLAIN_ROOT.prefix}layers.0."
_EMBEDDING = f"{PLAIN_ROOT.prefix}embed_tokens"
_LM_HEAD = PLAIN_ROOT.lm_head.removesuffix(".weight")


def lacking(model: str, why: str = NONE) -> InputError:
    return InputError(
        "--drafter mtp: expected a model whose checkpoint has a layer that guesses ahead (MTP), as those of "
        f"Qwen3.5, Qwen3.6 and GLM-4.5 do, but {model!r} {why}; give another --drafter"
    )


def has_mtp(files: ModelFiles, config: Any) -> bool:
    """Whether a model's checkpoint has an MTP layer that is read; of one on the hub, by its config."""
    family = FAMILIES.get(config.model_type)
    if files.folder is None:
        return family is not None and family.mtp is not None and getattr(config, family.mtp.count, 0) == 1
    return not _obstacle(files, config, family)


def find_layout(files: ModelFiles, config: Any, family: Family) -> MtpLayout:
    """How a model's checkpoint names its MTP layer; raises `InputError` where it has none that is read."""
    obstacle = _obstacle(files, config, family)
    if obstacle or family.mtp is None:
        raise lacking(files.model, obstacle)
    return family.mtp


def _obstacle(files: ModelFiles, config: Any, family: Family | None) -> str:
    """Why a model's MTP layer cannot be used; empty where it can."""
    if family is None or family.mtp is None:
        return NONE
    prefix = family.mtp.prefix.format(config.num_hidden_layers)
    names: Iterable[str] = ()
    if files.gguf is None:
        names = files.file_map()
    else:
        prefix, names = f"blk.{config.num_hidden_layers}.{NEXTN}", files.gguf_file.tensors
        strange = {
            f"{prefix}{leaf}.weight" for part, leaf in NEXTN_NAMES.items() if not getattr(family.mtp, part)
        }
        if strange & set(names):
            return f"holds {min(strange & set(names))}, for which its family's MTP layer has no place"
    if not any(name.startswith(prefix) for name in names):
        return f"holds no tensor {prefix}*"
    count = getattr(config, family.mtp.count, 1)
    if count != 1:
        return f"has {count!r:.40} by its config.json ({family.mtp.count}), of which FlowSpec runs 1"
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        return "has one with an embedding of its own (mtp_use_dedicated_embeddings)"
    return ""


class MtpTensors(TensorsOver):
    """Over the `raw` tensors of a checkpoint: its MTP layer as the one layer of a model, whose embedding and
    `lm_head` are the `shared` tensors of the checkpoint, one tensor where they are tied, unless the layer
    has its own."""

    def __init__(self, raw: Tensors, layout: MtpLayout, layers: int, shared: tuple[str, str]) -> None:
        super().__init__(raw)
        self._prefix = layout.prefix.format(layers)
        self._layer = self._prefix + layout.layer
        self._beside = {
            f"{_LAYER}entry.embedding": layout.embedding,
            f"{_LAYER}entry.feature": layout.feature,
            f"{_LAYER}entry.projection": layout.projection,
            f"{PLAIN_ROOT.prefix}norm": layout.last_norm,
            _EMBEDDING: layout.own_embedding,
            _LM_HEAD: layout.own_lm_head,
        }
        ours = {theirs: name for name, theirs in self._beside.items() if theirs}
        ends = (f"{_EMBEDDING}.weight", f"{_LM_HEAD}.weight")
        self._shared = dict(zip(ends, dict.fromkeys(shared), strict=False))
        self._files = {name: file for name, file in self._shared.items() if file in raw}
        for file in raw:
            if file.startswith(self._prefix):
                stem, _, leaf = file.removeprefix(self._prefix).rpartition(".")
                name = f"{ours[stem]}.{leaf}" if stem in ours else _LAYER + file.removeprefix(self._layer)
                self._files[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def place(self, name: str) -> tuple[Tensors, str]:
        """By what the checkpoint calls a tensor, or would if it had it."""
        stem, _, leaf = name.rpartition(".")
        theirs = self._beside.get(stem)
        called = f"{self._prefix}{theirs}.{leaf}" if theirs else self._layer + name.removeprefix(_LAYER)
        return self._raw, self._files.get(name, self._shared.get(name, called))
