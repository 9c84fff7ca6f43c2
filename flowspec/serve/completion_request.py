"""What a request asks for, read from its body; see docs/serving.md for what is accepted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import SAMPLING_FIELDS, Bias
from flowspec.core.protocol.types import Token
from flowspec.errors import InputError
from flowspec.model.grammar import check_grammar, schema_text
from flowspec.model.reply.bound import Wanted
from flowspec.model.text import Messages
from flowspec.runtime.sampling_params import SEEDS, SamplingParams, usable_seed
from flowspec.serve import messages as chat
from flowspec.serve.bodies import Asked, Neutral, OtherFields, refusing
from flowspec.serve.documents import ApiError, invalid
from flowspec.validation import decode_json, expect

STOPS_MAX = 4
STOP_CHARS_MAX = 256
STOP_TOKENS_MAX = 512
CHOICES_MAX = 64  # of one request, over all of its prompts
_ANY_OBJECT = '{"type":"object"}'
_SAMPLED = f" (how tokens are drawn is said by {', '.join(SAMPLING_FIELDS)})"
_SIGN = re.compile(r"[!-/:-@\[-`{-~]")
"""What may mean something in a regular expression, and stands for itself behind a backslash."""

Prompt = Messages | str | tuple[int, ...]  # a dialogue, a text, or token ids


class Bound(NamedTuple):
    """What binds an answer: by which field, at which place in it, and kind and text of a `Grammar`."""

    by: str
    place: str
    kind: str
    text: str


Body = TypeVar("Body", bound="RequestBody", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Generic[Body]):
    """What a body asks for. `bound_by` is the field that binds the answer to a format, if any does. Of a
    response, `places` names for each of the chat's messages the field that it comes from, and `items` is the
    dialogue without instructions, as a JSON list of items."""

    body: Body
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    bound_by: str = ""
    tool_use: chat.ToolUse = chat.NO_TOOLS
    effort: chat.Effort | None = None
    places: tuple[str, ...] = ()
    items: bytes = b""


# ------------------------------------------------------------------------------------------ bodies as types

TokenCount = Annotated[int, Meta(ge=1, le=(1 << 63) - 1, description="a whole number of 64 bits from 1")]
TopLogprobs = Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS_MAX)]
TokenName = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,6})\Z", description="token ids, such as 50256")]
_BIASES = f"an object of {limits.LOGIT_BIAS_MAX} token ids at most"
Biases = Annotated[dict[TokenName, Bias], Meta(max_length=limits.LOGIT_BIAS_MAX, description=_BIASES)]
_STOPS = Meta(description=f"a string, or a list of at most {STOPS_MAX}, of 1 to {STOP_CHARS_MAX} characters")
_Stop = Annotated[str, Meta(max_length=STOP_CHARS_MAX)]
_Listed = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]
Stops = Annotated[_Stop | Annotated[list[_Listed], Meta(max_length=STOPS_MAX)], _STOPS]
_STOP_TOKENS = Meta(max_length=STOP_TOKENS_MAX, description=f"a list of at most {STOP_TOKENS_MAX} token ids")
Seed = Annotated[int, Meta(ge=SEEDS[0], le=SEEDS[-1], description="a whole number of 64 bits")]
Schema = Annotated[dict[str, Any] | bool | str, Meta(description="a JSON schema, which is an object")]


class StreamOptions(Asked, frozen=True, kw_only=True):
    """`include_obfuscation` is padding against listeners, which TLS in front of this server is not given."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Annotated[Any, Neutral(False)] = None


class StructuredOutputs(Asked, frozen=True, kw_only=True):
    """Beside the API, as vLLM's clients ask."""

    json: Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    grammar: str | None = None

    @property
    def bounds(self) -> list[Bound]:
        said = (
            ("json", "json_schema", None if self.json is None else schema_text(self.json)),
            ("json_object", "json_schema", _ANY_OBJECT if self.json_object else None),
            ("regex", "regex", self.regex),
            ("choice", "regex", "|".join(_SIGN.sub(r"\\\g<0>", each) for each in self.choice or ()) or None),
            ("grammar", "lark", self.grammar),
        )
        by = "structured_outputs"
        return [Bound(by, f".{name}", kind, text) for name, kind, text in said if text is not None]


