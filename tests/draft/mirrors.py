"""A drafter of each kind, and what it should propose: each node computed anew by its head, or by the plain
model, over the whole text above it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from flowspec.core.protocol.messages import Proposal, Sampling
from flowspec.draft.feature_drafter import drafter_over
from flowspec.draft.feature_model import FeatureModel
from flowspec.draft.language import LanguageModelDrafter
from flowspec.draft.layouts import Layout, assistant_layout, block_layout, eagle_layout, mtp_layout
from flowspec.draft.ranking import F32, Ranker
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.attention import TreeBatch, TreeRows
from flowspec.model.files import ModelFiles
from tests.checkpoints import VOCABULARY_SIZE, make_variant
from tests.draft.assistants import make_assistant
from tests.draft.blocks import make_block_drafter, make_dspark
from tests.draft.heads import make_head
from tests.draft.mtp import make_mtp
from tests.draft.trees import Teller, segment

WIDTH = 5
HIDDEN = 64


class Mirror:
    """What a drafter should propose for one request. Features are made up, but always the same."""

    ranks_again: ClassVar[bool] = False
    """Whether nodes are proposed for once more when the target's features of those above come."""

    def __init__(self, head: Any, teller: Teller) -> None:
        self.head, self.teller = head, teller
        self.known: set[int] = set()
        self.ranker = Ranker(VOCABULARY_SIZE, ids=getattr(head, "target_ids", None))

    def feature(self, node: int) -> F32:
        rng = np.random.default_rng(node + 1)
        return rng.standard_normal(HIDDEN * len(self.head.captures), np.float32)

    def tell(self, drafter: Any, nodes: list[int]) -> None:
        """The target's features of these nodes arrive."""
        new = [node for node in nodes if node not in self.known]
        if new:
            rows = np.stack([self.feature(node) for node in new])
            drafter.take_features(self.teller.request, self.teller.epoch, new, rows)
        self.known.update(new)

    def tell_path(self, drafter: Any) -> None:
        """Of all but the newest token."""
        self.tell(drafter, self.teller.path[:-1])

    def is_alike(self, node: int) -> bool:
        """Whether what is proposed for a node can be compared."""
        return True

    def expected(self, nodes: list[int]) -> dict[int, Proposal]:
        """What is proposed when these nodes have been given."""
        raise NotImplementedError

    def proposal(self, node: int, logits: F32) -> Proposal:
        """Of logits `[1, vocabulary]`."""
        teller = self.teller
        (children,) = self.ranker.best(
            logits, [(teller.sampling, len(teller.line(node)))], WIDTH, [teller.before(node)]
        )
        return Proposal(
            request=teller.request,
            epoch=teller.epoch,
            node=node,
            tokens=children.tokens,
            confidences=children.confidences,
        )


class EagleMirror(Mirror):
    """Keys of a node stem from the target's feature, or from the one that was predicted above it."""

    ranks_again = True

    def __init__(self, head: FeatureModel, teller: Teller) -> None:
        super().__init__(head, teller)
        self._read: dict[int, Array] = {}  # the feature that a node's keys stem from
        self._predicted: dict[int, Array] = {}

    def is_alike(self, node: int) -> bool:
        """With two layers only what lies below true rows: a guess is not run again when a row above it is,
        and what its second layer saw of that row is older then."""
        has_one = len(self.head.layout.spec.layers) == 1
        return has_one or self.teller.parents[node] in self.known

    def expected(self, nodes: list[int]) -> dict[int, Proposal]:
        teller = self.teller
        wanted = [node for node in nodes if teller.is_living(node)]
        for node in teller.path[1:]:  # those that are made true
            parent = teller.parents[node]
            is_known = node in self._read and parent in self.known
            if is_known and not np.array_equal(self._read[node], self._truth(parent)):
                self._run(node)
                wanted += [node] if node == teller.root else []
        for node in nodes:
            if teller.parents[node] >= 0:
                self._run(node)
        return {
            node: self.proposal(node, self.head.logits(self._predicted[node][None]))
            for node in wanted
            if teller.parents[node] >= 0
        }

    def _truth(self, node: int) -> Array:
        found: Array = self.head.project(self.feature(node)[None])[0]
        return found

    def _run(self, node: int) -> None:
        parent = self.teller.parents[node]
        self._read[node] = self._truth(parent) if parent in self.known else self._predicted[parent]
        line = self.teller.line(node)[1:]
        count = len(line)
        cache, places = self.head.new_cache(count), np.arange(1, count + 1)
        visible = np.tri(count, dtype=np.bool_)
        rows = TreeRows(cache, 0, np.arange(count), places, places.astype(np.int32), visible)
        tokens = np.array([self.teller.tokens[each] for each in line])
        features = np.stack([self._read[each] for each in line])
        self._predicted[node] = self.head.run(tokens, features, TreeBatch([rows]))[0][-1]


