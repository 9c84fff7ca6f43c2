"""A simulated cluster described by parameters, and made: cores, devices, links and method, from plain values.

Owns defaults only; the language and the drafter are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowspec.core.head.certain import CertainOf
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.head import HeadCore
from flowspec.core.head.sharing import BLOCK
from flowspec.core.methods import WITHOUT_GUESSES, make_method
from flowspec.core.methods.base import Method
from flowspec.core.protocol.sliding_window import SlidingWindow
from flowspec.draft.protocol import CopiesFeatures, Drafter
from flowspec.draft.text import TextDrafter
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.plan.timing import DIRECT, INSTANT, Curve, LinkSpec, slowest
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter_device import DrafterDeviceSpec
from flowspec.sim.fake_layers import FakeLayers
from flowspec.sim.forming import FormedPipeline
from flowspec.sim.language import Language
from flowspec.sim.world import Handled, Links, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One device for each stage; every connection alike unless `links` says otherwise.

    `method` is a name, to which `options` belong as `make_method` takes them, or makes one. `drafting` is the
    time of every drafter, or of each, and `ranking` of each as `World` takes it; `boards` say which of them
    share a board (none: nobody), and `levels` which are intermediates, above 0 (none: nobody). `row_bytes` is
    what a row has on the wire (None: a few bytes), on its way to each stage alike or one by one,
    `feature_bytes` what a captured state has. Where a drafter wants features each stage captures as many
    states as `captured` says (none: both ends one). With `returned_row_bytes` and `verifying` the
    head verifies (see `World`). `prefix_block` is that of `HeadCore`.
    """

    devices: tuple[DeviceSpec, ...]
    control: LinkSpec = DIRECT
    data: LinkSpec = DIRECT
    links: Links | None = None
    method: str | Callable[[], Method] = WITHOUT_GUESSES
    options: Mapping[str, Any] = field(default_factory=dict)
    context: int = 4096
    sliding_window: SlidingWindow | None = None
    prefix_block: int = BLOCK
    drafting: Curve | tuple[Curve, ...] = INSTANT
    ranking: tuple[Curve, ...] = ()
    boards: tuple[DrafterDeviceSpec, ...] = ()
    levels: tuple[int, ...] = ()
    head_s: float = 0.0
    row_bytes: int | tuple[int, ...] | None = None
    captured: tuple[int, ...] = ()
    feature_bytes: int | None = None
    returned_row_bytes: int = 0
    verifying: Curve = INSTANT
    seed: int = 0
    certain_of: CertainOf | None = None

    def captured_by(self, traits: Sequence[DrafterTraits]) -> tuple[int, ...]:
        """How many states each stage captures for these models beside the target; empty for none."""
        if not any(each.needs_features for each in traits):
            return ()
        last = len(self.devices) - 1
        return self.captured or tuple(int(index in (0, last)) for index in range(last + 1))

    def plan(self, captured: Sequence[int] = ()) -> ClusterPlan:
        """What its devices are told that they are: as many layers each as one of them captures, at least one,
        by number."""
        wide = max([1, *captured])
        names = [f"stage{index}" for index in range(len(self.devices))]
        return ClusterPlan(
            model="simulated",
            fingerprint="simulated",
            dtype="float32",
            context=self.context,
            stages=tuple(
                StagePlan(name=name, address=f"{name}:1", first=at * wide, end=(at + 1) * wide)
                for at, name in enumerate(names)
            ),
            captures=tuple(at * wide + each for at, own in enumerate(captured) for each in range(own)),
            sliding_window=self.sliding_window,
        )

    def build(
        self,
        language: Language,
        drafters: Sequence[Drafter] = (),
        on_event: Callable[[Handled], None] | None = None,
        *,
        checks: bool = True,
    ) -> World:
        """A world at time 0. Worlds of one experiment and equal events run alike; a drafter has state, so
        give each its own."""
        count = len(self.devices)
        traits = [
            DrafterTraits(
                context=drafter.context,
                needs_features=bool(drafter.captures),
                level=level,
                looks_up=isinstance(drafter, TextDrafter),
                copies_features=isinstance(drafter, CopiesFeatures),
            )
            for drafter, level in zip(drafters, self.levels or (0,) * len(drafters), strict=True)
        ]
        method = make_method(self.method, **self.options) if isinstance(self.method, str) else self.method()
        captured = self.captured_by(traits)
        slot_s = slowest([device.curve for device in self.devices])
        head = HeadCore(
            context=self.context,
            stage_count=count,
            method=method,
            drafters=traits,
            slot_s=slot_s,
            sliding_window=self.sliding_window,
            prefix_block=self.prefix_block,
            certain_of=self.certain_of,
            capturing=tuple(index for index, own in enumerate(captured) if own),
        )
        return World(
            head,
            FormedPipeline(self.plan(captured)).stages,
            devices=self.devices,
            links=self.links or Links(control=(self.control,) * count, data=(self.data,) * (count + 1)),
            layers=FakeLayers(count, language, sliding_window=self.sliding_window),
            drafters=drafters,
            drafting=self.drafting if isinstance(self.drafting, tuple) else (self.drafting,) * len(drafters),
            ranking=self.ranking,
            boards=self.boards,
            head_s=self.head_s,
            row_bytes=self.row_bytes,
            captured=captured,
            feature_bytes=self.feature_bytes,
            returned_row_bytes=self.returned_row_bytes,
            verifying=self.verifying,
            seed=self.seed,
            on_event=on_event,
            checks=checks,
        )
