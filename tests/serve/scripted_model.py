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

QWEN3 = """
{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
For each function call, return a json object within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}
{%- for tool_call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
LFM2 = """
{%- if tools %}<|im_start|>system
List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message["role"] }}
{% if message["role"] == "tool" %}<|tool_response_start|>{% endif %}{{ message["content"] }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MISTRAL = """
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message["role"] == "user" %}[INST]{{ message["content"] }}[/INST]
{%- elif message["role"] == "tool" %}[TOOL_RESULTS]{{ message["content"] }}[/TOOL_RESULTS]
{%- elif message.tool_calls is defined %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.id | length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}[TOOL_CALLS]{{ tool_call.function.name }}[ARGS]{{ tool_call.function.arguments | tojson }}
{%- endfor %}</s>
{%- else %}{{ message["content"] }}</s>{% endif %}
{%- endfor %}"""
GPT_OSS = """<|start|>system<|message|>Reasoning: {{ reasoning_effort | default("medium") }}<|end|>
{%- if tools %}<|start|>developer<|message|># Tools
{% for tool in tools %}{{ "// " + tool.function.description }}
type {{ tool.function.name }} = (_: any) => any;{% endfor %}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|start|>functions.{{ message.name }} to=assistant<|channel|>commentary
{{- "<|message|>" + message.content | tojson + "<|end|>" }}
{%- elif message.tool_calls %}
{%- if message.content and message.thinking %}
{{- raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}
{%- endif %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis
{{- "<|message|>" + message.thinking + "<|end|>" }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}<|channel|>
{{- "commentary json<|message|>" + call.arguments | tojson + "<|call|>" }}
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
GEMMA4 = """
{%- if tools %}<|turn>system
{% if enable_thinking %}<|think|>{% endif %}
{%- for tool in tools %}<|tool>declaration:{{ tool.function.name }}<tool|>{% endfor %}<turn|>
{% endif %}
{%- set ns = namespace(last=none) %}
{%- for message in messages %}<|turn>{{ "model" if message["role"] == "assistant" else message["role"] }}
{% set ns.last = none %}
{%- for tool_call in message["tool_calls"] or [] %}<|tool_call>call:{{ tool_call["function"]["name"] }}{
{%- for key, value in tool_call["function"]["arguments"] | dictsort %}{{ key }}:
{{- '<|"|>' + value + '<|"|>' if value is string else value }}{% if not loop.last %},{% endif %}
{%- endfor %}}<tool_call|>{% set ns.last = 'tool' %}{% endfor %}
{%- for tool_response in message["tool_responses"] or [] %}<|tool_response>response:
{{- tool_response["name"] }}{value:<|"|>{{ tool_response["response"] }}<|"|>}<tool_response|>
{%- set ns.last = 'tool_response' %}{% endfor %}{{ message["content"] }}
{%- if ns.last != 'tool_response' %}<turn|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.last != 'tool_response' %}<|turn>model
{% if not enable_thinking | default(false) %}<|channel>thought
<channel|>{% endif %}{% endif %}"""
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
