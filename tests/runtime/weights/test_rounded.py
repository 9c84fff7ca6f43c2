"""Quantised matrices in the store: made once, read instead of the checkpoint from then on, and made again
when either is not what it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load
from safetensors.torch import load_file, save_file

from flowspec.errors import ClusterError
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.slice import Slice
from flowspec.model.tensors import Tensors
from flowspec.model.weight_files import content_of
from flowspec.model.weights import Span
from flowspec.runtime.loading import slice_weights
from flowspec.runtime.weights.sources import Source, ready_weights
from flowspec.runtime.weights.store import WeightStore
from tests import ggufs
from tests.checkpoints import make_variant
from tests.model.slices import job_of, part_of
from tests.runtime.weights.served import Direct
from tests.runtime.weights.test_receive import offer_of
from tests.runtime.weights.test_stored import described


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors of the checkpoint whose values are read, in order."""
    found: list[str] = []
    plain = Tensors.copy_into

    def copy_into(tensors: Tensors, name: str, part: Array) -> None:
        found.append(name)
        plain(tensors, name, part)

    monkeypatch.setattr(Tensors, "copy_into", copy_into)
    return found


def test_what_is_stored_is_a_safetensors_file() -> None:
    """As the package of that name reads it."""
    generator = np.random.default_rng(1)
    tensors = {
        "levels": generator.integers(-127, 128, (3, 64), np.int8),
        "scales": generator.standard_normal((3, 2)).astype(np.float16),
        "": np.zeros((0, 5), np.uint8),
        "order": np.arange(7)[::-1],
        "one": np.float32(2.5).reshape(()),
    }
    found = load(content_of(tensors))
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert found[name].dtype == expected.dtype
        assert np.array_equal(found[name], expected)


def loaded(files: Source, store: WeightStore | None, dtype: str = "int8", layers: int = 2) -> Array:
    """Hidden states `[rows, hidden]` of a slice of the first layers; whatever is wrong in it changes them."""
    span = Span(first=0, end=layers, count=files.raw_config()["num_hidden_layers"])
    weights = slice_weights(files, span, dtype)
    with ready_weights(files, weights, dtype, store) as (_, _, rounded):
        part = Slice.load(files, span, dtype, store=rounded)
    part.open_cache(0, 64)
    tokens = part_of(0, list(range(5, 25)), sampled=np.zeros(20, dtype=np.bool_))
    return part.forward(job_of(tokens), None)[1]


def source_of(folder: Path) -> Source:
    source = Source(str(folder), Direct())
    source.learn(map(source.entry, source.extents()))
    return source


def made(store: WeightStore) -> list[Path]:
    return [path for path in (store.folder / "tensors").iterdir() if path.suffix]


def is_matrix(name: str) -> bool:
    return name.endswith("proj.weight") or name.endswith("lm_head.weight")


@pytest.mark.parametrize(
    ("variant", "dtype", "is_gguf"),
    [("llama-tied", "int8", False), ("qwen3-moe", "int4", False), ("qwen3-moe", "int8", True)],
)
def test_a_second_start_reads_what_the_first_has_made(
    variant: str, dtype: str, is_gguf: bool, tmp_path: Path, reads: list[str]
) -> None:
    make, store = ggufs.make if is_gguf else make_variant, WeightStore(tmp_path / "store")
    folder = make(tmp_path / "model", variant)
    if is_gguf:
        folder = ggufs.convert(folder, tmp_path / "model.gguf", GGMLQuantizationType.Q8_0)
    files = source_of(folder)
    expected = loaded(files, None, dtype)
    reads.clear()
    assert np.array_equal(loaded(files, store, dtype), expected)
    assert any(map(is_matrix, reads))
    reads.clear()
    assert np.array_equal(loaded(files, store, dtype), expected)
    assert reads
    assert not any(map(is_matrix, reads)), "the matrices of the checkpoint are not read"
    count = len(made(store))
    assert np.array_equal(loaded(files, store, dtype, layers=1), loaded(files, None, dtype, layers=1))
    assert len(made(store)) == count, "another split finds them, too"
    loaded(files, store, "int4" if dtype == "int8" else "int8")
    assert len(made(store)) == 2 * count, "another precision does not"


def test_a_damaged_file_is_noticed_and_made_again(tmp_path: Path, reads: list[str]) -> None:
    files, store = (
        source_of(make_variant(tmp_path / "model", "llama-grouped")),
        WeightStore(tmp_path / "store"),
    )
    expected = loaded(files, store)
    damages = (lambda old: old[:-1] + bytes([old[-1] ^ 1]), lambda old: old[:100], lambda old: b"")
    for victim, damage in zip(sorted(made(store)), damages, strict=False):
        content = victim.read_bytes()
        victim.write_bytes(damage(content))
        reads.clear()
        assert np.array_equal(loaded(files, store), expected)
        assert len([name for name in reads if is_matrix(name)]) == 1, "that one alone"
        assert victim.read_bytes() == content


def test_a_changed_checkpoint_is_noticed(tmp_path: Path, reads: list[str]) -> None:
    folder, store = make_variant(tmp_path / "model", "llama-grouped"), WeightStore(tmp_path / "store")
    before = loaded(source_of(folder), store)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    reads.clear()
    files = source_of(folder)
    after = loaded(files, store)
    assert [name for name in reads if is_matrix(name)] == ["model.layers.1.mlp.up_proj.weight"]
    assert np.array_equal(after, loaded(files, None))
    assert not np.array_equal(after, before)


def test_what_is_read_while_the_file_changes_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key would name the old content."""
    folder, store = make_variant(tmp_path / "model", "llama-grouped"), WeightStore(tmp_path / "store")
    plain = Tensors.copy_into

    def copy_into(tensors: Tensors, name: str, part: Array) -> None:
        plain(tensors, name, part)
        (folder / "model.safetensors").touch()

    monkeypatch.setattr(Tensors, "copy_into", copy_into)
    with pytest.raises(ClusterError, match="changed while they were loaded; start again"):
        loaded(source_of(folder), store)
    assert not made(store)


def test_matrices_that_are_stored_are_not_fetched_from_the_head(tmp_path: Path) -> None:
    files = source_of(make_variant(tmp_path / "model", "llama-grouped"))
    offer, store = offer_of(Path(files.model)), WeightStore(tmp_path / "store")

    def start() -> tuple[Array, int]:
        channel, span = Direct(offer), Span(first=0, end=2, count=len(files.spec.layers))
        found = loaded(described(channel, files, span, store), store)
        return found, sum(question.size for question in channel.ranges)

    expected, received = start()
    assert np.array_equal(expected, loaded(files, None))
    assert received == sum(
        path.stat().st_size for path in (store.folder / "tensors").iterdir() if not path.suffix
    )
    for path in (store.folder / "tensors").iterdir():
        if not path.suffix:
            path.unlink()  # as when room is made
    again, received_again = start()
    assert np.array_equal(again, expected)
    weights = load_file(Path(files.model) / "model.safetensors")
    kept = [
        name
        for name in weights
        if name.startswith(("model.layers.0.", "model.layers.1.", "model.embed")) and not is_matrix(name)
    ]
    assert received_again == sum(weights[name].nbytes for name in kept) < received / 2
    offer.close()
