"""From measured times to the numbers of a device profile: bandwidth and computing of the cost model
(`plan.cost`), and overheads.

A least-squares fit of relative errors. The overheads come first, from the tiny models. Then the two rates are
searched on a grid that closes in, for each share of the computing that reading may fail to hide: the model
has corners, so gradients would mislead. The rates of packed precisions are searched with the same overheads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flowspec.bench.profile import LayerPoint, MachineTimes, MeasuredMachine
from flowspec.model.accelerator import accelerator_of
from flowspec.plan.cost import OPERATIONS, layers_curve, read_bytes
from flowspec.plan.profile import DeviceProfile, KernelRates

F64 = npt.NDArray[np.float64]
SERIAL = (0.0, 0.25, 0.5, 0.75, 1.0)
HIDDEN = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of a tiny layer's time that a large one's takes, too, where launching runs ahead of computing."""
GRID = 41
ROUNDS = 5
LEAST_US = 0.1


def fit(measured: MachineTimes, machine: MeasuredMachine, name: str, basis: str) -> DeviceProfile:
    """The profile under which the cost model comes closest to what was measured; `basis` as in
    `KernelRates`."""
    layer_s, pass_s = _overheads(measured.tiny)
    shares = HIDDEN[:1] if accelerator_of(machine.device).is_cpu else HIDDEN
    points = measured.layers[machine.dtype]
    fits = [(_rates(machine.dtype, points, share * layer_s, pass_s, basis), share) for share in shares]
    (_, own), share = min(fits, key=lambda each: each[0][0])
    return DeviceProfile(
        name=name,
        memory_gb=machine.total_bytes() / 1e9,
        memory_gb_per_s=own.gb_per_s,
        memory_efficiency=1.0,
        tflops={machine.dtype: own.tflops},
        compute_efficiency=1.0,
        serial=own.serial,
        packed={
            dtype: _rates(dtype, measured.layers[dtype], share * layer_s, pass_s, basis)[1]
            for dtype in machine.packed
        },
        layer_us=max(LEAST_US, 1e6 * share * layer_s),
        expert_us=max(LEAST_US, 1e6 * share * _expert_s(measured.tiny_mixtures)),
        pass_us=max(LEAST_US, 1e6 * pass_s),
    )


def error(profile: DeviceProfile, points: Sequence[LayerPoint], dtype: str) -> float:
    """The root mean square of the relative errors of the cost model over measured points."""
    ratios = [
        layers_curve(profile, point.shape, dtype, point.layers).seconds(point.rows) / point.s
        for point in points
    ]
    return float(np.sqrt(np.mean([(ratio - 1) ** 2 for ratio in ratios])))


def _overheads(tiny: Sequence[LayerPoint]) -> tuple[float, float]:
    """What each layer and each pass takes beside its weights: the slope and the intercept over the number of
    layers."""
    few, many = sorted(tiny, key=lambda point: point.layers)
    layer_s = max(0.0, (many.s - few.s) / (many.layers - few.layers))
    return layer_s, max(0.0, few.s - few.layers * layer_s)


def _expert_s(tiny: Sequence[LayerPoint]) -> float:
    """What each expert takes beside its weights: one row's slope over the number that it runs through."""
    few, many = sorted(tiny, key=lambda point: point.shape.experts_per_row)
    more = many.layers * (many.shape.experts_per_row - few.shape.experts_per_row)
    return max(0.0, (many.s - few.s) / more)


def _rates(
    dtype: str, points: Sequence[LayerPoint], layer_s: float, pass_s: float, basis: str
) -> tuple[float, KernelRates]:
    """The rates with the least error, and that."""
    params = np.array([point.layers * point.shape.layer_params for point in points], dtype=np.float64)
    weight_bytes = params * [read_bytes(dtype, point.shape.filed_bytes) for point in points]
    work = OPERATIONS * params * [point.rows for point in points]
    spent = np.array([point.s for point in points])
    fixed = layer_s * np.array([point.layers for point in points]) + pass_s
    fits = [(*_seconds(weight_bytes, work, spent, fixed, serial), serial) for serial in SERIAL]
    off, byte_s, work_s, serial = min(fits)
    return off, KernelRates(gb_per_s=1e-9 / byte_s, tflops=1e-12 / work_s, serial=serial, basis=basis)


def _seconds(
    weight_bytes: F64, work: F64, spent: F64, fixed: F64, serial: float
) -> tuple[float, float, float]:
    """(error, seconds for a byte, seconds for an operation) where the error is least."""
    byte_s, work_s = float((spent / weight_bytes).min()), float((spent / work).min())
    found, width = float("inf"), 8.0
    for _ in range(ROUNDS):
        factors = np.geomspace(1 / width, width, GRID)
        bytes_s, works_s = byte_s * factors, work_s * factors
        reading = bytes_s[:, None, None] * weight_bytes  # [bytes, 1, points]
        computing = works_s[None, :, None] * work  # [1, works, points]
        told = np.maximum(reading, (1 - serial) * computing) + serial * computing + fixed
        errors = np.sqrt((((told - spent) / spent) ** 2).mean(axis=2))  # [bytes, works]
        at = np.unravel_index(int(errors.argmin()), errors.shape)
        found, byte_s, work_s = float(errors[at]), float(bytes_s[at[0]]), float(works_s[at[1]])
        width = width ** (4 / GRID)
    return found, byte_s, work_s
