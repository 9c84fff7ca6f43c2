"""Compares a cluster's answers, token by token, with step-by-step decoding by the same arithmetic in one
process.

`exact`: all tokens are equal. `wrong`: anything else. Some answers are bound by a small schema: which tokens
these may draw is computed where the last layers are, and where a drafter is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from msgspec import structs

from flowspec.bench.records import EXACT, WRONG
from flowspec.core.protocol.messages import Grammar, Sampling
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.core.text_before import TextBefore
from flowspec.extras import how_to_get
from flowspec.model.files import ModelFiles
from flowspec.model.grammar import library_version, schema_text
from flowspec.model.sampler import Sampler
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer, recommended
from flowspec.runtime.session import Limits, Session
from flowspec.runtime.token_stream import Timing, TokenStream

STOPPED = -1
"""Stands for whichever stop token ended an answer."""
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 40},
        "sure": {"type": "boolean"},
        "parts": {"type": "array", "items": {"enum": ["noun", "verb", 1, 2]}, "maxItems": 3},
    },
    "required": ["answer", "sure", "parts"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    prompt_id: str
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAnswer:
    """What a cluster answered: its new tokens, and -1 at the end where a stop token ended them. `made_with`:
    what `--json` says of the cluster; `users` is how many answers at most were under way at once."""

    case: Case
    made_with: dict[str, Any]
    new_tokens_max: int
    tokens: tuple[int, ...]


def answer_of(
    session: Session, case: Case, running: TokenStream, timing: Timing, limits: Limits, users: int = 1
) -> ClusterAnswer:
    assert running.end is not None
    decoding = session.decoding
    made_with = {"method": decoding.method, "drafter": session.drafter, "chain": decoding.chain}
    return ClusterAnswer(
        case=case,
        made_with={**made_with, "users": users, "stages": len(session.head.stages)},
        new_tokens_max=min(limits.new_tokens_max, session.head.plan.context - len(case.prompt)),
        tokens=(*timing.new_tokens, *((STOPPED,) if running.end.reason == "stop" else ())),
    )


def judge(plain: StepByStep, found: ClusterAnswer, stop_ids: frozenset[int]) -> dict[str, Any]:
    """Compares an answer with that of one process; returns what `--json` has of it.

    `difference` is the first place where they differ, and both tokens there, None for an answer that had
    ended; `margin`: by how many logits the expected token leads over the other, to tell rounding from worse.
    Raises `ClusterError` when the model overflows in its dtype.
    """
    case, sampling = found.case, found.case.sampling
    asked = (case.prompt, sampling, found.new_tokens_max, stop_ids)
    expected, difference = plain.generate(*asked), None
    if (index := parting(expected, found.tokens, stop_ids)) is not None:
        pair = [tokens[index] if index < len(tokens) else None for tokens in (expected, found.tokens)]
        margin = None if None in pair or STOPPED in pair else _lead(plain, case, expected[:index], pair)
        difference = {"index": index, "expected": pair[0], "found": pair[1], "margin": margin}
    return {
        "prompt": case.prompt_id,
        **found.made_with,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "is_bound": sampling.grammar is not None,
        "verdict": EXACT if difference is None else WRONG,
        "new_tokens": len(found.tokens),
        "unlikely_tokens": plain.unlikely(*asked),
        "difference": difference,
    }


def _lead(plain: StepByStep, case: Case, before: tuple[int, ...], pair: Sequence[Any]) -> float | None:
    """By how many logits, the noise of the draw included, the first token leads over the second after a
    prompt and `before`; None where a filter decided."""
    sampling, text = case.sampling, TextBefore(np.array([*case.prompt, *before]), len(case.prompt))
    sampler = Sampler(sampling, plain.vocabulary_size, plain.grammars)
    *_, rows = plain.logits((*case.prompt, *before))
    logits, ids = sampler.shaped(rows[0], text), np.array(pair)
    if sampling.temperature == 0:
        first, second = logits[ids].tolist()
    else:
        first, second = sampler.scores(logits, ids, len(text.tokens)) * sampling.temperature
    return float(first - second) if np.isfinite(second) and first >= second else None


def parting(expected: Sequence[int], found: Sequence[int], stop_ids: frozenset[int]) -> int | None:
    """Where an answer, with `STOPPED` for its stop token, leaves the expected one (its stop token included);
    None: nowhere.
    """
    seen = (STOPPED if token in stop_ids else token for token in expected)
    return next((index for index, (a, b) in enumerate(zip_longest(seen, found)) if a != b), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The `tokens` by which a model's answers are bound, and those that end them; or `why` none can be."""

    tokens: TokenBytes | None = None
    ends: tuple[int, ...] = ()
    why: str = ""

    def of(self, cases: Sequence[Case]) -> list[Case]:
        """The first prompt again with each of its samplings, bound."""
        grammar = Grammar(kind="json_schema", text=schema_text(SCHEMA), ends=self.ends)
        name = cases[0].prompt_id
        drawn = [structs.replace(each.sampling, grammar=grammar) for each in cases if each.prompt_id == name]
        return [replace(cases[0], prompt_id=f"{name} as JSON", sampling=sampling) for sampling in drawn]


def read_binding(files: ModelFiles, config: Any) -> Binding:
    if not library_version():
        return Binding(why=f"llguidance is not here; {how_to_get('grammars')}")
    if not files.has_tokenizer:
        return Binding(why="the model has no tokenizer")
    tokenizer = Tokenizer(files)
    if tokenizer.is_in_channels:
        return Binding(why="this model writes in channels, which no grammar binds yet")
    stop_ids = recommended(files, config).stop_ids
    tokens = tokenizer.token_bytes_of_all(config.vocab_size, stop_ids)
    ends = [token for token in sorted(stop_ids) if token < len(tokens.texts) and not tokens.texts[token]]
    if not ends:
        return Binding(why="the model names no token that ends answers")
    return Binding(tokens=tokens, ends=tuple(ends))
