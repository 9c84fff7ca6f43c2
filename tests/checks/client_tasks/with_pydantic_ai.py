"""pydantic-ai: agents over chats and over responses."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from tasks import FOUND, KEY, SUM, WEATHER, check_form, check_sum, check_weather


class Form(BaseModel):
    first: int = Field(ge=0, le=999)
    result: int = Field(ge=0, le=999)


def agent(url: str, model: str, kind: Any = OpenAIChatModel, **fields: Any) -> Agent[None, Any]:
    return Agent(kind(model, provider=OpenAIProvider(base_url=url, api_key=KEY)), retries=0, **fields)


def text_run(url: str, model: str) -> str:
    return check_sum(agent(url, model).run_sync(SUM).output)


def text_dialogue(url: str, model: str) -> str:
    own = agent(url, model, system_prompt="Be short.")
    first = own.run_sync("Hello.", model_settings={"max_tokens": 8})
    return str(own.run_sync(SUM, message_history=first.all_messages()).output)


def text_streamed(url: str, model: str) -> str:
    async def ask() -> str:
        async with agent(url, model).run_stream(SUM) as stream:
            return "".join([text async for text in stream.stream_text(delta=True)])

    return check_sum(asyncio.run(ask()))


def text_native_output(url: str, model: str) -> str:
    return check_form(agent(url, model, output_type=NativeOutput(Form)).run_sync(SUM).output.model_dump())


def text_responses(url: str, model: str) -> str:
    return check_sum(agent(url, model, OpenAIResponsesModel).run_sync(SUM).output)


def call(url: str, model: str, kind: Any = OpenAIChatModel, *, is_streamed: bool = False) -> str:
    own, cities = agent(url, model, kind), []

    @own.tool_plain(strict=False)
    def get_weather(city: str) -> str:
        """The weather of a city"""
        cities.append(city)
        return FOUND

    async def stream() -> str:
        async with own.run_stream(WEATHER) as found:
            return str(await found.get_output())

    text = asyncio.run(stream()) if is_streamed else own.run_sync(WEATHER).output
    return check_weather(text, cities)


def tools_run(url: str, model: str) -> str:
    return call(url, model)


def tools_streamed(url: str, model: str) -> str:
    return call(url, model, is_streamed=True)


def tools_responses(url: str, model: str) -> str:
    return call(url, model, OpenAIResponsesModel)


def tools_responses_streamed(url: str, model: str) -> str:
    return call(url, model, OpenAIResponsesModel, is_streamed=True)


def forced_output_by_a_tool(url: str, model: str) -> str:
    return check_form(agent(url, model, output_type=ToolOutput(Form)).run_sync(SUM).output.model_dump())
