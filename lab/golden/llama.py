"""A Llama of 1.24 G parameters with made weights, of the shape of Llama-3.2-1B: a checkpoint in bfloat16, and
GGUF files in the forms that people download.

All are made in one pass, tensor by tensor, from a seed, in 3 GB of memory; they take 5.3 GB of disk and stay.
There is no tokenizer: such a model is asked by token ids.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file

from lab.golden.place import Place, UnavailableError
from tests import ggufs

FOLDER = "llama-1.24b-made-1"
"""The number at the end is of what is in it: trees that make another one keep theirs next to this."""
LAYERS, HIDDEN, INNER, HEADS, KEY_HEADS, WIDTH, VOCABULARY = 16, 2048, 8192, 32, 8, 64, 128256
CONTEXT, THETA, NORM_EPSILON, STOP_ID = 8192, 500000.0, 1e-5, 2
STD = 0.02
"""Of weights: logits of random layers stay small."""
DISK_BYTES = 6e9
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": WIDTH,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": NORM_EPSILON,
    "rope_theta": THETA,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": STOP_ID,
    "torch_dtype": "bfloat16",
}
LAYER: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "input_layernorm": ("attn_norm", (HIDDEN,)),
    "self_attn.q_proj": ("attn_q", (HEADS * WIDTH, HIDDEN)),
    "self_attn.k_proj": ("attn_k", (KEY_HEADS * WIDTH, HIDDEN)),
    "self_attn.v_proj": ("attn_v", (KEY_HEADS * WIDTH, HIDDEN)),
    "self_attn.o_proj": ("attn_output", (HIDDEN, HEADS * WIDTH)),
    "post_attention_layernorm": ("ffn_norm", (HIDDEN,)),
    "mlp.gate_proj": ("ffn_gate", (INNER, HIDDEN)),
    "mlp.up_proj": ("ffn_up", (INNER, HIDDEN)),
    "mlp.down_proj": ("ffn_down", (HIDDEN, INNER)),
}
"""By their names in checkpoints: those in GGUF files, and shapes."""
Kind = GGMLQuantizationType
Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """`name` in checkpoints, `packed_name` in GGUF files; `layer` -1 is outside of layers."""

    name: str
    packed_name: str
    shape: tuple[int, ...]
    layer: int = -1

    @property
    def shard(self) -> str:
        return "model-outside.safetensors" if self.layer < 0 else f"model-layer-{self.layer:02}.safetensors"


def tensors() -> Iterator[Tensor]:
    """In the order of a GGUF file."""
    yield Tensor(
        name="model.embed_tokens.weight", packed_name="token_embd.weight", shape=(VOCABULARY, HIDDEN)
    )
    yield Tensor(name="model.norm.weight", packed_name="output_norm.weight", shape=(HIDDEN,))
    for layer in range(LAYERS):
        for name, (packed_name, shape) in LAYER.items():
            yield Tensor(
                name=f"model.layers.{layer}.{name}.weight",
                packed_name=f"blk.{layer}.{packed_name}.weight",
                shape=shape,
                layer=layer,
            )


def mixed(tensor: Tensor) -> Kind:
    """As llama.cpp chooses for Q4_K_M: more bits for the table of words, and in some layers for values and
    for what leaves them."""
    layer, eighth = tensor.layer, LAYERS // 8
    has_more = layer < eighth or layer >= LAYERS - eighth or (layer - eighth) % 3 == 2
    is_wider = tensor.layer < 0 or (has_more and any(part in tensor.name for part in ("v_proj", "down_proj")))
    return Kind.Q6_K if is_wider else Kind.Q4_K


KINDS: Mapping[str, Callable[[Tensor], Kind]] = {
    "Q4_0": lambda tensor: Kind.Q4_0,
    "Q8_0": lambda tensor: Kind.Q8_0,
    "Q4_K_M": mixed,
}
"""The type of a matrix, by the GGUF file's."""
BFLOAT16 = "bfloat16"


def llama(place: Place) -> dict[str, Path]:
    """The model in each precision, made the first time: in `bfloat16` a folder, else a GGUF file.

    Raises `UnavailableError` where there is no room for it.
    """
    folder = place.models / FOLDER
    if not folder.is_dir():
        if shutil.disk_usage(place.models).free < DISK_BYTES:
            raise UnavailableError(f"{FOLDER} takes {DISK_BYTES / 1e9:.0f} GB, which {place.models} lacks")
        print(f"making a Llama of 1.24 G parameters in {folder}, once", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=place.models) as room:
            _make(Path(room, "made"))
            with contextlib.suppress(OSError):  # another process has made it meanwhile
                os.rename(Path(room, "made"), folder)
    return {BFLOAT16: folder / BFLOAT16, **{form: folder / f"{form}.gguf" for form in KINDS}}


def _make(folder: Path) -> None:
    checkpoint = folder / BFLOAT16
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    index = {"metadata": {}, "weight_map": {each.name: each.shard for each in tensors()}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    writers = {form: _begin(folder / f"{form}.gguf", kind_of) for form, kind_of in KINDS.items()}
    shard: dict[str, torch.Tensor] = {}
    every = list(tensors())
    for seed, (tensor, following) in enumerate(zip(every, [*every[1:], None], strict=True)):
        values = _values(tensor, seed)
        shard[tensor.name] = torch.from_numpy(values).bfloat16()
        if following is None or following.shard != tensor.shard:
            save_file(shard, checkpoint / tensor.shard, {"format": "pt"})
            shard.clear()
        for form, writer in writers.items():
            kind = _kind(tensor, KINDS[form])
            packed = (
                ggufs.blocks(kind, tensor.shape, seed) if kind in ggufs.RANDOM else quantize(values, kind)
            )
            writer.write_tensor_data(packed)
    for writer in writers.values():
        writer.close()


def _begin(path: Path, kind_of: Callable[[Tensor], Kind]) -> GGUFWriter:
    """A GGUF file all of which is written but the tensors' numbers."""
    writer = GGUFWriter(path, "llama")
    own: dict[str, Any] = {
        "context_length": CONTEXT,
        "block_count": LAYERS,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KEY_HEADS,
        "attention.layer_norm_rms_epsilon": NORM_EPSILON,
        "attention.key_length": WIDTH,
        "attention.value_length": WIDTH,
        "rope.dimension_count": WIDTH,
        "rope.freq_base": THETA,
        "vocab_size": VOCABULARY,
    }
    for key, value in own.items():
        ggufs.add_entry(writer, f"llama.{key}", value)
    for name, token in (("bos", 1), ("eos", STOP_ID)):
        ggufs.add_entry(writer, f"tokenizer.ggml.{name}_token_id", token)
    for tensor in tensors():
        kind = _kind(tensor, kind_of)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        *rows, columns = tensor.shape
        packed = (*rows, columns // block * block_bytes)
        if kind is Kind.F32:
            writer.add_tensor_info(
                tensor.packed_name, tensor.shape, np.dtype(np.float32), 4 * math.prod(tensor.shape)
            )
        else:
            writer.add_tensor_info(
                tensor.packed_name, packed, np.dtype(np.uint8), math.prod(packed), raw_dtype=kind
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def _kind(tensor: Tensor, kind_of: Callable[[Tensor], Kind]) -> Kind:
    return kind_of(tensor) if len(tensor.shape) > 1 else Kind.F32


def _values(tensor: Tensor, seed: int) -> Numbers:
    if len(tensor.shape) == 1:
        return np.ones(tensor.shape, np.float32)
    found = np.random.default_rng(seed).standard_normal(tensor.shape, np.float32)
    found *= STD
    return found
