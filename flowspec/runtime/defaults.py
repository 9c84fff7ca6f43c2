"""How an answer is sampled and when it ends where whoever asks leaves things open: the model's own
recommendation, else the likeliest token."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TypeVar

from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.model.text import Recommended
from flowspec.runtime.session import Limits

Number = TypeVar("Number", int, float)
SEED_BITS = 31


def choose_sampling(
    model: Recommended,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
) -> Sampling:
    """What is given wins; where no temperature is given, the model's recommendation holds, else temperature
    0.

    A seed that is not given is drawn. Raises `InputError` for what cannot be done.
    """
    follows = temperature is None and model.temperature is not None
    if temperature is None and model.unsupported:
        raise InputError(
            f"the model recommends {model.unsupported[0]}, which FlowSpec does not do; give a temperature to "
            "do without"
        )
    warmth = model.temperature if follows else temperature
    drawn = seed is None and bool(warmth)
    try:
        return Sampling(
            temperature=float(warmth or 0.0),
            top_k=_first(top_k, model.top_k if follows else None, 0),
            top_p=_first(top_p, model.top_p if follows else None, 1.0),
            min_p=_first(min_p, model.min_p if follows else None, 0.0),
            seed=secrets.randbits(SEED_BITS) if drawn else seed or 0,
        )
    except (ValueError, OverflowError) as error:
        raise InputError(f"sampling: {error}") from None


def _first(given: Number | None, recommended: Number | None, default: Number) -> Number:
    if given is not None:
        return given
    return default if recommended is None else recommended


def choose_limits(
    model: Recommended,
    eos_id: int | None,
    new_tokens_max: int,
    *,
    stop_ids: Iterable[int] = (),
    ignores_own: bool = False,
) -> Limits:
    """The model's own stop tokens (none with `ignores_own`) and these."""
    own = set() if ignores_own else set(model.stop_ids) | ({eos_id} if eos_id is not None else set())
    return Limits(new_tokens_max=new_tokens_max, stop_ids=frozenset(own | set(stop_ids)))
