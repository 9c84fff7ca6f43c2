"""An EAGLE drafter equals its head run over each node's path, with the target's features where they are known
by then."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from flowspec.bench.checkpoints import VOCABULARY_SIZE, make_variant
from flowspec.core.protocol.messages import Proposal, Release, Sampling
from flowspec.draft.eagle import EagleDrafter
from flowspec.draft.eagle_head import EagleHead
from flowspec.draft.ranking import Ranker
from flowspec.errors import ClusterError
from flowspec.model.attention import TreeBatch, TreeRows
from flowspec.model.files import ModelFiles
from tests.draft.heads import make_head
from tests.draft.trees import PENALTIES, Teller, segment

CPU = torch.device("cpu")
WIDTH = 5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(str(make_variant(tmp_path_factory.mktemp("target"), "llama-grouped")))


@pytest.fixture(scope="module", params=["eagle", "eagle3", "two layers"])
def head_files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return ModelFiles(str(make_head(tmp_path_factory.mktemp(request.param), request.param)))


class Mirror:
    """What the drafter should do for one request, each node's path run from the beginning."""

    def __init__(self, head: EagleHead, teller: Teller) -> None:
        self.teller = teller
        self.truths: dict[int, torch.Tensor] = {}
        self._head = head
        ids = head.target_ids()
        self._ranker = Ranker(VOCABULARY_SIZE, ids=None if ids is None else ids.numpy())
        self._read: dict[int, torch.Tensor] = {}  # the feature that a node's keys stem from
        self._predicted: dict[int, torch.Tensor] = {}

    def feature(self, node: int) -> torch.Tensor:
        """The target's feature of a node: made up, but always the same."""
        return torch.randn(self._head.feature_width, generator=torch.Generator().manual_seed(node))

    def tell(self, drafter: EagleDrafter, nodes: list[int]) -> None:
        """The target's features of these nodes arrive."""
        new = [node for node in nodes if node not in self.truths]
        features = (
            torch.stack([self.feature(node) for node in new])
            if new
            else torch.zeros(0, self._head.feature_width)
        )
        drafter.take_features(self.teller.request, self.teller.epoch, new, features)
        self.truths.update(zip(new, self._head.project(features), strict=True))

    def run(self, nodes: list[int]) -> dict[int, Proposal]:
        """Runs new nodes after the committed ones that are made true; what should be proposed."""
        wanted = [node for node in nodes if self.teller.is_living(node)]
        for node in self.teller.path[1:]:
            parent = self.teller.parents[node]
            if (
                node in self._read
                and parent in self.truths
                and not torch.equal(self._read[node], self.truths[parent])
            ):
                self._run(node)
                wanted += [node] if node == self.teller.root else []
        for node in nodes:
            if self.teller.parents[node] >= 0:
                self._run(node)
        return {node: self._proposal(node) for node in wanted if self.teller.parents[node] >= 0}

    def _run(self, node: int) -> None:
        parent = self.teller.parents[node]
        read = self.truths.get(parent, self._predicted.get(parent))
        assert read is not None
        self._read[node] = read
        line = self.teller.line(node)[1:]
        count = len(line)
        rows = TreeRows(
            self._head.new_cache(count),
            0,
            torch.arange(count),
            torch.arange(1, count + 1),
            torch.arange(1, count + 1, dtype=torch.int32),
            torch.ones(count, count, dtype=torch.bool).tril(),
        )
        tokens = torch.tensor([self.teller.tokens[each] for each in line])
        features = torch.stack([self._read[each] for each in line])
        self._predicted[node] = self._head.run(tokens, features, rows.positions, TreeBatch([rows], 0))[-1]

    def _proposal(self, node: int) -> Proposal:
        logits = self._head.logits(self._predicted[node][None]).numpy()
        (children,) = self._ranker.best(
            logits, [(self.teller.sampling, len(self.teller.line(node)))], WIDTH, [self.teller.before(node)]
        )
        return Proposal(
            request=self.teller.request,
            epoch=self.teller.epoch,
            node=node,
            tokens=children.tokens,
            confidences=children.confidences,
        )


