"""What a hop, the head's thinking, a matrix, and a layer without its matrices cost.

Other work on the machine only ever adds time. So a matrix takes the least of many repeats that take turns, in
seconds of its process; a segment's thinking is the least of repeats of the same answer; of hops a quiet
moment's count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import HeadCommand, HeadEvent, SendToFirstStage, Submit
from flowspec.core.head.head import HeadCore
from flowspec.core.methods.continuous import Continuous
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.model.arithmetic.compiled import use_threads
from flowspec.model.files import ModelFiles
from flowspec.plan.placement import ClusterPlan
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.runtime.cluster import Device, split_layers
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.language import HashLanguage
from flowspec.sim.world import Cluster, World
from lab.golden.limits import limited
from lab.golden.passes import Node, Stages
from lab.golden.place import Place
from lab.golden.recording import Absent, Observation

# What is inside of FlowSpec is seen through these alone.
from tests.checkpoints import make_checkpoint, make_variant

PRODUCTS = (sys.executable, "-m", "lab.perf.matrices", "--json")
WIDTH = 2048
ROWS = (1, 4, 16)
DTYPES = ("float32", "bfloat16", "int8", "int4")
FORMS = ("Q4_0", "Q4_K", "Q8_0", "Q6_K")
PRODUCT_ROUNDS = 120
LAYERS, PASSES = 8, 300
"""Of a made checkpoint whose matrices take next to no time."""
ROUND_S = 900
"""For a machine that is busy with other things; a quiet one takes a minute."""
HEAD_TOKENS, HEAD_REPEATS, HEAD_CONTEXT = 150, 4, 1024
LIVING_MIN = 256
"""Nodes of the tree, on average, while the head thinks."""
VALUE_MIN = 0.00005
"""So low that so many nodes are worth drafting."""
HOP_STAGES, HOP_SEGMENTS, HOP_BLOCK, HOP_WARM_UP = 2, 400, 20, 20
HOP_ROWS, HOP_WIDTH, HOP_DTYPE = 16, 4096, "float16"
"""A block of segments takes a fraction of a second, so that some see nothing else running."""
QUIET = 0.15
"""The share of blocks that are quieter than the one that counts."""
SHARES = {"p50": 0.5, "p99": 0.99}
HEAD_SHARES = {"p50": 0.5, "p95": 0.95}


def observe(place: Place, name: str) -> Iterator[Observation | Absent]:
    """One round of all costs, each once."""
    with limited(ROUND_S):
        yield from _products(place)
        yield from _layers(place)
        yield from _head()
        yield from _hops()


def _products(place: Place) -> Iterator[Observation]:
    """A matrix in each precision and form, times some rows."""
    flags = {
        "inputs": WIDTH,
        "outputs": WIDTH,
        "rows": ",".join(map(str, ROWS)),
        "dtypes": ",".join(DTYPES),
        "forms": ",".join(FORMS),
        "rounds": PRODUCT_ROUNDS,
    }
    done = subprocess.run(
        [*PRODUCTS, *(f"--{flag}={value}" for flag, value in flags.items())],
        capture_output=True,
        text=True,
        cwd=place.tree,
        env=place.environment(),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"products of matrices failed: {done.stderr.strip()[-500:]}")
    for found in json.loads(done.stdout.splitlines()[-1])["ms"]:
        for kind in (*DTYPES, *FORMS):
            yield Observation(key=f"matrix/{kind}, {found['rows']} rows, cpu ms", value=found[kind])


def _layers(place: Place) -> Iterator[Observation]:
    """A layer whose matrices are next to nothing: one row at a time, behind some dozens of others."""
    use_threads(1)
    folder = make_variant(place.home / "layers", "llama-grouped")
    for dtype in DTYPES:
        stages = Stages(ModelFiles(str(folder)), dtype, (0, LAYERS), CACHE_AUTO)
        stages.open(1)
        spent, above = [], None
        for token in range(PASSES):
            above = Node(((above.path if above else ()) + (3 + token % 97,)), above)
            stages.give_slots(1, above, is_committed=True)
            started_s = time.process_time()
            stages.run([(1, above)])
            spent.append(time.process_time() - started_s)
        yield Observation(key=f"layer/{dtype}, 1 row, cpu us", value=1e6 * quantile(spent, QUIET) / LAYERS)


def _head() -> Iterator[Observation]:
    """The head's thinking for a segment: each comes again in each repeat, in virtual time."""
    repeats = [_thinking() for _ in range(HEAD_REPEATS)]
    least = [min(same) for same in zip(*repeats, strict=True)]
    for share, part in HEAD_SHARES.items():
        yield Observation(key=f"head/segment {share}, cpu ms", value=1e3 * quantile(least, part))


