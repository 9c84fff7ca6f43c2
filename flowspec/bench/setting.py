"""What a benchmark was run with, as its report and `summary.json` tell it: the exact command, the versions,
the models, the devices and what their times are reckoned as."""

from __future__ import annotations

import itertools
import math
import platform
import shlex
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flowspec.bench.config import CLUSTER, Bench, Testbed
from flowspec.bench.plain import PlainCase
from flowspec.plan.timing import LinkSpec
from flowspec.version import __version__

PACKAGES = ("torch", "transformers", "numpy", "matplotlib")
"""Whose versions are told, if they are installed."""


def setting_of(bench: Bench, cases: Sequence[PlainCase], command: Sequence[str]) -> dict[str, Any]:
    """`command` are the words after `flowspec`."""
    return {
        "command": command_of(command),
        "versions": versions(),
        "machine": f"{platform.system()} {platform.machine()}",
        "model": bench.model,
        "drafters": list(bench.drafters),
        "right_guesses": bench.acceptance or None,
        "profile": None if bench.profile is None else f"{bench.profile.name} ({bench.profile.basis})",
        "prompts": len(dict.fromkeys(case.prompt_id for case in cases)),
        "domains": sorted({case.domain for case in cases}),
        "new_tokens": bench.new_tokens,
        "seeds": list(bench.seeds) if any(bench.temperatures) else [],
        "devices": _devices(bench),
    }


def command_of(words: Sequence[str]) -> str:
    """The whole command, as a shell takes it; `words` are those after `flowspec`."""
    return shlex.join(["flowspec", *words])


def versions() -> dict[str, str]:
    found = {"flowspec": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _devices(bench: Bench) -> dict[str, str]:
    """What there is, a line by testbed."""
    if bench.testbeds:
        return {testbed.name: _boards(testbed) for testbed in bench.testbeds}
    assert bench.world == CLUSTER, "other worlds have testbeds"
    if bench.cluster is None:
        return {f"{bench.local} local processes": "on this machine"}
    return {bench.cluster.stem: f"(the devices of {bench.cluster.name})"}


def _boards(testbed: Testbed) -> str:
    alike = [
        (name, len(list(some))) for name, some in itertools.groupby(each.name for each in testbed.devices)
    ]
    stages = ", ".join(name if count == 1 else f"{count}x {name}" for name, count in alike)
    links = " and ".join(dict.fromkeys(_link(link) for link in testbed.hops or (testbed.link,)))
    drafter = testbed.drafter_shape
    said = [
        f"{stages} as stages, {testbed.head.name} as the head",
        f"links of {links}",
        f"timed as {testbed.shape.name} in {testbed.precision}",
        *([] if drafter is None else [f"a drafter at the head as {drafter.name}"]),
    ]
    said += [
        f"{', '.join(board.models)} on {(board.device or testbed.head).name} as {board.shape.name}"
        for board in testbed.boards
    ]
    return "; ".join(said)


def _link(link: LinkSpec) -> str:
    delay = f"{1000 * link.delay_s:g} ms"
    return delay if math.isinf(link.bandwidth_mbps) else f"{link.bandwidth_mbps:g} Mbit/s and {delay}"
