"""Published drafters that read the target's features: from configs and names of tensors to a `Layout`, the
one form that `feature_model` computes. What is not computed is refused by name.

- EAGLE heads: SafeAILab's EAGLE-1/2 (`fc` reads embedding and feature; `lm_head` is the target's) and EAGLE-3
  of SafeAILab, AngelSlim, SpecForge, ModelOpt, DeepSpec and speculators. Tensors tell what is there (biases,
  norms of queries and keys, which layers read the embedding), and flags must agree.
- MTP: the layer in a target's own checkpoint that guesses further tokens, loaded as a model of one layer.
- Block drafters: DFlash (arXiv 2602.06036) and DSpark (DeepSpec), whose layers are Qwen3's. DSpark's other
  head, which predicts how often a guess is right, is not read: that is learnt from what comes true.
- Assistants of Gemma 4, whose layers attend to keys and values of the target's last two layers that have
  some of their own, one with a window and one without. What comes into these layers is captured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from flowspec.core.protocol import limits
from flowspec.core.protocol.model_spec import Heads, ModelSpec, Rotary
from flowspec.errors import InputError
from flowspec.model.accelerator import importing
from flowspec.model.arithmetic.arrays import DTYPES, I64, Numbers
from flowspec.model.damage import read_json
from flowspec.model.families import FAMILIES, PLAIN_ROOT, Family, MtpLayout, config_of_mtp
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.tensors import NEXTN, NEXTN_NAMES
from flowspec.model.layer import Layer, Shape, linear_shape, norm_shape, table_shape
from flowspec.model.spec import FULL, NEUTRAL, check_config, check_rotary, family_of, spec_of
from flowspec.model.tensors import Tensors, TensorsOver
from flowspec.model.weight_files import LEVELS, NUMBERS, SafetensorsTensors, read_header, read_pickled
from flowspec.model.weights import end_names, family_named

Shapes = dict[str, tuple[str, Shape]]
"""Of parts by their names in `FeatureModel`: what files call each, and its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A pass guesses a block of `size` rows: the first reads a token that is known, the others `mask`, and
    the last `guesses` guess. `is_causal`: rows of a block see those before them only; None: in layers with a
    window."""

    size: int
    mask: int
    guesses: int
    is_causal: bool | None


class KeySource(NamedTuple):
    """Parts whose names begin with `prefix`, maybe a `norm` among them, make keys and values of a feature's
    numbers from `first` on."""

    prefix: str
    heads: Heads
    rotary: Rotary
    first: int = 0
    norm: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """What a drafter's network consists of, its `shapes` and those of parts `of_target`.

    `spec`: of its layers, and how embeddings are scaled and logits finished, after they are multiplied by
    `logits_scale`. `captures`: the target's hidden states of a feature: c is the input of layer c, and the
    number of layers the output after the final norm. `feature_width`: of what a row reads of a feature (0:
    none does). `key_sources` make keys of features, one for each layer of a cache; `attends`: to which of
    these each layer of the network does, where it is not the same. `is_output_normed`: a predicted feature is
    what the final norm gives. `rank`: of what the token before adds to logits. `clusters` `[clusters,
    tokens]`: only tokens of the nearest `clusters_chosen` are scored. `target_ids`: of each draft id, None
    where they are the same. `is_in_target`: `tensors` are of a model of one layer, packed as the target's.
    """

    spec: ModelSpec
    captures: tuple[int, ...]
    tensors: Tensors
    shapes: Shapes = field(default_factory=dict)
    of_target: Shapes = field(default_factory=dict)
    feature_width: int = 0
    key_sources: tuple[KeySource, ...] = ()
    attends: tuple[int, ...] = ()
    is_output_normed: bool = False
    logits_scale: float = 1.0
    block: Block | None = None
    rank: int = 0
    clusters: I64 | None = None
    clusters_chosen: int = 0
    target_ids: I64 | None = None
    is_in_target: bool = False


class DrafterTensors(SafetensorsTensors):
    """Those of a drafter's files, of which some are pickled. Raises `InputError` where a file is missing."""

    def __init__(self, files: ModelFiles) -> None:
        file_of = _tensor_files(files)
        for file in sorted({*file_of.values()}):
            files.path(file)
        read = read_pickled if _PICKLED in file_of.values() else read_header
        super().__init__(files.model, file_of, files.path, (*NUMBERS, *LEVELS, "BOOL"), read)

    def copy_into(self, name: str, part: Numbers) -> None:
        found = self.load(name, part.shape)
        if found.dtype.kind != "f" and found.dtype != DTYPES["bfloat16"]:
            raise InputError(
                f"tensor {name} of {self.model!r} is {found.dtype}; expected float32, bfloat16 or float16"
            )
        super().copy_into(name, part)


_PICKLED = "pytorch_model.bin"


