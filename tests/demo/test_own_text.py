"""Text that the target wrote itself: a domain's part of it can be trained on alone, and a dialogue is learnt
from by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flowspec.bench.checkpoints import SMALL, VOCABULARY_SIZE, make_checkpoint
from tests.recipe.own import Answer, OwnText, stream
from tests.recipe.train import DISTILL_SHARE, own_loss_of

BEGIN, LENGTH = 7, 6
"""The token that every dialogue begins with, and how many a prompt and its answer have."""


def dialogues(first_token: int, best: int, rng: np.random.Generator, count: int = 5) -> dict[str, np.ndarray]:
    """Prompts of two tokens and answers of four, from `first_token` on, with the `best` likeliest of a drawn
    distribution."""
    answers = []
    for _ in range(count):
        chances = -np.sort(-rng.dirichlet(np.ones(VOCABULARY_SIZE), size=4), axis=1)[:, :best]
        ids = np.stack([rng.permutation(VOCABULARY_SIZE)[:best] for _ in range(4)])
        tokens = np.arange(first_token, first_token + 4)
        padded = [np.zeros((4, 128), kind) for kind in (np.uint16, np.float32)]
        padded[0][:, :best], padded[1][:, :best] = ids, chances
        answers.append(Answer(tokens=tokens.astype(np.uint16), best=padded[0], chances=padded[1]))
    return stream([[BEGIN, first_token]] * count, answers)


def test_a_domain_of_own_text_can_be_drawn_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number, (domain, first_token) in enumerate([("code", 20), ("plays", 40), ("code", 60)]):
        np.savez(tmp_path / f"{number:04}-{domain}.npz", **dialogues(first_token, 8, rng))  # type: ignore[arg-type]

    def drawn(domain: str) -> set[int]:
        tokens, _, _ = OwnText(tmp_path, domain).draw(rng, rows=64, length=LENGTH)
        assert set(tokens[:, 0].tolist()) == {BEGIN}
        return set(tokens[:, 1].tolist())

    assert drawn("code") == {20, 60}
    assert drawn("plays") == {40}
    assert drawn("*") == {20, 40, 60}


@pytest.mark.parametrize("row", [0, 1])
def test_only_answers_count_and_a_dialogue_sees_only_itself(tmp_path: Path, row: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        make_checkpoint(tmp_path, "llama", SMALL), dtype=torch.float32
    )
    text = dialogues(20 + row, 32, np.random.default_rng(row), count=2)
    tokens = torch.from_numpy(text["tokens"].astype(np.int64))[None]
    best, chances = (
        torch.from_numpy(text["best"][:-1].astype(np.int64))[None],
        torch.from_numpy(text["chances"][:-1].astype(np.float32))[None],
    )
    expected = []
    for dialogue in (0, 1):
        own = slice(dialogue * LENGTH, (dialogue + 1) * LENGTH)
        log_q = model(input_ids=tokens[:, own]).logits[0].log_softmax(dim=-1).detach().double()
        for place in range(1, LENGTH - 1):  # the last token of the prompt, and all of the answer but its last
            at = own.start + place
            ids, p = best[0, at, :32], chances[0, at, :32].double()
            other = torch.log(1 - log_q[place, ids].exp().sum()) * (1 - p.sum())
            cross = -(p * log_q[place, ids]).sum() - other
            expected.append(DISTILL_SHARE * cross - (1 - DISTILL_SHARE) * log_q[place, tokens[0, at + 1]])
    loss = own_loss_of(model, tokens, best[..., :32], chances[..., :32], torch.float32)
    assert loss.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)
