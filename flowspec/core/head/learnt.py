"""What a head knows after some answers, to begin others with: a session that has answered before."""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.head.costs import Costs
from flowspec.core.head.fusion import Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Of slots and speed, of the models beside the target, and `of_method` what its method learnt, which that
    method alone understands.

    Not a copy: it goes on learning with the head that has it.
    """

    costs: Costs
    trust: Trust
    of_method: object = None
