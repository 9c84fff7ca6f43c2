"""Tokenizers and chat templates that mean harm or were damaged: each is loaded and used, or refused by one
line, and in bounded time."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.model import text as text_module
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.template import bounded_time
from flowspec.model.text import TextStream, Tokenizer, recommended
from tests.mutations import mutants, one_line_at_most

DATA = json.loads((Path(__file__).parents[1] / "data/tokenizers.json").read_text("utf-8"))
MODELS, PARTS, CONFIG, GENERATION = (DATA[name] for name in ("models", "parts", "config", "generation"))
WORDS = tuple(MODELS["BPE"]["vocab"])
QUESTION = [{"role": "user", "content": "hello ll"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(bundled_folder("target") / "config.json", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(bundled_folder("target") / "config.json", made)
    return made


def write(folder: Path, tokenizer: Any = None, config: Any = None, template: str | None = None) -> None:
    (folder / "tokenizer.json").write_text(
        json.dumps({**PARTS, "model": MODELS["BPE"]} if tokenizer is None else tokenizer)
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG if config is None else config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_bytes(template.encode("utf-8", "surrogatepass"))


def use(folder: Path) -> list[int]:
    """All that is ever done with a tokenizer."""
    tokenizer = Tokenizer(ModelFiles(str(folder)))
    ids = tokenizer.encode("hello lol Ah\u00e9 77")
    assert tokenizer.eos_id is None or tokenizer.eos_id >= 0
    if tokenizer.has_chat_template:
        tokenizer.encode_chat(QUESTION)
    tokenizer.decode(list(range(len(WORDS) + 2)))
    stream = TextStream(tokenizer, ["lo"])
    assert stream.push(ids) + stream.finish() == stream.text
    return ids


@pytest.mark.parametrize("kind", MODELS)
def test_each_kind_is_loaded_and_used_whole(kind: str, folder: Path) -> None:
    write(folder, {**PARTS, "model": MODELS[kind]})
    ids = use(folder)
    assert len(ids) > 6, "neither truncation nor padding is done, whatever the file says"
    assert ids[-1] == 1


@given(st.sampled_from([*MODELS.values()]).flatmap(lambda model: mutants({**PARTS, "model": model})))
def test_any_tokenizer_is_used_or_refused(shared: Path, tokenizer: Any) -> None:
    write(shared, tokenizer)
    with one_line_at_most():
        use(shared)


@given(mutants(CONFIG))
def test_any_config_of_a_tokenizer_is_used_or_refused(shared: Path, config: Any) -> None:
    write(shared, config=config)
    with one_line_at_most():
        use(shared)


@given(mutants(GENERATION))
def test_any_generation_config_is_read_or_refused(shared: Path, content: Any) -> None:
    (shared / "generation_config.json").write_text(json.dumps(content))
    with one_line_at_most():
        recommended(ModelFiles(str(shared)), SimpleNamespace())
    (shared / "generation_config.json").unlink()


@given(
    st.binary(max_size=60),
    st.sampled_from(["tokenizer.json", "tokenizer_config.json", "generation_config.json"]),
)
@example(b"[" * 100_000, "tokenizer.json")
@example(b'{"a":' * 100_000, "tokenizer_config.json")
def test_any_bytes_are_used_or_refused(shared: Path, content: bytes, name: str) -> None:
    write(shared)
    (shared / name).write_bytes(content)
    with one_line_at_most():
        use(shared)
        recommended(ModelFiles(str(shared)), SimpleNamespace())
    (shared / name).unlink()


def test_a_panic_of_the_tokenizers_library_is_one_line(folder: Path) -> None:
    """Found by mutation: merges shorter than the prefix that they must begin with. What PyO3 raises is no
    `Exception`."""
    write(folder, {**PARTS, "model": {**MODELS["BPE"], "continuing_subword_prefix": "<unk>"}})
    with pytest.raises(InputError, match=r"^the tokenizer of .* is broken: ") as caught:
        use(folder)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_fails_in_use_is_one_line(folder: Path) -> None:
    write(folder, {"version": "1.0", "model": {**MODELS["WordLevel"], "unk_token": "none"}})
    tokenizer = Tokenizer(ModelFiles(str(folder)))
    with pytest.raises(InputError, match=r"^the tokenizer of .* is broken: WordLevel error"):
        tokenizer.encode("what?")


@pytest.mark.parametrize("length", ["64", [1], -5, 1e400])
def test_the_longest_text_that_a_tokenizer_names_is_not_asked_for(length: Any, folder: Path) -> None:
    """Found by mutation: a length that is no number was compared with one, and ended in a traceback."""
    write(folder, config={**CONFIG, "model_max_length": length})
    assert use(folder)


# ----------------------------------------------------------------------------------------------- chat
# templates

PIECES = st.sampled_from([*DATA["template pieces"], "\ud800", "\x1b[2J"])


@given(st.lists(PIECES, max_size=6).map("".join) | st.text(max_size=30))
def test_any_chat_template_is_used_or_refused(shared: Path, template: str) -> None:
    write(shared, template=template)
    with one_line_at_most():
        use(shared)


def asked(folder: Path, template: str) -> list[int]:
    write(folder, template=template)
    return Tokenizer(ModelFiles(str(folder))).encode_chat(QUESTION)


def test_a_refusal_is_one_line_that_leaves_the_terminal_alone(folder: Path) -> None:
    with pytest.raises(InputError, match=r"refuses this dialogue: no\?\[2J$"):
        asked(folder, "{{ raise_exception('no\x1b[2J\\nmore') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{{ range(100000)|list|length }}{% endfor %}",
        "{% macro f() %}{% for i in range(100000) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
    ],
)
def test_a_chat_template_without_end_is_ended(
    template: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "bounded_time", lambda: bounded_time(0.05))
    tracing = sys.gettrace()
    with pytest.raises(
        InputError,
        match=r"refuses this dialogue: (it was not done within 0\.05 s|maximum recursion depth exceeded)",
    ):
        asked(folder, template)
    assert sys.gettrace() is tracing


def test_a_chat_template_that_makes_too_much_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PROMPT_CHARS_MAX", 1000)
    with pytest.raises(InputError, match="makes 1001 characters of this dialogue, expected at most 1000"):
        asked(folder, "{{ 'h' * 1001 }}")
    with pytest.raises(InputError, match="refuses this dialogue: "):
        asked(folder, "{{ 'h' * 10 ** 15 }}")
    with pytest.raises(InputError, match="blocks ranges larger than"):
        asked(folder, "{% for i in range(10**9) %}{% endfor %}")


# ------------------------------------------------------------------------------------------ large files

NAMES = "tokenizer.json tokenizer_config.json vocab.json merges.txt added_tokens.json tokenizer.model"


@pytest.mark.parametrize(
    "name", f"{NAMES} special_tokens_map.json chat_template.jinja spiece.model tekken.json".split()
)
def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path, name: str) -> None:
    """By its size, before a library that takes a hundred times as much memory reads it."""
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
