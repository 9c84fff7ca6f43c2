"""langchain-openai: chats, tools, structured output, and the same through responses."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field
from tasks import FOUND, KEY, SUM, WEATHER, check_form, check_sum, check_weather


class Form(BaseModel):
    """A sum."""

    first: int = Field(ge=0, le=999)
    result: int = Field(ge=0, le=999)


@tool
def get_weather(city: str) -> str:
    """The weather of a city"""
    return FOUND


def chat(url: str, model: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key=KEY, model=model, max_retries=0, **fields)


def text_invoke(url: str, model: str) -> str:
    return check_sum(chat(url, model).invoke(SUM).text)


def text_stream(url: str, model: str) -> str:
    return check_sum("".join(chunk.text for chunk in chat(url, model, stream_usage=True).stream(SUM)))


def text_batch(url: str, model: str) -> str:
    first, second = (check_sum(each.text) for each in chat(url, model).batch([SUM, SUM]))
    assert first == second
    return first


def text_structured(url: str, model: str) -> str:
    return check_form(chat(url, model).with_structured_output(Form).invoke(SUM).model_dump())


def text_json_mode(url: str, model: str) -> str:
    bound = chat(url, model, max_tokens=60).bind(response_format={"type": "json_object"})
    text = bound.invoke(SUM).text
    assert text.startswith("{")
    return text


def text_responses(url: str, model: str) -> str:
    return check_sum(chat(url, model, use_responses_api=True).invoke(SUM).text)


def text_responses_streamed(url: str, model: str) -> str:
    stream = chat(url, model, use_responses_api=True).stream(SUM)
    return check_sum("".join(chunk.text for chunk in stream))


def call(url: str, model: str, *, is_streamed: bool = False, **fields: Any) -> str:
    bound = chat(url, model, **fields).bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(WEATHER)]
    if is_streamed:
        answer: Any = None
        for chunk in bound.stream(messages):
            answer = chunk if answer is None else answer + chunk
    else:
        answer = bound.invoke(messages)
    messages.append(answer)
    cities = []
    for each in answer.tool_calls:
        cities.append(each["args"]["city"])
        messages.append(ToolMessage(get_weather.invoke(each["args"]), tool_call_id=each["id"]))
    return check_weather(bound.invoke(messages).text, cities)


def tools_chat(url: str, model: str) -> str:
    return call(url, model)


def tools_chat_streamed(url: str, model: str) -> str:
    return call(url, model, is_streamed=True)


def tools_responses(url: str, model: str) -> str:
    return call(url, model, use_responses_api=True)


def tools_responses_streamed(url: str, model: str) -> str:
    return call(url, model, is_streamed=True, use_responses_api=True)


def forced_structured_by_a_tool(url: str, model: str) -> str:
    bound = chat(url, model).with_structured_output(Form, method="function_calling")
    return check_form(bound.invoke(SUM).model_dump())
