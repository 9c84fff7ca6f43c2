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
from dataclasses import replace
from pathlib import Path

from flowspec.bench.cases import DTYPE, PlainCase
from flowspec.bench.console import Step
from flowspec.bench.engine import keys_of
from flowspec.bench.experiment import EMULATED, SIMULATED, Experiment, Setup, Testbed
from flowspec.bench.records import (
    RESULTS,
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
from flowspec.draft.registry import NONE, check_drafter
from flowspec.errors import InputError
from flowspec.plan.cost import row_bytes
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.emulation import DeviceEmulation, Emulation
from flowspec.runtime.session import ClusterOptions, Limits, Session, open_cluster
from flowspec.runtime.token_stream import Timing, TokenStream
from flowspec.wire.codec import DTYPE_BYTES, Envelope, encode

WARM_UP_TOKENS = 48
"""Of the first prompt, in every session: what the head learns costs and confidences from before anything
counts."""
REST_S_MAX = 30.0
"""The last segments of an answer are waited for so long."""


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
    for place, options, testbed in places(experiment):
        rounds = list(rounds_of(experiment, place, cases, known))
        if not rounds:
            continue
        is_traced = not traces
        with open_cluster(options, decoding=Decoding(drafters=experiment.drafters)) as cluster:
            row = cluster.config.hidden_size * DTYPE_BYTES[DTYPE]
            if options.emulation is not None:
                row = options.emulation.devices[0].row_bytes
            for setup, repeat, missing in rounds:
                step(f"{place}, {setup.name}: warming up", 0)
                recorder = LiveRecorder()
                decoding = Decoding(
                    method=setup.method,
                    drafters=experiment.drafters_of(setup) or (NONE,),
                    options=setup.options,
                    coupled=setup.coupled,
                )
                with cluster.session(decoding, lambda text, share: step(text, 0), recorder) as session:
                    few = min(WARM_UP_TOKENS, cases[0].new_tokens_max)
                    recorder.ask(session, replace(cases[0], new_tokens_max=few))
                    for case in missing:
                        about = f"{case.domain} {case.prompt_id}, temperature {case.sampling.temperature:g}"
                        step(f"{place}, {setup.name}: {about}", 0)
                        answer, timing = recorder.ask(session, case)
                        assert answer.end is not None
                        digest = hashlib.blake2b(json.dumps(timing.new_tokens).encode(), digest_size=16)
                        record = record_of(
                            experiment,
                            place,
                            setup,
                            case,
                            recorder.trace,
                            answer.end.statistics,
                            tokens=timing.new_tokens,
                            reason=answer.end.reason,
                            asked_s=answer.submitted_s,
                            first_s=answer.submitted_s + timing.first_s,
                            last_s=answer.submitted_s + timing.last_s,
                            repeat=repeat,
                            network_bytes=recorder.network_bytes(len(session.head.stages), row),
                            energy_j=_energy_j(
                                testbed, recorder.trace, timing.last_s, len(session.head.stages)
                            ),
                            events=0,
                            digest=digest.hexdigest(),
                            arithmetic=session.head.arithmetic,
                        )
                        write_records(out / RESULTS, [record])
                        found.append(record)
                        if is_traced:
                            traces.setdefault(setup.name, recorder.trace)
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
        what = ""
        if setup.published:
            what = "runs as its paper's code does it (published = true)"
        elif len(experiment.drafters_of(setup)) > 1 or setup.chain:
            what = "has several models beside the target"
        if what:
            raise InputError(
                f"world {experiment.world}: method {setup.name!r} {what}, which is computed in the simulated "
                "world only; choose other --methods"
            )
    for name in experiment.drafters:
        check_drafter(name)


def places(experiment: Experiment) -> list[tuple[str, ClusterOptions, Testbed | None]]:
    """The testbeds, emulated; or the one cluster, named after the testbed if there is one, whose boards are
    known then."""
    options = ClusterOptions(
        model=experiment.model,
        dtype=DTYPE,
        cluster=experiment.cluster,
        local=experiment.local,
        context=experiment.context,
    )
    if experiment.world == EMULATED:
        return [(testbed.name, _emulated(testbed, options), testbed) for testbed in experiment.testbeds]
    if len(experiment.testbeds) > 1:
        raise InputError(
            f"world {experiment.world}: expected at most one testbed, which the cluster is, got "
            f"{len(experiment.testbeds)}"
        )
    if experiment.testbeds:
        return [(testbed.name, options, testbed) for testbed in experiment.testbeds]
    cluster = experiment.cluster
    name = f"{experiment.local} local processes" if cluster is None else cluster.stem
    return [(name, options, None)]


def _emulated(testbed: Testbed, options: ClusterOptions) -> ClusterOptions:
    row, sampling = row_bytes(testbed.shape, testbed.precision), sampling_curve(testbed)
    emulation = Emulation(
        devices=tuple(
            DeviceEmulation(layers=curve, sampling=sampling, outgoing=testbed.link, row_bytes=row)
            for curve in stage_curves(testbed)
        ),
        drafting=drafting_curve(testbed),
        control=testbed.link,
        first_hop=testbed.link,
    )
    return replace(options, cluster=None, local=len(testbed.devices), emulation=emulation)


def rounds_of(
    experiment: Experiment, place: str, cases: Sequence[PlainCase], known: set[Key]
) -> Iterator[tuple[Setup, int, list[PlainCase]]]:
    """Sessions in order, each of a method, a repetition and what is to be answered."""
    for repeat in range(experiment.repeat):
        for setup in experiment.setups if repeat % 2 == 0 else experiment.setups[::-1]:
            missing = [case for case in cases if keys_of(place, setup, case, repeat)[0] not in known]
            if missing and setup.runs_on(place):
                yield setup, repeat, missing


def _energy_j(testbed: Testbed | None, trace: Trace, whole_s: float, stages: int) -> float:
    """What the named boards take; 0 where none are named, or others than there are stages."""
    if testbed is None or len(testbed.devices) != stages:
        return 0.0
    stages_s = [sum(trip.hops[at].compute_s for trip in trace.trips) for at in range(stages)]
    return energy_of(
        testbed, whole_s, stages_s, {None: sum(each.ended_s - each.started_s for each in trace.passes)}
    )


class LiveRecorder:
    """Watches a head's thread, answer by answer; an answer is over when nothing of it is under way any more,
    dead segments included."""

    def __init__(self) -> None:
        self._begin()
        self._under_way = 0

    def _begin(self) -> None:
        self.trace = Trace()
        self._to_stages: list[Message] = []
        self._to_or_from_one: list[Message] = []
        self._has_ended = False
        self._at_rest = threading.Event()

    def __call__(self, event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        self.trace.watch(event, commands, now_s)
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

    def ask(self, session: Session, case: PlainCase) -> tuple[TokenStream, Timing]:
        """Asks, reads, and waits until the cluster is at rest again: the next answer shall not stand in this
        one's queue."""
        self._begin()
        limits = Limits(new_tokens_max=case.new_tokens_max, stop_ids=case.stop_ids)
        answered = session.ask(case.prompt, case.sampling, limits)
        self._at_rest.wait(REST_S_MAX)
        return answered

    def network_bytes(self, stages: int, row_bytes: int) -> int:
        """What the last answer sent: all messages of the head's own, to it and from it, and the hidden states
        between stages.

        Headers between stages, some ten bytes for each row, and an EAGLE head's features are not counted.
        """
        rows = sum(stay.alive for trip in self.trace.trips for stay in trip.visits()[:-1])
        messages = [*self._to_or_from_one, *stages * self._to_stages]
        envelopes = (Envelope(incarnation=0, sender="head", sequence=0, message=each) for each in messages)
        return rows * row_bytes + sum(len(encode(envelope)[0]) for envelope in envelopes)
