"""Small experiments that need no weights: a testbed of a few boards, and synthetic prompts and guesses."""

from __future__ import annotations

from typing import Any

from flowspec.bench.drafters import Maker
from flowspec.bench.experiment import AR, SIMULATED, SYNTHETIC, Experiment, Setup, Testbed
from flowspec.bench.simulated import Drafters
from flowspec.core.methods import METHODS
from flowspec.plan.profile import find_profile
from flowspec.plan.shape import find_shape
from flowspec.plan.timing import LinkSpec

SETUPS = tuple(Setup(name=method, method=method) for method in METHODS)
SMALL = find_shape("tinyllama-1.1b")
TOML = """
name = "tiny"
model = "synthetic"
acceptance = 0.6
limit = 2
new_tokens = 12
temperatures = [0, 1]
methods = ["ar", "continuous"]

[[testbed]]
name = "two boards"
devices = ["2 x jetson-orin-nano"]
bandwidth_mbps = 150
latency_ms = 1
shape = "tinyllama-1.1b"
"""
STEPS = TOML.replace("temperatures = [0, 1]", "silent_s = 0.2").replace(
    "[[testbed]]",
    """
[[step]]
users = 1
seconds = 1

[[step]]
users = 2
seconds = 1
slow = { synthetic = 3 }
lost = ["synthetic"]

[[testbed]]""",
)


def boards(stages: int = 2, board: str = "jetson-orin-nano", name: str = "boards", **changes: Any) -> Testbed:
    device = find_profile(board)
    plain: dict[str, Any] = {
        "head": device,
        "link": LinkSpec(bandwidth_mbps=150, delay_s=0.001),
        "shape": SMALL,
        "drafter_shape": find_shape("eagle-tinyllama-1.1b"),
        "precision": "float16",
    }
    return Testbed(name=name, devices=(device,) * stages, **(plain | changes))


def synthetic(**changes: Any) -> Experiment:
    plain: dict[str, Any] = {
        "name": "tiny",
        "world": SIMULATED,
        "testbeds": (boards(),),
        "setups": SETUPS,
        "model": SYNTHETIC,
        "drafters": (SYNTHETIC,),
        "acceptance": 0.6,
        "limit": 2,
        "temperatures": (0.0, 1.0),
        "new_tokens": 12,
    }
    return Experiment(**(plain | changes))


def drafters(setup: Setup, make: Maker) -> Drafters:
    """One drafter, and none for plain decoding."""
    made = None if setup.method == AR else make()
    return {} if made is None else {SYNTHETIC: made}


class Steps:
    """What was said, and of how many answers."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def __call__(self, text: str, answers: int) -> None:
        self.told.append((text, answers))

    @property
    def answers(self) -> int:
        return sum(answers for _, answers in self.told)
