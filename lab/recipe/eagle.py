"""Trains an EAGLE-1 head for a bundled model on the recipe's text, and measures how often it is right.

The head is the published one (arXiv 2401.15077): row i reads the embedding of token i + 1 and the target's
feature i (its last hidden state after the final norm), and predicts feature i + 1; the target's `lm_head`
turns that into token i + 2. The second part of a run also trains it on its own features, two deep, with the
keys that it will see when it drafts.

    python -m lab.recipe.eagle --out OUT --problems gsm8k_train.jsonl --plays plays.txt [--compile]
    python -m lab.recipe.eagle --measure FOLDER

Resumable: the state is saved in OUT/training.pt every few hundred steps, each time with the head as it is
then, in the published layout (config.json, model.safetensors) and bfloat16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from flowspec.model.files import bundled_folder
from lab.recipe.corpus import DOMAINS, Corpus, parse_mix
from lab.recipe.features import BEST, greedy_answers, layers_config, load_target
from lab.recipe.flags import RecipeParser
from lab.recipe.train import add_training_arguments, keep, learning_rate, make_optimizer, resume

DEPTH = 3
"""Tokens ahead that a head is trained and measured for: one from the target's features, the others from its
own."""
DEEP_FROM = 0.5
NOISE = 0.1
FEATURE_SHARE = 0.5
"""Weight of the features' smooth-L1 beside the KL divergence: what counts in the end is which token is best.
"""


class Head(nn.Module):
    """The trainable part, with the published parameter names: `fc` and `layers.0` without an input norm.

    `scale` multiplies the embedding on its way in: its entries are fifty times smaller than a feature's, and
    `fc` would take longer than a run to grow weights that make up for it. `published` folds it into `fc`; a
    published head has 1.
    """

    def __init__(self, config: Any, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=True)
        layer = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])

    def start_from(self, layer: Any) -> None:
        """Starts as the target's last layer over its own feature, which trains much faster than from
        nothing."""
        width = self.fc.out_features
        with torch.no_grad():
            self.fc.weight[:, width:].copy_(torch.eye(width) / 2)
            self.fc.bias.zero_()
        self.layers[0].load_state_dict(
            {k: v for k, v in layer.state_dict().items() if "input_layernorm" not in k}
        )

    def published(self) -> dict[str, torch.Tensor]:
        """The tensors as they are shipped."""
        tensors = {name: value.detach().clone() for name, value in self.state_dict().items()}
        tensors["fc.weight"][:, : self.fc.out_features] *= self.scale
        return {name: value.to(torch.bfloat16) for name, value in tensors.items()}

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        depth: int,
    ) -> list[torch.Tensor]:
        """Predicted features at every depth, each `[rows, length, hidden]`, from `embedded` and `features` of
        that shape.

        At depth d row i reads the feature that depth d - 1 predicted for it. It sees the rows up to i - d as
        depth 0 made them (verified text), and one row of each depth after that (the drafted chain), as in
        use.
        """
        layer: Any = self.layers[0]
        rows, length, _ = embedded.shape
        attention, index = layer.self_attn, torch.arange(length)
        outputs: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for d in range(depth):
            hidden = self.fc(torch.cat((embedded * self.scale, features), dim=-1))
            query, key, value = (
                projection(hidden).view(rows, length, -1, attention.head_dim).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = apply_rotary_pos_emb(query, key, *angles)
            keys.append(key)
            values.append(value)
            ago = index[:, None] - index[None, :]
            seen = torch.cat(
                [ago >= d, *(ago == d - made for made in range(1, d + 1))], dim=1
            )  # [length, (d + 1) * length]
            mixed = F.scaled_dot_product_attention(
                query,
                torch.cat(keys, 2),
                torch.cat(values, 2),
                attn_mask=seen,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            outputs.append(hidden)
            features = F.pad(hidden[:, :-1], (0, 0, 1, 0))  # row 0 has none; no row that counts sees it
        return outputs


def loss_of(
    head: Any, target: Any, tokens: torch.Tensor, noise: torch.Tensor, depth: int, dtype: torch.dtype
) -> torch.Tensor:
    """Mean over depths, for windows `[rows, length + 1]`; `noise` `[rows, length, hidden]` is added to the
    target's features."""
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        with torch.no_grad():
            features = target.model(input_ids=tokens, use_cache=False).last_hidden_state.float()
            p = target.lm_head(features[:, 1:]).float().softmax(dim=-1)
            embedded = target.model.embed_tokens(tokens[:, 1:])
            positions = torch.arange(embedded.shape[1])[None]
            angles = target.model.rotary_emb(embedded, position_ids=positions)
        outputs = head(embedded, features[:, :-1] + noise, angles, depth)
        logits = [target.lm_head(output).float() for output in outputs]
    total = torch.zeros(())
    for d in range(depth):  # a depth's first rows have no chain before them
        cross = -(p[:, d:] * F.log_softmax(logits[d][:, d:], dim=-1)).sum(dim=-1).mean()
        total = (
            total + cross + FEATURE_SHARE * F.smooth_l1_loss(outputs[d][:, d:].float(), features[:, 1 + d :])
        )
    return total / depth


