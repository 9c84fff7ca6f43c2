"""Vocabularies of GGUF files: published ones with the ids that llama.cpp expects, and small ones that tests
make."""

from __future__ import annotations

import lzma
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from flowspec.model.damage import read_json
from flowspec.model.files import bundled_folder
from flowspec.model.gguf.file import GgufFile
from tests.ggufs import add_entry

PUBLISHED = Path(__file__).parent / "model" / "vocabularies"
_SEPARATOR = "\n__ggml_vocab_test__\n"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def published(folder: Path) -> GgufFile:
    """Phi-3's, unpacked into a folder."""
    path = folder / "phi-3.gguf"
    path.write_bytes(lzma.decompress((PUBLISHED / "phi-3.gguf.xz").read_bytes()))
    return GgufFile.read(path)


def expected(texts: Path, ids: Path) -> Iterator[tuple[str, list[int]]]:
    """Each text with its ids, as llama.cpp publishes them beside a vocabulary."""
    with texts.open(encoding="utf-8", newline="") as file:
        found = file.read().split(_SEPARATOR)
    rows = [[int(token) for token in row.split()] for row in ids.read_text("utf-8").splitlines()]
    return zip(found, rows, strict=False)  # behind the last separator there is nothing


def write_vocabulary(
    path: Path, metadata: Mapping[str, Any], architecture: str = "llama", name: str = "m"
) -> GgufFile:
    """A GGUF file of a tokenizer alone."""
    writer = GGUFWriter(path, architecture)
    for key, value in {"general.name": name, **metadata}.items():
        add_entry(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile.read(path)


def sentencepiece(
    scores: Mapping[str, float], special: Mapping[str, int] | None = None, /, **stated: Any
) -> dict[str, Any]:
    """The metadata of a SentencePiece vocabulary of <unk>, <s> and </s>, the bytes, tokens with their scores,
    and special ones with their kind; `stated` replaces entries, or with None leaves them out."""
    special = special or {}
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *scores, *special]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * len(BYTES) + [TokenType.NORMAL] * len(scores)
    entries = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * (3 + len(BYTES))
        + [float(score) for score in scores.values()]
        + [0.0] * len(special),
        "token_type": [*map(int, kinds), *special.values()],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **stated,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items() if value is not None}


def byte_level(
    alphabet: str, merges: list[str], special: Mapping[str, int] | None = None, /, **stated: Any
) -> dict[str, Any]:
    """The metadata of a byte-level vocabulary: its characters, what its merges make, and special tokens."""
    special = special or {}
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges), *special]
    entries = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": merges,
        "token_type": [int(TokenType.NORMAL)] * (len(tokens) - len(special)) + [*special.values()],
        **stated,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items() if value is not None}


def bundled() -> dict[str, Any]:
    """The metadata of the bundled models' tokenizer and chat template."""
    model = read_json(bundled_folder("target") / "tokenizer.json")["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    entries = {
        "model": "gpt2",
        "pre": "smollm",  # digits are tokens, as there
        "tokens": tokens,
        "token_type": [
            int(TokenType.CONTROL if token.startswith("<|") else TokenType.NORMAL) for token in tokens
        ],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "add_bos_token": False,
    }
    template = (bundled_folder("target") / "chat_template.jinja").read_text("utf-8")
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items()} | {
        "tokenizer.chat_template": template
    }
