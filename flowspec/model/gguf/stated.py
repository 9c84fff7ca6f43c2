"""What a GGUF file states about its model, entry by entry until nothing is left: what nobody took may change
the arithmetic, and is refused."""

from __future__ import annotations

from typing import Any, NoReturn

from flowspec.errors import InputError
from flowspec.model.gguf.file import GgufFile

_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_NEUTRAL = {
    "attention.causal": True,
    "attention.shared_kv_layers": 0,
    "attention.sliding_window": 0,
    "embedding_length_per_layer_input": 0,
    "expert_count": 0,
    "expert_shared_count": 0,
    "expert_used_count": 0,
    "expert_weights_norm": False,
    "nextn_predict_layers": 0,
    "rope.scaling.factor": 0.0,
}
"""Keys with the value that says no more than without them."""
NUMBER: tuple[type, ...] = (int, float)
TEXT: tuple[type, ...] = (str,)
TRUTH: tuple[type, ...] = (bool,)
LIST: tuple[type, ...] = (list,)
COUNTS: tuple[type, ...] = (int, list)
_KINDS = {
    NUMBER: "a number other than 0",
    TEXT: "a text",
    TRUTH: "true or false",
    LIST: "a list of numbers",
    COUNTS: "a number other than 0, or a list of them",
}


class Stated:
    """What a file states about its model, entry by entry until nothing is left."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self._prefix = architecture + "."
        stated = {
            key.removeprefix(self._prefix): value
            for key, value in file.metadata.items()
            if key.startswith(self._prefix)
        }
        self._left = {
            key: value for key, value in stated.items() if key not in _NEUTRAL or value != _NEUTRAL[key]
        }

    def take(self, key: str, default: Any = None, kinds: tuple[type, ...] = NUMBER) -> Any:
        """An entry's value, a number if nothing else is said, or the default where it has none."""
        value = self._left.pop(key, default)
        if value is not default and (type(value) not in kinds or value == 0 or value != value):
            self.refuse(key, value, _KINDS[kinds])
        return value

    def need(self, key: str) -> Any:
        if key not in self._left:
            raise InputError(f"{self.file.path} has no {self._prefix}{key}; convert the model again")
        return self.take(key)

    def count(self, key: str) -> int:
        """A whole number, 0 where there is none."""
        value = self.take(key, 0)
        if type(value) is not int or value < 0:
            self.refuse(key, value, "a whole number")
        return value

    def by_layer(self, key: str, layers: int, default: Any = None) -> list[int]:
        """Whole numbers above 0 that a file states once, or of each layer."""
        value = self.take(key, default, COUNTS)
        found = value if isinstance(value, list) else [value] * layers
        if len(found) != layers or not all(type(each) is int and each > 0 for each in found):
            self.refuse(key, value, f"a number for each of {layers} layers")
        return found

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def refuse(self, key: str, value: Any, expected: Any) -> NoReturn:
        raise InputError(f"{self.file.path}: {self._prefix}{key}: expected {expected}, got {value!r:.80}")

    def check_all_taken(self) -> None:
        for key, value in self._left.items():
            if key not in _HARMLESS:
                raise InputError(
                    f"{self.file.path} sets {self._prefix}{key} to {value!r:.40}, which FlowSpec does not "
                    "apply; expected none"
                )
