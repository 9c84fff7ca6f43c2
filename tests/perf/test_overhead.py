"""The cost of the machinery: the tree is as large as promised, and only growth beyond the cache counts."""

from __future__ import annotations

import pytest

from tests.perf import overhead
from tests.perf.overhead import Look


def test_the_head_is_timed_with_a_large_tree() -> None:
    found = overhead.report_head(overhead.measure_head(40))
    assert found["living_nodes_mean"] >= overhead.LIVING_MIN == 256
    spent = found["milliseconds"]
    assert set(spent) == {"Drafted", "Submit", "TimerFired", "VerifiedArrived", overhead.SEGMENT}
    for kind in spent.values():
        assert 0 < kind["p50"] <= kind["p95"] <= kind["p99"] <= kind["max"]
    assert spent[overhead.SEGMENT]["p50"] > spent["Drafted"]["p50"], "a segment takes several drafts"


def test_a_small_tree_is_not_taken_for_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "VALUE_MIN", 0.2)
    with pytest.raises(AssertionError, match="expected at least 256"):
        overhead.measure_head(20)


def test_growth_is_what_is_not_keys_and_values() -> None:
    mib = 2**20
    looks = [
        Look(
            tokens=250,
            head_bytes=100 * mib,
            stage_bytes=(200 * mib, 210 * mib),
            kv_bytes=(10 * mib, 20 * mib),
        ),
        Look(
            tokens=500,
            head_bytes=101 * mib,
            stage_bytes=(209 * mib, 225 * mib),
            kv_bytes=(15 * mib, 30 * mib),
        ),
        Look(
            tokens=750,
            head_bytes=103 * mib,
            stage_bytes=(211 * mib, 230 * mib),
            kv_bytes=(20 * mib, 40 * mib),
        ),
    ]
    found = overhead.report_memory(looks)
    assert (found["from_tokens"], found["to_tokens"]) == (250, 750)
    assert found["head_growth_mib"] == 3
    assert found["stage_growth_beyond_kv_mib"] == [1, 0]


def test_the_memory_of_a_real_cluster_is_read_while_it_answers() -> None:
    looks = overhead.measure_memory(60, every=20)
    assert len(looks) == 3
    assert looks[-1].tokens == 60
    for look in looks:
        assert look.head_bytes > 20 << 20
        assert all(size > 20 << 20 for size in look.stage_bytes)
        assert look.kv_bytes == (2 * 256 * 2 * 256 * 4,) * 2, (
            "two layers, a block of 256 slots, keys and values of 256 float32 each"
        )
