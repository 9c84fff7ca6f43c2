"""Whether a drafter means the same by every token id as the target, whatever files the two come in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowspec.draft.kinds.ngram import Ngram
from flowspec.errors import InputError
from flowspec.model.damage import read_json
from flowspec.model.files import ModelFiles

ADVICE = f"give a drafter trained for the same tokenizer, or --drafter {Ngram.word}"


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The text of each token that is compared, and the ids of special ones, which are not."""

    texts: dict[int, str]
    special: frozenset[int] = frozenset()


def check_vocabulary(name: str, drafter: ModelFiles, target: ModelFiles) -> None:
    """Raises `InputError` unless both models mean the same by every id.

    Only vocabularies are compared: special tokens are often named anew when a model is fine-tuned, and one
    that the drafter misunderstands costs a guess, nothing more. Without tokenizers, sizes must do.
    """
    if not (drafter.has_tokenizer and target.has_tokenizer):
        size, vocabulary_size = drafter.config().vocab_size, target.config().vocab_size
        if size != vocabulary_size:
            raise _misfit(name, target, f"a vocabulary of {vocabulary_size} entries", f"{size}")
        return
    if drafter.gguf is None and target.gguf is None:
        paths = drafter.path("tokenizer.json"), target.path("tokenizer.json")
        if paths[0].read_bytes() == paths[1].read_bytes():
            return
        found, expected = (_Vocabulary(_texts_in_model(path)) for path in paths)
        if len(found.texts) != len(expected.texts):
            raise _misfit(
                name, target, f"a vocabulary of {len(expected.texts)} entries", f"{len(found.texts)}"
            )
    else:
        found, expected = _plain(drafter), _plain(target)
    tokens = (expected.texts.keys() | found.texts.keys()) - expected.special - found.special
    wrong = min(
        (token for token in tokens if found.texts.get(token) != expected.texts.get(token)), default=None
    )
    if wrong is not None:
        texts = (vocabulary.texts.get(wrong) for vocabulary in (expected, found))
        raise _misfit(name, target, f"{next(texts)!r:.40} as id {wrong}", f"{next(texts)!r:.40}")


def _misfit(name: str, target: ModelFiles, expected: str, got: str) -> InputError:
    return InputError(
        f"drafter {name!r} has another tokenizer than model {target.model!r}: expected {expected}, got "
        f"{got}; {ADVICE}"
    )


def _plain(files: ModelFiles) -> _Vocabulary:
    """That of a file of either kind: GGUF files tell special tokens from others, as tokenizer.json does by
    listing them apart."""
    if files.gguf is not None:
        from flowspec.model.gguf.tokenizer import plain_tokens

        return _Vocabulary(*plain_tokens(files.gguf_file))
    path = files.path("tokenizer.json")
    added = read_json(path).get("added_tokens") or []
    if not isinstance(added, list) or not all(
        isinstance(token, dict) and type(token.get("id")) is int for token in added
    ):
        raise InputError(f"{path}: expected added_tokens with ids; copy the tokenizer again")
    return _Vocabulary(_texts_in_model(path), frozenset(token["id"] for token in added))


def _texts_in_model(path: Path) -> dict[int, str]:
    """Id -> text of a tokenizer.json, without the tokens added to its model."""
    model = read_json(path).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list) and all(
        isinstance(entry, list) and entry and isinstance(entry[0], str) for entry in vocabulary
    ):
        return {token: entry[0] for token, entry in enumerate(vocabulary)}
    if isinstance(vocabulary, dict) and all(type(token) is int for token in vocabulary.values()):
        return {token: text for text, token in vocabulary.items()}
    raise InputError(f"{path}: expected a vocabulary under model, vocab; copy the tokenizer again")
