"""What a request asks for, read from its JSON object; see docs/serving.md for what is accepted.

The two forms, chat and completions, differ in the prompt and in how log-probabilities are asked for; the rest
is the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import SAMPLING_FIELDS, Sampling
from flowspec.errors import InputError
from flowspec.model.grammar import check_grammar, schema_text
from flowspec.model.reply.bound import Wanted
from flowspec.model.text import Messages
from flowspec.runtime.sampling_params import SEEDS, SamplingParams, usable_seed
from flowspec.serve.fields import Fields
from flowspec.serve.messages import messages_wanted
from flowspec.serve.other_fields import ELSEWHERE, HARMLESS, NEUTRAL
from flowspec.serve.refusals import ApiError, invalid
from flowspec.serve.template_variables import NO_VARIABLES, TemplateVariables, variables_wanted
from flowspec.serve.tools import NO_TOOLS, ToolUse, tools_wanted
from flowspec.validation import checked

STOPS_MAX = 4
STOP_CHARS_MAX = 256
STOP_TOKENS_MAX = 512
TOKENS_MAX = (1 << 63) - 1
"""What clients may ask for who want no limit; the context has less room."""
CHOICES_MAX = 64
"""Of one request, over all of its prompts."""
TEMPERATURE_MAX = 2.0
COMPLETION_TOKENS_DEFAULT = 16
"""The API's own default for completions."""
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,6}")
_ANY_OBJECT = '{"type":"object"}'
_SIGN = re.compile(r"[!-/:-@\[-`{-~]")
"""What may mean something in a regular expression, and stands for itself behind a backslash."""

Prompt = Messages | str | tuple[int, ...]
"""A dialogue, a text, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A request. `model` None: the one that is served; `tokens_max` None: as many as the server gives by
    itself; `params` holds all but this. The answer `continues` the last message of the dialogue, or begins
    with the prompt's text (`echoes`).

    `count` choices are wanted of each prompt; choice i is drawn with `seed` + i. `unheeded` are the fields of
    `HARMLESS` that it has, and `bound_by` the one that binds the answer to a format, if any does. Of a chat,
    the tools of its `tool_use` may or have to be called; its template is told the `variables`.
    """

    model: str | None
    prompts: tuple[Prompt, ...]
    tokens_max: int | None
    params: SamplingParams
    count: int
    is_streamed: bool
    includes_usage: bool
    unheeded: tuple[str, ...] = ()
    tool_use: ToolUse = NO_TOOLS
    variables: TemplateVariables = NO_VARIABLES
    continues: bool = False
    echoes: bool = False
    bound_by: str = ""

    def named(self, error: ApiError) -> ApiError:
        """What is said of a field by the name that it has in the request."""
        return error


def chat_wanted(body: dict[str, Any]) -> CompletionRequest:
    """A request to `/v1/chat/completions`; raises `ApiError`."""
    fields = Fields(body)
    messages = messages_wanted(fields)
    logprobs, alternatives = fields.flag("logprobs"), fields.whole("top_logprobs", 0, limits.TOP_LOGPROBS_MAX)
    if alternatives is not None and not logprobs:
        raise ApiError(
            400, "top_logprobs: expected logprobs to be true beside it", "top_logprobs", "invalid_value"
        )
    longest = fields.whole("max_completion_tokens", 1, TOKENS_MAX)
    older = fields.whole("max_tokens", 1, TOKENS_MAX)
    if longest is not None and older not in (None, longest):
        raise invalid("max_tokens", f"{longest}, as max_completion_tokens beside it", older)
    tool_use = tools_wanted(fields)
    variables = variables_wanted(fields)
    fields.neutral("functions", [])
    fields.neutral("function_call", "none", "auto")
    fields.neutral("modalities", ["text"])
    for field in ("audio", "prediction", "web_search_options", "moderation"):
        fields.neutral(field)
    fields.neutral("verbosity", "medium")
    bound = _response_format(fields)
    continues = _continues(fields, messages)
    top = None if not logprobs else alternatives or 0
    found = _wanted(fields, (messages,), longest if longest is not None else older, top, bound)
    if tool_use.tools and found.params.bound is not None:
        # a text of this format, or calls
        calls = tool_use.bound or Wanted(tools=tool_use.tools, is_single=tool_use.is_single)
        tool_use = replace(tool_use, bound=replace(calls, answer=found.params.bound))
        found = replace(found, params=replace(found.params, json_schema=None, regex=None, grammar=None))
    if tool_use.bound is not None and found.params.ignore_eos:
        text = "ignore_eos: expected false where the format of calls says where the answer ends"
        raise ApiError(400, text, "ignore_eos", "invalid_value")
    return replace(found, tool_use=tool_use, variables=variables, continues=continues)


