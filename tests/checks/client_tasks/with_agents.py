"""The OpenAI Agents SDK: over chats and over responses."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from tasks import FOUND, KEY, SUM, WEATHER, check_form, check_sum, check_weather

set_tracing_disabled(True)


class Form(BaseModel):
    first: int = Field(ge=0, le=999)
    result: int = Field(ge=0, le=999)


def agent(url: str, model: str, kind: Any = OpenAIChatCompletionsModel, **fields: Any) -> Agent[Any]:
    own = AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
    return Agent(name="a", instructions="Be short.", model=kind(model=model, openai_client=own), **fields)


def ask(own: Agent[Any], question: str, *, is_streamed: bool = False) -> Any:
    async def work() -> Any:
        if not is_streamed:
            return (await Runner.run(own, question)).final_output
        found = Runner.run_streamed(own, question)
        async for _ in found.stream_events():
            pass
        return found.final_output

    return asyncio.run(work())


def text_chat(url: str, model: str) -> str:
    return check_sum(ask(agent(url, model), SUM))


def text_chat_streamed(url: str, model: str) -> str:
    return check_sum(ask(agent(url, model), SUM, is_streamed=True))


def text_responses(url: str, model: str) -> str:
    return check_sum(ask(agent(url, model, OpenAIResponsesModel), SUM))


def text_responses_streamed(url: str, model: str) -> str:
    return check_sum(ask(agent(url, model, OpenAIResponsesModel), SUM, is_streamed=True))


def text_output_type(url: str, model: str) -> str:
    return check_form(ask(agent(url, model, output_type=Form), SUM).model_dump())


def call(url: str, model: str, *, is_strict: bool = False, is_streamed: bool = False, **fields: Any) -> str:
    cities = []

    @function_tool(strict_mode=is_strict)
    def get_weather(city: str) -> str:
        """The weather of a city"""
        cities.append(city)
        return FOUND

    text = ask(agent(url, model, tools=[get_weather], **fields), WEATHER, is_streamed=is_streamed)
    return check_weather(text, cities)


def tools_chat(url: str, model: str) -> str:
    return call(url, model)


def tools_chat_streamed(url: str, model: str) -> str:
    return call(url, model, is_streamed=True)


def tools_responses(url: str, model: str) -> str:
    return call(url, model, kind=OpenAIResponsesModel)


def tools_responses_streamed(url: str, model: str) -> str:
    return call(url, model, kind=OpenAIResponsesModel, is_streamed=True)


def forced_strict_tool(url: str, model: str) -> str:
    return call(url, model, is_strict=True)
