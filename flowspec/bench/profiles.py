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

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flowspec.errors import InputError, meant
from flowspec.plan.tables import Table, read_toml, toml_text

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of one domain at one temperature: `shares[d - 1][i]` of the tokens at distance d are among the best
    `within[i]`, of `tokens[d - 1]` that were looked at (none told: not known)."""

    domain: str
    temperature: float
    shares: tuple[tuple[float, ...], ...]
    tokens: tuple[int, ...] = ()

    @property
    def first(self) -> float:
        """Of the first guesses at distance 1."""
        return self.shares[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A drafter's; `depths` are the shares of the target's layers before the states that it reads, `files`
    the SHA-256 of those that were measured."""

    name: str
    basis: str
    source: str
    reads: str
    depths: tuple[float, ...]
    within: tuple[int, ...]
    shares: tuple[Shares, ...]
    files: Mapping[str, str] = field(default_factory=dict)

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

    def described(self) -> dict[str, Any]:
        """For programs."""
        return {
            "basis": self.basis,
            "source": self.source,
            "reads": self.reads,
            "depths": list(self.depths),
            "within": list(self.within),
            "files": dict(self.files),
            "domains": [
                {
                    "domain": each.domain,
                    "temperature": each.temperature,
                    "tokens": list(each.tokens),
                    "shares": [list(some) for some in each.shares],
                }
                for each in self.shares
            ],
        }

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

    @property
    def distances(self) -> int:
        return max(len(each.shares) for each in self.shares)


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


def profile_folders() -> list[Path]:
    """Beside the package in a checkout, under the environment's `share` when installed."""
    return [
        Path(__file__).resolve().parents[2] / "configs" / "profiles",
        Path(sys.prefix) / "share" / "flowspec" / "profiles",
    ]


def find_profile(name: str) -> Profile:
    """A shipped profile by its name, or one of a `.toml` file; raises `InputError`."""
    if name.endswith(".toml"):
        return read_profile(Path(name))
    shipped = {path.stem: path for folder in reversed(profile_folders()) for path in folder.glob("*.toml")}
    if name in shipped:
        return read_profile(shipped[name])
    raise InputError(
        f"profile: expected a .toml file or one of {', '.join(sorted(shipped))}, got {name!r:.80}"
        f"{meant(name, shipped)}"
    )


def read_profile(path: Path) -> Profile:
    """Raises `InputError` naming file, key and what was expected."""
    table = read_toml(path, "a profile of acceptance")
    table.check({"basis", "source", "reads", "depths", "within", "files", "domain"})
    within = tuple(int(each) for each in table.numbers("within"))
    if within[0] != 1 or list(within) != sorted(set(within)) or list(within) != table.data["within"]:
        table.wrong("within", "whole numbers from 1 on that grow")
    reads = table.text("reads", among=READS)
    depths = tuple(table.numbers("depths")) if "depths" in table.data else ()
    if bool(depths) != (reads != TEXT) or any(each > 1 for each in depths):
        table.wrong("depths", f"shares of the target's layers up to 1, and none where it reads {TEXT}")
    files = table.table("files", needed=False)
    found = Profile(
        name=path.stem,
        basis=table.text("basis", among=BASES),
        source=table.text("source"),
        reads=reads,
        depths=depths,
        within=within,
        files={name: files.text(name) for name in files.data},
        shares=tuple(_shares(each, len(within), reads) for each in table.tables("domain")),
    )
    places = [(each.domain, each.temperature) for each in found.shares]
    for place in places:
        if places.count(place) > 1:
            raise InputError(
                f"{path}: domain: expected each once at a temperature, got {place[0]!r:.80} twice at "
                f"{place[1]:g}"
            )
    if not found.temperatures:
        raise InputError(f"{path}: domain: expected one temperature at which all domains are told, got none")
    return found


def _shares(table: Table, count: int, reads: str) -> Shares:
    table.check({"name", "temperature", "tokens", "shares"})
    rows = table.data.get("shares")
    if not isinstance(rows, list) or not rows or not all(_is_row(row, count) for row in rows):
        table.wrong(
            "shares", f"for each distance from 1 on a list of {count} shares from 0 to 1 that do not fall"
        )
    if reads == TEXT and len(rows) > 1:
        table.wrong("shares", f"one distance, where it reads {TEXT}")
    tokens = tuple(int(each) for each in table.numbers("tokens")) if "tokens" in table.data else ()
    if tokens and len(tokens) != len(rows):
        table.wrong("tokens", f"{len(rows)} numbers, one a distance")
    return Shares(
        domain=table.text("name"),
        temperature=table.number("temperature", least=0.0),
        shares=tuple(tuple(float(share) for share in row) for row in rows),
        tokens=tokens,
    )


def _is_row(row: Any, count: int) -> bool:
    return (
        isinstance(row, list)
        and len(row) == count
        and all(type(each) in (int, float) and 0 <= each <= 1 for each in row)
        and row == sorted(row)
    )


def profile_text(profile: Profile) -> str:
    """As `read_profile` takes it; figures of one distance are a line."""
    lines = [
        f"basis = {toml_text(profile.basis)}",
        f"source = {toml_text(profile.source)}",
        f"reads = {toml_text(profile.reads)}",
        *([f"depths = {json.dumps(list(profile.depths))}"] if profile.depths else []),
        f"within = {json.dumps(list(profile.within))}",
    ]
    if profile.files:
        lines += [
            "",
            "[files]",
            *(f"{toml_text(name)} = {toml_text(of)}" for name, of in profile.files.items()),
        ]
    for each in profile.shares:
        lines += ["", "[[domain]]", f"name = {toml_text(each.domain)}", f"temperature = {each.temperature:g}"]
        lines += [f"tokens = {json.dumps(list(each.tokens))}"] if each.tokens else []
        lines += ["shares = [", *(f"  {json.dumps(list(row))}," for row in each.shares), "]"]
    return "\n".join(lines) + "\n"
