"""What a hop costs: the framework's own time per segment and stage, computing and waiting behind others
excluded.

Real daemons and sockets on loopback, and a model made for it: wide activations, next to no arithmetic.
Counted is from the moment a segment is readable until its successor is handed to the socket: decoding, the
stage's decisions, the change to the compute thread and back, and the copies of the payload.

With `--curve` the cost of encryption is measured, which ZeroMQ does in a thread of its own and so outside of
that time: the whole trip of a segment, there and back, through daemons with keys and without, in turns.

    python -m tests.perf.hop [--stages 4] [--rows 16] [--width 4096] [--dtype float16] [--curve]
    [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowspec.bench.checkpoints import make_checkpoint
from flowspec.core.head.events import Submit
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.kernels import DTYPES
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.cluster import Device, split_layers
from flowspec.runtime.head import TIMED_SEGMENTS_MAX, Head
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.security.keyfiles import head_keyring, make_keys
from flowspec.runtime.security.keyring import Keyring
from tests.command import Parser, run_command

WARM_UP = 20
BLOCKS = 30
"""How often keyed and keyless take turns."""
FAST = 0.1
"""The share of a turn's trips that are faster than the one that counts: what else runs on a machine only adds
time."""


def shape_of(stages: int, rows: int, width: int) -> dict[str, int]:
    """A model of one layer a stage, as wide as asked for and otherwise next to nothing."""
    return {
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": 8,
        "num_hidden_layers": stages,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 4 * rows,
    }


def connect(folder: str, cluster: LocalCluster, rows: int, dtype: str, keys: Keyring | None = None) -> Head:
    devices = [Device(name=daemon.name, address=daemon.address) for daemon in cluster.wait()]
    plan = ClusterPlan(
        model=folder,
        fingerprint=ModelFiles(folder).fingerprint(),
        dtype=dtype,
        context=2 * rows,
        stages=tuple(split_layers(devices, cluster.count, None)),
    )
    return Head(plan, keys=keys)


def trips(head: Head, rows: int, count: int) -> list[float]:
    """Seconds of so many segments of `rows` prompt tokens, one at a time, from the head through all stages
    and back."""
    spent = []
    for number in range(count):
        prompt = tuple((number + row) % 64 for row in range(rows))
        request = head.new_request()
        submit = Submit(
            request=request, prompt=prompt, new_tokens_max=1, sampling=Sampling(), stop_ids=frozenset()
        )
        started_s = time.perf_counter()
        for _ in head.submit(submit):
            pass
        spent.append(time.perf_counter() - started_s)
        head.forget(request)
    return spent


def measure(stages: int, rows: int, width: int, dtype: str, segments: int) -> list[list[float]]:
    """Own time in seconds, by stage, of segments of `rows` prompt tokens, one at a time."""
    with tempfile.TemporaryDirectory() as folder, LocalCluster(stages, family="llama") as cluster:
        make_checkpoint(Path(folder), "llama", shape_of(stages, rows, width))
        with connect(folder, cluster, rows, dtype) as head:
            trips(head, rows, WARM_UP + segments)
            timed = list(head.hops)[-segments:]
    return [[hops[stage].own_s for hops in timed] for stage in range(stages)]


def measure_curve(
    stages: int, rows: int, width: int, dtype: str, segments: int
) -> tuple[list[float], list[float]]:
    """Seconds of whole trips without keys and with them: a fast one of each of the blocks in which both took
    turns."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        make_checkpoint(Path(folder), "llama", shape_of(stages, rows, width))
        keys = Path(folder) / "keys"
        make_keys(keys, ["head"], [f"local-{index}" for index in range(stages)], force=False)
        plain, keyed = (
            stack.enter_context(LocalCluster(stages, family="llama", keys=each)) for each in (None, keys)
        )
        heads = [
            stack.enter_context(connect(folder, plain, rows, dtype)),
            stack.enter_context(connect(folder, keyed, rows, dtype, head_keyring(keys))),
        ]
        for head in heads:
            trips(head, rows, WARM_UP)
        blocks = [
            [quantile(trips(head, rows, max(1, segments // BLOCKS)), FAST) for head in heads]
            for _ in range(BLOCKS)
        ]
    return [block[0] for block in blocks], [block[1] for block in blocks]


def report_curve(plain: Sequence[float], keyed: Sequence[float], stages: int) -> dict[str, float]:
    """Medians over blocks, ratios as the middle half of the blocks has them; a hop is one of the links
    between stages, which carry the payload."""
    ratios = sorted(with_keys / without for without, with_keys in zip(plain, keyed, strict=True))
    extra = statistics.median(with_keys - without for without, with_keys in zip(plain, keyed, strict=True))
    return {
        "plain_trip_ms": round(1000 * statistics.median(plain), 3),
        "curve_trip_ms": round(1000 * statistics.median(keyed), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(quantile(ratios, 0.25), 3),
        "ratio_high": round(quantile(ratios, 0.75), 3),
        "extra_ms_per_hop": round(1000 * extra / max(1, stages - 1), 3),
    }


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def command(args: argparse.Namespace) -> int:
    if args.segments > TIMED_SEGMENTS_MAX and not args.curve:
        raise InputError(
            f"expected --segments up to {TIMED_SEGMENTS_MAX}, got {args.segments}: a head keeps the times of "
            "no more"
        )
    found: dict[str, Any]
    what = {"rows": args.rows, "width": args.width, "dtype": args.dtype, "segments": args.segments}
    shape = (
        f"{args.segments} segments of [{args.rows}, {args.width}] {args.dtype} through {args.stages} stages "
        "on loopback"
    )
    if args.curve:
        found = report_curve(
            *measure_curve(args.stages, args.rows, args.width, args.dtype, args.segments), args.stages
        )
        lines = [
            f"{shape}, in {BLOCKS} turns:",
            f"a trip takes {found['plain_trip_ms']} ms in the clear and {found['curve_trip_ms']} ms "
            "encrypted",
            f"ratio {found['ratio']} ({found['ratio_low']} to {found['ratio_high']}); "
            f"{found['extra_ms_per_hop']} ms more for each hop",
        ]
    else:
        by_stage = measure(args.stages, args.rows, args.width, args.dtype, args.segments)
        every = [value for stage in by_stage for value in stage]
        found = {
            "p50_ms": round(1000 * quantile(every, 0.5), 3),
            "p99_ms": round(1000 * quantile(every, 0.99), 3),
            "p50_ms_by_stage": [round(1000 * quantile(stage, 0.5), 3) for stage in by_stage],
        }
        lines = [
            f"{shape}:",
            f"own time per hop: p50 {found['p50_ms']} ms, p99 {found['p99_ms']} ms; p50 by stage "
            f"{found['p50_ms_by_stage']} ms",
        ]
    print(json.dumps({**what, **found}) if args.json else "\n".join(lines))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.hop", __doc__)
    parser.whole("--stages", 4)
    parser.whole("--rows", 16, "tokens of a segment")
    parser.whole("--width", 4096, "numbers of a token's activations")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float16", help="(default: %(default)s)")
    parser.whole("--segments", 500)
    parser.add_argument(
        "--curve", action="store_true", help="measure whole trips with and without encryption instead"
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
