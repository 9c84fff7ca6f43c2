"""A tokenizer from the metadata of a GGUF file: the ids of llama.cpp, and of the checkpoint's tokenizer.json.

The tokenizers library does the work. SentencePiece, which merges the pair whose token has the highest score,
is to it BPE whose merges come in the order of scores. Where llama.cpp and tokenizer.json differ
(docs/design/weights.md), this is as tokenizer.json. How byte-level BPE cuts a text before it merges goes by
the name in `tokenizer.ggml.pre`: the regexes are those of the publishers' tokenizer.json, for the library's
Oniguruma; what a name stands for is llama.cpp's knowledge (src/llama-vocab.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from flowspec.core.protocol import limits
from flowspec.model.accelerator import importing
from flowspec.model.gguf.file import TEXT, TEXTS, TRUTH, GgufFile, GgufTexts, Kind, Stated, list_of, one_of

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\u2581"
"""How SentencePiece writes a space."""
_PIECE_CHARS_MAX = 512
"""Of a token that SentencePiece merges: every place to cut it is tried."""
_STOPS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<EOT>", "<eos>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|return|>", "<|call|>"),
}
"""Tokens that end an answer wherever a vocabulary has them, of those that llama.cpp looks for by name. It
takes them for control tokens, too, whatever a file says."""
_ENDS_MESSAGE, _HARMONY = "<|end|>", {"<|return|>", "<|call|>"}
"""Where a vocabulary has the latter, the first ends a message of an answer that goes on."""
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Behind its other special tokens, Phi-3 drops spaces."""
Merges = list[tuple[str, str]]


class _Vocabulary:
    def __init__(self, file: GgufFile) -> None:
        self.stated = Stated(file, _PREFIX)
        texts = enumerate(_texts(self.stated, "tokens"))
        self.tokens = tokens = [text or f"[EMPTY_{token}]" for token, text in texts]
        self.ids = {text: token for token, text in enumerate(tokens)}
        for token, text in enumerate(tokens):
            if self.ids[text] != token:
                self.stated.refuse("tokens", "each token once", f"{text!r:.80} twice")
        kinds = self.stated.take("token_type", [_NORMAL] * len(tokens), _one_each(tokens, int))
        self.kinds = [_CONTROL if text in _STOPS else kind for text, kind in zip(tokens, kinds, strict=True)]

    def named(self, name: str, default: int | None = None) -> str | None:
        count = len(self.tokens)
        known = Kind(f"a token below {count}", lambda value: type(value) is int and 0 <= value < count)
        token = self.stated.take(f"{name}_token_id", default, known)
        if token is not None and token >= count:  # the default
            self.stated.refuse("tokens", f"{token + 1} or more, or a {name}_token_id", f"{count}")
        return None if token is None else self.tokens[token]

    def added(self) -> list[AddedToken]:
        """Those that are found in a text as they are, before anything is done to it. A model is Phi-3 by its
        kind, and as in llama.cpp by its name; Phi-4's architecture is called phi3, too."""
        metadata, found = self.stated.file.metadata, []
        kind_of_file = metadata.get("general.architecture"), metadata.get(f"{_PREFIX}model")
        name = str(metadata.get("general.name")).lower()
        drops_spaces = "phi-3" in name or "phi3" in name or kind_of_file == ("phi3", "llama")
        for text, kind in zip(self.tokens, self.kinds, strict=True):
            if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN):
                strips, is_special = drops_spaces and text not in _PHI3_KEEPS_SPACES, kind != _USER_DEFINED
                found.append(AddedToken(text, normalized=False, special=is_special, rstrip=strips))
        return found

    def merges(self) -> Merges:
        found = []
        for merge in _texts(self.stated, "merges"):
            at = merge.find(" ", 1)
            left, right = merge[:at], merge[at + 1 :]
            if at < 0 or not {left, right, left + right} <= self.ids.keys():
                self.stated.refuse("merges", "two tokens that make a third", f"{merge!r:.80}")
            found.append((left, right))
        return found

    def merges_by_score(self) -> Merges:
        """All pairs of tokens that make a token, that of the highest score first; where scores are equal, in
        transformers' order."""
        scores = self.stated.take("scores", kind=_one_each(self.tokens, int, float))
        merges = []
        for text, score, kind in zip(self.tokens, scores, self.kinds, strict=True):
            if kind not in (_NORMAL, _USER_DEFINED, _UNUSED):
                continue
            if len(text) > _PIECE_CHARS_MAX:
                expected = f"tokens of up to {_PIECE_CHARS_MAX} characters"
                self.stated.refuse("tokens", expected, f"one of {len(text)}")
            cuts = (at for at in range(1, len(text)) if text[:at] in self.ids and text[at:] in self.ids)
            merges += [(score, at, len(text) - at, text) for at in cuts]
        merges.sort(key=lambda merge: merge[:3], reverse=True)
        return [(text[:at], text[at:]) for _, at, _, text in merges]


