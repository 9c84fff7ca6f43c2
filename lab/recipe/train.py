"""Trains one bundled model: from a start folder, on the four domains, by cross-entropy or distilled from a
teacher, also on text that the teacher wrote itself (own.py).

Resumable: the state is saved every few hundred steps in OUT/training.pt, and the same command goes on from
there. The finished model is written to OUT in the Hugging Face format, in bfloat16.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.recipe.corpus import DOMAINS, Corpus, parse_mix
from lab.recipe.flags import RecipeParser
from lab.recipe.own import OwnText

DISTILL_SHARE = 0.9
WARM_UP_STEPS = 100
CHECKPOINT = "training.pt"
FINAL_RATE_SHARE = 0.05
OWN = "own"
OTHER_MIN = 1e-6


def is_own(name: str) -> bool:
    """Whether a name in a mix is text that the teacher wrote: all of it (`own`) or that of a domain
    (`own-code`)."""
    return name.partition("-")[0] == OWN


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then cosine down to a twentieth of the peak."""
    if step < WARM_UP_STEPS:
        return peak * (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return peak * (
        FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    )


def loss_of(model: Any, teacher: Any, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Mean loss over windows `[rows, length + 1]`; with a teacher mostly the KL divergence from its
    distribution."""
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    log_q = F.log_softmax(logits.float(), dim=-1)
    nll = F.nll_loss(log_q.flatten(0, 1), tokens[:, 1:].flatten())
    if teacher is None:
        return nll
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        p = teacher(input_ids=tokens[:, :-1], use_cache=False).logits.float().softmax(dim=-1)
    cross = -(p * log_q).sum(dim=-1).mean()
    mixed: torch.Tensor = DISTILL_SHARE * cross + (1 - DISTILL_SHARE) * nll
    return mixed


def own_loss_of(
    model: Any, tokens: torch.Tensor, best: torch.Tensor, chances: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The same for windows of own text, over the tokens of answers.

    The KL divergence is that between the likeliest tokens, with all others as one. A dialogue sees only
    itself.
    """
    dialogue = (tokens[:, :-1] == tokens[0, 0]).cumsum(dim=1)
    seen = (dialogue[:, :, None] == dialogue[:, None, :]).tril()[:, None]
    is_answer = chances[..., 0] > 0
    best, chances = best[is_answer], chances[is_answer]
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        hidden = model.model(input_ids=tokens[:, :-1], attention_mask=seen, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[is_answer])  # the widest layer, so for those tokens only
    log_q = F.log_softmax(logits.float(), dim=-1)
    log_best = log_q.gather(1, best)
    other = (1 - chances.sum(dim=-1)).clamp(min=0)
    log_other = torch.log((1 - log_best.exp().sum(dim=-1)).clamp(min=OTHER_MIN))
    cross = -(chances * log_best).sum(dim=-1) - other * log_other
    nll = F.nll_loss(log_q, tokens[:, 1:][is_answer])
    mixed: torch.Tensor = DISTILL_SHARE * cross.mean() + (1 - DISTILL_SHARE) * nll
    return mixed


@torch.no_grad()
def validation_losses(model: Any, corpus: Corpus, length: int, dtype: torch.dtype) -> dict[str, float]:
    """Cross-entropy per token by domain, in nats."""
    model.eval()
    losses = {
        d: loss_of(model, None, torch.from_numpy(corpus.validation_rows(d, 8, length)), dtype).item()
        for d in DOMAINS
    }
    model.train()
    return losses


def make_optimizer(model: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    """AdamW; norms and biases do not decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": other, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def resume(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Takes up the state in a run's folder, if there is one; returns the step to go on with."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / CHECKPOINT).exists():
        return 0
    state = torch.load(out / CHECKPOINT, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    print(f"resumed at step {state['step']}", flush=True)
    return int(state["step"])


def keep(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Saves a run's state; a run that is killed meanwhile still has the one before."""
    partial = (out / CHECKPOINT).with_suffix(".partial")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
    partial.replace(out / CHECKPOINT)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.start)
    corpus = Corpus(tokenizer, args.problems, args.plays)
    print("tokens:", {d: len(corpus.train[d]) for d in DOMAINS}, flush=True)
    model: Any = AutoModelForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    teacher: Any = None
    if args.teacher:
        teacher = AutoModelForCausalLM.from_pretrained(args.teacher, dtype=torch.float32).eval()
    optimizer = make_optimizer(model, args.rate, decay=0.1)
    weights = parse_mix(args.mix)
    own_names = [name for name in weights if is_own(name)]
    own_shares = np.cumsum([weights.pop(name) for name in own_names]) / sum(parse_mix(args.mix).values())
    own = [OwnText(args.own, name.partition("-")[2] or "*") for name in own_names]
    dtype = getattr(torch, args.dtype)
    first = resume(args.out, model, optimizer)
    step_loss = torch.compile(loss_of) if args.compile else loss_of
    step_own_loss = torch.compile(own_loss_of) if args.compile else own_loss_of
    model.train()
    started, seen = time.monotonic(), 0
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.rate)
        rng = np.random.default_rng((args.seed, step))
        which = int(np.searchsorted(own_shares, rng.random(), side="right")) if own else 0
        if which < len(own):
            loss = step_own_loss(model, *own[which].draw(rng, args.rows, args.length), dtype)
        else:
            loss = step_loss(
                model, teacher, torch.from_numpy(corpus.draw(rng, weights, args.rows, args.length)), dtype
            )
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += args.rows * args.length
        if (step + 1) % 50 == 0:
            print(
                f"step {step + 1}/{args.steps} loss {loss.item():.3f} "
                f"{seen / (time.monotonic() - started):.0f} tokens/s",
                flush=True,
            )
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            print(
                "validation:",
                {d: round(v, 3) for d, v in validation_losses(model, corpus, args.length, dtype).items()},
                flush=True,
            )
            keep(args.out, model, optimizer, step + 1)
    save(model, tokenizer, args.out)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the model in bfloat16 and its tokenizer, as every bundled model is shipped."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def add_training_arguments(parser: RecipeParser, *, steps: int, dtype: str, faster: str) -> None:
    """What every training takes; `faster` says when the other dtype is."""
    parser.share("--mix", default="talk=.55,problems=.17,code=.17,plays=.11")
    parser.share("--steps", default=steps)
    parser.share("--rows", default=8)
    parser.share("--length", default=512)
    parser.share("--rate")
    parser.share("--dtype", default=dtype, help=faster)
    parser.share("--save-every", "--threads", "--seed")
    parser.add_argument("--compile", action="store_true", help="compile the step (a C++ compiler is needed)")


def main() -> None:
    parser = RecipeParser("train", __doc__)
    parser.description = __doc__
    parser.add_argument(
        "--start", type=Path, required=True, help="model folder to start from (weights, config, tokenizer)"
    )
    parser.share("--out", required=True, help="folder for the checkpoint and the finished model")
    parser.add_argument("--teacher", type=Path, help="model folder to distil from")
    parser.share("--problems", "--plays", required=True)
    parser.add_argument(
        "--own",
        type=Path,
        help="folder of text that the teacher wrote (own.py), for `own` and `own-DOMAIN` in --mix",
    )
    add_training_arguments(
        parser, steps=4000, dtype="bfloat16", faster="what the processor is faster with (%(default)s)"
    )
    args = parser.parse_args()
    if any(is_own(name) for name in parse_mix(args.mix)) and not args.own:
        parser.error("--own is needed for `own` in --mix")
    train(args)


if __name__ == "__main__":
    main()
