"""A slice that takes over what it has in common with one that is in memory: it reads the rest alone, and is
the slice that would have been loaded whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowspec.bench.checkpoints import SMALL, make_checkpoint
from flowspec.model.files import ModelFiles
from flowspec.model.pieces import KeptModules, Span
from flowspec.model.slice import Slice
from flowspec.model.tensors import Tensors
from tests.model.slices import CPU

COUNT = 4
KINDS = {
    "llama": {**SMALL, "num_hidden_layers": COUNT},
    "tied": {**SMALL, "num_hidden_layers": COUNT, "tie_word_embeddings": True},
}
SPANS = [((0, 2), (0, 3)), ((0, 2), (1, 4)), ((0, 4), (0, 2)), ((2, 4), (0, 4)), ((0, 1), (2, 3))]


@pytest.fixture(params=list(KINDS), scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), "llama", KINDS[request.param])


def span(bounds: tuple[int, int]) -> Span:
    return Span(first=bounds[0], end=bounds[1], count=COUNT)


def state_of(part: Slice) -> dict[str, torch.Tensor]:
    """All that is loaded, by its place in the slice."""
    states = [module.state_dict() for module in part.pieces.loaded]
    return {f"{at}.{name}": each for at, state in enumerate(states) for name, each in state.items()}


def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that are read from now on."""
    names: list[str] = []
    copy = Tensors.copy_into

    def copy_into(self: Tensors, name: str, part: torch.Tensor) -> None:
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
    old = Slice.load(files, span(before), dtype, CPU)
    whole = Slice.load(files, span(after), dtype, CPU)
    names = read_names(monkeypatch)
    kept = old.pieces.kept_for(span(after))
    part = Slice.load(files, span(after), dtype, CPU, kept=kept)
    both = set(range(*before)) & set(range(*after))
    assert kept.layers.keys() == both
    read = {int(name.split(".layers.")[1].partition(".")[0]) for name in names if ".layers." in name}
    assert read == set(range(*after)) - both
    ours, theirs = part.pieces.layers, old.pieces.layers
    assert all(ours[index - after[0]] is theirs[index - before[0]] for index in both)
    expected, found = state_of(whole), state_of(part)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert part.weight_bytes == whole.weight_bytes


def test_both_ends_of_a_tied_matrix_are_taken_over_where_they_are_the_same_parameter(tmp_path: Path) -> None:
    files = ModelFiles(str(make_checkpoint(tmp_path, "llama", KINDS["tied"])))
    first = Slice.load(files, span((0, 2)), "float32", CPU)
    assert first.pieces.kept_for(span((0, 4))).embedding is None, "there `lm_head` is the same matrix"
    assert first.pieces.kept_for(span((0, 3))).embedding is first.pieces.embedding


def test_what_is_kept_counts_with_its_weights(folder: Path) -> None:
    part = Slice.load(ModelFiles(str(folder)), span((0, 4)), "float32", CPU)
    assert part.pieces.kept_for(span((0, 4))).weight_bytes == part.weight_bytes
    assert KeptModules(layers={}).weight_bytes == 0
    assert part.pieces.kept_for(span((1, 2))).weight_bytes == sum(
        weight.numel() * weight.element_size() for weight in part.pieces.layers[1].parameters()
    )
