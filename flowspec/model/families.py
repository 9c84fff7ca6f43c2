"""The model families that are parity-tested: by what their layers differ from most, what is around them, and
how a checkpoint names its tensors, after transformers' modeling files.

`spec.py` makes a `ModelSpec` by it, `parts.py` and `weights.py` find the tensors. A family is listed only
with a parity test (`tests/model/test_parity.py`); everything else is refused by name before a weight is read.
`support.py` refuses what a listed family's config may ask for that is not handled.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flowspec.core.protocol.model_spec import Norm, Router
from flowspec.core.protocol.sliding_window import CONVOLUTION, LINEAR
from flowspec.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """Where a checkpoint keeps its decoder: the prefix of its tensors, and the name of `lm_head`'s weight."""

    prefix: str
    lm_head: str


PLAIN_ROOT = Root(prefix="model.", lm_head="lm_head.weight")
_MULTIMODAL_ROOTS = (PLAIN_ROOT, Root(prefix="model.language_model.", lm_head="lm_head.weight"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayout:
    """How a checkpoint names its MTP layer, which guesses further tokens (`draft/mtp_head.py`).

    The config's field `count` says how many there are. All its tensors begin with `prefix`, in which `{}` is
    the number of the model's layers; those of the decoder layer in it go on with `layer`. Beside it are the
    norms of a token's `embedding` and of a `feature`, the `projection` of both, and the `last_norm`.
    `own_embedding` and `own_lm_head` are copies of the model's that may be there; empty: there are none.
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
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Class names `{prefix}DecoderLayer`, `{prefix}RMSNorm`, `{prefix}RotaryEmbedding` in
    `transformers.models.{module}`; `{prefix}Text...` where other parts of the model have such, too.

    `dense`: by what the family's layers differ from the defaults of `Dense`. `attention_biases`: which linear
    layers of attention add one, all where the config says so by `attention_bias`; `has_mlp_biases`: the
    config says by `mlp_bias` whether an MLP's do. `embedding_scale`: what embeddings are multiplied by.
    `rotary_by_layer_type`: each type of layers has position embeddings of its own. `rotary_is_partial`: the
    layers take position embeddings narrower than a head. `stacked`: parameters of a layer that checkpoints
    hold expert by expert, each with the tensors that are joined, output rows on output
    rows, to expert `{}`; `renamed`: those that they only call otherwise; `joins_experts`: those of all
    experts are one, as `joined_experts.py` says; `has_layer_inputs`: layers may take of a token what
    `layer_by_layer.py` says. `router`: how a mixture's rows choose experts. `norm_eps` and `last_norm`: what
    the config calls the constant of norms, and a checkpoint the norm behind the last layer. `other_layers`:
    what the config's `layer_types` calls layers that do not attend. `ignored`: fields of the family's config
    that transformers' code does not act on, with their only value; `repeated`: those that say once more what
    the field says that it acts on; `built_in`: those that older versions of it do not know, with what is in
    their code. `mtp`: how checkpoints name a layer that guesses further tokens. `part`: where a multimodal
    model's config keeps that of the decoder, the part that is run here. `is_multimodal`: texts are generated
    by `{prefix}ForConditionalGeneration`, too. `layer_names`: what the family calls parts of a layer, by
    their names in most.
    """

    module: str
    prefix: str
    dense: Mapping[str, Any] = field(default_factory=dict)
    attention_biases: Literal["", "all", "all but the last", "always all but the last"] = "all"
    has_mlp_biases: bool = False
    norm: Norm = "cast, scale"
    norm_eps: str = "rms_norm_eps"
    last_norm: str = "norm"
    other_layers: str = ""
    embedding_scale: Literal["", "root of hidden", "multiplier"] = ""
    rotary_by_layer_type: bool = False
    rotary_is_partial: bool = False
    router: Router = "softmax"
    roots: tuple[Root, ...] = (PLAIN_ROOT,)
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    joins_experts: bool = False
    has_layer_inputs: bool = False
    ignored: Mapping[str, Any] = field(default_factory=dict)
    repeated: Mapping[str, str] = field(default_factory=dict)
    built_in: Mapping[str, float] = field(default_factory=dict)
    is_multimodal: bool = False
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
        """Where a checkpoint with these tensors keeps its decoder; the family's first place where it is in
        none."""
        norm = f"{self.last_norm}.weight"
        return next((root for root in self.roots if root.prefix + norm in names), self.roots[0])

    def accepts(self, architecture: str) -> bool:
        """Whether `architecture` is the class of this family that generates text, old spellings included."""
        kinds = ("ForCausalLM", "ForConditionalGeneration")[: 1 + self.is_multimodal]
        return architecture.lower() in [f"{self.prefix}{kind}".lower() for kind in kinds]


_SANDWICH = {
    "norm_after_attention": "post_attention_layernorm",
    "norm_before_mlp": "pre_feedforward_layernorm",
    "norm_after_mlp": "post_feedforward_layernorm",
}
_EXPERTS = {
    "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
}
_MIXTRAL = "block_sparse_moe."
_GEMMA3 = Family(
    module="gemma3",
    prefix="Gemma3",
    dense={**_SANDWICH, "query_norm": "head"},
    norm="scale by 1 + w, cast",
    embedding_scale="root of hidden",
    rotary_by_layer_type=True,
    roots=(
        *_MULTIMODAL_ROOTS,
        Root(prefix="language_model.model.", lm_head="language_model.lm_head.weight"),
    ),
    is_multimodal=True,
    ignored={"attn_logit_softcapping": None},
)
_QWEN3_5 = Family(
    module="qwen3_5",
    prefix="Qwen3_5",
    dense={"query_norm": "head", "is_gated": True},
    norm="scale by 1 + w, cast",
    other_layers=LINEAR,
    rotary_is_partial=True,
    roots=_MULTIMODAL_ROOTS,
    is_multimodal=True,
    built_in={"attn_output_gate": True},
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
    module="gemma4",
    prefix="Gemma4",
    dense={**_SANDWICH, "query_norm": "head", "scale": 1.0, "has_value_norm": True, "has_factor": True},
    norm="scale, cast",
    embedding_scale="root of hidden",
    rotary_by_layer_type=True,
    router="scaled softmax to 1",
    stacked={
        "experts.gate_up_proj": ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
        "experts.down_proj": ("experts.{}.down_proj.weight",),
    },
    has_layer_inputs=True,
    roots=_MULTIMODAL_ROOTS,
    is_multimodal=True,
)
_GEMMA4_UNIFIED = replace(
    _GEMMA4,
    module="gemma4_unified",
    prefix="Gemma4Unified",
    has_layer_inputs=False,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    module="qwen3_5_moe",
    prefix="Qwen3_5Moe",
    stacked=_EXPERTS,
)
FAMILIES = {
    "llama": Family(module="llama", prefix="Llama", has_mlp_biases=True),
    "mistral": Family(module="mistral", prefix="Mistral", attention_biases=""),
    "qwen2": Family(module="qwen2", prefix="Qwen2", attention_biases="always all but the last"),
    "qwen3": Family(module="qwen3", prefix="Qwen3", dense={"query_norm": "head"}),
    "gemma2": Family(
        module="gemma2",
        prefix="Gemma2",
        dense=_SANDWICH,
        norm="scale by 1 + w, cast",
        embedding_scale="root of hidden",
    ),
    "gemma3": replace(
        _GEMMA3,
        part="text_config",
        ignored={"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3_text": _GEMMA3,
    "gemma4": replace(_GEMMA4, part="text_config"),
    "gemma4_text": _GEMMA4,
    "gemma4_unified": replace(_GEMMA4_UNIFIED, part="text_config"),
    "gemma4_unified_text": _GEMMA4_UNIFIED,
    "phi3": Family(
        module="phi3",
        prefix="Phi3",
        dense={"is_joined": True},
        attention_biases="",
        rotary_is_partial=True,
    ),
    "smollm3": Family(module="smollm3", prefix="SmolLM3", has_mlp_biases=True),
    "granite": Family(module="granite", prefix="Granite", has_mlp_biases=True, embedding_scale="multiplier"),
    "olmo2": Family(
        module="olmo2",
        prefix="Olmo2",
        dense={**_SANDWICH, "norm_before_attention": "", "norm_before_mlp": "", "query_norm": "width"},
        norm="scale, cast",
    ),
    "olmoe": Family(module="olmoe", prefix="Olmoe", dense={"query_norm": "width"}, stacked=_EXPERTS),
    "qwen3_moe": Family(
        module="qwen3_moe", prefix="Qwen3Moe", dense={"query_norm": "head"}, stacked=_EXPERTS
    ),
    "mixtral": Family(
        module="mixtral",
        prefix="Mixtral",
        attention_biases="",
        router="softmax to 1",
        stacked={
            "mlp.experts.gate_up_proj": (
                _MIXTRAL + "experts.{}.w1.weight",
                _MIXTRAL + "experts.{}.w3.weight",
            ),
            "mlp.experts.down_proj": (_MIXTRAL + "experts.{}.w2.weight",),
        },
        renamed={"mlp.gate.weight": _MIXTRAL + "gate.weight"},
    ),
    "lfm2": Family(
        module="lfm2",
        prefix="Lfm2",
        dense={
            "activation": "silu",
            "norm_before_attention": "operator_norm",
            "norm_before_mlp": "ffn_norm",
            "query_norm": "head",
        },
        attention_biases="",
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
    "qwen3_5": replace(_QWEN3_5, part="text_config"),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5_MOE, part="text_config"),
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "glm4_moe": Family(
        module="glm4_moe",
        prefix="Glm4Moe",
        attention_biases="all but the last",
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
        module="gpt_oss",
        prefix="GptOss",
        dense={"has_sinks": True},
        norm="scale, cast",
        router="softmax of chosen",
        stacked={
            **_EXPERTS,
            "mlp.experts.gate_up_proj_bias": ("mlp.experts.{}.gate_proj.bias", "mlp.experts.{}.up_proj.bias"),
            "mlp.experts.down_proj_bias": ("mlp.experts.{}.down_proj.bias",),
        },
        joins_experts=True,
        ignored={"hidden_act": "silu"},
        built_in={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ),
}


def check_family(raw: Mapping[str, Any], model: str) -> Family:
    """The family of a config; raises `InputError` for one that is not supported, with what keeps it out."""
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is not None:
        return family
    supported = ", ".join(sorted(FAMILIES))
    if not isinstance(raw.get("model_type"), str):
        raise InputError(f"config.json of {model!r} names no family (model_type); FlowSpec runs {supported}")
    raise InputError(
        f"model {model!r} is of the family {raw['model_type']!r:.80}{_obstacle(raw)}, "
        f"but FlowSpec runs {supported}"
    )


_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How classes are called that generate text."""
_STATES = ("mamba_", "ssm_", "linear_num", "conv_L_cache", "state_size", "lru_width")
"""How fields begin of layers that keep a state."""


def _obstacle(raw: Mapping[str, Any]) -> str:
    """What about a config of no supported family is furthest from one, as a clause; empty where nothing says
    so."""
    parts = {name: part for name, part in raw.items() if isinstance(part, Mapping) and part.get("model_type")}
    decoder = next((part for name, part in parts.items() if "text" in name or "llm" in name), None)
    if str(raw.get("model_type")).endswith("_assistant"):
        return ", which guesses for another model: name that one, and this as --drafter"
    if decoder is None and parts:
        return f", whose parts are of {', '.join(str(part['model_type']) for part in parts.values()):.80}"
    fields = raw if decoder is None else decoder
    inner = "" if decoder is None else f", with other parts beside a decoder of {decoder['model_type']!r:.80}"
    named, types = raw.get("architectures"), fields.get("layer_types")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if raw.get("is_encoder_decoder"):
        return ", which has an encoder"
    if architecture and not architecture.endswith(_GENERATING):
        return f", a {architecture:.80}, which does not generate text"
    if (isinstance(types, list) and "linear_attention" in types) or any(
        name.startswith(_STATES) and fields[name] for name in fields
    ):
        return f"{inner}, some of whose layers keep a state instead of keys and values"
    if fields.get("kv_lora_rank"):
        return f"{inner}, which keeps keys and values compressed (MLA)"
    return inner


def decoder_config(config: Any, model: str) -> Any:
    """The config of the decoder in a transformers config: a part of it for a multimodal model, else all of
    it.

    Raises `InputError` when the config asks for what transformers' code of the family does not do.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        return config
    decoder = getattr(config, family.part) if family.part else config
    for name, only in family.ignored.items():
        if getattr(decoder, name, None) != only:
            raise InputError(
                f"model {model!r} sets {name}, which transformers' {config.model_type} does not apply; "
                f"expected {json.dumps(only)}"
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
