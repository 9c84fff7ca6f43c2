"""The drafter that is taken where the user names none: of the published ones for the model the best that is
here, with look-ups beside it, else what `Decoding` says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from flowspec.core.methods import find_method
from flowspec.draft.choosing import Candidate, Candidates, best_here, candidates
from flowspec.runtime.cluster_file import read_drafters
from flowspec.runtime.decoding import Decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """How answers are made, with the `drafter` that was taken; None where what is given, or the fallback,
    drafts. The candidates are those that there were to choose from: none where something is given."""

    decoding: Decoding
    candidates: Candidates = field(default_factory=Candidates)
    drafter: Candidate | None = None


def taken_for(decoding: Decoding, model: str, cluster: Path | None) -> Taken:
    """What is taken for a model; files are looked at where they are here, and none is fetched."""
    is_given = decoding.drafters or decoding.chain is not None or not find_method(decoding.method).drafts
    if is_given or (cluster is not None and read_drafters(cluster)):
        return Taken(decoding=decoding)
    found = candidates(model)
    best = best_here(found)
    if best is not None:
        decoding = replace(decoding, drafters=decoding.beside_look_ups(best.name), is_default=True)
    return Taken(decoding=decoding, candidates=found, drafter=best)
