"""An assistant of Gemma 4 guesses as its publisher's code does, and as a drafter draws on the target's keys
of the committed text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4TextConfig, Gemma4UnifiedTextConfig

from flowspec.core.protocol.messages import Sampling
from flowspec.draft.feature_drafter import SharedKeysDrafter
from flowspec.draft.feature_kinds import Assistant
from flowspec.draft.ranking import F32
from flowspec.draft.registry import check_drafter, find_drafter
from flowspec.errors import InputError
from flowspec.model.attention import TreeBatch, TreeRows
from flowspec.model.files import ModelFiles
from flowspec.model.spec import spec_of
from flowspec.plan.shape import shape_of
from tests.checkpoints import SMALL, VOCABULARY_SIZE, make_variant
from tests.draft.assistants import make_assistant
from tests.draft.blocks import DATA
from tests.draft.mirrors import WIDTH, check, draft, grow, load_assistant, make_case
from tests.draft.trees import segment

HIDDEN = SMALL["hidden_size"]
OF_SOURCES = ("input_layernorm", "self_attn.k_proj", "self_attn.k_norm", "self_attn.v_proj")
"""What of a target's layer makes its keys and values."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(str(make_variant(tmp_path_factory.mktemp("target"), "gemma4")))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(str(make_assistant(tmp_path_factory.mktemp("assistant"))))


# ------------------------------------------------------------------------- beside the publisher's own code


def sharing_modes(config: Any) -> list[str | None]:
    """As of transformers 5.24; those before, from 5.20 on, can neither build an assistant nor have a target
    without shared layers store what one reads."""
    count, shared = config.num_hidden_layers, config.num_kv_shared_layers
    if shared == count:
        return ["reuse"] * count
    own = config.layer_types[: count - shared]
    last = {kind: layer for layer, kind in enumerate(own)}
    modes = ["store" if last[kind] == layer else None for layer, kind in enumerate(own)]
    return [*modes, *["reuse"] * shared]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
        if hasattr(config, "kv_sharing_modes"):
            monkeypatch.setattr(config, "kv_sharing_modes", property(sharing_modes))


def guesses_of_transformers(folder: str, target: ModelFiles, text: torch.Tensor, count: int) -> torch.Tensor:
    """Logits `[count, vocabulary]` of the guesses behind a text, each guess the best of the last."""
    config = AutoConfig.from_pretrained(folder)
    assistant = AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    model = AutoModelForCausalLM.from_pretrained(target.model, dtype=torch.float32).eval()
    decoder = model.model.language_model if hasattr(model.model, "language_model") else model.model
    with torch.inference_mode():
        seen = decoder(text[None, :-1], output_hidden_states=True, return_shared_kv_states=True)
        hidden, token, found = seen.hidden_states[-1][:, -1:], text[None, -1:], []
        for _ in range(count):
            given = torch.cat([decoder.embed_tokens(token), hidden], dim=-1)
            output = assistant(
                inputs_embeds=given,
                position_ids=torch.tensor([[len(text) - 1]]),
                shared_kv_states=dict(seen.shared_kv_states),
            )
            hidden, token = output.last_hidden_state, output.logits.argmax(dim=-1)
            found.append(output.logits[0, 0])
    return torch.stack(found)


def features_of(target: ModelFiles, captures: tuple[int, ...], text: torch.Tensor) -> F32:
    """`[len(text), hidden * len(captures)]` by transformers."""
    model = AutoModelForCausalLM.from_pretrained(target.model, dtype=torch.float32).eval()
    decoder = model.model.language_model if hasattr(model.model, "language_model") else model.model
    with torch.inference_mode():
        states = decoder(text[None], output_hidden_states=True).hidden_states
    return np.concatenate([states[layer][0].numpy() for layer in captures], axis=-1)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("name", ["gemma4", "gemma4-unified"])