@torch.no_grad()
def validation_hits(head: Any, target: Any, corpus: Corpus, length: int) -> dict[str, list[float]]:
    """By domain and depth: how often the head's best token is the target's best, over validation text."""
    hits = {}
    for domain in DOMAINS:
        tokens = torch.from_numpy(corpus.validation_rows(domain, 4, length))
        best = target(input_ids=tokens, use_cache=False).logits[:, 1:].argmax(dim=-1)
        guesses = [target.lm_head(output).argmax(dim=-1) for output in predicted(head, target, tokens)]
        hits[domain] = [
            round((guess == best)[:, d:].float().mean().item(), 3) for d, guess in enumerate(guesses)
        ]
    return hits


@torch.no_grad()
def predicted(head: Any, target: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The features that the head predicts for tokens `[rows, length + 1]` at every depth, each `[rows,
    length, hidden]`."""
    features = target.model(input_ids=tokens, use_cache=False).last_hidden_state
    embedded = target.model.embed_tokens(tokens[:, 1:])
    angles = target.model.rotary_emb(embedded, position_ids=torch.arange(embedded.shape[1])[None])
    found: list[torch.Tensor] = head(embedded, features[:, :-1], angles, DEPTH)
    return found


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    corpus = Corpus(AutoTokenizer.from_pretrained(args.target), args.problems, args.plays)
    print("tokens:", {d: len(corpus.train[d]) for d in DOMAINS}, flush=True)
    target = load_target(args.target)
    head = Head(target.config, scale=1 / target.model.embed_tokens.weight.square().mean().sqrt().item())
    head.start_from(target.model.layers[-1])
    optimizer = make_optimizer(head, args.rate, decay=0.01)
    weights = parse_mix(args.mix)
    first = resume(args.out, head, optimizer)
    step_loss = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    dtype = getattr(torch, args.dtype)
    started, seen = time.monotonic(), 0
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.rate)
        rng = np.random.default_rng((args.seed, step))
        tokens = torch.from_numpy(corpus.draw(rng, weights, args.rows, args.length))
        is_deep = step >= DEEP_FROM * args.steps
        shape = (args.rows, args.length, target.config.hidden_size)
        noise = torch.from_numpy(rng.uniform(-NOISE, NOISE, shape).astype(np.float32))
        loss = step_loss(head, target, tokens, noise, DEPTH if is_deep else 1, dtype)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += args.rows * args.length
        if (step + 1) % 25 == 0:
            print(
                f"step {step + 1}/{args.steps} loss {loss.item():.3f} "
                f"{seen / (time.monotonic() - started):.0f} tokens/s",
                flush=True,
            )
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            print("hits by depth:", validation_hits(head, target, corpus, args.length), flush=True)
            keep(args.out, head, optimizer, step + 1)
            save(head, target.config, args.out)


def save(head: Head, target: Any, folder: Path) -> None:
    """Writes config.json and model.safetensors in the published layout, without an embedding: the target's is
    used."""
    save_file(head.published(), folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bias": True,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        **layers_config(target),
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


@torch.no_grad()
def measure(args: argparse.Namespace) -> None:
    """Prints the share of the target's greedy tokens among the head's best, by domain and depth."""
    target = load_target(args.target)
    head = Head(target.config)
    head.load_state_dict(load_file(args.measure / "model.safetensors"))
    found: dict[str, list[list[int]]] = defaultdict(lambda: [[] for _ in range(DEPTH)])
    for domain, ids, answer in greedy_answers(args.target, bundled_folder("prompts.jsonl")):
        tokens = torch.tensor([[*ids, *answer]])
        for d, output in enumerate(predicted(head, target, tokens)):
            first = (
                len(ids) + d
            )  # the target itself draws the first token of an answer; a chain of d needs d tokens after it
            rows = target.lm_head(output[0, first - 1 : -1])  # row i is about token i + 2
            wanted = tokens[0, first + 1 :, None]
            found[domain][d] += (rows > rows.gather(1, wanted)).sum(dim=1).tolist()
    found["all"] = [[rank for ranks in found.values() for rank in ranks[d]] for d in range(DEPTH)]
    for domain, depths in found.items():
        shares = [[(np.array(ranks) < best).mean() for best in BEST] for ranks in depths]
        print(
            f"{domain:9}",
            "  ".join(
                f"token {d + 1}: {'/'.join(f'{s:.2f}' for s in share)}" for d, share in enumerate(shares)
            ),
        )


def main() -> None:
    parser = RecipeParser("eagle", __doc__)
    parser.share("--target")
    parser.share("--out", help="folder for the checkpoint and the head")
    parser.share("--measure", help="measure the head in a folder and train nothing")
    parser.share("--problems", "--plays")
    faster = "bfloat16 is faster where the processor has it"
    add_training_arguments(parser, steps=1500, dtype="float32", faster=faster)
    args = parser.parse_args()
    if args.measure:
        measure(args)
    elif args.out and args.problems and args.plays:
        train(args)
    else:
        parser.error("--out, --problems and --plays are needed for training")


if __name__ == "__main__":
    main()
