"""What trains a drafter that reads the target's hidden states: text that the target wrote itself (own.py),
what it makes of it, and the loop.

Resumable: the state is saved in OUT/training.pt every few hundred steps, each time with the drafter as it is
then, in its published layout (config.json, model.safetensors) and bfloat16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from flowspec.bench.cases import read_prompts
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.text import Tokenizer, recommended
from lab.plain_model import PlainModel
from lab.recipe.flags import RecipeParser
from lab.recipe.own import OwnText
from lab.recipe.train import keep, learning_rate, make_optimizer, resume

BEST = (1, 4, 10)
"""Of a drafter's guesses, among which the target's token is looked for."""
NEW_TOKENS_MAX = 120
GRADIENT_MAX = 0.5
FADING = 0.85
"""A token one further ahead counts so much less: it is reached less often."""


def greedy_answers(target: Path, prompts: Path) -> Iterator[tuple[str, list[int], list[int]]]:
    """Of each prompt of a file its domain, its tokens and those of the target's greedy answer."""
    files = ModelFiles(str(target))
    tokenizer, reference = Tokenizer(files), PlainModel(files, "float32")
    stop_ids = recommended(files, files.config()).stop_ids
    for prompt in read_prompts(prompts):
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        yield prompt.domain, list(ids), reference.generate(tuple(ids), Sampling(), NEW_TOKENS_MAX, stop_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Windows of text with what the target makes of them.

    `tokens` `[rows, length]`; `features` `[rows, length, hidden * captures]`; `chances` of the token after
    each `[rows, length, vocabulary]`; `counts` `[rows, length]`: whether that is an answer's; `same` `[rows,
    length, length]`: whether two tokens are of one dialogue.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    chances: torch.Tensor
    counts: torch.Tensor
    same: torch.Tensor


Guesses = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""One token ahead, two, ...: a drafter's logits `[rows, vocabulary]`, and the target's chances beside."""


def load_target(folder: Path, device: str = "cpu") -> Any:
    """The target in float32, frozen."""
    target: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return target.requires_grad_(False).to(device)


@torch.no_grad()
def batch_of(target: Any, captures: Sequence[int], tokens: torch.Tensor, counts: torch.Tensor) -> Batch:
    """Of windows `[rows, length]`. A dialogue, which begins with the first token of all, sees only itself."""
    dialogue = (tokens == tokens[0, 0]).cumsum(dim=1)
    same = dialogue[:, :, None] == dialogue[:, None, :]
    seen = same.tril()[:, None]
    found = target.model(input_ids=tokens, attention_mask=seen, use_cache=False, output_hidden_states=True)
    features = torch.cat([found.hidden_states[each] for each in captures], dim=-1)
    chances = target.lm_head(found.last_hidden_state).float().softmax(dim=-1)
    return Batch(tokens=tokens, features=features, chances=chances, counts=counts, same=same)


def loss_of(guesses: Guesses) -> tuple[torch.Tensor, list[float]]:
    """The mean cross-entropy, nearer tokens counting more, and how often the best guess is the target's."""
    losses, hits = [], []
    for logits, chances in guesses:
        losses.append(-(chances * F.log_softmax(logits.float(), dim=-1)).sum(dim=-1).mean())
        hits.append((logits.argmax(dim=-1) == chances.argmax(dim=-1)).float().mean().item())
    weights = torch.tensor([FADING**ahead for ahead in range(len(losses))], device=losses[0].device)
    return (torch.stack(losses) * weights).sum() / weights.sum(), hits


def train(
    args: argparse.Namespace,
    drafter: nn.Module,
    target: Any,
    captures: Sequence[int],
    guesses_of: Callable[[Batch, torch.Generator], Guesses],
    config: dict[str, Any],
) -> None:
    """Trains `drafter`, whose parameters have the published names, and saves it with `config`."""
    torch.set_num_threads(args.threads)
    drafter.to(args.device)
    text, optimizer = OwnText(args.own), make_optimizer(drafter, args.rate, decay=0.01)
    first = resume(args.out, drafter, optimizer)
    kind = torch.device(args.device).type
    dtype = getattr(torch, args.dtype)
    started, spent = time.monotonic(), 0.0
    for step in range(first, args.steps):
        at = max(step, int(args.steps * spent))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(at, args.steps, args.rate)
        drawn = text.draw_tokens(np.random.default_rng((args.seed, step)), args.rows, args.length)
        tokens, counts = (each.to(args.device) for each in drawn)
        random = torch.Generator(args.device).manual_seed(args.seed * 1_000_003 + step)
        with torch.autocast(kind, dtype=dtype, enabled=dtype != torch.float32):
            batch = batch_of(target, captures, tokens[:, :-1], counts)
            loss, hits = loss_of(guesses_of(batch, random))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), GRADIENT_MAX)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if args.seconds:
            spent = (time.monotonic() - started) / args.seconds
        is_last = step + 1 == args.steps or spent >= 1
        if (step + 1) % 25 == 0 or is_last:
            seen = (step + 1 - first) * args.rows * args.length
            ahead = "/".join(f"{hit:.3f}" for hit in hits)
            print(
                f"step {step + 1}/{args.steps} loss {loss.item():.3f} hits {ahead} "
                f"{seen / (time.monotonic() - started):.0f} tokens/s",
                flush=True,
            )
        if (step + 1) % args.save_every == 0 or is_last:
            keep(args.out, drafter, optimizer, step + 1)
            save(drafter, config, args.out)
        if is_last:
            break


@torch.no_grad()
def measure(
    args: argparse.Namespace,
    drafter: nn.Module,
    target: Any,
    captures: Sequence[int],
    guesses_of: Callable[[Batch], Guesses],
) -> None:
    """Prints the share of the target's greedy tokens among the best guesses, by domain and by how far ahead
    they are, after the target's own tokens."""
    drafter.load_state_dict(load_file(args.measure / "model.safetensors"))
    found: dict[str, list[list[int]]] = defaultdict(lambda: [])
    for domain, ids, answer in greedy_answers(args.target, args.prompts):
        tokens = torch.tensor([[*ids, *answer]])
        # The target itself draws an answer's first token; the first guess is about the one behind it.
        counts = (torch.arange(tokens.shape[1] - 1) >= len(ids))[None]
        batch = batch_of(target, captures, tokens[:, :-1], counts)
        for ahead, (logits, chances) in enumerate(guesses_of(batch)):
            best = chances.argmax(dim=-1, keepdim=True)
            ranks = (logits > logits.gather(1, best)).sum(dim=1).tolist()
            for name in (domain, "all"):
                found[name] += [[] for _ in range(ahead + 1 - len(found[name]))]
                found[name][ahead] += ranks
    found["all"] = found.pop("all")
    for name, by_distance in found.items():
        shares = [[np.mean(np.array(ranks) < best) for best in BEST] for ranks in by_distance]
        said = "  ".join("/".join(f"{share:.2f}".removeprefix("0") for share in each) for each in shares)
        print(f"{name:9} {said}", flush=True)


def save(drafter: nn.Module, config: dict[str, Any], folder: Path) -> None:
    """Writes config.json and model.safetensors; embedding and `lm_head` are the target's where they are none
    of its parameters."""
    tensors = {name: value.detach().to("cpu", torch.bfloat16) for name, value in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def layers_config(target: Any) -> dict[str, Any]:
    """What the config of a drafter says of its layers, which are as wide as the target's."""
    names = (
        *("bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size"),
        *("max_position_embeddings", "num_attention_heads", "num_key_value_heads", "pad_token_id"),
        *("rms_norm_eps", "vocab_size"),
    )
    said = {name: getattr(target, name) for name in names}
    return {"dtype": "bfloat16", **said, "rope_theta": target.rope_parameters["rope_theta"]}


def arguments(name: str, doc: str | None, *, steps: int, rows: int, length: int) -> argparse.Namespace:
    """What both trainings take."""
    parser = RecipeParser(name, doc)
    parser.share("--target")
    parser.add_argument("--own", type=Path, help="folder of text that it wrote (own.py)")
    parser.share("--out", help="folder for the checkpoint and the drafter")
    parser.share("--measure", help="measure the drafter in a folder and train nothing")
    parser.add_argument(
        "--prompts",
        type=Path,
        default=bundled_folder("prompts.jsonl"),
        help="jsonl of prompts to measure with (the bundled ones)",
    )
    parser.share("--steps", default=steps)
    parser.add_argument(
        "--seconds", type=float, help="end by then, the rate having fallen as over all steps (default: never)"
    )
    parser.share("--rows", default=rows)
    parser.share("--length", default=length)
    parser.share("--rate", "--dtype", "--save-every", "--threads", "--seed", "--device")
    args = parser.parse_args()
    if not args.measure and not (args.own and args.out):
        parser.error("--own and --out are needed for training")
    return args
