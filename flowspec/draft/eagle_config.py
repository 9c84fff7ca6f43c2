"""One form for the EAGLE heads of all publishers: what the network consists of, from its config and tensors.

The published layouts (docs/methods.md):

- SafeAILab's EAGLE-1/2: `fc`, and `layers.0` without `hidden_norm`. `fc` reads embedding and feature, and
  `lm_head` is the target's.
- SafeAILab's EAGLE-3, AngelSlim, SpecForge: `midlayer`. `target_hidden_size` where the head is narrower than
  the target; SpecForge's EAGLE-3.1 has `fc_norm` and `norm_output`.
- ModelOpt: `layers.0.hidden_norm`, flags within `eagle_config`. With `use_aux_hidden_state: false` there is
  no `fc`.
- DeepSpec: norms of queries and keys, five captures, and each layer reads the embedding.
- speculators: `speculators_model_type`. The layers' own config is in `transformer_layer_config`;
  `norm_before_residual`, `norm_before_fc`, `fc_norm`, `norm_output`.

Tensors decide what is there (biases, norms of queries and keys, how a layer reads); flags must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from flowspec.draft.eagle_captures import captures_of
from flowspec.draft.eagle_fields import fields_of, flag
from flowspec.draft.eagle_files import HeadTensors, is_parallel
from flowspec.draft.reading import built_config
from flowspec.errors import InputError
from flowspec.model.families import FAMILIES, Family
from flowspec.model.files import ModelFiles
from flowspec.model.imports import IMPORTING
from flowspec.model.support import check_rotary

Reads = Literal["feature as it is", "normed feature", "normed embedding, normed feature"]
FeatureNorm = Literal["none", "each", "joined"]
_SPECULATORS = "speculators_model_type"
_OF_TARGET = (
    *("model_type", "architectures", "layer_types", "sliding_window"),
    *("num_experts", "num_local_experts", "n_routed_experts"),
)
"""Fields that are left over from the target's config: a head's layers are dense and see all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """What a decoder layer reads, and the name of the norm of its feature."""

    reads: Reads
    norm: str = "input_layernorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head in the one form that the network is built from.

    `layer`: the transformers config of its layers, of `family`. `capture`: as `EagleHead`; each state is
    `target_width` wide. `feature_norm`: of captured states one by one (`fc_norm`), or side by side
    (`input_norm`). `has_fc`: they are projected. Without `has_lm_head` it is the embedding where that
    `is_tied`, else the target's. `is_residual_normed`: to the first layer's output is added
    the feature after its norm. `is_output_normed`: a predicted feature is what the final norm gives.
    """

    kind: str
    layer: Any
    family: Family
    layers: tuple[LayerForm, ...]
    capture: tuple[int, ...]
    target_width: int
    vocabulary: int
    draft_vocabulary: int
    has_fc: bool
    has_norm: bool
    has_lm_head: bool
    is_tied: bool
    feature_norm: FeatureNorm
    is_residual_normed: bool
    is_output_normed: bool


def head_config(files: ModelFiles, tensors: HeadTensors, target: ModelFiles) -> HeadConfig:
    """The form of a head for a target. Raises `InputError` for what is no head, belongs to another target, or
    computes what FlowSpec does not."""
    raw, head, target_config = files.raw_config(), files.model, target.config()
    kind = tensors.kind
    _check_kind(raw, tensors, head)
    if kind is None:
        raise InputError(
            f"{head!r} is no EAGLE head: expected fc.weight and layers.0.* or midlayer.* among its tensors"
        )
    if files.scheme is not None:
        raise InputError(f"EAGLE head {head!r} is quantised; expected float32, bfloat16 or float16")
    fields = fields_of(raw, head)
    family = FAMILIES["qwen3" if "layers.0.self_attn.q_norm.weight" in tensors else "llama"]
    layer = _layer_config(fields, family, head)
    target_width = _target_width(fields, layer, kind, target_config, head, target.model)
    layer_count, vocabulary = target_config.num_hidden_layers, target_config.vocab_size
    reads_captures = kind == "eagle3" and flag(fields, "use_aux_hidden_state", head, default=True)
    if not reads_captures and target_width != layer.hidden_size:
        raise InputError(
            f"EAGLE head {head!r}: expected hidden_size {target_width} as of {target.model!r}, for nothing "
            f"projects its features, got {layer.hidden_size}"
        )
    # Without captured layers a feature is the output after the final norm: SafeAILab's EAGLE-1 reads
    # `outputs[0]` of the model, ModelOpt's `_prepare_eagle_inputs` calls it `out_hiddens`.
    capture = captures_of(raw, layer_count, head, target.model) if reads_captures else (layer_count,)
    draft_vocabulary = fields.get("draft_vocab_size") if kind == "eagle3" else None
    draft_vocabulary = vocabulary if draft_vocabulary is None else draft_vocabulary
    if type(draft_vocabulary) is not int or not 1 <= draft_vocabulary <= vocabulary:
        raise InputError(
            f"EAGLE head {head!r}: draft_vocab_size: expected 1 to {vocabulary} as of {target.model!r}, got "
            f"{draft_vocabulary!r:.80}"
        )
    is_reduced = draft_vocabulary != vocabulary
    has_norm = kind == "eagle3" and flag(fields, "use_last_layernorm", head, default=True)
    is_output_normed = _eagle3_flag(fields, "norm_output", kind, head)
    if is_output_normed and not has_norm:
        raise InputError(f"EAGLE head {head!r} sets norm_output, but has no final norm; expected both")
    return HeadConfig(
        kind=kind,
        layer=layer,
        family=family,
        layers=_layers(tensors, kind, layer.num_hidden_layers, layer.hidden_size, head),
        capture=capture,
        target_width=target_width,
        vocabulary=vocabulary,
        draft_vocabulary=draft_vocabulary,
        has_fc=kind == "eagle" or reads_captures,
        has_norm=has_norm,
        has_lm_head=kind == "eagle3" and (is_reduced or "lm_head.weight" in tensors),
        is_tied=kind == "eagle3" and flag(fields, "tie_word_embeddings", head),
        feature_norm=_feature_norm(fields, tensors, kind, head),
        is_residual_normed=_eagle3_flag(fields, "norm_before_residual", kind, head),
        is_output_normed=is_output_normed,
    )


def _check_kind(raw: Mapping[str, Any], tensors: HeadTensors, head: str) -> None:
    """Refuses by name what has an EAGLE head's tensors and is another network."""
    named = raw.get("architectures")
    names = [str(each).lower() for each in named] if isinstance(named, list) else []
    said = raw.get(_SPECULATORS)
    if said == "peagle" or any("peagle" in name for name in names) or is_parallel(tensors.names):
        raise InputError(
            f"EAGLE head {head!r} guesses several tokens at once (P-EAGLE), which FlowSpec does not run; "
            "expected an EAGLE-1, -2 or -3 head"
        )
    if said not in (None, "eagle3"):
        raise InputError(
            f"EAGLE head {head!r} is of speculators' kind {said!r:.40}, which FlowSpec does not run; "
            "expected eagle3"
        )
    if said is not None and not isinstance(raw.get("norm_before_residual"), bool):
        # Left out, speculators takes it for false and vLLM for true.
        raise InputError(
            f"EAGLE head {head!r}: norm_before_residual: expected true or false, as speculators writes it, "
            f"got {raw.get('norm_before_residual')!r:.40}"
        )
    if str(raw.get("model_type")).startswith("gemma4"):
        raise InputError(f"EAGLE head {head!r} has layers of Gemma 4; expected Llama's or Qwen3's")


