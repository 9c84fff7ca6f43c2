"""What slices hold and hand on: keys that later layers share, captured states, and what one takes over of
another; wherever a model is cut, the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flowspec.core.stage.events import RunLayers
from flowspec.errors import InputError
from flowspec.model import tensors
from flowspec.model.arithmetic.arrays import Array, Numbers, narrowed
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.tensors import Tensors
from flowspec.model.weights import EMBEDDING, LM_HEAD, Span, arrays_of, held_bytes
from tests.checkpoints import SMALL, VOCABULARY_SIZE, make_checkpoint, make_variant
from tests.model.slices import chain, job_of, load, load_foretold, load_stages, part_of, rewrite

LAYERS = 7
TOKENS = np.arange(3, 90)


def states_through(slices: list[Slice], dead: frozenset[int] = frozenset()) -> Array:
    """What the last slice's layers make of `TOKENS`; rows that are `dead` die in the middle of each slice."""
    rows: tuple[int, ...] = tuple(range(len(TOKENS)))
    states: Any = None
    for part in slices:
        job, in_turn = chain(part, 1, TOKENS), itertools.chain([frozenset[int]()], itertools.repeat(dead))
        if rows != job.rows:  # the dead ones run once more: of a job of their own nothing is known here
            whole = np.zeros((len(TOKENS), states.shape[1]), states.dtype)
            whole[list(rows)] = states
            states = whole
        rows, states = part.forward(job, states, partial(next, in_turn))
    return states


def test_rows_that_die_take_what_goes_with_them(variant: Callable[[str], Path]) -> None:
    folder = variant("gemma4")
    alone = states_through(load(folder, [0, LAYERS]))
    dead = frozenset(range(80, len(TOKENS)))  # nobody sees them
    found = states_through(load(folder, [0, 3, 5, LAYERS]), dead)
    assert np.array_equal(found, alone[:80])


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_a_slice_has_the_inputs_of_its_own_layers_and_its_weights_are_foretold(
    dtype: str, variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "BLOCK_NUMBERS", 100 * 12)  # several blocks, the last one shorter
    files = ModelFiles(str(variant("gemma4")))
    table = load_file(variant("gemma4") / "model.safetensors")[
        "model.language_model.embed_tokens_per_layer.weight"
    ]
    for first, end in itertools.pairwise([0, 3, 5, LAYERS]):
        span = Span(first=first, end=end, count=LAYERS)
        part = load_foretold(files, span, dtype)
        for index in range(first, end):
            found: Any = part.parts[index]["layer_input.table"]
            own = table[:, 12 * index : 12 * (index + 1)].numpy()
            assert np.array_equal(found.matrix.weights, narrowed(own, part.dtype))


def test_what_all_layers_have_in_one_tensor_has_names_of_each(tmp_path: Path) -> None:
    folder = make_variant(tmp_path, "gemma4")
    raw, files = load_file(folder / "model.safetensors"), ModelFiles(str(folder))
    root, found = "model.language_model.", files.tensors()
    table, projection = f"{root}embed_tokens_per_layer.weight", f"{root}per_layer_model_projection.weight"
    own = f"{root}layers.5.layer_input."
    for name, source, expected in (
        ("table", table, raw[table][:, 60:72]),
        ("projection", projection, raw[projection][60:72]),
        ("norm", f"{root}per_layer_projection_norm.weight", raw[f"{root}per_layer_projection_norm.weight"]),
    ):
        assert np.array_equal(found.load(f"{own}{name}.weight", tuple(expected.shape)), expected)
        assert found.files_of(f"{own}{name}.weight") == (source,)
        assert f"{own}{name}.weight" in files.tensors()
    rewrite(folder, lambda tensors: tensors.update({table: tensors[table][:, :-1].contiguous()}))
    with pytest.raises(InputError, match=r"embed_tokens_per_layer\.weight of .* equal parts for 7 layers"):
        load(folder, [0, LAYERS])


