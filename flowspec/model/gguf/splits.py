"""How byte-level BPE cuts a text before it merges, by the name that a GGUF file gives it
(`tokenizer.ggml.pre`).

The regexes are those that the models' publishers state in tokenizer.json, for Oniguruma, which the tokenizers
library runs; what a name stands for, whether a whole word may be a token that no merge makes
(`ignores_merges`), and who begins with a BOS token unasked, is llama.cpp's knowledge (src/llama-vocab.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """`patterns` cut one after the other, each the pieces of the one before; `is_composed` is a text that is
    brought into Unicode's NFC before."""

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
