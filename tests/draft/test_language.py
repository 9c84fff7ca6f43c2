"""A language model proposes below each node what the plain model would after the node's path, whatever the
tree did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec.bench.checkpoints import SMALL, VOCABULARY_SIZE, make_variant
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal, Sampling
from flowspec.draft.language import LanguageModelDrafter
from flowspec.draft.ranking import Ranker
from flowspec.errors import ClusterError, PeerError
from flowspec.model.files import ModelFiles
from tests.draft.trees import Teller, segment

CPU = torch.device("cpu")
WIDTH = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_variant(tmp_path_factory.mktemp("drafter"), "qwen2-sliding")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def drafter_of(folder: Path, **options: Any) -> LanguageModelDrafter:
    return LanguageModelDrafter.load(ModelFiles(str(folder)), "float32", CPU, **options)


class Oracle:
    """What the plain model proposes after a text."""

    def __init__(self, plain: Any, *, coupled: bool = True) -> None:
        self._plain = plain
        self._ranker = Ranker(VOCABULARY_SIZE, coupled=coupled)

    @torch.inference_mode()
    def check(self, teller: Teller, proposal: Proposal, width: int = WIDTH) -> None:
        text = teller.text(proposal.node)
        logits = self._plain(input_ids=torch.tensor([text]), use_cache=False).logits[:, -1].numpy()
        (expected,) = self._ranker.best(
            logits, [(teller.sampling, len(text))], width, [teller.before(proposal.node)]
        )
        assert (proposal.request, proposal.epoch) == (teller.request, teller.epoch)
        assert proposal.tokens == expected.tokens, f"node {proposal.node} of request {proposal.request}"
        np.testing.assert_allclose(proposal.confidences, expected.confidences, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("coupled", [True, False])
def test_a_prompt_in_chunks_and_both_ways_of_ranking(folder: Path, plain: Any, coupled: bool) -> None:
    drafter, oracle = drafter_of(folder, coupled=coupled), Oracle(plain, coupled=coupled)
    teller = Teller(7, Sampling(temperature=1.0, seed=3))
    teller.begin([(7 * n) % VOCABULARY_SIZE for n in range(150)])
    assert drafter.draft(segment(teller.part([], committed=teller.path[:100])), WIDTH) == ()
    (proposal,) = drafter.draft(segment(teller.part([teller.root], committed=teller.path[100:149])), WIDTH)
    oracle.check(teller, proposal)
    children = [teller.add(teller.root, token) for token in range(60)]  # more than are ranked at once
    proposals = drafter.draft(segment(teller.part(children)), 2)
    assert [each.node for each in proposals] == children
    for each in proposals:
        oracle.check(teller, each, 2)


def test_context_vocabulary_and_size(folder: Path) -> None:
    assert SMALL["max_position_embeddings"] == 512
    assert (
        drafter_of(folder).context,
        drafter_of(folder, context=100).context,
        drafter_of(folder, context=9999).context,
    ) == (
        512,
        100,
        512,
    )
    small = drafter_of(folder, context=64, vocabulary_size=50)
    assert small.captures == ()
    assert small.weight_bytes == sum(
        p.numel() * 4 for p in AutoModelForCausalLM.from_pretrained(folder).parameters()
    )
    teller = Teller(1, Sampling())
    teller.begin([1])
    (proposal,) = small.draft(segment(teller.part([teller.root])), 64)
    assert len(proposal.tokens) == 50
    assert max(proposal.tokens) < 50


def test_more_slots_than_its_context_can_need_are_refused(folder: Path) -> None:
    teller = Teller(1, Sampling(), slots=600 + limits.DRAFT_NODES_MAX)
    teller.begin([1])
    opening = segment(teller.part([teller.root]))
    with pytest.raises(PeerError, match="slots"):
        drafter_of(folder, context=200).draft(opening, 1)
    assert (
        len(drafter_of(folder, context=600).draft(opening, 1)) == 1
    )  # the target's context, beyond the drafter's own


def test_a_model_that_overflows_says_so(tmp_path: Path) -> None:
    make_variant(tmp_path, "llama-grouped")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"] * 1e6}, tmp_path / "model.safetensors")
    drafter = LanguageModelDrafter.load(ModelFiles(str(tmp_path)), "float16", CPU)
    teller = Teller(1, Sampling())
    teller.begin([1])
    with pytest.raises(ClusterError, match="float16"):
        drafter.draft(segment(teller.part([teller.root])), 1)
