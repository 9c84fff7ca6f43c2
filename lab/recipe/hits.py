"""How often the target's next token is among a drafter's best 1, 4 and 10, on the target's own answers, by
domain.

At temperature 1 the answers are drawn with the coupled noise, and the drafter ranks by `log q + G` with the
same noise (`coupled`) or by `log q` alone (`plain`).

    python -m lab.recipe.hits --drafter FOLDER [--target bundled] [--prompts FILE ...] [--json]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.prompts import read_prompts
from flowspec.model.reference import Reference
from flowspec.model.sampler import F64, Sampler
from flowspec.model.text import Tokenizer, recommended

BEST = (1, 4, 10)
NEW_TOKENS_MAX = 120
RANKINGS = {"T=0": (0.0, False), "T=1 coupled": (1.0, True), "T=1 plain": (1.0, False)}


def greedy_answers(target: Path, prompts: Path) -> Iterator[tuple[str, list[int], list[int]]]:
    """Of each prompt of a file its domain, its tokens and those of the target's greedy answer."""
    files = ModelFiles(str(target))
    tokenizer, reference = Tokenizer(files), Reference(files, "float32")
    stop_ids = recommended(files, files.config()).stop_ids
    for prompt in read_prompts(prompts):
        ids = tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}])
        yield prompt.domain, list(ids), reference.generate(tuple(ids), Sampling(), NEW_TOKENS_MAX, stop_ids)


def ranks(
    drafter: Reference, prompt: tuple[int, ...], answer: list[int], sampling: Sampling, *, coupled: bool
) -> list[int]:
    """Rank of each token of the answer in the drafter's order; 0 is its best guess."""
    found = []
    every = np.arange(drafter.vocabulary_size)
    for index, logits in enumerate(drafter.forced_logits(prompt, answer[:-1])):
        order: F64 = logits.astype(np.float64)
        if coupled:
            order = Sampler(sampling, len(logits)).scores(logits, every, len(prompt) + index)
        found.append(int((order > order[answer[index]]).sum()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lab.recipe.hits", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--prompts", type=Path, action="append")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    files = ModelFiles(args.target)
    tokenizer = Tokenizer(files)
    target, drafter = Reference(files, "float32"), Reference(ModelFiles(args.drafter), "float32")
    stop_ids = recommended(files, files.config()).stop_ids
    found: dict[str, dict[str, list[int]]] = {name: defaultdict(list) for name in RANKINGS}
    prompts = [
        prompt for path in args.prompts or [bundled_folder("prompts.jsonl")] for prompt in read_prompts(path)
    ]
    for prompt in prompts:
        ids = tuple(tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}]))
        for name, (temperature, coupled) in RANKINGS.items():
            sampling = Sampling(temperature=temperature, seed=1)
            answer = target.generate(ids, sampling, NEW_TOKENS_MAX, stop_ids)
            found[name][prompt.domain] += ranks(drafter, ids, answer, sampling, coupled=coupled)
    shares = {
        name: {
            domain: [round(float(np.mean(np.array(values) < best)), 3) for best in BEST]
            for domain, values in domains.items()
        }
        for name, domains in found.items()
    }
    if args.json:
        print(json.dumps(shares))
        return
    for name, domains in shares.items():
        print(
            f"{name:12}",
            "  ".join(
                f"{domain} {'/'.join(f'{share:.2f}' for share in best)}" for domain, best in domains.items()
            ),
        )


if __name__ == "__main__":
    main()
