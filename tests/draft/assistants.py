"""Small assistants of Gemma 4 with random weights, in the published layout, for targets of
`tests.checkpoints`. Their config is in `tests/data/drafters.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.draft import weights
from tests.draft.blocks import DATA, write

CONFIG = DATA["assistant"]


def make_assistant(
    folder: Path,
    *,
    target: str = "gemma4",
    ordered: bool = True,
    drop: str = "",
    extra: dict[str, list[int]] | None = None,
    decoder: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A folder with an assistant; `changes` go into its config, `decoder` into that of the decoder within."""
    of_target, within = CONFIG["backbone_hidden_size"], CONFIG["text_config"]
    width, inner, vocabulary = (within[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {
        "model.embed_tokens.weight": (vocabulary, width),
        "model.norm.weight": (width,),
        "pre_projection.weight": (width, 2 * of_target),
        "post_projection.weight": (of_target, width),
    }
    names = [
        f"{place}_{part}_layernorm" for place in ("pre", "post") for part in ("attention", "feedforward")
    ]
    for layer, kind in enumerate(within["layer_types"]):
        at, head = f"model.layers.{layer}.", within["head_dim" if "sliding" in kind else "global_head_dim"]
        heads = head * within["num_attention_heads"]
        shapes |= {f"{at}self_attn.q_proj.weight": (heads, width), f"{at}self_attn.q_norm.weight": (head,)}
        shapes |= {f"{at}self_attn.o_proj.weight": (width, heads), **weights.mlp(f"{at}mlp.", width, inner)}
        shapes |= weights.norms(at, width, "input_layernorm", *names[1:])
    if ordered:
        shapes["masked_embedding.centroids.weight"] = (CONFIG["num_centroids"], width)
    tensors = weights.random(shapes, 11, 0.3)
    tensors |= {f"model.layers.{layer}.layer_scalar": torch.tensor([0.7]) for layer in range(3)}
    if ordered:
        order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(11))
        tensors["masked_embedding.token_ordering"] = order
    within = {**within, "model_type": f"{target}_text", **(decoder or {})}
    if target == "gemma4":
        within = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, **within}
    kinds = {"model_type": f"{target}_assistant", "use_ordered_embeddings": ordered, "text_config": within}
    return write(folder, {**CONFIG, **kinds, **changes}, tensors, drop, extra)
