"""Tokenizers of GGUF files: the ids of llama.cpp, which are those of the checkpoint."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import assume, example, given
from hypothesis import strategies as st

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.model.chat_template import Rendered, without_cuts
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.gguf.file import GgufFile, GgufTexts
from flowspec.model.gguf.tokenizer import SPLITS, load, plain_tokens, stop_ids
from flowspec.model.text import TextStream, Tokenizer, recommended
from tests.mutations import mutants, one_line_at_most
from tests.nightly import nightly
from tests.vocabularies import (
    BYTES,
    PUBLISHED,
    byte_level,
    expected,
    published,
    sentencepiece,
    write_vocabulary,
)

CONTROL, USER_DEFINED = int(TokenType.CONTROL), int(TokenType.USER_DEFINED)
WORDS = {
    **{character: -100.0 - number for number, character in enumerate("\u2581abcdehlo,\n")},
    **{
        "\u2581a": -1,
        "he": -2,
        "ll": -3,
        "hell": -4,
        "hello": -5,
        "\u2581hello": -6,
        "ab": -7,
        "\u2581\u2581": -8,
    },
}
FIRST = 3 + len(BYTES)
IDS = {word: FIRST + number for number, word in enumerate(WORDS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture(scope="module")
def phi3(folder: Path) -> GgufFile:
    return published(folder)


@pytest.fixture(scope="module")
def llama2(phi3: GgufFile) -> GgufFile:
    """Its vocabulary is the beginning of Phi-3's."""
    return replace(
        phi3, metadata={**phi3.metadata, "general.architecture": "llama", "general.name": "Llama 2"}
    )


@pytest.fixture(scope="module")
def published_ones(phi3: GgufFile, llama2: GgufFile) -> tuple[Any, Any]:
    """The tokenizers of both, which take seconds to make."""
    return load(phi3), load(llama2)


def ids_of(file: GgufFile, text: str) -> list[int]:
    return list(load(file)(text, add_special_tokens=False)["input_ids"])


# ----------------------------------------------------------------------------------------- SentencePiece


def test_published_ids_are_given_and_texts_between_special_tokens_begin_with_a_space(
    published_ones: tuple[Any, Any],
) -> None:
    cases = list(expected(PUBLISHED / "phi-3.inp", PUBLISHED / "phi-3.out"))
    assert len(cases) == 46
    for tokenizer in published_ones:
        for text, ids in cases:
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, text
            assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    _, tokenizer = published_ones
    assert tokenizer(" Hello world")["input_ids"] == [1, 29871, 15043, 3186]
    turn = [1, 518, 25580, 29962]
    assert tokenizer("<s>[INST]</s><s>[INST]", add_special_tokens=False)["input_ids"] == [*turn, 2, *turn]


def test_a_special_token_that_somebody_wrote_is_text(phi3: GgufFile, published_ones: tuple[Any, Any]) -> None:
    """SentencePiece puts a space before each text that it is given, so the text must not be taken apart."""
    user, end = (
        phi3.metadata["tokenizer.ggml.tokens"].read().index(name) for name in ("<|user|>", "<|end|>")
    )
    for tokenizer in published_ones:
        rendered = Rendered("<|user|>\nIs a\U00100000b\u00fc an end?<|end|>\n", {0x100000: "<|end|>"})
        text, cutting = rendered.cut()
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = without_cuts(found["input_ids"], found["offset_mapping"], text, cutting)
        assert (ids.count(user), ids.count(end)) == (1, 1)
        told = tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False)
        assert "Is a<|end|>b\u00fc an end?" in told


