"""The network of a block drafter, from its published files: DFlash (arXiv 2602.06036) and DSpark.

A pass runs a block: the token whose successors are wanted, and masks behind it. In each layer its rows
attend to each other, and to keys and values that the layer makes of the features of all tokens before the
block. A feature is several hidden states of the target, projected; so nothing of a text runs through the
layers but blocks. The layers are pieces of Qwen3, so transformers' own run here, with the tree attention;
embedding and `lm_head` are the target's where the files have none. DSpark's logits depend on the token right
before, too: a product of low rank (its "Markov head") is added, so guesses are a node's and not a place's.

After `DFlashDraftModel` and `Qwen3DSparkModel` of the authors' code. DSpark's other head, which foretells how
often a guess is right, is not read: here that is learnt from what comes true.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.draft.block_files import FIELDS, BlockConfig
from flowspec.draft.reading import built_config, embedding_rows, fill, rows_of
from flowspec.errors import InputError
from flowspec.model.arithmetic.operations import turned
from flowspec.model.attention import TreeBatch, TreeCache, TreeRows
from flowspec.model.families import FAMILIES
from flowspec.model.files import ModelFiles
from flowspec.model.imports import IMPORTING
from flowspec.model.kernels import DTYPES, kernel_of
from flowspec.model.passes import Layers
from flowspec.model.pieces import angles_of, call_directly
from flowspec.model.products import Product
from flowspec.model.safetensors_file import SafetensorsTensors
from flowspec.model.spec import spec_of
from flowspec.model.support import family_of
from flowspec.model.weights import lm_head_name

with IMPORTING:
    from transformers import Qwen3Config

_FAMILY = FAMILIES["qwen3"]
_SLIDING = "sliding_attention"
_OF_BLOCKS = ("architectures", "auto_map", "is_causal", "model_type", FIELDS)
"""Fields of a config that are not of its layers."""
_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_UNUSED = ("confidence_head.proj.weight", "confidence_head.proj.bias")


class _MarkovHead(nn.Module):
    """What the token before adds to the logits."""

    def __init__(self, block: BlockConfig, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.markov_w1: Any = nn.Embedding(vocabulary, block.rank)
        self.markov_w2: Any = nn.Linear(block.rank, vocabulary, bias=False)
        if block.is_gated:
            self.gate_proj: Any = nn.Linear(hidden + block.rank, block.rank)

    def latent(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, rank]` of tokens `[rows]` before guesses `[rows, hidden]`; `markov_w2` makes it logits."""
        embedded: torch.Tensor = self.markov_w1(tokens)
        if not hasattr(self, "gate_proj"):
            return embedded
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded


