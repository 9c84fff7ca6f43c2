"""The names of GGUF files."""

from __future__ import annotations

import re

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.DOTALL | re.IGNORECASE)


def is_gguf(model: str) -> bool:
    """Whether a model's name is that of a GGUF file, here or on the hub."""
    return model.lower().endswith(".gguf")


def parts_of(gguf: str) -> list[str]:
    """The names of all files of a GGUF model by one's name: `m-00001-of-00003.gguf` has two others, other
    names have none."""
    found = _PART.fullmatch(gguf)
    if found is None:
        return [gguf]
    return [f"{found[1]}-{number:05}-of-{found[3]}{found[4]}" for number in range(1, int(found[3]) + 1)]


NEXTN = "nextn."
"""How names begin, in a block behind the last layer, of what an MTP layer has beside a decoder layer."""
NEXTN_NAMES = {
    "embedding": "enorm",
    "feature": "hnorm",
    "projection": "eh_proj",
    "last_norm": "shared_head_norm",
    "own_embedding": "embed_tokens",
    "own_lm_head": "shared_head_head",
}
"""What follows, by what `MtpLayout` calls it."""
