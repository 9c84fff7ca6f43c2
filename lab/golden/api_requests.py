"""The requests of the part `api`, a line each in `api_requests.jsonl`.

What a request takes over from an answer before it, such as an id, stands there as `{{NAME PATH}}`: the name
of that request, and the path of the value in its document; `{"repeat": [TEXT, TIMES]}` is a long text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHAT = "/v1/chat/completions"
KEY = "golden-key-1"
BEARER = {"Authorization": f"Bearer {KEY}"}
ORIGIN = "https://page.example"
"""Of a web page that the second server lets in."""

SUM = "What is 17 + 25?"
STORY = "Tell me a story about a lonely fox."

TEMPLATE = """
{%- if tools %}<|system|>
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
A call is JSON within <tool_call></tool_call>.<|end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|user|>
<tool_response>
{{ message.content }}
</tool_response><|end|>
{% else %}<|{{ message.role }}|>
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>
{% endif %}{{ message.content }}
{%- for tool_call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% if enable_thinking is defined and enable_thinking %}<think>
{% else %}<think>

</think>

{% endif %}{% endif %}"""
"""A template for the bundled model with a place for tools, in Qwen3's form; it thinks if it is told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request; `raw` is a body that is not made of JSON."""

    name: str
    method: str = "POST"
    path: str = CHAT
    body: Any = None
    raw: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes | None:
        return self.raw if self.body is None else json.dumps(self.body).encode()


def chat(name: str, text: Any = SUM, **fields: Any) -> Ask:
    messages = [{"role": "user", "content": text}]
    body = {"model": "bundled", "messages": messages, "max_tokens": 24, "temperature": 0, **fields}
    return Ask(name=name, body=body)


def get(name: str, path: str, method: str = "GET", **headers: str) -> Ask:
    return Ask(name=name, method=method, path=path, headers=headers)


def _written_out(value: Any) -> Any:
    if isinstance(value, list):
        return [_written_out(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"repeat"}:
        text, times = value["repeat"]
        return text * times
    return {key: _written_out(each) for key, each in value.items()}


def _read() -> dict[str, tuple[Ask, ...]]:
    tables: dict[str, tuple[Ask, ...]] = {}
    for line in Path(__file__).with_suffix(".jsonl").read_text("utf-8").splitlines():
        fields = _written_out(json.loads(line))
        table = fields.pop("table")
        if "raw" in fields:
            fields["raw"] = "".join(fields["raw"]).encode("latin-1")
        tables[table] = (*tables.get(table, ()), Ask(**fields))
    return tables


_TABLES = _read()
ANSWERS, WRONG, PARALLEL, CACHED = (_TABLES[name] for name in ("ANSWERS", "WRONG", "PARALLEL", "CACHED"))
(LONG,), AFTER_LONG = _TABLES["LONG"], _TABLES["AFTER_LONG"]
KEYS, CALLS = _TABLES["KEYS"], _TABLES["CALLS"]
"""Of the second server, whose template has a place for tools."""
(BUSY,), WHILE_BUSY, (AFTER_BUSY,) = (_TABLES[name] for name in ("BUSY", "WHILE_BUSY", "AFTER_BUSY"))
"""The first takes both places of the second server, where nobody may wait."""
