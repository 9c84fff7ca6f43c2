"""Which devices make up the pipeline: who is lost, when a new one is formed, of whom, and when who was lost
may return.

Events in, commands out, as with the other cores: no sockets, no clock, no plan of layers. The runtime and the
simulator carry out `Reform` (fence the old pipeline, plan, connect, load) and tell how it went.

- *Lost* is a device whose connection closed, that broke the protocol or refused its part (`PipelineBroken`),
  that was silent for `silent_s`, or that has been at one segment for too long. Silence is counted in the time
  in which we listened: a head that was stopped for a minute finds nobody dead because of it.
- Where one device lost the next one (`LinkBroken`), and we have both, either may be at fault: the next one is
  left out, but a device whose links fail again and again is left out itself.
- Whoever is at one end of such a link, and then makes no progress in loading, is waited for less long.
- *Too long* is `stuck_s`, and `STUCK_PASSES` times what its longest pass that ended was seen to take. A pass
  that still runs teaches nothing: a limit that grew with it would never be reached.
- A segment that nobody has been at for `stuck_s` is *on its way* where one stage has had it and the next has
  not: that link is named, and waited for as long as one of `SLOWEST_BYTES_PER_S` takes; then it is broken.
  Elsewhere the segment *vanished*.
- A failure that is nobody's (a lease that lapsed, a segment that vanished) forms the same pipeline again, a
  few times in a row.
- A lost device is probed. It may *return* when it answers and `back_s` have passed since it was lost, twice
  as long with each loss; a device that has done its part for `forgive_s` has a clean record again.
- Where a pipeline works without it, the device first makes ready beside it (`Prepare`): it loads what it
  would have to do, and is left out as before if it cannot. If the plan for all has nothing for it to do, it
  stands by.
- It is taken in at the next moment without an answer, or during one that would take `worth` times as long as
  the switch will; when it has waited for such a moment for `moment_s`, between two
  tokens; and at once if there is no pipeline without it.
- A device that is absent at the start counts as lost. Nothing is known of it: when it answers it is surveyed
  first (`SurveyDevice`), beside the pipeline if there is one, and only then may it return.
- The plan may leave devices out: those stand by until the next pipeline is formed.
- Where devices have become slower, or faster (`SpeedChanged`), another plan is made beside the pipeline that
  works, no more often than every `again_s`. If it is worth the switch, it is gone over to at the next moment
  without an answer, or after `calm_s` between two tokens.
- Another pipeline is worth it if by its forecast it gains `GAIN_MIN`, and more until a next plan may be made
  than the switch will take: as long as the last one did (at first: as forming did, `SWITCH_S` at most), and
  what devices that had no memory for both must load then. That is known when all have made ready.
- Where no pipeline can be formed of those that are there, they are let go of, and whoever returns may change
  that.

Every rule counts how often it fired (`RULES`, `Membership.fired`), so that a test can tell which of them it
never tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.errors import counted

BLAMELESS_MAX = 3
"""Times in a row that the same devices are tried again after a failure that was nobody's."""
DOUBLINGS_MAX = 8
STUCK_PASSES = 10
"""Times its longest pass that ended that a device may be at one segment."""
SUSPECT_SHARE = 6
"""A device whose link failed has so many times less time for progress in loading: its questions about weights
may take the same way."""
GAIN_MIN = 1.05
"""So many times as fast as the pipeline that works another one must be foretold to be: forecasts are not more
exact."""
SLOWEST_BYTES_PER_S = 2000
"""A link between stages that carries less counts as broken: 16 kbit/s."""
SWITCH_S = 2.0
"""What a switch for which all have made ready takes at most, as long as none was seen."""
TICK_MAX_S = 1.0
"""What a tick counts at most, however late it comes."""
WAITING = "; waiting for a device to come back"
"""What follows in a note that tells why there is no pipeline."""
RULES = {
    "broken": "a member is lost because its connection closed, or it broke the protocol",
    "refused": "a member is there, but cannot do its part",
    "far end": "of a link that failed the device that was sent to is left out",
    "near end": (
        "of a link that failed the device that sends is left out, for other links of it failed before"
    ),
    "held": "a device that is back is another head's, and cannot be had",
    "in use": "a member is another head's, and cannot be had",
    "silent": "a member of the pipeline gave no sign of life",
    "silent while loading": "a member gave no sign of life while the pipeline was formed",
    "stalled": "a member answers, but its loading makes no progress",
    "suspect stalled": "the same of one whose link failed a moment ago, sooner",
    "stuck": "a member answers, but has been at one segment for too long",
    "vanished": "a segment is in flight, and nobody is at it",
    "slow link": "a segment has been on its way between two stages for long, and has more time for its size",
    "nobody's": "the same devices are tried again, for none is to blame",
    "given up": "the same devices failed too often",
    "made good": "tokens or time made good for failures that were nobody's",
    "nobody left": "no device is left, and the head waits",
    "unfit": "no plan can be made of those that are left",
    "began without": "a device is absent at the start, and the first pipeline is formed without it",
    "surveyed": "a device that was absent at the start has answered, and is known now",
    "not surveyed": "a device that was absent at the start has answered, but did not tell what a plan needs",
    "back": "a device that was lost is taken in again",
    "not yet": "a device that is back must wait longer, because it was lost before",
    "waited enough": (
        "a device that is ready is taken in in the middle of an answer, for there was no better moment"
    ),
    "not worth it": "a device that is back waits for the end of an answer",
    "prepared": "a device that is back has made ready beside the working pipeline",
    "unprepared": "a device that is back could not make ready, and stays out",
    "unable": "a device cannot do its part in a pipeline that is made ready for, and is left out of it",
    "needless": "a device that is back would have nothing to do, or make nothing faster, and stands by",
    "changed": "another plan is made, for devices have become slower or faster",
    "stays": "the plan that was made because of that is not worth the switch",
    "too dear": "a pipeline for which all have made ready takes longer to load than it gains",
    "loads then": "in a switch devices must load, for they had no memory for both pipelines' layers",
    "gone over": "another pipeline takes the place of one that works, for it is faster",
    "all help": "devices are taken in before their time, for nothing goes without them",
    "forgiven": "a device has a clean record again",
}
"""What is decided about devices, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipTimeouts:
    """How long what may take, in seconds; the runtime's are in `runtime/timeouts.py`.

    `silent_s` is for a device that runs, `loading_silent_s` for one that loads; `loading_s` is for one that
    answers, but whose loading makes no progress; `stuck_s` is the least for one segment.

    Plans for devices that have become slower are `again_s` apart, and wait for the end of an answer for
    `calm_s` at most.
    """

    silent_s: float
    loading_silent_s: float
    loading_s: float
    stuck_s: float
    probe_s: float
    back_s: float
    forgive_s: float
    worth: float = 10.0
    moment_s: float = 10.0
    again_s: float = 600.0
    calm_s: float = 60.0


# --------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStarted:
    """The first pipeline is wanted.

    `absent` are devices that cannot be had now, each with why, of which nothing is known. Of these others use
    those `in_use`.
    """

    absent: tuple[tuple[str, str], ...] = ()
    in_use: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersChosen:
    """Of the devices that were asked for these make up the pipeline; the others stand by, and nobody listens
    to them."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFormed:
    """The pipeline that was asked for is there; `moved` were in the one before, too, and have other layers
    now."""

    moved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlanFound:
    """No plan can be made for the devices that were asked for: `text` says why."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBroken:
    """The pipeline, formed or not, cannot go on because of `device` (empty: because of none in particular).

    With `is_refusal` the device is there, but cannot do its part; with `is_held` another head has it.
    """

    device: str
    text: str
    is_refusal: bool = False
    is_held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBroken:
    """The pipeline cannot go on because `second` is lost to `first`, which sends to it, though both are there
    for us."""

    first: str
    second: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatArrived:
    """A word of a member: it has been at one segment for `running_s` (0: it is idle), `queued` wait, and
    `done` have ended so far.

    Of those that came `arrived` was the last (-1: none).
    """

    device: str
    running_s: float = 0.0
    queued: int = 0
    done: int = 0
    arrived: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberProgressed:
    """A member has come further on its way into the pipeline, or is `ready`."""

    device: str
    is_ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswered:
    """A lost device answered a probe; with `is_held` another head holds it, and it cannot be had."""

    device: str
    is_held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChanged:
    """Members have become slower or faster than they were when the pipeline was formed: `text` names them."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSurveyed:
    """What `SurveyDevice` asked for is known now; with a `trouble` it is not, which says why."""

    device: str
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesPrepared:
    """These devices have made ready for a pipeline with the members; they are taken in when it suits.

    Without any the members are ready for another pipeline of them, which is foretold to be `gain` times as
    fast. Who had no memory for both pipelines' layers must load for `load_s` when it is gone over to.
    """

    devices: tuple[str, ...]
    gain: float | None = None
    load_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationFailed:
    """These devices could not make ready; `unable` is the one that it is because of, if one is known."""

    devices: tuple[str, ...]
    text: str
    unable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRejected:
    """A plan for the members and these devices leaves them out, or is not worth the switch (without any: one
    for the members alone)."""

    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passes. `flight_s` is the age of the oldest segment in flight (0: none), `left_s` what the answers
    under way may still take.

    That segment is number `flight`, of which about `flight_bytes` go from stage to stage (0: not known).
    `tokens` have been answered so far, by this and all earlier pipelines.
    """

    flight_s: float = 0.0
    flight: int = -1
    flight_bytes: int = 0
    left_s: float = 0.0
    tokens: int = 0


MembershipEvent = (
    SessionStarted
    | MembersChosen
    | PipelineFormed
    | NoPlanFound
    | PipelineBroken
    | LinkBroken
    | HeartbeatArrived
    | MemberProgressed
    | ProbeAnswered
    | SpeedChanged
    | DeviceSurveyed
    | DevicesPrepared
    | PreparationFailed
    | PlanRejected
    | Tick
)

# ------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Reform:
    """Give up the pipeline if there is one, and form one of these devices, in this order; `silent_s` is what
    was heard last ago."""

    devices: tuple[str, ...]
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disband:
    """Give up the pipeline if there is one: of the devices that are there none can be formed."""

    silent_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Ask a lost device whether it is there."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyDevice:
    """Ask a device that answers what a plan must know of it."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Have those of these devices that are no members make ready for a pipeline of all of them, beside the
    one that works.

    Of these `returning` were lost; without any the members have changed.
    """

    devices: tuple[str, ...]
    returning: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for the user."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The same devices failed again and again, and none of them can be blamed."""

    text: str


