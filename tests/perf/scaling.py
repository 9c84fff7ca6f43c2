"""How a pipeline scales: tokens per second in virtual time by devices and by users at once, and what
simulating it costs.

Equal boards, equal links, synthetic answers and a synthetic drafter on a board of its own, all users asking
at time 0. Everything is simulated but the cost of the simulation, which is wall-clock time on this machine.

    python -m tests.perf.scaling [--devices 1,2,4] [--users 1,4] [--at 4] [--shape llama-3-70b] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from flowspec.bench.config import Setup
from flowspec.bench.console import Step, progress, show
from flowspec.bench.experiments import pick_setups
from flowspec.cli.options import positives
from flowspec.core.protocol import limits
from flowspec.core.protocol.precision import PRECISION_BYTES
from flowspec.errors import InputError
from flowspec.plan.profile import find_profile
from flowspec.plan.timing import LinkSpec
from tests.command import Parser, run_command
from tests.perf.scaling_run import Point, Scaling

Column = tuple[int, Setup, tuple[int, ...]]
"""A number of devices, a method, and the numbers of users that are tried there."""


def columns(
    devices: Sequence[int], users: Sequence[int], at: Sequence[int], setups: Sequence[Setup]
) -> Iterator[Column]:
    """One user everywhere, several where asked for."""
    for count in sorted({*devices, *at}):
        here = sorted({*([1] if count in devices else []), *(users if count in at else [])})
        yield from ((count, setup, tuple(here)) for setup in setups)


def measure(asked: Scaling, grid: Sequence[Column], step: Step) -> list[Point]:
    """All points of a grid."""
    found = []
    for devices, setup, users in grid:
        testbed = asked.testbed(devices)
        step(f"{setup.name}, {devices} devices, warming up")
        experience = asked.warm_up(testbed, setup, max(users))
        for count in users:
            step(f"{setup.name}, {devices} devices, users: {count}")
            found.append(asked.run(testbed, setup, count, experience))
    return found


def report(asked: Scaling, points: Sequence[Point]) -> dict[str, Any]:
    return {
        "world": "simulated",
        "shape": asked.shape,
        "device": asked.device,
        "precision": asked.precision,
        "bandwidth_mbps": asked.link.bandwidth_mbps,
        "latency_ms": 1000 * asked.link.delay_s,
        "acceptance": asked.acceptance,
        "points": [asdict(point) for point in points],
    }


def title_of(asked: Scaling) -> str:
    return (
        f"SIMULATED: {asked.shape} in {asked.precision} on {asked.device} boards, "
        f"{asked.link.bandwidth_mbps:g} Mbit/s and "
        f"{1000 * asked.link.delay_s:g} ms per hop, drafter right at {100 * asked.acceptance:g}%"
    )


def show_report(asked: Scaling, points: Sequence[Point]) -> None:
    """Tables of what was simulated, and of what that cost."""
    rows = [
        [
            p.method,
            p.devices,
            p.users,
            f"{p.memory_gb:.1f}{'' if p.fits else '*'}",
            *(f"{value:.2f}" for value in (p.tokens_per_s, p.user_tokens_per_s)),
            None if p.bound_tokens_per_s is None else f"{p.bound_tokens_per_s:.2f}",
            *(f"{value:.2f}" for value in (p.first_token_s, p.S, p.rho)),
            *(f"{value:.1f}" for value in (p.window, 1000 * p.tau_s, 1000 * p.trip_s)),
            *(f"{100 * share:.0f}%" for share in (p.stage_busy, p.link_busy, p.drafter_busy, p.head_busy)),
        ]
        for p in points
    ]
    heads = [
        "devices",
        "users",
        "GB/device",
        "tok/s",
        "each",
        "bound",
        "first s",
        "S",
        "rho",
        "window",
        "slot ms",
        "trip ms",
    ]
    show(title_of(asked), ["", *heads, "stage", "link", "drafter", "head"], rows)
    if not all(p.fits for p in points):
        print(f"* more than the {find_profile(asked.device).memory_gb:g} GB of a device")
    costs = [
        [
            p.method,
            p.devices,
            p.users,
            f"{p.events_per_token:.0f}",
            f"{p.event_us:.0f}",
            f"{p.event_cpu_us:.0f}",
            f"{p.event_cpu_us * p.events_per_token / 1000:.1f}",
            p.wall_s,
        ]
        for p in points
    ]
    heads = ["devices", "users", "events/token", "us/event", "CPU us/event", "CPU ms/token", "wall-clock s"]
    show(
        "cost of the simulation, measured on this machine: wall-clock time, and processor time without what "
        "else ran here",
        ["", *heads],
        costs,
    )


def command(args: argparse.Namespace) -> int:
    asked = Scaling(
        shape=args.shape,
        device=args.device,
        precision=args.precision,
        link=LinkSpec(bandwidth_mbps=args.bandwidth_mbps, delay_s=args.latency_ms / 1000),
        acceptance=args.acceptance,
        tokens=args.tokens,
    )
    if args.acceptance >= 1:
        raise InputError(f"--acceptance: expected a share above 0 and below 1, got {args.acceptance:g}")
    if args.tokens < 2:
        raise InputError("--tokens: a rate needs at least 2 tokens, got 1")
    if max(args.users) > limits.REQUESTS_MAX:
        raise InputError(f"--users: expected at most {limits.REQUESTS_MAX} at once, got {max(args.users)}")
    grid = list(columns(args.devices, args.users, args.at, pick_setups((), args.methods.split(","))))
    for devices, _, _ in grid:
        _ = asked.testbed(devices).layers  # raises before anything has run
    with progress("scaling", sum(1 + len(users) for _, _, users in grid)) as step:
        points = measure(asked, grid, step)
    if args.json:
        print(json.dumps(report(asked, points)))
    else:
        show_report(asked, points)
    return 0


def _positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.scaling", __doc__)
    parser.add_argument(
        "--devices",
        type=positives,
        default=(1, 2, 4, 8, 16, 32, 64),
        help="for one user (default: 1,2,4,8,16,32,64)",
    )
    parser.add_argument(
        "--users", type=positives, default=(1, 2, 4, 8, 16, 32), help="at once (default: 1,2,4,8,16,32)"
    )
    parser.add_argument(
        "--at",
        type=positives,
        default=(8, 64),
        help="numbers of devices at which --users are tried (default: 8,64)",
    )
    parser.add_argument(
        "--shape", default="llama-3-70b", help="what the tokens are timed as (default: %(default)s)"
    )
    parser.add_argument(
        "--device",
        default="jetson-agx-orin",
        help="board of every stage and of the head (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        choices=tuple(PRECISION_BYTES),
        default="int4",
        help="of the weights (default: %(default)s)",
    )
    parser.add_argument(
        "--bandwidth-mbps", type=_positive, default=1000.0, help="of every link (default: 1000)"
    )
    parser.add_argument(
        "--latency-ms", type=_positive, default=0.5, help="of every link (default: %(default)s)"
    )
    parser.whole("--tokens", 64, "of each answer; fewer for several users of many devices")
    parser.add_argument("--methods", default="continuous,ar", help="default: %(default)s")
    parser.add_argument(
        "--acceptance",
        type=_positive,
        default=0.635,
        help="of the synthetic drafter's best guess (default: %(default)s)",
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
