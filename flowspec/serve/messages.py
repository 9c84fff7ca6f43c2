"""A dialogue of a request, as chat templates take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowspec.model.text import Messages
from flowspec.plain_json import Reals, read_json
from flowspec.serve.fields import Fields
from flowspec.serve.other_fields import ELSEWHERE
from flowspec.serve.refusals import ApiError, invalid

MESSAGES_MAX = 4096
CALLS_MAX = 128
"""In one message."""
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def messages_wanted(fields: Fields) -> Messages:
    """The dialogue; raises `ApiError`."""
    found = fields.needed("messages", {"prompt": ELSEWHERE["prompt"]})
    if not isinstance(found, list):
        raise invalid("messages", "a list of messages", found, "invalid_type")
    if not found:
        raise invalid("messages", "at least one message", found)
    if len(found) > MESSAGES_MAX:
        raise invalid("messages", f"at most {MESSAGES_MAX} messages", len(found))
    called: dict[str, str] = {}
    reals = Reals()
    return [_message(message, f"messages[{place}]", called, reals) for place, message in enumerate(found)]


def _message(message: Any, where: str, called: dict[str, str], reals: Reals) -> dict[str, Any]:
    """A message, also one that a client gives back as it got it. `called` are the names of tools that were
    called before, by the calls' ids; `reals` reads the numbers of all arguments."""
    if not isinstance(message, dict):
        raise invalid(where, "an object", message, "invalid_type")
    fields = Fields(message, f"{where}.")
    role = fields.needed("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    said = fields.take("content") if role == "assistant" else fields.needed("content")
    found: dict[str, Any] = {
        "role": _ROLES[role],
        "content": "" if said is None else text_of(said, f"{where}.content"),
    }
    fields.text("name")
    if role == "assistant":
        thoughts = [fields.text(name) for name in ("reasoning_content", "reasoning")]
        if thought := next((each for each in thoughts if each), None):
            found["reasoning_content"] = thought
        if calls := _calls(fields.take("tool_calls"), f"{where}.tool_calls", reals):
            found["tool_calls"] = calls
            called |= {call["id"]: call["function"]["name"] for call in calls}
        fields.ignored(
            "parsed", "provider_specific_fields"
        )  # what clients made of the content and of its form
        fields.neutral("refusal", "")
    else:
        fields.neutral("reasoning_content", "")
        fields.neutral("tool_calls", [])
    if role == "tool":
        key = fields.needed("tool_call_id")
        if not isinstance(key, str) or key not in called:
            raise invalid(f"{where}.tool_call_id", "the id of a call in a message before it", key)
        found |= {"tool_call_id": key, "name": called[key]}
    fields.neutral("annotations", [])
    for field in ("audio", "function_call"):
        fields.neutral(field)
    fields.finish()
    return found


def _calls(found: Any, where: str, reals: Reals) -> list[dict[str, Any]]:
    if found is None:
        return []
    if not isinstance(found, list):
        raise invalid(where, "a list of calls", found, "invalid_type")
    if len(found) > CALLS_MAX:
        raise invalid(where, f"at most {CALLS_MAX} calls", len(found))
    return [_call(call, f"{where}[{place}]", reals) for place, call in enumerate(found)]


def _call(found: Any, where: str, reals: Reals) -> dict[str, Any]:
    """A call with its arguments as an object, which templates want; as the text that they are, where they are
    none that could be written again (NaN): the model wrote it, and reads it again."""
    if not isinstance(found, dict):
        raise invalid(where, "an object", found, "invalid_type")
    call = Fields(found, f"{where}.")
    key = call.needed("id")
    if not isinstance(key, str):
        raise invalid(f"{where}.id", "a string", key, "invalid_type")
    kind = call.take("type")
    if kind not in (None, "function"):
        raise invalid(f"{where}.type", "function", kind)
    call.needed("function")
    call.ignored("index")
    function = call.inner("function")
    name, arguments = function.needed("name"), function.text("arguments") or "{}"
    function.ignored("parsed_arguments")  # what clients made of them
    if not isinstance(name, str):
        raise invalid(f"{where}.function.name", "a string", name, "invalid_type")
    function.finish()
    call.finish()
    try:
        parsed = read_json(arguments, reals=reals)
    except (ValueError, RecursionError):
        parsed = None
    usable = parsed if isinstance(parsed, dict) else arguments
    return {"id": key, "type": "function", "function": {"name": name, "arguments": usable}}


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """A text, whole or in parts of these kinds."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "a string or a list of parts", content, "invalid_type")
    texts = []
    for place, part in enumerate(content):
        at = f"{where}[{place}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(at, "an object with a type", part, "invalid_type")
        if part["type"] not in kinds:
            raise ApiError(
                400,
                f"{at}: this model takes text, expected a part of type {' or '.join(kinds)}, got "
                f"{part['type']!r:.40}",
                at,
                "unsupported_content",
            )
        fields = Fields(part, f"{at}.")
        fields.ignored("type", "annotations", "logprobs", "cache_control", "prompt_cache_breakpoint")
        fields.ignored("parsed")  # what clients made of the text
        text = fields.needed("text")
        if not isinstance(text, str):
            raise invalid(f"{at}.text", "a string", text, "invalid_type")
        fields.finish()
        texts.append(text)
    return "".join(texts)
