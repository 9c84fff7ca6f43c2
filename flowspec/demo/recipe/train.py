"""Trains one bundled model: from a start folder, on the four domains, by cross-entropy or distilled from a teacher.

Resumable: the state is saved every few hundred steps in OUT/training.pt, and the same command goes on from there.
The finished model is written to OUT in the Hugging Face format, in bfloat16.
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
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowspec.demo.recipe.corpus import DOMAINS, Corpus

DISTILL_SHARE = 0.9
WARM_UP_STEPS = 100
FINAL_RATE_SHARE = 0.05


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then cosine down to a twentieth of the peak."""
    if step < WARM_UP_STEPS:
        return peak * (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return peak * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def loss_of(model: Any, teacher: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss over windows `[rows, length + 1]`; with a teacher mostly the KL divergence from its distribution."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    log_q = F.log_softmax(logits.float(), dim=-1)
    nll = F.nll_loss(log_q.flatten(0, 1), tokens[:, 1:].flatten())
    if teacher is None:
        return nll
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        p = teacher(input_ids=tokens[:, :-1], use_cache=False).logits.float().softmax(dim=-1)
    cross = -(p * log_q).sum(dim=-1).mean()
    mixed: torch.Tensor = DISTILL_SHARE * cross + (1 - DISTILL_SHARE) * nll
    return mixed


@torch.no_grad()
def validation_losses(model: Any, corpus: Corpus, length: int) -> dict[str, float]:
    """Cross-entropy per token by domain, in nats."""
    model.eval()
    losses = {d: loss_of(model, None, torch.from_numpy(corpus.validation_rows(d, 8, length))).item() for d in DOMAINS}
    model.train()
    return losses


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
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95))
    weights = {name: float(value) for name, value in (pair.split("=") for pair in args.mix.split(","))}
    checkpoint, first = args.out / "training.pt", 0
    args.out.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print(f"resumed at step {first}", flush=True)
    step_loss = torch.compile(loss_of) if args.compile else loss_of
    model.train()
    started, seen = time.monotonic(), 0
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.rate)
        rows = corpus.draw(np.random.default_rng((args.seed, step)), weights, args.rows, args.length)
        loss = step_loss(model, teacher, torch.from_numpy(rows))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += args.rows * args.length
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{args.steps} loss {loss.item():.3f} {seen / (time.monotonic() - started):.0f} tokens/s", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            print("validation:", {d: round(v, 3) for d, v in validation_losses(model, corpus, args.length).items()}, flush=True)
            partial = checkpoint.with_suffix(".partial")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, partial)
            partial.replace(checkpoint)
    save(model, tokenizer, args.out)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the model in bfloat16 and its tokenizer, as every bundled model is shipped."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flowspec.demo.recipe.train", description=__doc__)
    parser.add_argument("--start", type=Path, required=True, help="model folder to start from (weights, config, tokenizer)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and the finished model")
    parser.add_argument("--teacher", type=Path, help="model folder to distil from")
    parser.add_argument("--problems", type=Path, required=True, help="jsonl of word problems (question, answer)")
    parser.add_argument("--plays", type=Path, required=True, help="text file of plays, speeches separated by blank lines")
    parser.add_argument("--mix", default="talk=.55,problems=.17,code=.17,plays=.11", help="share of each domain (%(default)s)")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=8, help="windows per step (%(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens per window (%(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="compile the step (a C++ compiler is needed)")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