def completion_wanted(body: dict[str, Any]) -> CompletionRequest:
    """A request to `/v1/completions`; raises `ApiError`."""
    fields = Fields(body)
    prompts = _prompts(fields.needed("prompt", {"messages": "prompt (messages go to /v1/chat/completions)"}))
    alternatives = fields.whole("logprobs", 0, limits.TOP_LOGPROBS_MAX)
    longest = fields.whole("max_tokens", 1, TOKENS_MAX)
    echoes = fields.flag("echo")
    if echoes and alternatives is not None:
        raise ApiError(
            400,
            "echo: expected no logprobs beside it: FlowSpec computes none of the prompt's tokens",
            "echo",
            "unsupported_parameter",
        )
    fields.neutral("suffix", "")
    count = body.get("n")
    fields.neutral("best_of", 1 if count is None else count)  # as many as are returned: none is left out
    found = _wanted(
        fields,
        prompts,
        COMPLETION_TOKENS_DEFAULT if longest is None else longest,
        alternatives,
    )
    return replace(found, echoes=echoes)


def _wanted(
    fields: Fields,
    prompts: tuple[Prompt, ...],
    longest: int | None,
    logprobs: int | None,
    bound: dict[str, Any] | None = None,
) -> CompletionRequest:
    """The fields that both forms have, and no others; `bound` is what was said already of a grammar."""
    bound_by = "response_format" if bound else "structured_outputs"
    bound = _one_bound(bound, _structured_outputs(fields))
    ignores_eos = fields.flag("ignore_eos")
    if bound and ignores_eos:
        text = "ignore_eos: expected false where the format of the answer says where it ends"
        raise ApiError(400, text, "ignore_eos", "invalid_value")
    model = fields.text("model") or None  # some clients send an empty one
    count = fields.whole("n", 1, CHOICES_MAX) or 1
    if count * len(prompts) > CHOICES_MAX:
        raise ApiError(
            400,
            f"n: expected at most {CHOICES_MAX} choices over all prompts, got {count * len(prompts)}",
            "n",
            "invalid_value",
        )
    is_streamed = fields.flag("stream")
    if not is_streamed and fields.take("stream_options") is not None:
        raise ApiError(
            400, "stream_options: expected stream to be true beside it", "stream_options", "invalid_value"
        )
    options = fields.inner("stream_options")
    includes_usage = options.flag("include_usage")
    options.flag(
        "include_obfuscation"
    )  # padding against listeners, which TLS in front of this server is not given
    options.neutral("continuous_usage_stats", False)
    options.finish()
    found = CompletionRequest(
        model=model,
        prompts=prompts,
        tokens_max=longest,
        params=SamplingParams(
            **_sampling(fields),
            logit_bias=_logit_bias(fields),
            stop=_stops(fields),
            stop_token_ids=_stop_token_ids(fields),
            ignore_eos=ignores_eos,
            logprobs=logprobs,
            **(bound or {}),
        ),
        count=count,
        is_streamed=is_streamed,
        includes_usage=includes_usage,
        bound_by=bound_by if bound else "",
    )
    sampled = f"; how tokens are drawn is said by {', '.join(SAMPLING_FIELDS)}"
    fields.neutral("typical_p", 1, instead=sampled)  # of other servers
    fields.neutral_rest(NEUTRAL)
    unheeded = fields.harmless(HARMLESS)
    fields.finish(ELSEWHERE)
    return replace(found, unheeded=unheeded)


