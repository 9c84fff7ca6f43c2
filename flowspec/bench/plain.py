"""Prompts with their plain answers: what a model says step by step in one process, made once and kept in a
file if asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import structs

from flowspec.bench.console import progress
from flowspec.bench.prompts import Prompt
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer, recommended
from flowspec.runtime.cluster import pick_context
from flowspec.validation import Misfit, as_dict, checked, decode_json

DTYPE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainCase:
    """A prompt, how it is sampled, and its plain answer: `answer` ends with the stop token if one ended
    it."""

    prompt_id: str
    domain: str
    prompt: tuple[int, ...]
    sampling: Sampling
    new_tokens_max: int
    stop_ids: frozenset[int]
    answer: tuple[int, ...]

    @property
    def is_stopped(self) -> bool:
        return bool(self.answer) and self.answer[-1] in self.stop_ids

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """The answer without its stop token."""
        return self.answer[:-1] if self.is_stopped else self.answer


def make_samplings(temperatures: Sequence[float], seeds: Sequence[int]) -> list[Sampling]:
    """Every temperature, and above 0 with every seed."""
    try:
        return [
            checked(Sampling(temperature=temperature, seed=seed))
            for temperature in temperatures
            for seed in (seeds if temperature > 0 else (0,))
        ]
    except ValueError as error:
        raise InputError(f"--temperatures: {error}") from None


def plain_cases(
    files: ModelFiles,
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    new_tokens_max: int,
    cache: Path | None = None,
    context: int | None = None,
) -> list[PlainCase]:
    """Every prompt (its first turn) with every sampling, answered step by step; answers that `cache` holds
    are not made again.

    Raises `InputError`, before anything is answered, for a prompt that is too long for `context` (None: the
    model's).
    """
    most = files.spec.context_max
    room = pick_context(None, most) if context is None else min(context, most)
    advice = recommended(files, files.config())
    samplings = [structs.replace(each, suppress_tokens=advice.suppress_tokens) for each in samplings]
    stop_ids = advice.stop_ids
    tokenizer = Tokenizer(files)
    encoded = []
    for prompt in prompts:
        ids = tuple(tokenizer.encode_dialogue([{"role": "user", "content": prompt.turns[0]}]))
        if len(ids) + new_tokens_max > room:
            raise InputError(
                f"prompt {prompt.prompt_id} has {len(ids)} tokens, which with {new_tokens_max} new ones is "
                f"more than the context of {room}; "
                "ask for fewer new tokens, or take shorter prompts"
            )
        encoded.append((prompt, ids))
    answers = _Answers(files, new_tokens_max, stop_ids, cache)
    with progress("plain answers", len(encoded) * len(samplings)) as step:
        try:
            cases = []
            for sampling in samplings:
                for prompt, ids in encoded:
                    case = PlainCase(
                        prompt_id=prompt.prompt_id,
                        domain=prompt.domain,
                        prompt=ids,
                        sampling=sampling,
                        new_tokens_max=new_tokens_max,
                        stop_ids=stop_ids,
                        answer=answers.answer(ids, sampling),
                    )
                    cases.append(case)
                    step("plain answers")
        finally:
            answers.save()
    return cases


def kept(cache: Path) -> int:
    """How many answers a cache holds."""
    return len(_read(cache)) if cache.exists() else 0


class _Answers:
    """Answers by what they depend on; the model is loaded with the first that is not there."""

    def __init__(
        self, files: ModelFiles, new_tokens_max: int, stop_ids: frozenset[int], cache: Path | None
    ) -> None:
        self._files = files
        self._plain: StepByStep | None = None
        self._fingerprint = files.fingerprint()
        self._new_tokens_max = new_tokens_max
        self._stop_ids = stop_ids
        self._cache = cache
        self._known = {} if cache is None or not cache.exists() else _read(cache)

    def answer(self, prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
        depends = [
            self._fingerprint,
            DTYPE,
            self._new_tokens_max,
            sorted(self._stop_ids),
            as_dict(sampling),
            prompt,
        ]
        key = json.dumps(depends, separators=(",", ":"))
        if key not in self._known:
            if self._plain is None:
                self._plain = StepByStep.load(self._files, DTYPE)
            self._known[key] = list(
                self._plain.generate(prompt, sampling, self._new_tokens_max, self._stop_ids)
            )
        return tuple(self._known[key])

    def save(self) -> None:
        if self._cache is None or self._plain is None:
            return
        part = self._cache.with_name(f"{self._cache.name}.part")
        try:
            part.write_text(json.dumps(self._known), "utf-8")
            os.replace(part, self._cache)
        except OSError as error:
            raise InputError(
                f"{self._cache}: expected a file that can be written ({error.strerror})"
            ) from None


def _read(cache: Path) -> dict[str, list[int]]:
    try:
        return decode_json(cache.read_bytes(), dict[str, list[int]])
    except (OSError, msgspec.DecodeError, Misfit, RecursionError):
        told = "answers that an earlier run wrote, got something else"
        raise InputError(f"{cache}: expected {told}; remove it") from None
