"""Which published files are a block drafter: one that guesses a block of tokens in a pass, from features of
the target (DFlash, arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowspec.errors import InputError
from flowspec.model.files import ModelFiles

ARCHITECTURE = "DFlashDraftModel"
_KINDS = ("dflash", "dspark")
"""What architectures of block drafters have in their names."""
FIELDS = "dflash_config"
_KNOWN = (
    "block_size",
    "final_logit_softcapping",
    "input_embedding_scale",
    "mask_token_id",
    "output_multiplier",
    "target_layer_ids",
)
_BLOCK_MAX = 64


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

    `size` of a block, its first token, which is known, included; the others read `mask`. `layers` of the
    target whose outputs a feature is made of. `is_causal`: whether rows of a block see those before them
    only; None: in layers with a window.
    """

    size: int
    mask: int
    layers: tuple[int, ...]
    is_causal: bool | None
    embedding_scale: float
    logits_scale: float
    logits_cap: float | None

    @staticmethod
    def read(raw: Mapping[str, Any], model: str, layer_count: int, vocabulary: int) -> BlockConfig:
        """For a target of so many layers. Raises `InputError` for what cannot be, and for another kind."""
        names = raw.get("architectures") or [ARCHITECTURE]
        if names != [ARCHITECTURE]:
            raise InputError(
                f"drafter {model!r} is a {names[0]}, which guesses blocks in another way; expected a "
                f"{ARCHITECTURE}"
            )
        own = raw.get(FIELDS)
        if not isinstance(own, dict):
            raise InputError(f"block drafter {model!r}: {FIELDS}: expected its fields, got {own!r:.80}")
        strange = sorted(set(own) - set(_KNOWN))
        if strange:
            raise InputError(
                f"block drafter {model!r}: {FIELDS}: {', '.join(map(str, strange))[:80]} is not supported; "
                f"expected {', '.join(_KNOWN)}"
            )
        found = {name: own.get(name, raw.get(name)) for name in _KNOWN}
        layers = found["target_layer_ids"]
        if (
            not isinstance(layers, list)
            or not layers
            or not all(type(layer) is int and 0 <= layer < layer_count for layer in layers)
            or layers != sorted(set(layers))
        ):
            raise InputError(
                f"block drafter {model!r}: target_layer_ids: expected layers of the target's {layer_count} "
                f"in growing order, got {layers!r:.80}"
            )
        if raw.get("num_target_layers") not in (None, layer_count):
            raise InputError(
                f"block drafter {model!r} is for another model: expected num_target_layers {layer_count}, "
                f"got {raw['num_target_layers']!r:.40}; give the one that was trained for this model"
            )
        size: Any = 16 if found["block_size"] is None else found["block_size"]  # as the published code
        mask: Any = found["mask_token_id"]
        for name, value, least, most in (
            ("block_size", size, 2, _BLOCK_MAX),
            ("mask_token_id", mask, 0, vocabulary - 1),
        ):
            if type(value) is not int or not least <= value <= most:
                raise InputError(
                    f"block drafter {model!r}: {name}: expected {least} to {most}, got {value!r:.40}"
                )
        cap = found["final_logit_softcapping"]
        for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
            value = found[name]
            if value is not None and (type(value) not in (int, float) or not 0 <= value < 1e6):
                raise InputError(f"block drafter {model!r}: {name}: expected a number, got {value!r:.40}")
        if raw.get("is_causal") not in (None, False, True):
            raise InputError(
                f"block drafter {model!r}: is_causal: expected true or false, got {raw['is_causal']!r:.40}"
            )
        return BlockConfig(
            size=size,
            mask=mask,
            layers=tuple(layers),
            is_causal=raw.get("is_causal"),
            embedding_scale=_or_one(found["input_embedding_scale"]),
            logits_scale=_or_one(found["output_multiplier"]),
            logits_cap=float(cap) if cap else None,  # 0 caps nothing in the published code, too
        )


def _or_one(value: float | None) -> float:
    return 1.0 if value is None else float(value)
