"""The cost model: how long a device takes for a pass over layers of a model's shape.

A roofline: a pass reads its weights once, and the keys and values of its context, at the device's memory
bandwidth, or computes for longer than that; kernels have to be started whatever they do. So a device runs as
many nodes as its knee in the time of one; of a mixture of experts further nodes read further experts, each of
which has to be started, too. Where the same cores read and compute, a share of the computing
(`KernelRates.serial`) comes on top of the reading instead.
"""

from __future__ import annotations

from dataclasses import replace

from flowspec.core.protocol.precision import (
    CACHE_AUTO,
    PRECISION_BYTES,
    cached_as,
)
from flowspec.plan.memory import keys_bytes, read_bytes
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.shape import USUAL_FILED_BYTES, ModelShape
from flowspec.plan.timing import Curve

OPERATIONS = 2.0
"""Floating-point operations for each weight and row: multiply and add."""
CHOOSING = 1.0
"""What choosing experts takes in a mixture's layer, where `expert_us` is not 0: as long as so many times what
a layer takes beside its weights. Measured on a CPU (docs/devices.md)."""


def weights_curve(
    device: DeviceProfile, params: float, precision: str, filed_bytes: float = USUAL_FILED_BYTES
) -> Curve:
    """A product with so many weights, which take `filed_bytes` each where they stay as a GGUF file packs
    them."""
    rates = device.rates(precision)
    row_s = 1e-12 * OPERATIONS * params / rates.tflops
    return Curve(
        base_s=1e-9 * params * read_bytes(precision, filed_bytes) / rates.gb_per_s,
        row_s=(1 - rates.serial) * row_s,
        extra_row_s=rates.serial * row_s,
    )


def layers_curve(
    device: DeviceProfile, shape: ModelShape, precision: str, layers: int, cache: str = CACHE_AUTO
) -> Curve:
    weights = weights_curve(device, layers * shape.layer_params, precision, shape.filed_bytes)
    attention = device.number_rates(precision)
    attending = layers * shape.attention_share
    read = shape.layer_heads
    cache_bytes = attending * sum(keys_bytes(each, cached_as(cache, precision)) for each in read) / len(read)
    width = sum(each.width for each in read) / len(read)
    expert_us = device.expert_us if shape.experts > 1 else 0.0
    layer_us = device.layer_us * (1 + CHOOSING * (expert_us > 0))
    chosen_s = weights.base_s * shape.chosen_params / shape.layer_params
    return Curve(
        base_s=weights.base_s - chosen_s,
        row_s=weights.row_s,
        extra_row_s=weights.extra_row_s,
        chosen_s=chosen_s,
        start_s=1e-6 * layers * expert_us * shape.experts_per_row,
        shared=shape.experts_shared,
        choices=shape.experts / shape.experts_per_row,
        fixed_s=1e-6 * (layers * layer_us + device.pass_us),
        context_s=1e-9 * cache_bytes / attention.gb_per_s,
        row_context_s=2e-12 * OPERATIONS * attending * shape.heads * width / attention.tflops,
    )


def head_curve(device: DeviceProfile, shape: ModelShape, precision: str) -> Curve:
    return weights_curve(device, shape.head_params, precision, shape.filed_bytes)


def drafter_curve(device: DeviceProfile, shape: ModelShape, precision: str) -> Curve:
    """A whole pass of a drafter, `lm_head` included."""
    layers = layers_curve(device, shape, precision, shape.layers)
    head = weights_curve(device, shape.head_params + shape.extra_params, precision, shape.filed_bytes)
    return replace(
        layers,
        base_s=layers.base_s + head.base_s,
        row_s=layers.row_s + head.row_s,
        extra_row_s=layers.extra_row_s + head.extra_row_s,
    )


def row_bytes(shape: ModelShape, precision: str) -> int:
    """A hidden state between two stages, with the most that goes with one; quantised models send float16."""
    return int((shape.hidden + shape.carried) * max(PRECISION_BYTES[precision], 2.0))
