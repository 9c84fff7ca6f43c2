"""Which prompts are of the same kind: nobody says what a request is about, so domains are found.

Prompts that use the same tokens, of those that not every prompt uses, belong together (leader clustering by
the cosine of tf-idf vectors, over buckets of token ids). Pure; knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from flowspec.core.head.learnt import COUNT_MAX, Count
from flowspec.validation import Document, expect

BUCKETS = 4096
DOMAINS_MAX = 32
ALIKE = 0.25
"""Cosine from which on two prompts are taken to be about the same."""
EXAMPLE_TOKENS = 48
KEPT_BUCKETS = 256
"""Of a domain between runs, the heaviest: by these it is known again."""
EVERYWHERE = 0.2
"""What keeps a word that all prompts use from counting for nothing: the same prompt twice is the same domain.
"""

Sketch = NDArray[np.float64]
"""What texts use: a weight for each bucket of token ids, `[BUCKETS]`."""


def sketch(tokens: Sequence[int]) -> Sketch:
    """Log-weighted counts: 1 + log(count) where a text uses a bucket, else 0."""
    counts = np.bincount(np.asarray(tokens, np.int64) % BUCKETS, minlength=BUCKETS)
    return np.where(counts > 0, 1 + np.log(np.maximum(counts, 1)), 0.0)


_Word = tuple[
    Annotated[int, Meta(ge=0, lt=BUCKETS)],
    Annotated[float, Meta(ge=0, le=COUNT_MAX)],
    Annotated[int, Meta(ge=1)],
]
"""A bucket, its weight in a domain, and how many prompts use it."""


class DomainsState(Document, frozen=True, kw_only=True):
    """Of prompts no text, but which buckets those of each domain use most."""

    prompts: Count
    domains: Annotated[
        tuple[Annotated[tuple[_Word, ...], Meta(max_length=KEPT_BUCKETS)], ...], Meta(max_length=DOMAINS_MAX)
    ]

    def __post_init__(self) -> None:
        used = max((used for words in self.domains for _, _, used in words), default=0)
        expect(
            used <= max(1, self.prompts), "prompts", self.prompts, f"at least {used}, which use one bucket"
        )


class Domains:
    """See the module. Domains are numbered as they are found; `examples` is how the first prompt of each in
    this run ends, nothing where there was none yet."""

    def __init__(self) -> None:
        self.examples: list[tuple[int, ...]] = []
        self._prompts = 0
        self._used = np.zeros(BUCKETS, np.int64)  # prompts that use a bucket
        self._centres: list[Sketch] = []  # sums of sketches

    def __len__(self) -> int:
        return len(self._centres)

    def find(self, prompt: Sequence[int]) -> int:
        """The number of the domain that is most like a new prompt, or of a new one, while there may be more.
        It is learnt from."""
        found = sketch(prompt)
        self._prompts += 1
        self._used += found > 0
        likeness = self._likeness(found)
        best = max(range(len(self)), key=likeness.__getitem__, default=-1)
        if best < 0 or (likeness[best] < ALIKE and len(self) < DOMAINS_MAX):
            self.examples.append(())
            self._centres.append(np.zeros(BUCKETS))
            best = len(self) - 1
        self._centres[best] += found
        self.examples[best] = self.examples[best] or tuple(prompt[-EXAMPLE_TOKENS:])
        return best

    def _likeness(self, found: Sketch) -> list[float]:
        """Each domain's cosine with a sketch, in which a bucket counts the less the more prompts use it, and
        little where only one does: it tells of no other."""
        rarity = np.log((self._prompts + EVERYWHERE) / np.maximum(self._used, 1)) * np.log1p(self._used)
        weighted = found * rarity
        length = np.linalg.norm(weighted)
        likeness = []
        for centre in self._centres:
            both = length * np.linalg.norm(centre * rarity)
            likeness.append(float(weighted @ (centre * rarity) / both) if both > 0 else 0.0)
        return likeness

    def state_dict(self) -> DomainsState:
        domains = []
        for centre in self._centres:
            heaviest = np.argsort(-centre, kind="stable")[:KEPT_BUCKETS]
            words = ((int(each), float(centre[each]), int(self._used[each])) for each in heaviest)
            domains.append(tuple(word for word in words if word[1] > 0))
        return DomainsState(prompts=self._prompts, domains=tuple(domains))

    def load_state_dict(self, state: DomainsState) -> None:
        self._prompts, self._used = state.prompts, np.zeros(BUCKETS, np.int64)
        self._centres = [np.zeros(BUCKETS) for _ in state.domains]
        for centre, words in zip(self._centres, state.domains, strict=True):
            for bucket, weight, used in words:
                centre[bucket], self._used[bucket] = weight, used
        self.examples = [()] * len(self._centres)