def check(found: list[Proposal], expected: dict[int, Proposal]) -> None:
    assert len(found) == len({each.node for each in found})
    assert {each.node for each in found} == expected.keys()
    for each in found:
        assert each.tokens == expected[each.node].tokens, f"node {each.node}"
        np.testing.assert_allclose(each.confidences, expected[each.node].confidences, rtol=2e-3, atol=1e-6)


def start(
    head_files: ModelFiles, target: ModelFiles, sampling: Sampling, number: int = 1
) -> tuple[EagleDrafter, Mirror]:
    drafter = EagleDrafter(EagleHead.load(head_files, target, "float32", CPU), target, context=300)
    return drafter, Mirror(EagleHead.load(head_files, target, "float32", CPU), Teller(number, sampling))


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_of_two_requests_over_several_turns(
    head_files: ModelFiles, target: ModelFiles, seed: int
) -> None:
    """With two layers only what lies below true rows is compared: a guess is not run again when a row above
    it is, and what its second layer saw of that row is older then."""
    rng = random.Random(seed)
    drafter, first = start(head_files, target, Sampling())
    mirrors = [first, Mirror(first._head, Teller(2, Sampling(temperature=0.9, seed=seed, **PENALTIES)))]
    ripe: dict[int, list[int]] = {}
    checked = again = 0
    for turn in range(3):
        for mirror in mirrors:
            teller = mirror.teller
            keep = rng.randint(0, teller.filled) if turn else 0
            prompt = [teller.tokens[node] for node in teller.path[:keep]]
            teller.begin(
                prompt
                + [rng.randrange(VOCABULARY_SIZE) for _ in range(rng.randint(2 if not keep else 1, 12))],
                keep,
            )
            ripe[teller.request] = []
        for _ in range(14):
            parts, expected = [], {}
            for mirror in mirrors:
                teller = mirror.teller
                mirror.tell(
                    drafter, teller.path[:-1]
                )  # each path node's feature came with the token after it
                if rng.random() < 0.3:
                    mirror.tell(drafter, [teller.root])  # or before the head has walked on
                nodes = [teller.root] if teller.root not in teller.given else []
                for node in sorted(ripe[teller.request]):
                    if rng.random() < 0.5 and teller.is_living(node):
                        nodes.append(node)
                        ripe[teller.request].remove(node)
                missing = teller.missing()
                if nodes or missing:
                    parts.append(teller.part(nodes, committed=missing))
                    expected[teller.request] = mirror.run([*missing, *nodes])
                    again += len(expected[teller.request].keys() - {*nodes})
            proposals = drafter.draft(segment(*parts), WIDTH)
            for mirror in mirrors:
                teller = mirror.teller
                own = [each for each in proposals if each.request == teller.request]
                if first._head.config.num_hidden_layers == 1:
                    check(own, expected.get(teller.request, {}))
                else:
                    wanted = expected.get(teller.request, {})
                    assert {each.node for each in own} == wanted.keys()
                    true = {node for node in wanted if teller.parents[node] in mirror.truths}
                    check([each for each in own if each.node in true], {node: wanted[node] for node in true})
                checked += len(own)
                for each in own:
                    for token in rng.sample(each.tokens, rng.randint(1, 3)):
                        if all(teller.tokens[child] != token for child in _children(teller, each.node)):
                            ripe[teller.request].append(teller.add(each.node, token))
                for _ in range(rng.choice((0, 0, 1, 1, 2))):
                    children = _children(teller, teller.root)
                    guessed = [child for child in children if child in teller.given]
                    is_miss = not children or rng.random() < 0.2
                    node = (
                        teller.add(teller.root, rng.randrange(VOCABULARY_SIZE))
                        if is_miss
                        else rng.choice(guessed or children)
                    )
                    teller.commit(node)
                    ripe[teller.request] = [each for each in ripe[teller.request] if each != node]
    assert checked > 40
    assert again > 0, "no root was ever ranked again"


def _children(teller: Teller, node: int) -> list[int]:
    return [child for child, parent in enumerate(teller.parents) if parent == node]