def _tensor_files(files: ModelFiles) -> Mapping[str, str]:
    """The file of each tensor."""
    names = "model.safetensors", "model.safetensors.index.json"
    path = None if any(map(files.find, names)) else files.find(_PICKLED)
    return files.file_map() if path is None else dict.fromkeys(read_pickled(path), _PICKLED)


class _Config:
    """The fields of a config, which are refused with what was expected; `name`: of the drafter."""

    def __init__(self, kind: str, files: ModelFiles, fields: Mapping[str, Any]) -> None:
        self.name, self.fields = f"{kind} {files.model!r}", fields

    def refusal(self, name: str, expected: str) -> InputError:
        return InputError(f"{self.name}: {name}: expected {expected}, got {self.fields.get(name)!r:.80}")

    def flag(self, name: str) -> bool | None:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def whole(self, name: str, least: int, most: int) -> int:
        value = self.fields.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(name, f"{least} to {most}")
        return value

    def real(self, name: str) -> float | None:
        value = self.fields.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 <= value < 1e6):
            raise self.refusal(name, "a number")
        return None if value is None else float(value)

    def build(self, family: str, fields: Mapping[str, Any]) -> Any:
        """The transformers config of a family."""
        with importing():
            from transformers import AutoConfig
        try:
            return AutoConfig.for_model(family, **fields)
        except Exception as error:  # noqa: BLE001 - transformers lets out whatever it meets in a broken file
            line = " ".join(str(error).split())
            raise InputError(f"cannot read the config.json of {self.name}: {line:.200}") from None

    def check_fits(self, target: ModelFiles, name: str, expected: int, got: Any) -> None:
        if got != expected or type(got) is not int:
            raise InputError(
                f"{self.name} is for another model: expected {name} {expected} as of {target.model!r}, got "
                f"{got!r:.40}; give the one that was trained for this model"
            )

    def check_all_used(self, tensors: Tensors, shapes: Shapes, unused: Collection[str]) -> None:
        """Refuses tensors that are no part's and not among `unused`."""
        known = {stem + end for stem, shape in shapes.values() for end in shape.parameters}
        if unknown := ", ".join(sorted({*tensors} - known - {*unused})[:3]):
            raise InputError(
                f"{self.name} has tensors that its config.json gives no use for, {unknown}: not supported"
            )


# ----------------------------------------------------------------------------------------------- EAGLE


_LAYERS_MAX = 4
"""Of a head: of those published most have one, some two, and four those that guess all at once."""
_SINGLE = "midlayer."
"""What SafeAILab, SpecForge and AngelSlim call the one layer of a head."""
_SPECULATORS = "speculators_model_type"
_WITHIN, _CAPTURED = "eagle_config", "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
"""Steps of the arithmetic that EAGLE-3 heads may have."""
_OF_TARGET = ("num_experts", "num_local_experts", "n_routed_experts", "sliding_window")
"""Fields that are left over from the target's config: a head's layers are dense and see all."""
_HARMLESS = (
    *("attention_bias", "bias", "has_lm_head", "mlp_bias", "qkv_bias", "use_qk_norm"),  # as tensors show
    *("do_sample", "embed_requires_grad", "is_decoder", "return_dict", "tie_word_embeddings"),
    *("use_cache", "use_mrope", "use_rotary_pos_emb", *_OF_TARGET),
)
_FIXED: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL,
    "add_para_norm": (None, False),  # HASS: norms before the projection
    "early_stop_method": (None,),  # AngelSlim: outputs of `fc` that are no feature
    "embed_scale": (None, 1),
    "hot_vocab_size": (None,),
    "next_layer_regular": (None, True),
    "parallel_draft_step": (None, 0, 1),
    "use_aux_hidden_state": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),  # ModelOpt's word for `hidden_norm`
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": (None, False),
    "use_sliding_window": (None, False),
}
"""Fields that change the arithmetic in a way that is not computed here, with the values that do not."""


def eagle_version(names: Collection[str]) -> int:
    """By the names of tensors 1 (or 2, which is the same network), 3, or 0 for any other network."""
    is_single = any(name.startswith(_SINGLE) for name in names)
    of_blocks = ("hidden_norm.weight", "markov_head.", "confidence_head.")
    has_layer = is_single or any(name.startswith("layers.0.") for name in names)
    if not has_layer or any(name.startswith(of_blocks) for name in names):
        return 0
    return 3 if is_single or "layers.0.hidden_norm.weight" in names else int("fc.weight" in names)


def is_eagle(files: ModelFiles) -> bool:
    """Whether a folder holds an EAGLE head and not a model. No weight is read."""
    count = None if files.gguf is not None else files.raw_config().get("num_hidden_layers")
    return type(count) is int and count <= _LAYERS_MAX and eagle_version(_tensor_files(files)) > 0


