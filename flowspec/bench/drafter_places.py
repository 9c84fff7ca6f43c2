"""Where on a testbed a setup's models beside the target run: what their passes cost, who shares a board, and
what the boards take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.bench.config import DrafterPlacement, Testbed
from flowspec.draft.kinds import WITHOUT_TENSORS
from flowspec.plan.cost import drafter_curve, head_curve
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.shape import ModelShape
from flowspec.plan.timing import Curve
from flowspec.sim.drafter_device import DrafterDeviceSpec

LOOKING_UP = Curve(extra_row_s=3e-4)
"""A drafter that looks up texts: three times what a row took on the x86-64 machine this was written on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterPlaces:
    """Of some models: `curves` of a pass for each, and `rankings` of its `lm_head` alone; the `boards` that
    they run on, with the number of each in `Testbed.boards` (None: the head's, which looks up texts beside a
    model's passes)."""

    curves: tuple[Curve, ...]
    rankings: tuple[Curve, ...]
    boards: tuple[DrafterDeviceSpec, ...]
    numbers: tuple[int | None, ...]


def drafting_curve(testbed: Testbed) -> Curve:
    """A pass at the head of a model that has no other place."""
    if testbed.drafter_shape is None:
        return Curve()
    return drafter_curve(testbed.head, testbed.drafter_shape, testbed.precision).scaled(testbed.head_slowdown)


def places_of(testbed: Testbed, models: Sequence[str]) -> DrafterPlaces:
    """Models at the head share its processors, those on another board that one's."""
    named = {name: number for number, board in enumerate(testbed.boards) for name in board.models}
    curves: list[Curve] = []
    rankings: list[Curve] = []
    sharing: dict[tuple[int | None, int | None], list[int]] = {}  # board, and who has a thread alone there
    for at, model in enumerate(models):
        number = named.get(model)
        board = None if number is None else testbed.boards[number]
        is_lookup = board is None and model in WITHOUT_TENSORS
        if board is not None:
            curves.append(_curve(testbed, board))
            rankings.append(_ranking(testbed, board.device or testbed.head, board.shape, board.precision))
        else:
            curves.append(LOOKING_UP if is_lookup else drafting_curve(testbed))
            rankings.append(
                LOOKING_UP
                if is_lookup
                else _ranking(testbed, testbed.head, testbed.drafter_shape, testbed.precision)
            )
        place = None if board is None or board.device is None else number
        sharing.setdefault((place, at if is_lookup else None), []).append(at)
    boards = tuple(
        DrafterDeviceSpec(drafters=tuple(some), link=None if place is None else testbed.boards[place].link)
        for (place, _), some in sharing.items()
    )
    return DrafterPlaces(
        curves=tuple(curves),
        rankings=tuple(rankings),
        boards=boards,
        numbers=tuple(place for place, _ in sharing),
    )


def _curve(testbed: Testbed, board: DrafterPlacement) -> Curve:
    return drafter_curve(board.device or testbed.head, board.shape, board.precision).scaled(
        testbed.head_slowdown
    )


def _ranking(testbed: Testbed, device: DeviceProfile, shape: ModelShape | None, precision: str) -> Curve:
    return Curve() if shape is None else head_curve(device, shape, precision).scaled(testbed.head_slowdown)
