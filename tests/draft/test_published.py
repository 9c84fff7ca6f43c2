"""The table of published drafters has its form, names only what FlowSpec knows, and finds a model by its name
whoever packed it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowspec.draft.kinds import BY_FILES, of_layout
from flowspec.draft.published import drafters_of, table, target_of
from flowspec.model.files import ModelFiles
from flowspec.plan.accepted_length import EAGLE_2_TREE
from flowspec.plan.shape import SHAPES
from tests.ggufs import convert, make

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TARGETS, ROWS = table().targets, table().drafters


def test_no_row_is_there_twice() -> None:
    pairs = [(row.drafter, row.layout, target) for row in ROWS for target in row.targets]
    assert len(set(pairs)) == len(pairs)


def test_rows_say_what_can_be() -> None:
    for row in ROWS:
        assert HUB_ID.fullmatch(row.drafter)
        assert row.targets
        assert set(row.targets) <= {target.model for target in TARGETS}
        assert row.files in (None, "safetensors", "bin")
        assert row.shape is None or (row.layout == "language-model" and row.shape in SHAPES)
        for size in (row.parameters, row.bytes):
            assert size is None or (type(size) is int and 10**7 < size < 10**10)
        assert row.source.startswith("https://")
        for one in row.measured:
            assert one.source.startswith("https://")
            assert one.drafted in (None, EAGLE_2_TREE) or type(one.drafted) is int
            assert one.temperature is None or 0 <= one.temperature <= 1
            assert 1 < one.length < (one.drafted + 1 if isinstance(one.drafted, int) else 8)
            assert (one.share is None) == (one.drafted is None)
            assert one.share is None or 0.3 < one.share < 0.95
    for target in TARGETS:
        assert HUB_ID.fullmatch(target.model)
        assert target.shape is None or target.shape in SHAPES
        assert drafters_of(target), target.model
        assert target_of(target.model) == target, "no two targets have one name"
    run = {layout for kind in BY_FILES for layout in kind.layouts}
    assert {"eagle", "eagle3", "language-model"} <= run & {row.layout for row in ROWS}
    assert of_layout("peagle") is None


@pytest.mark.parametrize(
    ("model", "target"),
    [
        ("unsloth/Qwen3-8B-GGUF/Qwen3-8B-UD-Q4_K_XL.gguf", "Qwen/Qwen3-8B"),
        ("owner/some-name/Qwen3-8B-Q8_0-00001-of-00002.gguf", "Qwen/Qwen3-8B"),
        ("/models/qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B-Base"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "meta-llama/Llama-3.1-8B-Instruct"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "meta-llama/Llama-3.1-8B-Instruct"),
        ("TheBloke/Llama-2-7B-Chat-GGUF", "meta-llama/Llama-2-7b-chat-hf"),
        ("google/gemma-4-12B-it-qat-q4_0-gguf", "google/gemma-4-12B-it"),
        ("owner/Qwen3-8B-of-my-own", None),
        ("", None),
    ],
)
def test_a_model_is_known_by_its_name(model: str, target: str | None) -> None:
    found = target_of(model)
    assert (None if found is None else found.model) == target


def test_another_name_is_known_by_what_its_card_or_file_says(tmp_path: Path) -> None:
    def known(path: Path) -> str | None:
        found = target_of(str(path), ModelFiles(str(path)))
        return None if found is None else found.model

    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert known(folder) is None
    for text, model in (
        ("---\nbase_model: Qwen/Qwen3-4B\n---\n", "Qwen/Qwen3-4B"),
        ("---\nbase_model:\n- x/y\n- Qwen/Qwen3-4B\n---\nMine.\n", "Qwen/Qwen3-4B"),
        *(
            (text, None)
            for text in ("none", "---\nbase_model: 3\n---\n", "---\n- a\n---\n", "---\n: [\n---\n")
        ),
    ):
        (folder / "README.md").write_text(text)
        assert known(folder) == model
    stated = {"general.base_model.0.repo_url": "https://huggingface.co/Qwen/Qwen3-8B"}
    made = make(tmp_path / "made", "llama")
    assert known(convert(made, tmp_path / "mine.gguf", metadata=stated)) == "Qwen/Qwen3-8B"
