"""Faults by the hundred: exact while they last, complete when they are over; and broken builds are caught by
the same seeds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from flowspec.core.cluster.agreement import Agreement, Lack
from flowspec.core.cluster.daemon import DaemonCore
from flowspec.core.cluster.forming import (
    DeviceBrokeProtocol,
    EndSession,
    FormingCommand,
    FormingEvent,
    PipelineCore,
)
from flowspec.core.cluster.incarnation import Lease
from flowspec.core.cluster.membership import HeartbeatArrived, Membership, Tick
from flowspec.core.head import head
from flowspec.core.head.admission import Room
from flowspec.core.head.events import Drafted
from flowspec.core.head.flights import SegmentsInFlight
from flowspec.core.head.head import HeadCore
from flowspec.core.head.remote_drafter import RemoteDrafterCommand, RemoteDrafterCore, RemoteDrafterEvent
from flowspec.core.head.request import Request, begin
from flowspec.core.protocol.messages import Proposed
from flowspec.core.stage.drafter import DrafterCore, DrafterEvent
from flowspec.core.stage.stage import StageCore
from flowspec.plan.timing import Curve
from flowspec.sim.device import DeviceSpec
from lab.faults.__main__ import main, replay_command, story
from lab.faults.daemon import LEASE_S
from lab.faults.pipelines import HEAD
from lab.faults.play import FaultError, Play
from lab.faults.schedule import (
    BITS_KINDS,
    DRAFTER_KINDS,
    KINDS,
    LATER_KINDS,
    MORE_KINDS,
    START_KINDS,
    Fault,
    draw,
)
from lab.faults.tally import RULES, RULES_SEEDS, Tally, play
from tests.broken_builds import keeps_the_flights, sends_only_the_root_again
from tests.nightly import nightly, seeds

pytestmark = pytest.mark.slow
Mutation = Callable[[pytest.MonkeyPatch], None]
SEEDS = seeds(75, 5_000)
CHUNK = 5
LOOKED_AT = 40
"""The first seeds, whose stories are looked into, too."""
SEEDS_TO_CATCH = 40
"""Within how many seeds each broken build must be caught."""
SOONER = {
    "takes_the_answer_for_the_prompt": 39,
    "forgets_the_arithmetic": 24,
    "believes_whatever_is_proposed": 161,
    "tells_nobody_of_a_drafters_loss": 61,
}
"""Seeds that catch what the first ones do not; they are tried first."""
REMEMBERED = {
    3810: "the session ends for want of devices after its last answer",
    65: "a stopped daemon is told to trim a job that is done",
    1604: "the first device is assigned its layers twice, and again for ever",
    2345: "a device makes ready again and again, and never comes in: probes find it held by its last time",
    4902: "a pass of a daemon that was killed ends in its next life, in a hold of the same number",
    643: "a timer is a rounding error early after the clock jumped, and is set again for ever",
    1862: "devices that lack the arithmetic come back again and again, and keep another one out",
    14586: "a prompt goes row by row over slow links, then 27 guesses at once: they hold up signs of life",
    14650: "a suspect that loads layer by layer says nothing of it, and is given up",
    16964: "the same guesses where the pipeline was formed anew",
}


@pytest.mark.parametrize("start", SEEDS[LOOKED_AT::CHUNK])
def test_any_faults_leave_the_answers_exact_and_complete(start: int) -> None:
    tally = play(range(start, start + CHUNK))
    assert {replay_command(seed): text for seed, text in tally.failures.items()} == {}


@pytest.mark.parametrize("seed", REMEMBERED, ids=REMEMBERED.values())
def test_seeds_that_once_failed(seed: int) -> None:
    Play(draw(seed)).run()


def test_the_swarm_draws_every_fault_and_every_limit() -> None:
    schedules = [draw(seed) for seed in range(125)]
    drawn = {fault.kind for schedule in schedules for fault in schedule.faults}
    assert drawn == {*KINDS, *MORE_KINDS, *LATER_KINDS, *START_KINDS, *BITS_KINDS, *DRAFTER_KINDS}
    assert {schedule.bounds.flights_max for schedule in schedules} >= {None, 1, 2}
    assert {schedule.bounds.prefill_chunk for schedule in schedules} >= {1, 128}
    assert {schedule.queued_max for schedule in schedules} >= {1}
    begun = [
        dialogue.first for schedule in schedules for dialogue in schedule.dialogues if dialogue.first.answered
    ]
    assert len(begun) > len(schedules) / 10
    assert any(len(submit.answered) < submit.new_tokens_max for submit in begun)


def test_the_swarm_sees_the_troubles_that_it_is_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS.start, SEEDS.start + LOOKED_AT):
        run = Play(draw(seed))
        run.run()
        seen["several pipelines"] += run.cluster.pipelines > 1
        for _, who, text in run.story:
            seen["lost"] += who == "head" and "is lost" in text
            seen["back"] += who == "head" and "is back" in text
            seen["silence"] += "no sign of life" in text
            seen["closed"] += "its connection closed" in text
            seen["fenced"] += "ignored a" in text
            seen["superseded"] += "forms another pipeline" in text
            seen["refused"] += "do not fit" in text
            seen["nobody left"] += "no device is left" in text
            seen["lease"] += "no word of the head" in text
        recovered = [
            answer
            for answers in run.cluster.answers.values()
            for answer in answers
            if answer.end is not None and answer.end.statistics.recoveries.count > 0
        ]
        seen["recovered"] += len(recovered)
        seen["recovered, with log-probabilities"] += any(len(each.logprobs) > 1 for each in recovered)
        seen["waited"] += any("waits for room" in text for _, _, text in run.story)
        seen["given up"] += any("gives up the caches" in text for _, _, text in run.story)
    del seen["lease"]  # which is rare
    assert [name for name, times in seen.items() if not times] == []


# ------------------------------------------------------------------------------------------- broken builds


def ignores_incarnations(patch: pytest.MonkeyPatch) -> None:
    """A stage takes whatever comes, of whichever pipeline."""
    patch.setattr(Lease, "admits", lambda self, incarnation: True)


def keeps_the_epoch(patch: pytest.MonkeyPatch) -> None:
    """The answer begins again under the number that it had."""
    reopen = Request.reopen

    def broken(self: Request) -> None:
        epoch = self.opening.epoch
        reopen(self)
        self.opening = structs.replace(self.opening, epoch=epoch)

    patch.setattr(Request, "reopen", broken)


def admits_everybody(patch: pytest.MonkeyPatch) -> None:
    """The head does not look whether the stages have memory for one more."""
    patch.setattr(Room, "has", lambda self, need: True)


def releases_on_control_alone(patch: pytest.MonkeyPatch) -> None:
    """The rows of who was admitted may come before the Release that makes room for them."""
    depart = SegmentsInFlight.depart
    patch.setattr(
        SegmentsInFlight, "depart", lambda self, *given: structs.replace(depart(self, *given), releases=())
    )


def believes_that_what_it_gave_up_is_still_there(patch: pytest.MonkeyPatch) -> None:
    """A conversation whose caches were released goes on as if they were not."""
    patch.setattr(HeadCore, "_begin_again", lambda self, request: None)


def forgets_what_was_answered(patch: pytest.MonkeyPatch) -> None:
    """The tokens that another head made are a part of the prompt, but not of the answer: its length begins
    anew."""

    def broken(*args: Any, **others: Any) -> Request:
        made = begin(*args, **others)
        made.new_tokens.clear()
        return made

    patch.setattr(head, "begin", broken)


def draws_at_positions_of_the_rest(patch: pytest.MonkeyPatch) -> None:
    """What is known of the answer is not sent: the rest follows the prompt alone, at its positions."""
    patch.setattr(
        head, "begin", lambda old, submit, **others: begin(old, replace(submit, answered=()), **others)
    )


def takes_the_answer_for_the_prompt(patch: pytest.MonkeyPatch) -> None:
    """Tokens that were drawn before a loss do not count as the answer's any more."""
    reopen = Request.reopen

    def broken(self: Request) -> None:
        reopen(self)
        self.opening = structs.replace(self.opening, answer_start=self.opening.length)

    patch.setattr(Request, "reopen", broken)


