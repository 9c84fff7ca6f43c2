"""The contract of all drafters that have a cache: what one proposes below a node is what its head gives for
the node's path, whatever the tree did and whatever shares its jobs."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowspec.core.protocol.messages import Release, Sampling
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles
from tests.checkpoints import VOCABULARY_SIZE
from tests.draft.mirrors import KINDS, WIDTH, Case, Mirror, check, draft, grow, make_case
from tests.draft.trees import PENALTIES, Teller, segment
from tests.nightly import seeds


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp("case"))


def begun(case: Case, text: list[int], sampling: Sampling | None = None) -> tuple[Any, Any]:
    """A drafter, and the mirror of a request whose features are known up to its root."""
    drafter, mirror = case.new_drafter(), case.new_mirror(1, sampling)
    mirror.teller.begin(text)
    mirror.tell_path(drafter)
    return drafter, mirror


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.8, seed=6), Sampling(temperature=0.8, seed=6, **PENALTIES)],
)
def test_a_tree_that_comes_in_jobs_is_each_branch_alone(case: Case, sampling: Sampling) -> None:
    drafter, mirror = begun(case, [3, 5, 8, 13, 21], sampling)
    teller = mirror.teller
    draft(drafter, mirror, [teller.root])
    first = grow(teller, teller.root, 2)
    draft(drafter, mirror, first)
    draft(drafter, mirror, [node for parent in first for node in grow(teller, parent, 2)])


def test_going_back_is_a_new_text(case: Case) -> None:
    """Twenty tokens, then another turn that keeps eight of them."""
    drafter, mirror = begun(case, list(range(20, 40)))
    teller = mirror.teller
    draft(drafter, mirror, [teller.root])
    teller.begin([*range(20, 28), 7, 9], keep=8)
    mirror.tell_path(drafter)
    draft(drafter, mirror, [teller.root])


def test_requests_do_not_touch_each_other_and_one_that_is_released_begins_afresh(case: Case) -> None:
    drafter, first = begun(case, [4, 9, 16, 25])
    second = case.new_mirror(2, Sampling(temperature=1.0, seed=9, **PENALTIES))
    second.teller.begin([2, 3, 5, 7, 11, 13])
    second.tell_path(drafter)
    mirrors = (first, second)
    missing = [mirror.teller.missing() for mirror in mirrors]
    parts = [
        mirror.teller.part([mirror.teller.root], committed=told)
        for mirror, told in zip(mirrors, missing, strict=True)
    ]
    found = drafter.draft(segment(*parts), WIDTH)
    for mirror, told in zip(mirrors, missing, strict=True):
        root = mirror.teller.root
        check(mirror, found, mirror.expected([*told, root] if mirror.ranks_again else [root]))
    drafter.release(Release(request=1, epoch=0))
    draft(drafter, second, grow(second.teller, second.teller.root, 3))
    again = case.new_mirror(1)
    again.teller.epoch = 0
    again.teller.begin([8, 9])
    again.tell_path(drafter)
    draft(drafter, again, [again.teller.root])


def test_before_features_come_nothing_is_proposed(case: Case) -> None:
    drafter, mirror = case.new_drafter(), case.new_mirror()
    mirror.teller.begin([5])
    found = drafter.draft(segment(mirror.teller.part([mirror.teller.root])), WIDTH)
    assert len(found) == (0 if drafter.captures else 1)


def test_what_a_drafter_says_of_itself(case: Case, tmp_path: Path) -> None:
    drafter, head = case.new_drafter(), case.head()
    assert drafter.captures == (head.captures if case.reads_features else ())
    assert drafter.weight_bytes > case.new_drafter("bfloat16").weight_bytes > 0
    assert drafter.context == 300
    config = json.loads((Path(case.files.model) / "config.json").read_text("utf-8"))
    raw = {**config, "max_position_embeddings": 100}
    if "text_config" in raw:
        raw["text_config"] = {**raw["text_config"], "max_position_embeddings": 100}
    short = tmp_path / "short"
    shutil.copytree(case.files.model, short)
    (short / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    files = ModelFiles(str(short))
    of = Case(files=files, target=case.target, load=case.load, mirror=case.mirror)
    assert [of.new_drafter(context=context).context for context in (300, 50)] == [100, 50]


def test_a_drafter_that_overflows_says_so(case: Case) -> None:
    if not case.reads_features:
        pytest.skip("in test_language")
    drafter = case.new_drafter("float16")
    teller = Teller(1, Sampling())
    teller.begin([5, 6])
    width = 64 * len(drafter.captures)
    drafter.take_features(1, 0, [0], np.full((1, width), np.inf, np.float32))
    with pytest.raises(ClusterError, match="float16"):
        drafter.draft(segment(teller.part([teller.root], committed=[0])), WIDTH)


RANDOM = ("eagle", "eagle3", "two layers", "mtp", "language")


@pytest.mark.parametrize("seed", seeds(1, 20))
@pytest.mark.parametrize("kind", RANDOM)
def test_random_trees_of_two_requests_over_several_turns(kind: str, seed: int, tmp_path: Path) -> None:
    """Commits that were guessed or not, dead branches among the rows, rewinds, both requests in shared
    segments."""
    rng, case = random.Random(seed), make_case(kind, tmp_path)
    drafter = case.new_drafter()
    mirrors: list[Mirror] = [
        case.new_mirror(1),
        case.new_mirror(2, Sampling(temperature=0.9, seed=seed, **PENALTIES)),
    ]
    ripe: dict[int, list[int]] = {}  # nodes that may be given: drafted, and their parents given
    checked = again = dead = 0
    for turn in range(3):
        for mirror in mirrors:
            teller = mirror.teller
            keep = rng.randint(0, teller.filled) if turn else 0
            kept = [teller.tokens[node] for node in teller.path[:keep]]
            more = rng.randint(1 if keep else 2, 12)
            teller.begin([*kept, *(rng.randrange(VOCABULARY_SIZE) for _ in range(more))], keep)
            ripe[teller.request] = []
        for _ in range(12):
            parts, expected = [], {}
            for mirror in mirrors:
                teller = mirror.teller
                mirror.tell_path(drafter)  # each feature came with the token after it
                if rng.random() < 0.3:
                    mirror.tell(drafter, [teller.root])  # or before the head has walked on
                nodes = [teller.root] if teller.root not in teller.given else []
                for node in sorted(ripe[teller.request]):
                    if rng.random() < 0.5 and (teller.is_living(node) or not mirror.ranks_again):
                        nodes.append(node)
                        ripe[teller.request].remove(node)
                        dead += not teller.is_living(node)
                missing = teller.missing()
                if nodes or missing:
                    parts.append(teller.part(nodes, committed=missing))
                    wanted = mirror.expected([*missing, *nodes] if mirror.ranks_again else nodes)
                    expected[teller.request] = wanted
                    again += len(wanted.keys() - {*nodes})
            proposals = drafter.draft(segment(*parts), WIDTH)
            for mirror in mirrors:
                teller = mirror.teller
                check(mirror, proposals, expected.get(teller.request, {}))
                for each in (each for each in proposals if each.request == teller.request):
                    checked += 1
                    for token in rng.sample(each.tokens, rng.randint(1, 3)):
                        if all(teller.tokens[child] != token for child in children_of(teller, each.node)):
                            ripe[teller.request].append(teller.add(each.node, token))
                for _ in range(rng.choice((0, 0, 1, 1, 2))):
                    commit(rng, teller)
                    if teller.root in ripe[teller.request]:
                        ripe[teller.request].remove(teller.root)
    assert checked > 40
    assert again if mirrors[0].ranks_again else dead, "nothing was ranked again, or nothing had died"


def commit(rng: random.Random, teller: Teller) -> None:
    """A child of the root, guessed or not."""
    children = children_of(teller, teller.root)
    if not children or rng.random() < 0.2:
        children = [teller.add(teller.root, rng.randrange(VOCABULARY_SIZE))]
    guessed = [child for child in children if child in teller.given]
    teller.commit(rng.choice(guessed or children))


def children_of(teller: Teller, node: int) -> list[int]:
    return [child for child, parent in enumerate(teller.parents) if parent == node]
