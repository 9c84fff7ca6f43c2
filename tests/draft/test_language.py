"""A language model proposes below each node what the plain model would after the node's path, whatever the
tree did."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec.bench.checkpoints import SMALL, VOCABULARY_SIZE, make_variant
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Proposal, Release, Sampling
from flowspec.draft.language import LanguageModelDrafter
from flowspec.draft.ranking import Ranker
from flowspec.errors import ClusterError, PeerError
from flowspec.model.files import ModelFiles
from tests.draft.trees import PENALTIES, Teller, segment

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


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_of_two_requests_over_several_turns(folder: Path, plain: Any, seed: int) -> None:
    """Commits that were guessed or not, dead branches among the rows, rewinds, both requests in shared
    segments."""
    rng = random.Random(seed)
    drafter, oracle = drafter_of(folder, context=300), Oracle(plain)
    tellers = [Teller(1, Sampling()), Teller(2, Sampling(temperature=0.8, seed=seed, **PENALTIES))]
    ripe: dict[int, list[int]] = {}  # nodes that may be given: drafted, and their parents given
    checked = dead_rows = 0
    for turn in range(3):
        for teller in tellers:
            old = [teller.tokens[node] for node in teller.path]
            keep = rng.randint(0, teller.filled) if turn else 0
            prompt = old[:keep] + [rng.randrange(VOCABULARY_SIZE) for _ in range(rng.randint(1, 20))]
            teller.begin(prompt, keep)
            ripe[teller.request] = []
        for _ in range(12):
            parts, asked = [], {}
            for teller in tellers:
                nodes = [teller.root] if teller.root not in teller.given else []
                for node in sorted(ripe[teller.request]):
                    if rng.random() < 0.6:
                        nodes.append(node)
                        ripe[teller.request].remove(node)
                asked[teller.request] = [node for node in nodes if teller.is_living(node)]
                dead_rows += len(nodes) - len(asked[teller.request])
                parts.append(teller.part(nodes, committed=teller.missing()))
            proposals = drafter.draft(segment(*parts), WIDTH)
            for teller in tellers:
                own = [proposal for proposal in proposals if proposal.request == teller.request]
                assert [proposal.node for proposal in own] == asked[teller.request]
                for proposal in own:
                    oracle.check(teller, proposal)
                    checked += 1
                    for token in rng.sample(proposal.tokens, rng.randint(0, 3)):
                        ripe[teller.request].append(teller.add(proposal.node, token))
            for teller in tellers:
                for _ in range(rng.choice((0, 1, 1, 2))):
                    children = [node for node, parent in enumerate(teller.parents) if parent == teller.root]
                    is_miss = not children or rng.random() < 0.3
                    node = (
                        teller.add(teller.root, rng.randrange(VOCABULARY_SIZE))
                        if is_miss
                        else rng.choice(children)
                    )
                    teller.commit(node)
                    if node in ripe[teller.request]:
                        ripe[teller.request].remove(node)
    assert checked > 50
    assert dead_rows > 0


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


def test_a_released_request_starts_afresh(folder: Path, plain: Any) -> None:
    drafter, oracle = drafter_of(folder), Oracle(plain)
    teller = Teller(1, Sampling())
    teller.begin([5, 6, 7])
    drafter.draft(segment(teller.part([teller.root], committed=teller.missing())), WIDTH)
    drafter.release(Release(request=1, epoch=teller.epoch))
    assert not drafter._model._caches
    again = Teller(1, Sampling(), epoch=teller.epoch)
    again.begin([8, 9])
    (proposal,) = drafter.draft(segment(again.part([again.root], committed=again.missing())), WIDTH)
    oracle.check(again, proposal)


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
