"""The requests of the part `api`, as tables. What a request takes over from an answer before it, such as an
id, stands there as `{{NAME PATH}}`: the name of that request, and the path of the value in its document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
KEY = "golden-key-1"
BEARER = {"Authorization": f"Bearer {KEY}"}
ORIGIN = "https://page.example"
"""Of a web page that the second server lets in."""

SUM = "What is 17 + 25?"
DIVISION = "Calculate 72 / 9."
STORY = "Tell me a story about a lonely fox."
CODE = "Complete this Python code:\ndef mean(values):"
PLAY = "Continue the play:\nQUEEN:\nI had a dream of water and of fire, and thou wast in it."

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


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat(name: str, text: Any = SUM, **fields: Any) -> Ask:
    body = {"model": "bundled", "messages": user(text), "max_tokens": 24, "temperature": 0}
    return Ask(name=name, body={key: value for key, value in {**body, **fields}.items() if value != "LEFT"})


def text(name: str, **fields: Any) -> Ask:
    return Ask(name=name, path=TEXT, body={"model": "bundled", "temperature": 0, "max_tokens": 16, **fields})


def response(name: str, said: Any = SUM, **fields: Any) -> Ask:
    body = {"model": "bundled", "input": said, "max_output_tokens": 20, "temperature": 0, **fields}
    return Ask(name=name, path=RESPONSES, body=body)


def get(name: str, path: str, method: str = "GET", **headers: str) -> Ask:
    return Ask(name=name, method=method, path=path, headers=headers)


SCHEMA = {
    "type": "object",
    "properties": {
        "first": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["sum", "product"]},
        "is_even": {"type": "boolean"},
    },
    "required": ["first", "kind", "is_even"],
    "additionalProperties": False,
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
ADD = {
    "name": "add",
    "description": "Adds two numbers",
    "parameters": {
        "type": "object",
        "properties": {
            "first": {"type": "integer", "minimum": 0, "maximum": 999},
            "second": {"type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["first", "second"],
        "additionalProperties": False,
    },
}
NOTE = {
    "name": "note",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 12}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": each} for each in (ADD, NOTE)]
STRICT_TOOLS = [{"type": "function", "function": {**each, "strict": True}} for each in (ADD, NOTE)]
FLAT_TOOLS = [{"type": "function", **each} for each in (ADD, NOTE)]
FLAT_NOTE = [{"type": "function", **NOTE}]
TWO_TURNS = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "6 x 7?"}]},
    {"role": "assistant", "content": "6 x 7 = 42."},
    {"role": "user", "content": "And 6 x 8?", "name": "ann"},
]
DRAWN = {"temperature": 1, "seed": 7}
STREAM = {"stream": True}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}

ANSWERS: tuple[Ask, ...] = (
    get("models/list", "/v1/models"),
    get("models/list-slash", "/v1/models/"),
    get("models/one", "/v1/models/bundled"),
    get("models/unknown", "/v1/models/another"),
    get("health/ok", "/health"),
    get("cluster", "/v1/cluster"),
    # chats
    chat("chat/plain"),
    chat("chat/again"),
    chat("chat/bare", model="LEFT", temperature="LEFT"),
    chat("chat/to-its-end", DIVISION, max_tokens=200),
    chat("chat/one-token", max_tokens=1),
    chat("chat/max-completion-tokens", max_tokens="LEFT", max_completion_tokens=5),
    chat("chat/turns", messages=TWO_TURNS),
    chat(
        "chat/turns-go-on",
        messages=[
            *TWO_TURNS,
            {"role": "assistant", "content": "{{chat/turns choices.0.message.content}}"},
            {"role": "user", "content": "Why?"},
        ],
    ),
    chat("chat/developer", messages=[{"role": "developer", "content": "Be short."}, *user(SUM)]),
    chat("chat/null-content", messages=[*user("Hi"), {"role": "assistant", "content": None}, *user(SUM)]),
    chat(
        "chat/continued",
        messages=[*user(SUM), {"role": "assistant", "content": "17 + 25 ="}],
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    chat("chat/letters", "Übersetze “größer” → 日本語 🦊", max_tokens=12),
    chat("chat/stream", **STREAM),
    chat("chat/stream-usage", STORY, **WITH_USAGE),
    chat("chat/stream-without-usage", stream=True, stream_options={"include_usage": False}),
    chat("chat/drawn", STORY, **DRAWN),
    chat("chat/drawn-stream", STORY, **DRAWN, **STREAM),
    chat("chat/drawn-other-seed", STORY, temperature=1, seed=-8),
    chat("chat/drawn-filtered", STORY, temperature=1.3, seed=5, top_p=0.9, top_k=40, min_p=0.02),
    chat("chat/top-p-0", STORY, temperature=1, seed=5, top_p=0),
    chat("chat/penalties", PLAY, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.1),
    chat("chat/two", STORY, n=2, **DRAWN),
    chat("chat/two-stream", STORY, n=2, **DRAWN, **WITH_USAGE),
    chat("chat/two-alike", n=2, max_tokens=8),
    chat("chat/stop", stop="="),
    chat("chat/stop-list-stream", stop=["nowhere", "30;"], **STREAM),
    chat("chat/stop-token-ids", stop_token_ids=[32]),
    chat("chat/ignore-eos", DIVISION, ignore_eos=True, max_tokens=60),
    chat("chat/logprobs", max_tokens=5, logprobs=True, top_logprobs=3),
    chat("chat/logprobs-alone", STORY, max_tokens=5, logprobs=True, **DRAWN),
    chat("chat/logprobs-stream", max_tokens=5, logprobs=True, top_logprobs=2, **STREAM),
    chat("chat/logit-bias", logit_bias={"22": -100, "226": 1.5}),
    chat("chat/json-schema", response_format=JSON_FORMAT, max_tokens=60),
    chat("chat/json-schema-stream", response_format=JSON_FORMAT, max_tokens=60, **DRAWN, **STREAM),
    chat("chat/json-object", response_format={"type": "json_object"}),
    chat("chat/format-text", response_format={"type": "text"}, max_tokens=5),
    chat("chat/regex", structured_outputs={"regex": "(yes|no), [0-9]{2,4}"}),
    chat("chat/choice", structured_outputs={"choice": ["forty-two", "nothing"]}),
    chat("chat/grammar", structured_outputs={"grammar": 'start: "a" NUMBER "b"\nNUMBER: /[0-9]{1,3}/'}),
    chat("chat/harmless", user="ann", metadata={"a": "b"}, store=True, service_tier="auto", max_tokens=5),
    chat("chat/neutral", typical_p=1, mirostat=0, use_beam_search=False, functions=[], max_tokens=5),
    chat("chat/tools-none", tools=TOOLS, tool_choice="none"),
    Ask(
        name="chat/curl",
        raw=json.dumps({"messages": user(SUM), "max_tokens": 5}).encode(),
        headers={"Content-Type": "application/x-www-form-urlencoded"},
    ),
    Ask(name="chat/slash", path=f"{CHAT}/", body={"messages": user(SUM), "max_tokens": 5}),
    # completions
    text("completions/text", prompt="The fox"),
    text("completions/ids", prompt=[1, 3, 204, 448, 311, 226, 23]),
    text("completions/echo", prompt="The fox", echo=True),
    text("completions/echo-stream", prompt="The fox", echo=True, **STREAM),
    text("completions/stream", prompt="The fox", **STREAM),
    text("completions/stream-usage", prompt="def mean(values):", **WITH_USAGE),
    text("completions/list", prompt=["The fox", "10 + 20 ="]),
    text("completions/list-stream", prompt=["The fox", "10 + 20 ="], **STREAM),
    text("completions/lists-of-ids", prompt=[[1, 3, 204], [448, 311]], max_tokens=6),
    text("completions/two-each", prompt=["The fox", "10 + 20 ="], n=2, max_tokens=6, **DRAWN),
    text("completions/drawn", prompt="The fox", **DRAWN),
    text("completions/logprobs", prompt="10 + 20 =", logprobs=2, max_tokens=5),
    text("completions/logprobs-stream", prompt="10 + 20 =", logprobs=2, max_tokens=5, **STREAM),
    text("completions/logprobs-0", prompt="The fox", logprobs=0, max_tokens=3),
    text("completions/stop", prompt="10 + 20 =", stop=[";", "\n"]),
    text("completions/regex", prompt="A number: ", structured_outputs={"regex": "[0-9]{5}"}),
    Ask(name="completions/defaults", path=TEXT, body={"prompt": "10 + 20 ="}),
    # responses
    response("responses/plain"),
    response("responses/stream", **STREAM),
    response("responses/to-its-end", DIVISION, max_output_tokens=200),
    response("responses/instructed", instructions="Be short.", metadata={"who": "ann"}),
    response(
        "responses/items",
        [
            {"role": "developer", "content": "Be short."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
            *user(SUM),
        ],
    ),
    response("responses/goes-on", "And why?", previous_response_id="{{responses/plain id}}"),
    response("responses/goes-on-further", "Why?", previous_response_id="{{responses/goes-on id}}", **STREAM),
    response(
        "responses/referred",
        [{"type": "item_reference", "id": "{{responses/plain output.0.id}}"}, *user("?")],
    ),
    response("responses/drawn", STORY, top_p=0.95, **DRAWN),
    response(
        "responses/logprobs", include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4
    ),
    response(
        "responses/logprobs-stream",
        include=["message.output_text.logprobs"],
        top_logprobs=1,
        max_output_tokens=2,
        **STREAM,
    ),
    response(
        "responses/schema",
        text={"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA, "strict": True}},
        max_output_tokens=60,
    ),
    response("responses/not-kept", store=False),
    get("responses/get", "/v1/responses/{{responses/plain id}}"),
    get("responses/get-gone-on", "/v1/responses/{{responses/goes-on id}}"),
    get("responses/get-not-kept", "/v1/responses/{{responses/not-kept id}}"),
    get(
        "responses/input-items",
        "/v1/responses/{{responses/goes-on-further events.0.response.id}}/input_items",
    ),
    get("responses/input-items-asc", "/v1/responses/{{responses/items id}}/input_items?order=asc&limit=2"),
    get(
        "responses/input-items-after",
        "/v1/responses/{{responses/items id}}/input_items"
        "?order=asc&after={{responses/input-items-asc last_id}}",
    ),
    get("responses/delete", "/v1/responses/{{responses/plain id}}", "DELETE"),
    get("responses/get-deleted", "/v1/responses/{{responses/plain id}}"),
    get("responses/delete-again", "/v1/responses/{{responses/plain id}}", "DELETE"),
    response("responses/goes-on-from-deleted", previous_response_id="{{responses/plain id}}"),
    # the page
    get("page/index", "/"),
    get("page/head", "/", "HEAD"),
    get("page/not-there", "/page/nothing.js"),
    get("page/above", "/page/..%2Fapp.py"),
    get("live/no-recording", "/live/recording"),
    get("live/head", "/live/events", "HEAD"),
    get("live/foreign-page", "/live/events", Origin="https://page.example"),
    get("live/foreign-site", "/live/recording", **{"Sec-Fetch-Site": "cross-site"}),
)

DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
WRONG: tuple[Ask, ...] = (
    chat("wrong/unknown-field", colour="red"),
    chat("wrong/misspelt-field", temprature=1),
    chat("wrong/field-of-others", guided_json={}),
    chat("wrong/field-not-built", modalities=["audio"]),
    chat("wrong/functions", functions=[{"name": "f"}]),
    chat("wrong/type-number", temperature="hot"),
    chat("wrong/type-whole", max_tokens=1.5),
    chat("wrong/type-flag", stream="yes"),
    chat("wrong/type-text", model=7),
    chat("wrong/type-object", stream_options=[], stream=True),
    chat("wrong/range-temperature", temperature=3),
    chat("wrong/range-top-p", top_p=1.5),
    chat("wrong/range-top-k", top_k=-5),
    chat("wrong/range-penalty", presence_penalty=9),
    chat("wrong/range-repetition", repetition_penalty=0),
    chat("wrong/range-max-tokens", max_tokens=0),
    chat("wrong/range-seed", seed=1 << 70),
    chat("wrong/range-n", n=0),
    chat("wrong/n-above-parallel", n=20),
    chat("wrong/two-lengths", max_completion_tokens=3),
    chat("wrong/unknown-model", model="another"),
    chat("wrong/too-long", "word " * 1500),
    chat("wrong/too-long-by-bytes", "a" * 300_000),
    chat("wrong/messages-none", messages=None),
    chat("wrong/messages-empty", messages=[]),
    chat("wrong/messages-text", messages="hi"),
    chat("wrong/message-misspelt", messages="LEFT", mesages=user(SUM)),
    chat("wrong/message-role", messages=[{"role": "robot", "content": "hi"}]),
    chat("wrong/message-content", messages=[{"role": "user", "content": None}]),
    chat("wrong/message-field", messages=[{"role": "user", "content": "hi", "mood": "good"}]),
    chat("wrong/image", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]),
    chat("wrong/half-character", "\ud800"),
    chat("wrong/prompt-to-chats", messages="LEFT", prompt="hi"),
    chat("wrong/top-logprobs-alone", top_logprobs=2),
    chat("wrong/top-logprobs-many", logprobs=True, top_logprobs=21),
    chat("wrong/stream-options-alone", stream_options={"include_usage": True}),
    chat("wrong/stop-many", stop=["a", "b", "c", "d", "e"]),
    chat("wrong/stop-type", stop=7),
    chat("wrong/stop-token-ids", stop_token_ids=["a"]),
    chat("wrong/bias-name", logit_bias={"fox": 1}),
    chat("wrong/bias-range", logit_bias={"22": 101}),
    chat("wrong/bias-beyond-vocabulary", logit_bias={"99999": 1}),
    chat("wrong/format-type", response_format={"type": "xml"}),
    chat(
        "wrong/format-without-schema", response_format={"type": "json_schema", "json_schema": {"name": "a"}}
    ),
    chat(
        "wrong/schema-not-obeyed",
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "a",
                "schema": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}},
            },
        },
    ),
    chat(
        "wrong/schema-type",
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "fox"}}},
    ),
    chat("wrong/regex", structured_outputs={"regex": "("}),
    chat("wrong/two-outputs", structured_outputs={"regex": "a", "choice": ["b"]}),
    chat("wrong/ignore-eos-and-format", response_format={"type": "json_object"}, ignore_eos=True),
    chat("wrong/tools-without-place", tools=TOOLS),
    chat("wrong/tool-choice-without-tools", tool_choice="required"),
    chat("wrong/thinking-without-place", chat_template_kwargs={"enable_thinking": True}),
    chat("wrong/effort-without-place", reasoning_effort="high"),
    chat("wrong/continued-of-user", continue_final_message=True),
    chat("wrong/stream-of-unknown-model", model="another", **STREAM),
    Ask(name="wrong/body-empty", raw=b""),
    Ask(name="wrong/body-list", raw=b"[1, 2]"),
    Ask(name="wrong/body-cut", raw=b'{"messages": [{"role": '),
    Ask(name="wrong/body-nan", raw=b'{"messages": [], "temperature": NaN}'),
    Ask(name="wrong/body-twice", raw=b'{"model": "a", "model": "b"}'),
    Ask(name="wrong/body-not-utf8", raw=b'{"model": "\xff"}'),
    Ask(name="wrong/body-deep", raw=DEEP),
    Ask(name="wrong/body-large", raw=b" " * (9 << 20)),
    Ask(name="wrong/body-type", raw=b"{}", headers={"Content-Type": "text/plain"}),
    text("wrong/prompt-empty", prompt=[]),
    text("wrong/prompt-type", prompt=7),
    text("wrong/prompt-mixed", prompt=["a", 7]),
    text("wrong/prompt-beyond-vocabulary", prompt=[1, 99999]),
    text("wrong/prompt-many", prompt=["a"] * 65),
    text("wrong/prompt-none"),
    text("wrong/messages-to-completions", messages=user(SUM)),
    text("wrong/echo-logprobs", prompt="a", echo=True, logprobs=1),
    text("wrong/suffix", prompt="a", suffix="b"),
    text("wrong/best-of", prompt="a", best_of=3),
    response("wrong/input-none", None),
    response("wrong/input-empty", []),
    response("wrong/input-type", [{"type": "computer_call"}]),
    response("wrong/input-reference", [{"type": "item_reference", "id": "msg_1"}]),
    response("wrong/previous", previous_response_id="resp_1"),
    response("wrong/background", background=True),
    response("wrong/conversation", conversation="conv_1"),
    response("wrong/include", include=["everything"]),
    response("wrong/metadata", metadata={"a": 1}),
    response("wrong/store", store="yes"),
    response("wrong/truncation", truncation="auto"),
    response("wrong/max-tokens-of-chats", max_tokens=5),
    response("wrong/response-field", colour="red"),
    response("wrong/response-too-long", "word " * 1500),
    response("wrong/response-temperature", temperature=3),
    response("wrong/web-search", tools=[{"type": "web_search"}]),
    response("wrong/text-format", text={"format": {"type": "xml"}}),
    get("wrong/response-unknown", "/v1/responses/resp_1"),
    get("wrong/response-query", "/v1/responses/{{responses/goes-on id}}?stream=true"),
    get("wrong/items-unknown", "/v1/responses/resp_1/input_items"),
    get("wrong/items-limit", "/v1/responses/{{responses/items id}}/input_items?limit=0"),
    get("wrong/items-order", "/v1/responses/{{responses/items id}}/input_items?order=up"),
    get("wrong/items-after", "/v1/responses/{{responses/items id}}/input_items?after=msg_1"),
    get("wrong/items-query", "/v1/responses/{{responses/items id}}/input_items?before=msg_1"),
    get("wrong/path", "/v1/embeddings"),
    get("wrong/path-without-v1", "/chat/completions", "POST"),
    get("wrong/path-misspelt", "/v1/chat/completion", "POST"),
    get("wrong/method-get", CHAT),
    get("wrong/method-put", "/v1/models", "PUT"),
    get("wrong/method-on-page", "/", "POST"),
    get("wrong/method-options", CHAT, "OPTIONS"),
    get("wrong/host", "/v1/models", Host="evil.example"),
    get("wrong/host-health", "/health", Host="evil.example"),
)
"""Requests that are refused; those with names of earlier ones come behind `ANSWERS`."""

PARALLEL: tuple[Ask, ...] = (
    chat("parallel/sum", max_tokens=40),
    chat("parallel/story", STORY, max_tokens=40, **DRAWN),
    chat("parallel/code", CODE, max_tokens=40, **STREAM),
    chat("parallel/play", PLAY, max_tokens=40, n=2, **DRAWN),
    text("parallel/text", prompt="Once upon a time", max_tokens=40),
    response("parallel/response", DIVISION, max_output_tokens=40),
)

OFTEN = "A farmer has 18 hens and each hen lays 5 eggs a week. He sells them at 3 dollars a box of 6. "
CACHED: tuple[Ask, ...] = (
    chat("cached/first", OFTEN * 2 + "How many eggs?", max_tokens=4),
    chat("cached/again", OFTEN * 2 + "How many eggs?", max_tokens=4),
    chat("cached/beginning", OFTEN * 2 + "What does he earn?", max_tokens=4),
)

LONG = chat("cancel/long", STORY, ignore_eos=True, max_tokens=600, **STREAM)
"""Its client goes away in the middle of it."""
AFTER_LONG = (
    chat("cancel/same-after", STORY, max_tokens=40),
    chat("cancel/other-after", max_tokens=40),
)


def bound(name: str, **fields: Any) -> Ask:
    """A chat with tools."""
    return chat(name, **{"model": "LEFT", "tools": TOOLS, "max_tokens": 80, **fields})


def calling(name: str, **fields: Any) -> Ask:
    """A response with tools."""
    found = response(name, **{"tools": FLAT_TOOLS, "max_output_tokens": 80, **fields})
    return Ask(name=name, path=found.path, body={**found.body, "model": None})


def named_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [named_choice(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


KEYS: tuple[Ask, ...] = (
    get("key/none", "/v1/models"),
    get("key/other", "/v1/models", Authorization="Bearer golden-key-3"),
    get("key/basic", "/v1/models", Authorization="Basic Z29sZGVuLWtleS0x"),
    get("key/bearer", "/v1/models", **BEARER),
    get("key/second", "/v1/models", Authorization="bearer golden-key-2"),
    get("key/x-api-key", "/v1/models", **{"X-Api-Key": KEY}),
    get("key/host", "/v1/models", Host="evil.example", **BEARER),
    get("key/health", "/health"),
    get("key/page", "/"),
    get("key/page-file", "/page/nothing.js"),
    get("key/metrics", "/metrics"),
    get("key/cluster", "/v1/cluster"),
    get("key/live", "/live/events"),
    get("key/recording", "/live/recording"),
    get("key/path", "/v1/embeddings"),
    get("key/post", CHAT, "POST"),
    get(
        "cors/preflight",
        CHAT,
        "OPTIONS",
        Origin=ORIGIN,
        **{"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"},
    ),
    get("cors/answer", "/v1/models", Origin=ORIGIN, **BEARER),
    get("cors/without-key", "/v1/models", Origin=ORIGIN),
    get("cors/other-page", "/v1/models", Origin="https://other.example", **BEARER),
    get(
        "cors/other-preflight",
        CHAT,
        "OPTIONS",
        Origin="https://other.example",
        **{"Access-Control-Request-Method": "POST"},
    ),
)
"""Of the second server, which has two keys; these say for themselves which they send, all others send one."""

CALLS: tuple[Ask, ...] = (
    bound("tools/auto", max_tokens=24),
    bound("tools/none", tool_choice="none", max_tokens=24),
    bound("tools/required", tool_choice="required"),
    bound("tools/required-stream", tool_choice="required", **WITH_USAGE),
    bound("tools/required-drawn", tool_choice="required", **DRAWN),
    bound("tools/required-single", tool_choice="required", parallel_tool_calls=False),
    bound("tools/required-cut", tool_choice="required", max_tokens=6),
    bound("tools/named", tool_choice=named_choice("note")),
    bound("tools/named-stream", tool_choice=named_choice("add"), **STREAM),
    bound("tools/allowed-required", tool_choice=allowed("required", "note")),
    bound("tools/allowed-auto", tool_choice=allowed("auto", "add"), max_tokens=24),
    bound("tools/strict", tools=STRICT_TOOLS, max_tokens=24),
    bound("tools/or-format", response_format=JSON_FORMAT),
    bound(
        "tools/result",
        messages=[
            *user(SUM),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": "{{tools/required-single choices.0.message.tool_calls}}",
            },
            {
                "role": "tool",
                "tool_call_id": "{{tools/required-single choices.0.message.tool_calls.0.id}}",
                "content": "42",
            },
        ],
        max_tokens=24,
    ),
    bound(
        "tools/result-unknown", messages=[*user(SUM), {"role": "tool", "tool_call_id": "a", "content": "4"}]
    ),
    bound("tools/choice-unknown", tool_choice=named_choice("fly")),
    bound("tools/choice-type", tool_choice="sometimes"),
    bound("tools/allowed-mode", tool_choice=allowed("never", "add")),
    bound("tools/type", tools=[{"type": "web_search"}]),
    bound("tools/name", tools=[{"type": "function", "function": {"name": "a b"}}]),
    bound("tools/twice", tools=[*TOOLS, *TOOLS]),
    bound(
        "tools/parameters-text", tools=[{"type": "function", "function": {"name": "a", "parameters": "{}"}}]
    ),
    bound(
        "tools/schema-not-obeyed",
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "a",
                    "parameters": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}},
                },
            }
        ],
        tool_choice="required",
    ),
    bound("tools/grammar", structured_outputs={"grammar": 'start: "a"'}),
    bound("thoughts/on", tools="LEFT", enable_thinking=True, max_tokens=16),
    bound("thoughts/on-stream", tools="LEFT", chat_template_kwargs={"enable_thinking": True}, **WITH_USAGE),
    bound("thoughts/off", tools="LEFT", enable_thinking=False, max_tokens=16),
    bound("thoughts/effort-none", tools="LEFT", reasoning_effort="none", max_tokens=16),
    bound("thoughts/effort-high", tools="LEFT", reasoning_effort="high"),
    bound("thoughts/other-variable", tools="LEFT", chat_template_kwargs={"mood": "good"}),
    bound(
        "thoughts/sent-back",
        tools="LEFT",
        messages=[
            *user(SUM),
            {"role": "assistant", "content": "42", "reasoning_content": "A sum."},
            *user("?"),
        ],
        max_tokens=16,
    ),
    calling("responses-tools/required", tool_choice="required", parallel_tool_calls=False),
    calling(
        "responses-tools/required-stream",
        tools=FLAT_NOTE,
        tool_choice="required",
        parallel_tool_calls=False,
        **STREAM,
    ),
    calling("responses-tools/named", tool_choice={"type": "function", "name": "note"}),
    calling(
        "responses-tools/allowed",
        tool_choice={
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "note"}],
        },
    ),
    calling(
        "responses-tools/result",
        input=[
            {
                "type": "function_call_output",
                "call_id": "{{responses-tools/required output.0.call_id}}",
                "output": "42",
            }
        ],
        previous_response_id="{{responses-tools/required id}}",
        tools=FLAT_NOTE,
        max_output_tokens=20,
    ),
    get("responses-tools/input-items", "/v1/responses/{{responses-tools/result id}}/input_items"),
    calling("responses-tools/thoughts", tools=[], enable_thinking=True, max_output_tokens=12, **STREAM),
)
"""Of the second server, whose template has a place for tools."""

BUSY = bound("busy/long", tools="LEFT", n=2, ignore_eos=True, max_tokens=600, **STREAM)
"""It takes both places of the second server, where nobody may wait."""
WHILE_BUSY = (bound("busy/refused", tools="LEFT", max_tokens=8), bound("busy/stream", tools="LEFT", **STREAM))
AFTER_BUSY = bound("busy/after", tools="LEFT", max_tokens=8)
