"""Compares a cluster's answers with the plain model's, token by token, and says what each difference is.

`exact`: all tokens equal. `near-tie`: every difference lies where the model's choice hangs on less than its own numeric
noise, and what follows is what the model says after it. `wrong`: anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowspec.core.messages import Sampling
from flowspec.model.reference import Difference, Reference
from flowspec.runtime.session import Limits, Session, Timing, timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One answer to compare."""

    prompt_id: str
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one answer compared; `differences` is empty for exact ones."""

    case: Case
    stages: int
    kind: str
    new_tokens: int
    differences: tuple[Difference, ...] = field(default=())


def answer_of(session: Session, case: Case, limits: Limits) -> list[int]:
    """The cluster's new tokens; a stop token that ended them is put back, to be compared as well."""
    request = session.head.new_request()
    timing = Timing()
    answer = session.submit(case.prompt, case.sampling, limits, request=request)
    for _ in timed(answer, timing):
        pass
    session.head.forget(request)
    assert answer.end is not None
    return [*timing.new_tokens, -1] if answer.end.reason == "stop" else timing.new_tokens


def compare(session: Session, reference: Reference, case: Case, limits: Limits) -> Verdict:
    """Answers one case on the cluster and judges it by the reference."""
    found = answer_of(session, case, limits)
    context = session.head.plan.context
    expected = reference.generate(case.prompt, case.sampling, min(limits.new_tokens_max, context - len(case.prompt)), limits.stop_ids)
    stages = len(session.head.stages)
    if found == [-1 if token in limits.stop_ids else token for token in expected]:
        return Verdict(case=case, stages=stages, kind="exact", new_tokens=len(found))
    differences = tuple(
        difference
        for difference in reference.check(case.prompt, case.sampling, found)
        if not (difference.found == -1 and difference.expected in limits.stop_ids)
    )
    first = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected)))
    if not differences and first < min(len(found), len(expected)):
        # The forced pass agrees with the cluster and the cached one does not: the margin is below the noise between them.
        differences = (Difference(index=first, expected=expected[first], found=found[first], margin=0.0),)
    near = bool(differences) and all(difference.margin <= reference.noise_logits for difference in differences)
    return Verdict(case=case, stages=stages, kind="near-tie" if near else "wrong", new_tokens=len(found), differences=differences)
