"""What a request tells the model's chat template beside messages and tools: whether to think, how hard, and
whatever else it looks at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from flowspec.model.chat_template import TemplateNames
from flowspec.serve.refusals import ApiError, invalid, unsupported

VARIABLES_MAX = 64
VARIABLE_BYTES_MAX = 1 << 16
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_SWITCHES = ("enable_thinking", "thinking")
"""By which templates let a model think, or not."""
_TAKEN = (
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("self", "raise_exception", "strftime_now", "additional_special_tokens"),
)
"""What is said otherwise, or is the tokenizer's own."""
_OWN = rf"^(?!({'|'.join(_TAKEN)})\Z)[^\W\d]\w*\Z"
VariableName = Annotated[str, Meta(pattern=_OWN, description="names of the template's own variables")]
Variables = Annotated[
    dict[VariableName, Any],
    Meta(max_length=VARIABLES_MAX, description=f"an object of at most {VARIABLES_MAX} variables"),
]


def variables_of(
    named: Mapping[str, Any],
    thinks: bool | None,
    effort: Effort | None,
    names: TemplateNames,
    *,
    can_think: bool,
) -> dict[str, Any]:
    """What the template that looks at these names is given: variables by their names, and two that other
    servers have, too. Raises `ApiError` for what it does not look at, since that would be ignored.
    `can_think`: the model may write thoughts."""
    for name in named:
        if name not in names.variables:
            raise _unused(f"chat_template_kwargs.{name}", named[name])
    found = dict(named)
    param = "enable_thinking"
    if effort is not None:
        if "reasoning_effort" in names.variables and (effort != "none" or "none" in names.fields):
            _put(found, "reasoning_effort", effort, "reasoning_effort")
        elif effort != "none":
            text = f"this model's chat template has no such levels; expected none or nothing, got {effort!r}"
            raise unsupported("reasoning_effort", text)
        elif can_think:
            if thinks:
                raise invalid("reasoning_effort", "no none where enable_thinking is true", "none")
            thinks, param = False, "reasoning_effort"
    if thinks is not None:
        switch = next((name for name in _SWITCHES if name in names.variables), None)
        if switch is None:
            raise _unused(param, "none" if param == "reasoning_effort" else thinks)
        _put(found, switch, thinks, param)
    return found


def forbids_thoughts(variables: Mapping[str, Any]) -> bool:
    """Whether a template that is given these is told not to let the model think."""
    return variables.get("reasoning_effort") == "none" or any(
        variables.get(name) is False for name in _SWITCHES
    )


def _put(found: dict[str, Any], name: str, value: Any, param: str) -> None:
    """Sets a variable that may have been named with another value."""
    if name in found and found[name] != value:
        raise invalid(param, f"{found[name]!r:.40}, as chat_template_kwargs.{name} beside it", value)
    found[name] = value


def _unused(param: str, got: object) -> ApiError:
    text = f"this model's chat template does not look at it; expected nothing, got {got!r:.80}"
    return unsupported(param, text)
