"""The official Python client: chats, completions, responses, each whole and streamed."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI
from pydantic import BaseModel, Field
from tasks import (
    ANSWER,
    DESCRIPTION,
    FOUND,
    KEY,
    PARAMETERS,
    SUM,
    WEATHER,
    check_form,
    check_sum,
    check_weather,
)

ASKED: Any = [{"role": "user", "content": SUM}]
FUNCTION = {"name": "get_weather", "description": DESCRIPTION, "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


class Form(BaseModel):
    first: int = Field(ge=0, le=999)
    result: int = Field(ge=0, le=999)


def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=120)


def text_models(url: str, model: str) -> str:
    (found,) = client(url).models.list().data
    assert found.id == model
    return client(url).models.retrieve(model).id


def text_chat(url: str, model: str) -> str:
    answer = client(url).chat.completions.create(model=model, messages=ASKED)
    return check_sum(answer.choices[0].message.content)


def text_chat_streamed(url: str, model: str) -> str:
    stream = client(url).chat.completions.create(
        model=model, messages=ASKED, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage
    return check_sum("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))


def text_chat_logprobs(url: str, model: str) -> str:
    answer = client(url).chat.completions.create(model=model, messages=ASKED, logprobs=True, top_logprobs=3)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert all(len(each.top_logprobs) == 3 for each in told.content)
    return check_sum("".join(each.token for each in told.content))


def text_parse(url: str, model: str) -> str:
    answer = client(url).chat.completions.parse(model=model, messages=ASKED, response_format=Form)
    assert answer.choices[0].message.parsed is not None
    return check_form(answer.choices[0].message.parsed.model_dump())


def text_parse_streamed(url: str, model: str) -> str:
    with client(url).chat.completions.stream(model=model, messages=ASKED, response_format=Form) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
    assert answer.choices[0].message.parsed is not None
    return check_form(answer.choices[0].message.parsed.model_dump())


def text_completion(url: str, model: str) -> str:
    answer = client(url).completions.create(model=model, prompt="Once", max_tokens=8, echo=True)
    assert answer.choices[0].text.startswith("Once")
    return answer.choices[0].text


def text_completion_streamed(url: str, model: str) -> str:
    stream = client(url).completions.create(model=model, prompt="Once", max_tokens=8, stream=True)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text
    return text


def text_response(url: str, model: str) -> str:
    return check_sum(client(url).responses.create(model=model, input=SUM).output_text)


def text_response_streamed(url: str, model: str) -> str:
    with client(url).responses.stream(model=model, input=SUM) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text
    return check_sum(text)


def text_response_parsed(url: str, model: str) -> str:
    found = client(url).responses.parse(model=model, input=SUM, text_format=Form).output_parsed
    assert found is not None
    return check_form(found.model_dump())


def text_response_parsed_given_back(url: str, model: str) -> str:
    first = client(url).responses.parse(model=model, input=SUM, text_format=Form)
    items: Any = [{"role": "user", "content": SUM}, *(item.to_dict() for item in first.output)]
    items.append({"role": "user", "content": SUM})
    return check_sum(client(url).responses.create(model=model, input=items).output_text)


def text_response_parsed_streamed(url: str, model: str) -> str:
    with client(url).responses.stream(model=model, input=SUM, text_format=Form) as stream:
        for _ in stream:
            pass
        found = stream.get_final_response().output_parsed
    assert found is not None
    return check_form(found.model_dump())


def text_response_dialogue(url: str, model: str) -> str:
    own = client(url)
    first = own.responses.create(model=model, input="Hello.", max_output_tokens=8)
    second = own.responses.create(model=model, input=SUM, previous_response_id=first.id)
    assert own.responses.retrieve(second.id).output_text == second.output_text
    listed = list(own.responses.input_items.list(second.id, order="asc"))
    assert len(listed) == 3, listed
    own.responses.delete(first.id)
    return second.output_text


def tools_chat(url: str, model: str) -> str:
    own, messages, cities = client(url), [{"role": "user", "content": WEATHER}], []
    answer = own.chat.completions.create(model=model, messages=messages, tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    messages.append(message)
    for call in message.tool_calls:
        cities.append(json.loads(call.function.arguments)["city"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": FOUND})
    answer = own.chat.completions.create(model=model, messages=messages, tools=TOOLS)
    return check_weather(answer.choices[0].message.content, cities)


def tools_chat_streamed(url: str, model: str) -> str:
    own, messages, cities = client(url), [{"role": "user", "content": WEATHER}], []
    with own.chat.completions.stream(model=model, messages=messages, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds, kinds
    messages.append(message)
    for call in message.tool_calls:
        cities.append(json.loads(call.function.arguments)["city"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": FOUND})
    with own.chat.completions.stream(model=model, messages=messages, tools=TOOLS) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    return check_weather(text, cities)


def respond(url: str, model: str, *, is_streamed: bool) -> str:
    own, cities = client(url), []
    tools: Any = [{"type": "function", "strict": False, **FUNCTION}]
    items: Any = [{"role": "user", "content": WEATHER}]
    for _ in range(2):
        if is_streamed:
            with own.responses.stream(model=model, input=items, tools=tools) as stream:
                kinds = {event.type for event in stream}
                answer = stream.get_final_response()
            assert "response.output_item.done" in kinds, kinds
        else:
            answer = own.responses.create(model=model, input=items, tools=tools)
        items += [item.to_dict() for item in answer.output]
        for item in answer.output:
            if item.type == "function_call":
                cities.append(json.loads(item.arguments)["city"])
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": FOUND})
    return check_weather(answer.output_text, cities)


def tools_response(url: str, model: str) -> str:
    return respond(url, model, is_streamed=False)


def tools_response_streamed(url: str, model: str) -> str:
    return respond(url, model, is_streamed=True)


def tools_response_goes_on(url: str, model: str) -> str:
    own: Any = client(url)
    tools = [{"type": "function", "strict": False, **FUNCTION}]
    first = own.responses.create(model=model, input=WEATHER, tools=tools)
    (call,) = (item for item in first.output if item.type == "function_call")
    said = [{"type": "function_call_output", "call_id": call.call_id, "output": FOUND}]
    second = own.responses.create(model=model, input=said, previous_response_id=first.id, tools=tools)
    assert second.output_text == ANSWER
    return check_weather(second.output_text, [json.loads(call.arguments)["city"]])


def forced_pydantic_tool(url: str, model: str) -> str:
    import openai

    class get_weather(BaseModel):
        city: str

    answer = client(url).chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": WEATHER}],
        tools=[openai.pydantic_function_tool(get_weather)],
        tool_choice="required",
    )
    found = answer.choices[0].message.tool_calls
    assert found
    return str(found[0].function.parsed_arguments)