@pytest.mark.usefixtures("published")
def test_guesses_are_those_of_the_publishers_code(name: str, ordered: bool, tmp_path: Path) -> None:
    """Behind a text longer than the window; also where a target's layers share nothing, and its keys are its
    values."""
    target = ModelFiles(str(make_variant(tmp_path / "target", name)))
    folder = make_assistant(tmp_path / "assistant", target=name.replace("-", "_"), ordered=ordered)
    text = torch.randint(0, VOCABULARY_SIZE, (37,), generator=torch.Generator().manual_seed(3))
    expected = guesses_of_transformers(str(folder), target, text, 4)
    head = load_assistant(ModelFiles(str(folder)), target, "float32", "cpu")
    truths = features_of(target, head.captures, text[:-1])
    cache = head.new_cache(64)
    cache.reserve(len(truths))
    head.write(truths[:, : 2 * HIDDEN], np.arange(len(truths)), cache)
    token, feature, place = text[-1:].numpy(), truths[-1:, 2 * HIDDEN :], np.array([len(text) - 1])
    keys = np.arange(len(truths), dtype=np.int32)
    for logits in expected.numpy():
        rows = TreeRows(cache, 0, place, place, keys, keys[None] < place[:, None])
        hidden, feature = head.run(token, feature, TreeBatch([rows]))
        found = head.logits(hidden)[0]
        is_scored = found > np.finfo(np.float32).min
        assert int(is_scored.sum()) == (VOCABULARY_SIZE * 3 // 20 if ordered else VOCABULARY_SIZE)
        np.testing.assert_allclose(found[is_scored], logits[is_scored], rtol=1e-4, atol=1e-4)
        token = logits.argmax()[None]


# ------------------------------------------------------------------------------------------- as a drafter


def test_guesses_stand_behind_what_is_known_and_the_root_is_ranked_again(tmp_path: Path) -> None:
    case = make_case("assistant", tmp_path)
    drafter, mirror = case.new_drafter(), case.new_mirror(1, Sampling(temperature=0.8, seed=5))
    teller = mirror.teller
    teller.begin([3, 5, 8, 13, 21])
    mirror.tell_path(drafter)
    draft(drafter, mirror, [teller.root])
    first = grow(teller, teller.root, 2)
    draft(drafter, mirror, first)
    second = grow(teller, first[0], 2)
    draft(drafter, mirror, second)
    mirror.tell(drafter, [teller.root])  # the target has run the root: its child is drawn
    teller.commit(first[0])
    (third,) = grow(teller, second[1], 1)
    expected = mirror.expected([third, first[0]])  # the first of what was predicted before the root was known
    check(mirror, drafter.draft(segment(teller.part([third])), WIDTH), expected)


# ------------------------------------------------------------------------------------------- what it takes


def test_it_is_found_reckoned_and_opened(files: ModelFiles, target: ModelFiles) -> None:
    kind = find_drafter(files.model)
    assert isinstance(kind, Assistant)
    check_drafter(files.model)
    reckoned = kind.plan(shape_of(spec_of(target.config()), "target"))
    assert reckoned.shape is not None
    assert (reckoned.shape.layers, reckoned.shape.hidden) == (3, 32)
    drafter = find_drafter(files.model).open(target, "bfloat16", "cpu", context=100)
    assert isinstance(drafter, SharedKeysDrafter)
    assert drafter.captures == (2, 3, 7)
    head = drafter._model
    assert head.slot_bytes == 2 * (HIDDEN + 2 * 2 * 24 + 2 * 2 * 40)
    read = [f"layers.{layer}.{part}.weight" for layer in (2, 3) for part in OF_SOURCES]
    own, of_target = (load_file(Path(each.model) / "model.safetensors") for each in (files, target))
    held = [each for each in own.values() if each.is_floating_point() and each.numel() > 1]
    held += [each for name, each in of_target.items() if name.endswith(tuple(read))]
    numbers = [each.numel() * (1 if each.dim() > 1 else 2) for each in held]  # norms are float32
    assert len(numbers) == len(own) - 4 + len(read), "all but the tokens' order and three numbers"
    assert drafter.weight_bytes == 2 * sum(numbers)


@pytest.mark.parametrize(("message", "changes"), DATA["refused assistants"], ids=lambda each: str(each)[:30])
def test_what_does_not_fit_is_refused_in_a_line(
    message: str, changes: dict[str, Any], target: ModelFiles, tmp_path: Path
) -> None:
    folder = make_assistant(tmp_path / "assistant", **changes)
    with pytest.raises(InputError) as refusal:
        find_drafter(str(folder)).open(target, "float32", "cpu", context=100)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_another_familys_target_is_refused(files: ModelFiles, tmp_path: Path) -> None:
    llama = ModelFiles(str(make_variant(tmp_path, "llama-grouped")))
    with pytest.raises(InputError, match="expected --model to be one, got a model of llama"):
        find_drafter(files.model).open(llama, "float32", "cpu", context=100)
