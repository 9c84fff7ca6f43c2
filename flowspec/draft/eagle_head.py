"""The network of an EAGLE head, from its published files: EAGLE-1/2 (`eagle`) and EAGLE-3 (`eagle3`).

Row i of a head reads token i + 1 and feature i, and predicts feature i + 1, from which comes token i + 2. A
feature is what the target computed (`capture`), or for guesses what the head predicted. The published layers
are pieces of Llama, so transformers' own run here, with the tree attention; embedding and `lm_head` are the
target's where the head has none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.core.protocol.shared_keys import heads_of
from flowspec.draft.eagle_files import LAYER, kind_of
from flowspec.errors import InputError
from flowspec.model.attention import TreeBatch, TreeCache
from flowspec.model.families import FAMILIES, Family
from flowspec.model.files import ModelFiles
from flowspec.model.kernels import DTYPES, kernel_of
from flowspec.model.pieces import angles_of, call_directly, slice_config
from flowspec.model.support import check_rotary, context_max, family_of
from flowspec.model.tensors import Tensors
from flowspec.model.weights import embedding_name, lm_head_name

_UNUSED = {"eagle": {"lm_head.weight"}, "eagle3": {"d2t", "t2d"}}
"""Tensors that published files hold beside the network; EAGLE-1/2 always answers through the target's
`lm_head`."""


class HeadTensors:
    """A head's tensors by name, mapped and read when asked for."""

    def __init__(self, files: ModelFiles) -> None:
        self.model = files.model
        self._files = files
        self._file_of = files.weight_map()
        self.names = frozenset(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor over the mapped file, to be copied; raises `InputError` if it is missing or of another
        shape."""
        from safetensors import SafetensorError, safe_open

        if name not in self.names:
            raise InputError(
                f"EAGLE head {self.model!r} has no tensor {name}; expected the published EAGLE-1/2 or "
                "EAGLE-3 layout"
            )
        try:
            with safe_open(self._files.path(self._file_of[name]), framework="pt") as opened:
                found: torch.Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"cannot read {name} of EAGLE head {self.model!r} ({error}); copy it again"
            ) from None
        if tuple(found.shape) != shape:
            raise InputError(
                f"tensor {name} of EAGLE head {self.model!r}: expected shape {list(shape)} by config.json, "
                f"got {list(found.shape)}"
            )
        return found


class _Layer(nn.Module):
    """The one decoder layer, with the published names. EAGLE-3 attends over embedding and feature side by
    side."""

    def __init__(self, config: Any, kind: str) -> None:
        super().__init__()
        self.self_attn: Any = LlamaAttention(config, layer_idx=0)
        self.mlp: Any = LlamaMLP(config)
        self.post_attention_layernorm: Any = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if kind == "eagle3":
            for name in ("q_proj", "k_proj", "v_proj"):
                plain = getattr(self.self_attn, name)
                setattr(
                    self.self_attn,
                    name,
                    nn.Linear(2 * config.hidden_size, plain.out_features, bias=plain.bias is not None),
                )
            self.input_layernorm: Any = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.hidden_norm: Any = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class _Network(nn.Module):
    """Every weight of a head; its parameter names are the published files'."""

    def __init__(
        self, config: Any, kind: str, draft_vocabulary: int, vocabulary: int, has_bias: bool
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.embed_tokens: Any = nn.Embedding(vocabulary, width)
        self.fc: Any = nn.Linear((3 if kind == "eagle3" else 2) * width, width, bias=has_bias)
        if kind == "eagle3":
            self.midlayer = _Layer(config, kind)
            self.norm: Any = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        else:
            self.layers = nn.ModuleList([_Layer(config, kind)])
        self.lm_head: Any = nn.Linear(width, draft_vocabulary, bias=False)

    @property
    def layer(self) -> Any:
        return self.midlayer if hasattr(self, "midlayer") else self.layers[0]


class EagleHead:
    """A head on one device; the caches belong to the caller. Not thread-safe: one thread runs it.

    `capture`: the hidden states of the target that make up a feature: c is the input of layer c, and the
    number of layers is the output after the final norm. A feature is `feature_width` wide, a predicted one
    `hidden_size`.
    """

    def __init__(
        self,
        kind: str,
        config: Any,
        capture: tuple[int, ...],
        network: _Network,
        rotary: Any,
        target_ids: torch.Tensor | None,
        finish: Callable[..., torch.Tensor] | None,
    ) -> None:
        self.kind = kind
        self.config = config
        self.capture = capture
        self.hidden_size: int = config.hidden_size
        self.feature_width = self.hidden_size * len(capture)
        self.dtype: torch.dtype = network.fc.weight.dtype
        self.device: torch.device = network.fc.weight.device
        self.weight_bytes = sum(
            p.numel() * p.element_size() for p in network.parameters()
        )  # each tensor once, if tied
        self._network, self._rotary, self._target_ids, self._finish = network, rotary, target_ids, finish
        self._layer = network.layer
        for part in (
            *self._layer.children(),
            network.embed_tokens,
            network.fc,
            network.lm_head,
            getattr(network, "norm", None),
            rotary,
        ):
            if part is not None:
                call_directly(part, FAMILIES["llama"])

    @staticmethod
    def load(files: ModelFiles, target: ModelFiles, dtype: str, device: torch.device) -> EagleHead:
        """The head of `files` for the model of `target`, whose embedding and `lm_head` are read as the head
        needs them.

        Raises `InputError` for files that are no EAGLE head, are incomplete, or belong to another target.
        """
        tensors = HeadTensors(files)
        kind = kind_of(tensors.names)
        if kind is None:
            raise InputError(
                f"{files.model!r} is no EAGLE head: expected fc.weight and layers.0.* or midlayer.* among "
                "its tensors"
            )
        raw, target_config = files.raw_config(), target.config()
        family = family_of(target_config, target.model)
        config = _head_config(files, raw, tensors, kind)
        if config.hidden_size != target_config.hidden_size:
            raise InputError(
                f"EAGLE head {files.model!r} is for another model: expected hidden_size "
                f"{target_config.hidden_size} as of "
                f"{target.model!r}, got {config.hidden_size}; give the head that was trained for this model"
            )
        capture = _capture(kind, raw, target_config.num_hidden_layers, files.model, target.model)
        vocabulary = target_config.vocab_size
        draft_vocabulary = raw.get("draft_vocab_size", vocabulary) if kind == "eagle3" else vocabulary
        if type(draft_vocabulary) is not int or not 1 <= draft_vocabulary <= vocabulary:
            raise InputError(
                f"EAGLE head {files.model!r}: draft_vocab_size: expected 1 to {vocabulary} as of "
                f"{target.model!r}, got {draft_vocabulary!r:.80}"
            )
        try:
            with torch.device("meta"):
                network = _Network(config, kind, draft_vocabulary, vocabulary, "fc.bias" in tensors)
                if f"{LAYER[kind]}.self_attn.o_proj.bias" not in tensors:
                    network.layer.self_attn.o_proj.bias = (
                        None  # Llama's switch is for all four; Qwen's heads have three
                    )
            rotary = LlamaRotaryEmbedding(config=config).to(device)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"cannot build EAGLE head {files.model!r} from its config.json: {error}"
            ) from None
        dtype = files.precision_beside(dtype)
        kernel_of(dtype, device)  # tried before it is used; what it computes with is what slices do
        index = target.tensors()
        shared = _shared(kind, tensors, target_config, family, index)
        _fill(network.eval(), tensors, index, shared, _UNUSED[kind], DTYPES[ACTIVATIONS[dtype]], device)
        target_ids = _target_ids(kind, tensors, draft_vocabulary, vocabulary, device)
        finish = partial(family.finish, target_config) if kind == "eagle" else None
        return EagleHead(kind, config, capture, network, rotary, target_ids, finish)

    @property
    def context_max(self) -> int:
        return context_max(self.config)

    @property
    def slot_bytes(self) -> int:
        """What a node takes: keys and values, and the target's feature as it is run."""
        return (heads_of(self.config)[0].numbers + self.hidden_size) * self.dtype.itemsize

    def new_cache(self, slots_max: int) -> TreeCache:
        """An empty cache for one request; a `TreeBatch` over it begins at layer 0."""
        return TreeCache(
            heads={0: heads_of(self.config)[0]},
            slots_max=slots_max,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def project(self, target_features: torch.Tensor) -> torch.Tensor:
        """The target's features `[rows, feature_width]` as `run` takes them, `[rows, hidden_size]`."""
        features = target_features.to(self.device, self.dtype)
        projected: torch.Tensor = self._network.fc(features) if self.kind == "eagle3" else features
        return projected

    @torch.inference_mode()
    def run(
        self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, batch: TreeBatch
    ) -> torch.Tensor:
        """Predicted features `[rows, hidden_size]`, which may be `features` of further rows.

        `tokens` and `positions` `[rows]` int64, `features` `[rows, hidden_size]`; keys and values go to the
        batch's caches. Only distances between positions matter, so a row may have its token's position or its
        feature's.
        """
        for rows in batch.requests:
            rows.cache.reserve(len(rows.key_positions))
        layer, embedded = (
            self._layer,
            self._network.embed_tokens(tokens.to(self.device))[None],
        )  # [1, rows, hidden]
        hidden = features.to(self.device, self.dtype)[None]
        if self.kind == "eagle3":
            mixed = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), dim=-1)
        else:
            hidden = mixed = self._network.fc(torch.cat((embedded, hidden), dim=-1))
        angles = angles_of(self._rotary, hidden, positions.to(self.device)[None])
        attended, _ = layer.self_attn(mixed, position_embeddings=angles, attention_mask=None, tree=batch)
        hidden = hidden + attended
        predicted: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return predicted[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, draft vocabulary]` in float32 from predicted features `[rows, hidden_size]`."""
        if self.kind == "eagle3":
            hidden = self._network.norm(hidden)
        logits: torch.Tensor = self._network.lm_head(hidden)
        if self._finish is not None:  # through the target's own `lm_head`, so as the target finishes them
            logits = self._finish(logits, torch.tanh)
        return logits.float()

    def target_ids(self) -> torch.Tensor | None:
        """The target's id of every draft id, `[draft vocabulary]` int64; None when they are the same."""
        return self._target_ids


def _head_config(files: ModelFiles, raw: dict[str, Any], tensors: HeadTensors, kind: str) -> Any:
    """The head's config as Llama's, whatever family it names: the published code builds Llama layers for
    all."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        config = LlamaConfig.from_dict(
            {key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
        )
    except (
        StrictDataclassError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise InputError(
            f"cannot read the config.json of EAGLE head {files.model!r}: {' '.join(str(error).split()):.200}"
        ) from None
    check_rotary(config, FAMILIES["llama"], files.model)
    if files.scheme is not None:
        raise InputError(f"EAGLE head {files.model!r} is quantised; expected float32, bfloat16 or float16")
    config.attention_bias = f"{LAYER[kind]}.self_attn.q_proj.bias" in tensors
    config.mlp_bias = f"{LAYER[kind]}.mlp.gate_proj.bias" in tensors
    return slice_config(config)


def _capture(kind: str, raw: dict[str, Any], layer_count: int, head: str, target: str) -> tuple[int, ...]:
    """Which hidden states of a target of `layer_count` layers the head was trained on, by the published
    code."""
    if kind == "eagle":
        return (layer_count,)
    capture = (2, layer_count // 2, layer_count - 3)
    if not capture[0] < capture[1] < capture[2]:
        raise InputError(f"EAGLE-3 needs a target of 7 layers or more, but {target!r} has {layer_count}")
    extra = raw.get("eagle_config")
    asked = extra.get("eagle_aux_hidden_state_layer_ids") if isinstance(extra, dict) else None
    if asked is not None and asked not in (
        list(capture),
        [each - 1 for each in capture],
    ):  # some count outputs, not inputs
        raise InputError(
            f"EAGLE head {head!r} reads layers {asked!r:.80}, but FlowSpec runs heads that read "
            f"{list(capture)} of {target!r}"
        )
    return capture


def _shared(
    kind: str, tensors: HeadTensors, target_config: Any, family: Family, index: Tensors
) -> dict[str, str]:
    """The parameters that are the target's, each with the tensor's name there: maybe the embedding, and
    EAGLE-1/2's `lm_head`."""
    shared = {}
    if "embed_tokens.weight" not in tensors:
        shared["embed_tokens.weight"] = embedding_name(target_config, family, index)
    if kind == "eagle":
        shared["lm_head.weight"] = lm_head_name(target_config, family, index)
    return shared


def _fill(
    network: _Network,
    tensors: HeadTensors,
    index: Tensors,
    shared: dict[str, str],
    unused: set[str],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Loads every parameter, from the head's files or if it is shared from the target's."""
    wanted = set(network.state_dict())
    unknown = sorted(
        name for name in tensors.names - wanted - unused if not name.endswith("rotary_emb.inv_freq")
    )
    if unknown:
        raise InputError(
            f"EAGLE head {tensors.model!r} has tensors that no published EAGLE head has, "
            f"{', '.join(unknown[:3])}: not supported"
        )
    loaded: dict[str, nn.Parameter] = {}
    for name in sorted(wanted):
        shape = tuple(network.get_parameter(name).shape)
        source = shared.get(name)
        if source is None or source not in loaded:
            found = tensors.load(name, shape) if source is None else index.load(source, shape)
            copied = nn.Parameter(
                torch.empty(shape, dtype=dtype, device=device).copy_(found), requires_grad=False
            )
            loaded[source or f"head {name}"] = copied
        owner, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(owner), leaf, loaded[source or f"head {name}"])
    index.close()


def _target_ids(
    kind: str, tensors: HeadTensors, draft_vocabulary: int, vocabulary: int, device: torch.device
) -> torch.Tensor | None:
    """`d2t` holds the distance of every draft id from its target id; the published code ignores it for a
    whole vocabulary."""
    if kind == "eagle" or draft_vocabulary == vocabulary:
        return None
    ids = torch.arange(draft_vocabulary) + tensors.load("d2t", (draft_vocabulary,)).long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise InputError(
            f"EAGLE head {tensors.model!r}: expected d2t to lead to ids below {vocabulary}, got "
            f"{int(ids.min())} to {int(ids.max())}"
        )
    return ids.to(device)