def test_special_tokens_of_phi3_swallow_spaces_but_for_three(
    phi3: GgufFile, llama2: GgufFile, published_ones: tuple[Any, Any]
) -> None:
    user, end = (
        phi3.metadata["tokenizer.ggml.tokens"].read().index(name) for name in ("<|user|>", "<|end|>")
    )
    hello, spaced = 15043, [29871, 15043]
    text = "<|user|>\n Hello<|end|> \n<s> Hello"
    of_phi3, of_llama2 = (made(text, add_special_tokens=False)["input_ids"] for made in published_ones)
    assert of_phi3 == [user, hello, end, 1, *spaced]
    assert of_llama2 == [user, 29871, 13, hello, end, 259, 13, 1, *spaced]
    by_name = replace(llama2, metadata={**llama2.metadata, "general.name": "My Phi-3 as Llama"})
    assert ids_of(by_name, text) == of_phi3
    by_kind = replace(phi3, metadata={**phi3.metadata, "general.name": "mine"})
    assert ids_of(by_kind, text) == of_phi3


def merged(text: str, scores: Mapping[str, float]) -> tuple[list[str], bool]:
    """llama.cpp's SentencePiece: of all neighbours that make a token the highest score, and of several the
    left one, until there are none. Whether two of one score overlapped, too."""
    symbols, is_tie = list(text), False
    while True:
        pairs = [left + right for left, right in pairwise(symbols)]
        known = [place for place, pair in enumerate(pairs) if pair in scores]
        if not known:
            return symbols, is_tie
        best = max(known, key=lambda place: scores[pairs[place]])
        other = pairs[best + 1] if best + 1 < len(pairs) else ""
        is_tie |= symbols[best] != symbols[best + 1] and scores.get(other) == scores[pairs[best]]
        symbols[best : best + 2] = [pairs[best]]


ALPHABET = "\u2581abc"


@st.composite
def scored(draw: st.DrawFn) -> dict[str, float]:
    """Tokens of some characters, each with its score; all characters are tokens, as in every vocabulary that
    SentencePiece trained."""
    pieces = draw(st.lists(st.text(ALPHABET, min_size=2, max_size=5), max_size=14, unique=True))
    order = draw(st.permutations([*ALPHABET, *pieces]))
    return {piece: -float(number) for number, piece in enumerate(order)}


@given(scored(), st.text(" abc\u00e9\u20ac", max_size=24))
@example({"a": -1.0, "b": -2.0, "\u2581": -4.0, "ab": -3.0, "ba": -0.5}, "ababba")
def test_ids_are_those_of_merging_by_score(folder: Path, scores: dict[str, float], text: str) -> None:
    file = write_vocabulary(folder / "scored.gguf", sentencepiece(scores))
    pieces, is_tie = merged(f" {text}".replace(" ", "\u2581") if text else "", scores)
    assume(not is_tie)
    ids = {piece: FIRST + number for number, piece in enumerate(scores)}
    wanted = [
        token
        for piece in pieces
        for token in ([ids[piece]] if piece in ids else [3 + byte for byte in piece.encode()])
    ]
    tokenizer = load(file)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == wanted
    assert tokenizer.decode(wanted, clean_up_tokenization_spaces=False) == text


def test_overlapping_pairs_of_one_score_are_merged_as_in_tokenizer_json(folder: Path) -> None:
    """The one thing in which llama.cpp differs: it takes the left one."""
    scores = {"\u2581": -9.0, "a": -8.0, "b": -7.0, "c": -6.0, "bc": -1.0, "ab": -1.0}
    assert merged("abc", scores) == (["ab", "c"], True)
    metadata = sentencepiece(scores, add_space_prefix=False)
    assert ids_of(write_vocabulary(folder / "tie.gguf", metadata), "abc") == [FIRST + 1, FIRST + 4]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\u2581"), max_size=40))
