"""MTP layers from files in the published layouts: their logits are those of the published code, over the
model's own features."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec.core.head.head import HeadCore
from flowspec.core.protocol.messages import Proposal, Sampling
from flowspec.draft.feature_drafter import CachedChainDrafter
from flowspec.draft.feature_model import FeatureModel
from flowspec.draft.layouts import has_mtp, mtp_layout
from flowspec.draft.ranking import F32
from flowspec.errors import InputError
from flowspec.model.arithmetic.arrays import I64, Array
from flowspec.model.files import ModelFiles
from flowspec.model.spec import spec_of
from flowspec.plan.memory import drafter_memory
from flowspec.plan.shape import mtp_shape, shape_of
from flowspec.runtime.plan_inputs import counted_weights
from tests.checkpoints import VOCABULARY_SIZE, make_variant
from tests.draft.blocks import DATA
from tests.draft.mtp import SHARDS, VARIANTS, Published, make_mtp, read, write
from tests.draft.trees import Teller, chain_batch, segment
from tests.ggufs import convert as convert_to_gguf
from tests.model.slices import load_stages, pipeline
from tests.pipeline import ask
from tests.prequantised import convert

HIDDEN, WIDTH = 64, 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: make_mtp(tmp_path_factory.mktemp(name), name) for name in VARIANTS}
    made["qwen3.5-tied"] = make_mtp(tmp_path_factory.mktemp("tied"), "qwen3.5", tie_word_embeddings=True)
    made["glm4-moe-own"] = make_mtp(tmp_path_factory.mktemp("own"), "glm4-moe", own_ends=True)
    return made


NAMES = (*VARIANTS, "qwen3.5-tied", "glm4-moe-own")


def load(path: Path, dtype: str = "float32") -> FeatureModel:
    files = ModelFiles(str(path))
    return FeatureModel.load(mtp_layout(files), files, dtype, "cpu")


def run(head: FeatureModel, tokens: I64, features: Array, *ends: int) -> Array:
    """Predicted features of a chain, in jobs that end with these rows."""
    cache, first, found = head.new_cache(64), 0, []
    for end in ends or (len(tokens),):
        found.append(head.run(tokens[first:end], features[first:end], chain_batch(cache, first, end))[0])
        first = end
    return np.concatenate(found)


def some_input(rows: int = 9) -> tuple[I64, F32]:
    rng = np.random.default_rng(3)
    return rng.integers(VOCABULARY_SIZE, size=rows), rng.standard_normal((rows, HIDDEN), np.float32)


def published_of(folder: Path, tokens: I64, features: F32) -> tuple[F32, F32]:
    predicted, logits = Published(folder)(torch.from_numpy(tokens), torch.from_numpy(features))
    return predicted.numpy(), logits.numpy()


# --------------------------------------------------------------------------------------------------- parity


def check(head: FeatureModel, folder: Path) -> None:
    tokens, features = some_input()
    expected, logits = published_of(folder, tokens, features)
    found = run(head, tokens, head.project(features))
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(head.logits(found), logits, atol=2e-5, rtol=1e-5)
    assert head.logits(found).dtype == np.float32


def off(head: FeatureModel, folder: Path) -> float:
    """How far its logits are from those of the published code, as a share of what these differ by."""
    tokens, features = some_input()
    _, expected = published_of(folder, tokens, features)
    found = head.logits(run(head, tokens, head.project(features)))
    return float((found - expected).std() / expected.std())


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_is_what_the_published_code_computes(name: str, folders: dict[str, Path]) -> None:
    head = load(folders[name])
    check(head, folders[name])
    layers = ModelFiles(str(folders[name])).raw_config()["num_hidden_layers"]
    assert (head.captures, head.hidden_size, head.target_ids) == ((layers,), HIDDEN, None)


@pytest.mark.parametrize("name", ["qwen3.5-text", "qwen3.5-moe", "glm4-moe", "glm4-moe-own"])
def test_a_layer_in_a_gguf_file_is_that_of_the_checkpoint(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Also in a file that calls a layer's matrices as llama.cpp does, and counts it among its blocks."""
    path = convert_to_gguf(folders[name], tmp_path / "m.gguf")
    files, whole = ModelFiles(str(path)), ModelFiles(str(folders[name])).config()
    assert files.config().num_hidden_layers == whole.num_hidden_layers
    assert has_mtp(files, files.config())
    check(load(path), folders[name])