class TextFormat(Asked, frozen=True, kw_only=True, tag_field="type", tag="text"):
    json_schema: Annotated[Any, Neutral()] = None


class ObjectFormat(TextFormat, frozen=True, kw_only=True, tag="json_object"):
    pass


class Described(Asked, frozen=True, kw_only=True):
    """A schema, which is obeyed, strict or not."""

    schema: Schema
    name: Any = None
    description: Any = None
    strict: Any = None


class SchemaFormat(Asked, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    json_schema: Described


_FORMAT = Meta(description="an object of type text, json_object or json_schema")
Format = Annotated[TextFormat | ObjectFormat | SchemaFormat, _FORMAT]


def bounds_of(field: str, form: Asked | None) -> list[Bound]:
    """What a format that this field says binds the answer to."""
    if isinstance(form, ObjectFormat):
        return [Bound(field, "", "json_schema", _ANY_OBJECT)]
    place, form = ("json_schema.", form.json_schema) if isinstance(form, SchemaFormat) else ("", form)
    if isinstance(form, Described):
        return [Bound(field, f".{place}schema", "json_schema", schema_text(form.schema))]
    return []


class RequestBody(OtherFields, frozen=True, kw_only=True):
    """What all kinds of requests may say, beside the fields of `Sampling`, of which three are wider here."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    logit_bias: Biases | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[Token], _STOP_TOKENS] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    typical_p: Annotated[Any, Neutral(1, more=_SAMPLED)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for token in self.logit_bias or ():
            expect(int(token) <= limits.VOCABULARY_MAX, "logit_bias", token, "token ids, such as 50256")
        is_told = bool(self.stream) or not isinstance(self.stream_options, StreamOptions)
        expect(is_told, "stream_options", bool(self.stream), "stream to be true beside it")

    @property
    def count(self) -> int:
        """Choices of each prompt; choice i is drawn with the seed + i."""
        return int(self.n or 1)

    def build_request(
        self: Body,
        prompts: tuple[Prompt, ...],
        tokens_max: int | None,
        logprobs: int | None,
        bounds: Sequence[Bound] = (),
        tool_use: chat.ToolUse = chat.NO_TOOLS,
        effort: chat.Effort | None = None,
    ) -> CompletionRequest[Body]:
        """What is wanted of these prompts; `bounds` is what the form of request says of a format."""
        if self.structured_outputs is not None:
            bounds = [*bounds, *self.structured_outputs.bounds]
        if len(bounds) > 1:
            named = [f"{each.by}{each.place}" for each in bounds]
            raise invalid("structured_outputs", "one field that says what the answer is", named)
        bound = next(iter(bounds), None)
        if bound:
            try:  # takes a second at most
                check_grammar(bound.kind, bound.text)
            except InputError as error:  # which begins with the kind, and the place in it
                name = f"{bound.by}{bound.place}"
                raise ApiError(400, f"{name}{str(error).removeprefix(bound.kind)}", name) from None
        if bound and self.ignore_eos:
            raise invalid("ignore_eos", "false where the format of the answer says where it ends", True)
        if (count := self.count * len(prompts)) > CHOICES_MAX:
            raise invalid("n", f"at most {CHOICES_MAX} choices over all prompts", count)
        by = bound.by if bound else ""
        if bound and tool_use.tools:  # a text of this format, or calls
            calls = tool_use.bound or Wanted(tools=tool_use.tools, is_single=tool_use.is_single)
            tool_use = replace(tool_use, bound=replace(calls, answer=(bound.kind, bound.text)))
            bound = None
        if tool_use.bound and self.ignore_eos:
            raise invalid("ignore_eos", "false where the format of calls says where the answer ends", True)
        sampled: dict[str, Any] = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        sampled["seed"] = None if self.seed is None else usable_seed(self.seed)
        if self.top_p == 0:  # nothing but the likeliest token is left
            sampled |= {"temperature": 0.0, "top_p": None}
        elif self.temperature is not None and self.temperature < limits.TEMPERATURE_MIN:
            sampled["temperature"] = 0.0
        if bound:
            sampled["grammar" if bound.kind == "lark" else bound.kind] = bound.text
        params = SamplingParams(
            **sampled,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            max_new_tokens=tokens_max,
            stop=self.stop or (),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
        )
        return CompletionRequest(
            body=self, prompts=prompts, params=params, bound_by=by, tool_use=tool_use, effort=effort
        )


class DialogueBody(RequestBody, frozen=True, kw_only=True):
    """What chats and responses may say beside that."""

    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: chat.Variables | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    modalities: Annotated[Any, Neutral(["text"])] = None
    audio: Annotated[Any, Neutral()] = None
    prediction: Annotated[Any, Neutral()] = None
    web_search_options: Annotated[Any, Neutral()] = None
    moderation: Annotated[Any, Neutral()] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        size, most = len(msgspec.json.encode(self.chat_template_kwargs)), chat.VARIABLE_BYTES_MAX
        expect(size <= most, "chat_template_kwargs", size, f"at most {most} bytes")
        continues, begins = bool(self.continue_final_message), self.add_generation_prompt
        expected = f"{'false' if continues else 'true'} or nothing beside continue_final_message"
        expect(begins is not continues, "add_generation_prompt", begins, expected)


class ChatBody(DialogueBody, frozen=True, kw_only=True):
    messages: chat.Dialogue
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: Format | None = None
    reasoning_effort: chat.Effort | None = None
    tools: Annotated[list[chat.ChatTool], chat.TOOLS] | None = None
    tool_choice: chat.ToolChoice | None = None

    functions: Annotated[Any, Neutral([])] = None
    function_call: Annotated[Any, Neutral("none", "auto")] = None
    verbosity: Annotated[Any, Neutral("medium")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_told = self.logprobs or self.top_logprobs is None
        expect(is_told, "top_logprobs", self.top_logprobs, "logprobs to be true beside it")
        longest, older = self.max_completion_tokens, self.max_tokens
        is_same = longest is None or older in (None, longest)
        expect(is_same, "max_tokens", older, f"{longest}, as max_completion_tokens beside it")


_Tokens = Annotated[list[Token], Meta(min_length=1)]
_PROMPT = Meta(description="a string, token ids, or a list of either, none empty")


class CompletionBody(RequestBody, frozen=True, kw_only=True):
    prompt: Annotated[str | Annotated[list[str | Token | _Tokens], Meta(min_length=1)], _PROMPT]
    max_tokens: TokenCount | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None

    suffix: Annotated[Any, Neutral("")] = None
    best_of: Annotated[int | float, Meta(description="what n is")] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = {type(each) for each in self.prompt}
        expect(len(kinds) == 1 or self.prompt == "", "prompt", self.prompt, "entries of one kind", "type")
        is_right = kinds == {int} or isinstance(self.prompt, str) or len(self.prompt) <= CHOICES_MAX
        expect(is_right, "prompt", len(self.prompt), f"at most {CHOICES_MAX} prompts")
        alone = f"{self.n or 1} or nothing"  # as many as are returned: none is left out
        expect(self.best_of in (None, self.n or 1), "best_of", self.best_of, alone, "unsupported")
        is_told = not self.echo or self.logprobs is None
        expect(is_told, "echo", True, "no logprobs beside it, since prompts get none", "unsupported")


@refusing()
def chat_wanted(body: bytes) -> CompletionRequest[ChatBody]:
    """A request to `/v1/chat/completions`; raises `ApiError`."""
    said = decode_json(body, ChatBody)
    functions = [each.function for each in said.tools or ()]
    return said.build_request(
        (chat.dialogue_of(said.messages, continues=bool(said.continue_final_message)),),
        said.max_tokens if said.max_completion_tokens is None else said.max_completion_tokens,
        said.top_logprobs or 0 if said.logprobs else None,
        bounds_of("response_format", said.response_format),
        chat.tool_use_of(functions, said.tool_choice, said.parallel_tool_calls),
        said.reasoning_effort,
    )


@refusing()
def completion_wanted(body: bytes) -> CompletionRequest[CompletionBody]:
    """A request to `/v1/completions`; raises `ApiError`."""
    said = decode_json(body, CompletionBody)
    longest = 16 if said.max_tokens is None else said.max_tokens  # the API's own default
    is_one = isinstance(said.prompt, str) or isinstance(said.prompt[0], int)
    given: Any = [said.prompt] if is_one else said.prompt
    prompts = tuple(each if isinstance(each, str) else tuple(each) for each in given)
    return said.build_request(prompts, longest, said.logprobs)
