"""How an answer is sampled and when it ends, as whoever asks puts it. What is left open is the model's own
recommendation, else the likeliest token."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from flowspec.core.protocol.limits import CONTEXT_MAX, ID_MAX, TOP_LOGPROBS_MAX
from flowspec.core.protocol.messages import SAMPLING_FIELDS, Sampling
from flowspec.errors import InputError
from flowspec.model.grammar import schema_text
from flowspec.model.text import Recommended
from flowspec.runtime.session import Limits
from flowspec.validation import Misfit, checked

SEED_BITS = 31
"""Of one that is drawn."""
SEEDS = range(-(1 << 63), 1 << 63)
"""That may be given, by whichever way one asks."""
USABLE_SEEDS = ID_MAX - 63
"""So many, from 0 on, are seeds as they are: a request of 64 choices takes those that follow, too."""
_KINDS_TOLD = {"json_schema": "a schema", "regex": "a regular expression", "grammar": "a grammar"}
_NOTHING = Recommended(stop_ids=frozenset())


def _sampled(metavar: str, help_text: str) -> Any:
    """A field of `Sampling`, which may be left open; its flag has these words."""
    return field(default=None, metadata={"metavar": metavar, "help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How an answer is sampled, when it ends, and what is told of its tokens.

    `temperature`: 0 takes the likeliest token, else .001 to 100. None: what the model recommends, with its
    filters where these are None, too; without a recommendation 0.
    `top_k`: keep so many of the likeliest tokens (0: all). `top_p`: keep the likeliest up to this probability
    mass (above 0, 1: all). `min_p`: keep those at least so likely beside the likeliest (0: all, below 1).
    `presence_penalty`: taken off the logit of a token that the answer has already, `frequency_penalty`: taken
    off for each time (both -2 to 2, 0: nothing). `repetition_penalty`: the logit of a token that prompt or
    answer have already is divided by it if above 0, else multiplied (.01 to 100, 1: neither).
    `seed`: the same seed gives the same answer, any whole number of 64 bits; those below 0 stand for large
    ones, always the same. None: drawn, and told in `Answer.seed`.
    `logit_bias`: what is added to the logits of some tokens before anything else, by token id: -100 to 100,
    for 512 tokens at most. Tokens that the model's files name as `suppress_tokens` are never drawn.
    `max_new_tokens`: the longest answer in tokens, from 1 on; the context may end it before. None: until the
    model ends it, or the context is full.
    `stop`: a text, or several, before which the answer ends. `stop_token_ids`: tokens at which it ends, too.
    `ignore_eos`: do not end at the model's own stop tokens.
    `logprobs`: tell the log-probability of each token, and of so many of the likeliest in its place (0 to
    20); None: of none.
    `json_schema`: the answer is a JSON document that this schema allows (an object, or its text). `regex`: it
    is what this regular expression matches, as a whole. `grammar`: it is derived by this grammar, in
    llguidance's form of Lark. One of them at most; docs/serving.md tells more.

    Raises `InputError` for values that cannot be.

    >>> SamplingParams(temperature=0.7, seed=1, stop="END").stop
    ('END',)
    """

    temperature: float | None = _sampled("T", "0 takes the likeliest token")
    top_k: int | None = _sampled("K", "keep the K likeliest tokens (0: all)")
    top_p: float | None = _sampled("P", "keep the likeliest tokens up to this probability mass (1: all)")
    min_p: float | None = _sampled("P", "keep tokens at least this likely beside the likeliest (0: all)")
    presence_penalty: float | None = _sampled("X", "take X off the logits of tokens that the answer has (0)")
    frequency_penalty: float | None = _sampled("X", "take X off them for each time that it has them (0)")
    repetition_penalty: float | None = _sampled(
        "X", "divide the logits of tokens that prompt or answer have by X, multiply those below 0 (1)"
    )
    seed: int | None = _sampled("N", "same seed, same answer")
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    max_new_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    json_schema: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise InputError(f"stop: expected texts, none of them empty, got {self.stop!r:.80}")
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        for name, value, least, most in (
            ("max_new_tokens", 1 if self.max_new_tokens is None else self.max_new_tokens, 1, None),
            ("logprobs", 0 if self.logprobs is None else self.logprobs, 0, TOP_LOGPROBS_MAX),
        ):
            if type(value) is not int or value < least or (most is not None and value > most):
                expected = f"{least} to {most}" if most is not None else f"a whole number from {least}"
                raise InputError(f"{name}: expected {expected}, got {value!r:.80}")
        wrong = [token for token in self.stop_token_ids if not _is_a(token, Integral) or token < 0]
        if wrong:
            raise InputError(f"stop_token_ids: expected token ids from 0, got {wrong[0]!r:.80}")
        for name, told in _KINDS_TOLD.items():
            bound, kinds = getattr(self, name), (Mapping, bool, str) if name == "json_schema" else (str,)
            if bound is not None and not isinstance(bound, kinds):
                raise InputError(f"{name}: expected {told}, got {bound!r:.80}")
        given = [name for name in _KINDS_TOLD if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"{given[1]}: expected nothing beside {given[0]}, which says what the answer is")
        if given and self.ignore_eos:
            raise InputError(
                f"ignore_eos: expected false beside {given[0]}, which says where the answer ends"
            )
        self.sampling(_NOTHING)

    @property
    def bound(self) -> tuple[str, str] | None:
        """Kind and text of the grammar that binds the answer, as `Grammar` has them."""
        if self.json_schema is not None:
            schema = self.json_schema
            return "json_schema", schema_text(dict(schema) if isinstance(schema, Mapping) else schema)
        if self.regex is not None:
            return "regex", self.regex
        return None if self.grammar is None else ("lark", self.grammar)

    @property
    def top_logprobs(self) -> int:
        """As the core takes it: -1 where no log-probabilities are wanted."""
        return -1 if self.logprobs is None else self.logprobs

    def sampling(self, model: Recommended) -> Sampling:
        """What is given wins; where no temperature is given, the model's recommendation holds, else
        temperature 0. A seed that is not given is drawn. Raises `InputError` for what cannot be done.
        """
        if self.temperature is None and model.unsupported:
            raise InputError(
                f"the model recommends {model.unsupported[0]}, which FlowSpec does not do; give a "
                "temperature to do without"
            )
        asked: dict[str, Any] = dict(model.sampling) if self.temperature is None else {}
        asked |= {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if asked.get("temperature"):
            asked.setdefault("seed", secrets.randbits(SEED_BITS))
        try:
            if "seed" in asked:
                asked["seed"] = usable_seed(_number("seed", asked["seed"]))
            found = Sampling(
                **{name: _number(name, value) for name, value in asked.items()},
                suppress_tokens=model.suppress_tokens,
                logit_bias=_pairs(self.logit_bias),
            )
            return checked(found)
        except Misfit as error:
            raise InputError(f"sampling: {error.path[0]}: {error.said}") from None
        except (ValueError, OverflowError) as error:
            raise InputError(f"sampling: {error}") from None

    def limits(self, model: Recommended, eos_id: int | None) -> Limits:
        """The model's own stop tokens (none with `ignore_eos`) and those given."""
        own = set() if self.ignore_eos else set(model.stop_ids) | ({eos_id} if eos_id is not None else set())
        most = CONTEXT_MAX if self.max_new_tokens is None else self.max_new_tokens
        return Limits(new_tokens_max=most, stop_ids=frozenset(own | set(self.stop_token_ids)))


def usable_seed(seed: int) -> int:
    """The seed that one of 64 bits stands for; raises `ValueError` for any other."""
    if seed not in SEEDS:
        raise ValueError(f"seed: expected a whole number from {SEEDS[0]} to {SEEDS[-1]}, got {seed}")
    return seed % USABLE_SEEDS


def _pairs(bias: Mapping[int, float] | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Biases in the order of their tokens; raises `InputError` for what is no number for a token id."""
    found: dict[Any, Any]
    try:
        found = dict(bias)
    except (TypeError, ValueError):
        found = {None: bias}
    for token, value in found.items():
        if not _is_a(token, Integral) or not _is_a(value, Real):
            raise InputError(
                f"logit_bias: expected numbers by token id, such as {{5: -1.5}}, got {bias!r:.80}"
            )
    return tuple(sorted((int(token), float(value)) for token, value in found.items()))


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _number(name: str, value: object) -> Any:
    """The value of a field of `Sampling`, in its type; raises `ValueError` for one of another."""
    kind: Any = SAMPLING_FIELDS[name]
    if not _is_a(value, Integral if kind is int else Real):
        raise ValueError(f"{name}: expected a {'whole ' if kind is int else ''}number, got {value!r:.80}")
    return kind(value)
