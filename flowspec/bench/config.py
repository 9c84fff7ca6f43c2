"""Experiments: what is run where, read from `configs/experiments/*.toml` and changed by flags.

The same experiment runs in every world. A *testbed* is devices, links and the shape that the model's tokens
are timed as; a *setup* is a method with its parameters under the name it is shown by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from flowspec.bench.profiles import Profile
from flowspec.core.methods import DEFAULT, WITHOUT_GUESSES, find_method
from flowspec.core.protocol import limits
from flowspec.model.files import BUNDLED, bundled_folder
from flowspec.plan.profile import DeviceProfile
from flowspec.plan.shape import ModelShape
from flowspec.plan.split import weighted_split
from flowspec.plan.tables import Count, NotNegative, Positive, Table, Text, Texts, among, some_tables
from flowspec.plan.timing import LinkSpec
from flowspec.runtime.timeouts import SILENT_S
from flowspec.validation import expect

SIMULATED, EMULATED, CLUSTER = "simulated", "emulated", "cluster"
WORLDS = (SIMULATED, EMULATED, CLUSTER)
SYNTHETIC = "synthetic"
FIXED, AUTO = "fixed", "auto"
OURS = DEFAULT
AR = WITHOUT_GUESSES
SHIPPED_PROMPTS = "shipped"
TUNING_PROMPTS = "shipped-tuning"
UNSEEN_PROMPTS = "shipped-unseen"
PROMPT_FILES = {
    SHIPPED_PROMPTS: "bench.jsonl",
    TUNING_PROMPTS: "bench-tuning.jsonl",
    UNSEEN_PROMPTS: "bench-unseen.jsonl",
}
USERS_MAX = limits.CONVERSATIONS_MAX // 2
"""Of a load: beside the answers under way the head remembers those that it is about to forget."""
ACCEPTANCE_MAX = 0.99
Acceptance = Annotated[float, Meta(gt=0, le=ACCEPTANCE_MAX)]
STEP_S_MAX = 3600.0
TIMES_MAX = 1000.0
HEAD_MS = 0.5
"""What the head spends on an event, as measured on a laptop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A method as it is run. `coupled`: its drafters rank with the target's noise.

    `drafters` are the models beside the target that it uses, None for the experiment's own, as many as the
    method can use. With a `chain` they are its levels, in this order: those of a `FIXED` one, or, with
    `AUTO`, those that the method chooses among.

    `published`: as the papers' code does it, not as kindly as ours: hidden states of all rows travel back,
    the head verifies, and stages wait for its verdict every turn (`bench.simulated` says what that costs).
    """

    name: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    coupled: bool = True
    published: bool = False
    drafters: tuple[str, ...] | None = None
    chain: str = ""
    testbeds: tuple[str, ...] = ()
    """Where it is run; everywhere, if none is named."""

    def runs_on(self, testbed: str) -> bool:
        return not self.testbeds or testbed in self.testbeds


class Published(Table, frozen=True, kw_only=True):
    """Published rates of one testbed at one temperature, by setup. `fitted`: the testbed's slowdown was set
    on its reference."""

    testbed: Text
    temperature: NotNegative = 0.0
    reference: Text
    tokens_per_s: Annotated[Mapping[str, Positive], Meta(min_length=1)]
    fitted: bool = False

    def __post_init__(self) -> None:
        rates = self.tokens_per_s
        expect(self.reference in rates, "reference", self.reference, f"one of {', '.join(rates)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterPlacement:
    """Where some models beside the target run, by name, and what their passes are timed as; `device` and
    `link` are None for the head's board."""

    models: tuple[str, ...]
    shape: ModelShape
    precision: str
    device: DeviceProfile | None = None
    link: LinkSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """Devices in pipeline order, the head's device, links, and what the model's tokens are timed as.

    Models beside the target that no board of `boards` names run at the head, timed as `drafter_shape`;
    without one drafting takes no time.
    `slowdown` multiplies the time of every stage's device, `head_slowdown` that of the drafters' devices:
    free parameters, 1 where nothing is known better. Links are all alike unless `hops` has one for each: head
    to first stage, between stages, last stage to head.
    """

    name: str
    devices: tuple[DeviceProfile, ...]
    head: DeviceProfile
    link: LinkSpec
    shape: ModelShape
    drafter_shape: ModelShape | None
    precision: str
    slowdown: float = 1.0
    head_slowdown: float = 1.0
    head_s: float = HEAD_MS / 1000
    split: tuple[int, ...] = ()
    hops: tuple[LinkSpec, ...] = ()
    boards: tuple[DrafterPlacement, ...] = ()

    __test__ = False  # for pytest, which would take it for tests

    @property
    def layers(self) -> list[int]:
        """Layers of each stage: those of `split`, or in proportion to how fast its memory is."""
        return list(self.split) or weighted_split(
            self.shape.layers, [device.bytes_per_s() for device in self.devices]
        )


