"""From an answer to its record: the figures that every world computes alike, and how an answer agrees with
the plain one.

Knows nothing of how an answer was got, and of what went over the links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec.bench.config import Bench, Setup, Testbed
from flowspec.bench.oracle import Station
from flowspec.bench.outcome import EXACT, WRONG, Record
from flowspec.bench.plain import PlainCase
from flowspec.bench.trace import Trace, oracle_s, slots_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """An answer without its stop token, in instants of its world's clock; `report` is that of
    `core.head.statistics`."""

    tokens: tuple[int, ...]
    reason: str
    submitted_s: float
    first_s: float
    last_s: float
    report: Mapping[str, Any]
    trace: Trace
    arithmetic: str = ""

    @property
    def whole_s(self) -> float:
        """From the question to the last token."""
        return self.last_s - self.submitted_s


def is_plain(case: PlainCase, tokens: tuple[int, ...], reason: str) -> bool:
    """Whether an answer, without its stop token, is the plain one, token for token, and ended as it did."""
    return tokens == case.new_tokens and reason == ("stop" if case.is_stopped else "length")


def agreement_of(case: PlainCase, tokens: tuple[int, ...], reason: str) -> str:
    """`exact` for an answer that is the plain one, else `wrong`."""
    return EXACT if is_plain(case, tokens, reason) else WRONG


def record_of(
    bench: Bench,
    testbed: str,
    setup: Setup,
    case: PlainCase,
    answered: RecordedAnswer,
    *,
    world: str,
    repeat: int,
    network_bytes: int,
    energy_j: float,
    events: int,
    digest: str,
    stations: Sequence[Station] | None = None,
) -> Record:
    """What is kept of an answer; what slots cost in it is counted from its first token on. `stations` as in
    `trace.oracle_s`."""
    found = answered.report
    decode_s = answered.last_s - answered.first_s
    slots = slots_of(answered.trace.since(answered.first_s, answered.last_s))
    return Record(
        experiment=bench.name,
        world=world,
        testbed=testbed,
        method=setup.name,
        prompt_id=case.prompt_id,
        domain=case.domain,
        temperature=case.sampling.temperature,
        seed=case.sampling.seed,
        repeat=repeat,
        new_tokens=len(answered.tokens),
        finish_reason=answered.reason,
        agreement=agreement_of(case, answered.tokens, answered.reason),
        decode_s=decode_s,
        time_to_first_token_s=answered.first_s - answered.submitted_s,
        tokens_per_s=(len(answered.tokens) - 1) / decode_s if decode_s > 0 else 0.0,
        S=found["tokens_per_commit"],
        rho=found["share_in_flight"],
        acceptance=found["acceptance_length"],
        stage_busy=found["stage_busy"],
        dropped_rows=found["rows_dropped"],
        rows=found["rows_computed"],
        network_bytes=network_bytes,
        energy_j=energy_j,
        tau_s=slots.tau_s if slots else 0.0,
        trip_s=slots.trip_s if slots else 0.0,
        oracle_s=oracle_s(answered.trace, stations),
        chains=list(found.get("chains", ())),
        events=events,
        digest=digest,
        arithmetic=answered.arithmetic,
    )


def energy_of(
    testbed: Testbed,
    whole_s: float,
    stages_busy_s: Sequence[float],
    drafters_busy_s: Mapping[int | None, float],
) -> float:
    """What all boards take in `whole_s`, of which they compute for so long: stages, the head (None), and
    drafters' boards by number."""
    stages_j = sum(
        device.energy_j(whole_s, busy_s)
        for device, busy_s in zip(testbed.devices, stages_busy_s, strict=True)
    )
    places = {None: testbed.head} | {number: board.device for number, board in enumerate(testbed.boards)}
    drafters_j = sum(
        device.energy_j(whole_s, drafters_busy_s.get(number, 0.0))
        for number, device in places.items()
        if device is not None
    )
    return stages_j + drafters_j
