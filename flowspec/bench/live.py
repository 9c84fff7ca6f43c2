"""Answers of an experiment in real time, by real processes: the emulated world and the cluster world.

Every testbed is a cluster of its own. In every round (`Experiment.repeat`) each method holds it once,
forwards and backwards in turns, so that a machine that grows slower hits all alike; its session answers a cut
prompt to warm up, and then all cases that are missing, one after the other, each when nothing of the one
before is under way any more.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowspec.bench.cases import DTYPE, PlainCase
from flowspec.bench.engine import Step, keys_of
from flowspec.bench.experiment import EMULATED, SIMULATED, Experiment, Setup, Testbed
from flowspec.bench.records import (
    RESULTS,
    FinishedAnswer,
    Key,
    Record,
    Trace,
    energy_of,
    record_of,
    write_records,
)
from flowspec.bench.simulated import drafting_curve, sampling_curve, stage_curves
from flowspec.core.head.events import (
    Draft,
    Drafted,
    Finished,
    HeadCommand,
    HeadEvent,
    SendToFirstStage,
    SendToStages,
    VerifiedArrived,
)
from flowspec.core.protocol.types import Message
from flowspec.draft.kinds import NONE, check_drafter
from flowspec.errors import InputError
from flowspec.plan.cost import row_bytes
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.emulation import DeviceEmulation, Emulation
from flowspec.runtime.session import ClusterOptions, Limits, OpenCluster, Session, open_cluster
from flowspec.wire.codec import DTYPE_BYTES, Envelope, encode

WARM_UP_TOKENS = 48
"""Of the first prompt, in every session: what the head learns costs and confidences from before anything
counts."""
REST_S_MAX = 30.0
"""The last segments of an answer are waited for so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where answers are made. `testbed` says what its boards take, None where none are named; `row_bytes` is
    a hidden state's, None: the model's."""

    name: str
    options: ClusterOptions
    testbed: Testbed | None
    row_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one session of a method has to answer."""

    setup: Setup
    repeat: int
    cases: tuple[PlainCase, ...]


def run_live(
    experiment: Experiment,
    cases: Sequence[PlainCase],
    done: Sequence[Record],
    out: Path,
    step: Step,
) -> tuple[list[Record], dict[str, Trace]]:
    """The records that are missing, each on disk as soon as it is there, and what happened in each method's
    first answer of all.

    Raises `InputError` for what these worlds do not have, `ClusterError` when a device is lost or cannot keep
    up with what it emulates.
    """
    _check(experiment)
    found, traces = list(done), dict[str, Trace]()
    known = {record.key for record in done}
    for place in places(experiment):
        rounds = list(rounds_of(experiment, place.name, cases, known))
        if not rounds:
            continue
        is_traced = not traces
        with open_cluster(place.options, decoding=Decoding(drafters=experiment.drafters)) as cluster:
            for one in rounds:
                name = one.setup.name
                step(f"{place.name}, {name}: warming up", 0)
                for record, trace in _answers(experiment, place, cluster, one, cases[0], step):
                    write_records(out / RESULTS, [record])
                    found.append(record)
                    if is_traced:
                        traces.setdefault(name, trace)
                    step("", 1)
    return found, traces


def _check(experiment: Experiment) -> None:
    assert experiment.world != SIMULATED
    if experiment.is_synthetic:
        raise InputError(
            f"world {experiment.world}: expected a real model, got {experiment.model!r}, which exists in the "
            "simulated world only"
        )
    for setup in experiment.setups:
        if setup.published:
            raise InputError(
                f"world {experiment.world}: method {setup.name!r} runs as its paper's code does it "
                "(published = true), which is computed in the simulated world only; choose other --methods"
            )
        if len(experiment.drafters_of(setup)) > 1 or setup.chain:
            raise InputError(
                f"world {experiment.world}: method {setup.name!r} has several models beside the target, "
                "which is computed in the simulated world only; choose other --methods"
            )
    for name in experiment.drafters:
        check_drafter(name)


def places(experiment: Experiment) -> list[Place]:
    """The testbeds, emulated; or the one cluster, named after the testbed if there is one."""
    if experiment.world == EMULATED:
        return [_emulated(experiment, testbed) for testbed in experiment.testbeds]
    if len(experiment.testbeds) > 1:
        raise InputError(
            f"world {experiment.world}: expected at most one testbed, which the cluster is, got "
            f"{len(experiment.testbeds)}"
        )
    options = ClusterOptions(
        model=experiment.model,
        dtype=DTYPE,
        cluster=experiment.cluster,
        local=experiment.local,
        context=experiment.context,
    )
    named = next(iter(experiment.testbeds), None)
    own_name = (
        f"{experiment.local} local processes" if experiment.cluster is None else experiment.cluster.stem
    )
    return [Place(name=own_name if named is None else named.name, options=options, testbed=named)]


def _emulated(experiment: Experiment, testbed: Testbed) -> Place:
    row = row_bytes(testbed.shape, testbed.precision)
    sampling = sampling_curve(testbed)
    emulation = Emulation(
        devices=tuple(
            DeviceEmulation(layers=curve, sampling=sampling, outgoing=testbed.link, row_bytes=row)
            for curve in stage_curves(testbed)
        ),
        drafting=drafting_curve(testbed),
        control=testbed.link,
        first_hop=testbed.link,
    )
    options = ClusterOptions(
        model=experiment.model,
        dtype=DTYPE,
        local=len(testbed.devices),
        context=experiment.context,
        emulation=emulation,
    )
    return Place(name=testbed.name, options=options, testbed=testbed, row_bytes=row)


