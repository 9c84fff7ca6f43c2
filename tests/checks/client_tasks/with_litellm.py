"""litellm: chats, streams, tools, formats and its way to responses."""

from __future__ import annotations

import json
from typing import Any

import litellm
from tasks import (
    DESCRIPTION,
    FOUND,
    KEY,
    PARAMETERS,
    SCHEMA,
    SUM,
    WEATHER,
    check_form,
    check_sum,
    check_weather,
)

FUNCTION = {"name": "get_weather", "description": DESCRIPTION, "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
litellm.suppress_debug_info = True


def ask(url: str, model: str, messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(
        model=f"openai/{model}", api_base=url, api_key=KEY, messages=messages, max_retries=0, **fields
    )


def text_chat(url: str, model: str) -> str:
    return check_sum(ask(url, model, [{"role": "user", "content": SUM}]).choices[0].message.content)


def text_chat_streamed(url: str, model: str) -> str:
    stream = ask(url, model, [{"role": "user", "content": SUM}], stream=True)
    return check_sum("".join(chunk.choices[0].delta.content or "" for chunk in stream))


def text_format(url: str, model: str) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA, "strict": True}}
    answer = ask(url, model, [{"role": "user", "content": SUM}], response_format=form)
    return check_form(json.loads(answer.choices[0].message.content))


def text_response(url: str, model: str) -> str:
    found = litellm.responses(model=f"openai/{model}", api_base=url, api_key=KEY, input=SUM)
    return check_sum(found.output[-1].content[0].text)


def text_response_streamed(url: str, model: str) -> str:
    stream = litellm.responses(model=f"openai/{model}", api_base=url, api_key=KEY, input=SUM, stream=True)
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    return check_sum(text)


def text_text_completion(url: str, model: str) -> str:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{model}", api_base=url, api_key=KEY, prompt="Once", max_tokens=8
    )
    assert answer.choices[0].text
    return answer.choices[0].text


def tools_chat(url: str, model: str) -> str:
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    message = ask(url, model, messages, tools=TOOLS, tool_choice="auto").choices[0].message
    messages.append(message.model_dump())
    cities = []
    for call in message.tool_calls:
        cities.append(json.loads(call.function.arguments)["city"])
        messages.append(
            {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": FOUND}
        )
    return check_weather(ask(url, model, messages, tools=TOOLS).choices[0].message.content, cities)


def tools_chat_streamed(url: str, model: str) -> str:
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    chunks = list(ask(url, model, messages, tools=TOOLS, stream=True))
    message = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
    messages.append(message.model_dump())
    cities = []
    for call in message.tool_calls:
        cities.append(json.loads(call.function.arguments)["city"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": FOUND})
    stream = ask(url, model, messages, tools=TOOLS, stream=True)
    return check_weather("".join(chunk.choices[0].delta.content or "" for chunk in stream), cities)