MembershipCommand = Reform | Disband | Prepare | Probe | SurveyDevice | Note | GiveUp


@dataclass(slots=True)
class _Standing:
    """What is known of a device; `lost_s` is None for one that is there."""

    strikes: int = 0
    suspected: int = 0
    lost_s: float | None = None
    joined_s: float = 0.0
    answered_s: float | None = None
    probed_s: float = -1e9
    silent_s: float = 0.0
    stalled_s: float = 0.0
    is_ready: bool = False
    is_idle: bool = True
    done: int = 0
    arrived: int = -1
    running_s: float = 0.0
    longest_s: float = 0.0
    has_returned: bool = False
    is_prepared: bool = False
    prepared_s: float = 0.0
    has_refused: bool = False
    is_unable: bool = False
    struck_s: float = 0.0
    is_known: bool = True
    is_asked: bool = False
    was_there: bool = True


class Membership:
    """See the module. `devices` are in pipeline order, those that stand by at first last.

    With a `drafter` there is one, which runs no stage but that model: answers go on without it.
    """

    def __init__(self, devices: Sequence[str], timeouts: MembershipTimeouts, drafter: str = "") -> None:
        self.timeouts = timeouts
        self._drafter = drafter
        self._title = f"drafter {drafter} on" if drafter else "device"
        self.members: tuple[str, ...] = ()
        self.is_formed = False
        self.fired: Counter[str] = Counter()
        self._standing = {name: _Standing() for name in devices}
        self._has_lost = False
        self._preparing: tuple[str, ...] | None = None
        self._change = ""
        self._better: DevicesPrepared | None = None
        self._better_s = 0.0
        self._replanned_s = -1e9
        self._slow_flight = -1
        self._slow_links: set[tuple[str, str]] = set()
        self._is_switching = False
        self._blameless = 0
        self._tokens = 0
        self._formed_s = 0.0
        self._began_s = 0.0
        self._forming_s = 0.0
        self._switch_s: float | None = None
        self._load_s = 0.0
        self._ticked_s: float | None = None
        self._idle_s = 0.0
        self._commands: list[MembershipCommand] = []

    @property
    def is_needed(self) -> bool:
        """Whether answers need a pipeline of these devices; they do not need a drafter's."""
        return not self._drafter

    @property
    def lost(self) -> list[str]:
        return [name for name, known in self._standing.items() if known.lost_s is not None]

    @property
    def returning(self) -> list[str]:
        """Those of the lost that answer again, and make ready or wait for their time."""
        now_s = self._ticked_s or 0.0
        return [
            name
            for name in self.lost
            if name in (self._preparing or ()) or self._is_there(self._standing[name], now_s)
        ]

    def validate(self) -> None:
        """What is true between two events, whatever happened; raises `AssertionError`."""
        assert not self.is_formed or self.members, "a pipeline of nobody"
        lost = set(self.lost)
        assert lost.isdisjoint(self.members), f"members are lost: {lost & set(self.members)}"
        assert self._blameless <= BLAMELESS_MAX + 1, f"{self._blameless} failures in a row that were nobody's"

    def handle(self, event: MembershipEvent, now_s: float) -> list[MembershipCommand]:
        """The only mutator."""
        self._commands = []
        if isinstance(event, SessionStarted):
            self._begin_without(event, now_s)
            self._reform(now_s, 0.0)
        elif isinstance(event, MembersChosen):
            self.members = event.devices
            if self._has_lost:
                self._has_lost = False
                if not self._drafter:
                    count = counted(len(self.members), "device")
                    self._commands.append(Note(text=f"going on with {count}"))
        elif isinstance(event, PipelineFormed):
            self._formed(event, now_s)
        elif isinstance(event, NoPlanFound):
            self.fired["unfit"] += 1
            self._disband(
                f"the model does not fit on what is left: {event.text}{WAITING}",
                0.0,
            )
        elif isinstance(event, PipelineBroken):
            rule = "refused" if event.is_refusal else "in use" if event.is_held else "broken"
            self._broken(event.device, event.text, now_s, rule if event.device else "nobody's")
        elif isinstance(event, LinkBroken):
            self._link_broken(event, now_s)
        elif isinstance(event, HeartbeatArrived):
            self._heard(event, now_s)
        elif isinstance(event, MemberProgressed):
            if event.device in self.members:
                standing = self._standing[event.device]
                standing.silent_s = standing.stalled_s = 0.0
                standing.is_ready = event.is_ready
        elif isinstance(event, ProbeAnswered):
            if event.device in self._standing and event.device not in (
                self._preparing or ()
            ):  # then it is ours
                self.fired["held"] += event.is_held
                self._standing[event.device].answered_s = None if event.is_held else now_s
        elif isinstance(event, SpeedChanged):
            self._changed(event, now_s)
        elif isinstance(event, DeviceSurveyed):
            self._surveyed(event, now_s)
        elif isinstance(event, DevicesPrepared | PreparationFailed | PlanRejected):
            if event.devices == self._preparing:
                self._preparing = None
                event = self._priced(event)
                if isinstance(event, PreparationFailed) and event.unable:
                    self._lose_unable(event, now_s)
                elif event.devices:
                    self._prepared(event, now_s)
                else:
                    self._replanned(event, now_s)
        else:
            self._tick(event, now_s)
        return self._commands

    # -------------------------------------------------------------------------------------- absent at first

    def _begin_without(self, event: SessionStarted, now_s: float) -> None:
        in_use: dict[str, list[str]] = {}
        for name, why in event.absent:
            self.fired["began without"] += 1
            self._lose(name, now_s)
            standing = self._standing[name]
            standing.is_known = standing.was_there = False
            if name in event.in_use:
                in_use.setdefault(why, []).append(name)
                continue
            fate = "beginning without it, and taking it in when it is there"
            self._commands.append(Note(text=f"{self._title} {name} is absent ({why}); {fate}"))
        for why, names in in_use.items():
            told = f"{self._title} {names[0]} is" if len(names) == 1 else f"devices {', '.join(names)} are"
            them, they = ("it", "it is") if len(names) == 1 else ("them", "they are")
            fate = f"beginning without {them}, and taking {them} in when {they} free"
            self._commands.append(Note(text=f"{told} {why}; {fate}"))

    def _survey(self, now_s: float) -> None:
        """Asks those who have answered and are not known; at once where nothing goes without them."""
        for name in self.lost:
            standing = self._standing[name]
            if standing.is_known or standing.is_asked or not self._is_there(standing, now_s):
                continue
            if not self.members or self._has_waited(name, now_s):
                standing.is_asked = True
                self._commands.append(SurveyDevice(device=name))

    def _surveyed(self, event: DeviceSurveyed, now_s: float) -> None:
        standing = self._standing[event.device]
        standing.is_asked = False
        if not event.trouble:
            self.fired["surveyed"] += 1
            standing.is_known = True
            standing.answered_s = standing.probed_s = now_s
            return
        self.fired["not surveyed"] += 1
        self._lose(event.device, now_s)
        self._commands.append(Note(text=f"{self._title} {event.device} is not taken in ({event.trouble})"))

    # ------------------------------------------------------------------------------------------- forming

    def _reform(self, now_s: float, silent_s: float) -> None:
        self.members = self._with()
        self.is_formed = False
        self._forget_preparations()
        if not self.members:
            self.fired["nobody left"] += 1
            is_unable = any(known.has_refused for known in self._standing.values())
            reason = "no device that is left can do its part" if is_unable else "no device is left"
            text = "answers go on without it" if self._drafter else f"{reason}{WAITING}"
            self._disband(text, silent_s)
            return
        self._began_s = now_s
        for name in self.members:
            standing = self._standing[name]
            standing.silent_s = standing.stalled_s = standing.running_s = standing.longest_s = 0.0
            standing.done, standing.arrived, standing.is_idle, standing.is_ready = 0, -1, True, False
        self._commands.append(Reform(devices=self.members, silent_s=silent_s))

    def _forget_preparations(self) -> None:
        """What devices made ready for is over."""
        self._preparing = self._better = None
        for standing in self._standing.values():
            standing.is_prepared = False

    def is_worth(self, gain: float, load_s: float = 0.0) -> bool:
        """Whether a pipeline that is foretold to be `gain` times as fast as the one that works is worth going
        over to, where devices must still load for `load_s` then."""
        return gain >= GAIN_MIN and (1 - 1 / gain) * self.timeouts.again_s > self.pause_s(load_s)

    def pause_s(self, load_s: float) -> float:
        """How long going over to another pipeline will take."""
        usual_s = min(self._forming_s, SWITCH_S) if self._switch_s is None else self._switch_s
        return usual_s + load_s

    def _priced(
        self, event: DevicesPrepared | PreparationFailed | PlanRejected
    ) -> DevicesPrepared | PreparationFailed | PlanRejected:
        """What was made ready, unless its switch takes longer than it gains."""
        if not isinstance(event, DevicesPrepared):
            return event
        if event.gain is not None and not self.is_worth(event.gain, event.load_s):
            self.fired["too dear"] += 1
            return PlanRejected(devices=event.devices)
        self._load_s = event.load_s
        return event

    def _changed(self, event: SpeedChanged, now_s: float) -> None:
        """Has another plan made for devices that have become slower or faster, unless one was made a moment
        ago."""
        if not self.is_formed or self._preparing is not None or self._better is not None:
            return
        if now_s - self._replanned_s < self.timeouts.again_s:
            return
        self.fired["changed"] += 1
        self._replanned_s, self._change, self._preparing = now_s, event.text, ()
        self._commands.append(Prepare(devices=self._with(), returning=()))

    def _lose_unable(self, event: PreparationFailed, now_s: float) -> None:
        """A device cannot do its part, which is told once: the others make ready again, without it."""
        self.fired["unable"] += 1
        self._lose(event.unable, now_s)
        standing = self._standing[event.unable]
        if not standing.is_unable:
            self._commands.append(Note(text=f"{self._title} {event.unable} is not taken in ({event.text})"))
        standing.is_unable = True

    def _replanned(self, event: DevicesPrepared | PreparationFailed | PlanRejected, now_s: float) -> None:
        """What came of another plan for those who are there."""
        if isinstance(event, DevicesPrepared):
            self._better, self._better_s = event, now_s
        else:
            self.fired["stays"] += 1

    def _go_over(self, better: DevicesPrepared, now_s: float) -> None:
        """The members, and those who stand by, form the pipeline that they have made ready for."""
        self.fired["gone over"] += 1
        gain = "" if better.gain is None else f", which is {better.gain:.2f} times as fast"
        self._commands.append(Note(text=f"{self._title} {self._change}: going over to another plan{gain}"))
        self._is_switching = True
        self._reform(now_s, 0.0)

    def _prepared(self, event: DevicesPrepared | PreparationFailed | PlanRejected, now_s: float) -> None:
        for name in event.devices:
            standing = self._standing[name]
            if isinstance(event, DevicesPrepared):
                self.fired["prepared"] += 1
                standing.is_prepared = True
                standing.answered_s = standing.probed_s = now_s
                # It may make ready again, where it still seems held by the last time: what it has waited
                # counts.
                standing.prepared_s = standing.prepared_s or now_s
            elif isinstance(event, PlanRejected):
                self.fired["needless"] += 1
                standing.lost_s = None
                here = self._here(standing)
                self._commands.append(Note(text=f"{self._title} {name} is {here}, and stands by"))
                standing.was_there = True
            else:
                self.fired["unprepared"] += 1
                self._lose(name, now_s)
        if isinstance(event, PreparationFailed):
            self._commands.append(
                Note(text=f"{self._title} {', '.join(event.devices)} is not taken in ({event.text})")
            )

    def _disband(self, text: str, silent_s: float) -> None:
        self.members = ()
        self.is_formed = False
        self._forget_preparations()
        self._commands += [Note(text=text), Disband(silent_s=silent_s)]

    def _formed(self, event: PipelineFormed, now_s: float) -> None:
        self.is_formed = True
        self._forming_s = now_s - self._began_s
        if self._is_switching:
            self.fired["loads then"] += self._load_s > 0
            self._switch_s = max(0.0, self._forming_s - self._load_s)
        self._formed_s = now_s
        self._idle_s = 0.0
        for name in self.members:
            standing = self._standing[name]
            standing.silent_s, standing.joined_s, standing.is_unable = 0.0, now_s, False
            if standing.has_returned:
                standing.has_returned = False
                self.fired["back"] += 1
                self._commands.append(Note(text=f"{self._title} {name} is {self._here(standing)}"))
            standing.was_there = True
        if self._is_switching:
            self._is_switching = False
            moved = ", ".join(f"{self._title} {name}" for name in event.moved)
            told = f"changing the pipeline took {self._forming_s:.1f} s"
            self._commands.append(Note(text=f"{told}; other layers run now on {moved}" if moved else told))

    def _here(self, standing: _Standing) -> str:
        """How to say that a device is there again, or for the first time."""
        return "back" if standing.was_there else "there now"

    def _broken(self, device: str, text: str, now_s: float, rule: str) -> None:
        if not self.members:
            return
        self.fired[rule] += 1
        self._is_switching = False
        is_refusal = rule == "refused"
        silent_s = 0.0
        if device in self.members:
            silent_s = self._standing[device].silent_s
            self._lose(device, now_s)
            self._standing[device].has_refused = is_refusal
            self._has_lost = True
            fate = {"refused": "cannot do its part", "in use": "cannot be had"}.get(rule, "is lost")
            self._commands.append(Note(text=f"{self._title} {device} {fate} ({text})"))
        else:
            self._blameless += 1
            if self._blameless > BLAMELESS_MAX:
                self.fired["given up"] += 1
                self._commands.append(GiveUp(text=text))
                return
            self._commands.append(Note(text=f"{text}; beginning again with the same devices"))
        self._reform(now_s, silent_s)

    def _link_broken(self, event: LinkBroken, now_s: float) -> None:
        """Both ends are suspects. The far one is left out, unless links of the near one failed more often."""
        ends = [self._standing[name] for name in (event.first, event.second)]
        for standing in ends:
            standing.suspected += 1
        is_near = ends[0].suspected > ends[1].suspected
        text = f"the link from {event.first} to {event.second} failed: {event.text}"
        self._broken(
            event.first if is_near else event.second, text, now_s, "near end" if is_near else "far end"
        )

    def _lose(self, device: str, now_s: float) -> None:
        standing = self._standing[device]
        has_served = standing.joined_s > standing.struck_s  # since it was lost last
        if standing.strikes and has_served and now_s - standing.joined_s > self.timeouts.forgive_s:
            self.fired["forgiven"] += 1
            standing.strikes = standing.suspected = 0
        standing.strikes += 1
        standing.struck_s = now_s
        standing.lost_s, standing.answered_s, standing.has_returned, standing.prepared_s = (
            now_s,
            None,
            False,
            0.0,
        )

    # ------------------------------------------------------------------------------------------ watching

    def _heard(self, event: HeartbeatArrived, now_s: float) -> None:
        if event.device not in self.members:
            return
        standing = self._standing[event.device]
        standing.silent_s = 0.0
        standing.is_idle = event.running_s == 0 and event.queued == 0
        if not standing.is_idle:
            self._idle_s = 0.0
        if (
            event.done != standing.done
        ):  # the pass that was heard of last has ended: it took at least as long as was heard
            standing.longest_s = max(standing.longest_s, standing.running_s)
        standing.done, standing.arrived, standing.running_s = event.done, event.arrived, event.running_s
        if self.is_formed and event.running_s > max(self.timeouts.stuck_s, STUCK_PASSES * standing.longest_s):
            self._broken(event.device, f"at one segment for {event.running_s:.0f} s", now_s, "stuck")

    def _tick(self, tick: Tick, now_s: float) -> None:
        passed_s = 0.0 if self._ticked_s is None else min(max(0.0, now_s - self._ticked_s), TICK_MAX_S)
        self._ticked_s = now_s
        limit_s = self.timeouts.silent_s if self.is_formed else self.timeouts.loading_silent_s
        for name in self.members:
            standing = self._standing[name]
            standing.silent_s += passed_s
            standing.stalled_s += 0.0 if self.is_formed or standing.is_ready else passed_s
            if standing.silent_s > limit_s:
                rule = "silent" if self.is_formed else "silent while loading"
                self._broken(name, f"no sign of life for {standing.silent_s:.0f} s", now_s, rule)
                return
            loading_s = self.timeouts.loading_s / (SUSPECT_SHARE if standing.suspected else 1)
            if not self.is_formed and standing.stalled_s > loading_s:
                rule = "suspect stalled" if standing.suspected else "stalled"
                self._broken(name, f"no progress in loading for {standing.stalled_s:.0f} s", now_s, rule)
                return
        if tick.tokens > self._tokens or (
            self.is_formed and now_s - self._formed_s > self.timeouts.forgive_s
        ):
            self.fired["made good"] += self._blameless > 0
            self._tokens, self._blameless = tick.tokens, 0
        if tick.flight_s == 0:
            self._idle_s = 0.0
        elif self.is_formed:
            self._idle_s += passed_s
            is_late = min(self._idle_s, tick.flight_s) > self.timeouts.stuck_s
            if is_late and self._give_up_flight(tick, now_s):
                return
        self._survey(now_s)
        self._reconsider(tick.left_s, now_s)
        self._probe(now_s)

    def _give_up_flight(self, tick: Tick, now_s: float) -> bool:
        """Whether a segment that is in flight, and that nobody is at, is given up: on a link between two
        stages it has its time."""
        late_s = min(self._idle_s, tick.flight_s)  # devices may have been seen idle since before it left
        self.fired["vanished"] += self._slow_flight != tick.flight
        to_come = [name for name in self.members if self._standing[name].arrived < tick.flight]
        if not to_come or to_come[0] == self.members[0]:
            text = f"a segment got lost: nobody has been at it for {late_s:.0f} s"
            self._broken("", text, now_s, "nobody's")
            return True
        second = to_come[0]
        first = self.members[self.members.index(second) - 1]
        size = f"{tick.flight_bytes / 1024:.0f} KiB" if tick.flight_bytes else "a segment"
        if late_s > max(self.timeouts.stuck_s, tick.flight_bytes / SLOWEST_BYTES_PER_S):
            text = f"{size} did not come over it within {late_s:.0f} s"
            self._link_broken(LinkBroken(first=first, second=second, text=text), now_s)
            return True
        if self._slow_flight != tick.flight:
            self.fired["slow link"] += 1
            self._slow_flight = tick.flight
        if (first, second) not in self._slow_links:
            self._slow_links.add((first, second))
            rate = tick.flight_bytes * 8 / 1000 / late_s
            text = f"the link from {first} to {second} carries less than {rate:.0f} kbit/s"
            self._commands.append(Note(text=f"{text}: {size} have been on their way for {late_s:.0f} s"))
        return False

    def _probe(self, now_s: float) -> None:
        for name in self.lost:
            standing = self._standing[name]
            if name not in (self._preparing or ()) and now_s - standing.probed_s >= self.timeouts.probe_s:
                standing.probed_s = now_s
                self._commands.append(Probe(device=name))

    def _reconsider(self, left_s: float, now_s: float) -> None:
        """Another pipeline: of a better plan once that disturbs nobody, or has waited for long enough; else
        with those who are back."""
        if self._preparing is not None or (self.members and not self.is_formed):
            return
        if self._better is not None and (left_s == 0 or now_s - self._better_s > self.timeouts.calm_s):
            self._go_over(self._better, now_s)
        else:
            self._take_in(left_s, now_s)

    def _take_in(self, left_s: float, now_s: float) -> None:
        """Those who are back, once they have made ready and the answers allow for the pause."""
        there = self._answering(now_s)
        returned = [name for name in there if self._has_waited(name, now_s)]
        if self.is_formed and any(not self._standing[name].is_prepared for name in returned):
            self._preparing = tuple(returned)
            self._commands.append(Prepare(devices=self._with(returned), returning=self._preparing))
            return
        if returned and self.is_formed and self._is_almost_over(returned, left_s, now_s):
            return
        self.fired["not yet"] += len(there) > len(returned)
        if returned and not self.members:  # nothing goes without them: whoever is there may help
            self.fired["all help"] += len(there) > len(returned)
            returned = there
        if returned:
            self._rejoin(returned, now_s)

    def _rejoin(self, returned: Sequence[str], now_s: float) -> None:
        for name in returned:
            self._standing[name].lost_s = None
            self._standing[name].has_returned = True
        self._is_switching = self.is_formed
        self._reform(now_s, 0.0)

    def _answering(self, now_s: float) -> list[str]:
        """The lost devices that could be taken in; what the others made ready for is over."""
        there = []
        for name in self.lost:
            standing = self._standing[name]
            if standing.is_known and self._is_there(standing, now_s):
                there.append(name)
            else:
                standing.is_prepared = False
        return there

    def _with(self, returned: Sequence[str] = ()) -> tuple[str, ...]:
        """All who are not lost, and these."""
        return tuple(
            name for name, known in self._standing.items() if known.lost_s is None or name in returned
        )

    def _is_almost_over(self, returned: Sequence[str], left_s: float, now_s: float) -> bool:
        """Whether the answers end so soon that a pause for those who are back is not worth it, and they have
        not waited for that too long."""
        if not 0 < left_s <= self.timeouts.worth * self.pause_s(self._load_s):
            return False
        is_soon = now_s - max(self._standing[name].prepared_s for name in returned) <= self.timeouts.moment_s
        self.fired["not worth it" if is_soon else "waited enough"] += 1
        return is_soon

    def wait_s(self, device: str) -> float:
        """How long a device stays out, after as many losses as it had."""
        wait_s: float = self.timeouts.back_s * 2 ** min(self._standing[device].strikes - 1, DOUBLINGS_MAX)
        return wait_s

    def _has_waited(self, name: str, now_s: float) -> bool:
        """Whether a lost device has been out for long enough."""
        lost_s = self._standing[name].lost_s
        assert lost_s is not None
        return now_s - lost_s >= self.wait_s(name)

    def _is_there(self, standing: _Standing, now_s: float) -> bool:
        return standing.answered_s is not None and now_s - standing.answered_s <= 2 * self.timeouts.probe_s
