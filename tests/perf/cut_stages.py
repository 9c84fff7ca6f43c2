"""What tensor parallelism inside a stage would give: pairs or fours of boards share one stage's layers, with
pipelining and guesses around it. By formula (`plan.rivals.always_one`, chains of guesses that go out at
once): nothing of the kind is built.

    python -m tests.perf.cut_stages --board raspberry-pi-5 --boards 4 --models llama-3-8b,qwen3-32b
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from flowspec.plan.cost import drafter_curve, head_curve, layers_curve, row_bytes
from flowspec.plan.profile import DeviceProfile, find_profile
from flowspec.plan.rivals import Guesser, Pipeline, always_one, speculating
from flowspec.plan.shape import ModelShape, find_shape
from flowspec.plan.split import even_split
from flowspec.plan.tensor_parallel import EXCHANGES, Q80_BYTES
from flowspec.plan.timing import Curve, LinkSpec

PRECISION, CONTEXT = "int4", 128


def cut(whole: Curve, boards: int, layers: int, shape: ModelShape, link: LinkSpec) -> Curve:
    """A stage's curve with its matrices in equal parts on so many boards."""
    if boards == 1:
        return whole
    count, others = EXCHANGES * layers, boards - 1
    part = replace(whole.scaled(1 / boards), fixed_s=whole.fixed_s + count * link.delay_s)
    return replace(
        part, extra_row_s=part.extra_row_s + count * link.transfer_s(others * shape.hidden * Q80_BYTES)
    )


def pipeline(
    board: DeviceProfile, shape: ModelShape, link: LinkSpec, stages: int, boards: int, drafts: bool
) -> Pipeline:
    """`stages` of `boards` each; where a board of the first stage drafts, that stage takes twice as long."""
    curves = []
    for number, layers in enumerate(even_split(shape.layers, stages)):
        profile = board.slowed(2.0 if drafts and number == 0 and stages > 1 else 1.0)
        whole = layers_curve(profile, shape, PRECISION, layers)
        curves.append(cut(whole, boards, layers, shape, link))
    return Pipeline(
        stages=tuple(curves),
        sampling=head_curve(board, shape, PRECISION).scaled(1 / boards),
        hops=(link,) * (stages + 1),
        row_bytes=row_bytes(shape, PRECISION),
        context=CONTEXT,
    )


def drafting(board: DeviceProfile, model: str, acceptance: float, slowdown: float) -> Guesser:
    curve = drafter_curve(board, find_shape(f"eagle-{model}"), PRECISION).scaled(slowdown)
    return Guesser(acceptance=acceptance, pass_s=lambda rows: curve.seconds(rows, CONTEXT))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--board", default="raspberry-pi-5")
    parser.add_argument("--boards", type=int, default=4)
    parser.add_argument("--models", default="llama-3-8b,qwen3-32b,qwen3-30b-a3b")
    parser.add_argument("--bandwidth", type=float, default=1000.0)
    parser.add_argument("--latency-ms", type=float, default=0.113)
    parser.add_argument("--acceptances", default="0.5,0.635,0.8")
    args = parser.parse_args()
    board = find_profile(args.board)
    link = LinkSpec(bandwidth_mbps=args.bandwidth, delay_s=args.latency_ms / 1000)
    for name in args.models.split(","):
        shape = find_shape(name)
        for acceptance in map(float, args.acceptances.split(",")):
            told = []
            for boards in (1, 2, 4, 8):
                stages = args.boards // boards
                if stages < 1 or boards > shape.kv_heads or (args.boards % boards):
                    continue
                guesser = drafting(board, name, acceptance, 2.0 if stages > 1 else 1.0)
                pipe = pipeline(board, shape, link, stages, boards, drafts=True)
                rated = always_one(pipe, guesser) if stages > 1 else speculating(pipe.trip_s, guesser)
                told.append(f"{stages} x {boards}: {rated.tokens_per_s:.2f} ({rated.how})")
            print(f"{args.boards} {args.board}, {name}, {acceptance:g}: {'; '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
