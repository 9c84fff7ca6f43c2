"""Profiles of acceptance: how often a drafter's guesses are right, by rank, distance and domain.

A guess's *distance* is how many tokens it is ahead of the newest token that the target has given (1: the
token after that one). Profiles are `measured` (by `lab.perf.acceptance`; these name the drafter's files by
hash), `published` by others, or `reconstructed` from what others published, which is less than one needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, field

from flowspec.bench.drafters import CONCENTRATION
from flowspec.errors import InputError
from flowspec.plan.tables import NotNegative, Share, Table, Text, among, find_file, read_toml, some_tables
from flowspec.validation import NOTHING, Misfit, expect

FOLDER = "lab/profiles"
MEASURED = "measured"
TEXT, CHAIN, BLOCK = "text", "chain", "block"
"""What a drafter guesses from: the text alone, at any distance alike; features, with one guess on top of the
other; features, a block of guesses in one pass, and nothing beyond it."""
WITHIN = (1, 2, 4, 8, 16)
CONCENTRATIONS = np.geomspace(0.05, 60, 72)
"""Those that are tried."""


class Shares(Table, frozen=True, kw_only=True):
    """Of one domain at one temperature: `shares[d - 1][i]` of the tokens at distance d are among the best
    `within[i]`, of `tokens[d - 1]` that were looked at (empty: not known)."""

    domain: Text = field(name="name")
    temperature: NotNegative
    shares: Annotated[tuple[tuple[Share, ...], ...], Meta(min_length=1)]
    tokens: Annotated[tuple[Annotated[int, Meta(ge=0, le=10**9)], ...], Meta(min_length=1)] = ()


class Profile(Table, frozen=True, kw_only=True):
    """A drafter's; `depths` are the shares of the target's layers before the states that it reads, `files`
    the SHA-256 of those that were measured."""

    basis: Annotated[str, among((MEASURED, "published", "reconstructed"))]
    source: Text
    reads: Annotated[str, among((TEXT, CHAIN, BLOCK))]
    depths: Annotated[tuple[Share, ...], Meta(min_length=1)] = ()
    within: Annotated[tuple[int, ...], Meta(min_length=1)]
    shares: Annotated[tuple[Shares, ...], some_tables("domain")] = field(name="domain")
    files: Mapping[Text, Text] = field(default_factory=dict)

    def __post_init__(self) -> None:
        expected = f"shares of the target's layers up to 1, and none where it reads {TEXT}"
        expect(bool(self.depths) != (self.reads == TEXT), "depths", self.depths or NOTHING, expected)
        expected = f"for each distance a list of {len(self.within)} shares from 0 to 1 that do not fall"
        for number, each in enumerate(self.shares):
            if any(len(row) != len(self.within) or list(row) != sorted(row) for row in each.shares):
                raise Misfit(("domain", number, "shares"), expected, each.shares)

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.domain for each in self.shares))

    def of(self, domain: str, temperature: float) -> Shares:
        """Raises `InputError` where it says nothing."""
        for each in self.shares:
            if (each.domain, each.temperature) == (domain, temperature):
                return each
        raise InputError(f"the profile has nothing of {domain} at temperature {temperature:g}")


def find_profile(name: str) -> Profile:
    """One of `lab/profiles` by its name, or one of a `.toml` file; raises `InputError`."""
    return read_toml(find_file(name, FOLDER, "profile"), Profile, "a profile of acceptance")


def beta_of(shares: Sequence[float], within: Sequence[int]) -> tuple[float, float]:
    """The two parameters of the Beta distribution that gives the first share exactly, and the others as well
    as it can (least squares)."""
    mean = min(0.999, max(0.001, shares[0]))
    totals = CONCENTRATIONS if len(shares) > 1 else (CONCENTRATION,)
    known = list(zip(within, shares, strict=True))
    errors = [
        sum((share_within(mean, each, count) - share) ** 2 for count, share in known) for each in totals
    ]
    total = float(totals[int(np.argmin(errors))])
    return mean * total, (1 - mean) * total


def share_within(mean: float, concentration: float, count: int) -> float:
    """The share of tokens among the best `count`: 1 less the mean of (1 - c)^count."""
    a = (1 - mean) * concentration
    return 1 - math.prod((a + rank) / (concentration + rank) for rank in range(count))
