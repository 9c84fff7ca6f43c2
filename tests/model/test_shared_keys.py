"""Layers that attend to what an earlier one holds, and that take more of a token than its hidden state: the
same bits wherever a model is cut, and each slice with no more of it than it needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowspec.bench.checkpoints import make_variant
from flowspec.core.protocol.shared_keys import Carried, carried_at, carried_most, carried_width, sources_of
from flowspec.errors import InputError
from flowspec.model import layer_by_layer
from flowspec.model.files import ModelFiles
from flowspec.model.pieces import Span
from flowspec.model.slice import Slice
from flowspec.runtime.loading import slice_memory
from tests.model.slices import CPU, chain, load

LAYERS = 7
TOKENS = torch.arange(3, 90)


def states_through(slices: list[Slice], dead: frozenset[int] = frozenset()) -> torch.Tensor:
    """What the last slice's layers make of `TOKENS`; rows that are `dead` die in the middle of each slice."""
    rows: tuple[int, ...] = tuple(range(len(TOKENS)))
    states: Any = None
    for part in slices:
        job, asked = chain(part, 1, TOKENS), itertools.count()
        if rows != job.rows:  # the dead ones run once more: of a job of their own nothing is known here
            whole = states.new_zeros((len(TOKENS), states.shape[1]))
            whole[list(rows)] = states
            states = whole
        rows, states = part.forward(job, states, lambda asked=asked: dead if next(asked) else frozenset())
    return states


def test_rows_that_die_take_what_goes_with_them(variant: Callable[[str], Path]) -> None:
    folder = variant("gemma4")
    alone = states_through(load(folder, [0, LAYERS]))
    dead = frozenset(range(80, len(TOKENS)))  # nobody sees them
    found = states_through(load(folder, [0, 3, 5, LAYERS]), dead)
    assert torch.equal(found, alone[:80])


def test_what_goes_with_a_hidden_state_is_what_later_layers_need(variant: Callable[[str], Path]) -> None:
    """Layers are sliding, full, sliding, full, then sharing: sliding, sliding, full."""
    config = ModelFiles(str(variant("gemma4"))).config()
    assert sources_of(config) == (0, 1, 2, 3, 2, 2, 3)
    hidden, sliding, full = 64, 2 * 2 * 24, 2 * 2 * 40
    expected = {
        0: (Carried(embedding=0, sources=()), 0),
        2: (Carried(embedding=hidden, sources=()), hidden),
        3: (Carried(embedding=hidden, sources=(2,)), hidden + sliding),
        4: (Carried(embedding=hidden, sources=(2, 3)), hidden + sliding + full),
        6: (Carried(embedding=hidden, sources=(3,)), hidden + full),
        7: (Carried(embedding=0, sources=()), 0),
    }
    for layer, (carried, width) in expected.items():
        assert (carried_at(config, layer), carried_width(config, layer)) == (carried, width)
    assert carried_most(config) == hidden + sliding + full


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_a_slice_has_the_inputs_of_its_own_layers_and_its_weights_are_foretold(
    dtype: str, variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_by_layer, "TABLE_ROWS", 100)  # several blocks, the last one shorter
    files = ModelFiles(str(variant("gemma4")))
    table = load_file(variant("gemma4") / "model.safetensors")[
        "model.language_model.embed_tokens_per_layer.weight"
    ]
    for first, end in itertools.pairwise([0, 3, 5, LAYERS]):
        span = Span(first=first, end=end, count=LAYERS)
        part = Slice.load(files, span, dtype, CPU)
        assert slice_memory(files, span, dtype, 100).weight_bytes == part.weight_bytes
        for index, layer in enumerate(part.pieces.layers, first):
            own, found = table[:, 12 * index : 12 * (index + 1)], layer.layer_input.table.weight
            assert torch.equal(found, own.to(found.dtype))


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
        assert torch.equal(found.load(f"{own}{name}.weight", tuple(expected.shape)), expected)
        assert found.files_of(f"{own}{name}.weight") == (source,)
        assert files.weight_map()[f"{own}{name}.weight"] == "model.safetensors"
    raw[table] = raw[table][:, :-1].contiguous()
    save_file(raw, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"embed_tokens_per_layer\.weight of .* equal parts for 7 layers"):
        load(folder, [0, LAYERS])


def test_keys_of_layers_that_share_them_are_left_unread(tmp_path: Path) -> None:
    """Published checkpoints hold them; transformers does not read them, either."""
    folder = make_variant(tmp_path, "gemma4")
    path = folder / "model.safetensors"
    raw = load_file(path)
    assert not any(".layers.4.self_attn.k_" in name for name in raw)
    for name in ("k_proj", "v_proj", "k_norm"):
        raw[f"model.language_model.layers.4.self_attn.{name}.weight"] = torch.ones(4)
    save_file(raw, path, {"format": "pt"})
    load(folder, [0, 5, LAYERS])
    raw["model.language_model.layers.4.self_attn.sinks"] = torch.ones(4)
    save_file(raw, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"layers\.4\.self_attn\.sinks, for which transformers' Gemma4"):
        load(folder, [0, LAYERS])
