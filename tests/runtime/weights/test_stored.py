"""A slice of every family is the same, bit for bit, whether it was loaded from files or from what a head
sent."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from flowspec.core.protocol.device_messages import TensorEntry
from flowspec.core.protocol.precision import FILED
from flowspec.errors import InputError, PeerError
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.config import FACTORS
from flowspec.model.gguf.file import GgufFile
from flowspec.model.slice import Slice
from flowspec.model.weights import Span, arrays_of, weights_of
from flowspec.runtime.loading import slice_memory
from flowspec.runtime.weights.sources import HeadSource
from flowspec.runtime.weights.store import WeightStore
from flowspec.runtime.weights.transfer import HeadChannel, Manifest, Offer
from tests.checkpoints import VARIANTS, make_variant
from tests.ggufs import SHAPES, convert, make
from tests.nightly import nightly
from tests.prequantised import convert as prequantised
from tests.runtime.weights.served import Direct


def parameters(part: Slice) -> list[Array]:
    return [*arrays_of(part.parts)]


def described(channel: HeadChannel, files: ModelFiles, span: Span, store: WeightStore) -> HeadSource:
    """What a head offers of `files`, the tensors of a slice known."""
    source = HeadSource("m", channel, channel.ask_manifest(), store)
    source.spec = files.spec
    names = source.names_of(weights_of(files.spec, span, source.tensors()))
    source.learn(channel.ask_entries(names))
    assert names == source.entries.keys()
    return source


def check_received(files: ModelFiles, folder: Path, dtype: str) -> None:
    """Slices of what `files` offers are the same as slices of the files."""
    count = files.config().num_hidden_layers
    offer = Offer(files, files.fingerprint(), folder=folder / "cache")
    store = WeightStore(folder / "store")
    for first, end in ((0, count // 2), (count // 2, count)):
        span = Span(first=first, end=end, count=count)
        source = described(Direct(offer), files, span, store)
        assert slice_memory(source, span, dtype, 64) == slice_memory(files, span, dtype, 64)
        before = {path.name for path in (folder / "store").glob("tensors/*")}
        with source.ready({*source.entries}) as received:
            found = Slice.load(source, span, dtype)
        sizes = {entry.digest: entry.size_bytes for entry in source.entries.values()}
        assert received == sum(size for digest, size in sizes.items() if digest not in before)
        expected = Slice.load(files, span, dtype)
        pairs = list(zip(parameters(found), parameters(expected), strict=True))
        assert len(pairs) > 8
        assert all(np.array_equal(one, other) for one, other in pairs)
    offer.close()


MECHANISMS = ("llama-tied", "gemma4", "gemma4-mixture", "qwen3.5-moe-fused", "gpt-oss", "lfm2", "phi3")
"""Tied, shared, fused, joined and reordered tensors, and tables of their own."""


@pytest.mark.parametrize("variant", nightly(MECHANISMS, VARIANTS))
def test_a_received_slice_is_the_one_in_the_files(variant: str, tmp_path: Path) -> None:
    check_received(ModelFiles(str(make_variant(tmp_path / "model", variant))), tmp_path, "float32")


IN_GGUF = ("llama-tied", "qwen3-moe", "phi3-longrope", "qwen3.5-moe", "gemma4", "gpt-oss")


@pytest.mark.parametrize("shape", nightly(IN_GGUF, SHAPES))
def test_a_slice_of_a_gguf_file_is_received_as_it_lies_there(shape: str, tmp_path: Path) -> None:
    path = convert(
        make(tmp_path / "checkpoint", shape),
        tmp_path / "m.gguf",
        Kind.Q8_0,
        part_tensors=9 if shape == "qwen3-moe" else 0,
    )
    files = ModelFiles(str(path))
    check_received(files, tmp_path, "float32")
    packed = {
        hashlib.sha256(tensor.packed()).hexdigest()
        for tensor in GgufFile.read(path).tensors.values()
        if tensor.name not in FACTORS
    }
    assert {each.name for each in (tmp_path / "store" / "tensors").iterdir()} == packed


@pytest.mark.parametrize(("variant", "method"), [("gpt-oss", "mxfp4"), ("llama-grouped", "gptq")])
def test_a_quantised_slice_is_received_as_it_lies_there(variant: str, method: str, tmp_path: Path) -> None:
    """Experts in one tensor, and what is the same in several tensors and comes once."""
    folder = prequantised(make_variant(tmp_path / "plain", variant), tmp_path / "model", method)
    check_received(ModelFiles(str(folder)), tmp_path, FILED)


def offered(files: ModelFiles, gguf: str = "llama") -> HeadSource:
    manifest = Manifest(files.config_text(), gguf, frozenset(["token_embd.weight"]))
    return HeadSource("m", Direct(), manifest, WeightStore(Path("none")))


def test_what_no_gguf_file_could_hold_is_refused(tmp_path: Path) -> None:
    files = ModelFiles(str(convert(make(tmp_path / "checkpoint", "llama"), tmp_path / "m.gguf", Kind.Q8_0)))
    right = {
        "name": "token_embd.weight",
        "dtype": "Q8_0",
        "shape": (300, 256),
        "size_bytes": 300 * 272,
        "digest": "0" * 64,
    }
    offered(files).learn([TensorEntry(**right)])
    for change in (
        {"dtype": "F33"},
        {"dtype": "F32"},
        {"shape": (300, 250)},
        {"shape": ()},
        {"shape": (0, 256), "size_bytes": 0},
    ):
        with pytest.raises(PeerError, match=r"the head offers token_embd\.weight as"):
            offered(files).learn([TensorEntry(**{**right, **change})])
    with pytest.raises(
        InputError, match="'m' is a GGUF file of the architecture 'gpt2', which this FlowSpec does not run"
    ):
        offered(files, gguf="gpt2")
    source = offered(files)
    source.spec = files.spec
    with pytest.raises(InputError, match="the head's folder may be incomplete"):
        source.tensors().shape("model.embed_tokens.weight")
