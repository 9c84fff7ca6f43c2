"""What `/metrics` tells, in Prometheus' text format."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from flowspec.core.head.events import HeadCommand, HeadEvent, PipelineLost, SegmentTimed
from flowspec.core.head.hop_sums import DEAD, HopSums, reported
from flowspec.core.protocol.messages import HOP_ROWS, HOP_SECONDS
from flowspec.runtime.answer import Answer
from flowspec.runtime.head import Head
from flowspec.version import __version__

FIRST_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
WHOLE_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Totals:
    """Sums of what happens at the head, counted in its thread as it happens and read from others. `losses`
    counts pipelines; rows of segments that are lost with one are in none of the sums."""

    hops: HopSums = field(default_factory=HopSums)
    segments: int = 0
    losses: int = 0
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=5))

    def on_event(self, event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        if isinstance(event, PipelineLost):
            self.losses += 1
        for command in commands:
            if isinstance(command, SegmentTimed):
                self.segments += 1
                self.hops.add(command.hops)

    def note(self, text: str) -> None:
        """What the head tells people, kept with its time of day."""
        self.notes.append(f"{time.strftime('%H:%M:%S')} {text}")


class Metrics:
    """Counts of a server, and how it is at the moment; nothing in it names a client or a prompt. `loads` says
    how many answers are made, and wait."""

    def __init__(self, model: str, head: Head, totals: Totals, loads: Callable[[], tuple[int, int]]) -> None:
        self._model = model
        self._head = head
        self._loads = loads
        self._totals = totals
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        histogram = partial(Histogram, registry=self._registry)
        self._requests = counter("flowspec_requests", "HTTP requests", ["route", "status"])
        self._answers = counter("flowspec_answers", "Answers by why they ended", ["reason"])
        self._prompt = counter("flowspec_prompt_tokens", "Tokens of prompts")
        cached = "Of them those that were in the stages' caches"
        self._cached = counter("flowspec_cached_prompt_tokens", cached)
        self._made = counter("flowspec_generated_tokens", "Tokens of answers")
        recoveries = "Losses of the pipeline that answers lived through"
        self._recoveries = counter("flowspec_answer_recoveries", recoveries)
        first, whole = "From a request to an answer's first token", "From a request to an answer's end"
        self._first = histogram("flowspec_time_to_first_token_seconds", first, buckets=FIRST_S)
        self._whole = histogram("flowspec_answer_seconds", whole, buckets=WHOLE_S)
        for reason in ("stop", "length", "cancelled", "error"):
            self._answers.labels(reason)
        self._registry.register(self)

    def requested(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def answered(self, answer: Answer, first_s: float | None, whole_s: float) -> None:
        self._answers.labels(answer.finish_reason).inc()
        self._prompt.inc(answer.prompt_tokens)
        self._cached.inc(answer.reused_tokens)
        self._made.inc(answer.new_tokens)
        self._recoveries.inc(answer.statistics["recoveries"])
        if first_s is not None:
            self._first.observe(first_s)
        self._whole.observe(whole_s)

    def failed(self) -> None:
        self._answers.labels("error").inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        head, totals, (running, waiting) = self._head, self._totals, self._loads()
        gauge, counter, resident = GaugeMetricFamily, CounterMetricFamily, psutil.Process().memory_info().rss
        yield gauge("flowspec_answers_running", "Answers under way", running)
        yield gauge("flowspec_answers_waiting", "Answers that wait for a place", waiting)
        yield gauge("flowspec_pipeline_formed", "Whether there is a pipeline", int(head.is_formed))
        yield gauge("flowspec_failed", "Whether the head has failed for good", int(head.failure is not None))
        yield gauge("flowspec_stages", "Stages of the pipeline", len(head.stages))
        yield gauge("flowspec_resident_bytes", "Resident memory of the head's process", resident)
        yield counter("flowspec_segments", "Segments that came back", totals.segments)
        yield counter("flowspec_pipeline_losses", "Pipelines that were lost", totals.losses)
        dropped = counter("flowspec_rows_dropped", "Rows dropped dead, by where", labels=["where"])
        for figure, told in HOP_ROWS.items():
            if figure.startswith(DEAD):
                where = figure.removeprefix(DEAD).removeprefix("in_")
                dropped.add_metric([where], totals.hops.total(figure))
            else:
                yield counter(f"flowspec_{reported(figure)}", f"Rows {told}", totals.hops.total(figure))
        yield dropped
        for figure, told in HOP_SECONDS.items():
            name = f"flowspec_stage_{figure.removesuffix('_s')}_seconds"
            spent = counter(name, f"Seconds of a stage, by its place: {told}", labels=["stage"])
            for place, seconds in enumerate(totals.hops.by_stage(figure)):
                spent.add_metric([str(place)], seconds)
            yield spent
        info = gauge("flowspec_info", "What runs", labels=["version", "model"])
        info.add_metric([__version__, self._model], 1)
        yield info