def _layer_config(fields: Mapping[str, Any], family: Family, head: str) -> Any:
    """The layers' config as Llama's or Qwen3's, whatever family it names: publishers build one of these."""
    # What is left out is as the class has it that wrote the config: speculators leaves out defaults.
    is_qwen3 = family.prefix == "Qwen3" or (_SPECULATORS in fields and fields.get("model_type") != "llama")
    with IMPORTING:
        from transformers import LlamaConfig, Qwen3Config

    kind = Qwen3Config if is_qwen3 else LlamaConfig
    own = {name: value for name, value in fields.items() if name not in _OF_TARGET}
    config = built_config(partial(kind.from_dict, own), f"EAGLE head {head!r}")
    check_rotary(config, FAMILIES["llama"], head)
    config.attention_bias = config.mlp_bias = False  # each bias is there if its tensor is
    return config


def _target_width(
    fields: Mapping[str, Any], layer: Any, kind: str, target_config: Any, head: str, target: str
) -> int:
    """How wide the target's hidden states are that the head reads."""
    said = fields.get("target_hidden_size")
    name, width = ("hidden_size", layer.hidden_size) if said is None else ("target_hidden_size", said)
    if width != target_config.hidden_size or type(width) is not int:
        raise InputError(
            f"EAGLE head {head!r} is for another model: expected {name} {target_config.hidden_size} as of "
            f"{target!r}, got {width!r:.40}; give the head that was trained for this model"
        )
    return width