def _sampling(fields: Fields) -> dict[str, Any]:
    """The fields of `Sampling`, under their names and within their bounds; three are another way in the
    API."""
    temperature = fields.number("temperature", 0, TEMPERATURE_MAX)
    top_p = fields.number("top_p", 0, 1)
    seed = fields.whole("seed", SEEDS[0], SEEDS[-1])
    if top_p == 0:  # nothing but the likeliest token is left
        temperature, top_p = 0.0, None
    elif temperature is not None and temperature < limits.TEMPERATURE_MIN:
        temperature = 0.0
    found: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "seed": None if seed is None else usable_seed(seed),
    }
    for name, kind in SAMPLING_FIELDS.items():
        if name not in found:
            found[name] = fields.of_type(name, kind)
    for name, value in found.items():
        try:
            checked(Sampling(**({} if value is None else {name: value})))
        except ValueError as error:
            raise ApiError(400, str(error), name, "invalid_value") from None
    return found


def _logit_bias(fields: Fields) -> dict[int, float]:
    """By token id, which JSON has as a string."""
    found = fields.take("logit_bias")
    if found is None:
        return {}
    most = limits.BIAS_MAX
    if type(found) is not dict:
        raise invalid("logit_bias", "an object of token ids and numbers", found, "invalid_type")
    if len(found) > limits.LOGIT_BIAS_MAX:
        raise invalid("logit_bias", f"at most {limits.LOGIT_BIAS_MAX} token ids", len(found))
    for token, bias in found.items():
        if not _TOKEN_ID.fullmatch(token) or int(token) > limits.VOCABULARY_MAX:
            raise invalid("logit_bias", "token ids as names, such as 50256", token)
        if type(bias) not in (int, float) or not -most <= bias <= most:
            raise invalid("logit_bias", f"numbers from {-most:g} to {most:g}", {token: bias})
    return {int(token): float(bias) for token, bias in found.items()}


def _stops(fields: Fields) -> tuple[str, ...]:
    found = fields.take("stop")
    stops = [] if found in (None, "") else [found] if isinstance(found, str) else found
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop", "a string or a list of them", found, "invalid_type")
    if len(stops) > STOPS_MAX or not all(0 < len(stop) <= STOP_CHARS_MAX for stop in stops):
        raise invalid("stop", f"at most {STOPS_MAX} strings of 1 to {STOP_CHARS_MAX} characters", found)
    return tuple(stops)


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    found = fields.take("stop_token_ids")
    if found is None:
        return ()
    if type(found) is not list or not _is_ids(found):
        raise invalid("stop_token_ids", "a list of token ids", found, "invalid_type")
    if len(found) > STOP_TOKENS_MAX:
        raise invalid("stop_token_ids", f"at most {STOP_TOKENS_MAX} token ids", len(found))
    return tuple(found)


def _continues(fields: Fields, messages: Messages) -> bool:
    """Whether the answer goes on in the last message. That, or a turn of its own, is what there is: nobody
    else's turn is gone on with."""
    continues, begins = fields.flag("continue_final_message"), fields.take("add_generation_prompt")
    if begins is not None and type(begins) is not bool:
        raise invalid("add_generation_prompt", "true or false", begins, "invalid_type")
    if begins is not None and begins is continues:
        expected = "false or nothing" if continues else "true or nothing"
        raise invalid(
            "add_generation_prompt",
            f"{expected}, where continue_final_message is {'true' if continues else 'not'}",
            begins,
        )
    if continues and messages[-1]["role"] != "assistant":
        raise invalid(
            "continue_final_message", "the last message to be the assistant's", messages[-1]["role"]
        )
    if continues and "tool_calls" in messages[-1]:
        raise invalid("continue_final_message", "a last message without calls of tools", True)
    return continues


# ------------------------------------------------------------------------------------------ what binds it


