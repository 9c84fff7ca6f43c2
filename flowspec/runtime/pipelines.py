"""One pipeline after another: forms them of the devices that are there, gives them up when one is lost, takes in who returns.

Carries out what `core/membership.py` decides, with sockets and the clock: a `Stages` for each incarnation, probes for the lost. The head
is told when a pipeline is lost and when another is there, and gets its turn while one is formed. Without a `replan` the first
pipeline is the only one, and its loss an error.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flowspec.core.events import PipelineLost, Reformed
from flowspec.core.incarnation import incarnation_of
from flowspec.core.membership import (
    Answered,
    Begin,
    Broken,
    Disband,
    Formed,
    Membership,
    MembershipEvent,
    Note,
    Patience,
    Planned,
    Probe,
    Reform,
    Tick,
    Unfit,
)
from flowspec.core.messages import Verified
from flowspec.errors import BrokenError, ClusterError, InputError
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime import timeouts
from flowspec.runtime.emulation import Emulation
from flowspec.runtime.heap import give_back
from flowspec.runtime.probes import Probes
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.stages import Progress, Stages, new_session
from flowspec.runtime.transport import Wake
from flowspec.wire.codec import Tensor

Replan = Callable[[Sequence[str]], ClusterPlan]
"""The plan for these devices of the cluster, by name; raises `InputError` or `ClusterError` where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a head goes on when a device is lost: `replan`, whom to tell in a line of text, and how long to wait for devices (None: for ever).

    `spares` are the devices that the first plan leaves out, with their addresses.
    """

    replan: Replan
    spares: Mapping[str, str] = field(default_factory=dict)
    on_note: Callable[[str], None] = lambda text: None
    wait_s: float | None = None


class _OvertakenError(Exception):
    """What is being formed is not wanted any more."""


class Pipelines:
    """See the module. `on_change` is told of losses and new pipelines, `meanwhile` is called while one is formed; it says whether to go on.

    With a `drafter` the plan is that model's, on its one device.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        wake: Wake,
        progress: Progress,
        emulation: Emulation | None,
        recovery: Recovery | None,
        keys: Keyring | None = None,
        *,
        on_change: Callable[[PipelineLost | Reformed], None],
        meanwhile: Callable[[], bool],
        drafter: str = "",
    ) -> None:
        self.plan = plan
        self.stages: Stages | None = None
        spares = {} if recovery is None else recovery.spares
        self._addresses = {stage.name: stage.address for stage in plan.stages} | dict(spares)
        self._wake = wake
        self._progress = progress
        self._emulation = emulation
        self._recovery = recovery
        self._keys = keys
        self._on_change = on_change
        self._meanwhile = meanwhile
        patience = Patience(
            silent_s=timeouts.SILENT_S,
            loading_silent_s=timeouts.LOADING_SILENT_S,
            loading_s=timeouts.LOADING_S,
            stuck_s=timeouts.STUCK_S,
            probe_s=timeouts.PROBE_EVERY_S,
            back_s=timeouts.BACK_S,
            forgive_s=timeouts.FORGIVE_S,
        )
        self._membership = Membership(list(self._addresses), patience, drafter)
        self._session = new_session()
        self._probes = Probes(incarnation_of(new_session(), 1), keys)
        self._generation = 0
        self._wanted: Reform | None = None
        self._waiting_since_s: float | None = None
        self._watched_s = 0.0
        self._note = ""

    def connect(self) -> None:
        """Forms the first pipeline; raises the error of whoever cannot take part."""
        self._decide(Begin())
        self._form()
        if self.stages is None:
            raise ClusterError(self._note)

    def listen(self, timeout_ms: int) -> Iterator[tuple[Verified, Tensor | None]]:
        """Waits for anything to happen and yields what was verified; while there is no pipeline, forms one or waits for devices."""
        if self._wanted is not None:
            self._form()
        elif self.stages is None:
            select.select([self._wake.read_fd], [], [], min(timeout_ms, 1000 * timeouts.WATCH_EVERY_S) / 1000)
            self._wake.clear()
        else:
            try:
                yield from self.stages.listen(timeout_ms)
            except BrokenError as error:
                self.broken(error)

    @property
    def due_s(self) -> float:
        """When `listen` must be called again at the latest."""
        if self.stages is None:
            return 0.0 if self._wanted is not None else float("inf")
        return min(self.stages.due_s, self._watched_s + timeouts.WATCH_EVERY_S)

    def broken(self, error: BrokenError) -> None:
        """The pipeline cannot go on."""
        if self._recovery is None:
            raise error
        self._decide(Broken(device=error.device, text=error.why, is_refusal=error.is_refusal))

    def watch(self, stand: Callable[[float], Tick]) -> None:
        """Looks who is silent and who is back, now and then; raises `ClusterError` when the wait for devices is over.

        `stand` tells how the answers stand at an instant.
        """
        now_s = time.monotonic()
        if now_s - self._watched_s < timeouts.WATCH_EVERY_S:
            return
        self._watched_s = now_s
        for device in self._probes.answered():
            self._decide(Answered(device=device))
        self._decide(stand(now_s))
        limit_s = None if self._recovery is None else self._recovery.wait_s
        if self._waiting_since_s is not None and limit_s is not None and now_s - self._waiting_since_s > limit_s:
            raise ClusterError(f"{self._note}; nothing changed within {limit_s:.0f} s")

    def close(self) -> None:
        """Lets go of the daemons."""
        if self.stages is not None:
            self.stages.close()
        self._probes.close()

    # ---------------------------------------------------------------------------------------------- deciding

    def _decide(self, event: MembershipEvent) -> None:
        for command in self._membership.handle(event, time.monotonic()):
            if isinstance(command, Note):
                self._note = command.text
                if self._recovery is not None:
                    self._recovery.on_note(command.text)
            elif isinstance(command, Probe):
                if self._recovery is not None:
                    self._probes.ask(command.device, self._addresses[command.device])
            elif isinstance(command, Reform | Disband):
                if self._generation and self._recovery is None:
                    raise ClusterError(self._note.partition("; ")[0])  # nothing goes on
                self._wanted = command if isinstance(command, Reform) else None
                self._fence(command.silent_s)
                self._waiting_since_s = None if self._wanted is not None else time.monotonic()
            else:
                raise ClusterError(command.text)

    def _fence(self, silent_s: float) -> None:
        """The pipeline is over: its devices are let go of, and what they still say is not heard."""
        stages, self.stages = self.stages, None
        if stages is not None:
            lost = self._membership.lost
            stages.close(lost=lost[-1] if lost else "")
            self._on_change(PipelineLost(silent_s=silent_s))

    def _form(self) -> None:
        """Forms the pipeline that is wanted, or finds out why it cannot be."""
        wanted, self._wanted = self._wanted, None
        assert wanted is not None
        is_first = self._generation == 0
        plan = self.plan
        if not is_first:
            assert self._recovery is not None
            try:
                plan = self._recovery.replan(wanted.devices)
            except (InputError, ClusterError) as error:
                self._decide(Unfit(text=str(error)))
                return
        give_back()  # what the last pipeline's sockets and the last drafter held
        self._generation += 1
        self._decide(Planned(devices=tuple(stage.name for stage in plan.stages)))
        stages = Stages(
            plan,
            self._wake,
            self._progress,
            self._emulation,
            self._keys,
            incarnation=incarnation_of(self._session, self._generation),
            on_word=self._decide,
        )
        try:
            stages.connect(timeouts.CONNECT_S if is_first else timeouts.RECONNECT_S, self._between)
        except _OvertakenError:
            stages.close()
        except BrokenError as error:
            stages.close(lost=error.device)
            if is_first:
                raise
            self.broken(error)
        except BaseException:
            stages.close()
            raise
        else:
            self.stages, self.plan = stages, plan
            self._decide(Formed())
            if not is_first:
                self._on_change(Reformed(stage_count=len(plan.stages), cache_slots=stages.cache_slots))

    def _between(self) -> None:
        """While a pipeline is formed: the head's turn, and a look at who is silent."""
        is_wanted = self._meanwhile()
        if not is_wanted or self._wanted is not None or not self._membership.members:
            raise _OvertakenError
