"""What an experiment asks: prompts with their plain answers, which every answer is compared with.

Prompts come from files (one a line, or jsonl in Spec-Bench form: `turns`, maybe `question_id`, `category`);
their plain answers are what the model says step by step in one process, made once and kept in a file. A
synthetic model's prompts and answers are drawn by chance.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct, structs

from flowspec.bench.console import progress
from flowspec.bench.experiment import PROMPT_FILES, Experiment
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError, first_line
from flowspec.folders import read_text, why_unread
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer, recommended
from flowspec.runtime.cluster import pick_context
from flowspec.validation import PRINTABLE, Misfit, as_dict, checked, decode_json, expect, fit

DTYPE = "float32"
ANSWERS = "answers.json"
NAME_MAX, CHARS_MAX = limits.NAME_CHARS_MAX, limits.PROMPT_CHARS_MAX
Name = Annotated[str, Meta(pattern=rf"\A{PRINTABLE}*\Z", max_length=NAME_MAX)]
Turn = Annotated[
    str, Meta(pattern=r"\S", max_length=CHARS_MAX, description=f"a text of 1 to {CHARS_MAX} characters")
]
VOCABULARY = 32_000
"""Of a synthetic model."""
SYNTHETIC_DOMAIN = "synthetic"
SYNTHETIC_PROMPTS = 8
SYNTHETIC_TUNING = 1_000_000
"""The number of the first synthetic prompt that methods are tuned on."""
PROMPT_TOKENS = 64
WORDS = 16
"""Tokens that synthetic prompts of a domain use."""
WARM_UP_CASES = 2


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

    def is_answered_by(self, tokens: tuple[int, ...], reason: str) -> bool:
        """Whether an answer, without its stop token, is the plain one, token for token, and ended as it
        did."""
        return tokens == self.new_tokens and reason == ("stop" if self.is_stopped else "length")


def read_cases(
    experiment: Experiment,
    cache: Path | None,
    *,
    domains: Sequence[str] = (SYNTHETIC_DOMAIN,),
    have_words: bool = False,
    for_tuning: bool = False,
) -> list[PlainCase]:
    """The experiment's prompts with their plain answers, which `cache` keeps; synthetic ones are of these
    `domains`, and others `for_tuning`."""
    samplings = make_samplings(experiment.temperatures, experiment.seeds)
    new_tokens, context = experiment.new_tokens, experiment.context
    if not experiment.is_synthetic:
        prompts = _experiment_prompts(experiment)
        return plain_cases(ModelFiles(experiment.model), prompts, samplings, new_tokens, cache, context)
    if PROMPT_TOKENS + new_tokens > context:
        raise InputError(
            f"a synthetic prompt has {PROMPT_TOKENS} tokens, which with {new_tokens} new ones is more than "
            f"the context of {context}"
        )
    first, count = SYNTHETIC_TUNING if for_tuning else 0, experiment.limit or SYNTHETIC_PROMPTS
    return synthetic_cases(count, samplings, new_tokens, first, domains=domains, have_words=have_words)


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


def warm_up_cases(cases: Sequence[PlainCase], count: int = WARM_UP_CASES) -> list[PlainCase]:
    """What heads learn from beforehand: `count` cases, evenly spaced from the first on, at each temperature,
    with the first seed."""
    samplings: dict[float, Sampling] = {}
    for case in cases:
        samplings.setdefault(case.sampling.temperature, case.sampling)
    found = []
    for sampling in samplings.values():
        some = [case for case in cases if case.sampling == sampling]
        found += [some[at * len(some) // count] for at in range(min(count, len(some)))]
    return found


# ------------------------------------------------------------------------------------------ files of prompts


class Row(Struct, frozen=True, kw_only=True):
    """A line of jsonl, of which the rest is for others."""

    turns: Annotated[tuple[Turn, ...], Meta(min_length=1)]
    question_id: Name | int | float | None = None
    category: Name | int | float | None = None

    def __post_init__(self) -> None:
        expect(self.question_id != "", "question_id", "", f"a number or a text of 1 to {NAME_MAX} characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    prompt_id: str
    domain: str
    turns: tuple[str, ...]


def of_each_domain(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """So many of them: one of each domain in turn, each domain's in their order."""
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    turns = itertools.zip_longest(*domains.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:count]


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file; raises `InputError` naming file and line."""
    try:
        size = path.stat().st_size
        if size > limits.PROMPTS_BYTES_MAX:
            raise InputError(
                f"{path}: expected prompts of at most {limits.PROMPTS_BYTES_MAX} bytes together, got {size}"
            )
        # Nothing else ends a line of jsonl, though a text may hold what Python takes for one.
        lines = read_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        what = f"a file of prompts, but it cannot be read ({why_unread(error)})"
        raise InputError(f"{path}: expected {what}") from None
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InputError(f"{path}: expected at least one prompt, got an empty file")
    return prompts


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        row = decode_json(line, Row) if path.suffix == ".jsonl" else fit({"turns": [line.rstrip("\r")]}, Row)
    except (Misfit, msgspec.DecodeError, RecursionError) as error:
        expected, reason = '{"turns": ["..."]}', first_line(error, 100)
        raise InputError(f"{path} line {number}: expected {expected}, got {line!r:.80} ({reason})") from None
    name = number if row.question_id is None else row.question_id
    return Prompt(prompt_id=str(name), domain=str(row.category or path.stem), turns=row.turns)


def prompt_path(name: str) -> Path:
    """The file of a name in an experiment's `prompts`: `shipped`, `shipped-tuning`, or a path."""
    return bundled_folder(PROMPT_FILES[name]) if name in PROMPT_FILES else Path(name)


