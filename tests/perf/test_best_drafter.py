"""The best drafter for each prompt: whose answers count, and what is told where none is right."""

from __future__ import annotations

import pytest

from flowspec.errors import InputError
from tests.bench.records import record
from tests.perf.best_drafter import ALL, BEST, speeds

RECORDS = [
    record("ar", "1", 10, 9.5, domain="code"),
    record("continuous", "1", 10, 3.5, domain="code"),
    record("continuous", "2", 10, 5.5, domain="plays"),
    record("continuous draft-code", "1", 10, 1.5, domain="code"),
    record("continuous draft-code", "2", 10, 7.5, domain="plays"),
    record("cosine", "1", 10, 0.5, domain="code"),
]


def test_the_best_of_each_prompt_is_among_those_that_are_named_alike() -> None:
    found = speeds(RECORDS, "continuous")
    assert found["continuous"] == {"code": 1.0, "plays": 1.0, ALL: 1.0}
    assert found["continuous draft-code"] == {"code": 4 / 2, "plays": 6 / 8, ALL: 10 / 10}
    assert found[BEST] == {"code": 4 / 2, "plays": 6 / 6, ALL: 10 / 8}
    assert found["cosine"] == {"code": 4 / 1, ALL: 4 / 1}
    assert found["ar"] == {"code": 4 / 10, ALL: 4 / 10}


def test_answers_that_not_all_of_them_gave_count_for_none() -> None:
    assert speeds(RECORDS[:4], "continuous")[BEST] == {"code": 2.0, ALL: 2.0}


def test_a_setup_that_did_not_run_is_an_error() -> None:
    with pytest.raises(InputError, match="--single: expected one of ar, continuous"):
        speeds(RECORDS, "flowspec-paper")