def test_a_layer_in_a_gguf_file_stays_packed(folders: dict[str, Path], tmp_path: Path) -> None:
    path = convert_to_gguf(folders["glm4-moe-own"], tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    head = load(path, "gguf")
    assert off(head, folders["glm4-moe-own"]) < 0.06
    assert head.weight_bytes < load(folders["glm4-moe-own"], "bfloat16").weight_bytes * 0.6


def test_what_a_gguf_file_has_too_much_or_too_little_of_is_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    table = np.zeros((VOCABULARY_SIZE, HIDDEN), np.float32)
    for given, expected in (
        ({"extra": {"blk.6.nextn.embed_tokens.weight": table}}, "holds blk.6.nextn.embed_tokens.weight, for"),
        ({"drop": ("blk.6.nextn.eh_proj.weight",)}, "has no tensor mtp.fc.weight"),
    ):
        path = convert_to_gguf(folders["qwen3.5-text"], tmp_path / "m.gguf", **given)
        with pytest.raises(InputError, match=re.escape(expected)) as caught:
            load(path)
        assert "\n" not in str(caught.value)
    unsaid = {"qwen35.block_count": 7, "qwen35.nextn_predict_layers": 0}
    path = convert_to_gguf(folders["qwen3.5-text"], tmp_path / "m.gguf", metadata=unsaid)
    with pytest.raises(InputError, match=r"holds blk\.6\..*: it is of another architecture"):
        ModelFiles(str(path)).tensors()  # as a layer of the model it would change every answer


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_the_bits_of_a_row_do_not_depend_on_what_runs_beside_it(dtype: str, folders: dict[str, Path]) -> None:
    for name in ("qwen3.5", "glm4-moe"):
        head, (tokens, features) = load(folders[name], dtype), some_input()
        given = head.project(features)
        together = run(head, tokens, given)
        alone = run(head, tokens, given, *range(1, 10))
        assert np.array_equal(together, alone)
        assert np.array_equal(head.logits(together)[4], head.logits(together[4:5])[0])
        assert head.engine.dtype == ("float32" if dtype == "float32" else "bfloat16")


def test_packed_layers_are_near_the_published_code(folders: dict[str, Path], tmp_path: Path) -> None:
    """While loading, and as another tool packed a checkpoint."""
    whole = tmp_path / "whole"
    whole.mkdir()
    one_file(folders["qwen3.5-text"], whole)
    packed = load(convert(whole, tmp_path / "gptq", "gptq"), "gguf")
    assert off(packed, folders["qwen3.5-text"]) < 0.5
    assert off(load(folders["glm4-moe"], "int4"), folders["glm4-moe"]) < 0.5
    assert packed.weight_bytes < load(whole, "bfloat16").weight_bytes * 0.6


def one_file(folder: Path, to: Path) -> None:
    """The checkpoint without shards, and without the model's layers."""
    _, ends, mtp = read(folder)
    save_file(ends | mtp, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text((folder / "config.json").read_text())


# ------------------------------------------------------------------------------------- positions and features


def best(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    found = logits.softmax(-1).sort(descending=True)
    return found.indices[:WIDTH].tolist(), found.values[:WIDTH].tolist()


def holds(found: Proposal, logits: torch.Tensor) -> bool:
    tokens, shares = best(logits)
    return list(found.tokens) == tokens and np.allclose(found.confidences, shares, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3.5", "glm4-moe"])
def test_guesses_over_a_text_are_those_of_the_published_code(name: str, folders: dict[str, Path]) -> None:
    """Token by token over a text that is given: below each token, and below a guess of the one after it.
    Features come from stages here, and from transformers' model there."""
    text = [int(each) for each in np.random.default_rng(5).integers(3, VOCABULARY_SIZE, 14)]
    plain: Any = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
    with torch.inference_mode():
        states = plain(input_ids=torch.tensor(text)[None], output_hidden_states=True).hidden_states[-1][0]
    published, files = Published(folders[name]), ModelFiles(str(folders[name]))
    drafter = CachedChainDrafter(load(folders[name]), files.spec.vocabulary, context=200)
    slices = load_stages(folders[name], 3)
    for part in slices:
        part.captures = drafter.captures
    features: dict[int, Array] = {}
    stages = pipeline(slices, HeadCore(context=200, stage_count=3))
    read_features(stages, features, text)
    teller = Teller(1, Sampling())
    teller.begin(text[:3])
    checked = 0
    for end in range(3, len(text)):
        for node in teller.path[:-1]:
            drafter.take_features(1, 0, [node], features[len(teller.line(node)) - 1][None])
        (found,) = drafter.draft(segment(teller.part([teller.root], committed=teller.missing())), WIDTH)
        tokens, own = torch.tensor(text[1:end]), states[: end - 1]
        predicted, logits = published(tokens, own)
        assert holds(found, logits[-1])
        shifted = [published(tokens, states[1:end])[1], published(torch.tensor(text[: end - 1]), own)[1]]
        assert not any(holds(found, each[-1]) for each in shifted), "a shift by one is not noticed"
        guess = teller.add(teller.root, found.tokens[0])
        (further,) = drafter.draft(segment(teller.part([guess])), WIDTH)
        longer = torch.cat([tokens, torch.tensor([found.tokens[0]])])
        _, logits = published(longer, torch.cat([own, predicted[-1:]]))
        assert holds(further, logits[-1])
        teller.commit(guess if found.tokens[0] == text[end] else teller.add(teller.root, text[end]))
        checked += 1
    assert checked == 11
    assert files.config().num_hidden_layers == drafter.captures[0]


def read_features(stages: Any, features: dict[int, Array], text: list[int]) -> None:
    """The last stage's features of a text, by position."""
    inner = stages.run_layers

    def run_layers(stage: int, job: Any, payload: Any) -> tuple[Any, ...]:
        rows, states, *rest = inner(stage, job, payload)
        if stage == 2:
            for row, state in zip(rows, states, strict=True):
                features[int(np.concatenate([part.positions for part in job.parts])[row])] = state
        return rows, states, *rest

    stages.run_layers = run_layers
    stages.give(ask(1, text, 1))
    stages.settle()


# --------------------------------------------------------------------------------------------- what is loaded


def test_no_tensor_of_the_models_layers_is_read(folders: dict[str, Path], tmp_path: Path) -> None:
    files = ModelFiles(str(make_mtp(tmp_path, "qwen3.5")))
    (tmp_path / SHARDS[0]).unlink()
    ends, mtp = (load_file(tmp_path / shard) for shard in SHARDS[1:])
    own = sum(values.numel() for values in mtp.values())
    both = sum(values.numel() for name, values in ends.items() if "embed_tokens" in name or "lm_head" in name)
    assert load(tmp_path).weight_bytes == 4 * (own + both)
    shape = shape_of(spec_of(files.config()), "m", has_mtp=True)
    planned = drafter_memory(mtp_shape(shape), "float32", context=100, users=1)
    assert 0.99 < planned.weight_bytes / (4 * (own + both)) <= 1, "all but norms"
    tied = load(folders["qwen3.5-tied"])
    assert tied.weight_bytes == 4 * (own + VOCABULARY_SIZE * HIDDEN)
    assert tied.slot_bytes == 4 * (2 * 2 * 24 + HIDDEN)


def changed(
    folder: Path, variant: str, drop: str = "", add: dict[str, list[int]] | None = None, **config: Any
) -> Path:
    make_mtp(folder, variant, **config)
    layers, ends, mtp = read(folder)
    kept = {name: values for name, values in mtp.items() if not drop or not name.startswith(drop)}
    added = {name: torch.ones(shape) for name, shape in (add or {}).items()}
    write(folder, (layers, ends, kept | added))
    return folder


@pytest.mark.parametrize(("variant", "message", "change"), DATA["refused layers that guess ahead"])
def test_what_is_no_such_layer_is_refused(
    variant: str, message: str, change: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        load(changed(tmp_path, variant, **change))
    assert "\n" not in str(caught.value)


def test_a_stage_is_not_planned_with_the_layer_behind_the_last_one(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Which in GLM-4.5 has copies of embedding and `lm_head`."""
    with_mtp, without = (
        ModelFiles(str(each)) for each in (folders["glm4-moe-own"], make_variant(tmp_path, "glm4-moe"))
    )
    shape = shape_of(spec_of(without.config()), "m")
    assert counted_weights(with_mtp, shape) == counted_weights(without, shape)
    assert [has_mtp(files, files.config()) for files in (with_mtp, without)] == [True, False]