def read_eagle(files: ModelFiles, tensors: DrafterTensors) -> tuple[int, _Config, ModelSpec, Shapes]:
    """Of a head its version, fields, layers, and their parts. Raises `InputError` for what is no head, and
    for one that computes what FlowSpec does not."""
    raw, names = files.raw_config(), [*tensors]
    version = eagle_version(names)
    _check_eagle(raw, names, files.model)
    if not version:
        raise InputError(
            f"{files.model!r} is no EAGLE head: expected fc.weight and layers.0.* or midlayer.* among its "
            "tensors"
        )
    config = _Config("EAGLE head", files, _eagle_fields(raw, files.model, version))
    if files.scheme is not None:
        raise InputError(f"{config.name} is quantised; expected float32, bfloat16 or float16")
    fields, is_single = config.fields, any(name.startswith(_SINGLE) for name in names)
    # What is left out is as the class has it that wrote the config: speculators leaves out defaults.
    has_query_norm = any(name.endswith("self_attn.q_norm.weight") for name in names)
    is_qwen3 = has_query_norm or (_SPECULATORS in fields and fields.get("model_type") != "llama")
    idle = *_OF_TARGET, "model_type", "architectures", "layer_types"
    own = {name: value for name, value in fields.items() if name not in idle}
    built = config.build("qwen3" if is_qwen3 else "llama", own)
    check_rotary(built, FAMILIES["llama"], files.model)
    spec, layers, shapes = spec_of(built), [], Shapes()
    for index, layer in enumerate(spec.layers):
        at = _SINGLE if is_single and index == 0 else f"layers.{index}."
        # SafeAILab's and speculators' later layers read what the one before gives, DeepSpec's the embedding,
        # too. SGLang's have their only norm under the name `hidden_norm`.
        is_wide = index == 0 or tensors.shape(f"{at}self_attn.q_proj.weight")[-1] != spec.hidden
        reads_both = version == 3 and is_wide
        norm = "hidden_norm" if reads_both or f"{at}hidden_norm.weight" in tensors else "input_layernorm"
        biases = [name for name in names if name.startswith(at) and name.endswith(".bias")]
        assert layer.dense is not None, "its layers are of a dense family"
        dense = structs.replace(
            layer.dense,
            biases=tuple(sorted(name.removeprefix(at).removesuffix(".bias") for name in biases)),
            norm_before_attention=norm if version == 3 or index else "",
            embedding_norm="input_layernorm" if reads_both else "",
            is_residual_normed=index == 0 and bool(fields.get("norm_before_residual")),
            query_norm="head" if has_query_norm else "",
        )
        layers.append(structs.replace(layer, dense=dense))
        shape = Layer(spec=layers[-1], family=FAMILIES["llama"], hidden=spec.hidden)
        shapes |= _layer_shapes(f"layers.{index}.", at, shape)
    return version, config, structs.replace(spec, layers=tuple(layers)), shapes


