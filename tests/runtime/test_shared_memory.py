"""Daemons of one machine share what is free: none takes all of it for its caches, and a limit above it is no
memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flowspec.errors import NoRoomError
from flowspec.host_memory import HostMemory
from flowspec.model import accelerator
from flowspec.model.pieces import Span
from flowspec.plan.memory import SliceMemory
from flowspec.runtime.loading import check_memory
from tests.runtime.clusters import whole_model

MIB = 1 << 20
CPU = torch.device("cpu")
SPAN = Span(first=0, end=2, count=8)
NEED = SliceMemory(weight_bytes=50 * MIB, cache_bytes=20 * MIB)
ASSIGN = replace(whole_model("m", "f"), stages=4, end_layer=2, next_hop="127.0.0.1:7701", next_name="next")


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "host_memory", lambda: HostMemory(total=8000 * MIB, available=1000 * MIB))


def test_the_caches_of_four_daemons_fit_together() -> None:
    assert check_memory(NEED, SPAN, ASSIGN, CPU, None) == 950 * MIB
    left = check_memory(NEED, SPAN, ASSIGN, CPU, None, 4)
    assert left == 200 * MIB
    assert 4 * (left + NEED.weight_bytes) <= 1000 * MIB


def test_one_conversation_always_fits_and_what_does_not_is_refused() -> None:
    large = SliceMemory(weight_bytes=400 * MIB, cache_bytes=20 * MIB)
    assert check_memory(large, SPAN, ASSIGN, CPU, None, 4) == 20 * MIB
    with pytest.raises(NoRoomError, match="1000 MiB are free here"):
        check_memory(SliceMemory(weight_bytes=990 * MIB, cache_bytes=20 * MIB), SPAN, ASSIGN, CPU, None, 4)


def test_what_is_allowed_and_not_there_is_no_memory() -> None:
    assert check_memory(NEED, SPAN, ASSIGN, CPU, 1 << 40) == 950 * MIB
