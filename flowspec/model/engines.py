"""Which engine computes on a device."""

from __future__ import annotations

from flowspec.core.protocol.model_spec import Norm
from flowspec.model.cpu import Cpu
from flowspec.model.engine import Engine
from flowspec.model.trials import run_trial


def engine_of(dtype: str, device: str, norm: Norm, arithmetic: str = "") -> Engine:
    """For a model in a precision, whose norms compute so: by an `arithmetic`, or the best that the device
    has. Raises `InputError` where it lacks that."""
    trial = run_trial(dtype, device)
    trial.check(arithmetic)
    arithmetic = arithmetic or trial.arithmetics[0]
    if device == "cpu":
        return Cpu(dtype, arithmetic, norm)
    from flowspec.model.gpu import Gpu  # where torch is

    return Gpu(dtype, arithmetic, norm, device)
