"""A tokenizer from the metadata of a GGUF file: the ids of llama.cpp, and of the checkpoint's tokenizer.json.

The tokenizers library does the work. SentencePiece, which merges the pair whose token has the highest score,
is to it BPE whose merges come in the order of scores. Where llama.cpp and tokenizer.json differ
(docs/design/weights.md), this is as tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.model.gguf.file import GgufFile, GgufTexts
from flowspec.model.gguf.splits import SPLITS
from flowspec.model.imports import IMPORTING

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\u2581"
"""How SentencePiece writes a space."""
_PIECE_CHARS_MAX = 512
"""Of a token that SentencePiece merges: every place to cut it is tried."""
_STOPS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<turn|>", "<|tool_response>", "<EOT>", "<eos>"),
        *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|return|>", "<|call|>"),
    )
)
"""Tokens that end an answer wherever a vocabulary has them, of those that llama.cpp looks for by name. It
takes them for control tokens, too, whatever a file says."""
_ENDS_MESSAGE, _HARMONY = "<|end|>", {"<|return|>", "<|call|>"}
"""Where a vocabulary has the latter, the first ends a message of an answer that goes on."""
_ENDS = {("llama", "bos"): 1, ("llama", "eos"): 2}
"""Tokens that files of a kind of tokenizer need not name."""
_Built = tuple[Tokenizer, bool]
"""A tokenizer without its added tokens, and whether it adds a BOS token where a file says nothing of it."""
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Behind its other special tokens, Phi-3 drops spaces."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Text and kind of each token, by id."""

    file: GgufFile
    tokens: list[str]
    kinds: list[int]

    @staticmethod
    def read(file: GgufFile) -> _Vocabulary:
        tokens = [text or f"[EMPTY_{token}]" for token, text in enumerate(_texts(file, "tokens"))]
        ids = dict(zip(tokens, range(len(tokens)), strict=True))
        for token, text in enumerate(tokens):
            if ids[text] != token:
                raise _broken(file, "tokens", "each token once", f"{text!r:.80} twice")
        kinds = _numbers(file, "token_type", len(tokens), (int,), default=_NORMAL)
        kinds = [_CONTROL if text in _STOPS else kind for text, kind in zip(tokens, kinds, strict=True)]
        return _Vocabulary(file, tokens, kinds)

    @property
    def ids(self) -> dict[str, int]:
        return {text: token for token, text in enumerate(self.tokens)}

    def named(self, name: str, default: int | None = None) -> str | None:
        """The text of the token that the file names for a purpose."""
        token = self.file.metadata.get(f"{_PREFIX}{name}_token_id", default)
        if token is None:
            return None
        if type(token) is not int or not 0 <= token < len(self.tokens):
            expected = f"a token below {len(self.tokens)}"
            raise _broken(self.file, f"{name}_token_id", expected, f"{token!r:.40}")
        return self.tokens[token]

    def added(self) -> list[AddedToken]:
        """Those that are found in a text as they are, before anything is done to it."""
        found = zip(self.tokens, self.kinds, strict=True)
        drops_spaces = _is_phi3(self.file)
        return [
            AddedToken(
                text,
                normalized=False,
                special=kind != _USER_DEFINED,
                rstrip=drops_spaces and text not in _PHI3_KEEPS_SPACES,
            )
            for text, kind in found
            if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
        ]


def load(file: GgufFile) -> Any:
    """The tokenizer in transformers' form, with the file's chat template.

    Raises `InputError` for metadata that are damaged or of a kind that is not known.
    """
    with IMPORTING:
        from transformers import PreTrainedTokenizerFast

    kind = file.metadata.get(f"{_PREFIX}model")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise _broken(file, "model", f"one of {', '.join(_KINDS)}", f"{kind!r:.80}", "use another file")
    template = file.metadata.get("tokenizer.chat_template")
    if type(template) not in (str, type(None)):
        raise InputError(f"{file.path}: tokenizer.chat_template: expected a text, got {template!r:.80}")
    vocabulary = _Vocabulary.read(file)
    tokenizer, adds_bos = _KINDS[kind](vocabulary)
    bos, eos = (vocabulary.named(name, _ENDS.get((kind, name))) for name in ("bos", "eos"))
    tokenizer.add_tokens(vocabulary.added())
    tokenizer.post_processor = _ends(vocabulary, bos, eos, adds_bos=adds_bos)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        unk_token=vocabulary.named("unknown"),
        chat_template=template,
    )


def _ends(vocabulary: _Vocabulary, bos: str | None, eos: str | None, *, adds_bos: bool) -> Any:
    """What is put before and behind every text."""
    file, parts, tokens = vocabulary.file, ["$A"], []
    for name, token, is_default in (("bos", bos, adds_bos), ("eos", eos, False)):
        if not _flag(file, f"add_{name}_token", is_default=is_default):
            continue
        if token is None:
            raise InputError(
                f"{file.path}: expected {_PREFIX}{name}_token_id with {_PREFIX}add_{name}_token; convert the "
                "model again"
            )
        parts.insert(0 if name == "bos" else len(parts), name)
        tokens.append({"id": name, "ids": [vocabulary.ids[token]], "tokens": [token]})
    return processors.TemplateProcessing(single=parts, special_tokens=tokens)


def _flag(file: GgufFile, name: str, *, is_default: bool) -> bool:
    found = file.metadata.get(_PREFIX + name, is_default)
    if type(found) is not bool:
        raise _broken(file, name, "true or false", f"{found!r:.80}")
    return found


