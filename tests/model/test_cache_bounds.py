"""The caches of all conversations together stay below what was free when the slice was loaded."""

from __future__ import annotations

import pytest
import torch

from flowspec.core.protocol.limits import CACHE_BLOCK_SLOTS as BLOCK_SLOTS
from flowspec.core.protocol.shared_keys import Heads
from flowspec.errors import ClusterError
from flowspec.model.attention import TreeCache
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.pieces import Span
from flowspec.model.slice import Slice


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("slots", [1, BLOCK_SLOTS, BLOCK_SLOTS + 1, 600])
def test_growth_is_foretold_to_the_byte(slots: int, dtype: torch.dtype) -> None:
    cache = TreeCache(
        heads={0: Heads(count=3, width=40), 1: Heads(count=3, width=40), -2: Heads(count=1, width=56)},
        slots_max=600,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    cache.reserve(5)
    foretold = cache.bytes + cache.growth_bytes(slots)
    cache.reserve(slots)
    assert cache.bytes == foretold
    assert cache.growth_bytes(slots) == 0


def test_a_conversation_more_than_memory_holds_is_refused_before_it_is_taken() -> None:
    files = ModelFiles(BUNDLED)
    part = Slice.load(
        files,
        Span(first=0, end=1, count=files.raw_config()["num_hidden_layers"]),
        "float32",
        torch.device("cpu"),
    )
    for request in (1, 2):
        part.open_cache(request, 2 * BLOCK_SLOTS)
    part.cache_bytes_max = part._caches[1].growth_bytes(2 * BLOCK_SLOTS)
    part._reserve(part._caches[1], BLOCK_SLOTS, 0)
    part._reserve(part._caches[2], BLOCK_SLOTS, 0)
    with pytest.raises(ClusterError, match=r"the caches of 2 conversations need .* ask for fewer at once"):
        part._reserve(part._caches[1], BLOCK_SLOTS + 1, 0)
    assert part._caches[1].bytes == part._caches[2].bytes, "nothing was taken"
    part.close_cache(2)
    part._reserve(part._caches[1], BLOCK_SLOTS + 1, 0)
