"""instructor: forms by a schema, and by a tool that has to be called."""

from __future__ import annotations

from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field
from tasks import KEY, SUM, check_form


class Form(BaseModel):
    model_config = ConfigDict(
        extra="forbid"
    )  # else the toy writes properties of its own, which the schema allows
    first: int = Field(ge=0, le=999)
    result: int = Field(ge=0, le=999)


def ask(url: str, model: str, mode: instructor.Mode) -> str:
    own = instructor.from_openai(OpenAI(base_url=url, api_key=KEY, max_retries=0), mode=mode)
    messages: Any = [{"role": "user", "content": SUM}]
    found = own.chat.completions.create(model=model, messages=messages, response_model=Form, max_retries=0)
    return check_form(found.model_dump())


def text_json_schema(url: str, model: str) -> str:
    return ask(url, model, instructor.Mode.JSON_SCHEMA)


def forced_tools(url: str, model: str) -> str:
    return ask(url, model, instructor.Mode.TOOLS)