class _Network(nn.Module):
    """Every weight of a block drafter; its parameter names are the published files'."""

    def __init__(self, config: Any, block: BlockConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        norm, layer = _FAMILY.piece("RMSNorm"), _FAMILY.piece("DecoderLayer")
        self.layers = nn.ModuleList([layer(config, index) for index in range(config.num_hidden_layers)])
        self.norm: Any = norm(hidden, eps=config.rms_norm_eps)
        self.fc: Any = nn.Linear(len(block.captures) * hidden, hidden, bias=False)
        self.hidden_norm: Any = norm(hidden, eps=config.rms_norm_eps)
        self.lm_head: Any = nn.Linear(hidden, config.vocab_size, bias=False)
        if block.rank:
            self.markov_head: Any = _MarkovHead(block, hidden, config.vocab_size)


class BlockHead:
    """A block drafter on one device; the caches belong to the caller. Not thread-safe: one thread runs it.

    See `featured.Head`.
    """

    def __init__(
        self,
        config: Any,
        block: BlockConfig,
        network: _Network,
        table: torch.Tensor,
        device: torch.device,
        product: Product,
    ) -> None:
        self.capture = block.captures
        self.context_max = spec_of(config).context_max
        self.width: int = config.hidden_size
        self.hidden_size = self.width + block.rank
        self.block = block
        self.dtype: torch.dtype = network.fc.weight.dtype
        self.device = device
        self.weight_bytes = sum(each.numel() * each.element_size() for each in network.parameters())
        self._network, self._table = network, table
        self._heads = spec_of(config).heads
        self._rotary = _FAMILY.piece("RotaryEmbedding")(config=config).to(device)
        call_directly(network, _FAMILY, product)
        self._layers = Layers(network.layers, spec_of(config).layers, _FAMILY, self.dtype, product)
        causal = block.is_causal
        self._causal = [
            kind == _SLIDING if causal is None else causal for kind in config.layer_types
        ]  # by layer

    @staticmethod
    def load(files: ModelFiles, target: ModelFiles, dtype: str, device: torch.device) -> BlockHead:
        """The block drafter of `files` for the model of `target`, whose embedding and `lm_head` it uses.

        Raises `InputError` for files that are none, are incomplete, or belong to another target.
        """
        raw, target_config = files.raw_config(), target.config()
        target_family = family_of(target_config, target.model)
        if files.scheme is not None:
            raise InputError(
                f"block drafter {files.model!r} is quantised; expected float32, bfloat16 or float16"
            )
        block = BlockConfig.read(raw, files.model, target_config.num_hidden_layers, target_config.vocab_size)
        config = _layers_config(raw, files.model)
        for name in ("hidden_size", "vocab_size"):
            expected, got = getattr(target_config, name), getattr(config, name)
            if got != expected:
                raise InputError(
                    f"block drafter {files.model!r} is for another model: expected {name} {expected} as of "
                    f"{target.model!r}, got {got}; give the one that was trained for this model"
                )
        with torch.device("meta"):
            network = _Network(config, block).eval()
        compute = DTYPES[ACTIVATIONS[dtype]]
        product = kernel_of(ACTIVATIONS[dtype], device).product
        own = SafetensorsTensors(files.model, files.file_map(), files.path)
        known = {*network.state_dict(), _EMBEDDING, *_UNUSED}
        unknown = sorted(name for name in own if name not in known)
        if unknown:
            raise InputError(
                f"block drafter {files.model!r} has tensors that no published one has, "
                f"{', '.join(unknown[:3])}: not supported"
            )
        tensors = target.tensors()
        shared = {} if _LM_HEAD in own else {_LM_HEAD: lm_head_name(target_config, target_family, tensors)}
        fill(network, own, compute, device, others=tensors, shared=shared)
        if _EMBEDDING in own:
            table = rows_of(own, _EMBEDDING, (config.vocab_size, config.hidden_size), compute)
        else:
            table = embedding_rows(target, tensors, compute)
        return BlockHead(config, block, network, table, device, product)

    @property
    def slot_bytes(self) -> int:
        """What a node takes: keys and values of all layers."""
        return sum(heads.numbers for heads in self._heads) * self.dtype.itemsize

    def new_cache(self, positions: int) -> TreeCache:
        """An empty cache of one request, in which each position has its slot; a block needs its own."""
        return TreeCache(
            heads=dict(enumerate(self._heads)),
            slots_max=positions + self.block.size,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def project(self, target_features: torch.Tensor) -> torch.Tensor:
        """The target's features `[rows, hidden * len(capture)]` as layers read them, `[rows, hidden]`."""
        network = self._network
        features = target_features.to(self.device, self.dtype)
        projected: torch.Tensor = network.hidden_norm(network.fc(features)[None])[0]
        return projected

    @torch.inference_mode()
    def write(self, features: torch.Tensor, positions: torch.Tensor, cache: TreeCache) -> None:
        """Keys and values of committed nodes at `positions` `[rows]` int64, of `project`'s `[rows,
        hidden]`."""
        angles = angles_of(self._rotary, features, positions[None])
        for index, layer in enumerate(self._network.layers):
            own: Any = layer.self_attn
            shape = (1, len(features), self._heads[index].count, self._heads[index].width)
            keys = turned(own.k_norm(own.k_proj(features).view(shape)).transpose(1, 2), *angles)
            values = own.v_proj(features).view(shape)
            cache.write(index, positions, keys[0], values[0].transpose(0, 1))

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], begins: Sequence[int], caches: Sequence[TreeCache]) -> torch.Tensor:
        """Of each block what is guessed of the places after its first, `[blocks, guesses, width]`.

        Each block begins at a position of its own with a token that is known; its cache holds keys of all
        positions before. What it writes from there on is the next writer's.
        """
        size, device = self.block.size, self.device
        ids = torch.full((len(tokens), size), self.block.mask)
        ids[:, 0] = torch.tensor(tokens)
        hidden = self._table[ids.flatten()].to(device, self.dtype)[None] * self.block.embedding_scale
        everywhere, causal, places = [], [], []
        for first, (begin, cache) in enumerate(zip(begins, caches, strict=True)):
            cache.reserve(begin + size)
            own = torch.arange(begin, begin + size, device=device)
            keys = torch.arange(begin + size, dtype=torch.int32, device=device)
            before = keys[None] <= own[:, None]
            everywhere.append(TreeRows(cache, first * size, own, own, keys, torch.ones_like(before)))
            causal.append(TreeRows(cache, first * size, own, own, keys, before))
            places.append(own)
        positions = torch.cat(places)[None]
        angles = angles_of(self._rotary, hidden, positions)
        batches = TreeBatch(everywhere, 0), TreeBatch(causal, 0)
        by_layer = [batches[is_causal] for is_causal in self._causal]
        hidden = self._layers.run(hidden, [angles] * len(by_layer), by_layer)
        found: torch.Tensor = self._network.norm(hidden)[0].view(len(tokens), size, -1)
        return found[:, size - self.block.guesses :]

    @torch.inference_mode()
    def after(self, guesses: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """What `logits` takes, `[rows, hidden_size]`: guesses `[rows, width]`, and the tokens that stand
        before them."""
        if not self.block.rank:
            return guesses
        ids = torch.tensor(tokens, device=self.device)
        return torch.cat([guesses, self._network.markov_head.latent(ids, guesses)], dim=-1)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, vocabulary]` in float32 from `[rows, hidden_size]`."""
        logits = self._network.lm_head(hidden[:, : self.width]) * self.block.logits_scale
        cap = self.block.logits_cap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if self.block.rank:
            logits = logits + self._network.markov_head.markov_w2(hidden[:, self.width :])
        found: torch.Tensor = logits.float()
        return found

    def target_ids(self) -> None:
        """A block drafter has its target's vocabulary."""


def _layers_config(raw: dict[str, Any], model: str) -> Any:
    """As of a Qwen3, whose layers these are."""
    own = {name: value for name, value in raw.items() if name not in _OF_BLOCKS}
    config = built_config(partial(Qwen3Config.from_dict, own), f"block drafter {model!r}")
    family_of(config, model)
    return config
