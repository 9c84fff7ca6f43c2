"""The plain model in one process, as transformers runs it: what every cluster must equal, token for token.

Generation is step by step with transformers' own cache, each token drawn by the same `Sampler`. A teacher-forced pass
checks a given answer in one go, and the two together measure the numeric noise of this model and precision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flowspec.core.messages import Sampling
from flowspec.core.precision import ACTIVATIONS
from flowspec.errors import ClusterError
from flowspec.model.experts import EXPERTS_NAME, pack_experts
from flowspec.model.files import ModelFiles
from flowspec.model.gguf import whole_model
from flowspec.model.quantised import PLAIN_LINEARS, QuantisedLinear, quantise
from flowspec.model.sampler import F32, Sampler, margin
from flowspec.model.slice import DTYPES

NOISE_FACTOR = 4.0
"""A margin below this many times the largest difference seen between two shapes of the same pass is a near-tie."""
NOISE_FLOOR = 1e-6
NOISE_SHARES = {"float32": 0.002, "float16": 0.1, "bfloat16": 0.5}
"""Of how far logits lie from each other (their standard deviation), by the dtype of activations: more is no rounding. The bundled model has 1e-5,
.01 and .08."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A token of an answer that the reference would not have drawn there; `margin` in logits."""

    index: int
    expected: int
    found: int
    margin: float


class Reference:
    """A whole model through transformers; remembers the answers it has generated."""

    def __init__(self, files: ModelFiles, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        torch.set_num_threads(1)  # one answer at a time is too small for more, and daemons want the other cores
        transformers_logging.disable_progress_bar()
        activations = DTYPES[ACTIVATIONS[dtype]]
        options = {"experts_implementation": EXPERTS_NAME if dtype in PLAIN_LINEARS else "eager"}  # theirs cannot run packed ones
        if getattr(files.config().get_text_config(), "attn_logit_softcapping", None) is not None:
            options["attn_implementation"] = "eager"  # older transformers take SDPA for Gemma 2, which has no cap
        if files.gguf is not None:
            self._model: Any = whole_model(files, activations, **options).eval()
        else:
            folder = files.path("config.json").parent
            for name in sorted(set(files.weight_map().values())):
                files.path(name)
            self._model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=activations, local_files_only=True, trust_remote_code=False, use_safetensors=True, **options
            ).eval()
        if dtype in PLAIN_LINEARS:  # none of the kernels that slices use: one that is wrong must not be wrong on both sides
            self._quantise(PLAIN_LINEARS[dtype])
        self._answers: dict[tuple[Any, ...], list[int]] = {}
        self.noise = NOISE_FLOOR / NOISE_FACTOR
        self._dtype = dtype

    def _quantise(self, kind: type[QuantisedLinear]) -> None:
        """Packs what slices pack: the decoder and `lm_head`, not the towers of a multimodal model."""
        modules = [*self._model.get_decoder().modules(), self._model.get_output_embeddings()]
        for module in modules:
            if type(module) is torch.nn.Linear:
                quantise(module, module.weight.detach(), kind)
            for name, weight in [each for each in module.named_parameters(recurse=False) if each[1].dim() == 3]:
                pack_experts(module, name, kind.rounded(weight.detach().flatten(0, 1)), kind)

    @property
    def vocabulary_size(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    @property
    def noise_logits(self) -> float:
        """Margins below this are near-ties: differences that rounding alone can make."""
        return max(NOISE_FLOOR, NOISE_FACTOR * self.noise)

    @torch.inference_mode()
    def generate(self, prompt: tuple[int, ...], sampling: Sampling, new_tokens_max: int, stop_ids: frozenset[int]) -> list[int]:
        """The new tokens, the stop token included if there is one.

        Raises `ClusterError` where two ways to compute them differ by more than rounding can explain.
        """
        key = (prompt, sampling, new_tokens_max, stop_ids)
        if key in self._answers:
            return self._answers[key]
        sampler = Sampler(sampling, self.vocabulary_size)
        tokens: list[int] = []
        rows: list[F32] = []
        fed, cache = list(prompt), None
        while len(tokens) < new_tokens_max and not (tokens and tokens[-1] in stop_ids):
            out = self._model(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            rows.append(out.logits[0, -1].float().numpy())
            # Logits come rounded to their type. Some builds of torch run a row in every batch alike: then nothing else shows.
            self.noise = max(self.noise, float(np.abs(rows[-1]).max()) * torch.finfo(out.logits.dtype).eps / 2)
            tokens.append(sampler.draw(rows[-1], len(prompt) + len(tokens)))
            fed = tokens[-1:]
        forced = self.forced_logits(prompt, tokens[:-1])
        noise = max(float(np.abs(a - b).max()) for a, b in zip(rows, forced, strict=True))
        spread = float(np.mean([np.std(each) for each in forced]))
        if not noise <= NOISE_SHARES[ACTIVATIONS[self._dtype]] * spread + NOISE_FLOOR:
            raise ClusterError(
                f"the plain model's logits in {self._dtype} differ by {noise:.2g} between two ways to compute them, where they lie {spread:.2g} "
                "apart: that is no rounding, and nothing can be compared with it. A kernel of torch is wrong on this machine; install the "
                "versions of FlowSpec's constraints folder, or use another --dtype"
            )
        self.noise = max(self.noise, noise)
        self._answers[key] = tokens
        return tokens

    def check(self, prompt: tuple[int, ...], sampling: Sampling, answer: list[int]) -> Iterable[Difference]:
        """Where `answer` (its stop token included) is not what the model draws after the tokens before it."""
        sampler = Sampler(sampling, self.vocabulary_size)
        for index, logits in enumerate(self.forced_logits(prompt, answer[:-1])):
            position = len(prompt) + index
            expected = sampler.draw(logits, position)
            if expected != answer[index]:
                least = margin(sampler, logits, position, expected)
                yield Difference(index=index, expected=expected, found=answer[index], margin=least)

    @torch.inference_mode()
    def forced_logits(self, prompt: tuple[int, ...], answer: list[int]) -> list[F32]:
        """Logits after the prompt and after each token of the answer, from one pass without a cache."""
        out = self._model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False, logits_to_keep=len(answer) + 1)
        return list(out.logits[0].float().numpy())
