"""One run of a fault schedule, in two phases: whatever goes wrong, no token is; and when all is well again,
every answer ends, whole."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from flowspec import __version__
from flowspec.core.cluster.forming import CONTROL
from flowspec.core.cluster.incarnation import incarnation_of
from flowspec.core.cluster.membership import Membership
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import Cancel, Forget, Submit
from flowspec.core.head.head import HeadCore
from flowspec.core.protocol.cluster_messages import Assign, Error, Hello, Ping, Reset
from flowspec.plan.timing import INSTANT, Curve
from flowspec.sim.clock import Clock
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.language import HashLanguage
from flowspec.sim.link import Frames
from flowspec.sim.record import SimulatedAnswer
from flowspec.wire.codec import Envelope
from lab.faults.cluster import Cluster
from lab.faults.daemon import NO_NUMBER, SLOW, SimDaemon, spoken
from lab.faults.network import Connection, Network
from lab.faults.oracle import LOOK_S, Oracle
from lab.faults.pipelines import HEAD
from lab.faults.schedule import HEAL_S, Fault, Schedule
from tests.plain import plain_answer, plain_logprobs
from tests.sim.swarm import next_prompt

Tamper = Callable[[Connection, str, Frames], Sequence[Frames]]
Change = Callable[[Network, str, str], None]
EVENTS_MAX = 100_000
RECOVERED_S = 1200.0
"""By when all must be answered, the healing included; waits between attempts double, links may be slow, and a
drafter whose guesses are all wrong may take ten seconds for each token of one request after another."""
SETTLED_S = 30.0
STORY_LINES_MAX = 20_000
HOTTER = 1.5
HOTTER_EVERY_S = 0.5
HOTTEST = 20.0
"""A device that gets hot: how much longer its passes take each time, how often, and at most."""
LINK_FAULTS: dict[str, tuple[Change, Change | None]] = {
    "sever": (Network.sever, Network.mend),
    "break": (Network.break_between, None),
    "garble": (Network.garble, None),
    "mute": (Network.mute, Network.unmute),
    "slow link": (Network.slow_down, Network.speed_up),
    "no name": (Network.lose_name, Network.find_name),
}
"""What happens between two places, and how it ends."""
FLAWS = {
    "damaged": "is_damaged",
    "short": "is_short",
    "doomed": "is_doomed",
    "locked": "is_locked",
    "babble": "babbles",
    "numb": "is_numb",
}
"""What is wrong with a device for a while."""


class FaultError(AssertionError):
    """A schedule went wrong; the text says when and how."""


class Play:
    """One run; `story` holds what happened, as (instant, who, what).

    With a `tamper` nobody is taken to be honest: it makes what it likes of the frames that a place sends on a
    connection. Then tokens may be wrong and devices lost, and the session may end; but all cores stay as they
    say that they are.
    """

    def __init__(self, schedule: Schedule, tamper: Tamper | None = None) -> None:
        self.schedule = schedule
        self._is_honest = tamper is None
        self.story: list[tuple[float, str, str]] = []
        self.clock = Clock()
        self._rng = random.Random(schedule.seed + 1)
        self._turns = [dialogue.turns for dialogue in schedule.dialogues]
        self._waiting = len(schedule.dialogues)
        self._forgotten: set[int] = set()
        self._others = 0
        self._has_babbled = False
        self.has_given_up = False
        self.ending = ""
        self.network = Network(self.clock, random.Random(schedule.seed + 2), schedule.links, schedule.late_s)
        self.network.tamper = tamper
        self.daemons: dict[str, SimDaemon] = {}
        for name in schedule.devices:
            self.daemons[name] = self._daemon(name)
        stages = dict(self.daemons)
        absent = {fault.where[0]: fault for fault in schedule.faults if fault.kind == "absent"}
        for name in absent:
            self.daemons[name].crash()
        drafters = [
            FakeDrafter(
                schedule.language,
                quality,
                schedule.seed + number,
                context=schedule.context,
                captures=schedule.captures,
                cache_slots=schedule.draft_slots,
                is_honest=self._is_honest,
            )
            for number, quality in enumerate(schedule.qualities)
        ]
        for place, drafter, pace in zip(schedule.places, drafters, schedule.drafting, strict=True):
            if place is not None:
                self.daemons[place.device] = self._daemon(place.device, drafter, pace)
        head = HeadCore(
            context=schedule.context,
            stage_count=len(schedule.devices),
            method=schedule.method(),
            drafters=[
                DrafterTraits(
                    context=each.context,
                    needs_features=bool(each.captures),
                    copies_features=True,
                    cache_slots=each.cache_slots,
                    level=level,
                )
                for each, level in zip(drafters, schedule.levels, strict=True)
            ],
            bounds=schedule.bounds,
            sliding_window=schedule.sliding_window,
            prefix_block=schedule.prefix_block,
        )
        head.vocabulary = schedule.language.vocabulary_size
        self.cluster = Cluster(
            self.clock,
            self.network,
            self.daemons,
            head,
            Membership(schedule.devices, schedule.membership_timeouts),
            layer_count=schedule.layer_count,
            devices_min=schedule.devices_min,
            devices_max=schedule.devices_max,
            drafters=drafters,
            drafting=schedule.drafting,
            places=schedule.places,
            frames_max=schedule.frames_max,
            expect=lambda submit: self._plain(submit)[0],
            tell=self._tell,
            forming_timeouts=schedule.forming_timeouts,
            is_honest=self._is_honest,
            absent=list(absent),
        )
        self.cluster.on_end = self._ended
        self.cluster.on_give_up = self._given_up
        self.cluster.on_drafter_given_up = self._drafter_given_up
        self._oracle = Oracle(self.clock, self.network, stages, self.cluster.membership, HEAD)
        self._oracles = [self._oracle]
        for remote in self.cluster.remote_drafters:
            of = {remote.place.device: self.daemons[remote.place.device]}
            self._oracles.append(Oracle(self.clock, self.network, of, remote.membership, HEAD))
        for fault in absent.values():
            self._touch(fault)
        if self._is_honest:
            self._look()
        for fault in schedule.faults:
            self.clock.at(fault.at_s, lambda fault=fault: self._begin(fault))  # type: ignore[misc]
        self.clock.at(HEAL_S, self._heal)
        for request, dialogue in enumerate(schedule.dialogues):
            self.cluster.at(dialogue.at_s, dialogue.first)
            for when_s, event in (
                (dialogue.cancel_s, Cancel(request=request)),
                (dialogue.forget_s, Forget(request=request)),
            ):
                if when_s is not None:
                    self.clock.at(when_s, lambda event=event: self._ask(event))  # type: ignore[misc]

    def _daemon(self, name: str, drafter: FakeDrafter | None = None, drafting: Curve = INSTANT) -> SimDaemon:
        schedule = self.schedule
        daemon = SimDaemon(
            name,
            self.clock,
            self.network,
            schedule.language,
            schedule.spec,
            layers_max=schedule.layer_count,
            cache_slots=schedule.cache_slots[name] if drafter is None else schedule.draft_slots,
            load_s=schedule.load_s,
            queued_max=schedule.queued_max,
            spare_layers=schedule.spare_layers,
            messages_max=schedule.messages_max,
            daemons=self.daemons,
            tell=lambda text: self._tell(name, text),
            is_honest=self._is_honest,
            drafter=drafter,
            drafting=drafting,
        )
        daemon.arithmetics = schedule.arithmetics.get(name, daemon.arithmetics)
        return daemon

    def run(self) -> None:
        """To the end; raises `FaultError`."""
        try:
            self._run_until(lambda: self.clock.now_s >= HEAL_S and self._waiting == 0, RECOVERED_S)
            if self.has_given_up:
                return
            assert self._waiting == 0, (
                f"{self._waiting} requests have not ended {RECOVERED_S - HEAL_S:.0f} s after all was well "
                "again"
            )
            self._run_until(
                lambda: self.cluster.head.is_formed and self.cluster.head.in_flight == 0,
                self.clock.now_s + SETTLED_S,
            )
            assert self.cluster.head.in_flight == 0, f"{self.cluster.head.in_flight} segments never came back"
            for answers in self.cluster.answers.values():
                for answer in answers:
                    self._check(answer)
            back_s = self.clock.now_s + max(
                (each.back_s(name) for each in self._watching for name in each.out), default=0.0
            )

            def is_back() -> bool:  # whoever is not back in time fails its oracle
                return not any(each.out for each in self._watching)

            self._run_until(is_back, back_s + LOOK_S)
        # Whatever comes out is the finding; it is told with its instant, and the cause stays attached.
        except Exception as error:
            raise FaultError(f"at {self.clock.now_s:.3f} s: {type(error).__name__}: {error}") from error

    def run_until(self, is_over: Callable[[], bool], events_max: int) -> None:
        """Until something is so, the session or all questions end, or so many events were handled; what is
        wrong comes out as it is."""

        def is_done() -> bool:
            is_answered = self.clock.now_s >= HEAL_S and self._waiting == 0
            return is_over() or self.has_given_up or is_answered or self.cluster.events > events_max

        while not is_done() and self.clock.step(RECOVERED_S):
            pass

    def fired(self) -> Counter[str]:
        """How often each rule fired, by whose it is: `member`, `pipeline`, `head`, `drafter`, `daemon` or
        `stage`."""
        found: Counter[str] = Counter()
        cores = [
            ("member", self.cluster.membership.fired),
            ("pipeline", self.cluster.forming.fired),
            ("head", self.cluster.head.fired),
        ]
        for remote in self.cluster.remote_drafters:
            cores += [
                ("member", remote.membership.fired),
                ("pipeline", remote.pipelines.forming.fired),
                ("drafter", remote.core.fired),
            ]
        for daemon in self.daemons.values():
            cores += [("daemon", daemon.rules), ("stage", daemon.stage_rules)]
        for core, rules in cores:
            found.update({f"{core}: {rule}": count for rule, count in rules.items()})
        return found

    def _run_until(self, is_done, until_s: float) -> None:  # type: ignore[no-untyped-def]
        while not self.has_given_up and not is_done() and self.clock.step(until_s):
            assert self.cluster.events <= EVENTS_MAX, f"not done within {EVENTS_MAX} events"

    def _tell(self, who: str, text: str) -> None:
        if len(self.story) < STORY_LINES_MAX:
            self.story.append((self.clock.now_s, who, text))

    @property
    def _watching(self) -> list[Oracle]:
        """Those of the stages, and of the drafters that are not given up."""
        remotes = self.cluster.remote_drafters
        return [
            self._oracle,
            *(
                each
                for each, remote in zip(self._oracles[1:], remotes, strict=True)
                if not remote.is_given_up
            ),
        ]

    def _touch(self, fault: Fault) -> None:
        for oracle in self._oracles:
            oracle.touch(fault)

    def _look(self) -> None:
        numbers = [self.cluster.forming.number]
        numbers += [
            each.pipelines.forming.number for each in self.cluster.remote_drafters if not each.is_given_up
        ]
        for oracle, number in zip(self._watching, numbers, strict=True):
            oracle.look(
                head_listens=not self.cluster.process.is_stopped,
                pipeline=number,
                healed_s=HEAL_S,
                arithmetic=self.cluster.forming.agreement.name if oracle is self._oracle else "",
            )
        self.clock.at(self.clock.now_s + LOOK_S, self._look)

    # ---------------------------------------------------------------------------------------------- answers

    @property
    def _language(self) -> HashLanguage:
        """What the model says by the arithmetic of the session."""
        return spoken(self.schedule.language, self.cluster.forming.agreement.name)

    def _plain(self, submit: Submit) -> tuple[list[int], str]:
        """The whole answer, and `stop` or `length`; what was answered before is taken as it is."""
        more, reason = plain_answer(
            self._language,
            (*submit.prompt, *submit.answered),
            submit.sampling,
            new_tokens_max=submit.new_tokens_max - len(submit.answered),
            context=self.schedule.context,
            stop_ids=submit.stop_ids,
            answer_start=len(submit.prompt),
        )
        return [*submit.answered, *more], reason

    def _check(self, answer: SimulatedAnswer) -> None:
        assert answer.end is not None, f"request {answer.submit.request} never ended"
        expected, reason = self._plain(answer.submit)
        if answer.end.reason != "cancelled":
            assert (answer.text, answer.end.reason) == (expected, reason), (
                f"request {answer.submit.request} has a wrong answer"
            )
        found = plain_logprobs(self._language, answer.submit, answer.tokens)
        assert answer.logprobs == found, f"request {answer.submit.request} has wrong log-probabilities"

    def _ask(self, event: Cancel | Forget) -> None:
        if event.request in self._forgotten or event.request not in self.cluster.answers:
            return
        if isinstance(event, Forget):
            self._forgotten.add(event.request)
        self.cluster.at(self.clock.now_s, event)

    def _ended(self, request: int) -> None:
        """The next turn of a dialogue repeats some or all of it; a forgotten one has none."""
        rng, answer = self._rng, self.cluster.answers[request][-1]
        dialogue = self.schedule.dialogues[request]
        if self._turns[request] == 0 or dialogue.forget_s is not None:
            self._waiting -= 1
            return
        self._turns[request] -= 1
        vocabulary, context = self.schedule.language.vocabulary_size, self.schedule.context
        prompt = next_prompt(rng, answer.submit.prompt, answer.text, vocabulary, context)
        self.cluster.at(
            self.clock.now_s + rng.choice([0.0, 1.0, 4.0]),
            replace(answer.submit, prompt=prompt, stop_ids=frozenset(), new_tokens_max=6, answered=()),
        )

    # ----------------------------------------------------------------------------------------------- faults

    def _begin(self, fault: Fault) -> None:
        self._tell("fault", str(fault))
        self._has_babbled |= fault.kind == "babble"
        self._touch(fault)
        until_s = min(fault.at_s + fault.for_s, HEAL_S)
        if fault.kind in LINK_FAULTS:
            begin, end = LINK_FAULTS[fault.kind]
            first, second = fault.where
            begin(self.network, first, second)
            if end is not None:
                self.clock.at(until_s, lambda: end(self.network, first, second))
        elif fault.kind == "one way":
            for receiver in fault.where[1:]:
                self.network.block(fault.where[0], receiver)
        elif fault.where == (HEAD,):
            if fault.kind == "clock":
                self.cluster.process.skew_s += fault.for_s
            else:
                self.cluster.process.stop()
                self.clock.at(until_s, self.cluster.process.go_on)
        else:
            self._begin_at(self.daemons[fault.where[0]], fault.kind, until_s)

    def _begin_at(self, daemon: SimDaemon, kind: str, until_s: float) -> None:
        if kind in ("crash", "restart", "drafter"):
            daemon.crash()
            self.clock.at(self.clock.now_s + 0.01 if kind == "restart" else until_s, daemon.start)
        elif kind == "absent":  # since before the head began
            self.clock.at(until_s, daemon.start)
        elif kind == "stop":
            daemon.stop()
            self.clock.at(until_s, daemon.go_on)
        elif kind == "slow":
            daemon.be_slow(SLOW)
            self.clock.at(until_s, lambda: daemon.be_slow(daemon.heat))
        elif kind == "poor":
            self._start_again(daemon, is_poor=True)
            self.clock.at(until_s, lambda: self._start_again(daemon, is_poor=False))
        elif kind == "heat":
            self._warm(daemon, until_s)
        elif kind in FLAWS:
            setattr(daemon, FLAWS[kind], True)
            self.clock.at(until_s, lambda: setattr(daemon, FLAWS[kind], False))
        elif kind == "stuck":
            daemon.hang()
        elif kind == "narrow":
            self.network.narrow(daemon.name)
        elif kind == "held":
            self._others += 1
            OtherHead(self.clock, self.network, daemon, self._others, self.schedule.layer_count, until_s)
        else:
            daemon.layers_max = self._rng.randint(0, self.schedule.layer_count)

    def _start_again(self, daemon: SimDaemon, *, is_poor: bool) -> None:
        """Another compiler, say, was installed there."""
        daemon.crash()
        daemon.is_poor = is_poor
        self.clock.at(self.clock.now_s + 0.01, daemon.start)

    def _warm(self, daemon: SimDaemon, until_s: float) -> None:
        """A device gets hotter, and its passes longer, until it may cool down."""
        if self.clock.now_s >= until_s or daemon.heat >= HOTTEST:
            return
        daemon.be_hot(daemon.heat * HOTTER)
        self.clock.at(self.clock.now_s + HOTTER_EVERY_S, lambda: self._warm(daemon, until_s))

    def _given_up(self, text: str) -> None:
        """The session ends: that is right where users do not wait for ever, or where a device says nonsense
        again and again."""
        self._tell("head", f"gives up: {text}")
        self.ending = text
        has_waited = self.schedule.forming_timeouts.wait_s is not None and "nothing changed within" in text
        assert has_waited or self._has_babbled or not self._is_honest, f"the head gives up: {text}"
        self.has_given_up = True

    def _drafter_given_up(self, text: str) -> None:
        """As with the session: right where a device talked nonsense, or computes no number. Answers go on
        without it."""
        self._tell("head", f"gives up a drafter: {text}")
        assert NO_NUMBER in text or self._has_babbled or not self._is_honest, (
            f"the head gives up a drafter: {text}"
        )

    def _heal(self) -> None:
        """From now on nothing goes wrong any more; a stuck process is started again, as its owner would."""
        self._tell("fault", "all is well again")
        self.network.mend_all()
        self.cluster.process.go_on()
        for daemon in self.daemons.values():
            if daemon.is_stuck:
                daemon.crash()
            if not daemon.is_up:
                daemon.start()
            daemon.go_on()
            daemon.recover()
            daemon.layers_max = self.schedule.layer_count


OTHER_HEAD = "another head"
FIRST_SESSION = 1000
PING_S = 0.5


class OtherHead:
    """Another head that wants `daemon` for itself until `until_s`, and lets go of it then. `number` tells it
    from others of its kind."""

    def __init__(
        self, clock: Clock, network: Network, daemon: SimDaemon, number: int, layer_count: int, until_s: float
    ) -> None:
        self._clock = clock
        self._until_s = until_s
        self._layer_count = layer_count
        taken = {OTHER_HEAD: self._take, daemon.name: daemon.take}
        self._line = network.connect(
            OTHER_HEAD,
            daemon.name,
            CONTROL,
            incarnation_of(FIRST_SESSION + number, 1),
            taken,
            {},
            {daemon.name: daemon.refuse},
        )
        self._line.send(OTHER_HEAD, Hello(name=OTHER_HEAD, version=__version__, role=CONTROL))
        self._ask()
        self._ping()

    def _ask(self) -> None:
        if self._clock.now_s < self._until_s:
            assign = Assign(
                model="another",
                fingerprint="another",
                end_layer=self._layer_count,
                layer_count=self._layer_count,
                dtype="float32",
                context=16,
            )
            self._line.send(OTHER_HEAD, assign)

    def _ping(self) -> None:
        if self._clock.now_s >= self._until_s:
            self._line.send(OTHER_HEAD, Reset())
            return
        self._line.send(OTHER_HEAD, Ping())
        self._clock.at(min(self._until_s, self._clock.now_s + PING_S), self._ping)

    def _take(self, connection: Connection, envelope: Envelope, frames: Frames) -> None:
        del connection, frames
        if isinstance(envelope.message, Error) and envelope.message.retry_after_s > 0:
            self._clock.at(self._clock.now_s + PING_S, self._ask)
