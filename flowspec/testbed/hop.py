"""What a hop costs: the framework's own time per segment and stage, computing and waiting behind others excluded.

Real daemons and sockets on loopback, and a model made for it: wide activations, next to no arithmetic. Counted is from
the moment a segment is readable until its successor is handed to the socket: decoding, the stage's decisions, the change
to the compute thread and back, and the copies of the payload.

    python -m flowspec.testbed.hop [--stages 4] [--rows 16] [--width 4096] [--dtype float16] [--json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from flowspec.core.events import Submit
from flowspec.core.messages import Sampling
from flowspec.model.files import ModelFiles
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.cluster import Device, split_layers
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster
from flowspec.testbed.checkpoints import make_checkpoint

WARM_UP = 20


def measure(stages: int, rows: int, width: int, dtype: str, segments: int) -> list[list[float]]:
    """Own time in seconds, by stage, of segments of `rows` prompt tokens, one at a time."""
    shape = {
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": 8,
        "num_hidden_layers": stages,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 4 * rows,
    }
    with tempfile.TemporaryDirectory() as folder, LocalCluster(stages, family="llama") as cluster:
        make_checkpoint(Path(folder), "llama", shape)
        devices = [Device(name=daemon.name, address=daemon.address) for daemon in cluster.wait()]
        plan = ClusterPlan(
            model=folder,
            fingerprint=ModelFiles(folder).fingerprint(),
            dtype=dtype,
            context=2 * rows,
            stages=tuple(split_layers(devices, stages, None)),
        )
        with Head(plan) as head:
            for number in range(WARM_UP + segments):
                prompt = tuple((number + row) % 64 for row in range(rows))
                request = head.new_request()
                for _ in head.submit(Submit(request=request, prompt=prompt, new_tokens_max=1, sampling=Sampling(), stop_ids=frozenset())):
                    pass
                head.forget(request)
            timed = list(head.hops)[WARM_UP:]
    return [[hops[stage].own_s for hops in timed] for stage in range(stages)]


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flowspec.testbed.hop", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--segments", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    by_stage = measure(args.stages, args.rows, args.width, args.dtype, args.segments)
    every = [value for stage in by_stage for value in stage]
    found = {
        "rows": args.rows,
        "width": args.width,
        "dtype": args.dtype,
        "segments": args.segments,
        "p50_ms": round(1000 * quantile(every, 0.5), 3),
        "p99_ms": round(1000 * quantile(every, 0.99), 3),
        "p50_ms_by_stage": [round(1000 * quantile(stage, 0.5), 3) for stage in by_stage],
    }
    if args.json:
        print(json.dumps(found))
    else:
        print(f"{args.segments} segments of [{args.rows}, {args.width}] {args.dtype} through {args.stages} stages on loopback:")
        print(f"own time per hop: p50 {found['p50_ms']} ms, p99 {found['p99_ms']} ms; p50 by stage {found['p50_ms_by_stage']} ms")


if __name__ == "__main__":
    main()