def _eagle3_flag(fields: Mapping[str, Any], name: str, kind: str, head: str) -> bool:
    is_on = flag(fields, name, head)
    if is_on and kind == "eagle":
        raise InputError(f"EAGLE head {head!r} sets {name}, which only EAGLE-3 heads have; expected none")
    return is_on


def _feature_norm(fields: Mapping[str, Any], tensors: HeadTensors, kind: str, head: str) -> FeatureNorm:
    is_each = _eagle3_flag(fields, "fc_norm", kind, head) or _eagle3_flag(fields, "use_aux_norm", kind, head)
    is_joined = _eagle3_flag(fields, "norm_before_fc", kind, head)
    if is_each and is_joined:
        raise InputError(
            f"EAGLE head {head!r} sets both fc_norm and norm_before_fc; expected one of them (speculators "
            "refuses it, too)"
        )
    for name, is_on, said in (("fc_norm.0", is_each, "fc_norm"), ("input_norm", is_joined, "norm_before_fc")):
        if f"{name}.weight" in tensors and not is_on:
            raise InputError(
                f"EAGLE head {head!r} has {tensors.published(f'{name}.weight')}, but does not set {said}; "
                "expected both or neither"
            )
    return "each" if is_each else "joined" if is_joined else "none"


def _layers(tensors: HeadTensors, kind: str, count: int, width: int, head: str) -> tuple[LayerForm, ...]:
    """How each layer reads, by its tensors: SafeAILab's and speculators' later layers read what the one
    before gives, DeepSpec's the embedding again."""
    found = []
    for index in range(count):
        norms = [
            name for name in ("input_layernorm", "hidden_norm") if f"layers.{index}.{name}.weight" in tensors
        ]
        if index == 0 and kind == "eagle":
            found.append(LayerForm(reads="feature as it is"))
        elif index == 0:
            found.append(LayerForm(reads="normed embedding, normed feature", norm="hidden_norm"))
        elif len(norms) == 2 and kind == "eagle3":
            if tensors.shape(f"layers.{index}.self_attn.q_proj.weight")[-1] == width:
                raise InputError(
                    f"EAGLE head {head!r} has two norms before layer {index}, which reads one input; "
                    "expected one of them"
                )
            found.append(LayerForm(reads="normed embedding, normed feature", norm="hidden_norm"))
        else:
            # SGLang's later layers have their only norm under the name `hidden_norm`.
            found.append(LayerForm(reads="normed feature", norm=norms[0] if norms else "input_layernorm"))
    return tuple(found)
