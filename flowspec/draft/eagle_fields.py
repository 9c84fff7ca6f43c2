"""What each field of an EAGLE head's config is to FlowSpec: obeyed, known to change nothing, or refused.

A field that nobody here knows is refused where it switches something on (`true`), for that is how publishers
add a step to the network (`norm_output`). Other unknown ones hold words and numbers for those who train or
serve, and are passed over. No field can change a token of an answer, only how often guesses are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowspec.draft import eagle_captures
from flowspec.errors import InputError
from flowspec.model.support import NEUTRAL

_OBEYED = eagle_captures.FIELDS | {
    "draft_vocab_size",
    "fc_norm",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "speculators_model_type",
    "target_hidden_size",
    "tie_word_embeddings",
    "use_aux_hidden_state",
    "use_aux_norm",
    "use_last_layernorm",
    "vocab_size",
}
_BY_TENSORS = frozenset(
    {
        "attention_bias",
        "bias",
        "has_lm_head",
        "mlp_bias",
        "n_routed_experts",
        "num_experts",
        "num_local_experts",
        "qkv_bias",
        "use_qk_norm",
    }
)
"""They say which tensors there are, which the files show themselves. Some are left over from the target's
config: AngelSlim's heads for Hunyuan set `use_qk_norm` and have no such norms."""
_HARMLESS = frozenset(
    {
        "do_sample",
        "embed_requires_grad",  # whether training changed the embedding, which is in the files then
        "is_decoder",
        "return_dict",
        "sliding_window",  # of layers that `layer_types` calls sliding, and of none otherwise
        "use_cache",
        "use_mrope",
        "use_rotary_pos_emb",
    }
)
_FIXED: Mapping[str, tuple[Any, ...]] = {
    **{name: values for name, values in NEUTRAL.items() if name not in _BY_TENSORS},
    "add_para_norm": (None, False),  # HASS: norms before the projection
    "early_stop_method": (None,),  # AngelSlim: outputs of `fc` that are no feature
    "embed_scale": (None, 1),
    "hot_vocab_size": (None,),
    "next_layer_regular": (None, True),
    "parallel_draft_step": (None, 0, 1),
    "use_input_layernorm_in_first_layer": (None, True),  # ModelOpt's word for `hidden_norm`
    "use_mtp_layernorm": (None, False),
    "use_sliding_window": (None, False),
}
"""Fields that change the arithmetic in a way that is not computed here, with the values that do not."""


def fields_of(raw: Mapping[str, Any], head: str) -> dict[str, Any]:
    """A head's fields, those within `eagle_config` among them. Raises `InputError` for one that is not
    computed with."""
    nested = raw.get(eagle_captures.WITHIN)
    if nested is not None and not isinstance(nested, dict):
        raise InputError(f"EAGLE head {head!r}: eagle_config: expected an object, got {nested!r:.40}")
    own = {name: value for name, value in (nested or {}).items() if name not in eagle_captures.FIELDS}
    for name in own.keys() & raw.keys():
        if own[name] != raw[name]:
            raise InputError(
                f"EAGLE head {head!r} sets {name} to {raw[name]!r:.40}, and within eagle_config to "
                f"{own[name]!r:.40}; expected one value"
            )
    fields = {**raw, **own}
    for name, value in fields.items():
        if name in _OBEYED or name in _BY_TENSORS or name in _HARMLESS:
            continue
        if name == "layer_types" and isinstance(value, list) and {*map(str, value)} == {"full_attention"}:
            continue
        if name in _FIXED and value not in _FIXED[name]:
            raise InputError(
                f"EAGLE head {head!r} sets {name} to {value!r:.40}, which FlowSpec does not compute in a "
                "head; give another head for this model"
            )
        if name not in _FIXED and value is True:
            raise InputError(
                f"EAGLE head {head!r} switches on {name}, which FlowSpec does not know; if the network "
                "computes nothing by it, take it out of a copy's config.json"
            )
    return fields


def flag(fields: Mapping[str, Any], name: str, head: str, *, default: bool = False) -> bool:
    """A field that is true or false; raises `InputError` for another value."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"EAGLE head {head!r}: {name}: expected true or false, got {value!r:.40}")
    return value
