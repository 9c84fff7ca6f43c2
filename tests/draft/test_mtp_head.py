"""MTP layers from files in the published layouts: their logits are those of the published code, over the
model's own features, and answers that they guess for are exact."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flowspec.bench.checkpoints import VOCABULARY_SIZE, make_variant
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.head import HeadCore
from flowspec.core.methods import make_method
from flowspec.core.protocol.messages import Proposal, Sampling, Segment
from flowspec.draft.eagle import EagleDrafter
from flowspec.draft.mtp_files import has_mtp
from flowspec.draft.mtp_head import MtpHead
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.plan.memory import drafter_memory
from flowspec.plan.shape import mtp_shape, shape_of
from flowspec.runtime.planning.plan_inputs import counted_weights
from tests.draft.mtp import SHARDS, VARIANTS, Published, Weights, make_mtp, read, write
from tests.draft.trees import BRANCHES, PARENTS, Teller, segment, tree_batch
from tests.ggufs import convert as convert_to_gguf
from tests.model.slices import CPU, load_stages, pipeline
from tests.pipeline import Pipeline, ask
from tests.prequantised import convert

HIDDEN, WIDTH = 64, 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: make_mtp(tmp_path_factory.mktemp(name), name) for name in VARIANTS}
    made["qwen3.5-tied"] = make_mtp(tmp_path_factory.mktemp("tied"), "qwen3.5", tie_word_embeddings=True)
    made["glm4-moe-own"] = make_mtp(tmp_path_factory.mktemp("own"), "glm4-moe", own_ends=True)
    return made


NAMES = (*VARIANTS, "qwen3.5-tied", "glm4-moe-own")


def load(folder: Path, dtype: str = "float32") -> MtpHead:
    return MtpHead.load(ModelFiles(str(folder)), dtype, CPU)


def run(
    head: MtpHead, tokens: torch.Tensor, features: torch.Tensor, parents: Sequence[int], *ends: int
) -> torch.Tensor:
    """Predicted features of a tree's rows, in jobs that end with these."""
    cache, first, found = head.new_cache(64), 0, []
    for end in ends:
        batch, positions = tree_batch(cache, parents, first, end)
        found.append(head.run(tokens[first:end], features[first:end], positions, batch))
        first = end
    return torch.cat(found)


def some_input(rows: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY_SIZE, (rows,), generator=generator)
    return tokens, torch.randn(rows, HIDDEN, generator=generator)


# --------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_is_what_the_published_code_computes(name: str, folders: dict[str, Path]) -> None:
    head = load(folders[name])
    (tokens, features), chain = some_input(), range(-1, 8)
    expected, logits = Published(folders[name])(tokens, features)
    found = run(head, tokens, head.project(features), chain, 9)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(head.logits(found), logits, atol=2e-5, rtol=1e-5)
    assert head.logits(found).dtype == torch.float32
    layers = ModelFiles(str(folders[name])).raw_config()["num_hidden_layers"]
    assert (head.capture, head.hidden_size, head.target_ids()) == ((layers,), HIDDEN, None)


