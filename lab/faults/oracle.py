"""What must happen in time, and what must not happen at all, whatever was drawn: the world knows what is
wrong, and holds the head to it.

*Whatever is stuck, silent or gone is lost within X.* A member that has been at one pass for longer than the
rule allows, that says nothing, or whose process is gone is a member no more `X` after the head could know: X
is the product's own limit for it (`core.cluster.membership.MembershipTimeouts`), and `NOTICED_S` for a word
to come and for the head to look.

| a member | is lost within |
|---|---|
| at one pass | `max(stuck_s, STUCK_PASSES * its longest pass that ended)` |
| silent while it serves | `silent_s` |
| silent while the pipeline is formed | `loading_silent_s` |
| gone while it serves, its connections noticed | at once |

*Whatever is healthy is not lost*: a device is lost only if something happened to it, to one of its links, or
to the head, or if it lacks the arithmetic that is kept. Slow is not lost, as long as each pass ends within
the limit above.

*Whatever is back serves within Y*: where all is well, a lost device that has the arithmetic is a member
again, or stands by, after `back_s * 2 ** (losses - 1)` (it stays out), `2 * probe_s` (it is asked),
`moment_s` (it waits for an answer to end), and `READY_S` (it loads, and the pipeline is formed again).

In the product (`runtime/timeouts.py`) X is 60 s, or ten of its passes, for a pass, 5 s for silence, 15 s for
silence while loading; Y is 18 s and the time to load after a first loss.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowspec.core.cluster.membership import STUCK_PASSES, Membership
from flowspec.sim.clock import Clock
from lab.faults.daemon import SimDaemon
from lab.faults.network import Network
from lab.faults.schedule import Fault

SLOW_KINDS = ("slow", "heat", "narrow")
LOOK_S = 0.25
NOTICED_S = 2.0
"""What the head may take, beyond what the rule says, to hear of something and to decide: a Ping, its answer,
a look."""
READY_S = 20.0
"""What loading, dialling and the forming of a pipeline may take here, others' returns beside it included."""


class Oracle:
    """Looks at a world every `LOOK_S`; raises `AssertionError`. `head` is the head's place, and `touch` tells
    of faults as they begin."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        daemons: Mapping[str, SimDaemon],
        membership: Membership,
        head: str,
    ) -> None:
        self._clock = clock
        self._network = network
        self._daemons = daemons
        self._membership = membership
        self._head = head
        self._since_s: dict[tuple[str, str], float] = {}
        self._touched: set[str] = set()
        self._overdue: set[str] = set()
        self._lost: set[str] = set()
        self._lost_s: dict[str, float] = {}
        self._arithmetic = ""

    @property
    def lost(self) -> list[str]:
        return self._membership.lost

    @property
    def out(self) -> list[str]:
        """Those of them who could be taken in."""
        return [name for name in self.lost if not self.is_apart(name)]

    def touch(self, fault: Fault) -> None:
        """Something goes wrong: at the head (then all may be lost), a device, or a link, whose ends may be,
        if they are devices.

        A device that is slow or hot is not lost for it, unless a pass takes longer than the rule allows;
        nor is one on a slow network: signs of life wait there only for as long as the head lets them.
        """
        if fault.kind == "poor":  # where devices share no arithmetic any of them may be left out
            self._touched.update(self._daemons)
        if fault.kind not in SLOW_KINDS:
            self._touched.update(
                fault.where
                if len(fault.where) == 1
                else [place for place in fault.where if place != self._head]
            )

    def look(self, *, head_listens: bool, pipeline: int, healed_s: float, arithmetic: str = "") -> None:
        """The head listens or not, `pipeline` is the one that it has or forms; from `healed_s` on all is
        well. It keeps an `arithmetic` (empty: none yet)."""
        self._arithmetic = arithmetic
        for name, daemon in self._daemons.items():
            is_watched = head_listens and name in self._membership.members
            self._look_at(name, daemon, pipeline if is_watched else 0)
        now_lost = self._membership.lost
        for name in now_lost:
            excused = not self._touched.isdisjoint((name, self._head)) or name in self._overdue
            excused |= self.is_apart(name)
            assert name in self._lost or excused, f"{name} is lost, though nothing was wrong with it"
        now_s = self._clock.now_s
        self._lost_s = {name: self._lost_s.get(name, now_s) for name in now_lost if not self.is_apart(name)}
        self._lost = set(now_lost)
        for name, lost_s in self._lost_s.items():
            out_s = self._clock.now_s - max(lost_s, healed_s)
            assert out_s <= self.back_s(name), f"{name} has been well for {out_s:.1f} s, and is still out"

    def is_apart(self, name: str) -> bool:
        """Whether a device lacks the arithmetic that is kept: it is not taken in."""
        return bool(self._arithmetic) and self._arithmetic not in self._daemons[name].offers

    def back_s(self, name: str) -> float:
        """Within how long a lost device that is well must be back."""
        membership_timeouts = self._membership.timeouts
        return (
            self._membership.wait_s(name)
            + 2 * membership_timeouts.probe_s
            + membership_timeouts.moment_s
            + READY_S
        )

    def _look_at(self, name: str, daemon: SimDaemon, pipeline: int) -> None:
        """A member of `pipeline` (0: of none that the head could watch)."""
        membership_timeouts, is_formed = self._membership.timeouts, self._membership.is_formed
        hears = self._network.is_reached(name, self._head) and self._network.is_reached(self._head, name)
        is_well = daemon.is_up and not daemon.is_stopped and hears
        running_s, longest_s = daemon.at_work_s
        limit_s = max(membership_timeouts.stuck_s, STUCK_PASSES * longest_s)
        if running_s > limit_s - LOOK_S:
            self._overdue.add(name)
        over_s = self._lasts(
            name, f"stuck {pipeline}", bool(pipeline) and is_formed and is_well and running_s > limit_s
        )
        assert over_s <= NOTICED_S, f"{name} has been at one pass for {running_s:.1f} s, and is not lost"
        limit_s = membership_timeouts.silent_s if is_formed else membership_timeouts.loading_silent_s
        silent_s = self._lasts(name, f"silent {pipeline} {is_formed}", bool(pipeline) and not is_well)
        assert silent_s <= limit_s + NOTICED_S, (
            f"{name} has been silent for {silent_s:.1f} s, and is not lost"
        )
        gone_s = self._lasts(
            name, f"gone {pipeline}", bool(pipeline) and is_formed and hears and not daemon.is_up
        )
        is_heard = silent_s <= gone_s  # one that ended while its link was cut is silent: nobody hears the end
        assert gone_s <= NOTICED_S or not is_heard, (
            f"{name} has been gone for {gone_s:.1f} s, and is not lost"
        )

    def _lasts(self, name: str, what: str, is_so: bool) -> float:
        """For how long this has been so without a break; `what` begins with its kind."""
        kind, now_s = what.partition(" ")[0], self._clock.now_s
        found = self._since_s.get((name, what), now_s) if is_so else now_s
        for key in [key for key in self._since_s if key[0] == name and key[1].partition(" ")[0] == kind]:
            del self._since_s[key]
        if is_so:
            self._since_s[name, what] = found
        return now_s - found
