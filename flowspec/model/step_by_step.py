"""A whole model as one slice in this process, one token a pass: what every answer of a cluster must equal.

A loop of its own, without trees, batches, drafts or messages. It shares with a stage the slice and the
sampler, that is the arithmetic, and nothing else. The prompt is read one token at a time, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.core.stage.events import JobPart, RunLayers
from flowspec.core.text_before import TextBefore
from flowspec.errors import InputError
from flowspec.model.accelerator import absence, find
from flowspec.model.arithmetic.arrays import F32
from flowspec.model.engines import NoRightKernelError, run_trial
from flowspec.model.files import ModelFiles
from flowspec.model.grammar import GrammarVocabulary
from flowspec.model.sampler import Sampler
from flowspec.model.slice import Slice
from flowspec.model.weights import Span

REQUEST = 1
Tokens = tuple[int, ...]


def device_with(dtype: str, arithmetic: str) -> str:
    """Where this machine computes a precision in this `arithmetic`: on its CPU, else on its first GPU. Raises
    `InputError` where neither does."""
    here: list[str] = []
    for name in ("cpu", *([] if absence() else ["cuda"])):
        device = find(name).device
        with contextlib.suppress(NoRightKernelError):
            found = run_trial(dtype, device).arithmetics
            if arithmetic in found:
                return device
            here += found
    raise InputError(
        f"the devices compute {dtype} as {arithmetic}, this machine as {', '.join(here) or 'nothing'}: what "
        "their answers are compared with cannot be computed here; run this on one of the devices"
    )


class StepByStep:
    """Plain decoding by one slice of all layers. `tell` hears how many tokens each pass has read."""

    def __init__(self, part: Slice) -> None:
        self.part = part
        self.tell: Callable[[int], object] = lambda count: None
        self.grammars: GrammarVocabulary | None = None  # for samplings with a grammar
        self._answer = functools.cache(self._decode)

    @staticmethod
    def load(
        files: ModelFiles, dtype: str, device: str = "cpu", arithmetic: str = "", cache: str = CACHE_AUTO
    ) -> StepByStep:
        """Raises `InputError` when the model cannot be used or is incomplete."""
        count = len(files.spec.layers)
        span = Span(first=0, end=count, count=count)
        return StepByStep(Slice.load(files, span, dtype, device, arithmetic=arithmetic, cache=cache))

    @property
    def vocabulary_size(self) -> int:
        return self.part.spec.vocabulary

    def generate(
        self, prompt: Tokens, sampling: Sampling, new_tokens_max: int, stop_ids: frozenset[int]
    ) -> Tokens:
        """The new tokens, with the stop token if there is one. Raises `ClusterError` on an overflow."""
        return self._answer(prompt, sampling, new_tokens_max, stop_ids)[0]

    def _decode(
        self, prompt: Tokens, sampling: Sampling, new_tokens_max: int, stop_ids: frozenset[int]
    ) -> tuple[Tokens, int]:
        sampler = Sampler(sampling, self.vocabulary_size, self.grammars)
        answer, unlikely, end = list[int](), 0, len(prompt) + new_tokens_max
        self.part.open_cache(REQUEST, end)
        try:
            for position, token in enumerate(prompt):
                rows = self._pass([token], position)
            for position in range(len(prompt), end):
                text = TextBefore(np.array([*prompt, *answer], dtype=np.int64), len(prompt))
                token = sampler.draw(rows[0], position, text)
                answer.append(token)
                unlikely += bool(rows[0][token] != rows[0].max())
                if token in stop_ids or position == end - 1:
                    break
                rows = self._pass([token], position)
        finally:
            self.part.close_cache(REQUEST)
        return tuple(answer), unlikely

    def unlikely(self, *asked: Any) -> int:
        """How many of the tokens of `generate` were drawn otherwise than at temperature 0."""
        return self._answer(*asked)[1]

    def logits(self, tokens: Sequence[int], portions: Sequence[int] = (1,)) -> Iterator[F32]:
        """Logits `[rows, vocabulary]` after each token of a text, of so many rows a pass, over and over."""
        self.part.open_cache(REQUEST, len(tokens))
        try:
            first, sizes = 0, itertools.cycle(portions)
            while first < len(tokens):
                rows = tokens[first : first + next(sizes)]
                yield self._pass(rows, first)
                first += len(rows)
        finally:
            self.part.close_cache(REQUEST)

    def _pass(self, tokens: Sequence[int], first: int) -> F32:
        """Logits `[rows, vocabulary]` of tokens that follow `first` ones."""
        _, states = self.part.forward(chain_of(tokens, first), None)
        self.tell(len(tokens))
        return self.part.logits(states)


def chain_of(tokens: Sequence[int], first: int = 0) -> RunLayers:
    """A pass over tokens that follow `first` ones of the request `REQUEST`, each in its position's slot."""
    end = first + len(tokens)
    places = np.arange(first, end)
    own = JobPart(
        request=REQUEST,
        slots=places,
        tokens=np.array(tokens, dtype=np.int64),
        positions=places,
        key_positions=np.arange(end, dtype=np.int32),
        visible=np.arange(end)[None, :] <= places[:, None],  # [rows, end]
        sampled=np.zeros(len(tokens), dtype=np.bool_),
        sampling=Sampling(),
    )
    return RunLayers(job=first, parts=(own,), payload=None, rows=tuple(range(len(tokens))))