@pytest.mark.parametrize("name", ["qwen3.5-text", "qwen3.5-moe", "glm4-moe", "glm4-moe-own"])
def test_a_layer_in_a_gguf_file_is_that_of_the_checkpoint(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Also in a file that calls a layer's matrices as llama.cpp does, and counts it among its blocks."""
    path = convert_to_gguf(folders[name], tmp_path / "m.gguf")
    files, whole = ModelFiles(str(path)), ModelFiles(str(folders[name])).config()
    assert files.config().num_hidden_layers == whole.num_hidden_layers
    assert has_mtp(files, files.config())
    head = MtpHead.load(files, "float32", CPU)
    tokens, features = some_input()
    expected, logits = Published(folders[name])(tokens, features)
    found = run(head, tokens, head.project(features), range(-1, 8), 9)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(head.logits(found), logits, atol=2e-5, rtol=1e-5)


def test_a_layer_in_a_gguf_file_stays_packed(folders: dict[str, Path], tmp_path: Path) -> None:
    path = convert_to_gguf(folders["glm4-moe-own"], tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    head = MtpHead.load(ModelFiles(str(path)), "gguf", CPU)
    tokens, features = some_input()
    _, expected = Published(folders["glm4-moe-own"])(tokens, features)
    logits = head.logits(run(head, tokens, features, range(-1, 8), 9))
    assert float((logits - expected).std() / expected.std()) < 0.06
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
            MtpHead.load(ModelFiles(str(path)), "float32", CPU)
        assert "\n" not in str(caught.value)
    unsaid = {"qwen35.block_count": 7, "qwen35.nextn_predict_layers": 0}
    path = convert_to_gguf(folders["qwen3.5-text"], tmp_path / "m.gguf", metadata=unsaid)
    with pytest.raises(InputError, match=r"holds blk\.6\..*: it is of another architecture"):
        ModelFiles(str(path)).tensors()  # as a layer of the model it would change every answer


def test_a_tree_in_two_jobs_is_every_branch_alone(folders: dict[str, Path]) -> None:
    for name in ("qwen3.5", "glm4-moe"):
        tokens, features = some_input()
        found = run(load(folders[name]), tokens, features, PARENTS, 4, 9)
        for path in BRANCHES:
            expected, _ = Published(folders[name])(tokens[path], features[path])
            torch.testing.assert_close(found[path], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_the_bits_of_a_row_do_not_depend_on_what_runs_beside_it(dtype: str, folders: dict[str, Path]) -> None:
    for name in ("qwen3.5", "glm4-moe"):
        head, (tokens, features) = load(folders[name], dtype), some_input()
        together = run(head, tokens, features, range(-1, 8), 9)
        alone = run(head, tokens, features, range(-1, 8), *range(1, 10))
        assert torch.equal(together, alone)
        assert torch.equal(head.logits(together)[4], head.logits(together[4:5])[0])
        assert head.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)


def test_packed_layers_are_near_the_published_code(folders: dict[str, Path], tmp_path: Path) -> None:
    """In precisions that pack while loading, and as another tool packed a checkpoint."""
    for name in ("qwen3.5-text", "qwen3.5-moe", "glm4-moe"):
        tokens, features = some_input()
        _, expected = Published(folders[name])(tokens, features)
        for dtype, most in (("bfloat16", 0.05), ("int8", 0.06), ("int4", 0.5)):
            found = load(folders[name], dtype)
            logits = found.logits(run(found, tokens, features, range(-1, 8), 9))
            assert float((logits - expected).std() / expected.std()) < most, (name, dtype)
    whole = tmp_path / "whole"
    whole.mkdir()
    one_file(folders["qwen3.5-text"], whole)
    packed = load(convert(whole, tmp_path / "gptq", "gptq"), "gguf")
    tokens, features = some_input()
    _, expected = Published(folders["qwen3.5-text"])(tokens, features)
    logits = packed.logits(run(packed, tokens, features, range(-1, 8), 9))
    assert float((logits - expected).std() / expected.std()) < 0.5
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
    drafter = EagleDrafter(load(folders[name]), files, context=200)
    slices = load_stages(folders[name], 3)
    for part in slices:
        part.captures = drafter.captures
    features: dict[int, torch.Tensor] = {}
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


def read_features(stages: Any, features: dict[int, torch.Tensor], text: list[int]) -> None:
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


def pipeline_with(
    drafter: EagleDrafter | Recorder, slices: list[Slice], method: str, *, seed: int, width: int = 3
) -> Pipeline:
    """Stages whose features go to a drafter."""
    for part in slices:
        part.captures = drafter.captures
    made = make_method(method, nodes=8, depth=3, width=width)
    traits = [DrafterTraits(context=200, needs_features=True)]
    head = HeadCore(context=200, stage_count=len(slices), method=made, drafters=traits)
    stages = pipeline(slices, head, [drafter])
    stages.rng = random.Random(seed)
    return stages


class Recorder:
    """A drafter whose guesses are remembered, each with the token that it is below."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self.drafter = drafter
        self.guesses: list[tuple[int, int]] = []
        self._tokens: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def draft(self, sent: Segment, width: int) -> tuple[Proposal, ...]:
        for part in sent.parts:
            self._tokens |= zip(part.ids, part.tokens, strict=True)
        found = self.drafter.draft(sent, width)
        self.guesses += [(self._tokens[each.node], each.tokens[0]) for each in found]
        return found


def make_cycle(folder: Path, variant: str, reads: str) -> list[int]:
    """A model in which a token follows from the one before it, round and round, whose MTP layer goes by the
    token alone or by the feature alone; the order of tokens. Layers add nothing, and the embedding is one
    axis for each token."""
    size = 48
    make_mtp(folder, variant, vocab_size=size)
    order = [int(each) for each in np.random.default_rng(2).permutation(size)]
    after = dict(zip(order, [*order[1:], order[0]], strict=True))
    layers, ends, mtp = read(folder)
    axes = 6 * torch.eye(size, HIDDEN)
    turn = torch.zeros(HIDDEN, HIDDEN)  # to the axis of the token that follows
    for token, then in after.items():
        turn[then, token] = 1
    for name in ends:
        if name.endswith("embed_tokens.weight"):
            ends[name] = axes
    ends["lm_head.weight"] = axes @ turn  # [token that follows, axis]
    for part in (layers, mtp):
        for name, values in part.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                values.zero_()
            if name.endswith(("fc.weight", "eh_proj.weight")):
                none = torch.zeros(HIDDEN, HIDDEN)
                halves = [torch.eye(HIDDEN), none] if reads == "token" else [none, turn]
                part[name] = torch.cat(halves, dim=1).contiguous()
    write(folder, (layers, ends, mtp))
    return order


@pytest.mark.parametrize("reads", ["token", "feature"])
@pytest.mark.parametrize("variant", ["qwen3.5", "glm4-moe"])
def test_where_a_guess_must_be_right_every_guess_is(variant: str, reads: str, tmp_path: Path) -> None:
    """The token after the next one follows from the next token, and from the feature of the one before it; a
    token or a feature too early or too late would make all guesses wrong."""
    order = make_cycle(tmp_path, variant, reads)
    drafter = Recorder(EagleDrafter(load(tmp_path), ModelFiles(str(tmp_path)), context=200))
    stages = pipeline_with(drafter, load_stages(tmp_path, 3), "continuous", seed=1, width=1)
    stages.give(ask(1, order[:4], 30))
    stages.settle()
    assert stages.answers[1] == order[4:34]
    after = dict(zip(order, [*order[1:], order[0]], strict=True))
    assert len(drafter.guesses) > 25
    assert [(token, guess) for token, guess in drafter.guesses if after[token] != guess] == []
    statistics = stages.ends[1].statistics
    assert statistics.tokens_in_flight > 20


# --------------------------------------------------------------------------------------------- what is loaded


def test_no_tensor_of_the_models_layers_is_read(folders: dict[str, Path], tmp_path: Path) -> None:
    files = ModelFiles(str(make_mtp(tmp_path, "qwen3.5")))
    (tmp_path / SHARDS[0]).unlink()
    ends, mtp = (load_file(tmp_path / shard) for shard in SHARDS[1:])
    own = sum(values.numel() for values in mtp.values())
    both = sum(values.numel() for name, values in ends.items() if "embed_tokens" in name or "lm_head" in name)
    assert MtpHead.load(files, "float32", CPU).weight_bytes == 4 * (own + both)
    shape = shape_of(files.config(), "m", has_mtp=True)
    planned = drafter_memory(mtp_shape(shape), "float32", context=100, users=1)
    assert 0.99 < planned.weight_bytes / (4 * (own + both)) <= 1, "all but norms"
    tied = load(folders["qwen3.5-tied"])
    assert tied.weight_bytes == 4 * (own + VOCABULARY_SIZE * HIDDEN)
    assert tied.slot_bytes == 4 * (2 * 2 * 24 + HIDDEN)


def changed(folder: Path, variant: str, drop: str = "", add: Weights | None = None, **config: Any) -> Path:
    make_mtp(folder, variant, **config)
    layers, ends, mtp = read(folder)
    kept = {name: values for name, values in mtp.items() if not drop or not name.startswith(drop)}
    write(folder, (layers, ends, kept | (add or {})))
    return folder


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("qwen3.5", {"drop": "mtp."}, r"holds no tensor mtp\.\*; give another --drafter$"),
        ("glm4-moe", {"drop": "model.layers.4."}, r"holds no tensor model\.layers\.4\.\*; give another"),
        ("qwen3.5", {"drop": "mtp.fc."}, r"has no tensor mtp\.fc\.weight"),
        ("glm4-moe", {"drop": "model.layers.4.shared_head."}, r"no tensor model\.layers\.4\.shared_head\."),
        (
            "qwen3.5-moe",
            {"drop": "mtp.layers.0.mlp.experts.3."},
            r"no tensor mtp\.layers\.0\.mlp\.exp.*\.3",
        ),
        (
            "qwen3.5",
            {"add": {"mtp.layers.1.input_layernorm.weight": torch.ones(HIDDEN)}},
            r"holds mtp\.layers\.1\.input_layernorm\.weight, for which .* has no place",
        ),
        ("qwen3.5", {"add": {"mtp.gain": torch.ones(3)}}, r"holds mtp\.gain, for which .* has no place"),
        (
            "qwen3.5",
            {"add": {"mtp.fc.weight": torch.ones(HIDDEN, HIDDEN)}},
            r"tensor mtp\.fc\.weight of .*: expected shape \[64, 128\] by config.json, got \[64, 64\]",
        ),
        (
            "qwen3.5",
            {"mtp_num_hidden_layers": 2},
            r"has 2 by its config\.json \(mtp_num_hidden_layers\), of which FlowSpec runs 1; give another",
        ),
        (
            "qwen3.5",
            {"mtp_use_dedicated_embeddings": True},
            r"\(mtp_use_dedicated_embeddings\); give",
        ),
    ],
)
def test_what_is_no_such_layer_is_refused(
    variant: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load(changed(tmp_path, variant, **change))
    assert "\n" not in str(caught.value)


def test_a_config_without_the_number_means_the_layer_that_is_there(tmp_path: Path) -> None:
    """As in vLLM."""
    make_mtp(tmp_path, "qwen3.5")
    whole = json.loads((tmp_path / "config.json").read_text())
    del whole["text_config"]["mtp_num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert load(tmp_path).capture == (6,)


def test_a_stage_is_not_planned_with_the_layer_behind_the_last_one(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Which in GLM-4.5 has copies of embedding and `lm_head`."""
    with_mtp, without = (
        ModelFiles(str(each)) for each in (folders["glm4-moe-own"], make_variant(tmp_path, "glm4-moe"))
    )
    shape = shape_of(without.config(), "m")
    assert counted_weights(with_mtp, shape) == counted_weights(without, shape)
    assert [has_mtp(files, files.config()) for files in (with_mtp, without)] == [True, False]
