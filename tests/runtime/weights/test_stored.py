"""A slice of every family is the same, bit for bit, whether it was loaded from files or from what a head sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowspec.model.files import ModelFiles
from flowspec.model.pieces import Span
from flowspec.model.slice import Slice
from flowspec.runtime.loading import offered_model, slice_memory
from flowspec.runtime.weights.receive import fetched
from flowspec.runtime.weights.store import WeightStore
from flowspec.testbed.checkpoints import VARIANTS, make_variant
from tests.runtime.weights.served import Direct
from tests.runtime.weights.test_receive import ASSIGN, offer_of


def parameters(part: Slice) -> list[torch.Tensor]:
    pieces = part.pieces
    return [
        each
        for module in (pieces.embedding, *pieces.layers, pieces.norm, pieces.lm_head)
        if module is not None
        for each in module.parameters()
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_received_slice_is_the_one_in_the_files(variant: str, tmp_path: Path) -> None:
    files = ModelFiles(str(make_variant(tmp_path / "model", variant)))
    count = files.config().num_hidden_layers
    offer = offer_of(files.folder or tmp_path)
    store = WeightStore(tmp_path / "store")
    for first, end in ((0, count // 2), (count // 2, count)):
        span = Span(first=first, end=end, count=count)
        courier = Direct(offer)
        model = offered_model(replace(ASSIGN, end_layer=count, layer_count=count), span, courier, store)
        assert slice_memory(model, span, "float32", 64) == slice_memory(files, span, "float32", 64)
        with fetched(model, courier):
            found = Slice.load(model, span, "float32", torch.device("cpu"))
        expected = Slice.load(files, span, "float32", torch.device("cpu"))
        pairs = list(zip(parameters(found), parameters(expected), strict=True))
        assert len(pairs) > 8
        assert all(torch.equal(one, other) for one, other in pairs)
    offer.close()
