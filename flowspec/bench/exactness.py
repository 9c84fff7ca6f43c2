"""Compares a cluster's answers, token by token, with step-by-step decoding by the same arithmetic in one
process.

`exact`: all tokens are equal. `wrong`: anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from flowspec.bench.margin import margin_of_last
from flowspec.bench.records import EXACT, WRONG
from flowspec.core.protocol.messages import Sampling
from flowspec.model.step_by_step import StepByStep
from flowspec.runtime.session import Limits, Session
from flowspec.runtime.token_stream import Timing, TokenStream

STOPPED = -1
"""Stands for whichever stop token ended an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    prompt_id: str
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAnswer:
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
class Difference:
    """The first place where an answer is another one, and both tokens there; None for one that had ended.

    `margin`: by how many logits the expected token leads there, to tell rounding from worse; None where none
    was expected.
    """

    index: int
    expected: int | None
    found: int | None
    margin: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one answer compared: `exact`, or `wrong` by that difference. So many tokens of the right answer are
    `unlikely`: not the likeliest there, which shows that sampling was tried."""

    found: ClusterAnswer
    kind: str
    unlikely: int
    difference: Difference | None = None


def answer(
    session: Session, case: Case, limits: Limits, users: int, tell: Callable[[int], object]
) -> ClusterAnswer:
    """Asks the cluster one case, as one of so many users; `tell` hears of `new_tokens_max` tokens in all."""
    running, timing = session.ask(case.prompt, case.sampling, limits, tell)
    tell(limits.new_tokens_max - len(timing.new_tokens))
    return found_of(session, case, running, timing, limits, users)


def found_of(
    session: Session, case: Case, running: TokenStream, timing: Timing, limits: Limits, users: int = 1
) -> ClusterAnswer:
    assert running.end is not None
    return ClusterAnswer(
        case=case,
        method=session.decoding.method,
        drafter=session.drafter,
        stages=len(session.head.stages),
        new_tokens_max=min(limits.new_tokens_max, session.head.plan.context - len(case.prompt)),
        tokens=(*timing.new_tokens, *((STOPPED,) if running.end.reason == "stop" else ())),
        users=users,
        chain=session.decoding.chain,
    )


def judge(plain: StepByStep, found: ClusterAnswer, stop_ids: frozenset[int]) -> Verdict:
    """Compares one answer with that of one process. Raises `ClusterError` when the model overflows in its
    dtype there.
    """
    case = found.case
    asked = (case.prompt, case.sampling, found.new_tokens_max, stop_ids)
    expected, unlikely = plain.generate(*asked), plain.unlikely(*asked)
    index = parting(expected, found.tokens, stop_ids)
    if index is None:
        return Verdict(found=found, kind=EXACT, unlikely=unlikely)
    has_more = index < len(expected)
    difference = Difference(
        index=index,
        expected=expected[index] if has_more else None,
        found=found.tokens[index] if index < len(found.tokens) else None,
        margin=margin_of_last(plain, case.prompt, case.sampling, expected[: index + 1]) if has_more else None,
    )
    return Verdict(found=found, kind=WRONG, unlikely=unlikely, difference=difference)


def parting(expected: Sequence[int], found: Sequence[int], stop_ids: frozenset[int]) -> int | None:
    """Where an answer, with `STOPPED` for its stop token, leaves the expected one (its stop token included);
    None: nowhere.
    """
    seen = (STOPPED if token in stop_ids else token for token in expected)
    return next((index for index, (a, b) in enumerate(zip_longest(seen, found)) if a != b), None)
