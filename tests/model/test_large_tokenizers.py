"""Files of a tokenizer are refused by their size, before a library that takes a hundred times as much memory
reads them."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from pathlib import Path

import pytest

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.text import Tokenizer

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
)


@pytest.mark.parametrize(
    "name", [*NAMES, "special_tokens_map.json", "chat_template.jinja", "spiece.model", "tekken.json"]
)
def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled_folder("target"), folder)
    with (folder / name).open("ab") as file:
        file.truncate(limits.JSON_BYTES_MAX + 1)
    Tokenizer(ModelFiles(str(bundled_folder("target"))))  # the libraries' own code is not counted
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=rf"{name}: expected at most 64 MiB, got 65") as caught:
            Tokenizer(ModelFiles(str(folder)))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_files_that_are_no_tokenizers_may_be_as_large_as_they_like(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled_folder("target"), folder)
    for name in ("measurements.json", "model.safetensors"):
        with (folder / name).open("ab") as file:
            os.truncate(file.fileno(), limits.JSON_BYTES_MAX + 1)
    assert Tokenizer(ModelFiles(str(folder))).encode("2")