def test_keys_of_layers_that_share_them_are_left_unread(tmp_path: Path) -> None:
    """Published checkpoints hold them; transformers does not read them, either."""
    folder = make_variant(tmp_path, "gemma4")
    attention = "model.language_model.layers.4.self_attn"
    assert not any(name.startswith(f"{attention}.k_") for name in ModelFiles(str(folder)).tensors())
    own = {f"{attention}.{name}.weight": torch.ones(4) for name in ("k_proj", "v_proj", "k_norm")}
    rewrite(folder, lambda tensors: tensors.update(own))
    load(folder, [0, 5, LAYERS])
    rewrite(folder, lambda tensors: tensors.update({f"{attention}.sinks": torch.ones(4)}))
    with pytest.raises(InputError, match=r"layers\.4\.self_attn\.sinks, for which transformers' Gemma4"):
        load(folder, [0, LAYERS])


PLAIN = "llama-grouped"
DEPTH = 8
WIDTH = 64
ROWS = 9
TEXT = np.random.default_rng(4).integers(0, VOCABULARY_SIZE, ROWS)


@pytest.fixture(scope="module")
def states(variant: Callable[[str], Path]) -> list[Array]:
    """The inputs of all layers and the output after the final norm, each `[rows, hidden]`."""
    plain: Any = AutoModelForCausalLM.from_pretrained(variant(PLAIN), dtype=torch.float32).eval()
    with torch.inference_mode():
        found = plain(
            input_ids=torch.from_numpy(TEXT)[None], use_cache=False, output_hidden_states=True
        ).hidden_states
    assert len(found) == DEPTH + 1
    return [state[0].numpy() for state in found]


def capturing(folder: Path, stage_count: int, captures: tuple[int, ...]) -> list[Slice]:
    slices = load_stages(folder, stage_count)
    for part in slices:
        part.captures = captures
        part.open_cache(1, 64)
    return slices


def job(kept: Sequence[int] = range(ROWS)) -> RunLayers:
    """A chain of committed rows, of which these are still there, as a later stage gets them."""
    whole, fields = part_of(1, TEXT.tolist()), ("slots", "tokens", "positions", "visible", "sampled")
    own = replace(whole, **{name: getattr(whole, name)[list(kept)] for name in fields})
    return replace(job_of(own), rows=tuple(kept))


@pytest.mark.parametrize("captures", [(DEPTH,), (0,), (2, 4, 5), ()])
@pytest.mark.parametrize("stage_count", [1, 4])
def test_captures_are_the_hidden_states_of_the_plain_model(
    variant: Callable[[str], Path], states: list[Array], stage_count: int, captures: tuple[int, ...]
) -> None:
    """Each slice's own stand behind what goes on to the next one, which gets no others."""
    payload: Array | None = None
    captured = []
    for part in capturing(variant(PLAIN), stage_count, captures):
        rows, made, tokens, _ = part.run(job(), payload)
        assert rows == tuple(range(ROWS))
        onward = 0 if part.span.is_last else WIDTH
        payload = made[:, :onward]
        captured.append(made[:, onward:])
    found = np.concatenate(captured, axis=1)
    expected = np.concatenate([states[0][:, :0], *(states[layer] for layer in captures)], axis=1)
    assert found.shape == expected.shape == (ROWS, WIDTH * len(captures))
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)
    assert len(tokens) == ROWS


