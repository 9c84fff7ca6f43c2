"""Compares a cluster's answers with the plain model's, token by token, and says what each difference is.

`exact`: all tokens equal. `near-tie`: every difference lies where the model's choice hangs on less than its own numeric
noise, and what follows is what the model says after it. `wrong`: anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec.core.messages import Sampling
from flowspec.model.reference import Difference, Reference
from flowspec.runtime.answer import Answer, Timing
from flowspec.runtime.session import Limits, Session
from flowspec.testbed.outcome import EXACT, NEAR_TIE, WRONG

STOPPED = -1
"""Stands for whichever stop token ended an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One answer to compare."""

    prompt_id: str
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a cluster of `stages` answered: its new tokens, and -1 at the end where a stop token ended them.

    `users` is how many answers at most were under way at once, `chain` as in `Decoding`.
    """

    case: Case
    method: str
    drafter: str
    stages: int
    new_tokens_max: int
    tokens: tuple[int, ...]
    users: int = 1
    chain: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one answer compared: `exact`, `near-tie` or `wrong`; `differences` is empty for exact ones."""

    found: Found
    kind: str
    differences: tuple[Difference, ...] = field(default=())


def answer(session: Session, case: Case, limits: Limits, users: int = 1) -> Found:
    """Asks the cluster one case, as one of so many users."""
    return found_of(session, case, *session.ask(case.prompt, case.sampling, limits), limits, users)


def found_of(session: Session, case: Case, running: Answer, timing: Timing, limits: Limits, users: int = 1) -> Found:
    """What a session answered to a case."""
    assert running.end is not None
    return Found(
        case=case,
        method=session.decoding.method,
        drafter=session.drafter,
        stages=len(session.head.stages),
        new_tokens_max=min(limits.new_tokens_max, session.head.plan.context - len(case.prompt)),
        tokens=(*timing.new_tokens, *((STOPPED,) if running.end.reason == "stop" else ())),
        users=users,
        chain=session.decoding.chain,
    )


def judge(reference: Reference, found: Found, stop_ids: frozenset[int]) -> Verdict:
    """Compares one answer; the reference must have generated all answers before, for its noise to be known."""
    case = found.case
    expected = reference.generate(case.prompt, case.sampling, found.new_tokens_max, stop_ids)
    kind, differences = compare(reference, case.prompt, case.sampling, expected, found.tokens, stop_ids)
    return Verdict(found=found, kind=kind, differences=differences)


def compare(
    reference: Reference,
    prompt: tuple[int, ...],
    sampling: Sampling,
    expected: Sequence[int],
    found: Sequence[int],
    stop_ids: frozenset[int],
) -> tuple[str, tuple[Difference, ...]]:
    """How an answer, with `STOPPED` for its stop token, agrees with the plain one (its stop token included), and where it does not."""
    if list(found) == [STOPPED if token in stop_ids else token for token in expected]:
        return EXACT, ()
    differences = tuple(
        difference
        for difference in (reference.check(prompt, sampling, list(found)) if found else ())
        if not (difference.found == STOPPED and difference.expected in stop_ids)
    )
    shorter = min(len(found), len(expected))
    first = next((index for index in range(shorter) if found[index] != expected[index]), shorter)
    if not differences and first < shorter:
        # The forced pass agrees with what was found and not with what was expected, which came from a cached pass: then the
        # margin is below the noise between the two, or something else was expected than this model says.
        margins = [each.margin for each in reference.check(prompt, sampling, list(expected)) if each.index == first]
        differences = (Difference(index=first, expected=expected[first], found=found[first], margin=max(margins, default=0.0)),)
    near = bool(differences) and all(difference.margin <= reference.noise_logits for difference in differences)
    return NEAR_TIE if near else WRONG, differences