def load(file: GgufFile) -> Any:
    """The tokenizer in transformers' form, with the file's chat template.

    Raises `InputError` for metadata that are damaged or of a kind that is not known.
    """
    with importing():
        from transformers import PreTrainedTokenizerFast

    vocabulary = _Vocabulary(file)
    stated = vocabulary.stated
    kind = stated.take("model", kind=one_of(("llama", "gpt2", "gemma4")))
    is_scored, adds_bos = kind == "llama", True
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(vocabulary)
    else:
        tokenizer = _of_characters(vocabulary, is_scored=is_scored)
    tokenizer.add_tokens(vocabulary.added())
    parts, tokens = ["$A"], []  # what is put before and behind every text
    ends = (1, 2) if is_scored else (None, None)
    bos, eos = vocabulary.named("bos", ends[0]), vocabulary.named("eos", ends[1])
    for name, token, is_added in (("bos", bos, adds_bos), ("eos", eos, False)):
        if not stated.take(f"add_{name}_token", is_added, TRUTH):
            continue
        if token is None:
            stated.refuse(f"{name}_token_id", f"a token with {_PREFIX}add_{name}_token", "nothing")
        parts.insert(0 if name == "bos" else len(parts), name)
        tokens.append({"id": name, "ids": [vocabulary.ids[token]], "tokens": [token]})
    tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        unk_token=vocabulary.named("unknown"),
        chat_template=Stated(file, "tokenizer.").take("chat_template", None, TEXT),
    )


def _of_characters(vocabulary: _Vocabulary, *, is_scored: bool) -> Tokenizer:
    """BPE over characters as SentencePiece writes them, or their bytes; with a prefix each text between
    special tokens begins with a space of its own."""
    merges = vocabulary.merges_by_score() if is_scored else vocabulary.merges()
    unknown = vocabulary.named("unknown", 0 if is_scored else None)
    has_prefix = is_scored and vocabulary.stated.take("add_space_prefix", True, TRUTH)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    spaces = decoders.Replace(_SPACE, " ")
    tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """A tokenizer, and whether it adds a BOS token where a file says nothing of it."""
    split = SPLITS[vocabulary.stated.take("pre", kind=one_of(sorted(SPLITS)))]
    merges, has_whole = vocabulary.merges(), split.ignores_merges
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=has_whole))
    if split.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.adds_bos


def stop_ids(file: GgufFile) -> frozenset[int]:
    """Tokens of the vocabulary that by their names end an answer, whether or not the file says so."""
    if not isinstance(file.metadata.get(f"{_PREFIX}tokens"), GgufTexts):
        return frozenset()
    texts = _texts(Stated(file, _PREFIX), "tokens")
    stops = _STOPS - {_ENDS_MESSAGE} if set(texts) >= _HARMONY else _STOPS
    return frozenset(token for token, text in enumerate(texts) if text in stops)


def plain_tokens(file: GgufFile) -> tuple[dict[int, str], frozenset[int]]:
    """Text by id of the tokens that texts are made of, and the ids of the others: special ones, and places
    that are left free."""
    vocabulary = _Vocabulary(file)
    found = enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    plain = {token: text for token, (text, kind) in found if kind in (_NORMAL, _BYTE)}
    return plain, frozenset(range(len(vocabulary.tokens))) - plain.keys()


def _texts(stated: Stated, name: str) -> list[str]:
    found: GgufTexts = stated.take(name, kind=TEXTS)
    if found.end - found.start > limits.JSON_BYTES_MAX:
        size = -(-(found.end - found.start) >> 20)
        stated.refuse(name, f"at most {limits.JSON_BYTES_MAX >> 20} MiB", f"{size} MiB")
    return found.read()


def _one_each(tokens: list[str], *types: type) -> Kind:
    return list_of(
        f"one number for each of {len(tokens)} tokens",
        len(tokens),
        lambda value: all(type(number) in types and number == number for number in value),
    )


@dataclass(frozen=True, slots=True)
class Split:
    """`patterns` cut one after the other, each the pieces of the one before. `ignores_merges`: a whole word
    may be a token that no merge makes. `adds_bos`: unasked. `is_composed`: Unicode's NFC comes before."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    is_composed: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
"""Words that end where a capital letter comes after a small one."""
_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
_SYMBOLS, _PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join((_CONTRACTIONS, _WORD, _DIGITS, _SYMBOLS, _SPACES))
_QWEN2 = "|".join((_CONTRACTIONS, _WORD, _DIGIT, _SYMBOLS, _SPACES))
_SEED_CODER = "|".join((_CONTRACTIONS, _WORD, _DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES))
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", _DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_QWEN3_5 = "|".join((_CONTRACTIONS, *_MARKED, _SPACES))
_TEKKEN = "|".join((_CASED % ("", ""), _DIGIT, _PATHS, _SPACES))
_GPT4O = "|".join((_CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?"), _DIGITS, _PATHS, _SPACES))
_DEEPSEEK3 = (
    _DIGITS,
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _DIGIT)

SPLITS = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "midm-2.0", "pixtral"),
        Split((_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Split((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split((_QWEN2,), is_composed=True)),
    "qwen35": Split((_QWEN3_5,), is_composed=True),
    "tekken": Split((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "gpt-4o": Split((_GPT4O,)),
    "seed-coder": Split((_SEED_CODER,)),
    "deepseek-coder": Split(_DEEPSEEK_CODER),
    "deepseek-v3": Split(_DEEPSEEK3),
    **dict.fromkeys(("a.x-4.0", "gpt-2", "mellum", "olmo", "trillion"), Split((_GPT2,))),
    **dict.fromkeys(("minerva-7b", "refact", "smollm", "starcoder"), Split((_DIGIT, _GPT2))),
    "viking": Split((" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", _DIGIT)),
}
"""Those of models whose architecture we read. llama.cpp's `default` is a guess, which it warns of."""
