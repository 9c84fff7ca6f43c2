"""Text that the target writes itself, and what it held likely at every token: what a drafter has to guess in
use.

The target answers the training prompts of the four domains, or of others that files ask of it (asked.py),
many at once, greedily and sampled; beside every token of an answer its `BEST` likeliest are kept with their
probabilities, so that training on this text needs no teacher.

    python -m lab.recipe.own --out OUT --problems gsm8k_train.jsonl --plays plays.txt
    python -m lab.recipe.own --out OUT --asked javascript.jsonl --tokens 250000

Resumable: OUT fills with one file per few hundred answers, and the same command goes on behind the last one.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicLayer

from flowspec.bench.cases import read_prompts
from lab.plain_model import cache_name
from lab.recipe.corpus import Messages, documents, parse_mix, split
from lab.recipe.flags import RecipeParser

BEST = 128
PROMPT_TOKENS_MAX = 320
ANSWERS_PER_FILE = 384
COMPACT_BELOW = 7 / 8
"""Share of a batch's answers that must still be growing; below it the ended ones are dropped from the cache.
"""
ROOM = 64


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values with room behind them: a step writes its own rows, and copies the ones before only now
    and then."""

    keys: torch.Tensor
    values: torch.Tensor
    room: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the states of a step; returns all so far."""
        rows, heads, added, width = key_states.shape
        before = self.get_seq_length()
        length = before + added
        if self.room is None or self.room.shape[1] != rows or self.room.shape[3] < length:
            self.room = key_states.new_empty(2, rows, heads, length + ROOM, width)
            if before:
                self.room[0, :, :, :before], self.room[1, :, :, :before] = self.keys, self.values
        self.room[0, :, :, before:length], self.room[1, :, :, before:length] = key_states, value_states
        self.keys, self.values = self.room[0, :, :, :length], self.room[1, :, :, :length]
        self.is_initialized = True
        return self.keys, self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """New tokens, the stop token included; `best` and `chances` `[tokens, BEST]` are the target's at
    temperature 1."""

    tokens: np.ndarray
    best: np.ndarray
    chances: np.ndarray


@torch.inference_mode()
def answer_all(
    target: Any,
    prompts: list[list[int]],
    temperatures: list[float],
    new_tokens_max: int,
    random: torch.Generator,
) -> list[Answer]:
    """The target's answers to `prompts`, each at its own temperature."""
    longest, device = max(len(prompt) for prompt in prompts), target.device
    fed = torch.tensor(
        [[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device
    )  # positions are relative: padding shifts nothing
    seen = torch.tensor(
        [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device
    )
    heat = torch.tensor(temperatures, device=device)[:, None]
    tokens = np.zeros((len(prompts), new_tokens_max), np.uint16)
    best = np.zeros((len(prompts), new_tokens_max, BEST), np.uint16)
    chances = np.zeros((len(prompts), new_tokens_max, BEST), np.float16)
    lengths = np.full(len(prompts), new_tokens_max)
    rows = np.arange(len(prompts))
    cache, called = Cache(layer_class_to_replicate=RoomyLayer), cache_name(target)
    for step in range(new_tokens_max):
        logits = target(
            input_ids=fed, attention_mask=seen, use_cache=True, logits_to_keep=1, **{called: cache}
        ).logits[:, -1]
        likeliest = logits.softmax(dim=-1).topk(BEST)
        noise = -torch.empty_like(logits).exponential_(generator=random).log()
        drawn = (logits + heat * noise).argmax(dim=-1)
        tokens[rows, step], best[rows, step], chances[rows, step] = (
            drawn.cpu().numpy(),
            likeliest.indices.cpu().numpy(),
            likeliest.values.cpu().numpy(),
        )
        ending = rows[tokens[rows, step] == target.config.eos_token_id]
        lengths[ending] = np.minimum(lengths[ending], step + 1)
        growing = np.flatnonzero(lengths[rows] == new_tokens_max)
        if not len(growing):
            break
        fed, seen = drawn[:, None], torch.cat((seen, seen.new_ones(len(rows), 1)), dim=1)
        if len(growing) < COMPACT_BELOW * len(rows):
            kept = torch.from_numpy(growing).to(device)
            cache.batch_select_indices(kept)
            fed, seen, heat, rows = fed[kept], seen[kept], heat[kept], rows[growing]
    return [
        Answer(tokens=tokens[i, :n], best=best[i, :n], chances=chances[i, :n]) for i, n in enumerate(lengths)
    ]


def stream(prompts: list[list[int]], answers: list[Answer]) -> dict[str, np.ndarray]:
    """Dialogues one behind the other; row i of `best` and `chances` is about token i + 1, and zero within a
    prompt."""
    size = sum(len(prompt) + len(answer.tokens) for prompt, answer in zip(prompts, answers, strict=True))
    tokens, best, chances = (
        np.zeros(size, np.uint16),
        np.zeros((size, BEST), np.uint16),
        np.zeros((size, BEST), np.float16),
    )
    at = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        first, end = at + len(prompt), at + len(prompt) + len(answer.tokens)
        tokens[at:first], tokens[first:end] = prompt, answer.tokens
        best[first - 1 : end - 1], chances[first - 1 : end - 1] = answer.best, answer.chances
        at = end
    return {"tokens": tokens, "best": best, "chances": chances}


class OwnText:
    """A folder that this recipe has written, or what it holds of one domain; training windows begin where a
    dialogue begins."""

    def __init__(self, folder: Path, domain: str = "*") -> None:
        parts = [dict(np.load(path)) for path in sorted(folder.glob(f"*-{domain}.npz"))]
        self.tokens, self.best, self.chances = (
            np.concatenate([part[name] for part in parts]) for name in ("tokens", "best", "chances")
        )
        self.starts = np.flatnonzero(self.tokens == self.tokens[0])
        self.is_answer = self.chances[:, 0] > 0

    def draw_tokens(
        self, rng: np.random.Generator, rows: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows `[rows, length + 1]` of tokens, and `[rows, length]`, whether the next one is an
        answer's."""
        index = self._windows(rng, rows, length)
        return (
            torch.from_numpy(self.tokens[index].astype(np.int64)),
            torch.from_numpy(self.is_answer[index[:, :-1]]),
        )

    def _windows(self, rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
        drawn = rng.integers(
            0, len(self.tokens) - length, size=rows
        )  # by token, so that a domain has the share it was written with
        first = self.starts[np.searchsorted(self.starts, drawn, side="right") - 1]
        windows: np.ndarray = first[:, None] + np.arange(length + 1)
        return windows

    def draw(
        self, rng: np.random.Generator, rows: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Windows `[rows, length + 1]` of tokens, and `[rows, length, BEST]` of the target's likeliest and
        their probabilities."""
        index = self._windows(rng, rows, length)
        tokens, best = self.tokens[index].astype(np.int64), self.best[index[:, :-1]].astype(np.int64)
        return (
            torch.from_numpy(tokens),
            torch.from_numpy(best),
            torch.from_numpy(self.chances[index[:, :-1]].astype(np.float32)),
        )


def questions(args: argparse.Namespace) -> dict[str, list[Messages]]:
    """What the target is asked, by domain: what the files ask, or the training questions of the mix."""
    found: dict[str, list[Messages]] = defaultdict(list)
    if args.asked:
        for prompt in [prompt for path in args.asked for prompt in read_prompts(path)]:
            found[prompt.domain].append([{"role": "user", "content": prompt.turns[0]}])
        return found
    for domain, dialogues in documents(args.problems, args.plays).items():
        if domain in parse_mix(args.mix):
            found[domain] = [dialogue[:-1] for dialogue in split(dialogues)[1]]
    return found


def write(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    target = target.eval().to(args.device)
    prompts: dict[str, list[list[int]]] = {}
    for domain, asked in questions(args).items():
        texts = [
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages in asked[: args.prompts_max]
        ]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        prompts[domain] = [ids for ids in encoded if len(ids) <= PROMPT_TOKENS_MAX]
    print("prompts:", {domain: len(found) for domain, found in prompts.items()}, flush=True)
    weights = dict.fromkeys(prompts, 1.0) if args.asked else parse_mix(args.mix)
    args.out.mkdir(parents=True, exist_ok=True)
    done = sorted(args.out.glob("*.npz"))
    files, written = dict.fromkeys(weights, 0), dict.fromkeys(weights, 0)
    for path in done:
        domain = path.stem.partition("-")[2]
        if domain in weights:
            files[domain] += 1
            written[domain] += len(np.load(path)["tokens"])
    started, before = time.monotonic(), sum(written.values())
    number = len(done)
    while sum(written.values()) < args.tokens:
        domain = min(weights, key=lambda name: written[name] / weights[name])
        choice, temperatures = [], []
        for i in range(files[domain] * ANSWERS_PER_FILE, (files[domain] + 1) * ANSWERS_PER_FILE):
            again, which = divmod(i, len(prompts[domain]))
            choice.append(prompts[domain][which])
            temperatures.append(args.temperatures[(which + again) % len(args.temperatures)])
        order = np.argsort([len(prompt) for prompt in choice], kind="stable")  # little padding
        random = torch.Generator(args.device).manual_seed(number)
        answers: dict[int, Answer] = {}
        for batch in np.split(order, range(args.rows, len(order), args.rows)):
            batched = answer_all(
                target, [choice[i] for i in batch], [temperatures[i] for i in batch], args.new_tokens, random
            )
            answers.update(zip(batch.tolist(), batched, strict=True))
        text = stream(choice, [answers[i] for i in range(len(choice))])
        partial = args.out / "partial"
        with partial.open("wb") as file:
            np.savez(file, **text)  # type: ignore[arg-type]
        partial.rename(args.out / f"{number:04}-{domain}.npz")
        number, files[domain], written[domain] = (
            number + 1,
            files[domain] + 1,
            written[domain] + len(text["tokens"]),
        )
        speed = (sum(written.values()) - before) / (time.monotonic() - started)
        print(f"{sum(written.values())}/{args.tokens} tokens {written} {speed:.0f} tokens/s", flush=True)


def main() -> None:
    parser = RecipeParser("own", __doc__)
    parser.share("--target", help="folder of the model that writes (the bundled one)")
    parser.share("--out", required=True, help="folder for the text")
    parser.share("--problems", "--plays")
    parser.add_argument(
        "--asked",
        type=Path,
        action="append",
        help="jsonl of prompts with their domains, as many tokens of each, instead of the four; repeatable",
    )
    mix = "code=.3,problems=.3,plays=.25,talk=.15"
    parser.share("--mix", default=mix, help="share of each domain's tokens (%(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=1_700_000, help="how many to write, prompts included (%(default)s)"
    )
    parser.add_argument("--new-tokens", type=int, default=160, help="longest answer (%(default)s)")
    parser.share("--rows", default=128, help="answers at once (%(default)s)")
    parser.add_argument(
        "--prompts-max", type=int, default=20_000, help="prompts to take of a domain (%(default)s)"
    )
    parser.add_argument(
        "--temperatures",
        type=lambda text: [float(each) for each in text.split(",")],
        default="0,1,0.7",
        help="one after the other (%(default)s)",
    )
    parser.share("--threads", "--device")
    args = parser.parse_args()
    if not args.asked and not (args.problems and args.plays):
        parser.error("--problems and --plays are needed, or --asked")
    write(args)


if __name__ == "__main__":
    main()