def eagle_layout(files: ModelFiles, target: ModelFiles) -> Layout:
    """That of an EAGLE head for a target. Raises `InputError`."""
    tensors, whole = DrafterTensors(files), target.spec
    version, config, spec, shapes = read_eagle(files, tensors)
    fields, is_third = config.fields, version == 3
    width, vocabulary, count = spec.hidden, whole.vocabulary, len(whole.layers)
    read = fields.get("target_hidden_size")
    name, read = ("hidden_size", width) if read is None else ("target_hidden_size", read)
    config.check_fits(target, name, whole.hidden, read)
    # EAGLE-1 reads `outputs[0]` of the model, which is behind the final norm.
    captures = captures_of(files.raw_config(), count, files.model, target.model) if is_third else (count,)
    drafted = vocabulary
    if is_third and fields.get("draft_vocab_size") is not None:
        drafted = config.whole("draft_vocab_size", 1, vocabulary)

    def linear(name: str, outputs: int, inputs: int) -> tuple[str, Shape]:
        return name, linear_shape(outputs, inputs, f"{name}.bias" in tensors)

    each, joined, is_normed, is_tied = (
        is_third and bool(config.flag(name))
        for name in ("fc_norm", "norm_before_fc", "norm_output", "tie_word_embeddings")
    )
    if each and joined:
        raise InputError(
            f"{config.name} sets both fc_norm and norm_before_fc; expected one of them (speculators refuses "
            "it, too)"
        )
    inputs = whole.hidden * len(captures)
    if joined:
        shapes["state_norm.0"] = "input_norm", norm_shape(inputs)
    for place in range(len(captures) * each):
        shapes[f"state_norm.{place}"] = f"fc_norm.{place}", norm_shape(whole.hidden)
    if is_third:
        shapes |= {"project": linear("fc", width, inputs), "norm": ("norm", norm_shape(width))}
    else:
        shapes["entry.projection"] = linear("fc", width, 2 * width)
    of_target: Shapes = {}
    embedding = "embed_tokens", table_shape(vocabulary, width)
    (shapes if "embed_tokens.weight" in tensors else of_target)["embed_tokens"] = embedding
    if is_third and (drafted != vocabulary or "lm_head.weight" in tensors):
        shapes["lm_head"] = linear("lm_head", drafted, width)
    elif not is_tied:
        of_target["lm_head"] = "lm_head", linear_shape(vocabulary, width)
        spec = structs.replace(spec, logit_divisor=whole.logit_divisor, logit_cap=whole.logit_cap)
    if of_target and width != whole.hidden:
        raise InputError(
            f"{config.name} has no {next(iter(of_target))}.weight, and its hidden_size is not the target's; "
            "expected one in its files"
        )
    unused = {"d2t", "t2d"} if is_third else {"lm_head.weight"}
    unused |= {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    config.check_all_used(tensors, shapes, unused)
    return Layout(
        spec=spec,
        captures=captures,
        tensors=tensors,
        shapes=shapes,
        of_target=of_target,
        feature_width=width,
        is_output_normed=is_normed,
        target_ids=_target_ids(tensors, drafted, vocabulary, config) if is_third else None,
    )


def _check_eagle(raw: Mapping[str, Any], names: Collection[str], head: str) -> None:
    """Refuses by name what has an EAGLE head's tensors and is another network."""
    said, residual = raw.get(_SPECULATORS), raw.get("norm_before_residual")
    is_parallel = any(name.startswith(("mask_hidden", "parallel_draft_heads.")) for name in names)
    why = ""
    if said == "peagle" or "peagle" in str(raw.get("architectures")).lower() or is_parallel:
        why = " guesses several tokens at once (P-EAGLE), which FlowSpec does not run; expected an EAGLE-1, "
        why += "-2 or -3 head"
    elif said not in (None, "eagle3"):
        why = f" is of speculators' kind {said!r:.40}, which FlowSpec does not run; expected eagle3"
    elif said is not None and not isinstance(residual, bool):
        # Left out, speculators takes it for false and vLLM for true.
        why = ": norm_before_residual: expected true or false, as speculators writes it, "
        why += f"got {residual!r:.40}"
    elif str(raw.get("model_type")).startswith("gemma4"):
        why = " has layers of Gemma 4; expected Llama's or Qwen3's"
    if why:
        raise InputError(f"EAGLE head {head!r}{why}")


def _eagle_fields(raw: Mapping[str, Any], head: str, version: int) -> dict[str, Any]:
    """A head's fields, those within `eagle_config` among them.

    One that nobody here knows is refused where it switches something on (`true`), for that is how publishers
    add a step to the network. Others hold words and numbers for those who train or serve. No field can change
    a token of an answer, only how often guesses are right.
    """
    nested = raw.get(_WITHIN)
    if nested is not None and not isinstance(nested, dict):
        raise InputError(f"EAGLE head {head!r}: eagle_config: expected an object, got {nested!r:.40}")
    own = {name: value for name, value in (nested or {}).items() if name != _CAPTURED}
    for name in own.keys() & raw.keys():
        if own[name] != raw[name]:
            raise InputError(
                f"EAGLE head {head!r} sets {name} to {raw[name]!r:.40}, and within eagle_config to "
                f"{own[name]!r:.40}; expected one value"
            )
    fields = {**raw, **own}
    for name, value in fields.items():
        is_full = name == "layer_types" and isinstance(value, list) and {*map(str, value)} <= {FULL}
        if name in _HARMLESS or is_full or (version == 3 and name in _FLAGS):
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


def captures_of(raw: Mapping[str, Any], layer_count: int, head: str, target: str) -> tuple[int, ...]:
    """The captures of an EAGLE-3 head with this config, for a target of `layer_count` layers, in growing
    order. Raises `InputError` for layers that the target does not have or FlowSpec does not send.

    Publishers count inputs of layers in `eagle_aux_hidden_state_layer_ids` beside the other fields (vLLM's
    `gpu_model_runner`, speculators' `resolve_target_layer_ids`), and outputs, one less, within `eagle_config`
    (SGLang's `set_eagle3_layers_to_capture`, ModelOpt's `hf_eagle.py`), in `target_layer_ids` (DeepSpec's
    `extract_eagle3_context_feature`) and `aux_hidden_states_layer_ids` (AngelSlim's
    `target_model_wrapper.py`). Where a head says nothing, all take 2, the middle and 3 before the end.
    """
    default, within = (2, layer_count // 2, layer_count - 3), raw.get(_WITHIN)
    said = [(name, raw.get(name)) for name in (_CAPTURED, "target_layer_ids", "aux_hidden_states_layer_ids")]
    said.append((f"{_WITHIN}.{_CAPTURED}", within.get(_CAPTURED) if isinstance(within, dict) else None))
    found: dict[tuple[int, ...], str] = {}
    for name, value in said:
        if not value:
            continue
        is_list = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
        if not is_list or len(value) > limits.CAPTURES_MAX or value != sorted(set(value)):
            raise InputError(
                f"EAGLE head {head!r}: {name}: expected up to {limits.CAPTURES_MAX} numbers of layers in "
                f"growing order, got {value!r:.80}"
            )
        # Within `eagle_config` some count inputs after all (SGLang's `deepseek_v2.py` tells how it finds
        # out). The default, counted so, is nobody's list of outputs.
        is_input = name == _CAPTURED or tuple(value) == default or value[-1] == layer_count
        found.setdefault(tuple(each + (not is_input) for each in value), name)
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise InputError(
            f"EAGLE head {head!r}: {first} means the inputs of layers {list(one)}, but {second} those of "
            f"{list(other)}; expected the same ones"
        )
    captures, name = next(iter(found.items()), (default, ""))
    if not found and layer_count < 7:
        raise InputError(f"EAGLE-3 needs a target of 7 layers or more, but {target!r} has {layer_count}")
    if captures[-1] == layer_count:
        raise InputError(
            f"EAGLE head {head!r} reads what leaves the last layer of {target!r} before its final norm "
            f"({name}), which FlowSpec does not send; expected layers before it"
        )
    if captures[-1] > layer_count:
        raise InputError(
            f"EAGLE head {head!r} reads the inputs of layers {list(captures)} ({name}), but {target!r} has "
            f"{layer_count}; give the head that was trained for this model"
        )
    return captures


def _target_ids(tensors: Tensors, drafted: int, vocabulary: int, config: _Config) -> I64 | None:
    """`d2t` holds the distance of every draft id from its target id."""
    if drafted == vocabulary and "d2t" not in tensors:
        return None
    distances = tensors.load("d2t", (drafted,))
    if distances.dtype.kind != "i":
        raise InputError(f"{config.name}: expected d2t to hold whole numbers")
    ids = np.arange(drafted) + distances.astype(np.int64)
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= vocabulary:
        raise InputError(
            f"{config.name}: expected d2t to lead to ids below {vocabulary}, got {least} to {most}"
        )
    return ids if drafted != vocabulary or distances.any() else None


def _layer_shapes(prefix: str, at: str, shape: Layer) -> Shapes:
    """Of a layer that is called `prefix` here, and `at` in files."""
    return {f"{prefix}{name}": (f"{at}{stem}", each) for name, (stem, each) in shape.places.items()}


# ------------------------------------------------------------------------------------------------- MTP


_NO_MTP = "has none that FlowSpec reads"
_LAYER = f"{PLAIN_ROOT.prefix}layers.0."


def no_mtp(model: str, why: str = _NO_MTP) -> InputError:
    return InputError(
        "--drafter mtp: expected a model whose checkpoint has a layer that guesses ahead (MTP), as those of "
        f"Qwen3.5, Qwen3.6 and GLM-4.5 do, but {model!r} {why}; give another --drafter"
    )


def has_mtp(files: ModelFiles, config: Any) -> bool:
    """Whether a model's checkpoint has an MTP layer that is read; of one on the hub, by its config."""
    family = FAMILIES.get(config.model_type)
    if files.folder is None:
        return family is not None and family.mtp is not None and getattr(config, family.mtp.count, 0) == 1
    return not _mtp_obstacle(files, config, family)


def mtp_layout(target: ModelFiles) -> Layout:
    """That of the MTP layer of a model; raises `InputError` where its checkpoint has none.

    A feature is the model's hidden state behind its final norm: so in vLLM (`qwen3_5_mtp`, `glm4_moe_mtp`),
    SGLang (`qwen3_5_mtp`, `glm4_moe_nextn`) and llama.cpp. vLLM alone has the embedding of a text's second
    token be zero in GLM-4.5's layer; here it is what it is, as in SGLang.
    """
    config, whole, raw = target.config(), target.spec, target.tensors()
    family = family_named(whole)
    obstacle = _mtp_obstacle(target, config, family)
    if obstacle or family.mtp is None:
        raise no_mtp(target.model, obstacle)
    spec = spec_of(config_of_mtp(config))
    (layer,) = spec.layers
    assert layer.dense is not None, "there is an operation for everything"
    layer = structs.replace(layer, dense=structs.replace(layer.dense, has_entry=True))
    return Layout(
        spec=structs.replace(spec, layers=(layer,)),
        captures=(len(whole.layers),),
        tensors=MtpTensors(raw, family.mtp, len(whole.layers), end_names(whole, raw)),
        feature_width=whole.hidden,
        is_output_normed=True,
        is_in_target=True,
    )


def _mtp_obstacle(files: ModelFiles, config: Any, family: Family | None) -> str:
    """Why a model's MTP layer cannot be used; empty where it can."""
    if family is None or family.mtp is None:
        return _NO_MTP
    prefix = family.mtp.prefix if files.gguf is None else f"blk.{{}}.{NEXTN}"
    prefix = prefix.format(config.num_hidden_layers)
    names = {*(files.file_map() if files.gguf is None else files.gguf_file.tensors)}
    unknown = (leaf for part, leaf in NEXTN_NAMES.items() if not getattr(family.mtp, part))
    strange = names & {f"{prefix}{leaf}.weight" for leaf in unknown}
    if files.gguf is not None and strange:
        return f"holds {min(strange)}, for which its family's MTP layer has no place"
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
        prefix = layout.prefix.format(layers)
        embedding, lm_head = f"{PLAIN_ROOT.prefix}embed_tokens.", PLAIN_ROOT.lm_head.removesuffix("weight")
        parts = {
            f"{_LAYER}entry.embedding.": layout.embedding,
            f"{_LAYER}entry.feature.": layout.feature,
            f"{_LAYER}entry.projection.": layout.projection,
            f"{PLAIN_ROOT.prefix}norm.": layout.last_norm,
            embedding: layout.own_embedding,
            lm_head: layout.own_lm_head,
        }
        self._begins = {ours: f"{prefix}{theirs}." for ours, theirs in parts.items() if theirs}
        self._begins[_LAYER] = prefix + layout.layer
        ends = f"{embedding}weight", f"{lm_head}weight"
        self._files = dict(zip(ends, dict.fromkeys(shared), strict=False))
        for file in (file for file in raw if file.startswith(prefix)):
            begins = ((o, t) for o, t in self._begins.items() if file.startswith(t))
            ours, theirs = next(begins, (_LAYER, ""))
            self._files[ours + file.removeprefix(theirs)] = file

    def __contains__(self, name: str) -> bool:
        return self._files.get(name, "") in self._raw

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def place(self, name: str) -> tuple[Tensors, str]:
        """By what the checkpoint calls a tensor, or would if it had it."""
        begins = (
            theirs + name.removeprefix(ours) for ours, theirs in self._begins.items() if name.startswith(ours)
        )
        return self._raw, self._files.get(name) or next(begins, name)


# ---------------------------------------------------------------------------------------------- blocks


_DFLASH, _DSPARK = "DFlashDraftModel", "Qwen3DSparkModel"
_DFLASH_CONFIG = "dflash_config"
_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_OF_DFLASH = ("block_size", "mask_token_id", "target_layer_ids", *_SCALES)
_OF_BLOCKS = ("architectures", "auto_map", "is_causal", "model_type", _DFLASH_CONFIG)
"""Fields that are not of its layers."""
_BLOCK_MAX = 64
_RANK_MAX = 1 << 14


def is_block_drafter(files: ModelFiles) -> bool:
    """Whether a folder holds one, of whatever kind; no weight is read. Its config is otherwise a model's."""
    raw = files.raw_config() if files.gguf is None else {}
    names = " ".join(map(str, raw.get("architectures") or ())).lower()
    return _DFLASH_CONFIG in raw or "dflash" in names or "dspark" in names


def block_layout(files: ModelFiles, target: ModelFiles) -> Layout:
    """That of a block drafter for a target, after `DFlashDraftModel` and `Qwen3DSparkModel` of the authors'
    code. Raises `InputError` for what cannot be, for another kind, and for one of another target."""
    raw, model, whole = files.raw_config(), files.model, target.spec
    config = _Config("block drafter", files, raw)
    if files.scheme is not None:
        raise InputError(f"{config.name} is quantised; expected float32, bfloat16 or float16")
    names = raw.get("architectures") or [_DFLASH]
    if names not in ([_DFLASH], [_DSPARK]):
        raise InputError(
            f"drafter {model!r} is a {names[0]}, which guesses blocks in another way; expected a {_DFLASH} "
            f"or a {_DSPARK}"
        )
    is_dspark, own, count = names == [_DSPARK], raw.get(_DFLASH_CONFIG), len(whole.layers)
    if not is_dspark:
        if not isinstance(own, dict):
            raise config.refusal(_DFLASH_CONFIG, "its fields")
        if strange := sorted(map(str, set(own) - set(_OF_DFLASH))):
            raise InputError(
                f"{config.name}: {_DFLASH_CONFIG}: {', '.join(strange)[:80]} is not supported; expected "
                f"{', '.join(_OF_DFLASH)}"
            )
        fields = {"block_size": 16, **raw, **own}  # as in the published code
        config = _Config("block drafter", files, fields)
    scale, multiplier, cap = (None if is_dspark else config.real(name) for name in _SCALES)
    rank = config.whole("markov_rank", 0, _RANK_MAX) if is_dspark else 0
    if rank and raw.get("markov_head_type") not in ("vanilla", "gated"):
        raise config.refusal("markov_head_type", "vanilla or gated")
    size = config.whole("block_size", 2 - is_dspark, _BLOCK_MAX)
    block = Block(
        size=size,
        mask=config.whole("mask_token_id", 0, whole.vocabulary - 1),
        guesses=size - 1 + is_dspark,  # in a DSpark the row of the known token guesses, too
        is_causal=False if is_dspark else config.flag("is_causal"),
    )
    outputs = config.fields.get("target_layer_ids")
    least = -1 if is_dspark else 0  # -1 is the embedding's
    if not isinstance(outputs, list) or any(type(each) is not int for each in outputs):
        outputs = []
    if not outputs or outputs != sorted({*outputs}) or outputs[0] < least or outputs[-1] >= count:
        raise config.refusal("target_layer_ids", f"layers of the target's {count} in growing order")
    captures = tuple(each + 1 for each in outputs)  # an output is the next layer's input
    config.check_fits(target, "num_target_layers", count, raw.get("num_target_layers") or count)
    built = config.build("qwen3", {name: raw[name] for name in raw if name not in _OF_BLOCKS})
    family_of(built, model)
    spec = spec_of(built)
    config.check_fits(target, "hidden_size", whole.hidden, spec.hidden)
    config.check_fits(target, "vocab_size", whole.vocabulary, spec.vocabulary)
    tensors, hidden, vocabulary = DrafterTensors(files), spec.hidden, spec.vocabulary
    shapes: Shapes = {
        "norm": ("norm", norm_shape(hidden)),
        "project": ("fc", linear_shape(hidden, len(captures) * hidden)),
        "feature_norm": ("hidden_norm", norm_shape(hidden)),
    }
    for index, layer in enumerate(spec.layers):
        shape = Layer(spec=layer, family=FAMILIES["qwen3"], hidden=hidden)
        shapes |= _layer_shapes(f"layers.{index}.", f"layers.{index}.", shape)
    if rank:
        shapes["markov.table"] = "markov_head.markov_w1", table_shape(vocabulary, rank)
        shapes["markov.head"] = "markov_head.markov_w2", linear_shape(vocabulary, rank)
    if rank and raw["markov_head_type"] == "gated":
        shapes["markov.gate"] = "markov_head.gate_proj", linear_shape(rank, hidden + rank, has_bias=True)
    of_target: Shapes = {}
    lm_head = "lm_head", linear_shape(vocabulary, hidden)
    (shapes if "lm_head.weight" in tensors else of_target)["lm_head"] = lm_head
    unused = "embed_tokens.weight", "confidence_head.proj.weight", "confidence_head.proj.bias"
    config.check_all_used(tensors, shapes, unused)
    return Layout(
        spec=structs.replace(spec, embedding_scale=1.0 if scale is None else scale, logit_cap=cap or 0.0),
        captures=captures,
        tensors=tensors,
        shapes=shapes,
        of_target=of_target,
        key_sources=tuple(
            KeySource(f"layers.{index}.", layer.kv, spec.rotaries[layer.rotary])
            for index, layer in enumerate(spec.layers)
        ),
        is_output_normed=True,
        logits_scale=1.0 if multiplier is None else multiplier,
        block=block,
        rank=rank,
    )


# ------------------------------------------------------------------------------------------ assistants


_DECODERS = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
"""`model_type` of an assistant's config, and that of the decoder within."""
_WITHOUT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False}
"""What an assistant's layers have not, by its publisher's own check."""
_OF_KEYS = ("self_attn.k_proj", "self_attn.k_norm", "self_attn.v_proj", "self_attn.v_norm")
_MORE_SEEN = 2
"""Its publisher's mask counts back from the last key, both ends included; ours from the row."""


def is_assistant(files: ModelFiles) -> bool:
    """Whether a folder holds an assistant and not a model, by its config; no weight is read."""
    return files.gguf is None and str(read_json(files.path("config.json")).get("model_type")) in _DECODERS


def read_assistant(files: ModelFiles) -> tuple[_Config, Any]:
    """An assistant's config, and transformers' of the decoder within, as of a model whose layers have keys of
    their own. Raises `InputError`."""
    path = files.path("config.json")
    raw = read_json(path)
    check_config(raw, path)
    config = _Config("assistant", files, raw)
    expected, part = _DECODERS[raw["model_type"]], raw.get("text_config")
    if not isinstance(part, dict) or part.get("model_type") != expected:
        raise InputError(f"{path}: text_config: expected a decoder of {expected}, got {part!r:.80}")
    fields = {name: value for name, value in part.items() if name != "model_type"}
    layers, shared = fields.get("num_hidden_layers"), fields.get("num_kv_shared_layers")
    if shared not in (None, 0, layers):
        raise InputError(
            f"{config.name}: num_kv_shared_layers: expected all of its {layers!r:.40} layers, got "
            f"{shared!r:.40}"
        )
    for name, without in _WITHOUT.items():
        if fields.get(name, without) != without:
            raise InputError(f"{config.name}: {name}: expected {without}, got {fields[name]!r:.40}")
    built = config.build(expected, {**fields, **_WITHOUT, "num_kv_shared_layers": 0})
    family_of(built, files.model)
    return config, built


def assistant_layout(files: ModelFiles, target: ModelFiles) -> Layout:
    """That of an assistant for a target, after transformers' Gemma4AssistantForCausalLM (transformers 5.20 to
    5.23 cannot build it). Raises `InputError`."""
    (config, built), whole, tensors = read_assistant(files), target.spec, DrafterTensors(files)
    family, spec = family_named(whole), spec_of(built)
    if family.prefix not in ("Gemma4", "Gemma4Unified"):
        raise InputError(
            f"drafter {files.model!r} is an assistant of Gemma 4, which reads its keys and values; expected "
            f"--model to be one, got a model of {target.config().model_type}"
        )
    raw, hidden, vocabulary = config.fields, spec.hidden, spec.vocabulary
    config.check_fits(target, "backbone_hidden_size", whole.hidden, raw.get("backbone_hidden_size"))
    config.check_fits(target, "vocab_size", whole.vocabulary, vocabulary)
    types = target.config().layer_types
    last = {types[layer]: layer for layer, source in enumerate(whole.sources) if source == layer}
    sources = sorted(last.values())  # of each type the target's last layer with keys of its own
    attends = tuple(sources.index(last[kind]) for kind in built.layer_types)
    layers, shapes = [], Shapes()
    for index, (layer, place) in enumerate(zip(spec.layers, attends, strict=True)):
        held = whole.layers[sources[place]].kv
        if layer.kv.width != held.width or layer.heads % held.count:
            raise InputError(
                f"{config.name} is for another model: expected heads in {built.layer_types[index]} "
                f"that read {held.count} of {held.width} as of {target.model!r}, got {layer.heads} of "
                f"{layer.kv.width}"
            )
        shape = Layer(spec=layer, family=FAMILIES[built.model_type], hidden=hidden, is_own=False)
        shapes |= _layer_shapes(f"layers.{index}.", f"model.layers.{index}.", shape)
        layers.append(structs.replace(layer, kv=held, window=layer.window and layer.window + _MORE_SEEN))
    is_tied = "model.embed_tokens.weight" in tensors
    shapes |= {
        "norm": ("model.norm", norm_shape(hidden)),
        "entry.projection": ("pre_projection", linear_shape(hidden, 2 * whole.hidden)),
        "leave": ("post_projection", linear_shape(whole.hidden, hidden)),
        "lm_head": ("model.embed_tokens" if is_tied else "lm_head", linear_shape(vocabulary, hidden)),
    }
    clusters, chosen = None, 0
    if raw.get("use_ordered_embeddings"):
        clusters, chosen = _clusters(config, tensors, vocabulary)
        shapes["centroids"] = "masked_embedding.centroids", linear_shape(len(clusters), hidden)
    unused = {"lm_head.weight", "masked_embedding.token_ordering"}
    unused |= {name for name in tensors if name.removesuffix(".weight").endswith(_OF_KEYS)}  # some have them
    config.check_all_used(tensors, shapes, unused)
    key_sources, of_target = list[KeySource](), Shapes()
    for place, number in enumerate(sources):
        own, prefix, norm = whole.layers[number], f"sources.{place}.", "input_layernorm"
        shape = Layer(spec=own, family=family, hidden=whole.hidden)
        made = _layer_shapes(prefix, f"layers.{number}.", shape)
        of_target |= {name: each for name, each in made.items() if name.endswith((*_OF_KEYS, norm))}
        rotary, first = whole.rotaries[own.rotary], place * whole.hidden
        key_sources.append(KeySource(prefix, own.kv, rotary, first, norm))
    scaled = structs.replace(spec, layers=tuple(layers), embedding_scale=whole.embedding_scale)
    return Layout(
        spec=structs.replace(scaled, logit_divisor=1.0, logit_cap=0.0),  # as the published code has it
        captures=(*sources, len(whole.layers)),
        tensors=tensors,
        shapes=shapes,
        of_target=of_target,
        feature_width=whole.hidden,
        key_sources=tuple(key_sources),
        attends=attends,
        is_output_normed=True,
        clusters=clusters,
        clusters_chosen=chosen,
    )


def _clusters(config: _Config, tensors: Tensors, vocabulary: int) -> tuple[I64, int]:
    """Tokens by cluster, and of how many clusters tokens are scored."""
    names = "num_centroids", "centroid_intermediate_top_k"
    count, chosen = (config.fields.get(name, 0) for name in names)
    if not type(count) is type(chosen) is int or not 1 <= chosen <= count or vocabulary % count:
        raise InputError(
            f"{config.name}: expected num_centroids that divide its vocabulary of {vocabulary}, and at most "
            f"as many as centroid_intermediate_top_k, got {count!r:.40} and {chosen!r:.40}"
        )
    ordering = tensors.load("masked_embedding.token_ordering", (vocabulary,)).astype(np.int64)
    if not np.array_equal(np.sort(ordering), np.arange(vocabulary)):
        raise InputError(f"{config.name}: token_ordering: expected each token once; copy it again")
    return ordering.reshape(count, -1), chosen
