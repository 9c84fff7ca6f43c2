"""Each bundled specialist guesses the target better in its own domain than the other specialists do: what
routing by expertise lives on."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder
from flowspec.model.prompts import read_prompts
from flowspec.model.reference import Reference
from flowspec.model.text import Tokenizer
from tests.recipe.hits import ranks
from tests.recipe.own import answer_all

SPECIALISTS = {"problems": "draft-math", "code": "draft-code", "plays": "draft-plays"}
NEW_TOKENS_MAX = 40
LEAD_MIN = 0.05
GREEDY = Sampling(temperature=0.0)


def test_each_specialist_leads_in_its_own_domain() -> None:
    tokenizer = Tokenizer(ModelFiles(BUNDLED))
    target = AutoModelForCausalLM.from_pretrained(bundled_folder("target"), dtype=torch.float32).eval()
    drafters = {
        name: Reference(ModelFiles(str(bundled_folder(name))), "float32") for name in SPECIALISTS.values()
    }
    prompts = [
        prompt for prompt in read_prompts(bundled_folder("bench.jsonl")) if prompt.domain in SPECIALISTS
    ]
    asked = [tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
    answers = answer_all(target, asked, [0.0] * len(asked), NEW_TOKENS_MAX, torch.Generator())
    for domain, specialist in SPECIALISTS.items():
        hits = {}
        for name, drafter in drafters.items():
            found = [
                rank
                for prompt, ids, answer in zip(prompts, asked, answers, strict=True)
                if prompt.domain == domain
                for rank in ranks(drafter, tuple(ids), answer.tokens.tolist(), GREEDY, coupled=False)
            ]
            hits[name] = float(np.mean(np.array(found) == 0))
        assert hits.pop(specialist) > max(hits.values()) + LEAD_MIN, domain
