"""Each bundled specialist guesses the target better in its own domains than the other specialists do, and
where the general drafter saw nothing, better than that: what routing by expertise lives on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flowspec.bench.config import SHIPPED_PROMPTS, UNSEEN_PROMPTS, prompt_path
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder
from flowspec.model.prompts import read_prompts
from flowspec.model.reference import Reference
from flowspec.model.text import Tokenizer
from tests.recipe.hits import ranks
from tests.recipe.own import answer_all

GENERAL = "draft"
SPECIALISTS = ("draft-math", "draft-code", "draft-plays")
LEADERS = {
    SHIPPED_PROMPTS: ({"problems": "draft-math", "code": "draft-code", "plays": "draft-plays"}, SPECIALISTS),
    UNSEEN_PROMPTS: (
        {"words": "draft-math", "javascript": "draft-code", "novels": "draft-plays"},
        (GENERAL, *SPECIALISTS),
    ),
}
"""Of each file of prompts: who leads in a domain, and among whom."""
NEW_TOKENS_MAX = 40
LEAD_MIN = 0.05
GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("name", LEADERS)
def test_each_specialist_leads_in_its_own_domain(name: str) -> None:
    leaders, among = LEADERS[name]
    tokenizer = Tokenizer(ModelFiles(BUNDLED))
    target = AutoModelForCausalLM.from_pretrained(bundled_folder("target"), dtype=torch.float32).eval()
    drafters = {each: Reference(ModelFiles(str(bundled_folder(each))), "float32") for each in among}
    prompts = [prompt for prompt in read_prompts(prompt_path(name)) if prompt.domain in leaders]
    asked = [tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
    answers = answer_all(target, asked, [0.0] * len(asked), NEW_TOKENS_MAX, torch.Generator())
    for domain, specialist in leaders.items():
        hits = {}
        for drafter, reference in drafters.items():
            found = [
                rank
                for prompt, ids, answer in zip(prompts, asked, answers, strict=True)
                if prompt.domain == domain
                for rank in ranks(reference, tuple(ids), answer.tokens.tolist(), GREEDY, coupled=False)
            ]
            hits[drafter] = float(np.mean(np.array(found) == 0))
        assert hits.pop(specialist) > max(hits.values()) + LEAD_MIN, (domain, hits)
