"""Captured hidden states are transformers' own, over any split, for the rows that survive; and nothing else
changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flowspec.bench.checkpoints import VOCABULARY_SIZE
from flowspec.core.protocol.cluster_messages import Assign
from flowspec.core.stage.events import RunLayers
from flowspec.model.slice import Slice
from tests.model.slices import job_of, load_stages, part_of

NAME = "llama-grouped"
LAYERS = 8
HIDDEN = 64
ROWS = 9
TOKENS = np.random.default_rng(4).integers(0, VOCABULARY_SIZE, ROWS)


@pytest.fixture(scope="module")
def states(variant: Callable[[str], Path]) -> list[torch.Tensor]:
    """The inputs of all layers and the output after the final norm, each `[rows, hidden]`."""
    plain: Any = AutoModelForCausalLM.from_pretrained(variant(NAME), dtype=torch.float32).eval()
    with torch.inference_mode():
        found = plain(
            input_ids=torch.from_numpy(TOKENS)[None], use_cache=False, output_hidden_states=True
        ).hidden_states
    assert len(found) == LAYERS + 1
    return [state[0] for state in found]


def load(folder: Path, stage_count: int, captures: tuple[int, ...]) -> list[Slice]:
    slices = load_stages(folder, stage_count)
    for part in slices:
        part.captures = captures
        part.open_cache(1, 64)
    return slices


def job(kept: Sequence[int] = range(ROWS)) -> RunLayers:
    """A chain of committed rows, of which these are still there, as a later stage gets them."""
    whole, fields = part_of(1, TOKENS.tolist()), ("slots", "tokens", "positions", "visible", "sampled")
    own = replace(whole, **{name: getattr(whole, name)[list(kept)] for name in fields})
    return replace(job_of(own), rows=tuple(kept))


def received_width(part: Slice) -> int:
    """What the daemon expects of the segments that come to this slice."""
    assign = Assign(
        model="m",
        fingerprint="f",
        stage=2 if part.span.is_last else 1,
        stages=3,
        first_layer=part.span.first,
        end_layer=part.span.end,
        layer_count=LAYERS,
        next_hop="" if part.span.is_last else "a:1",
        next_name="",
        dtype="float32",
        context=64,
        captures=part.captures,
    )
    return assign.payload_width(HIDDEN)


@pytest.mark.parametrize("captures", [(LAYERS,), (0,), (2, 4, 5), ()])
@pytest.mark.parametrize("stage_count", [1, 4])
def test_captures_are_the_hidden_states_of_the_plain_model(
    variant: Callable[[str], Path], states: list[torch.Tensor], stage_count: int, captures: tuple[int, ...]
) -> None:
    """Each slice's own stand behind what goes on to the next one, which gets no others."""
    payload: torch.Tensor | None = None
    captured = []
    for part in load(variant(NAME), stage_count, captures):
        if payload is not None:
            assert payload.shape == (ROWS, received_width(part))
        rows, made, tokens, _ = part.run(job(), payload)
        assert rows == tuple(range(ROWS))
        onward = 0 if part.span.is_last else HIDDEN
        payload = made[:, :onward]
        captured.append(made[:, onward:])
    found = torch.cat(captured, dim=1)
    expected = torch.cat([states[layer] for layer in captures], dim=1) if captures else torch.zeros(ROWS, 0)
    assert found.shape == expected.shape == (ROWS, HIDDEN * len(captures))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-4, rtol=1e-4)
    assert len(tokens) == ROWS


@pytest.mark.parametrize("stage_count", [1, 2])
def test_tokens_and_states_stay_the_same_bits_beside_captures(
    variant: Callable[[str], Path], stage_count: int
) -> None:
    found = []
    for captures in ((), (1, 6, LAYERS)):
        payload: torch.Tensor | None = None
        for part in load(variant(NAME), stage_count, captures):
            _, forwarded = part.forward(job(), payload)
            _, payload, tokens, _ = part.run(job(), payload)
        found.append((forwarded[:, :HIDDEN], tokens))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_rows_that_die_between_layers_take_their_captures_with_them(
    variant: Callable[[str], Path], states: list[torch.Tensor]
) -> None:
    captures = (1, 3, 6, LAYERS)
    first, last = load(variant(NAME), 2, captures)
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
    expected = torch.cat([states[layer][:7] for layer in captures], dim=1)
    np.testing.assert_allclose(features.numpy(), expected.numpy(), atol=1e-4, rtol=1e-4)