def lets_the_pass_that_runs_teach(patch: pytest.MonkeyPatch) -> None:
    """How long a device may be at one pass grows with the pass that it is at."""
    heard = Membership._heard

    def broken(self: Membership, event: HeartbeatArrived, now_s: float) -> None:
        if event.device in self.members:
            standing = self._standing[event.device]
            standing.longest_s = max(standing.longest_s, event.running_s)
        heard(self, event, now_s)

    patch.setattr(Membership, "_heard", broken)


def never_takes_anybody_back(patch: pytest.MonkeyPatch) -> None:
    """A device that was lost stays out for good."""
    patch.setattr(Membership, "_has_waited", lambda self, name, now_s: False)


def does_not_mind_silence(patch: pytest.MonkeyPatch) -> None:
    """A device that says nothing more stays a member as long as its connection stands."""
    tick = Membership._tick

    def broken(self: Membership, event: Tick, now_s: float) -> None:
        for standing in self._standing.values():
            standing.silent_s = 0.0
        tick(self, event, now_s)

    patch.setattr(Membership, "_tick", broken)


def loses_whoever_is_first(patch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong, the first device is to blame."""
    lose = Membership._lose
    patch.setattr(
        Membership,
        "_lose",
        lambda self, device, now_s: lose(self, self.members[0] if self.members else device, now_s),
    )


def forgets_the_arithmetic(patch: pytest.MonkeyPatch) -> None:
    """Each pipeline agrees anew on what its devices have best."""
    agree = Agreement.agree

    def broken(self: Agreement, devices: Sequence[str]) -> str | Lack:
        kept, self.name = self.name, ""
        found = agree(self, devices)
        self.name = kept
        return found

    patch.setattr(Agreement, "agree", broken)


def takes_the_first_devices_arithmetic(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks whether the others have it."""
    patch.setattr(Agreement, "agree", lambda self, devices: self.name or self._told[devices[0]].names[0])


def takes_a_damaged_frame_for_the_end(patch: pytest.MonkeyPatch) -> None:
    """A frame that cannot be read ends the session, as it once did."""
    handle = PipelineCore.handle

    def broken(self: PipelineCore, event: FormingEvent, now_s: float) -> list[FormingCommand]:
        return (
            [EndSession(text=event.text)]
            if isinstance(event, DeviceBrokeProtocol)
            else handle(self, event, now_s)
        )

    patch.setattr(PipelineCore, "handle", broken)


def is_caught(mutation: Mutation, patch: pytest.MonkeyPatch, seeds: Iterable[int]) -> bool:
    mutation(patch)
    sooner = SOONER.get(mutation.__name__)
    return any(play([seed]).failures for seed in (*([] if sooner is None else [sooner]), *seeds))


def alone(kind: str, seed: int) -> Play:
    """A seed's cluster, in which nothing goes wrong but one thing at its first device, as an answer
    begins."""
    schedule = draw(seed)
    fault = Fault(kind=kind, at_s=0.5, for_s=8.0, where=schedule.devices[:1])
    return Play(
        replace(
            schedule, faults=(fault,), membership_timeouts=replace(schedule.membership_timeouts, stuck_s=4.0)
        )
    )


def went_wrong(kind: str, seeds: range, rule: str, failure: str) -> tuple[int, int]:
    """How often a rule fired, and how many schedules failed in this way."""
    fired = failed = 0
    for seed in seeds:
        run = alone(kind, seed)
        try:
            run.run()
        except FaultError as error:
            failed += failure in str(error)
        fired += run.cluster.membership.fired[rule]
    return fired, failed


@pytest.mark.parametrize(
    ("kind", "rule", "mutation", "failure"),
    [
        ("stuck", "stuck", lets_the_pass_that_runs_teach, "has been at one pass"),
        ("stop", "silent", does_not_mind_silence, "has been silent"),
    ],
)
def test_what_hangs_or_is_silent_is_lost_within_the_time_that_is_said(
    kind: str,
    rule: str,
    mutation: Mutation,
    failure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = range(nightly(10, 30))
    fired, failed = went_wrong(kind, seeds, rule, failure)
    assert (fired > 2, failed) == (True, 0)
    mutation(monkeypatch)
    fired, failed = went_wrong(kind, seeds, rule, failure)
    assert (fired, failed > 2) == (0, True), "the broken build is caught"


def gives_the_work_of_the_old_one_to_the_new(patch: pytest.MonkeyPatch) -> None:
    """What the head asked of a drafter before it heard of its loss goes to the one that is back."""
    handle = RemoteDrafterCore.handle

    def broken(
        self: RemoteDrafterCore, event: RemoteDrafterEvent, now_s: float
    ) -> list[RemoteDrafterCommand]:
        commands = handle(self, event, now_s)
        self._behind = 0
        return commands

    patch.setattr(RemoteDrafterCore, "handle", broken)


def believes_whatever_is_proposed(patch: pytest.MonkeyPatch) -> None:
    """Proposals of a drafter on a device are handed on as they come."""

    def broken(self: RemoteDrafterCore, answer: Proposed, now_s: float) -> Drafted:
        self._job = None
        return Drafted(
            drafter=self.number, job=answer.job, proposals=answer.proposals, started_s=now_s, ended_s=now_s
        )

    patch.setattr(RemoteDrafterCore, "_proposed", broken)


def tells_nobody_of_a_drafters_loss(patch: pytest.MonkeyPatch) -> None:
    """The head waits for the answer of a drafter that is gone."""

    def broken(self: RemoteDrafterCore) -> list[RemoteDrafterCommand]:
        self.is_there, self._job = False, None
        return []

    patch.setattr(RemoteDrafterCore, "_lose", broken)


def holds_a_drafter_for_ever_at_its_first_job(patch: pytest.MonkeyPatch) -> None:
    """A daemon keeps what its drafter proposes to itself."""
    handle = DrafterCore.handle

    def broken(self: DrafterCore, event: DrafterEvent, now_s: float) -> Sequence[DrafterEvent]:
        return () if isinstance(event, Proposed) else handle(self, event, now_s)

    patch.setattr(DrafterCore, "handle", broken)


AWAY = [seed for seed in range(200) if any(draw(seed).places)]
"""Seeds with drafters on devices of their own."""


@pytest.mark.parametrize(
    "mutation",
    [
        never_takes_anybody_back,
        loses_whoever_is_first,
        takes_a_damaged_frame_for_the_end,
        ignores_incarnations,
        sends_only_the_root_again,
        keeps_the_epoch,
        keeps_the_flights,
        admits_everybody,
        releases_on_control_alone,
        believes_that_what_it_gave_up_is_still_there,
        forgets_what_was_answered,
        draws_at_positions_of_the_rest,
        takes_the_answer_for_the_prompt,
        forgets_the_arithmetic,
        takes_the_first_devices_arithmetic,
        believes_whatever_is_proposed,
        tells_nobody_of_a_drafters_loss,
        holds_a_drafter_for_ever_at_its_first_job,
    ],
)
def test_a_broken_build_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_caught(mutation, monkeypatch, range(SEEDS_TO_CATCH))


def lets_a_lease_lapse_before_it_has_read(patch: pytest.MonkeyPatch) -> None:
    """A daemon that was stopped ends an assignment, though the head's pings wait to be read."""
    tick = DaemonCore._tick
    patch.setattr(
        DaemonCore, "_tick", lambda self, event, now_s: tick(self, replace(event, is_read=True), now_s)
    )


def minds_the_whole_pass(patch: pytest.MonkeyPatch) -> None:
    """A pass counts as a whole: a slow device that gets further layer by layer is taken for one that
    hangs."""
    patch.setattr(
        StageCore, "running_s", lambda self, now_s: 0.0 if self._job is None else now_s - self._job.started_s
    )


def with_slow_layers(seed: int) -> Play:
    """The first device becomes so slow that a pass, but no layer of it, takes longer than a device may
    hang."""
    made = alone("slow", seed).schedule
    return Play(replace(made, spec=DeviceSpec(curve=Curve(base_s=0.3), layers=3)))


def with_a_stop_longer_than_the_lease(seed: int) -> Play:
    """The first device stops, and when it goes on reads one message in a turn."""
    (fault,) = alone("stop", seed).schedule.faults
    return Play(
        replace(alone("stop", seed).schedule, faults=(replace(fault, for_s=LEASE_S + 1),), messages_max=1)
    )


def with_a_lapse_of_a_drafters_lease(seed: int) -> Play:
    """Drafters on devices are lost because the head stops, and are back before it has heard of that."""
    made = draw(seed)
    at_s = min(dialogue.at_s for dialogue in made.dialogues) + 1.5
    places = tuple(None if place is None else replace(place, handover_s=1.0) for place in made.places)
    return Play(
        replace(
            made,
            places=places,
            faults=(Fault(kind="head stops", at_s=at_s, for_s=LEASE_S + 0.5, where=(HEAD,)),),
        )
    )


def run_all(world: Callable[[int], Play], seeds: Iterable[int]) -> None:
    for seed in seeds:
        world(seed).run()


@pytest.mark.parametrize(
    ("world", "seeds", "mutation", "failure"),
    [
        (with_slow_layers, range(60), minds_the_whole_pass, "is lost, though nothing was wrong with it"),
        (
            with_a_stop_longer_than_the_lease,
            range(60),
            lets_a_lease_lapse_before_it_has_read,
            "though words of it wait to be read",
        ),
        (with_a_lapse_of_a_drafters_lease, AWAY, gives_the_work_of_the_old_one_to_the_new, "AssertionError"),
    ],
)
def test_a_broken_build_is_caught_where_one_thing_goes_wrong(
    world: Callable[[int], Play],
    seeds: Sequence[int],
    mutation: Mutation,
    failure: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_all(world, seeds[: nightly(5, 15)])
    mutation(monkeypatch)
    with pytest.raises(FaultError, match=failure):
        run_all(world, seeds)


def test_an_answer_keeps_its_arithmetic() -> None:
    """Both devices have it at first; the first dies, and the second comes back without it: they are waited
    for."""
    base = next(schedule for seed in range(99) if (schedule := draw(seed)) and len(schedule.devices) == 2)
    first, second = base.devices
    faults = (
        Fault(kind="crash", at_s=1.6, for_s=8.0, where=(first,)),
        Fault(kind="poor", at_s=1.6, for_s=8.0, where=(second,)),
    )
    first_asked = base.dialogues[0].first
    submit = replace(first_asked, prompt=(1, 2), new_tokens_max=13, stop_ids=frozenset(), answered=())
    dialogue = replace(base.dialogues[0], first=submit, at_s=0.0, turns=0, cancel_s=None, forget_s=None)
    schedule = replace(
        base,
        faults=faults,
        arithmetics={first: ("fast", "plain"), second: ("fast", "plain")},
        dialogues=(dialogue,),
        forming_timeouts=replace(base.forming_timeouts, wait_s=None),
        membership_timeouts=replace(base.membership_timeouts, back_s=0.5, probe_s=0.5),
        devices_min=1,
        devices_max=2,
        spec=replace(base.spec, curve=replace(base.spec.curve, base_s=0.1)),
        context=40,
    )
    run = Play(schedule)
    run.run()
    notes = [text for _, who, text in run.story if who == "head"]
    assert any("expected the arithmetic fast" in text for text in notes)
    assert run.cluster.forming.agreement.name == "fast"


# ------------------------------------------------------------------------------------------------- command


def test_a_rule_that_never_fired_fails_a_long_run() -> None:
    long_run = Tally(seeds=RULES_SEEDS, fired=Counter(RULES.keys() - {"member: stuck"}))
    assert long_run.idle_rules == ["member: stuck"]
    assert Tally(seeds=100).idle_rules == [], "a short run need not bring all about"


def test_the_command_tells_a_seed_that_fails_and_its_story(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert story(3)[-1] == "every answer is whole"
    keeps_the_flights(monkeypatch)
    assert main(["--seed", "3", "--story"]) == 1
    told = capsys.readouterr().out
    assert "forms generation 1" in told
    assert "FAILED at" in told.splitlines()[-1]


def test_the_command_works_in_processes_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "2", "--jobs", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds"] == 2