@example(" two  spaces ")
@example("\r\n\t\x00")
def test_text_survives_the_way_through_tokens(folder: Path, text: str) -> None:
    path = folder / "p.gguf"
    metadata = sentencepiece(WORDS, add_space_prefix=False)
    tokenizer = load(GgufFile.read(path) if path.exists() else write_vocabulary(path, metadata))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_prefix_and_what_is_put_around_a_text_are_the_files(folder: Path) -> None:
    def encoded(text: str = "hello", **stated: Any) -> list[int]:
        file = write_vocabulary(folder / "ends.gguf", sentencepiece(WORDS, **stated))
        return list(load(file)(text)["input_ids"])

    hello, prefixed = IDS["hello"], IDS["\u2581hello"]
    assert encoded() == [1, prefixed]
    assert encoded("") == [1]
    assert encoded(add_space_prefix=False) == [1, hello]
    assert encoded(add_bos_token=False) == [prefixed]
    assert encoded(add_eos_token=True) == [1, prefixed, 2]
    assert encoded(bos_token_id=IDS["a"], add_bos_token=True) == [IDS["a"], prefixed]
    assert encoded(bos_token_id=None, eos_token_id=None, add_eos_token=True) == [1, prefixed, 2], (
        "llama.cpp's own"
    )


def test_special_tokens_in_a_text_are_found_by_their_kind(folder: Path) -> None:
    special = {"<ctl>": CONTROL, "  ": USER_DEFINED, "<think>": USER_DEFINED, "<free>": int(TokenType.UNUSED)}
    file = write_vocabulary(folder / "special.gguf", sentencepiece(WORDS, special, add_space_prefix=False))
    tokenizer, first = load(file), FIRST + len(WORDS)
    assert ids_of(file, "a<ctl>a<think>he  he<unk>") == [
        *(IDS["a"], first, IDS["a"], first + 2, IDS["he"], first + 1, IDS["he"], 0)
    ]
    assert first + 3 not in ids_of(file, "<free>")
    ids = [IDS["a"], first, first + 2, first + 1, IDS["\u2581a"]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>   a"


# -------------------------------------------------------------------------------------------- byte level

MIXED = "I'LL it's  12345 ½x  GrößeNeu.\r\n\n  <=>/a-b 中文ひら\tok  "
_LLAMA3 = "I|'LL| it|'s| | |123|45| |½|x| | GrößeNeu|.\r\n\n| | <=>/|a|-b| 中文ひら|\tok|  "
_GPT2 = "I|'|LL| it|'s| | 12345| ½|x| | GrößeNeu|.|\r\n\n | <=>/|a|-|b| 中文ひら|\t|ok|  "
_DIGITS_GPT2 = _GPT2.replace(" | 12345| ½", "  |1|2|3|4|5| |½")
PIECES = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "midm-2.0", "pixtral", "dbrx", "smaug-bpe"),
        _LLAMA3,
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "qwen35"), _LLAMA3.replace("123|45", "1|2|3|4|5")),
    "tekken": _LLAMA3.replace("123|45", "1|2|3|4|5").replace("Neu", "|Neu"),
    "gpt-4o": _LLAMA3.replace("|'", "'").replace("Neu", "|Neu"),
    "seed-coder": _LLAMA3.replace("123|45", "1|2|3|4|5").replace(".\r", ".|\r"),
    "deepseek-coder": (
        "I|'|LL| it|'|s|  |1|2|3|4|5| |½|x| | GrößeNeu|.|\r|\n|\n|  <=>|/|a|-|b| |中文ひら|\tok|  "
    ),
    "deepseek-v3": _LLAMA3.replace(" | |123", "  |123").replace("b| 中", "b| |中"),
    **dict.fromkeys(("a.x-4.0", "gpt-2", "mellum", "olmo", "trillion"), _GPT2),
    **dict.fromkeys(("minerva-7b", "refact", "smollm", "starcoder"), _DIGITS_GPT2),
    "viking": "I'LL| it's| | |1|2|3|4|5| |½|x| | GrößeNeu|.\r\n\n | <=>/a-b| 中文ひら|\t|ok|  ",
}
OF_EACH_WAY = list({pieces: name for name, pieces in PIECES.items()}.values())
LETTERS = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
"""All bytes, as byte-level BPE writes them."""