class _TimedHead(HeadCore):
    """Notes what it thought since the segment before, and how many living nodes the trees have."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.segments_s: list[float] = []
        self.living: list[int] = []
        self._spent_s = 0.0

    def handle(self, event: HeadEvent, now_s: float) -> list[HeadCommand]:
        started_s = time.thread_time()
        commands = super().handle(event, now_s)
        self._spent_s += time.thread_time() - started_s
        if any(isinstance(command, SendToFirstStage) for command in commands):
            self.segments_s.append(self._spent_s)
            self._spent_s = 0.0
        self.living += [request.tree.alive_count for request in self.requests() if request.is_decoding]
        return commands


def _thinking() -> list[float]:
    """Seconds of thinking for each segment of one answer of `continuous` with a large tree, in a simulated
    pipeline whose layers and drafts take no real time."""
    language = HashLanguage(64, seed=5)
    stage = DeviceSpec(curve=Curve(base_s=1.0, row_s=1 / 64, extra_row_s=0.001))
    link = LinkSpec(delay_s=0.02)
    experiment = Cluster(
        devices=(stage,) * 4, control=link, data=link, context=HEAD_CONTEXT, drafting=Curve(base_s=0.16)
    )
    drafter = FakeDrafter(language, 0.7, seed=1)
    world = World(experiment, language, (drafter,), checks=False)
    world.head = head = _TimedHead(
        context=HEAD_CONTEXT,
        stage_count=4,
        method=Continuous(segment_nodes=64, batch=12, width=12, value_min=VALUE_MIN),
        drafters=(DrafterTraits(context=drafter.context),),
    )
    world.at(0.0, _question(0, tuple(range(3, 23)), HEAD_TOKENS))
    world.run()
    living = sum(head.living) / len(head.living)
    if living < LIVING_MIN:
        raise RuntimeError(f"{living:.0f} living nodes on average, expected at least {LIVING_MIN}")
    return head.segments_s


def _hops() -> Iterator[Observation]:
    """A stage's own time for a segment, of blocks of segments in which little else ran."""
    stages = _own_times()
    blocks = [
        [own_s for stage in stages for own_s in stage[first : first + HOP_BLOCK]]
        for first in range(0, HOP_SEGMENTS, HOP_BLOCK)
    ]
    for share, part in SHARES.items():
        values = [quantile(block, part) for block in blocks]
        yield Observation(key=f"hop/{share} ms", value=1e3 * quantile(values, QUIET))


def _own_times() -> list[list[float]]:
    """Seconds, by stage, from when a segment is readable until its successor is handed to the socket, without
    computing and waiting: real daemons on loopback, and a model with wide activations and next to no
    arithmetic."""
    shape = {
        "vocab_size": 64,
        "hidden_size": HOP_WIDTH,
        "intermediate_size": 8,
        "num_hidden_layers": HOP_STAGES,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 4 * HOP_ROWS,
    }
    with tempfile.TemporaryDirectory() as folder, LocalCluster(HOP_STAGES) as cluster:
        make_checkpoint(Path(folder), "llama", shape)
        devices = [Device(name=daemon.name, address=daemon.address) for daemon in cluster.wait()]
        plan = ClusterPlan(
            model=folder,
            fingerprint=ModelFiles(folder).fingerprint(),
            dtype=HOP_DTYPE,
            context=2 * HOP_ROWS,
            stages=tuple(split_layers(devices, HOP_STAGES, None)),
            spec=ModelFiles(folder).spec,
        )
        with Head(plan) as head:
            for number in range(HOP_WARM_UP + HOP_SEGMENTS):
                request = head.new_request()
                prompt = tuple((number + row) % 64 for row in range(HOP_ROWS))
                for _ in head.submit(_question(request, prompt, 1)):
                    pass
                head.forget(request)
            timed = list(head.hops)[-HOP_SEGMENTS:]
    return [[hops[stage].own_s for hops in timed] for stage in range(HOP_STAGES)]


def _question(request: int, prompt: tuple[int, ...], tokens: int) -> Submit:
    return Submit(
        request=request, prompt=prompt, new_tokens_max=tokens, sampling=Sampling(), stop_ids=frozenset()
    )


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
