"""The names of GGUF files, and of the tensors in them."""

from __future__ import annotations

import itertools
import re

from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.model.families import PLAIN_ROOT, Family
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
STORED_FADING = "linear_attn.A"
"""What a checkpoint's tensor of a layer is called here that holds -e^A_log in the place of A_log."""
_OTHERWISE = {
    STORED_FADING: "ssm_a",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
"""What files call what the gguf package has no name for, by what it is called here."""


def checkpoint_names(architecture: str, family: Family, spec: ModelSpec, has_mtp: bool) -> dict[str, str]:
    """What checkpoints call a model's tensors, by what its GGUF files may call them; with `{}` for an expert
    where a tensor has all of them.

    Names are looked up as llama.cpp's converter does: experts are joined, and everything is a weight or a
    bias.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    (kind,) = [key for key, value in MODEL_ARCH_NAMES.items() if value == architecture]
    table, layers, in_layers = get_tensor_name_map(kind, 1), len(spec.layers), dict[str, str]()
    for layer in dict.fromkeys(spec.layers):
        shape = LayerShape(spec=layer, family=family, hidden=spec.hidden, has_fading=True)
        for parameter in shape.parameters():
            ways = family.ways_to_stack(parameter) or ((family.renamed.get(parameter, parameter),),)
            for name in itertools.chain(*reversed(ways)):  # of matrices that may be joined, each by itself
                known = name.replace("experts.{}.", "experts.").replace(".dt_bias", ".dt_proj.bias")
                known = known.replace("_correction_bias", "_correction.bias")
                known += ".weight" if known.endswith(("sinks", "layer_scalar")) else ""
                stem, _, end = known.rpartition(".")
                if theirs := table.get_name(f"model.layers.0.{stem}"):
                    in_layers[f"{theirs.removeprefix('blk.0.')}.{end}"] = name
                if name in _OTHERWISE:
                    in_layers[_OTHERWISE[name]] = name
    found = {"output.weight": PLAIN_ROOT.lm_head}
    for name in ("embed_tokens", family.last_norm):
        found[f"{table.get_name(f'model.{name}')}.weight"] = f"{PLAIN_ROOT.prefix}{name}.weight"
    prefixes = [f"{PLAIN_ROOT.prefix}layers.{layer}." for layer in range(layers)]
    if family.mtp is not None and has_mtp:
        mtp, stem = family.mtp, family.mtp.prefix.format(layers)
        prefixes.append(stem + mtp.layer)
        for part, leaf in NEXTN_NAMES.items():
            if own := getattr(mtp, part):
                found[f"blk.{layers}.{NEXTN}{leaf}.weight"] = f"{stem}{own}.weight"
    for block, prefix in enumerate(prefixes):
        found |= {f"blk.{block}.{leaf}": prefix + name for leaf, name in in_layers.items()}
    return found