def whole(text: str) -> str:
    """A text as a byte-level vocabulary writes it."""
    names = sorted(LETTERS, key=lambda letter: (ord(letter) > 0xFF, ord(letter)))
    printable = [ord(letter) for letter in names if ord(letter) < 0x100]
    of_byte = dict(
        zip([*printable, *(each for each in range(256) if each not in printable)], names, strict=True)
    )
    return "".join(of_byte[byte] for byte in text.encode())


def merges_of(*texts: str) -> list[str]:
    """Merges from the left that make the texts."""
    found = [f"{whole(text)[:at]} {whole(text)[at]}" for text in texts for at in range(1, len(whole(text)))]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("name", nightly(OF_EACH_WAY, list(SPLITS)))
def test_each_pre_tokenizer_cuts_as_its_publisher_says(name: str, folder: Path) -> None:
    """What is cut apart is not merged: with a token for each piece, and for the whole, a text has a token for
    each piece."""
    pieces = PIECES[name].split("|")
    assert "".join(pieces) == MIXED
    merges = merges_of(*pieces, MIXED)
    metadata = byte_level("".join(LETTERS), merges, pre=name, add_bos_token=False)
    file = write_vocabulary(folder / "split.gguf", metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[token] for token in ids_of(file, MIXED)] == [whole(piece) for piece in pieces]
    assert load(file).decode(ids_of(file, MIXED)) == MIXED


def test_words_that_no_merge_makes_are_tokens_where_merges_are_ignored(folder: Path) -> None:
    special = {"bar": int(TokenType.NORMAL), "<b>": CONTROL}
    ignore = {"llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "midm-2.0", "pixtral", "tekken"}
    for name in SPLITS:
        stated = {"pre": name, "bos_token_id": len(LETTERS) + 2}
        metadata = byte_level("".join(LETTERS), merges_of("ba"), special, **stated)
        file = write_vocabulary(folder / "ignore.gguf", metadata)
        tokens = [metadata["tokenizer.ggml.tokens"][token] for token in load(file)("bar")["input_ids"]]
        assert tokens == (["<b>", "bar"] if name in ignore else ["ba", "r"]), name


def test_phi4_keeps_spaces_and_qwen_composes_characters(folder: Path) -> None:
    metadata = byte_level("".join(LETTERS), ["a b"], {"<|user|>": CONTROL}, pre="gpt-4o")
    file = write_vocabulary(folder / "phi4.gguf", metadata, "phi3", "Phi 4 Mini")
    assert load(file).decode(ids_of(file, "<|user|> a")) == "<|user|> a"
    # As their tokenizer.json say.
    for name in ("qwen2", "deepseek-r1-qwen", "qwen35", "llama3"):
        metadata = byte_level("".join(LETTERS), ["a b"], pre=name, bos_token_id=0)
        tokenizer = load(write_vocabulary(folder / "nfc.gguf", metadata))
        assert (tokenizer.decode(tokenizer("e\u0301")["input_ids"][-3:]) == "\u00e9") is (name != "llama3")
    for name, count in (("qwen2", 3), ("qwen35", 1)):
        metadata = byte_level("".join(LETTERS), merges_of("x\u0301"), pre=name)
        file = write_vocabulary(folder / "marks.gguf", metadata | {"tokenizer.ggml.add_bos_token": False})
        assert len(ids_of(file, "x\u0301")) == count


def test_gemma_4_merges_characters_by_a_list(folder: Path) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *BYTES, "a", "b", "\n", "\u2581", "\u2581a", "\n\n"]
    stated = {
        "model": "gemma4",
        "pre": None,
        "tokens": tokens,
        "merges": ["\u2581 a", "\n \n"],
        "token_type": [CONTROL] * 4 + [int(TokenType.BYTE)] * 256 + [int(TokenType.NORMAL)] * 6,
        "bos_token_id": 2,
        "unknown_token_id": 3,
    }
    file = write_vocabulary(folder / "gemma4.gguf", byte_level("", [], **stated))
    tokenizer = load(file)
    assert tokenizer("a a\n\n\u00e9<eos>")["input_ids"] == [2, 260, 264, 265, 4 + 0xC3, 4 + 0xA9, 1]
    assert tokenizer.decode([264, 4 + 0xC3, 4 + 0xA9]) == " a\u00e9"
    assert stop_ids(file) == {1}, "by its name: files need not say so"


