"""Ratios are of pairs side by side, and a median's interval knows that one prompt's rounds are alike."""

from __future__ import annotations

import pytest

from flowspec.model.prompts import Prompt, read_prompts
from tests.perf.floor import COLUMNS, PROMPTS, interval, median_ratio, table


def test_a_ratio_is_of_two_rates_of_one_round() -> None:
    """While something else ran, both were slow."""
    assert median_ratio([(100, 100), (10, 20), (50, 50)]) == 1


def test_what_differs_by_prompt_makes_the_interval_wide_and_more_rounds_do_not_mend_it() -> None:
    unlike = [[(ratio, 1.0)] * 20 for ratio in (0.5, 0.9, 1.0, 1.1, 1.5)]
    low, high = interval(unlike)
    assert low <= 0.9
    assert high >= 1.1
    assert interval([[(1.02, 1.0)] * 20] * 5) == (1.02, 1.02)


def test_a_row_for_each_domain_and_one_for_all() -> None:
    found = {
        Prompt(prompt_id="1", domain="a", turns=("x",)): [(2.0, 1.0), (4.0, 2.0)],
        Prompt(prompt_id="2", domain="a", turns=("y",)): [(1.0, 1.0), (3.0, 2.0)],
        Prompt(prompt_id="3", domain="b", turns=("z",)): [(1.0, 2.0), (1.0, 2.0)],
    }
    rows = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in table(found)}
    assert list(rows) == ["a", "b", "all"]
    assert rows["a"]["continuous / ar"] == pytest.approx(1.75)
    assert rows["a"]["worst prompt"] == pytest.approx(1.25)
    assert (rows["b"]["95% from"], rows["b"]["to"]) == (0.5, 0.5)
    assert (rows["all"]["prompts"], rows["all"]["ar"]) == (3, 2.0)


def test_the_prompts_are_twenty_of_the_domains_that_are_guessed_worst() -> None:
    domains = [prompt.domain for prompt in read_prompts(PROMPTS)]
    assert (domains.count("code"), domains.count("plays")) == (10, 10)