class BlockMirror(Mirror):
    """One block behind what is known, for nodes at all its places."""

    def expected(self, nodes: list[int]) -> dict[int, Proposal]:
        teller = self.teller
        begin = next(at for at, node in enumerate(teller.path) if node not in self.known)
        cache = self.head.new_cache(begin)
        cache.reserve(begin)
        features = np.stack([self.feature(node) for node in teller.path[:begin]])
        self.head.write(self.head.project(features), np.arange(begin), cache)
        guesses = self.head.guess([teller.tokens[teller.path[begin]]], [begin], [cache])[0]
        found = {}
        for node in nodes:
            place = len(teller.line(node)) - 1 - begin
            if 0 <= place < len(guesses):
                hidden = self.head.after(guesses[place][None], [teller.tokens[node]])
                found[node] = self.proposal(node, self.head.logits(hidden))
        return found


class AssistantMirror(Mirror):
    """Each node runs behind the last one above it whose feature is known."""

    def __init__(self, head: FeatureModel, teller: Teller) -> None:
        super().__init__(head, teller)
        self._predicted: dict[int, Array] = {}

    def expected(self, nodes: list[int]) -> dict[int, Proposal]:
        return {node: self._expected(node) for node in nodes}

    def _expected(self, node: int) -> Proposal:
        line = self.teller.line(node)
        place = max(at for at in range(1, len(line)) if line[at - 1] in self.known)
        known = self.teller.path[:place]
        assert set(known) <= self.known
        inputs = np.stack([self.feature(each) for each in known])
        cache = self.head.new_cache(place)
        cache.reserve(place)
        self.head.write(inputs[:, : 2 * HIDDEN], np.arange(place), cache)
        keys, at = np.arange(place, dtype=np.int32), np.array([place])
        rows = TreeRows(cache, 0, at, at, keys, np.ones((1, place), np.bool_))
        parent = line[-2]
        feature = self.feature(parent)[2 * HIDDEN :] if parent in self.known else self._predicted[parent]
        token = np.array([self.teller.tokens[node]])
        hidden, predicted = self.head.run(token, feature[None], TreeBatch([rows]))
        self._predicted[node] = predicted[0]
        return self.proposal(node, self.head.logits(hidden))


