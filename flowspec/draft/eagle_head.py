"""The network of an EAGLE head: EAGLE-1/2 (`eagle`) and EAGLE-3 (`eagle3`), of any published layout.

Row i of a head reads token i + 1 and feature i, and predicts feature i + 1, from which comes token i + 2. A
feature is what the target computed (`capture`), or for guesses what the head predicted. What there is of
norms and layers is in `HeadConfig`. The layers are pieces of Llama or Qwen3, so transformers' own run here,
with the tree attention; embedding and `lm_head` are the target's where the head has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from flowspec.core.protocol.model_spec import Dense, LayerSpec
from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.draft.eagle_config import HeadConfig, LayerForm, head_config
from flowspec.draft.eagle_files import HeadTensors
from flowspec.errors import InputError
from flowspec.model.attention import TreeBatch, TreeCache
from flowspec.model.bridge import tensor_of
from flowspec.model.families import Family
from flowspec.model.files import ModelFiles
from flowspec.model.kernels import DTYPES, kernel_of
from flowspec.model.passes import Layers
from flowspec.model.pieces import angles_of, call_directly
from flowspec.model.products import Product
from flowspec.model.spec import check_activation, spec_of
from flowspec.model.support import family_of
from flowspec.model.tensors import Tensors
from flowspec.model.weights import embedding_name, lm_head_name

_UNUSED = {"eagle": {"lm_head.weight"}, "eagle3": {"d2t", "t2d"}}
"""Tensors that published files hold beside the network; EAGLE-1/2 always answers through the target's
`lm_head`."""
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Layer(nn.Module):
    """A decoder layer. The first one of EAGLE-3 attends over embedding and feature side by side."""

    def __init__(self, config: Any, family: Family, form: LayerForm, index: int) -> None:
        super().__init__()
        self.self_attn: Any = family.piece("Attention")(config, layer_idx=index)
        self.mlp: Any = family.piece("MLP")(config)
        names = {
            "feature as it is": (),
            "normed feature": (form.norm,),
            "normed embedding, normed feature": ("input_layernorm", form.norm),
        }[form.reads]
        for name in (*names, "post_attention_layernorm"):
            setattr(self, name, family.piece("RMSNorm")(config.hidden_size, eps=config.rms_norm_eps))
        if form.reads == "normed embedding, normed feature":
            for name in ("q_proj", "k_proj", "v_proj"):
                outputs = getattr(self.self_attn, name).out_features
                setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, outputs, bias=False))


class _Network(nn.Module):
    """Every weight of a head, under the names of `eagle_files`."""

    def __init__(self, config: HeadConfig, biases: frozenset[str]) -> None:
        """`biases`: the names of tensors, among which each bias is that the head has."""
        super().__init__()
        layer, captured = config.layer, config.target_width * len(config.capture)
        width = layer.hidden_size
        norm = partial(config.family.piece("RMSNorm"), eps=layer.rms_norm_eps)
        self.embed_tokens: Any = nn.Embedding(config.vocabulary, width)
        if config.feature_norm == "each":
            self.fc_norm = nn.ModuleList(norm(config.target_width) for _ in config.capture)
        elif config.feature_norm == "joined":
            self.input_norm: Any = norm(captured)
        if config.has_fc:
            read = width + captured if config.kind == "eagle" else captured
            self.fc: Any = nn.Linear(read, width, bias=False)
        self.layers = nn.ModuleList(
            _Layer(layer, config.family, form, index) for index, form in enumerate(config.layers)
        )
        if config.has_norm:
            self.norm: Any = norm(width)
        self.lm_head: Any = nn.Linear(width, config.draft_vocabulary, bias=False)
        self.is_tied = config.is_tied and not config.has_lm_head
        for name, part in self.named_modules():
            if isinstance(part, nn.Linear) and f"{name}.bias" in biases:
                part.bias = nn.Parameter(torch.empty(part.out_features))

    def called(self) -> list[nn.Module]:
        """The modules that are called as such."""
        lists = (self.layers, getattr(self, "fc_norm", None))
        inner = [part for layer in self.layers for part in layer.children()]
        return [
            *(part for part in self.children() if part not in lists),
            *inner,
            *getattr(self, "fc_norm", ()),
        ]


class EagleHead:
    """A head on one device; the caches belong to the caller. Not thread-safe: one thread runs it.

    `capture`: the hidden states of the target that make up a feature: c is the input of layer c, and the
    number of layers is the output after the final norm. A feature is `feature_width` wide, a predicted one
    `hidden_size`.
    """

    def __init__(
        self,
        config: HeadConfig,
        network: _Network,
        rotary: Any,
        target_ids: torch.Tensor | None,
        finish: Callable[..., torch.Tensor] | None,
        product: Product,
    ) -> None:
        self.kind = config.kind
        self.config = config.layer
        self.capture = config.capture
        self.hidden_size: int = config.layer.hidden_size
        self.feature_width = config.target_width * len(config.capture)
        self.dtype: torch.dtype = network.lm_head.weight.dtype
        self.device: torch.device = network.lm_head.weight.device
        self.weight_bytes = sum(
            p.numel() * p.element_size() for p in network.parameters()
        )  # each tensor once, if tied
        self._form, self._network, self._rotary = config, network, rotary
        self._target_ids, self._finish = target_ids, finish
        for part in (*network.called(), rotary):
            call_directly(part, config.family, product)
        self._layers = Layers(network.layers, _specs(config), config.family, self.dtype, product)

    @staticmethod
    def load(files: ModelFiles, target: ModelFiles, dtype: str, device: torch.device) -> EagleHead:
        """The head of `files` for the model of `target`, whose embedding and `lm_head` are read as the head
        needs them.

        Raises `InputError` for files that are no EAGLE head, are incomplete, or belong to another target.
        """
        tensors = HeadTensors(files)
        target_config = target.config()
        family = family_of(target_config, target.model)
        config = head_config(files, tensors, target)
        try:
            with torch.device("meta"):
                network = _Network(config, tensors.names)
            rotary = config.family.piece("RotaryEmbedding")(config=config.layer).to(device)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"cannot build EAGLE head {files.model!r} from its config.json: {error}"
            ) from None
        dtype = files.precision_beside(dtype)
        product = kernel_of(ACTIVATIONS[dtype], device).product
        index = target.tensors()
        shared = _shared(config, tensors, target_config, family, index)
        _fill(
            network.eval(), tensors, index, shared, _UNUSED[config.kind], DTYPES[ACTIVATIONS[dtype]], device
        )
        target_ids = _target_ids(config, tensors, device)
        finish = partial(family.finish, target_config) if "lm_head.weight" in shared else None
        return EagleHead(config, network, rotary, target_ids, finish, product)

    @property
    def context_max(self) -> int:
        return spec_of(self.config).context_max

    @property
    def slot_bytes(self) -> int:
        """What a node takes: keys and values, and the target's feature as it is run."""
        kept = sum(heads.numbers for heads in spec_of(self.config).heads)
        return (kept + self.hidden_size) * self.dtype.itemsize

    def new_cache(self, slots_max: int) -> TreeCache:
        """An empty cache for one request; a `TreeBatch` over it begins at layer 0."""
        return TreeCache(
            heads=dict(enumerate(spec_of(self.config).heads)),
            slots_max=slots_max,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def project(self, target_features: torch.Tensor) -> torch.Tensor:
        """The target's features `[rows, feature_width]` as `run` takes them, `[rows, hidden_size]`."""
        features = target_features.to(self.device, self.dtype)
        if self._form.feature_norm == "joined":
            features = self._network.input_norm(features)
        elif self._form.feature_norm == "each":
            norms = self._network.fc_norm
            parts = features.chunk(len(norms), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=-1)
        if self.kind == "eagle3" and self._form.has_fc:
            features = self._network.fc(features)
        return features

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
        embedded = self._network.embed_tokens(tokens.to(self.device))[None]  # [1, rows, hidden]
        hidden = features.to(self.device, self.dtype)[None]
        if self.kind == "eagle":
            hidden = self._network.fc(torch.cat((embedded, hidden), dim=-1))
        angles = angles_of(self._rotary, hidden, positions.to(self.device)[None])
        every = [angles] * len(self._form.layers), [batch] * len(self._form.layers)
        hidden = self._layers.run(hidden, *every, embedding=embedded)
        predicted: torch.Tensor = self._network.norm(hidden) if self._form.is_output_normed else hidden
        return predicted[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, draft vocabulary]` in float32 from predicted features `[rows, hidden_size]`."""
        if self._form.has_norm and not self._form.is_output_normed:
            hidden = self._network.norm(hidden)
        logits: torch.Tensor = self._network.lm_head(hidden)
        if self._finish is not None:  # through the target's own `lm_head`, so as the target finishes them
            logits = self._finish(logits, torch.tanh)
        return logits.float()

    def target_ids(self) -> torch.Tensor | None:
        """The target's id of every draft id, `[draft vocabulary]` int64; None when they are the same."""
        return self._target_ids


def _specs(config: HeadConfig) -> list[LayerSpec]:
    """Of its layers, by what each reads."""
    found, specs = [], spec_of(config.layer).layers
    check_activation(config.layer, specs)
    for index, (form, spec) in enumerate(zip(config.layers, specs, strict=True)):
        assert spec.dense is not None, "its layers are of a dense family"
        dense = Dense(
            scale=spec.kv.width**-0.5,
            activation=spec.dense.activation,
            norm_before_attention="" if form.reads == "feature as it is" else form.norm,
            embedding_norm="input_layernorm" if form.reads.startswith("normed embedding") else "",
            is_residual_normed=index == 0 and config.is_residual_normed,
            query_norm="head" if config.family.module == "qwen3" else "",
        )
        found.append(replace(spec, dense=dense))
    return found


def _shared(
    config: HeadConfig, tensors: HeadTensors, target_config: Any, family: Family, index: Tensors
) -> dict[str, str]:
    """The parameters that are the target's, each with the tensor's name there: maybe the embedding, and
    `lm_head` where the head has none of its own."""
    shared = {}
    if "embed_tokens.weight" not in tensors:
        shared["embed_tokens.weight"] = embedding_name(target_config, family, index)
    if not config.has_lm_head and not config.is_tied:
        shared["lm_head.weight"] = lm_head_name(target_config, family, index)
    for name in shared:
        if config.layer.hidden_size != target_config.hidden_size:
            raise InputError(
                f"EAGLE head {tensors.model!r} has no {name}, and its hidden_size is not the target's; "
                "expected one in its files"
            )
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
    wanted = set(network.state_dict()) - ({"lm_head.weight"} if network.is_tied else set())
    unknown = sorted(
        tensors.published(name)
        for name in tensors.names - wanted - unused
        if not name.endswith("rotary_emb.inv_freq")
    )
    if unknown:
        raise InputError(
            f"EAGLE head {tensors.model!r} has tensors that its config.json gives no use for, "
            f"{', '.join(unknown[:3])}: not supported"
        )
    loaded: dict[str, nn.Parameter] = {}
    for name in sorted(wanted):
        shape = tuple(network.get_parameter(name).shape)
        source = shared.get(name)
        if source is None or source not in loaded:
            found = tensors.load(name, shape) if source is None else tensor_of(index.load(source, shape))
            if found.dtype not in _FLOATS:
                raise InputError(
                    f"tensor {tensors.published(name)} of EAGLE head {tensors.model!r} is "
                    f"{str(found.dtype)[6:]}; expected float32, bfloat16 or float16"
                )
            copied = nn.Parameter(
                torch.empty(shape, dtype=dtype, device=device).copy_(found), requires_grad=False
            )
            loaded[source or f"head {name}"] = copied
        owner, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(owner), leaf, loaded[source or f"head {name}"])
    if network.is_tied:
        network.lm_head.weight = network.embed_tokens.weight


def _target_ids(config: HeadConfig, tensors: HeadTensors, device: torch.device) -> torch.Tensor | None:
    """`d2t` holds the distance of every draft id from its target id."""
    is_whole = config.draft_vocabulary == config.vocabulary
    if config.kind == "eagle" or (is_whole and "d2t" not in tensors):
        return None
    distances = tensors.load("d2t", (config.draft_vocabulary,))
    if distances.is_floating_point() or distances.is_complex():
        raise InputError(f"EAGLE head {tensors.model!r}: expected d2t to hold whole numbers")
    if is_whole:
        if distances.any():  # SafeAILab's code does not read it then, vLLM's does
            raise InputError(f"EAGLE head {tensors.model!r}: expected a d2t of zeros for a whole vocabulary")
        return None
    ids = torch.arange(config.draft_vocabulary) + distances.long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocabulary:
        raise InputError(
            f"EAGLE head {tensors.model!r}: expected d2t to lead to ids below {config.vocabulary}, got "
            f"{int(ids.min())} to {int(ids.max())}"
        )
    return ids.to(device)