def _experiment_prompts(experiment: Experiment) -> list[Prompt]:
    """Files number their prompts as they like, so a prompt of several files is known by its file, too."""
    paths = [prompt_path(name) for name in dict.fromkeys(experiment.prompts)]
    stems = [path.stem for path in paths]
    labels = stems if len(set(stems)) == len(stems) else [str(path) for path in paths]
    prompts: list[Prompt] = []
    for path, label in zip(paths, labels, strict=True):
        some = read_prompts(path)
        for prompt_id, count in Counter(prompt.prompt_id for prompt in some).items():
            if count > 1:
                expected = f"expected each once, got {prompt_id!r:.80} {count} times"
                raise InputError(f"{path}: question_id: {expected}")
        if experiment.limit is not None:  # spread over domains: a file may hold one after the other
            some = sorted(of_each_domain(some, experiment.limit), key=some.index)
        if len(paths) > 1:
            some = [replace(each, prompt_id=f"{label} {each.prompt_id}") for each in some]
        prompts += some
    return prompts


# ------------------------------------------------------------------------------------------ plain answers


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
    known = _read_answers(cache)
    plain: StepByStep | None = None
    depends = (files.fingerprint(), DTYPE, new_tokens_max, sorted(advice.stop_ids))
    cases = []
    with progress("plain answers", len(encoded) * len(samplings)) as step:
        try:
            for sampling, (prompt, ids) in itertools.product(samplings, encoded):
                key = json.dumps([*depends, as_dict(sampling), ids], separators=(",", ":"))
                if key not in known:
                    plain = plain or StepByStep.load(files, DTYPE)
                    known[key] = list(plain.generate(ids, sampling, new_tokens_max, advice.stop_ids))
                case = PlainCase(
                    prompt_id=prompt.prompt_id,
                    domain=prompt.domain,
                    prompt=ids,
                    sampling=sampling,
                    new_tokens_max=new_tokens_max,
                    stop_ids=advice.stop_ids,
                    answer=tuple(known[key]),
                )
                cases.append(case)
                step("plain answers")
        finally:
            if cache is not None and plain is not None:
                _write_answers(cache, known)
    return cases


def count_answers(cache: Path) -> int:
    """How many answers a cache holds."""
    return len(_read_answers(cache))


def _read_answers(cache: Path | None) -> dict[str, list[int]]:
    """By what they depend on."""
    if cache is None or not cache.exists():
        return {}
    try:
        return decode_json(cache.read_bytes(), dict[str, list[int]])
    except (OSError, msgspec.DecodeError, Misfit, RecursionError):
        expected = "answers that an earlier run wrote, got something else"
        raise InputError(f"{cache}: expected {expected}; remove it") from None


def _write_answers(cache: Path, known: dict[str, list[int]]) -> None:
    part = cache.with_name(f"{cache.name}.part")
    try:
        part.write_text(json.dumps(known), "utf-8")
        os.replace(part, cache)
    except OSError as error:
        raise InputError(f"{cache}: expected a file that can be written ({error.strerror})") from None


# ------------------------------------------------------------------------------------------ synthetic ones


def synthetic_cases(
    count: int,
    samplings: Sequence[Sampling],
    new_tokens: int,
    first: int = 0,
    prompt_tokens: int = PROMPT_TOKENS,
    domains: Sequence[str] = (SYNTHETIC_DOMAIN,),
    *,
    have_words: bool = False,
) -> list[PlainCase]:
    """Prompts and answers by chance, always the same for a number of a prompt (counted from `first`) and a
    sampling; of these domains in turns. Where they `have_words`, half of a prompt is of its domain's own, by
    which it can be known."""
    cases = []
    for sampling in samplings:
        for number in range(first, first + count):
            chance = np.random.default_rng((number, sampling.seed, round(1000 * sampling.temperature)))
            tokens = tuple(chance.integers(0, VOCABULARY, prompt_tokens + new_tokens).tolist())
            if have_words:
                words = np.random.default_rng((number % len(domains), WORDS)).integers(0, VOCABULARY, WORDS)
                drawn = chance.choice(words, prompt_tokens)
                mixed = np.where(chance.random(prompt_tokens) < 0.5, drawn, tokens[:prompt_tokens])
                tokens = (*mixed.tolist(), *tokens[prompt_tokens:])
            case = PlainCase(
                prompt_id=str(number + 1),
                domain=domains[number % len(domains)],
                prompt=tokens[:prompt_tokens],
                sampling=sampling,
                new_tokens_max=new_tokens,
                stop_ids=frozenset(),
                answer=tokens[prompt_tokens:],
            )
            cases.append(case)
    return cases
