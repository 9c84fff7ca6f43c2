"""What a model says as transformers computes it, to compare with and to learn from."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from flowspec.core.protocol.messages import Sampling
from flowspec.core.text_before import TextBefore
from flowspec.model.files import ModelFiles
from flowspec.model.reference import Reference
from flowspec.model.sampler import Sampler


class PlainModel(Reference):
    """Decodes by transformers' own cache, and remembers its answers."""

    def __init__(self, files: ModelFiles, dtype: str) -> None:
        super().__init__(files, dtype)
        self._answers: dict[tuple[Any, ...], list[int]] = {}

    @torch.inference_mode()
    def generate(
        self, prompt: tuple[int, ...], sampling: Sampling, new_tokens_max: int, stop_ids: frozenset[int]
    ) -> list[int]:
        """The new tokens, the stop token included if there is one."""
        if (key := (prompt, sampling, new_tokens_max, stop_ids)) in self._answers:
            return self._answers[key]
        sampler = Sampler(sampling, int(self.model.config.get_text_config().vocab_size))
        tokens: list[int] = []
        fed, cache, called = list(prompt), None, cache_name(self.model)
        while len(tokens) < new_tokens_max and not (tokens and tokens[-1] in stop_ids):
            rows = torch.tensor([fed])
            out = self.model(input_ids=rows, use_cache=True, logits_to_keep=1, **{called: cache})
            cache = out[called]
            text = TextBefore(np.array([*prompt, *tokens], dtype=np.int64), len(prompt))
            tokens.append(sampler.draw(out.logits[0, -1].numpy(), len(prompt) + len(tokens), text))
            fed = tokens[-1:]
        self._answers[key] = tokens
        return tokens


def cache_name(model: Any) -> str:
    """What a model of transformers calls its cache; another word from 5.24 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