@pytest.mark.parametrize("stage_count", [1, 2])
def test_tokens_and_states_stay_the_same_bits_beside_captures(
    variant: Callable[[str], Path], stage_count: int
) -> None:
    found = []
    for captures in ((), (1, 6, DEPTH)):
        payload: Array | None = None
        for part in capturing(variant(PLAIN), stage_count, captures):
            _, forwarded = part.forward(job(), payload)
            _, payload, tokens, _ = part.run(job(), payload)
        found.append((forwarded[:, :WIDTH], tokens))
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_rows_that_die_between_layers_take_their_captures_with_them(
    variant: Callable[[str], Path], states: list[Array]
) -> None:
    captures = (1, 3, 6, DEPTH)
    first, last = capturing(variant(PLAIN), 2, captures)
    asked = 0

    def die_before_layer_two() -> frozenset[int]:
        nonlocal asked
        asked += 1
        return frozenset({8}) if asked >= 3 else frozenset()

    rows, payload, *_ = first.run(job(), None, die_before_layer_two)
    assert rows == tuple(range(8))
    # The stage passes on what lives; at the next one its last row of these dies under way, too.
    asked = 0
    rows, features, tokens, _ = last.run(
        job(rows), payload, lambda: frozenset({7}) if die_before_layer_two() else frozenset()
    )
    assert rows == tuple(range(7))
    assert len(tokens) == 7
    expected = np.concatenate([states[layer][:7] for layer in captures], axis=1)
    np.testing.assert_allclose(features, expected, atol=1e-4, rtol=1e-4)


COUNT = 4
KINDS = {
    "llama": {**SMALL, "num_hidden_layers": COUNT},
    "tied": {**SMALL, "num_hidden_layers": COUNT, "tie_word_embeddings": True},
}
SPANS = [((0, 2), (1, 4)), ((0, 4), (0, 2)), ((0, 1), (2, 3))]


@pytest.fixture(params=list(KINDS), scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), "llama", KINDS[request.param])


def span(bounds: tuple[int, int]) -> Span:
    return Span(first=bounds[0], end=bounds[1], count=COUNT)


def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that are read from now on."""
    names: list[str] = []
    copy = Tensors.copy_into

    def copy_into(self: Tensors, name: str, part: Numbers) -> None:
        names.append(name)
        copy(self, name, part)

    monkeypatch.setattr(Tensors, "copy_into", copy_into)
    return names


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(("before", "after"), SPANS)
def test_what_both_have_is_taken_over_and_the_rest_is_read(
    folder: Path, dtype: str, before: tuple[int, int], after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ModelFiles(str(folder))
    old = Slice.load(files, span(before), dtype)
    whole = Slice.load(files, span(after), dtype)
    names = read_names(monkeypatch)
    kept = old.kept_for(span(after))
    part = Slice.load(files, span(after), dtype, kept=kept)
    both = set(range(*before)) & set(range(*after))
    assert {owner for owner in kept if isinstance(owner, int)} == both
    read = {int(name.split(".layers.")[1].partition(".")[0]) for name in names if ".layers." in name}
    assert read == set(range(*after)) - both
    assert all(part.parts[owner] is old.parts[owner] for owner in kept)
    assert part.parts.keys() == whole.parts.keys()
    found, expected = ([*arrays_of(each.parts)] for each in (part, whole))
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    assert part.weight_bytes == whole.weight_bytes


def test_what_is_kept_counts_with_its_weights_and_tied_ends_are_taken_over(
    folder: Path, tmp_path: Path
) -> None:
    part = Slice.load(ModelFiles(str(folder)), span((0, 4)), "float32")
    assert held_bytes(part.kept_for(span((0, 4)))) == part.weight_bytes
    assert held_bytes({}) == 0
    own = sum(each.nbytes for each in arrays_of(part.parts[1]))
    assert held_bytes(part.kept_for(span((1, 2)))) == own
    files = ModelFiles(str(make_checkpoint(tmp_path, "llama", KINDS["tied"])))
    first = Slice.load(files, span((0, 2)), "float32")
    assert EMBEDDING not in first.kept_for(span((0, 4))), "there `lm_head` is the same matrix"
    assert first.kept_for(span((0, 3)))[EMBEDDING] is first.parts[EMBEDDING]
    whole = Slice.load(files, span((0, 4)), "float32")
    assert {LM_HEAD, EMBEDDING} < whole.kept_for(span((0, 4))).keys()
