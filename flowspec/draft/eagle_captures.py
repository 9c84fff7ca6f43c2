"""Which hidden states of the target an EAGLE-3 head reads, by its config.

Here c means the input of layer c, and the number of layers the output after the final norm
(`Assign.captures`).
Publishers count in two ways, told by the field:

- inputs, as here: `eagle_aux_hidden_state_layer_ids` beside the other fields (vLLM's
  `gpu_model_runner._get_eagle3_aux_layers_from_config`, whose models take what enters a layer; speculators'
  `resolve_target_layer_ids`);
- outputs, one less: the same field within `eagle_config` (SGLang's `set_eagle3_layers_to_capture` adds 1,
  ModelOpt's `hf_eagle.py` hooks what leaves a layer, SpecForge captures through SGLang), `target_layer_ids`
  (DeepSpec's `extract_eagle3_context_feature` takes `hidden_states[id + 1]`) and
  `aux_hidden_states_layer_ids` (AngelSlim's `target_model_wrapper.py`, the same).

Where a head says nothing, all of them take 2, the middle and 3 before the end, counted as inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowspec.core.protocol import limits
from flowspec.errors import InputError

WITHIN = "eagle_config"
_INPUTS = ("eagle_aux_hidden_state_layer_ids",)
_OUTPUTS = ("target_layer_ids", "aux_hidden_states_layer_ids")
FIELDS = frozenset((*_INPUTS, *_OUTPUTS, "num_aux_hidden_states"))


def captures_of(raw: Mapping[str, Any], layer_count: int, head: str, target: str) -> tuple[int, ...]:
    """The captures of an EAGLE-3 head with this config, for a target of `layer_count` layers, in growing
    order. Raises `InputError` for layers that the target does not have or FlowSpec does not send."""
    default = (2, layer_count // 2, layer_count - 3)
    found: dict[tuple[int, ...], str] = {}
    nested = raw.get(WITHIN)
    for fields, prefix, names, step in (
        (raw, "", _INPUTS, 0),
        (raw, "", _OUTPUTS, 1),
        (nested if isinstance(nested, dict) else {}, f"{WITHIN}.", _INPUTS, 1),
    ):
        for name in names:
            if fields.get(name):
                ids = _ids(fields[name], f"{prefix}{name}", head)
                # Within `eagle_config` some count inputs after all (SGLang's `deepseek_v2.py` tells how it
                # finds out). The default, counted so, is nobody's list of outputs.
                is_input = step == 0 or ids == default or ids[-1] == layer_count
                found.setdefault(ids if is_input else tuple(each + 1 for each in ids), f"{prefix}{name}")
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise InputError(
            f"EAGLE head {head!r}: {first} means the inputs of layers {list(one)}, but {second} those of "
            f"{list(other)}; expected the same ones"
        )
    captures, name = next(iter(found.items())) if found else (default, "")
    if not found and not captures[0] < captures[1] < captures[2]:
        raise InputError(f"EAGLE-3 needs a target of 7 layers or more, but {target!r} has {layer_count}")
    if captures[-1] == layer_count:
        raise InputError(
            f"EAGLE head {head!r} reads what leaves the last layer of {target!r} before its final norm "
            f"({name}), which FlowSpec does not send; expected layers before it"
        )
    if captures[-1] > layer_count:
        raise InputError(
            f"EAGLE head {head!r} reads the inputs of layers {list(captures)} ({name}), but {target!r} has "
            f"{layer_count}; give the head that was trained for this model"
        )
    count = raw.get("num_aux_hidden_states")
    if count not in (None, len(captures)):
        raise InputError(
            f"EAGLE head {head!r}: num_aux_hidden_states: expected {len(captures)}, as many as layers are "
            f"named, got {count!r:.40}"
        )
    return captures


def _ids(value: Any, name: str, head: str) -> tuple[int, ...]:
    is_list = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    if not is_list or len(value) > limits.CAPTURES_MAX or value != sorted(set(value)):
        raise InputError(
            f"EAGLE head {head!r}: {name}: expected up to {limits.CAPTURES_MAX} numbers of layers in growing "
            f"order, got {value!r:.80}"
        )
    return tuple(value)