def test_a_guess_reads_a_prediction_and_is_made_again_when_the_truth_is_known(
    head_files: ModelFiles, target: ModelFiles
) -> None:
    drafter, mirror = start(head_files, target, Sampling())
    teller = mirror.teller
    teller.begin([5, 6, 7])
    mirror.tell(drafter, teller.path[:2])
    (proposal,) = drafter.draft(segment(teller.part([teller.root], committed=teller.path[:2])), WIDTH)
    check([proposal], mirror.run(teller.path[1:]))
    child = teller.add(teller.root, proposal.tokens[0])
    guessed = drafter.draft(segment(teller.part([child])), WIDTH)
    check(list(guessed), mirror.run([child]))
    grandchild = teller.add(child, guessed[0].tokens[0])
    mirror.tell(
        drafter, [teller.root]
    )  # the root is verified: the child is right, and was made of a prediction
    teller.commit(child)
    found = drafter.draft(segment(teller.part([grandchild])), WIDTH)
    assert [each.node for each in found] == [child, grandchild]
    check(list(found), mirror.run([grandchild]))
    assert found[0].confidences != guessed[0].confidences


def test_a_chain_of_guesses_that_grew_too_long_is_made_again_from_the_truth(
    head_files: ModelFiles, target: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.draft.eagle.SLACK", 3)
    drafter, mirror = start(head_files, target, Sampling())
    teller = mirror.teller
    teller.begin([5, 6, 7])
    mirror.tell(drafter, teller.path[:2])
    drafter.draft(segment(teller.part([teller.root], committed=teller.path[:2])), WIDTH)
    mirror.run(teller.path[1:])
    guesses = [teller.root]
    for token in range(20, 27):
        guesses.append(teller.add(guesses[-1], token))
        drafter.draft(segment(teller.part([guesses[-1]])), WIDTH)
        mirror.run([guesses[-1]])
    beside = teller.add(guesses[5], 40)
    for number, node in enumerate(guesses[1:4], 1):
        mirror.tell(drafter, [teller.root])
        teller.commit(node)
        new = [teller.add(guesses[-1], 30 + number), *([beside] if number == 2 else [])]
        guesses.append(new[0])
        found = drafter.draft(segment(teller.part(sorted(new))), WIDTH)
        again = sorted([*guesses[4:-1], beside]) if number == 3 else []
        expected = mirror.run([*again, *sorted(new)])
        if again or mirror._head.config.num_hidden_layers == 1:  # else as in the test of random trees
            check(list(found), expected)
        assert {each.node for each in found} == {node, *again, *new}


def test_a_node_and_its_child_may_come_together(head_files: ModelFiles, target: ModelFiles) -> None:
    drafter, mirror = start(head_files, target, Sampling())
    teller = mirror.teller
    teller.begin([5, 6, 7])
    child = teller.add(teller.root, 9)
    grandchild = teller.add(child, 10)
    mirror.tell(drafter, teller.path[:2])
    found = drafter.draft(
        segment(teller.part([teller.root, child, grandchild], committed=teller.path[:2])), WIDTH
    )
    check(list(found), mirror.run([*teller.path[1:], child, grandchild]))


def test_the_first_token_has_no_row(head_files: ModelFiles, target: ModelFiles) -> None:
    drafter, mirror = start(head_files, target, Sampling())
    teller = mirror.teller
    teller.begin([5])
    assert drafter.draft(segment(teller.part([teller.root])), WIDTH) == ()
    mirror.tell(drafter, [teller.root])
    child = teller.add(teller.root, 9)
    found = drafter.draft(segment(teller.part([child])), WIDTH)
    check(list(found), mirror.run([child]))


def test_without_a_feature_above_it_a_row_is_left_out(head_files: ModelFiles, target: ModelFiles) -> None:
    """No head asks so; the answer must not hang on it."""
    drafter, mirror = start(head_files, target, Sampling())
    teller = mirror.teller
    teller.begin([5, 6, 7, 8])
    mirror.tell(drafter, [teller.path[2]])
    (proposal,) = drafter.draft(segment(teller.part([teller.root], committed=teller.path[:-1])), WIDTH)
    assert drafter._requests[1].has_keys[:4].tolist() == [False, False, False, True]
    child = teller.add(teller.root, proposal.tokens[0])
    assert [each.node for each in drafter.draft(segment(teller.part([child])), WIDTH)] == [child]


def test_a_turn_that_keeps_less_than_the_target_does_still_knows_its_features(
    head_files: ModelFiles, target: ModelFiles
) -> None:
    drafter, mirror = start(head_files, target, Sampling())
    teller = mirror.teller
    teller.begin([5, 6, 7, 8])
    mirror.tell(drafter, teller.path[:-1])
    drafter.draft(segment(teller.part([teller.root], committed=teller.path[:-1])), WIDTH)
    for token in (9, 10, 11):  # the end of an answer, of which the drafter was never told
        mirror.tell(drafter, [teller.root])
        teller.commit(teller.add(teller.root, token))
    old = list(teller.path)
    teller.begin([5, 6, 7, 8, 9, 10, 1], keep=4)
    # The target keeps two tokens more than the drafter: nodes of the last turn are brought to it in this one.
    for position in (4, 5):
        teller.path[position] = old[position]
    last = teller.path[6]
    teller.parents[last] = old[5]
    found = drafter.draft(segment(teller.part([last], committed=old[4:6])), WIDTH)
    check(list(found), mirror.run([*teller.path[1:4], *old[4:6], last]))
    assert sorted(drafter._truths[1]) == old[:6]


def test_nothing_is_kept_that_is_not_needed(head_files: ModelFiles, target: ModelFiles) -> None:
    drafter, mirror = start(head_files, target, Sampling())
    teller = mirror.teller
    teller.begin(list(range(1, 101)))
    mirror.tell(drafter, teller.path)
    drafter.draft(segment(teller.part([teller.root], committed=teller.path[:-1])), WIDTH)
    known = drafter._requests[1]
    assert known.runs == {}  # all their features are the target's
    for _ in range(20):
        guesses = [teller.add(teller.root, token) for token in (3, 4)]
        drafter.draft(segment(teller.part(guesses)), WIDTH)
        assert len(known.runs) <= 4
        teller.commit(guesses[0])
        mirror.tell(drafter, teller.path[:-1])
    assert known.node_at.keys() == {run.slot for run in known.runs.values()}
    assert len(drafter._truths[1]) == len(teller.path) - 1
    teller.begin([1, 2, 3, 4], keep=3)
    new = teller.root
    mirror.tell(drafter, [new])  # a feature of the new turn, before the drafter knows of it
    drafter.draft(segment(teller.part([new])), WIDTH)
    assert sorted(drafter._truths[1]) == [*teller.path[:3], new]
    drafter.take_features(1, 0, [999], torch.zeros(1, mirror._head.feature_width))  # of the turn before
    assert 999 not in drafter._truths[1]
    drafter.release(Release(request=1))
    drafter.take_features(1, 1, [999], torch.zeros(1, mirror._head.feature_width))
    assert (drafter._requests, drafter._truths) == ({}, {})
    many = drafter._truths_max + 50
    drafter.take_features(2, 0, range(many), torch.zeros(many, mirror._head.feature_width))
    assert list(drafter._truths[2]) == list(range(50, many))


def test_traits(head_files: ModelFiles, target: ModelFiles, tmp_path: Path) -> None:
    drafter, mirror = start(head_files, target, Sampling())
    assert drafter.captures == mirror._head.capture
    assert drafter.weight_bytes == mirror._head.weight_bytes > 0
    assert drafter.context == 300
    raw = {**head_files.raw_config(), "max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    shutil.copy(head_files.path("model.safetensors"), tmp_path)
    short = ModelFiles(str(tmp_path))
    assert EagleDrafter(EagleHead.load(short, target, "float32", CPU), target, context=300).context == 100
    assert EagleDrafter(EagleHead.load(short, target, "float32", CPU), target).context == 100


def test_a_head_that_overflows_says_so(head_files: ModelFiles, target: ModelFiles) -> None:
    drafter = EagleDrafter(EagleHead.load(head_files, target, "float16", CPU), target)
    teller = Teller(1, Sampling())
    teller.begin([5, 6])
    drafter.take_features(1, 0, [0], torch.full((1, drafter._head.feature_width), 3e4))
    with pytest.raises(ClusterError, match="float16"):
        drafter.draft(segment(teller.part([teller.root], committed=[0])), WIDTH)