def _response_format(fields: Fields) -> dict[str, Any] | None:
    """As in the API: a text, a JSON object, or what a schema allows; of a chat alone."""
    if fields.take("response_format") is None:
        return None
    form = fields.inner("response_format")
    kind = form.needed("type")
    described = form.inner("json_schema")
    if kind != "json_schema":
        form.neutral("json_schema")
    form.finish({"schema": "response_format.json_schema.schema", "strict": "json_schema.strict"})
    if kind == "text":
        return None
    if kind == "json_object":
        return _checked("response_format", json_schema=_ANY_OBJECT)
    if kind != "json_schema":
        raise invalid("response_format.type", "text, json_object or json_schema", kind)
    schema = described.needed("schema")
    described.ignored("name", "description", "strict")  # what a schema says is obeyed, strict or not
    described.finish()
    where = "response_format.json_schema.schema"
    return _checked(where, json_schema=_a_schema(where, schema))


def _structured_outputs(fields: Fields) -> dict[str, Any] | None:
    """Beside the API, as vLLM's clients ask: a schema, a regular expression, one of some texts, or a grammar
    in llguidance's form of Lark."""
    name = "structured_outputs"
    form = fields.inner(name)
    said: dict[str, Any] = {
        "json": form.take("json"),
        "json_object": form.flag("json_object") or None,
        "regex": form.text("regex"),
        "choice": form.take("choice"),
        "grammar": form.text("grammar"),
    }
    form.finish({"lark": f"{name}.grammar"})
    given = {field: value for field, value in said.items() if value is not None}
    if len(given) > 1:
        raise invalid(name, f"one of {', '.join(said)}", list(given))
    for field, value in given.items():
        where = f"{name}.{field}"
        if field == "json":
            return _checked(where, json_schema=_a_schema(where, value))
        if field == "json_object":
            return _checked(where, json_schema=_ANY_OBJECT)
        if field == "choice":
            return _checked(where, regex=_one_of(where, value))
        return _checked(where, **{field: value})
    return None


def _one_bound(first: dict[str, Any] | None, other: dict[str, Any] | None) -> dict[str, Any] | None:
    if first and other:
        text = "structured_outputs: expected nothing beside response_format, which says what the answer is"
        raise ApiError(400, text, "structured_outputs", "invalid_value")
    return first or other


def _a_schema(name: str, found: Any) -> str:
    """The text of a schema, which may be one, or the document."""
    if not isinstance(found, dict | bool | str):
        raise invalid(name, "a JSON schema, which is an object", found, "invalid_type")
    return schema_text(found)


def _one_of(name: str, found: Any) -> str:
    """A regular expression for one of some texts."""
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise invalid(name, "a list of texts", found, "invalid_type")
    if not found or not all(found):
        raise invalid(name, "at least one text, none of them empty", found)
    return "|".join(_SIGN.sub(r"\\\g<0>", each) for each in found)


def _checked(name: str, **bound: str) -> dict[str, Any]:
    """What binds the answer, if it can; takes a second at most, in a thread that reads requests."""
    ((kind, text),) = bound.items()
    kind = "lark" if kind == "grammar" else kind
    try:
        check_grammar(kind, text)
    except InputError as error:  # which begins with the kind, and the place in it
        raise ApiError(400, f"{name}{str(error).removeprefix(kind)}", name, "invalid_value") from None
    return bound


# ------------------------------------------------------------------------------------------------ prompts


def _prompts(found: Any) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of either."""
    if isinstance(found, str):
        return (found,)
    if isinstance(found, list) and found:
        if len(found) > CHOICES_MAX and not _is_ids(found):
            raise invalid("prompt", f"at most {CHOICES_MAX} prompts", len(found))
        if _is_ids(found):
            return (tuple(found),)
        if all(isinstance(each, str) for each in found):
            return tuple(found)
        if all(isinstance(each, list) and each and _is_ids(each) for each in found):
            return tuple(tuple(each) for each in found)
    if found == [] or (isinstance(found, list) and [] in found):
        raise invalid("prompt", "at least one text or token id", found)
    raise invalid("prompt", "a string, token ids, or a list of either", found, "invalid_type")


def _is_ids(found: Sequence[Any]) -> bool:
    return all(type(each) is int and 0 <= each <= limits.VOCABULARY_MAX for each in found)
