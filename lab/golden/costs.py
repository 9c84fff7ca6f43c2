"""What a hop, the head's thinking, a matrix, and a layer without its matrices cost.

Other work on the machine only ever adds time. So a matrix takes the least of many repeats that take turns, in
seconds of its process; a segment's thinking is the least of repeats of the same answer; of hops a quiet
moment's count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch

# What is inside of FlowSpec is seen through these alone.
from flowspec.bench.checkpoints import make_variant
from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.model.files import ModelFiles
from lab.golden.limits import limited
from lab.golden.passes import Node, Stages
from lab.golden.place import Place
from lab.golden.recording import Absent, Observation
from tests.perf import overhead
from tests.perf.hop import measure, quantile

PRODUCTS = (sys.executable, "-m", "tests.perf.matrices", "--json")
WIDTH = 2048
ROWS = (1, 4, 16)
DTYPES = ("float32", "bfloat16", "int8", "int4")
FORMS = ("Q4_0", "Q4_K", "Q8_0", "Q6_K")
PRODUCT_ROUNDS = 120
LAYERS, PASSES = 8, 300
"""Of a made checkpoint whose matrices take next to no time."""
ROUND_S = 900
"""For a machine that is busy with other things; a quiet one takes a minute."""
HEAD_TOKENS, HEAD_REPEATS = 150, 4
HOP_STAGES, HOP_SEGMENTS, HOP_BLOCK = 2, 400, 20
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
    torch.set_num_threads(1)
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
    with mock.patch.object(overhead, "time", SimpleNamespace(perf_counter=time.thread_time)):
        repeats = [overhead.measure_head(HEAD_TOKENS).spent_s[overhead.SEGMENT] for _ in range(HEAD_REPEATS)]
    least = [min(same) for same in zip(*repeats, strict=True)]
    for share, part in HEAD_SHARES.items():
        yield Observation(key=f"head/segment {share}, cpu ms", value=1e3 * quantile(least, part))


def _hops() -> Iterator[Observation]:
    """A stage's own time for a segment, of blocks of segments in which little else ran."""
    stages = measure(HOP_STAGES, rows=16, width=4096, dtype="float16", segments=HOP_SEGMENTS)
    blocks = [
        [own_s for stage in stages for own_s in stage[first : first + HOP_BLOCK]]
        for first in range(0, HOP_SEGMENTS, HOP_BLOCK)
    ]
    for share, part in SHARES.items():
        values = [quantile(block, part) for block in blocks]
        yield Observation(key=f"hop/{share} ms", value=1e3 * quantile(values, QUIET))
