"""What a decoding method decides. The head does the rest: trees, walks, commits, prompts, drafting jobs, the
answer.

A method never touches a message. It is asked three things, always with the present state in hand: what to
send next, what to draft next, and whether a verified segment may be looked at yet.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec.core.head.costs import Costs
from flowspec.core.head.domains import Domains
from flowspec.core.head.drafter_jobs import expandable
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.expertise import Expertise
from flowspec.core.head.fusion import Offers
from flowspec.core.head.request import Request
from flowspec.core.protocol import limits

Choice = tuple[Request, list[int]]
"""Nodes of one request, parents first; the root among them if it has not been sent."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A token of a request became known: what each model that was asked had proposed there, and the chance
    that it gave to the token."""

    token: int
    offers: Mapping[int, Offers]
    chances: Mapping[int, float]


@dataclass(slots=True)
class View:
    """What methods see. `requests` are those that are answered now, the longest unserved first.

    `traits` are the models beside the target; `turnaround_s` is how long each took of late from a question to
    its answer (0: not known), `asked_s` when it was asked what it is at (None: it is idle); `overdue_s` for
    how long it has been at a job that it should be through with (0: it is not), and `paused` whether it had
    none for so long that nobody knows how fast it is. With `prompts_wait` a chunk of a prompt would take a
    slot that is left free.
    """

    requests: Sequence[Request]
    count_living: Callable[[], int]
    stage_count: int
    costs: Costs
    traits: Sequence[DrafterTraits]
    turnaround_s: Sequence[float]
    asked_s: Sequence[float | None]
    overdue_s: Sequence[float]
    paused: Sequence[bool]
    prompts_wait: bool
    now_s: float
    _living_flights: int = -1

    @property
    def living_flights(self) -> int:
        """Segments in flight that carry anything that can still matter."""
        if self._living_flights < 0:
            self._living_flights = self.count_living()
        return self._living_flights

    def unsent_roots(self) -> list[Choice]:
        return [(request, [request.tree.root]) for request in self.requests if not request.root_sent]

    def can_expand(self, request: Request, node: int, drafter: int = 0) -> bool:
        return drafter < len(self.traits) and expandable(request, drafter, self.traits[drafter], node)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A keyword argument of a method, which an experiment may set: an `int` from 1, a `float` from 0, both up
    to `most`, or a `bool`.

    `tried` are the values that tuning tries.
    """

    name: str
    kind: type = int
    most: float = limits.TREE_NODES_MAX
    tried: tuple[float, ...] = ()


class Method:
    """A scheduling policy; see the module. One object serves one head.

    This is the common ground, plain decoding: nothing is drafted, every segment is looked at as it comes.
    What the world around a head must know of a method is declared here, so that nothing there goes by its
    name.
    """

    name = "plain"
    parameters: tuple[Parameter, ...] = ()
    """Its keyword arguments, in the order in which tuning tries them."""
    nodes_parameter = "nodes"
    """The one that bounds a tree or segment (`--tree-nodes`)."""
    drafts = True
    """Models beside the target are of use to it."""
    suits_team = False
    """It is made for several of them."""
    takes_chain = False
    """They may verify one after another; its option `chain` has their numbers."""
    waits_each_turn = False
    """In the paper's code every stage waits for the head's verdict on a segment."""
    is_reference = False
    """What papers give speed-ups over."""
    is_forerunner = False
    """The one that ours is set against by name."""
    width = 10
    """Children asked for below each node."""
    commits_at_once = False
    """Whether a Commit goes out on the control connections as soon as it is known, so that it overtakes data.
    """
    is_calibrated = False
    """Whether chances are the calibrated ones; the published methods take the drafter's word."""
    fuses = True
    """Whether models that agree make a token likelier; else it is worth what the surest of them says."""
    overfills = False
    """Whether roots go out where the window is full; so does then, in its turn, a prompt, which would wait
    for ever."""
    value_min = 0.0
    """Proposals worth less do not become nodes (yet)."""
    drafters_max = 1
    """Models beside the target that it can make use of."""
    expertise: Expertise | None = None
    """What it learnt of them by domain, if that is what it goes by."""
    domains: Domains | None = None
    """The kinds of prompts that it tells apart, if it does."""

    def window(self, view: View) -> int:
        """Living segments that may be in flight."""
        return view.stage_count + 1

    def meet(self, traits: Sequence[DrafterTraits]) -> None:
        """These are the models beside the target; told once, before all else."""

    def begin(self, request: Request) -> None:
        """A new answer begins, or one begins again on other stages."""
        request.plan = None

    def observed(self, request: Request, observation: Observation) -> None:
        """A token became known about which models had been asked."""

    def ended(self, request: Request) -> None:
        """The answer is over."""

    def may_walk(self, request: Request) -> bool:
        """Whether the next verified segment of a request may be looked at now."""
        return True

    def walked(self, request: Request, emitted: int) -> None:
        """The oldest verified segment was looked at and gave so many tokens."""

    def send(self, view: View) -> list[Choice]:
        """The next segment, empty for none now; asked again until it is. Here every root that is not on its
        way, in one segment."""
        return view.unsent_roots() if view.living_flights < self.window(view) else []

    def expand(self, view: View, drafter: int) -> list[Choice]:
        """Nodes for a drafter that is idle; empty for none now."""
        return []

    def wake_s(self, view: View) -> float | None:
        """When to ask again if nothing else happens."""
        return None

    def experience(self) -> object:
        """What it learnt that outlives answers, for another of its kind to `take`."""
        return None

    def take(self, experience: object) -> None:
        """Begin with what another of its kind learnt."""

    def state_dict(self) -> Any:
        """What of it is worth keeping between runs (`core.head.learnt`)."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Begin with the state that one of its kind had; raises `Misfit`."""


def beam(view: View, request: Request, width: int, depth: int) -> list[int] | None:
    """The next level of an EAGLE-2 tree to expand: at each of `depth` + 1 levels the `width` best nodes.

    Empty while the drafter still works on a level, None when the tree is complete. Nodes expanded before need
    no second run.
    """
    tree = request.tree
    first = tree.position(tree.root)
    levels: list[list[tuple[float, int]]] = [[] for _ in range(depth + 1)]
    levels[0] = [(0.0, tree.root)]
    for node in tree.living():
        level = tree.position(node) - first
        if level <= depth:
            levels[level].append((-tree.log_value(node), node))
    for offers in levels:
        best = [node for _, node in heapq.nsmallest(width, offers)]
        if any(request.is_pending(node) for node in best):
            return []
        fresh = [node for node in best if view.can_expand(request, node)]
        if fresh:
            return sorted(fresh)
    return None
