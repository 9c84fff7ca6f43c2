"""Bodies of requests as types: what is said of one that does not fit, and which fields ask for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec

from flowspec.core.protocol.messages import SAMPLING_FIELDS, Sampling
from flowspec.errors import InputError, meant
from flowspec.serve.documents import ApiError, of_error
from flowspec.validation import Document, Misfit, expect, shown

_NAME_CHARS_MAX = 120
HARMLESS = {
    "who asks is not told apart": "user safety_identifier",
    "nothing is kept of a request": "metadata client_metadata store",
    "all requests are served alike, first come, first served": "service_tier priority",
    "what a prompt shares with earlier ones is always taken over": "prompt_cache_key prompt_cache_retention "
    "prompt_cache_options cache_prompt n_cache_reuse id_slot",
    "the model stays loaded": "keep_alive ttl",
    "how is guessed never changes an answer": "draft_model speculative.n_max speculative.n_min "
    "speculative.p_min",
}
"""Fields that may hold anything, by why nothing is lost by not obeying them: of OpenAI's API, llama.cpp,
vLLM, Ollama and LM Studio. One that asks for another answer, for another form of it, or that others shall not
learn of it (vLLM's `cache_salt`) has no place here."""
NEUTRAL: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((True,), "skip_special_tokens spaces_between_special_tokens include_reasoning"),
    ((False,), "include_stop_str_in_output use_beam_search return_token_ids post_sampling_probs"),
    ((False,), "timings_per_token return_progress"),
    ((0,), "min_tokens dry_multiplier dynatemp_range xtc_probability mirostat n_probs t_max_predict_ms"),
    ((1,), "length_penalty repeat_penalty"),
    (([],), "logprob_token_ids bad_words documents lora"),
    (({},), "mm_processor_kwargs"),
    (("",), "grammar"),
    ((), "prompt_logprobs truncate_prompt_tokens"),
)
"""Fields of vLLM and llama.cpp, by the values that ask for nothing; any other value is refused."""
ELSEWHERE = {
    name: here
    for here, names in {
        "response_format": "format",
        "response_format of type json_schema": "json_schema",
        "response_format.json_schema.schema": "response_format.schema",
        "response_format.json_schema.strict": "response_format.strict",
        "structured_outputs.choice": "choice guided_choice",
        "structured_outputs.grammar": "lark guided_grammar structured_outputs.lark",
        "structured_outputs.json": "guided_json",
        "structured_outputs.regex": "regex guided_regex",
        "max_tokens": "n_predict max_new_tokens num_predict",
        "messages (a prompt goes to /v1/completions)": "prompt",
        "prompt (messages go to /v1/chat/completions)": "messages",
    }.items()
    for name in names.split()
}
"""What fields of other servers, of our own Python API and of the other kind of request are called here."""
_CODES = {
    **dict.fromkeys(("content.type", "output.type", "input.type"), "unsupported_content"),
    "tools.type": "unsupported_parameter",
}
"""Of values that say what a part is, by the ends of their paths without places."""


class Neutral:
    """A note on a field that FlowSpec lacks: these values, and null, ask for nothing. `here` is what it is
    called in this kind of request."""

    def __init__(self, *values: Any, here: str = "", more: str = "") -> None:
        self.values = values
        self.kind = "elsewhere" if here else "unsupported"
        self.expected = here or " or ".join([*map(json.dumps, values), "nothing"]) + more


class Asked(Document, frozen=True, kw_only=True, omit_defaults=True):
    """An object of a request, whose fields may have notes: `Neutral`, or why it is harmless."""

    def __post_init__(self) -> None:
        for field, name, note in notes(type(self)):
            found = getattr(self, field)
            if found is not None and isinstance(note, Neutral):
                same = [each for each in note.values if isinstance(found, bool) is isinstance(each, bool)]
                expect(found in same, name, found, note.expected, note.kind)

    @property
    def unheeded(self) -> dict[str, str]:
        """The harmless fields that hold something, each with why nothing is done."""
        noted = [each for each in notes(type(self)) if isinstance(each[2], str)]
        return {name: str(why) for field, name, why in noted if getattr(self, field) is not None}


@cache
def notes(kind: type[Asked]) -> tuple[tuple[str, str, str | Neutral], ...]:
    """The fields of an object that have notes, with the names that they have in JSON."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (each.name, each.encode_name, note)
        for each in msgspec.structs.fields(kind)
        for note in getattr(hints[each.name], "__metadata__", ())
        if isinstance(note, str | Neutral)
    )


if TYPE_CHECKING:
    OtherFields = Asked
else:
    _SAMPLING = get_type_hints(Sampling, include_extras=True)
    _OTHERS = [
        *((name, _SAMPLING[name] | None) for name in SAMPLING_FIELDS),
        *((name, Annotated[Any, why]) for why, names in HARMLESS.items() for name in names.split()),
        *((name, Annotated[Any, Neutral(*values)]) for values, names in NEUTRAL for name in names.split()),
    ]
    OtherFields = msgspec.defstruct(
        "OtherFields",
        [(name.replace(".", "_"), kind, msgspec.field(default=None, name=name)) for name, kind in _OTHERS],
        bases=(Asked,),
        frozen=True,
        kw_only=True,
    )


@contextmanager
def refusing() -> Iterator[None]:
    """Raises `ApiError` for a body that is no JSON, or does not fit its type."""
    try:
        yield
    except Misfit as error:
        raise of_misfit(error) from None
    except InputError as error:
        raise of_error(error) from None
    except (msgspec.DecodeError, RecursionError) as error:
        text = f"expected a JSON object as body, got something else: {error!s:.120}"
        raise ApiError(400, text, code="invalid_json") from None


def of_misfit(error: Misfit) -> ApiError:
    """What is said of a request that does not fit its type."""
    name, text = error.field[:_NAME_CHARS_MAX], error.said
    if not error.path:
        return ApiError(400, f"expected a JSON object as body, got {shown(error.value)}", code="invalid_json")
    if error.is_unknown:
        here = ELSEWHERE.get(name)
        meaning = meant(str(error.path[-1])[:_NAME_CHARS_MAX], error.known)
        text = f"unknown field {name!r:.120}" + (f"; here that is {here}" if here else meaning)
        return ApiError(400, text, name, "unknown_parameter")
    if error.kind == "elsewhere":
        code, text = "unknown_parameter", f"in this API that is {error.expected}; expected nothing"
    elif error.kind == "unsupported":
        code, text = "unsupported_parameter", f"FlowSpec does not support this; {text}"
    elif error.is_missing or (error.value is None and isinstance(error.path[-1], str)):
        code = "missing_required_parameter"
    else:
        ending = ".".join([each for each in error.path if isinstance(each, str)][-2:])
        code = _CODES.get(ending, "invalid_type" if error.kind == "type" else "invalid_value")
    param = "logit_bias" if error.path[0] == "logit_bias" else name  # token ids are no fields
    return ApiError(400, f"{name}: {text}", param, code)
