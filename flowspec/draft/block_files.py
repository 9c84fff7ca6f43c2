"""Which published files are a block drafter, and what their configs say of blocks: DFlash (arXiv 2602.06036)
and DSpark (DeepSpec)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowspec.errors import InputError
from flowspec.model.files import ModelFiles

DFLASH, DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"
FIELDS = "dflash_config"
_KINDS = ("dflash", "dspark")
"""What architectures of block drafters have in their names."""
_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_OF_DFLASH = ("block_size", "mask_token_id", "target_layer_ids", *_SCALES)
_BLOCK_MAX = 64
_RANK_MAX = 1 << 14


def is_block_drafter(files: ModelFiles) -> bool:
    """Whether a folder holds one, of whatever kind; no weight is read. Its config is otherwise a model's."""
    if files.gguf is not None:
        return False
    raw = files.raw_config()
    names = " ".join(map(str, raw.get("architectures") or ())).lower()
    return FIELDS in raw or any(kind in names for kind in _KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """What a config says of blocks.

    `size` of a block: its first row reads a token that is known, the others `mask`. `guesses_first`: whether
    that row guesses, too, each row then the token after its place; else a row guesses that of its place.
    `captures` make up a feature. `is_causal`: whether rows of a block see those before them only; None: in
    layers with a window. `rank` of what the token before adds to the logits (0: nothing), by way of a gate
    where it `is_gated`.
    """

    size: int
    mask: int
    captures: tuple[int, ...]
    guesses_first: bool = False
    is_causal: bool | None = None
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    rank: int = 0
    is_gated: bool = False

    @property
    def guesses(self) -> int:
        """Places that a block guesses."""
        return self.size if self.guesses_first else self.size - 1

    @staticmethod
    def read(raw: Mapping[str, Any], model: str, layer_count: int, vocabulary: int) -> BlockConfig:
        """For a target of so many layers. Raises `InputError` for what cannot be, and for another kind."""
        names = raw.get("architectures") or [DFLASH]
        if names not in ([DFLASH], [DSPARK]):
            raise InputError(
                f"drafter {model!r} is a {names[0]}, which guesses blocks in another way; expected a "
                f"{DFLASH} or a {DSPARK}"
            )
        reader = _Reader(raw, model)
        read = reader.dflash if names == [DFLASH] else reader.dspark
        return read(layer_count, vocabulary)


class _Reader:
    def __init__(self, raw: Mapping[str, Any], model: str) -> None:
        self._raw, self._model = raw, model
        self._fields = raw

    def dflash(self, layer_count: int, vocabulary: int) -> BlockConfig:
        own = self._raw.get(FIELDS)
        if not isinstance(own, dict):
            raise self._refused(FIELDS, "its fields", own)
        strange = sorted(set(own) - set(_OF_DFLASH))
        if strange:
            raise InputError(
                f"block drafter {self._model!r}: {FIELDS}: {', '.join(map(str, strange))[:80]} is not "
                f"supported; expected {', '.join(_OF_DFLASH)}"
            )
        self._fields = {"block_size": 16, **self._raw, **own}  # 16 as in the published code
        scales = {name: self._fields.get(name) for name in _SCALES}
        for name, value in scales.items():
            if value is not None and (type(value) not in (int, float) or not 0 <= value < 1e6):
                raise self._refused(name, "a number", value)
        embedding, logits, cap = (None if value is None else float(value) for value in scales.values())
        is_causal = self._raw.get("is_causal")
        if is_causal not in (None, False, True):
            raise self._refused("is_causal", "true or false", is_causal)
        return BlockConfig(
            size=self._whole("block_size", 2, _BLOCK_MAX),
            mask=self._whole("mask_token_id", 0, vocabulary - 1),
            captures=self._captures(0, layer_count),
            is_causal=is_causal,
            embedding_scale=1.0 if embedding is None else embedding,
            logits_scale=1.0 if logits is None else logits,
            logits_cap=cap or None,  # 0 caps nothing in the published code, too
        )

    def dspark(self, layer_count: int, vocabulary: int) -> BlockConfig:
        rank = self._whole("markov_rank", 0, _RANK_MAX)
        kind = self._raw.get("markov_head_type")
        if rank and kind not in ("vanilla", "gated"):
            raise self._refused("markov_head_type", "vanilla or gated", kind)
        return BlockConfig(
            size=self._whole("block_size", 1, _BLOCK_MAX),
            mask=self._whole("mask_token_id", 0, vocabulary - 1),
            captures=self._captures(-1, layer_count),
            guesses_first=True,
            is_causal=False,
            rank=rank,
            is_gated=bool(rank) and kind == "gated",
        )

    def _captures(self, least: int, layer_count: int) -> tuple[int, ...]:
        """An output is the next layer's input; -1 is the embedding's."""
        layers = self._fields.get("target_layer_ids")
        if (
            not isinstance(layers, list)
            or not layers
            or not all(type(layer) is int and least <= layer < layer_count for layer in layers)
            or layers != sorted(set(layers))
        ):
            raise self._refused(
                "target_layer_ids", f"layers of the target's {layer_count} in growing order", layers
            )
        stated = self._raw.get("num_target_layers")
        if stated not in (None, layer_count):
            raise InputError(
                f"block drafter {self._model!r} is for another model: expected num_target_layers "
                f"{layer_count}, got {stated!r:.40}; give the one that was trained for this model"
            )
        return tuple(layer + 1 for layer in layers)

    def _whole(self, name: str, least: int, most: int) -> int:
        value = self._fields.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self._refused(name, f"{least} to {most}", value)
        return value

    def _refused(self, name: str, expected: str, got: Any) -> InputError:
        return InputError(f"block drafter {self._model!r}: {name}: expected {expected}, got {got!r:.80}")
