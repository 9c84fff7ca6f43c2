"""The model families that are parity-tested: by what their layers differ from most, what is around them, and
how a checkpoint names its tensors, after transformers' modeling files.

A family is listed only with a parity test (`tests/model/test_parity.py`); everything else is refused by name
before a weight is read, and what a listed one's config may ask for that is not handled by `spec.py`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from flowspec.core.protocol.model_spec import CONVOLUTION, LINEAR, Norm, Router
from flowspec.errors import InputError


class Root(NamedTuple):
    """Where a checkpoint keeps its decoder: the prefix of its tensors, and the name of `lm_head`'s weight."""

    prefix: str
    lm_head: str


PLAIN_ROOT = Root(prefix="model.", lm_head="lm_head.weight")
_ROOTS = (
    PLAIN_ROOT,
    Root(prefix="model.language_model.", lm_head="lm_head.weight"),
    Root(prefix="language_model.model.", lm_head="language_model.lm_head.weight"),
)
"""The others are of multimodal models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayout:
    """How a checkpoint names its MTP layer, which guesses further tokens.

    `count`: the config's field for how many there are. All its tensors begin with `prefix`, where `{}` is the
    number of the model's layers; those of its decoder layer go on with `layer`. Beside it are the norms of a
    token's `embedding` and of a `feature`, the `projection` of both, the `last_norm`, and where these are
    named, copies of the model's `own_embedding` and `own_lm_head`.
    """

    count: str
    prefix: str
    layer: str
    embedding: str
    feature: str
    projection: str
    last_norm: str
    own_embedding: str = ""
    own_lm_head: str = ""


def config_of_mtp(config: Any) -> Any:
    """The config of a model of one layer that attends, with experts where most layers have them: of the
    decoder layer in an MTP layer."""
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    config.first_k_dense_replace = 0
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`prefix`: how the names of transformers' classes begin. `dense`: by what the family's layers differ
    from the defaults of `Dense`. `has_output_bias`: where linear layers of attention add biases, the last one
    does, too. `norm_eps`, `last_norm`: what the config calls the constant of norms, and a checkpoint the norm
    behind the last layer. `other_layers`: what the config's `layer_types` calls layers that do not attend.
    `is_embedding_scaled`: by the root of its width. `rotary_by_layer_type`: each type of layers has position
    embeddings of its own; `rotary_is_partial`: they may be narrower than a head. `router`: how a mixture's
    rows choose experts. `stacked`: parameters of a layer that checkpoints hold expert by expert, each with
    the tensors that are joined, output rows on output rows, to expert `{}`; `renamed`: those that they only
    call otherwise; `joins_experts`: those of all experts are one tensor. `has_layer_inputs`: layers may take
    something of a token. Fields of the config: `only` may have no other value; `repeated` say once more what
    another says, on which transformers acts; `built_in` older versions of it have in their code instead.
    `mtp`: how checkpoints name a layer that guesses further tokens. `part`: where a multimodal model's config
    has that of the decoder, which alone is run. `layer_names`: what the family calls parts of a layer, by
    their names in most.
    """

    prefix: str
    dense: Mapping[str, Any] = field(default_factory=dict)
    has_output_bias: bool = True
    norm: Norm = "weights"
    norm_eps: str = "rms_norm_eps"
    last_norm: str = "norm"
    other_layers: str = ""
    is_embedding_scaled: bool = False
    rotary_by_layer_type: bool = False
    rotary_is_partial: bool = False
    router: Router = "softmax"
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    joins_experts: bool = False
    has_layer_inputs: bool = False
    only: Mapping[str, Any] = field(default_factory=dict)
    repeated: Mapping[str, str] = field(default_factory=dict)
    built_in: Mapping[str, float] = field(default_factory=dict)
    mtp: MtpLayout | None = None
    part: str = ""
    layer_names: Mapping[str, str] = field(default_factory=dict)

    def ways_to_stack(self, name: str) -> tuple[tuple[str, ...], ...]:
        """The ways in which files may hold a layer's parameter `name` expert by expert, each the tensors of
        expert `{}`: as in `stacked`, or as one tensor; none where it is no such parameter."""
        apart = self.stacked.get(name)
        stem, _, leaf = name.rpartition(".")
        return () if apart is None else (apart, (f"{stem}.{{}}.{leaf}.weight",))

    def root(self, names: Iterable[str]) -> Root:
        """Where a checkpoint with these tensors keeps its decoder; the usual place where it is in none."""
        norm = f"{self.last_norm}.weight"
        return next((root for root in _ROOTS if root.prefix + norm in names), PLAIN_ROOT)

    def accepts(self, architecture: str) -> bool:
        """Whether `architecture` is the class of this family that generates text, old spellings included."""
        kind = architecture.lower().removeprefix(self.prefix.lower())
        return kind in ("forcausallm", "forconditionalgeneration")


