"""A stage's device in virtual time: one job at a time, layer by layer, and rows that leave between the
layers.

Owns how long a job takes. What the job computes is the business of `FakeLayers`, and what it is for that of
the core.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flowspec.core.stage.events import ClearSlots, CloseCache, LayersDone, OpenCache, RunLayers, Trim
from flowspec.plan.timing import INSTANT, Curve
from flowspec.sim.clock import Alarm, Clock
from flowspec.sim.fake_layers import FakeLayers
from flowspec.wire.codec import Tensor, join_rows

BOUNDARY_SLACK = 1e-9
"""A share of a layer: what is due this shortly after a boundary, by rounding, is due at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A stage's device: `curve` for all of its `layers` together, and on the last stage `sampling` after
    them."""

    curve: Curve = INSTANT
    layers: int = 4
    sampling: Curve = INSTANT


@dataclass(slots=True)
class _Run:
    """The running job: the rows in it, those named as dead, and from which instant on how many of its layers
    are still to run."""

    job: RunLayers
    rows: tuple[int, ...]
    dead: set[int]
    started_s: float
    next_layer_s: float
    layers_left: int
    context: int
    end: Alarm


class SimulatedDevice:
    """Does a stage's work in order, as its compute thread would; only `trim` reaches into the running job."""

    def __init__(
        self,
        clock: Clock,
        spec: DeviceSpec,
        stage: int,
        layers: FakeLayers,
        is_last: bool,
        done: Callable[[LayersDone], None],
        captures: int = 0,
    ) -> None:
        """Of each row it captures so many states, for which its payload stands in."""
        self.busy_s = 0.0
        self.longest_s = 0.0
        self.spec = spec
        self._captures = captures
        self._clock = clock
        self._stage = stage
        self._layers = layers
        self._is_last = is_last
        self._done = done
        self._run: _Run | None = None
        self._waiting: list[OpenCache | ClearSlots | CloseCache] = []

    @property
    def is_idle(self) -> bool:
        return self._run is None

    def busy_until(self, now_s: float) -> float:
        """For how many seconds it computed up to now, the job that runs among them."""
        return self.busy_s + (0.0 if self._run is None else now_s - self._run.started_s)

    @property
    def further(self) -> tuple[int, float] | None:
        """Which job runs, and when it last began or ended a layer; None if none does."""
        run = self._run
        if run is None:
            return None
        layer_s, late_s, ended = self._layer_s(run), self._clock.now_s - run.next_layer_s, run.layers_left
        if layer_s:
            ended = min(ended, math.floor(late_s / layer_s + BOUNDARY_SLACK))
        return run.job.job, run.next_layer_s + max(0, ended) * layer_s

    def run(self, job: RunLayers) -> None:
        assert self._run is None, f"stage {self._stage} was given job {job.job} while another runs"
        now_s = self._clock.now_s
        rows = tuple(range(sum(len(part.slots) for part in job.parts)))
        assert rows, f"job {job.job} of stage {self._stage} has no rows"
        self._run = _Run(job, rows, set(), now_s, now_s, self.spec.layers, job.context, Alarm(self._finish))
        self._set_end(self._run)

    def change_cache(self, command: OpenCache | ClearSlots | CloseCache) -> None:
        """Caches change between jobs only."""
        if self._run is None:
            self._layers.change_cache(self._stage, command)
        else:
            self._waiting.append(command)

    def trim(self, trim: Trim) -> None:
        """Rows leave at the next layer boundary, so the layers from there on cost less; a job without rows
        ends there."""
        run = self._run
        assert run is not None, f"stage {self._stage} was told to trim job {trim.job}, but none runs"
        assert run.job.job == trim.job, (
            f"stage {self._stage} was told to trim job {trim.job}, but {run.job.job} runs"
        )
        assert run.dead.isdisjoint(trim.rows), (
            f"stage {self._stage} was told twice that rows of job {trim.job} are dead"
        )
        run.dead.update(trim.rows)
        late_s = self._clock.now_s - run.next_layer_s
        layer_s = self._layer_s(run)
        if late_s > 0:
            begun = run.layers_left
            if late_s < layer_s * begun:
                begun = math.ceil(late_s / layer_s - BOUNDARY_SLACK)
            run.next_layer_s += begun * layer_s
            run.layers_left -= begun
        # What runs after its last boundary can no longer be changed; the core drops such rows when the job is
        # done.
        is_over = run.layers_left == 0 and (
            not self._is_last or self._clock.now_s > run.next_layer_s + BOUNDARY_SLACK * layer_s
        )
        if not is_over:
            run.rows = tuple(row for row in run.rows if row not in run.dead)
            self._set_end(run)

    def _layer_s(self, run: _Run) -> float:
        return self.spec.curve.seconds(len(run.rows), run.context) / self.spec.layers

    def _set_end(self, run: _Run) -> None:
        run.end.cancel()
        end_s = run.next_layer_s
        if run.rows:
            end_s += run.layers_left * self._layer_s(run)
            asked = int(run.job.sampled[list(run.rows)].sum()) if self._is_last else 0
            end_s += self.spec.sampling.seconds(asked) if asked else 0.0
        run.end = self._clock.at(end_s, self._finish)

    def _finish(self) -> None:
        run, self._run = self._run, None
        assert run is not None
        now_s = self._clock.now_s
        self.busy_s += now_s - run.started_s
        self.longest_s = max(self.longest_s, now_s - run.started_s)
        received: Tensor | None = run.job.payload
        payload = None if received is None else received.select(run.job.rows)
        outgoing, next_tokens, logprobs = self._layers.run(self._stage, run.job, payload, run.rows)
        for command in self._waiting:
            self._layers.change_cache(self._stage, command)
        self._waiting.clear()
        states = outgoing.apart() if outgoing is not None and self._captures else ()
        self._done(
            LayersDone(
                job=run.job.job,
                rows=run.rows,
                payload=None if self._is_last else outgoing,
                next_tokens=next_tokens,
                started_s=run.started_s,
                ended_s=now_s,
                logprobs=logprobs,
                captured=tuple(join_rows([(state,) * self._captures]) for state in states),
            )
        )