# ---------------------------------------------------------------------------------------- both formats


def test_the_checkpoint_gives_the_same_ids(published_ones: tuple[Any, Any], tmp_path: Path) -> None:
    """Whatever class its tokenizer_config.json names: transformers' own for Llama would build another one."""
    _, tokenizer = published_ones
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(bundled_folder("target") / "config.json", tmp_path)
    texts = [text for text, _ in expected(PUBLISHED / "phi-3.inp", PUBLISHED / "phi-3.out")]
    config = {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for class_name, is_legacy in (("LlamaTokenizer", True), ("TokenizersBackend", False)):
        stated = {**config, "tokenizer_class": class_name, "legacy": is_legacy}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
        checkpoint = Tokenizer(ModelFiles(str(tmp_path)))
        for text in (*texts, "<s>[INST] a </s><s>[INST]"):
            ids, stream = checkpoint.encode(text), TextStream(checkpoint)
            assert ids == tokenizer(text)["input_ids"], (stated, text)
            assert stream.push(ids) + stream.finish() == checkpoint.decode(ids)


def test_a_chat_template_names_special_tokens(folder: Path) -> None:
    special = {"<turn>": CONTROL, "\u2581!\u2581": USER_DEFINED}
    metadata = {
        **sentencepiece(WORDS, special),
        "tokenizer.chat_template": "{{ bos_token }}<turn>{{ messages[0].content }}{{ eos_token }}",
    }
    write_vocabulary(folder / "chat.gguf", metadata)
    tokenizer = Tokenizer(ModelFiles(str(folder / "chat.gguf")))
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == [
        *(1, FIRST + len(WORDS), IDS["\u2581hello"], 2)
    ]
    assert tokenizer.eos_id == 2
    ids = (IDS["\u2581hello"], IDS["hello"], 3 + 0xC3, 2)
    assert [tokenizer.token_bytes(token) for token in ids] == [b" hello", b"hello", b"\xc3", b"</s>"]
    ids = (IDS["\u2581hello"], FIRST + len(WORDS) + 1, IDS["\u2581a"], 3 + 0xC3, 3 + 0xA9)
    assert TextStream(tokenizer).push(ids) == tokenizer.decode(ids) == "hello !  a\u00e9"


def test_tokens_that_end_an_answer_are_found_by_name_but_not_ends_of_messages(folder: Path) -> None:
    special = {"<|eot_id|>": CONTROL, "<|eom_id|>": CONTROL, "<|im_end|>": USER_DEFINED, "<|x|>": CONTROL}
    file = write_vocabulary(folder / "stops.gguf", sentencepiece(WORDS, special))
    first = FIRST + len(WORDS)
    assert stop_ids(file) == {first, first + 1, first + 2}
    files = ModelFiles(str(file.path))
    assert recommended(files, SimpleNamespace(eos_token_id=2)).stop_ids == {2, first, first + 1, first + 2}
    assert load(file).decode([first + 2, IDS["a"]], skip_special_tokens=True) == "a", (
        "a control token, whatever is said"
    )
    assert stop_ids(write_vocabulary(folder / "none.gguf", {})) == frozenset()
    special = dict.fromkeys(("<|end|>", "<|return|>", "<|call|>"), CONTROL)
    first = FIRST + len(WORDS)
    file = write_vocabulary(folder / "messages.gguf", sentencepiece(WORDS, special))
    assert stop_ids(file) == {first + 1, first + 2}
    del special["<|call|>"]
    file = write_vocabulary(folder / "one.gguf", sentencepiece(WORDS, special))
    assert stop_ids(file) == {first, first + 1}


def test_plain_tokens_are_those_that_texts_are_made_of(folder: Path) -> None:
    special = {"<ctl>": CONTROL, "[PAD7]": int(TokenType.UNUSED)}
    plain, others = plain_tokens(write_vocabulary(folder / "plain.gguf", sentencepiece(WORDS, special)))
    count = FIRST + len(WORDS)
    assert list(plain) == list(range(3, count))
    assert others == {0, 1, 2, count, count + 1}
    assert plain[IDS["hello"]] == "hello"


# ------------------------------------------------------------------------------------------------ damaged


DATA = json.loads((Path(__file__).parents[1] / "data/gguf_metadata.json").read_text("utf-8"))
DAMAGED = [
    *((sentencepiece(WORDS, **stated), message) for stated, message in DATA["sentencepiece"]),
    *((byte_level("abc", ["a b"], **stated), message) for stated, message in DATA["byte level"]),
    (
        sentencepiece(WORDS, scores=[float("nan")] * (FIRST + len(WORDS))),
        "tokens, got .nan",
    ),
]


@pytest.mark.parametrize(("metadata", "message"), DAMAGED)
def test_damaged_metadata_are_one_line(metadata: dict[str, Any], message: str, folder: Path) -> None:
    file = write_vocabulary(folder / "damaged.gguf", metadata)
    with pytest.raises(InputError, match=message) as caught:
        load(file)
    assert str(file.path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_that_mean_harm_and_texts_that_are_none_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_vocabulary(folder / "long.gguf", sentencepiece({**WORDS, "a" * 513: -1.0}))
    with pytest.raises(InputError, match="expected tokens of up to 512 characters, got one of 513"):
        load(file)
    template = {**sentencepiece(WORDS), "tokenizer.chat_template": 3}
    with pytest.raises(InputError, match=r"tokenizer\.chat_template: expected a text, got 3"):
        load(write_vocabulary(folder / "template.gguf", template))
    monkeypatch.setattr(limits, "JSON_BYTES_MAX", 1 << 10)
    with pytest.raises(InputError, match="tokens: expected at most 0 MiB, got 1 MiB; convert"):
        load(write_vocabulary(folder / "large.gguf", sentencepiece(WORDS)))
    path = folder / "texts"
    path.write_bytes(struct.pack("<Q", 2) + b"\xff\xfe")
    texts = GgufTexts(path=path, start=0, end=10, count=1)
    with pytest.raises(InputError, match=r"cannot read the texts in the header of .*; copy it again"):
        texts.read()
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read the texts in the header of .*; copy it again"):
        texts.read()


def texts_at(path: Path, value: Any) -> Any:
    """A list of texts as the reader of files leaves it."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        return value
    packed = [text.encode("utf-8", "surrogatepass") for text in value]
    path.write_bytes(b"".join(struct.pack("<Q", len(text)) + text for text in packed))
    return GgufTexts(path=path, start=0, end=path.stat().st_size, count=len(value))


SPECIAL = {"<turn>": CONTROL, "  ": USER_DEFINED}
SMALL = {**sentencepiece(WORDS, SPECIAL), "tokenizer.chat_template": "{{ bos_token }}x"}
SMALL_BYTES = byte_level("abc", ["a b"], SPECIAL, bos_token_id=3, add_bos_token=True)


@given(st.sampled_from([SMALL, SMALL_BYTES]).flatmap(mutants))
def test_any_metadata_are_used_or_refused(folder: Path, metadata: dict[str, Any]) -> None:
    if not isinstance(metadata, dict):
        return
    found = {
        key: texts_at(folder / f"texts-{place}", value) for place, (key, value) in enumerate(metadata.items())
    }
    file = GgufFile(path=folder / "any.gguf", metadata=found, tensors={}, headers={})
    with one_line_at_most():
        tokenizer = load(file)
        tokenizer.decode(tokenizer("a hello<turn>  c")["input_ids"])
        plain_tokens(file)
        stop_ids(file)
