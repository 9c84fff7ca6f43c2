"""Trains an EAGLE-3 head for a bundled model on text that the model wrote itself.

The head is the published one (arXiv 2503.01840), in SafeAILab's layout: row i reads the embedding of token
i + 1 and what `fc` makes of three of the target's hidden states at token i, and says what the target will say
of token i + 2. As there, it is trained on its own outputs, too, `DEPTH` tokens ahead, with the keys that it
sees when it drafts.

    python -m lab.recipe.own --out TEXT --problems gsm8k_train.jsonl --plays plays.txt
    python -m lab.recipe.eagle3 --own TEXT --out OUT
    python -m lab.recipe.eagle3 --measure FOLDER
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, apply_rotary_pos_emb

from lab.recipe.features import Batch, Guesses, arguments, layers_config, load_target, measure, train

CAPTURES = (2, 5, 7)
"""Inputs of layers: a low, a middle and a high one of the bundled target's eight."""
DEPTH = 7


class Head(nn.Module):
    """The trainable part, with the published parameter names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        key_heads = config.num_key_value_heads * config.head_dim
        self.fc = nn.Linear(len(CAPTURES) * width, width, bias=False)
        layer: Any = LlamaDecoderLayer(config, 0)
        for name, outputs in (("q_proj", heads), ("k_proj", key_heads), ("v_proj", key_heads)):
            setattr(layer.self_attn, name, nn.Linear(2 * width, outputs, bias=False))
        layer.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.midlayer = layer
        self.norm: Any = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)

    def start_from(self, target: Any) -> None:
        """Starts as the target's last layer, which trains much faster than from nothing."""
        last, width = target.model.layers[-1], self.fc.out_features
        with torch.no_grad():
            self.fc.weight.mul_(0.1)[:, -width:] += torch.eye(width, device=self.fc.weight.device)
            for name in ("q_proj", "k_proj", "v_proj"):
                own = getattr(self.midlayer.self_attn, name).weight.mul_(0.1)
                own[:, width:] += getattr(last.self_attn, name).weight
            self.midlayer.self_attn.o_proj.load_state_dict(last.self_attn.o_proj.state_dict())
            self.midlayer.mlp.load_state_dict(last.mlp.state_dict())
            self.midlayer.hidden_norm.load_state_dict(last.input_layernorm.state_dict())
            self.midlayer.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
            self.norm.load_state_dict(target.model.norm.state_dict())
            self.lm_head.weight.copy_(target.lm_head.weight)

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        same: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Hidden states `[rows, length, hidden]` of every depth, from `embedded` tokens of that shape and the
        target's `features` of the tokens before.

        At depth d row i reads what depth d - 1 said at row i - 1. It sees the rows up to i - d as depth 0
        made them (verified text), and one row of each depth after that (the drafted chain), as in use; all of
        the `same` dialogue `[rows, length, length]`.
        """
        layer: Any = self.midlayer
        rows, length, _ = embedded.shape
        attention, index = layer.self_attn, torch.arange(length, device=embedded.device)
        ago = index[:, None] - index[None, :]
        known = layer.input_layernorm(embedded)
        hidden = self.fc(features)
        outputs: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for d in range(DEPTH):
            read = torch.cat([known, layer.hidden_norm(hidden)], dim=-1)
            query, key, value = (
                projection(read).view(rows, length, -1, attention.head_dim).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = apply_rotary_pos_emb(query, key, *angles)
            keys.append(key)
            values.append(value.to(key.dtype))
            seen = torch.cat(
                [same & (ago >= d), *(same & (ago == d - made) for made in range(1, d + 1))], dim=2
            )  # [rows, length, (d + 1) * length]
            seen[:, :, 0] |= ~seen.any(dim=2)  # rows without any key are of no use; they must stay numbers
            mixed = F.scaled_dot_product_attention(
                query, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=seen[:, None], enable_gqa=True
            )
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            outputs.append(hidden)
            hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        return outputs


def guesses(head: Head, target: Any, batch: Batch) -> Guesses:
    """At every depth those whose whole chain is of one answer."""
    embedded = target.model.embed_tokens(batch.tokens[:, 1:])
    positions = torch.arange(embedded.shape[1], device=embedded.device)[None]
    angles = target.model.rotary_emb(embedded, position_ids=positions)
    same, chances = batch.same[:, 1:, 1:], batch.chances[:, 1:]
    counted = batch.counts[:, 1:] & batch.same.diagonal(1, 1, 2)
    for d, output in enumerate(head(embedded, batch.features[:, :-1], angles, same)):
        if d:
            counted = counted & F.pad(counted[:, :-1], (1, 0))
        yield head.lm_head(head.norm(output[counted])), chances[counted]


def main() -> None:
    args = arguments("eagle3", __doc__, steps=3000, rows=32, length=256)
    torch.manual_seed(args.seed)
    target = load_target(args.target, args.device)
    head = Head(target.config).to(args.device)
    head.start_from(target)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": target.config.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(CAPTURES),
        "tie_word_embeddings": False,
        **layers_config(target.config),
    }
    if args.measure:
        measure(args, head, target, CAPTURES, lambda batch: guesses(head, target, batch))
    else:
        train(args, head, target, CAPTURES, lambda batch, _: guesses(head, target, batch), config)


if __name__ == "__main__":
    main()
