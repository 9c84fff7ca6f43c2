"""What may be used for a plan: devices with their memory, the links between them, the model, the users.

Knows no search and no flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.plan.memory import SYSTEM_SHARE, ModelWeights, SliceMemory, drafter_memory, stage_memory
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.shape import ModelShape
from flowspec.plan.timing import DIRECT, LinkSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCores:
    """What the daemons of one `host` have to share: its `cores`, of which this one uses `threads`."""

    host: str
    cores: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A device of a cluster; `memory_bytes` is what all of our processes there may take together.

    `runs_stages` is False for a head's machine without a daemon. `shared` are cores that a daemon shares with
    others of its machine and a drafter there, where its profile is that of one which computes alone.
    """

    name: str
    profile: DeviceProfile
    memory_bytes: int
    runs_stages: bool = True
    shared: SharedCores | None = None


def whole_memory(profile: DeviceProfile) -> int:
    """Bytes of a device that we may use: its system keeps a share to itself."""
    return int(profile.memory_gb * 1e9 * (1 - SYSTEM_SHARE))


def site(name: str, profile: DeviceProfile, limit_bytes: int | None = None) -> Site:
    """A device on which the user may allow us no more than `limit_bytes`."""
    size = whole_memory(profile)
    return Site(name=name, profile=profile, memory_bytes=min(size, limit_bytes or size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links between devices by name: `pairs` (either way alike), and `default` for all others."""

    default: LinkSpec
    pairs: Mapping[frozenset[str], LinkSpec] = field(default_factory=dict)

    def between(self, first: str, second: str) -> LinkSpec:
        """A device's link to itself takes no time."""
        return DIRECT if first == second else self.pairs.get(frozenset((first, second)), self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDrafter:
    """What guesses ahead, in the head's process. `shape` is None for one that needs no model (n-grams)."""

    name: str
    shape: ModelShape | None
    acceptance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan is asked for. `precisions` are those that the user allows; without a `head`, any device may
    be it. With `all_devices` none is left out.

    Passes are timed with `typical_context` tokens before them; memory is counted for `context` tokens of each
    user, whose keys and values are held as `cache` says.
    """

    sites: tuple[Site, ...]
    network: Network
    shape: ModelShape
    weights: ModelWeights
    precisions: tuple[str, ...]
    drafter: PlannedDrafter | None
    context: int = 4096
    typical_context: int = 512
    users: int = 1
    head: str | None = None
    all_devices: bool = False
    cache: str = CACHE_AUTO

    @property
    def heads(self) -> Sequence[Site]:
        return [each for each in self.sites if self.head in (None, each.name)]

    @property
    def stage_sites(self) -> Sequence[Site]:
        return [each for each in self.sites if each.runs_stages]

    def stage_memory(
        self, precision: str, layers: int, *, first: bool, last: bool, begin: int | None = None
    ) -> SliceMemory:
        """What a slice of so many layers takes, from `begin` on (None: any)."""
        return stage_memory(
            self.shape,
            self.weights,
            precision,
            layers,
            first=first,
            last=last,
            context=self.context,
            users=self.users,
            cache=self.cache,
            begin=begin,
        )

    def drafter_bytes(self, precision: str) -> int:
        """What the drafter takes at the head; 0 where it has no model."""
        if self.drafter is None or self.drafter.shape is None:
            return 0
        need = drafter_memory(self.drafter.shape, precision, context=self.context, users=self.users)
        return need.total_bytes
