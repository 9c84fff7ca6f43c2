"""Fuzzes the codec and both cores: every frame is a valid message or a `PeerError`, in bounded memory.

    python -m lab.fuzz --frames 1000000 [--seed N] [--seconds S] [--folder DIR] [--json]
    python -m lab.fuzz --replay FILE

Exit status 1 when anything else came out; each such case lies in DIR as a file to replay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from flowspec.cli.options import positive
from flowspec.errors import InputError
from lab.command import Parser, run_command
from lab.fuzz.hunt import Hunt, Tally, replay

FRAMES = 100_000
SECONDS_MAX = 86_400


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.fuzz", __doc__)
    parser.whole("--frames", FRAMES, "frames to try")
    parser.add_argument("--seconds", type=positive, default=SECONDS_MAX, help="stop after so many seconds")
    parser.whole("--seed", 1, "of all chance")
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where findings are written (default: here)"
    )
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="try one finding again, with its traceback"
    )
    return run_command(parser, _command, argv)


def _command(args: argparse.Namespace) -> int:
    if args.replay is not None:
        outcome = replay(args.replay)
        print(json.dumps({"outcome": outcome}) if args.json else outcome)
        return 0
    if not args.folder.is_dir():
        raise InputError(f"--folder: expected a folder for findings, got {str(args.folder)!r}")
    tally = Hunt(args.seed, args.folder).run(args.frames, args.seconds)
    if args.json:
        print(json.dumps({"seed": args.seed, **tally.report()}))
    else:
        _show(tally)
    return 1 if tally.findings else 0


def _show(tally: Tally) -> None:
    mib = 1 << 20
    print(
        f"{tally.frames} frames in {tally.seconds:.0f} s ({tally.frames_per_s:.0f} per second): "
        f"{tally.valid} valid, {tally.refused} refused\n"
        f"{tally.worlds} clusters, {tally.worlds_wronged} with a PeerError of a core, {tally.pipelines_lost} "
        "pipelines lost; "
        f"the slowest case took {tally.slowest_s:.3f} s\n"
        f"{tally.arcs} steps through the code known, {tally.parents} cases kept for them\n"
        f"memory: {tally.resident_bytes / mib:.0f} MiB resident, {tally.resident_growth_bytes / mib:+.1f} "
        "MiB since the warm-up; "
        f"of all allocations {tally.traced_growth_bytes / mib:+.2f} MiB over the last cases, "
        f"{tally.traced_peak_bytes / mib:.1f} MiB at the peak"
    )
    for found in tally.findings:
        print(f"FOUND {found['error']} at {found['where']}: python -m lab.fuzz --replay {found['file']}")
    print("nothing unexpected" if not tally.findings else f"{len(tally.findings)} unexpected")


if __name__ == "__main__":
    sys.exit(main())
