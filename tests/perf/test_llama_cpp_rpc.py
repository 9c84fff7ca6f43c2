"""What llama.cpp's programs tell is read as they tell it, and a table's ratios are of the same prompts."""

from __future__ import annotations

import pytest

from tests.perf.llama_cpp_rpc import COLUMNS, PLAIN_TOLD, SPECULATIVE_TOLD, Measured, drafts_of, table

PLAIN = """
0.21.191.297 I common_perf_print:    sampling time =     146.25 ms
0.21.191.342 I common_perf_print:        load time =    3142.51 ms
0.21.191.357 I common_perf_print: prompt eval time =    1224.18 ms /    20 tokens (   61.21 ms per token)
0.21.191.372 I common_perf_print:        eval time =   16541.06 ms /    63 runs   (  262.56 ms per token)
"""
SPECULATIVE = """
0.13.628.643 I encoded   20 tokens in    0.570 seconds, speed:   35.075 t/s
0.13.628.680 I decoded   68 tokens in   10.308 seconds, speed:    6.597 t/s
0.13.628.714 I n_draft   = 4
0.13.628.721 I n_predict = 68
0.13.628.734 I n_drafted = 57
0.13.628.746 I n_accept  = 53
"""


def test_what_is_told_is_read() -> None:
    plain, speculative = PLAIN_TOLD.search(PLAIN), SPECULATIVE_TOLD.search(SPECULATIVE)
    assert plain is not None
    assert plain.groups() == ("20", "16541.06", "63")
    assert speculative is not None
    assert speculative.groups() == ("20", "68", "10.308", "57", "53")


def prompt(domain: str, hits: int, **speeds: list[float]) -> Measured:
    found = Measured(domain, tokens=10, hits=hits, accepted={2: 0.5, 4: 0.25})
    names = {"two": drafts_of(2), "four": drafts_of(4), "plain": "llama.cpp"}
    found.speeds.update({names.get(name, name): values for name, values in speeds.items()})
    return found


def test_llama_cpp_drafts_as_many_as_are_best_for_it() -> None:
    fast = prompt("a", 9, ar=[4, 2, 9], plain=[2], continuous=[12], two=[3], four=[6, 8, 7])
    slow = prompt("b", 5, ar=[1], plain=[2], continuous=[2], two=[4], four=[1])
    rows = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in table([fast, slow], (2, 4))}
    assert list(rows) == ["a", "b", "all"]
    assert [rows[name]["drafted"] for name in rows] == [4, 2, 4]
    assert rows["a"]["ar"] == 4
    assert rows["a"]["ar / llama.cpp"] == 2
    assert rows["a"]["continuous / llama.cpp with drafter"] == pytest.approx(12 / 7)
    assert rows["all"]["acceptance"] == pytest.approx(0.7)
    assert rows["all"]["where each prompt has its best"] == pytest.approx((12 / 7 + 2 / 4) / 2)