class DeclaredDrafter(Table, frozen=True, kw_only=True):
    """A synthetic drafter: its `acceptance` by domain, how often its best guess is right."""

    name: Text
    acceptance: Annotated[
        Mapping[Text, Acceptance],
        Meta(min_length=1, description="a share for each domain: { code = 0.8, plays = 0.5 }"),
    ]


class LoadStep(Table, frozen=True, kw_only=True):
    """A span of a load that changes: so many `users` for so many `seconds`, in which the passes of the `slow`
    drafters take so many times as long, and the `lost` ones are not there."""

    users: Annotated[int, Meta(ge=1, le=USERS_MAX)]
    seconds: Annotated[float, Meta(gt=0, le=STEP_S_MAX)]
    slow: Mapping[str, Annotated[float, Meta(gt=0, le=TIMES_MAX)]] = msgspec.field(default_factory=dict)
    lost: Texts = ()


class Asked(Table, frozen=True, kw_only=True):
    """What an experiment has as its file says it. `limit` is prompts per file (None: all), `repeat` how often
    each is run (real worlds only).

    With `users` it is loads that are run, one of each number of users, of so many `answers` together (None:
    every prompt once). With `nothing_learnt`, heads in virtual time have answered nothing before.
    """

    world: Annotated[str, among(WORLDS)] = SIMULATED
    model: Text = BUNDLED
    limit: Count | None = None
    temperatures: Annotated[tuple[NotNegative, ...], Meta(min_length=1)] = (0.0,)
    seeds: Annotated[tuple[Annotated[int, Meta(ge=0, le=10**9)], ...], Meta(min_length=1)] = (1,)
    repeat: Count = 1
    new_tokens: Count = 96
    context: Count = 1024
    published: Annotated[tuple[Published, ...], some_tables("published")] = ()
    local: Count = 4
    users: Annotated[tuple[Annotated[int, Meta(ge=1, le=USERS_MAX)], ...], Meta(min_length=1)] = ()
    answers: Count | None = None
    steps: Annotated[tuple[LoadStep, ...], some_tables("step")] = msgspec.field(name="step", default=())
    nothing_learnt: bool = False

    @property
    def is_synthetic(self) -> bool:
        return self.model == SYNTHETIC


class Bench(Asked, frozen=True, kw_only=True):
    """An experiment.

    A synthetic model's drafter is right with the probability `acceptance`, or as its `profile` says; or there
    are several, as `declared`, whose luck has a `correlation` (`bench.declared`).

    With `steps` it is one load that changes, in which a drafter that is lost has been silent for `silent_s`
    when the head hears of it. The cluster world is that of the file `cluster`, or without one `local` daemons
    of this machine.
    """

    name: str
    testbeds: tuple[Testbed, ...]
    setups: tuple[Setup, ...]
    drafters: tuple[str, ...] = (BUNDLED,)
    acceptance: float = 0.0
    profile: Profile | None = None
    declared: tuple[DeclaredDrafter, ...] = ()
    correlation: float = 0.0
    prompts: tuple[str, ...] = (SHIPPED_PROMPTS,)
    cluster: Path | None = None
    silent_s: float = SILENT_S

    def drafters_of(self, setup: Setup) -> tuple[str, ...]:
        """The models beside the target that a setup is run with; none for plain decoding."""
        return self.drafters[: drafters_max(setup.method)] if setup.drafters is None else setup.drafters


def drafters_max(method: str) -> int:
    """How many models beside the target a method can use."""
    found = find_method(method)
    return found.drafters_max if found.drafts else 0


def prompt_path(name: str) -> Path:
    """The file of a name in `prompts`: `shipped`, `shipped-tuning`, or a path."""
    return bundled_folder(PROMPT_FILES[name]) if name in PROMPT_FILES else Path(name)
