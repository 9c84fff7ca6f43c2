"""A language model proposes below each node what the plain model would after the node's path, whatever the
tree did."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Sampling
from flowspec.draft.language import LanguageModelDrafter
from flowspec.draft.ranking import Ranker
from flowspec.errors import ClusterError, PeerError
from flowspec.model.files import ModelFiles
from tests.checkpoints import SMALL, VOCABULARY_SIZE, make_variant
from tests.draft.mirrors import Case, LanguageMirror, draft, make_case
from tests.draft.trees import Teller, segment


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case("language", tmp_path_factory.mktemp("case"))


def load(
    files: ModelFiles, dtype: str = "float32", context: int = 512, **options: object
) -> LanguageModelDrafter:
    return LanguageModelDrafter.load(files, dtype, "cpu", context=context, **options)


def test_a_prompt_in_chunks_and_the_other_way_of_ranking(case: Case) -> None:
    drafter = load(case.files, coupled=False)
    mirror: LanguageMirror = case.new_mirror(7, Sampling(temperature=1.0, seed=3))
    mirror.ranker = Ranker(VOCABULARY_SIZE, coupled=False)
    teller = mirror.teller
    teller.begin([(7 * n) % VOCABULARY_SIZE for n in range(50)])
    assert draft(drafter, mirror, [], told=teller.path[:30]) == ()
    draft(drafter, mirror, [teller.root])
    children = [teller.add(teller.root, token) for token in range(60)]  # more than are ranked at once
    assert [each.node for each in draft(drafter, mirror, children)] == children


def test_context_and_slots_are_bounded_by_what_the_drafter_can_need(case: Case) -> None:
    assert SMALL["max_position_embeddings"] == 512
    contexts = [load(case.files, context=context).context for context in (100, 9999)]
    assert contexts == [100, 512]
    small = load(case.files, context=64, vocabulary_size=50)
    parameters = AutoModelForCausalLM.from_pretrained(case.files.model).parameters()
    assert small.weight_bytes == sum(each.numel() * 4 for each in parameters)
    teller = Teller(1, Sampling())
    teller.begin([1])
    (proposal,) = small.draft(segment(teller.part([teller.root])), 64)
    assert sorted(proposal.tokens) == list(range(50))
    teller = Teller(1, Sampling(), slots=600 + limits.DRAFT_NODES_MAX)
    teller.begin([1])
    opening = segment(teller.part([teller.root]))
    with pytest.raises(PeerError, match="slots"):
        load(case.files, context=200).draft(opening, 1)
    assert len(load(case.files, context=600).draft(opening, 1)) == 1, (
        "the target's context, beyond the drafter's own"
    )


def test_a_model_that_overflows_says_so(tmp_path: Path) -> None:
    make_variant(tmp_path, "llama-grouped")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"] * 1e6}, tmp_path / "model.safetensors")
    teller = Teller(1, Sampling())
    teller.begin([1])
    with pytest.raises(ClusterError, match="float16"):
        load(ModelFiles(str(tmp_path)), "float16").draft(segment(teller.part([teller.root])), 1)
