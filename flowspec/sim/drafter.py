"""A drafter whose likeness to the target is a number, and which insists on its protocol.

Keeps per request what a real drafter's cache would hold: the committed path and the nodes below the root that
it was given. It knows a prefix only from there, so a head that expands a node without its ancestors, drafts
below a dead one or sends a node twice fails here at once. Knows no time: how long a draft takes is the
world's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowspec.core.head.events import CopyFeatures
from flowspec.core.head.request import PREDICTED_MAX
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Commit, Open, Proposal, Release, Segment, SegmentPart
from flowspec.core.stage.path import living_below, newly_committed
from flowspec.core.text_before import TextBefore
from flowspec.model.sampler import Shaping
from flowspec.noise import draw_bits, gumbel
from flowspec.sim.language import F32, HashLanguage, Prefix, as_prefix


@dataclass(slots=True)
class _View:
    """One request as the drafter sees it: `path` holds the committed nodes it was given, as (id, token) by
    position, `nodes` parent, token and position of the root and the living nodes below it; `early` are nodes
    that were committed before they came."""

    opening: Open
    root: int
    length: int
    path: dict[int, tuple[int, int]] = field(default_factory=dict)
    nodes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    early: set[int] = field(default_factory=set)

    def commit(self, commit: Commit) -> None:
        fresh = newly_committed(commit, self.length)
        if not fresh:
            return
        for position, node in enumerate(fresh, self.length):
            if node in self.nodes:
                _, token, stands_at = self.nodes[node]
                assert stands_at == position, f"node {node} stands at {stands_at}, not at {position}"
                self.path[position] = (node, token)
            else:
                self.early.add(node)
        self.length, self.root = commit.length, fresh[-1]
        living = living_below(self.root, ((node, parent) for node, (parent, _, _) in self.nodes.items()))
        self.nodes = {node: known for node, known in self.nodes.items() if node in living}

    def add(self, node: int, parent: int, token: int, position: int, *, is_flagged: bool) -> bool:
        """Takes a row; whether it is of the path."""
        assert node not in self.nodes, f"node {node} came twice"
        is_committed = is_flagged or node in self.early or node == self.root
        if is_committed:
            assert position < self.length, (
                f"node {node} at {position} is committed, but the path ends before it"
            )
            assert position not in self.path, f"the drafter was given position {position} of the path twice"
            self.path[position] = (node, token)
        else:
            assert parent in self.nodes, (
                f"node {node} is drafted below {parent}, of which the drafter knows nothing"
            )
            assert self.nodes[parent][2] == position - 1, f"node {node} does not stand behind its parent"
        if node == self.root or not is_committed:
            self.nodes[node] = (parent, token, position)
            slots = len(self.path) + len(self.nodes) - (self.root in self.nodes)
            assert slots <= self.opening.slots, (
                f"{slots} nodes at once at the drafter, {self.opening.slots} reserved"
            )
        return is_committed

    def prefix(self, node: int) -> Prefix:
        """The tokens from the first to `node`; fails for whatever the drafter was not given."""
        branch, at = [], node
        while at != self.root:
            at, token, _ = self.nodes[at]
            branch.append(token)
        missing = [position for position in range(self.length) if position not in self.path]
        assert not missing, (
            f"node {node} is to be expanded, but the drafter was never given position {missing[:1]} of its "
            "prefix"
        )
        return as_prefix([*(self.path[position][1] for position in range(self.length)), *reversed(branch)])


class FakeDrafter:
    """Ranks by `log q / T + G`, where q is the language's own at `quality` 1 and unrelated to it at 0."""

    weight_bytes = 0

    def __init__(
        self,
        language: HashLanguage,
        quality: float,
        seed: int,
        *,
        context: int = 1 << 20,
        captures: tuple[int, ...] = (),
        cache_slots: int = limits.ID_MAX,
        is_honest: bool = True,
    ) -> None:
        """Features are not looked at where those who send them may not be honest."""
        assert 0 <= quality <= 1
        self.captures = captures
        self.context = context
        self.cache_slots = cache_slots
        self.rows = 0
        self._quality = quality
        self._language = language
        self._other = language.other(seed)
        self._ids = np.arange(language.vocabulary_size)
        self._views: dict[int, _View] = {}
        self._is_honest = is_honest
        self._featured: dict[int, dict[int, bytes]] = {}
        self._released: dict[int, int] = {}

    def requests(self) -> list[int]:
        return list(self._views)

    def restart(self) -> None:
        """Forgets everything, as a process that is started again."""
        for held in (self._views, self._featured, self._released):
            held.clear()

    def logits(self, prefix: Prefix) -> F32:
        own = self._language.logits(prefix)
        if self._quality == 1:
            return own
        mixed = self._quality * own + (1 - self._quality) * self._other.logits(prefix)
        return mixed.astype(np.float32)

    def draft(self, segment: Segment, width: int) -> tuple[Proposal, ...]:
        self.rows += segment.row_count
        assert segment.row_count, "the drafter was given no rows"
        return tuple(proposal for part in segment.parts for proposal in self._draft(part, width))

    def release(self, message: Release) -> None:
        self._views.pop(message.request, None)
        self._featured.pop(message.request, None)
        self._released[message.request] = message.epoch

    def take_features(self, request: int, epoch: int, ids: Any, features: Any) -> None:
        """Notes the features of nodes; those of a request that is over are of no use, but may still be on
        their way."""
        assert self.captures, "features for a drafter that wants none"
        assert len(ids) == features.rows, (
            f"{len(ids)} nodes of request {request}, epoch {epoch}, came with {features.rows} features"
        )
        if epoch > self._released.get(request, -1):
            own = (bytes(row.data) for row in features.apart())
            self._featured.setdefault(request, {}).update(zip(ids, own, strict=True))

    def copy_features(self, message: CopyFeatures) -> None:
        """Notes whose features are those of other nodes, which must have come."""
        assert self.captures, "features for a drafter that wants none"
        others = self._featured.get(message.source, {})
        missing = set(message.source_nodes).difference(others)
        assert not missing, f"nodes {sorted(missing)} of request {message.source} came without their features"
        copies = [others[node] for node in message.source_nodes]
        self._featured.setdefault(message.request, {}).update(zip(message.nodes, copies, strict=True))

    def _draft(self, part: SegmentPart, width: int) -> list[Proposal]:
        number, epoch = part.commit.request, part.commit.epoch
        if part.opening is not None:
            self._open(part.opening)
        view = self._views.get(number)
        assert view is not None, f"request {number} was never opened at the drafter"
        assert view.opening.epoch == epoch, (
            f"epoch {epoch} of request {number}; it is at {view.opening.epoch}"
        )
        view.commit(part.commit)
        proposals = []
        for node, parent, token, position, is_flagged in zip(
            part.ids, part.parents, part.tokens, part.positions, part.committed, strict=True
        ):
            assert position < self.context, (
                f"node {node} stands at {position}; the drafter goes up to {self.context}"
            )
            if view.add(node, parent, token, position, is_flagged=is_flagged):
                self._check_features(view, position)
            if node in view.nodes:
                proposals.append(self._propose(view, node, width))
        return proposals

    def _open(self, opening: Open) -> None:
        known = self._views.get(opening.request)
        path = {} if known is None else known.path
        assert known is not None or opening.keep == 0, (
            f"request {opening.request} keeps {opening.keep} tokens of which the drafter has none"
        )
        assert known is None or opening.epoch >= known.opening.epoch, "epochs grow"
        if known is None or opening.epoch > known.opening.epoch:
            path = {position: entry for position, entry in path.items() if position < opening.keep}
            self._views[opening.request] = _View(opening, opening.root, opening.length, path)

    def _check_features(self, view: _View, position: int) -> None:
        """An EAGLE head runs a token of the path together with the target's feature of the one before it,
        which stands in for that one's token; or with its own prediction, not far from such a feature."""
        if not self.captures or position == 0:
            return
        assert position - 1 in view.path, f"position {position} of the path came before the one before it"
        before, token = view.path[position - 1]
        known = self._featured.get(view.opening.request, {})
        if before not in known:
            recent = range(max(0, position - 1 - PREDICTED_MAX), position - 1)
            assert any(view.path[at][0] in known for at in recent), (
                f"position {position} of the path is to be run, but the feature of the one before never came"
            )
            return
        found = np.frombuffer(known[before], dtype="<i4")
        assert not self._is_honest or (found == token).all(), (
            f"the features of node {before}, which holds token {token}, are of tokens {found}"
        )

    def _propose(self, view: _View, node: int, width: int) -> Proposal:
        prefix, opening = view.prefix(node), view.opening
        sampling, text = opening.sampling, TextBefore(prefix.astype(np.int64), opening.answer_start)
        shaping = Shaping(sampling, self._ids, self._language.grammars)
        scores = shaping.of(self.logits(prefix), text).astype(np.float64)
        if sampling.temperature > 0:
            scores = scores / sampling.temperature + gumbel(draw_bits(sampling.seed, len(prefix), self._ids))
        best = np.argsort(-scores, kind="stable")[: min(width, np.count_nonzero(scores > -np.inf))]
        weights = np.exp(scores - scores[best[0]])
        confidences = weights[best] / weights.sum()
        return Proposal(
            request=opening.request,
            epoch=opening.epoch,
            node=node,
            tokens=tuple(best.tolist()),
            confidences=tuple(confidences.tolist()),
        )