class LanguageMirror(Mirror):
    """The plain model of transformers, over a node's whole text."""

    def tell(self, drafter: Any, nodes: list[int]) -> None:
        """It reads no features."""

    @torch.inference_mode()
    def expected(self, nodes: list[int]) -> dict[int, Proposal]:
        found = {}
        for node in filter(self.teller.is_living, nodes):
            text = torch.tensor([self.teller.text(node)])
            logits = self.head(input_ids=text, use_cache=False).logits[:, -1]
            found[node] = self.proposal(node, logits.numpy())
        return found


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of drafter, with its files and those of its target."""

    files: ModelFiles
    target: ModelFiles
    load: Callable[..., Any]
    """Its head of files, target, precision and device."""
    mirror: type[Mirror]

    @property
    def reads_features(self) -> bool:
        return self.mirror is not LanguageMirror

    def head(self, dtype: str = "float32") -> Any:
        return self.load(self.files, self.target, dtype, "cpu")

    def new_drafter(self, dtype: str = "float32", context: int | None = 300) -> Any:
        if not self.reads_features:
            return LanguageModelDrafter.load(self.files, dtype, "cpu", context=context)
        head = self.head(dtype)
        return drafter_over(head)(head, self.target.spec.vocabulary, context=context)

    def new_mirror(self, number: int = 1, sampling: Sampling | None = None) -> Any:
        return self.mirror(self.head(), Teller(number, sampling or Sampling()))


def plain(files: ModelFiles, *_: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(files.model, dtype=torch.float32).eval()


KINDS = ("eagle", "eagle3", "two layers", "mtp", "block", "dspark", "assistant", "language")


def loader(layout: Callable[[ModelFiles, ModelFiles], Layout]) -> Callable[..., FeatureModel]:
    """What loads the network of a published layout."""

    def load(files: ModelFiles, target: ModelFiles, dtype: str, device: str) -> FeatureModel:
        return FeatureModel.load(layout(files, target), target, dtype, device)

    return load


load_eagle, load_block, load_assistant = map(loader, (eagle_layout, block_layout, assistant_layout))
load_mtp = loader(lambda files, target: mtp_layout(files))


def make_case(kind: str, folder: Path) -> Case:
    target = "gemma4" if kind == "assistant" else "qwen2-sliding" if kind == "language" else "llama-grouped"
    if kind == "mtp":
        files = ModelFiles(str(make_mtp(folder / "target", "glm4-moe")))
        return Case(files=files, target=files, load=load_mtp, mirror=EagleMirror)
    of = ModelFiles(str(make_variant(folder / "target", target)))
    if kind == "language":
        return Case(files=of, target=of, load=plain, mirror=LanguageMirror)
    made: dict[str, tuple[Callable[[Path], Path], Callable[..., Any], type[Mirror]]] = {
        "block": (make_block_drafter, load_block, BlockMirror),
        "dspark": (make_dspark, load_block, BlockMirror),
        "assistant": (make_assistant, load_assistant, AssistantMirror),
    }
    layouts = {"eagle": "eagle", "eagle3": "safeailab", "two layers": "sglang-two-layers"}
    head = (lambda to: make_head(to, layouts[kind]), load_eagle, EagleMirror)
    make, load, mirror = made.get(kind, head)
    return Case(files=ModelFiles(str(make(folder / "drafter"))), target=of, load=load, mirror=mirror)


def check(mirror: Mirror, found: Any, expected: dict[int, Proposal]) -> None:
    """What is proposed for a request is what should be."""
    own = [each for each in found if each.request == mirror.teller.request]
    assert sorted(each.node for each in own) == sorted(expected)
    for each in own:
        assert each.epoch == expected[each.node].epoch
        if mirror.is_alike(each.node):
            assert each.tokens == expected[each.node].tokens, f"node {each.node}"
            # Features that are predicted of features grow, and so do differences.
            deep = max(0, len(mirror.teller.line(each.node)) - len(mirror.teller.path) - 3)
            wanted = expected[each.node].confidences
            np.testing.assert_allclose(each.confidences, wanted, rtol=2e-2 * 2**deep, atol=1e-6)


def draft(drafter: Any, mirror: Mirror, nodes: list[int], *, told: list[int] | None = None) -> Any:
    """Gives nodes, behind those of the path that the drafter has not been given; what is proposed is as it
    should be."""
    missing = mirror.teller.missing() if told is None else told
    found = drafter.draft(segment(mirror.teller.part(nodes, committed=missing)), WIDTH)
    check(mirror, found, mirror.expected([*missing, *nodes] if mirror.ranks_again else nodes))
    return found


def grow(teller: Teller, parent: int, count: int) -> list[int]:
    return [teller.add(parent, (7 * parent + 31 * nth) % VOCABULARY_SIZE) for nth in range(1, count + 1)]