def rounds_of(
    experiment: Experiment, place: str, cases: Sequence[PlainCase], known: set[Key]
) -> Iterator[Round]:
    """Sessions in order, without those that have nothing left to answer."""
    for repeat in range(experiment.repeat):
        for setup in experiment.setups if repeat % 2 == 0 else experiment.setups[::-1]:
            missing = tuple(case for case in cases if keys_of(place, setup, case, repeat)[0] not in known)
            if missing and setup.runs_on(place):
                yield Round(setup=setup, repeat=repeat, cases=missing)


def _answers(
    experiment: Experiment,
    place: Place,
    cluster: OpenCluster,
    one: Round,
    first: PlainCase,
    step: Step,
) -> Iterator[tuple[Record, Trace]]:
    """A method holds the cluster: it warms up with the first prompt of all, and answers its cases."""
    setup, recorder = one.setup, LiveRecorder()
    row_bytes = place.row_bytes or cluster.config.hidden_size * DTYPE_BYTES[DTYPE]
    drafters = experiment.drafters_of(setup) or (NONE,)
    decoding = Decoding(method=setup.method, drafters=drafters, options=setup.options, coupled=setup.coupled)
    with cluster.session(decoding, lambda text, share: step(text, 0), recorder) as session:
        stages = len(session.head.stages)
        recorder.answer(session, replace(first, new_tokens_max=min(WARM_UP_TOKENS, first.new_tokens_max)))
        for case in one.cases:
            about = f"{case.domain} {case.prompt_id}, temperature {case.sampling.temperature:g}"
            step(f"{place.name}, {setup.name}: {about}", 0)
            answered = recorder.answer(session, case)
            record = record_of(
                experiment,
                place.name,
                setup,
                case,
                answered,
                repeat=one.repeat,
                network_bytes=recorder.network_bytes(stages, row_bytes),
                energy_j=_energy_j(place.testbed, answered, stages),
                digest=hashlib.blake2b(json.dumps(answered.tokens).encode(), digest_size=16).hexdigest(),
            )
            yield record, answered.trace


def _energy_j(testbed: Testbed | None, answered: FinishedAnswer, stages: int) -> float:
    """What the named boards take; 0 where none are named, or others than there are stages."""
    if testbed is None or len(testbed.devices) != stages:
        return 0.0
    trace = answered.trace
    stages_busy_s = [sum(trip.hops[at].compute_s for trip in trace.trips) for at in range(stages)]
    return energy_of(
        testbed,
        answered.whole_s,
        stages_busy_s,
        {None: sum(each.ended_s - each.started_s for each in trace.passes)},
    )


class LiveRecorder:
    """Watches a head's thread, answer by answer; an answer is over when nothing of it is under way any more,
    dead segments included."""

    def __init__(self) -> None:
        self._begin()
        self._under_way = 0

    def _begin(self) -> None:
        self._trace = Trace()
        self._to_stages: list[Message] = []
        self._to_or_from_one: list[Message] = []
        self._has_ended = False
        self._at_rest = threading.Event()

    def __call__(self, event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        self._trace.watch(event, commands, now_s)
        if isinstance(event, VerifiedArrived):
            self._to_or_from_one.append(event.verified)
        self._under_way -= isinstance(event, VerifiedArrived | Drafted)
        for command in commands:
            if isinstance(command, SendToFirstStage):
                self._to_or_from_one.append(command.segment)
            elif isinstance(command, SendToStages):
                self._to_stages.append(command.message)
            self._under_way += isinstance(command, SendToFirstStage | Draft)
            self._has_ended |= isinstance(command, Finished)
        if self._has_ended and self._under_way == 0:
            self._at_rest.set()

    def answer(self, session: Session, case: PlainCase) -> FinishedAnswer:
        """Asks, reads, and waits until the cluster is at rest again: the next answer shall not stand in this
        one's queue."""
        self._begin()
        answer, timing = session.ask(
            case.prompt, case.sampling, Limits(new_tokens_max=case.new_tokens_max, stop_ids=case.stop_ids)
        )
        assert answer.end is not None
        self._at_rest.wait(REST_S_MAX)
        return FinishedAnswer(
            tokens=tuple(timing.new_tokens),
            reason=answer.end.reason,
            submitted_s=answer.submitted_s,
            first_s=answer.submitted_s + timing.first_s,
            last_s=answer.submitted_s + timing.last_s,
            report=answer.end.statistics,
            trace=self._trace,
            arithmetic=session.head.arithmetic,
        )

    def network_bytes(self, stages: int, row_bytes: int) -> int:
        """What the last answer sent: all messages of the head's own, to it and from it, and the hidden states
        between stages.

        Headers between stages, some ten bytes for each row, and an EAGLE head's features are not counted.
        """
        rows = sum(stay.alive for trip in self._trace.trips for stay in trip.visits()[:-1])
        return rows * row_bytes + _size(self._to_or_from_one) + stages * _size(self._to_stages)


def _size(messages: Sequence[Message]) -> int:
    return sum(
        len(encode(Envelope(incarnation=0, sender="head", sequence=0, message=message))[0])
        for message in messages
    )
