"""Trains a block drafter for a bundled model on text that the model wrote itself.

It is DSpark in its published layout: the rows of a block, the first of which reads a token that is known and
the others a mask, see what the layers make of the target's hidden states before the block, and each other.
Row j says what stands j + 1 behind the known token; a product of low rank adds what the token right before it
makes likely. Every window is trained at many places at once, each with a block of its own.

    python -m lab.recipe.own --out TEXT --problems gsm8k_train.jsonl --plays plays.txt
    python -m lab.recipe.block --own TEXT --out OUT
    python -m lab.recipe.block --measure FOLDER
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from lab.recipe.features import Batch, Guesses, arguments, layers_config, load_target, measure, train

IDS = (1, 4, 7)
"""Layers of the bundled target's eight whose outputs make up a feature, the last one's behind the norm."""
CAPTURES = tuple(each + 1 for each in IDS)
LAYERS, SIZE, RANK = 2, 8, 64
MASK = 0
"""The token that pads, which no text has."""
PLACES = 48
"""In a window at which blocks begin."""


class Markov(nn.Module):
    """What the token before adds to the logits."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, RANK)
        self.markov_w2 = nn.Linear(RANK, vocabulary, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[rows, vocabulary]` of tokens `[rows]`."""
        added: torch.Tensor = self.markov_w2(self.markov_w1(tokens))
        return added


class Drafter(nn.Module):
    """The trainable part, with the published parameter names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.layers: Any = nn.ModuleList([Qwen3DecoderLayer(config, index) for index in range(LAYERS)])
        self.norm: Any = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.fc = nn.Linear(len(CAPTURES) * width, width, bias=False)
        self.hidden_norm: Any = Qwen3RMSNorm(width, eps=config.rms_norm_eps)
        self.markov_head = Markov(config.vocab_size)

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        seen: torch.Tensor,
        of_text: tuple[torch.Tensor, torch.Tensor],
        of_blocks: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """`[rows, blocks, hidden]` from the `embedded` rows of blocks of that shape and `features` `[rows,
        length, captured]` of the text; `seen` `[rows, blocks, length + blocks]`, and cosines and sines of the
        positions of both."""
        hidden, text = embedded, self.hidden_norm(self.fc(features))
        for layer in self.layers:
            attention = layer.self_attn
            own = layer.input_layernorm(hidden)

            def heads(x: torch.Tensor, projection: Any, width: int = attention.head_dim) -> torch.Tensor:
                found: torch.Tensor = projection(x).view(*x.shape[:2], -1, width)
                return found

            query = attention.q_norm(heads(own, attention.q_proj)).transpose(1, 2)
            key = attention.k_norm(heads(own, attention.k_proj)).transpose(1, 2)
            query, key = apply_rotary_pos_emb(query, key, *of_blocks)
            before = attention.k_norm(heads(text, attention.k_proj)).transpose(1, 2)
            before, _ = apply_rotary_pos_emb(before, before, *of_text)
            values = [heads(x, attention.v_proj).transpose(1, 2) for x in (text, own)]
            mixed = F.scaled_dot_product_attention(
                query,
                torch.cat([before, key], dim=2),
                torch.cat(values, dim=2).to(query.dtype),
                attn_mask=seen[:, None],
                enable_gqa=True,
            )
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        found: torch.Tensor = self.norm(hidden)
        return found


def guesses(drafter: Drafter, target: Any, batch: Batch, begins: torch.Tensor) -> Guesses:
    """Of blocks that begin at the places `begins` `[rows, places]`, as far as they stay in one answer."""
    tokens, device = batch.tokens, batch.tokens.device
    rows, length = tokens.shape
    places = begins[:, :, None] + torch.arange(SIZE, device=device)  # [rows, places, SIZE]
    flat, begin = places.flatten(1), begins.repeat_interleave(SIZE, dim=1)[:, :, None]
    block = torch.arange(begins.shape[1], device=device).repeat_interleave(SIZE)
    index = torch.arange(length, device=device)
    of_dialogue = batch.same.gather(1, begin.expand(-1, -1, length))  # [rows, blocks, length]
    together = (block[:, None] == block[None, :])[None].expand(rows, -1, -1)
    seen = torch.cat([of_dialogue & (index < begin), together], dim=2)
    ids = torch.full_like(places, MASK)
    ids[:, :, 0] = tokens.gather(1, begins)
    embedded = target.model.embed_tokens(ids.flatten(1))
    rotary = target.model.rotary_emb
    of_text, of_blocks = rotary(embedded, index[None].expand(rows, -1)), rotary(embedded, flat)
    hidden = drafter(embedded, batch.features, seen, of_text, of_blocks).view(*places.shape, -1)
    inside = flat.clamp(max=length - 1)
    counted = (flat < length) & batch.counts.gather(1, inside)
    counted &= of_dialogue.gather(2, inside[:, :, None])[:, :, 0]
    counted = counted.view_as(places).cumprod(dim=2).bool()
    inside = inside.view_as(places)
    row = torch.arange(rows, device=device)[:, None].expand_as(begins)
    for j in range(SIZE):
        which = counted[:, :, j]
        at = row[which], inside[:, :, j][which]
        logits = target.lm_head(hidden[:, :, j][which]) + drafter.markov_head(tokens[at])
        yield logits, batch.chances[at]


def drawn_places(batch: Batch, random: torch.Generator) -> torch.Tensor:
    """Where blocks begin, `[rows, PLACES]`: before tokens of answers, where there are any."""
    likely = batch.counts[:, :-SIZE].float() + 1e-6
    return torch.multinomial(likely, PLACES, generator=random)


def all_places(batch: Batch) -> torch.Tensor:
    """Every place of one answer at which a block may begin, `[1, places]`."""
    return batch.counts.nonzero()[None, :, 1]


def main() -> None:
    args = arguments("block", __doc__, steps=4000, rows=32, length=320)
    torch.manual_seed(args.seed)
    target = load_target(args.target, args.device)
    said = layers_config(target.config)
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "block_size": SIZE,
        "mask_token_id": MASK,
        "markov_head_type": "vanilla",
        "markov_rank": RANK,
        "num_target_layers": target.config.num_hidden_layers,
        "target_layer_ids": list(IDS),
        "tie_word_embeddings": False,
        **said,
    }
    layers: Any = Qwen3Config(**said, num_hidden_layers=LAYERS, attn_implementation="sdpa")
    drafter = Drafter(layers)
    if args.measure:
        measure(
            args, drafter, target, CAPTURES, lambda batch: guesses(drafter, target, batch, all_places(batch))
        )
    else:
        train(
            args,
            drafter,
            target,
            CAPTURES,
            lambda batch, random: guesses(drafter, target, batch, drawn_places(batch, random)),
            config,
        )


if __name__ == "__main__":
    main()
