"""A server whose model's answers are written down beforehand, and are those of no model: what a client gets
of them goes through the real tokenizer, answer and server. The cluster behind it is real, and is not asked.

The chat templates have the layout of their publishers', and say as much as the tests need.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from flowspec.core.protocol.messages import Logprobs, Sampling
from flowspec.llm import LLM
from flowspec.model.files import ModelFiles
from flowspec.model.text import Tokenizer
from flowspec.runtime.session import Limits
from flowspec.runtime.token_stream import End, Tokens, TokenStream
from tests.serve.servers import Running, running

TEMPLATES = Path(__file__).parents[1] / "data" / "tool_templates"
QWEN3, LFM2, MISTRAL, GPT_OSS, GEMMA4 = (
    (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    for name in ("qwen3", "lfm2", "mistral", "gpt_oss", "gemma4")
)
SPECIAL = {
    QWEN3: ("<|im_start|>", "<|im_end|>"),
    LFM2: ("<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>"),
    MISTRAL: ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    GEMMA4: ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
    GPT_OSS: ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"),
}
PLAIN = {QWEN3: ("<tool_call>", "</tool_call>", "<think>", "</think>")}
"""Tokens of their own that are text, too, as in Qwen3's vocabulary."""


def tokenizer_of(folder: Path, template: str) -> Tokenizer:
    """The bundled model's vocabulary, with the template's own tokens."""
    built = tokenizers.Tokenizer.from_file(str(ModelFiles("bundled").path("tokenizer.json")))
    built.add_special_tokens(
        [tokenizers.AddedToken(each, special=True) for each in SPECIAL.get(template, ())]
    )
    built.add_tokens([tokenizers.AddedToken(each, special=False) for each in PLAIN.get(template, ())])
    folder.mkdir(parents=True, exist_ok=True)
    built.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(ModelFiles(str(folder)))


@dataclass(slots=True)
class ScriptedModel:
    """Answers every question with `reply`, or with what that says of the prompt; `prompts` are what it was
    asked, as text."""

    tokenizer: Tokenizer
    reply: str | Callable[[str], str] = ""
    prompts: list[str] = field(default_factory=list)
    answered: int = 0
    """Tokens of the last answer."""

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        limits: Limits,
        *,
        request: int,
        stop_rule: Any = None,
        answered: Sequence[int] = (),
        top_logprobs: int = -1,
    ) -> TokenStream:
        """As `Session.submit`, token by token up to where the rule stops."""
        self.prompts.append(self.tokenizer._tokenizer.decode(list(prompt), skip_special_tokens=False))
        stream = TokenStream(request=request, submitted_s=time.monotonic())
        told = (Logprobs(chosen=-0.5, ids=(), values=()),) if top_logprobs >= 0 else ()
        taken: list[int] = []
        reason = "stop"
        reply = self.reply if isinstance(self.reply, str) else self.reply(self.prompts[-1])
        for token in self.tokenizer._tokenizer(reply, add_special_tokens=False)["input_ids"]:
            if len(taken) == limits.new_tokens_max:
                reason = "length"
                break
            taken.append(token)
            stream.items.put(Tokens(tokens=(token,), at_s=time.monotonic(), logprobs=told))
            if stop_rule is not None and stop_rule.stops_at(taken):
                break
        self.answered = len(taken)
        stream.items.put(End(reason=reason, reused=0, statistics={"recoveries": 0}))
        return stream


@contextmanager
def scripted(
    llm: LLM, folder: Path, template: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Running, ScriptedModel]]:
    """A server of a model that has this template."""
    model = ScriptedModel(tokenizer_of(folder, template))
    monkeypatch.setattr(llm, "tokenizer", model.tokenizer)
    monkeypatch.setattr(llm.session, "submit", model.submit)
    with running(llm) as server:
        yield server, model
