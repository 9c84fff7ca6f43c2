"""Answers bound by a small schema, for checking that devices obey one exactly: which tokens they may draw is
computed where the last layers are, and where a drafter is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from flowspec.bench.exactness import Case
from flowspec.core.protocol.messages import Grammar
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.extras import how_to_get
from flowspec.model.files import ModelFiles
from flowspec.model.grammar import library_version, schema_text
from flowspec.model.text import Tokenizer, recommended

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


class BoundCases:
    """Of a model: the `tokens` by which its answers are bound, None where they cannot be, and `why` not."""

    def __init__(self, files: ModelFiles, config: Any) -> None:
        self.tokens: TokenBytes | None = None
        self._ends: tuple[int, ...] = ()
        self.why = self._begin(files, config)

    def _begin(self, files: ModelFiles, config: Any) -> str:
        if not library_version():
            return f"llguidance is not here; {how_to_get('grammars')}"
        if not files.has_tokenizer:
            return "the model has no tokenizer"
        tokenizer = Tokenizer(files)
        if tokenizer.is_in_channels:
            return "this model writes in channels, which no grammar binds yet"
        stop_ids = recommended(files, config).stop_ids
        tokens = tokenizer.token_bytes_of_all(config.vocab_size, stop_ids)
        ends = [token for token in sorted(stop_ids) if token < len(tokens.texts) and not tokens.texts[token]]
        if not ends:
            return "the model names no token that ends answers"
        self.tokens, self._ends = tokens, tuple(ends)
        return ""

    def of(self, cases: Sequence[Case]) -> list[Case]:
        """The first prompt again with each of its samplings, bound."""
        grammar = Grammar(kind="json_schema", text=schema_text(SCHEMA), ends=self._ends)
        first = [case for case in cases if case.prompt_id == cases[0].prompt_id]
        return [
            replace(
                case,
                prompt_id=f"{case.prompt_id} as JSON",
                sampling=structs.replace(case.sampling, grammar=grammar),
            )
            for case in first
        ]