def _sentencepiece(vocabulary: _Vocabulary) -> _Built:
    file, ids = vocabulary.file, vocabulary.ids
    has_prefix = _flag(file, "add_space_prefix", is_default=True)
    model = models.BPE(
        vocab=ids,
        merges=_merges_by_score(vocabulary),
        unk_token=vocabulary.named("unknown", 0),
        fuse_unk=True,
        byte_fallback=True,
    )
    # Each text between special tokens begins with a space of its own.
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence([*_of_pieces(), *strip])
    return tokenizer, True


def _of_pieces() -> list[Any]:
    return [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, that of the highest score first; in transformers' order where
    scores are equal."""
    file, tokens, ids = vocabulary.file, vocabulary.tokens, vocabulary.ids
    scores = _numbers(file, "scores", len(tokens), (int, float))
    merges = []
    for text, score, kind in zip(tokens, scores, vocabulary.kinds, strict=True):
        if kind not in (_NORMAL, _USER_DEFINED, _UNUSED):
            continue
        if len(text) > _PIECE_CHARS_MAX:
            expected = f"tokens of up to {_PIECE_CHARS_MAX} characters"
            raise _broken(file, "tokens", expected, f"one of {len(text)}")
        cuts = (at for at in range(1, len(text)) if text[:at] in ids and text[at:] in ids)
        merges += [(score, at, len(text) - at, text) for at in cuts]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(text[:at], text[at:]) for _, at, _, text in merges]


def _byte_level(vocabulary: _Vocabulary) -> _Built:
    file = vocabulary.file
    name = file.metadata.get(f"{_PREFIX}pre")
    split = SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        known = ", ".join(sorted(SPLITS))
        raise InputError(
            f"{file.path}: tokenizer.ggml.pre: expected one of {known}, got {name!r:.80}; convert the model "
            "again with a new llama.cpp"
        )
    model = models.BPE(
        vocab=vocabulary.ids, merges=_merges_of_file(vocabulary), ignore_merges=split.ignores_merges
    )
    tokenizer = Tokenizer(model)
    if split.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.adds_bos


def _gemma4(vocabulary: _Vocabulary) -> _Built:
    """BPE with merges of its own, over characters as SentencePiece writes them."""
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges_of_file(vocabulary),
        unk_token=vocabulary.named("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(_of_pieces())
    return tokenizer, True


_KINDS: dict[str, Callable[[_Vocabulary], _Built]] = {
    "llama": _sentencepiece,
    "gpt2": _byte_level,
    "gemma4": _gemma4,
}


def _merges_of_file(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    merges, ids = [], vocabulary.ids
    for merge in _texts(vocabulary.file, "merges"):
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in ids or right not in ids or left + right not in ids:
            raise _broken(vocabulary.file, "merges", "two tokens that make a third", f"{merge!r:.80}")
        merges.append((left, right))
    return merges


def stop_ids(file: GgufFile) -> frozenset[int]:
    """Tokens of the vocabulary that by their names end an answer, whether or not the file says so."""
    if not isinstance(file.metadata.get(f"{_PREFIX}tokens"), GgufTexts):
        return frozenset()
    texts = _texts(file, "tokens")
    stops = _STOPS - {_ENDS_MESSAGE} if set(texts) >= _HARMONY else _STOPS
    return frozenset(token for token, text in enumerate(texts) if text in stops)


def plain_tokens(file: GgufFile) -> tuple[dict[int, str], frozenset[int]]:
    """Text by id of the tokens that texts are made of, and the ids of the others: special ones, and places
    that are left free."""
    vocabulary = _Vocabulary.read(file)
    found = enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    plain = {token: text for token, (text, kind) in found if kind in (_NORMAL, _BYTE)}
    return plain, frozenset(range(len(vocabulary.tokens))) - plain.keys()


def _is_phi3(file: GgufFile) -> bool:
    """By its kind, and as in llama.cpp by its name. Phi-4's architecture is called phi3, too."""
    name = str(file.metadata.get("general.name")).lower()
    kind = file.metadata.get("general.architecture"), file.metadata.get(f"{_PREFIX}model")
    return "phi-3" in name or "phi3" in name or kind == ("phi3", "llama")


def _texts(file: GgufFile, name: str) -> list[str]:
    found = file.metadata.get(_PREFIX + name)
    if not isinstance(found, GgufTexts):
        raise _broken(file, name, "a list of texts", "nothing" if found is None else f"{found!r:.40}")
    if found.end - found.start > limits.JSON_BYTES_MAX:
        expected = f"at most {limits.JSON_BYTES_MAX >> 20} MiB"
        raise _broken(file, name, expected, f"{-(-(found.end - found.start) >> 20)} MiB", "use another file")
    return found.read()


def _numbers(
    file: GgufFile, name: str, count: int, kinds: tuple[type, ...], default: int | None = None
) -> list[Any]:
    """One for each token."""
    found = file.metadata.get(_PREFIX + name)
    if found is None and default is not None:
        return [default] * count
    if not isinstance(found, list):
        raise _broken(file, name, "a list of numbers", "nothing" if found is None else f"{found!r:.40}")
    if len(found) != count:
        raise _broken(file, name, f"one for each of {count} tokens", f"{len(found)}")
    for number in found:
        if type(number) not in kinds or number != number:
            raise _broken(file, name, "numbers", f"{number!r:.40}")
    return found


def _broken(
    file: GgufFile, name: str, expected: str, got: str, advice: str = "convert the model again"
) -> InputError:
    return InputError(f"{file.path}: {_PREFIX}{name}: expected {expected}, got {got}; {advice}")
