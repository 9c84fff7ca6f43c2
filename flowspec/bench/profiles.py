"""Profiles of acceptance: how often a drafter's guesses are right, by rank, distance and domain.

A guess's *distance* is how many tokens it is ahead of the newest token that the target has given (1: the
token after that one). A profile says for each domain and temperature, and each distance from 1 on, which
share of the next tokens are among the drafter's best 1, 2, 4, ... (`within`). Shipped ones are in
`configs/profiles`: `measured` (by `lab/perf/acceptance.py`; these name the drafter's files by hash),
`published` by others, or `reconstructed` from what others published, which is less than a profile
needs.

What a drafter says is drawn from it as `bench.synthetic` has it: confidences fall off geometrically,
`c (1 - c)^i`, with c from a Beta distribution whose mean is the share of first guesses. Its concentration is
the one under which the other shares come out best, so few figures stand for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta, field, structs, to_builtins

from flowspec.plan.tables import (
    NotNegative,
    Share,
    Table,
    Text,
    among,
    find_file,
    read_toml,
    some_tables,
    toml_of,
)
from flowspec.validation import NOTHING, Misfit, expect

FOLDER = "configs/profiles"
MEASURED, PUBLISHED, RECONSTRUCTED = "measured", "published", "reconstructed"
BASES = (MEASURED, PUBLISHED, RECONSTRUCTED)
TEXT, CHAIN, BLOCK = "text", "chain", "block"
READS = (TEXT, CHAIN, BLOCK)
"""What a drafter guesses from: the text alone, at any distance alike; features, with one guess on top of the
other; features, a block of guesses in one pass, and nothing beyond it."""
WITHIN = (1, 2, 4, 8, 16)
CONCENTRATION = 2.0
"""Of the Beta distribution where only first guesses are known, as in `bench.synthetic`."""
CONCENTRATIONS = np.geomspace(0.05, 60, 72)
"""Those that are tried."""
LEAST, MOST = 0.001, 0.999
"""Shares that a Beta distribution can have as its mean here."""


class Shares(Table, frozen=True, kw_only=True):
    """Of one domain at one temperature: `shares[d - 1][i]` of the tokens at distance d are among the best
    `within[i]`, of `tokens[d - 1]` that were looked at (none told: not known)."""

    domain: Text = field(name="name")
    temperature: NotNegative
    shares: Annotated[tuple[tuple[Share, ...], ...], Meta(min_length=1)]
    tokens: Annotated[tuple[Annotated[int, Meta(ge=0, le=10**9)], ...], Meta(min_length=1)] = ()

    def __post_init__(self) -> None:
        count = len(self.shares)
        expect(len(self.tokens) in (0, count), "tokens", self.tokens, f"{count} numbers, one a distance")

    @property
    def first(self) -> float:
        """Of the first guesses at distance 1."""
        return self.shares[0][0]


class ProfileFile(Table, frozen=True, kw_only=True):
    """A drafter's; `depths` are the shares of the target's layers before the states that it reads, `files`
    the SHA-256 of those that were measured."""

    basis: Annotated[str, among(BASES)]
    source: Text
    reads: Annotated[str, among(READS)]
    depths: Annotated[tuple[Share, ...], Meta(min_length=1)] = ()
    within: Annotated[tuple[int, ...], Meta(min_length=1)]
    shares: Annotated[tuple[Shares, ...], some_tables("domain")] = field(name="domain")
    files: Mapping[Text, Text] = field(default_factory=dict)

    def __post_init__(self) -> None:
        within, is_text = self.within, self.reads == TEXT
        grows = within[0] == 1 and list(within) == sorted(set(within))
        expect(grows, "within", within, "whole numbers from 1 on that grow")
        told = f"shares of the target's layers up to 1, and none where it reads {TEXT}"
        expect(bool(self.depths) != is_text, "depths", self.depths or NOTHING, told)
        places = []
        for number, each in enumerate(self.shares):
            told = f"for each distance from 1 on a list of {len(within)} shares from 0 to 1 that do not fall"
            if any(len(row) != len(within) or list(row) != sorted(row) for row in each.shares):
                raise Misfit(("domain", number, "shares"), told, each.shares)
            if is_text and len(each.shares) > 1:
                raise Misfit(
                    ("domain", number, "shares"), f"one distance, where it reads {TEXT}", each.shares
                )
            if (place := (each.domain, each.temperature)) in places:
                raise Misfit(("domain", number), "each once at a temperature", place)
            places.append(place)
        expect(bool(self.temperatures), "domain", NOTHING, "one temperature at which all domains are told")

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.domain for each in self.shares))

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Those of which all domains are known."""
        found = dict.fromkeys(each.temperature for each in self.shares)
        return tuple(
            each for each in found if {(name, each) for name in self.domains} <= set(self._by_place())
        )

    def of(self, domain: str, temperature: float) -> Shares:
        return self._by_place()[domain, temperature]

    def _by_place(self) -> dict[tuple[str, float], Shares]:
        return {(each.domain, each.temperature): each for each in self.shares}

    @property
    def distances(self) -> int:
        return max(len(each.shares) for each in self.shares)


class Profile(ProfileFile, frozen=True, kw_only=True):
    """A drafter's under a name."""

    name: str

    def table(self) -> str:
        """For people: a line a domain, with first guesses at some distances, and all ranks at distance 1."""
        distances = [each for each in (1, 2, 4, 7, 8, 10, 13, 16) if each <= self.distances]
        lines = [
            f"{self.name} ({self.basis})",
            f"| domain | T | tokens | {' / '.join(map(str, distances))} ahead | within "
            f"{' / '.join(map(str, self.within))} at 1 |",
        ]
        for each in self.shares:
            known = [at for at in distances if at <= len(each.shares)]
            ahead = " / ".join(f"{each.shares[at - 1][0]:.2f}" for at in known)
            ranks = " / ".join(f"{share:.2f}" for share in each.shares[0])
            count = each.tokens[0] if each.tokens else "?"
            lines.append(f"| {each.domain} | {each.temperature:g} | {count} | {ahead} | {ranks} |")
        return "\n".join(lines)


def beta_of(shares: Sequence[float], within: Sequence[int]) -> tuple[float, float]:
    """The two parameters of the Beta distribution that gives the first share exactly, and the others as well
    as it can (least squares)."""
    mean = min(MOST, max(LEAST, shares[0]))
    if len(shares) == 1:
        return mean * CONCENTRATION, (1 - mean) * CONCENTRATION
    found = [
        sum(
            (share_within(mean, total, count) - share) ** 2
            for count, share in zip(within, shares, strict=True)
        )
        for total in CONCENTRATIONS
    ]
    total = float(CONCENTRATIONS[int(np.argmin(found))])
    return mean * total, (1 - mean) * total


def share_within(mean: float, concentration: float, count: int) -> float:
    """The share of tokens among the best `count`: 1 less the mean of (1 - c)^count."""
    missed = 1.0
    for rank in range(count):
        missed *= ((1 - mean) * concentration + rank) / (concentration + rank)
    return 1 - missed


def find_profile(name: str) -> Profile:
    """A shipped profile by its name, or one of a `.toml` file; raises `InputError`."""
    return read_profile(find_file(name, FOLDER, "profile"))


def read_profile(path: Path) -> Profile:
    """Raises `InputError` naming file, key and what was expected."""
    return Profile(name=path.stem, **structs.asdict(read_toml(path, ProfileFile, "a profile of acceptance")))


def profile_text(profile: Profile) -> str:
    """As `read_profile` takes it; figures of one distance are a line."""
    found = to_builtins(profile)
    return toml_of({name: found[name] for name in found if name != "name"})
