"""The names of GGUF files, and of the tensors in them."""

from __future__ import annotations

import itertools
import re
from typing import Any

from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.model.families import Family
from flowspec.model.parts import LayerShape

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
"""How names begin, in a block behind the last layer, of what an MTP layer has besides a decoder layer."""
NEXTN_NAMES = {
    "embedding": "enorm",
    "feature": "hnorm",
    "projection": "eh_proj",
    "last_norm": "shared_head_norm",
    "own_embedding": "embed_tokens",
    "own_lm_head": "shared_head_head",
}
"""What follows, by what `MtpLayout` calls it."""
LAYER_TABLE = "per_layer_token_embd.weight"
OF_ALL_LAYERS = {
    LAYER_TABLE: "table",
    "per_layer_model_proj.weight": "projection",
    "per_layer_proj_norm.weight": "norm",
}
"""Of what the inputs are made that layers of Gemma 4 have of their own, and what a layer's part is called:
columns of the table, rows of the projection, and the norm, which is the same for all."""
OF_KEYS_AND_VALUES = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
STORED_FADING = "linear_attn.A"
"""What a checkpoint's tensor of a layer is called here that holds -e^A_log in the place of A_log."""
_OTHERWISE = {
    STORED_FADING: "ssm_a",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
"""What files call what the gguf package has no name for, by what it is called here."""


def names_in_layers(architecture: str, family: Family, spec: ModelSpec) -> dict[str, str]:
    """What checkpoints call the tensors of a model's layers, by what files call them behind `blk.N.`, of an
    MTP layer too; with `{}` for an expert where a tensor has all of them."""
    table, found = _table(architecture), dict[str, str]()
    for layer in dict.fromkeys(spec.layers):
        shape = LayerShape(spec=layer, family=family, hidden=spec.hidden, has_fading=True)
        for parameter in shape.parameters():
            ways = family.ways_to_stack(parameter) or ((family.renamed.get(parameter, parameter),),)
            for name in itertools.chain(*reversed(ways)):  # of matrices that may be joined, each by itself
                if leaf := _OTHERWISE.get(name) or _leaf(table, name):
                    found[leaf] = name
    return found


def _leaf(table: Any, name: str) -> str:
    """What files call a tensor; empty where they have none. It is looked up as llama.cpp's converter does:
    experts are joined, and everything is a weight or a bias."""
    whole = f"model.layers.0.{name}".replace(".experts.{}.", ".experts.")
    whole = whole.replace("_correction_bias", "_correction.bias").replace(".dt_bias", ".dt_proj.bias")
    if whole.endswith((".sinks", ".layer_scalar")):
        whole += ".weight"
    stem, _, end = whole.rpartition(".")
    theirs = table.get_name(stem)
    return f"{theirs.removeprefix('blk.0.')}.{end}" if theirs else ""


def names_outside(architecture: str, last_norm: str) -> dict[str, str]:
    """As `names_in_layers`, of what is in no layer; `last_norm` as checkpoints call it."""
    table, names = _table(architecture), ("embed_tokens", last_norm)
    return {f"{table.get_name(f'model.{name}')}.weight": f"{name}.weight" for name in names}


def _table(architecture: str) -> Any:
    """The gguf package's names for the tensors of a model of one layer."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (kind,) = [key for key, value in MODEL_ARCH_NAMES.items() if value == architecture]
    return get_tensor_name_map(kind, 1)
