"""What is said of a model that does not fit: the shortfall of each device and what would fit, as text and as
JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flowspec.plan.advice import Option, Shortfall, fitting_options, shortfalls
from flowspec.plan.memory import mib
from flowspec.plan.planner import DoesNotFit, Plan, make_plan
from flowspec.plan.sites import PlanRequest
from flowspec.rounding import rounded

NAME_WIDTH = 32


class ModelDoesNotFitError(DoesNotFit):
    """A model that does not fit, with all that there is to say: the error's text has several lines, `report`
    is the same for programs."""

    exit_status = 1

    def __init__(
        self, reason: str, short: list[Shortfall], options: list[Option], limited: Sequence[str] = ()
    ) -> None:
        """`limited` are devices that have more memory than we are allowed."""
        found = [*_lines(reason, short, options)]
        if limited:
            found += _limited_lines(limited)
        super().__init__("\n".join(found))
        self.reason = reason
        self.options = tuple(options)
        self.report = _report(short, options)
        self.shortfalls = tuple(short)


def _limited_lines(names: Sequence[str]) -> Iterator[str]:
    yield f"\nmore is not allowed on {', '.join(names)}: raise memory in the cluster file,"
    yield "or --memory of the daemon there"


def plan_or_refuse(request: PlanRequest) -> Plan:
    """The fastest plan; raises `ModelDoesNotFitError` where there is none."""
    try:
        return make_plan(request)
    except DoesNotFit as error:
        raise ModelDoesNotFitError(str(error), shortfalls(request), fitting_options(request)) from None


def _report(short: list[Shortfall], options: list[Option]) -> dict[str, Any]:
    return {
        "fits": False,
        "devices": [
            {
                "device": each.name,
                "layers": each.layers,
                "need_bytes": each.need_bytes,
                "memory_bytes": each.have_bytes,
                "short_bytes": each.short_bytes,
            }
            for each in short
        ],
        "would_fit": [{"change": each.text, "tokens_per_s": each.tokens_per_s} for each in options],
    }


def _lines(reason: str, short: list[Shortfall], options: list[Option]) -> Iterator[str]:
    yield f"{reason}:"
    heads = f"{'layers':>7}{'needs':>10}{'has':>10}{'short':>10}"
    yield f"\n{'device, with a share by memory':<{NAME_WIDTH}}{heads}"
    for each in short:
        lack = mib(each.short_bytes) if each.short_bytes else "-"
        sizes = f"{mib(each.need_bytes):>10}{mib(each.have_bytes):>10}{lack:>10}"
        yield f"{each.name:<{NAME_WIDTH}}{each.layers:>7}{sizes}"
    yield (
        "\nit would fit with"
        if options
        else "\nno lower precision, shorter context or few boards more make it fit"
    )
    for option in options:
        yield f"  {option.text:<40}{rounded(option.tokens_per_s):>8} tokens/s"
