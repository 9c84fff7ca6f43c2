"""Where on a testbed a setup's models beside the target run: what their passes cost, who shares a board, and
what the boards take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.bench.config import DrafterPlacement, Testbed
from flowspec.plan.cost import drafter_curve
from flowspec.plan.timing import Curve
from flowspec.sim.drafter_device import DrafterDeviceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterPlaces:
    """Of some models: `curves` for each, and the `boards` that they run on, with the number of each in
    `Testbed.boards` (None: the head's)."""

    curves: tuple[Curve, ...]
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
    curves, places = [], []
    for model in models:
        number = named.get(model)
        board = None if number is None else testbed.boards[number]
        curves.append(drafting_curve(testbed) if board is None else _curve(testbed, board))
        places.append(None if board is None or board.device is None else number)
    numbers = tuple(dict.fromkeys(places))
    boards = [
        DrafterDeviceSpec(
            drafters=tuple(at for at, place in enumerate(places) if place == number),
            link=None if number is None else testbed.boards[number].link,
        )
        for number in numbers
    ]
    return DrafterPlaces(curves=tuple(curves), boards=tuple(boards), numbers=numbers)


def _curve(testbed: Testbed, board: DrafterPlacement) -> Curve:
    return drafter_curve(board.device or testbed.head, board.shape, board.precision).scaled(
        testbed.head_slowdown
    )
