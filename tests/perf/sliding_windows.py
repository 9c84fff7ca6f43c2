"""What layers with a sliding window save of what a long text leaves in caches, and how long a pass takes:
`python -m tests.perf.sliding_windows [--family lfm2]`.

A random model with the layers of Gemma 3 1B or LFM2-1.2B but for their feed-forward network, in bfloat16.
What the text leaves is written as a prompt's is, chunk by chunk, by what a stage's core says; passes over it
are real. One request holds all and one what its windows see; they take turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from flowspec.bench.checkpoints import make_checkpoint
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Commit, Open, Sampling, Segment, SegmentPart
from flowspec.core.protocol.shared_keys import heads_of
from flowspec.core.protocol.sliding_window import SlidingWindow, inputs_of, window_for, windows_of
from flowspec.core.stage.events import ClearSlots, LayersDone, OpenCache, RunLayers, SegmentArrived
from flowspec.core.stage.stage import StageCore
from flowspec.model.files import ModelFiles
from flowspec.model.pieces import Span
from flowspec.model.slice import Slice
from flowspec.runtime.loading import slice_memory

SHAPES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 512,
        "hidden_size": 1152,
        "intermediate_size": 1152,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
    },
    "lfm2": {
        "vocab_size": 512,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "max_position_embeddings": 32768,
    },
}
ROWS = (1, 4, 16, 64)
PASSES = 5
MIB = 1 << 20


class Text:
    """One request at one stage with all layers."""

    def __init__(self, part: Slice, request: int, context: int, window: SlidingWindow | None) -> None:
        self.part, self.request, self.context = part, request, context
        self.core = StageCore(is_last=True, slots_max=context + limits.TREE_NODES_MAX, sliding_window=window)
        self.length = context - max(ROWS)
        self.epoch = 0

    def fill(self) -> None:
        """Writes what the text leaves in each layer; which numbers does not matter."""
        for first in range(0, self.length, limits.PREFILL_CHUNK):
            job = self._job(range(first, min(first + limits.PREFILL_CHUNK, self.length)), keep=0)
            batch, _ = self.part._batch(job.parts)
            config = self.part.config
            for layer in range(self.part.span.end):
                rows = batch.requests[0].of(layer)
                if inputs_of(config)[layer]:
                    inputs = rows.cache.inputs[rows.cache.places[layer]]
                    inputs.index_copy_(
                        0, rows.slots, torch.randn(len(rows.slots), inputs.shape[1]).to(inputs.dtype)
                    )
                    continue
                heads = heads_of(config)[layer]
                noise = torch.randn(2, heads.count, len(rows.slots), heads.width)
                rows.cache.write(layer, rows.slots, *noise.to(self.part.dtype))
            self._end(job)

    def passed_s(self, rows: int) -> float:
        """A pass of so many rows, one after another, which the next one begins without."""
        self.epoch += 1
        job = self._job(range(self.length, self.length + rows), keep=self.length)
        started_s = time.perf_counter()
        self.part.forward(job, None)
        passed_s = time.perf_counter() - started_s
        self._end(job)
        return passed_s

    def _job(self, nodes: Sequence[int], *, keep: int) -> RunLayers:
        opening = Open(
            request=self.request,
            epoch=self.epoch,
            keep=keep,
            length=self.context,
            root=self.context - 1,
            slots=self.context + limits.TREE_NODES_MAX,
            sampling=Sampling(),
            answer_start=self.context,
        )
        part = SegmentPart(
            commit=Commit(request=self.request, epoch=self.epoch, base=self.context, path=()),
            opening=opening,
            ids=tuple(nodes),
            parents=tuple(node - 1 for node in nodes),
            tokens=(7,) * len(nodes),
            positions=tuple(nodes),
            committed=(True,) * len(nodes),
        )
        segment = Segment(segment=0, parts=(part,))
        for command in self.core.handle(SegmentArrived(segment=segment, payload=None, received_s=0.0), 0.0):
            if isinstance(command, OpenCache):
                self.part.open_cache(command.request, command.slots, command.window_slots)
            elif isinstance(command, ClearSlots):
                self.part.clear_slots(command)
            elif isinstance(command, RunLayers):
                return command
        raise AssertionError("a segment that nothing runs of")

    def _end(self, job: RunLayers) -> None:
        nothing = (-1,) * len(job.rows)
        done = LayersDone(
            job=job.job, rows=job.rows, payload=None, next_tokens=nothing, started_s=0.0, ended_s=0.0
        )
        self.core.handle(done, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.perf.sliding_windows", description=__doc__)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--family", choices=tuple(SHAPES), default="gemma3_text")
    args = parser.parse_args()
    context, shape = args.context, SHAPES[args.family]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files = ModelFiles(str(make_checkpoint(Path(folder), args.family, shape, dtype=torch.bfloat16)))
        layers = shape["num_hidden_layers"]
        span = Span(first=0, end=layers, count=layers)
        part = Slice.load(files, span, "bfloat16", torch.device("cpu"))
        windows = windows_of(part.config)
        window = window_for(windows, context)
        foretold = [
            slice_memory(files, span, "bfloat16", context, window=each).cache_bytes for each in (None, window)
        ]
    windowed = sum(each > 0 for each in windows)
    print(f"{layers} layers, {windowed} with a window of {max(windows)}; {context} tokens; {window}")
    texts: dict[str, Text] = {}
    for name, own, size in (("all", None, foretold[0]), ("windows", window, foretold[1])):
        before = part.cache_bytes, psutil.Process().memory_info().rss
        text = texts[name] = Text(part, len(texts), context, own)
        text.fill()
        held = part.cache_bytes - before[0]
        grown = psutil.Process().memory_info().rss - before[1]
        print(f"{name:8} foretold {size / MIB:6.1f} MiB, held {held / MIB:6.1f}, process {grown / MIB:+.1f}")
    for rows in ROWS:
        times: dict[str, list[float]] = {name: [] for name in texts}
        for _ in range(PASSES):
            for name, text in texts.items():
                times[name].append(text.passed_s(rows))
        told = ", ".join(f"{name} {1e3 * min(seconds):7.1f} ms" for name, seconds in times.items())
        print(f"{rows:3} rows: {told}")


if __name__ == "__main__":
    main()
