"""Each kind of drafter is recognised, and one that cannot be or does not fit is refused in one line that says
what to do."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from flowspec.draft.language import LanguageKind, LanguageModelDrafter
from flowspec.draft.lookup import LookUpDrafter, Ngram, Suffix
from flowspec.draft.registry import (
    BY_WORD,
    KINDS,
    WITHOUT_TENSORS,
    WORDS,
    find_drafter,
    plan_drafter,
)
from flowspec.errors import InputError
from flowspec.model.accelerator import has_driver
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder
from flowspec.model.spec import spec_of
from flowspec.plan.shape import eagle_shape, find_shape, mtp_shape, shape_of
from tests.checkpoints import SMALL, VOCABULARY_SIZE, make_checkpoint, make_variant
from tests.draft.assistants import make_assistant
from tests.draft.blocks import make_block_drafter
from tests.draft.heads import make_head
from tests.ggufs import convert


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(str(make_variant(tmp_path_factory.mktemp("target"), "llama-grouped")))


def small(folder: Path, **shape: Any) -> Path:
    return make_checkpoint(folder, "llama", {**SMALL, "num_hidden_layers": 1, "hidden_size": 32, **shape})


def write_tokenizer(folder: Path, vocabulary: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}), encoding="utf-8")


def refused(name: str, target: ModelFiles, match: str) -> str:
    with pytest.raises(InputError, match=match) as caught:
        find_drafter(name).open(target, "float32", "cpu", context=100)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", [Ngram, Suffix])
def test_a_look_up_proposes_by_the_text(kind: type[Ngram], target: ModelFiles) -> None:
    """Ids that the text has (it knows no others), each once, surest first, the same for the same text."""
    drafters = [find_drafter(kind.word).open(target, "float32", context=9) for _ in range(2)]
    assert isinstance(drafters[0], LookUpDrafter)
    assert isinstance(drafters[1], LookUpDrafter)
    text, again = (drafter.begin() for drafter in drafters)
    for token in (5, 6, 7, 5, 6, 8, 5):
        text.append(token)
        again.append(token)
    for branch in ((), (6,), (6, 7), (4,)):
        found = text.propose(branch, 2)
        assert found == again.propose(branch, 2)
        assert [confidence for _, confidence in found] == sorted(
            (confidence for _, confidence in found), reverse=True
        )
        assert all(0 <= confidence <= 1 for _, confidence in found)
        tokens = [token for token, _ in found]
        assert len(set(tokens)) == len(tokens) <= 2
        assert set(tokens) <= {*text.tokens, *branch}
    other = drafters[0].begin()
    other.append(7)
    assert bool(other.propose((), 2)) == kind.shares_texts, "5 followed a 7 in another text"


def test_the_bundled_drafter_fits_the_bundled_target_only(target: ModelFiles) -> None:
    drafter = find_drafter(BUNDLED).open(ModelFiles(BUNDLED), "bfloat16", "cpu", context=500)
    assert isinstance(drafter, LanguageModelDrafter)
    assert drafter.context == 500
    assert drafter.weight_bytes == 2 * 1_672_128 + 2 * 960, "norms are float32"
    by_folder = find_drafter(str(bundled_folder("draft-math"))).open(
        ModelFiles(BUNDLED), "float32", "cpu", context=5000
    )
    assert (by_folder.context, by_folder.weight_bytes) == (1024, 4 * 1_672_128)
    text = refused(BUNDLED, target, "another tokenizer")
    assert "expected a vocabulary of 300 entries, got 4096" in text
    assert text.endswith("give a drafter trained for the same tokenizer, or --drafter ngram")


def test_a_target_without_an_mtp_layer_is_told_so(target: ModelFiles, tmp_path: Path) -> None:
    start = "--drafter mtp: expected a model whose checkpoint has a layer that guesses ahead"
    text = refused("mtp", target, "has none that FlowSpec reads; give another --drafter$")
    assert text.startswith(start)
    file = convert(small(tmp_path / "small"), tmp_path / "small.gguf")
    refused("mtp", ModelFiles(str(file)), "has none that FlowSpec reads; give another")
    shape = shape_of(spec_of(target.config()), "some")
    with pytest.raises(InputError, match=rf"^{start}.* but 'some' has none"):
        find_drafter("mtp").plan(shape)
    planned = find_drafter("mtp").plan(replace(shape, has_mtp=True))
    assert (planned.name, planned.shape) == ("mtp", mtp_shape(shape))


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    other = ModelFiles(str(small(tmp_path / "target")))
    refused(str(make_head(tmp_path / "head")), other, "hidden_size 32")


@pytest.mark.parametrize(
    ("vocabulary", "match"),
    [
        ({f"t{n}": n + (n > 5) for n in range(290)}, "expected 't6' as id 6, got None"),
        ({f"t{n}" if n != 17 else "x": n for n in range(290)}, "expected 't17' as id 17, got 'x'"),
        ([[f"t{n}", -1.0] for n in range(200)], "expected a vocabulary of 290 entries, got 200"),
        ([3], "tokenizer.json: expected a vocabulary"),
        (None, "tokenizer.json: expected a vocabulary"),
    ],
)
def test_tokenizers_that_differ_are_refused_by_name(tmp_path: Path, vocabulary: Any, match: str) -> None:
    folder = make_variant(tmp_path / "target", "llama-grouped")
    drafter = small(tmp_path / "drafter")
    write_tokenizer(folder, [[f"t{n}", -1.0] for n in range(290)])
    write_tokenizer(drafter, vocabulary)
    refused(str(drafter), ModelFiles(str(folder)), match)


def stated(texts: list[str], special: int) -> dict[str, Any]:
    """The metadata of a GGUF file with these tokens, the last ones special."""
    kinds = [1] * (len(texts) - special) + [3] * special
    return {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": kinds}


def test_vocabularies_are_compared_whatever_files_they_come_in(tmp_path: Path) -> None:
    """Special tokens may have other names, and a file may leave places free."""
    texts = [f"t{n}" for n in range(290)]
    folder = make_variant(tmp_path / "target", "llama-grouped")
    added = [{"id": token, "content": f"<{token}>"} for token in (0, 290, 291)]
    content = {"model": {"vocab": dict(zip(texts, range(290), strict=True))}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    checkpoint = small(tmp_path / "drafter")
    named = ["<bos>", *texts[1:], *(f"[PAD{token}]" for token in range(290, VOCABULARY_SIZE))]
    one = convert(checkpoint, tmp_path / "one.gguf", metadata=stated(named, 10))
    two = convert(
        make_variant(tmp_path / "b", "llama-grouped"), tmp_path / "two.gguf", metadata=stated(named, 12)
    )
    other = convert(checkpoint, tmp_path / "other.gguf", metadata=stated([*named[:17], "x", *named[18:]], 10))
    for drafter, model in ((one, folder), (one, two)):
        assert (
            find_drafter(str(drafter)).open(ModelFiles(str(model)), "float32", "cpu", context=100) is not None
        )
    for model in (folder, two):
        refused(str(other), ModelFiles(str(model)), "expected 't17' as id 17, got 'x'")
    less = convert(checkpoint, tmp_path / "less.gguf", metadata=stated(named[:200], 0))
    refused(str(less), ModelFiles(str(folder)), "expected a vocabulary of 290 entries, got 200")
    (folder / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": [3]}))
    refused(str(one), ModelFiles(str(folder)), r"tokenizer\.json: expected added_tokens with ids")


def test_what_is_no_drafter_is_refused(target: ModelFiles, tmp_path: Path) -> None:
    text = refused(str(tmp_path / "missing"), target, "there is no folder")
    assert text.startswith("--drafter: expected bundled, ngram, ")
    assert f"bundled, {', '.join(WORDS)}, one of block, draft, " in text
    refused("n-gram", target, "--drafter: expected bundled, ngram")
    refused(str(tmp_path), target, "has no config.json")
    small(tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    refused(str(tmp_path / "other"), target, "family 'gpt2'")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    (tmp_path / "other" / "model.safetensors").unlink()
    refused(str(tmp_path / "other"), target, "model.safetensors")


def test_what_has_no_tensors_needs_no_torch() -> None:
    code = (
        "import sys; from flowspec.draft.registry import find_drafter; "
        f"[find_drafter(word).open(None, 'float32', context=9) for word in {WITHOUT_TENSORS[:-1]}]; "
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


@pytest.mark.skipif(has_driver(), reason="torch is imported for the GPU")
def test_what_has_tensors_is_loaded_without_torch() -> None:
    code = (
        "import sys; from flowspec.draft.registry import find_drafter; "
        "from flowspec.model.files import ModelFiles; target = ModelFiles('bundled'); "
        "names = ('bundled', 'eagle', 'eagle3', 'block'); "
        "[find_drafter(name).open(target, 'bfloat16', context=90) for name in names]; "
        "is_class = lambda name: name.startswith('transformers.models.') and '.modeling_' in name; "
        "print([name for name in sys.modules if name == 'torch' or is_class(name)])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_every_kind_is_found_by_its_word_or_its_files(tmp_path: Path) -> None:
    assistant, block = make_assistant(tmp_path / "assistant"), make_block_drafter(tmp_path / "block")
    names = [*(kind.word for kind in BY_WORD), str(assistant), str(block), "eagle", BUNDLED]
    assert [type(find_drafter(name)) for name in names] == list(KINDS)
    placed = [find_drafter(name).model_for_device(ModelFiles(BUNDLED)) is not None for name in names]
    assert [kind for kind, is_placed in zip(KINDS, placed, strict=True) if is_placed] == [LanguageKind], (
        "a device loads a whole model, and nothing else"
    )


@pytest.mark.parametrize("name", ["eagle3", "block"])
def test_the_planner_reckons_with_the_weights_that_files_have(name: str) -> None:
    """All matrices but the lookups, and the target's `lm_head` where the files have none."""
    shape = shape_of(spec_of(ModelFiles(BUNDLED).config()), "bundled")
    (path,) = bundled_folder(name).glob("*.safetensors")
    sizes = {key: each.shape for key, each in load_file(path).items() if each.ndim == 2}
    lookups = ("embed_tokens.weight", "markov_head.markov_w1.weight", "confidence_head.proj.weight")
    read = sum(math.prod(size) for key, size in sizes.items() if key not in lookups)
    if "lm_head.weight" not in sizes:
        read += shape.head_params
    planned = find_drafter(name).plan(shape)
    assert planned.shape is not None
    assert planned.shape.params == read
    assert planned.shape != eagle_shape(shape)


def test_the_planner_reckons_with_files_as_with_shapes() -> None:
    shape = shape_of(spec_of(ModelFiles(BUNDLED).config()), "bundled")
    by_files, by_shape = find_drafter("eagle").plan(shape), plan_drafter("eagle", shape)
    assert by_files == by_shape
    assert by_shape.shape == eagle_shape(shape)
    with pytest.raises(InputError, match="expected the model's vocabulary of 4096, but qwen3-4b has 151936"):
        plan_drafter("qwen3-4b", shape)
    padded = replace(find_shape("qwen3-4b"), vocabulary=152_064)
    assert plan_drafter("qwen3-0.6b", padded).shape == find_shape("qwen3-0.6b"), (
        "one vocabulary, padded differently"
    )
