"""What a GGUF file states in its metadata: entry by entry, each held to a kind, until nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf
from typing import Any, NamedTuple, NoReturn

from flowspec.errors import InputError
from flowspec.model.gguf.file import GgufFile, GgufTexts


class Kind(NamedTuple):
    """What an entry may be: in words, and whether a value is."""

    words: str
    accepts: Callable[[Any], bool]


NUMBER = Kind("a number other than 0", lambda value: type(value) in (int, float) and 0 < abs(value) < inf)
COUNT = Kind("a whole number above 0", lambda value: type(value) is int and value > 0)
TEXT = Kind("a text", lambda value: type(value) is str)
TRUTH = Kind("true or false", lambda value: type(value) is bool)
TEXTS = Kind("a list of texts", lambda value: type(value) is GgufTexts)
NEEDED: Any = object()
"""As a default: the entry must be there."""
_HARMLESS = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
_OFF_AT_0 = (
    *("attention.shared_kv_layers", "attention.sliding_window", "embedding_length_per_layer_input"),
    *("expert_count", "expert_shared_count", "expert_used_count", "expert_weights_norm"),
    *("nextn_predict_layers", "rope.scaling.factor"),
)
_NEUTRAL = {"attention.causal": True, **dict.fromkeys(_OFF_AT_0, 0)}
"""Keys with the value that says no more than without them."""


def count_where(words: str, accepts: Callable[[int], bool]) -> Kind:
    return Kind(words, lambda value: COUNT.accepts(value) and accepts(value))


def one_of(values: Collection[Any]) -> Kind:
    return Kind(f"one of {', '.join(map(str, values))}", lambda value: value in list(values))


def list_of(words: str, count: int, accepts: Callable[[list[Any]], bool]) -> Kind:
    """A list of so many numbers, which are as `words` and `accepts` say."""
    return Kind(words, lambda value: type(value) is list and len(value) == count and accepts(value))


class Stated:
    """The entries of a file whose keys begin with `prefix`."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.file = file
        self._prefix = prefix
        said = {
            key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
        }
        self._entries = {key: value for key, value in said.items() if _NEUTRAL.get(key) != value}
        self._left = self._entries.keys() - _HARMLESS

    def take(self, key: str, default: Any = NEEDED, kind: Kind = NUMBER) -> Any:
        """An entry's value, or the default where it has none. Raises `InputError` for one of another kind."""
        self._left.discard(key)
        value = self._entries.get(key)
        if value is None and default is not NEEDED:
            return default
        if not kind.accepts(value):
            self.refuse(key, kind.words, "nothing" if value is None else f"{value!r:.80}")
        return value

    def refuse(self, key: str, expected: str, got: str) -> NoReturn:
        raise InputError(
            f"{self.file.path}: {self._prefix}{key}: expected {expected}, got {got}; convert the model again "
            "with a new llama.cpp, or take another file"
        )

    def check_all_taken(self) -> None:
        """Raises `InputError` for an entry that nobody took: it may change the arithmetic."""
        for key in sorted(self._left):
            said = f"sets {self._prefix}{key} to {self._entries[key]!r:.40}"
            raise InputError(f"{self.file.path} {said}, which FlowSpec does not apply; expected none")
