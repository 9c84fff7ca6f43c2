"""What a config.json may say at all, checked before transformers acts on it: it builds what it is told to,
however large.

A config may come from a head on the network. A width of 2^31 took 16 GiB and half a minute for position
embeddings alone, a number of labels without end a list without end, and a million experts 12 GiB for the
names of their tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.model.spec import experts_of, varying_of

_MOST = {
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "shared_expert_intermediate_size": 1 << 20,
    "head_dim": 1 << 13,
    "global_head_dim": 1 << 13,
    "hidden_size_per_layer_input": 1 << 14,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "num_global_key_value_heads": 1 << 12,
    "num_kv_shared_layers": limits.LAYERS_MAX,
    "linear_num_key_heads": 1 << 12,
    "linear_num_value_heads": 1 << 12,
    "linear_key_head_dim": 1 << 10,
    "linear_value_head_dim": 1 << 10,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "n_routed_experts": 1 << 12,
    "n_shared_experts": 1 << 8,
    "num_experts_per_tok": 1 << 12,
    "top_k_experts": 1 << 12,
    "num_labels": 1 << 16,
    "num_hidden_layers": limits.LAYERS_MAX,
    "vocab_size": limits.VOCABULARY_MAX,
    "vocab_size_per_layer_input": limits.VOCABULARY_MAX,
}
"""The largest values of what is multiplied into memory, ten times and more above any model known."""
_ABOVE_ZERO = (
    *("hidden_size", "num_attention_heads", "query_pre_attn_scalar", "rms_norm_eps", "norm_eps"),
    *("logits_scaling", "rope_theta", "factor", "clip_qkv"),
)
"""What is divided by, or has its root or its logarithm taken."""
FLOAT_MAX = 1e15
"""The farthest that anything else may be from 0; products of two are far below float32's largest."""
EXPERTS_MAX = limits.TENSORS_MAX // 3
"""Of all layers together: a checkpoint has at least three tensors of each."""


def check_config(raw: dict[str, Any], path: Path) -> None:
    """Raises `InputError` naming a field, wherever it stands, that is too large or no number where one
    belongs."""
    architectures = raw.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise InputError(f"{path}: architectures: expected a list of names, got {architectures!r:.80}")
    rest: list[tuple[str, Any]] = list(raw.items())
    while rest:
        name, value = rest.pop()
        if isinstance(value, dict):
            rest += value.items()
        elif isinstance(value, list):
            rest += [(name, each) for each in value]
        elif name in _MOST and value is not None and not (type(value) is int and 0 <= value <= _MOST[name]):
            raise InputError(f"{path}: {name}: expected a number up to {_MOST[name]}, got {value!r:.80}")
        elif isinstance(value, int) and abs(value) > limits.ID_MAX:
            raise InputError(
                f"{path}: {name!r:.80}: expected a number up to {limits.ID_MAX}, got {value!r:.80}"
            )
        elif isinstance(value, float) and not abs(value) <= FLOAT_MAX:
            raise InputError(f"{path}: {name!r:.80}: expected a number up to {FLOAT_MAX:g}, got {value}")
        elif name in _ABOVE_ZERO and isinstance(value, int | float) and not value > 0:
            raise InputError(f"{path}: {name}: expected a number above 0, got {value}")


def check_built(config: Any, model: str) -> None:
    """Raises `InputError` for a transformers config that holds too large a number under whatever alias, or
    too large a product.

    `check_config` cannot know all aliases that a class has for a field; the class itself resolves them.
    """
    for name, most in _MOST.items():
        if name in varying_of(config):  # `check_config` has seen what single layers have
            continue
        value = getattr(config, name, None)
        if value is not None and not (type(value) is int and 0 <= value <= most):
            raise InputError(f"model {model!r}: {name}: expected a number up to {most}, got {value!r:.80}")
    experts = config.num_hidden_layers * experts_of(config)
    if experts > EXPERTS_MAX:
        raise InputError(
            f"model {model!r}: num_hidden_layers times num_experts: expected at most {EXPERTS_MAX}, got "
            f"{experts}"
        )