_SANDWICH = {
    "norm_after_attention": "post_attention_layernorm",
    "norm_before_mlp": "pre_feedforward_layernorm",
    "norm_after_mlp": "post_feedforward_layernorm",
}


def _stacked(layer: str, file: str, names: tuple[str, str, str]) -> dict[str, tuple[str, ...]]:
    """Experts that a layer has as parameters in `layer`, files as `names` in `file`."""
    gate, up, down = (f"{file}.{name}.weight" for name in names)
    return {f"{layer}.gate_up_proj": (gate, up), f"{layer}.down_proj": (down,)}


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = _stacked("mlp.experts", "mlp.experts.{}", _PROJECTIONS)
_QWEN3_5 = Family(
    prefix="Qwen3_5",
    dense={"query_norm": "head", "is_gated": True},
    norm="1 + weights",
    other_layers=LINEAR,
    rotary_is_partial=True,
    only={
        "attn_output_gate": True,
        "hidden_act": "silu",
        "mamba_ssm_dtype": "float32",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    mtp=MtpLayout(
        count="mtp_num_hidden_layers",
        prefix="mtp.",
        layer="layers.0.",
        embedding="pre_fc_norm_embedding",
        feature="pre_fc_norm_hidden",
        projection="fc",
        last_norm="norm",
    ),
)
_GEMMA4 = Family(
    prefix="Gemma4",
    dense={**_SANDWICH, "query_norm": "head", "scale": 1.0, "has_value_norm": True, "has_factor": True},
    is_embedding_scaled=True,
    rotary_by_layer_type=True,
    router="scaled softmax to 1",
    stacked=_stacked("experts", "experts.{}", _PROJECTIONS),
    has_layer_inputs=True,
)
_MULTIMODAL = {
    "gemma3": Family(
        prefix="Gemma3",
        dense={**_SANDWICH, "query_norm": "head"},
        norm="1 + weights",
        is_embedding_scaled=True,
        rotary_by_layer_type=True,
        only={"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma4": _GEMMA4,
    "gemma4_unified": replace(_GEMMA4, prefix="Gemma4Unified", stacked={}, has_layer_inputs=False),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, prefix="Qwen3_5Moe", stacked=_EXPERTS),
}
FAMILIES = {
    "llama": Family(prefix="Llama"),
    "mistral": Family(prefix="Mistral"),
    "qwen2": Family(prefix="Qwen2", dense={"biases": _QKV}),
    "qwen3": Family(prefix="Qwen3", dense={"query_norm": "head"}),
    "gemma2": Family(
        prefix="Gemma2",
        dense=_SANDWICH,
        norm="1 + weights",
        is_embedding_scaled=True,
    ),
    "phi3": Family(prefix="Phi3", dense={"is_joined": True}, rotary_is_partial=True),
    "smollm3": Family(prefix="SmolLM3"),
    "granite": Family(prefix="Granite"),
    "olmo2": Family(
        prefix="Olmo2",
        dense={**_SANDWICH, "norm_before_attention": "", "norm_before_mlp": "", "query_norm": "width"},
    ),
    "olmoe": Family(prefix="Olmoe", dense={"query_norm": "width"}, stacked=_EXPERTS),
    "qwen3_moe": Family(prefix="Qwen3Moe", dense={"query_norm": "head"}, stacked=_EXPERTS),
    "mixtral": Family(
        prefix="Mixtral",
        router="softmax to 1",
        stacked=_stacked("mlp.experts", "block_sparse_moe.experts.{}", ("w1", "w3", "w2")),
        renamed={"mlp.gate.weight": "block_sparse_moe.gate.weight"},
    ),
    "lfm2": Family(
        prefix="Lfm2",
        dense={
            "activation": "silu",
            "norm_before_attention": "operator_norm",
            "norm_before_mlp": "ffn_norm",
            "query_norm": "head",
        },
        norm_eps="norm_eps",
        last_norm="embedding_norm",
        other_layers=CONVOLUTION,
        layer_names={
            "self_attn.o_proj": "self_attn.out_proj",
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        },
        repeated={
            "block_dim": "hidden_size",
            "block_norm_eps": "norm_eps",
            "conv_dim": "hidden_size",
            "conv_dim_out": "hidden_size",
            "num_heads": "num_attention_heads",
            "theta": "rope_theta",
        },
    ),
    "glm4_moe": Family(
        prefix="Glm4Moe",
        has_output_bias=False,
        rotary_is_partial=True,
        router="sigmoid",
        stacked=_EXPERTS,
        mtp=MtpLayout(
            count="num_nextn_predict_layers",
            prefix="model.layers.{}.",
            layer="",
            embedding="enorm",
            feature="hnorm",
            projection="eh_proj",
            last_norm="shared_head.norm",
            own_embedding="embed_tokens",
            own_lm_head="shared_head.head",
        ),
    ),
    "gpt_oss": Family(
        prefix="GptOss",
        dense={"has_sinks": True},
        router="softmax of chosen",
        stacked={
            **_EXPERTS,
            "mlp.experts.gate_up_proj_bias": ("mlp.experts.{}.gate_proj.bias", "mlp.experts.{}.up_proj.bias"),
            "mlp.experts.down_proj_bias": ("mlp.experts.{}.down_proj.bias",),
        },
        joins_experts=True,
        only={"hidden_act": "silu"},
        built_in={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ),
    **{name: replace(family, part="text_config") for name, family in _MULTIMODAL.items()},
    **{f"{name}_text": family for name, family in _MULTIMODAL.items()},
}


def check_family(raw: Mapping[str, Any], model: str) -> Family:
    """The family of a config; raises `InputError` for one that is not supported, with what keeps it out."""
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is not None:
        return family
    supported = ", ".join(sorted(FAMILIES))
    if not isinstance(raw.get("model_type"), str):
        raise InputError(f"config.json of {model!r} names no family (model_type); FlowSpec runs {supported}")
    advice = ""
    if raw["model_type"].endswith("_assistant"):
        advice = ", which guesses for another model: name that one, and this as --drafter"
    raise InputError(
        f"model {model!r} is of the family {raw['model_type']!r:.80}{advice}, but FlowSpec runs {supported}"
    )


def decoder_config(config: Any, model: str) -> Any:
    """The config of the decoder in a transformers config: a part of it for a multimodal model, else all of
    it.

    Raises `InputError` for values of fields that its family is not run with.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        return config
    decoder = getattr(config, family.part) if family.part else config
    for name, only in family.only.items():
        value = getattr(decoder, name, only)
        if value != only:
            raise InputError(
                f"model {model!r} sets {name} to {value!r:.40}, but FlowSpec runs {config.model_type} with "
                f"{json.dumps(only)} alone"
            )
    for name in ("architectures", "quantization_config", "tie_word_embeddings"):  # the whole's word counts
        if hasattr(config, name):
            setattr(decoder, name, getattr(config, name))
    for name in ("dtype", "eos_token_id"):
        if getattr(decoder, name, None) is None:
            setattr(decoder, name, getattr(config, name, None))
    return decoder


def raw_decoder_config(raw: dict[str, Any]) -> dict[str, Any]:
    """As `decoder_config`, of a config.json as it is; the family's name stays that of the whole.

    Of a draft head in speculators' format, the layer's part beside the head's own fields.
    """
    layer = raw.get("transformer_layer_config")
    if isinstance(layer, dict):
        return {**raw, **layer, "architectures": raw.get("architectures")}
    family = FAMILIES.get(str(raw.get("model_type")))
    part = raw.get(family.part) if family is not None and family.part else None
    return {**raw, **part, "model_type": raw["model_type"]} if isinstance(part, dict) else raw
