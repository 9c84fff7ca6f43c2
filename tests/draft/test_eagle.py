"""An EAGLE drafter equals its head run over each node's path, with the target's features where they are known
by then; and heads in every published layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flowspec.core.protocol.messages import Release
from flowspec.draft.feature_kinds import Eagle
from flowspec.draft.layouts import captures_of, is_eagle
from flowspec.draft.ranking import F32
from flowspec.draft.registry import check_drafter, find_drafter
from flowspec.errors import InputError
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.slice import Slice
from flowspec.model.weights import LM_HEAD, Span
from tests.checkpoints import SMALL, make_checkpoint, make_variant
from tests.draft.heads import DATA, DRAFT_VOCABULARY, HIDDEN, LAYOUTS, VOCABULARY, make_head
from tests.draft.mirrors import WIDTH, Case, check, load_eagle, make_case
from tests.draft.trees import chain_batch, segment


@pytest.fixture(scope="module", params=["eagle", "eagle3", "two layers"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp("case"))


def test_a_chain_of_guesses_that_grew_too_long_is_made_again_from_the_truth(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.draft.feature_drafter.SLACK", 3)
    drafter, mirror = case.new_drafter(), case.new_mirror()
    teller = mirror.teller
    teller.begin([5, 6, 7])
    mirror.tell(drafter, teller.path[:2])
    drafter.draft(segment(teller.part([teller.root], committed=teller.path[:2])), WIDTH)
    mirror.expected(teller.path[1:])
    guesses = [teller.root]
    for token in range(20, 27):
        guesses.append(teller.add(guesses[-1], token))
        drafter.draft(segment(teller.part([guesses[-1]])), WIDTH)
        mirror.expected([guesses[-1]])
    beside = teller.add(guesses[5], 40)
    for number, node in enumerate(guesses[1:4], 1):
        mirror.tell(drafter, [teller.root])
        teller.commit(node)
        new = [teller.add(guesses[-1], 30 + number), *([beside] if number == 2 else [])]
        guesses.append(new[0])
        found = drafter.draft(segment(teller.part(sorted(new))), WIDTH)
        again = sorted([*guesses[4:-1], beside]) if number == 3 else []
        expected = mirror.expected([*again, *sorted(new)])
        if again or not len(mirror.head.layout.spec.layers) > 1:  # else as in the test of random trees
            check(mirror, found, expected)
        assert {each.node for each in found} == {node, *again, *new}


def test_a_turn_that_keeps_less_than_the_target_does_still_knows_its_features(case: Case) -> None:
    drafter, mirror = case.new_drafter(), case.new_mirror()
    teller = mirror.teller
    teller.begin([5, 6, 7, 8])
    mirror.tell_path(drafter)
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
    check(mirror, found, mirror.expected([*teller.path[1:4], *old[4:6], last]))
    assert sorted(drafter._truths[1]) == old[:6]


def test_nothing_is_kept_that_is_not_needed(case: Case) -> None:
    drafter, mirror = case.new_drafter(), case.new_mirror()
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
        mirror.tell_path(drafter)
    assert known.node_at.keys() == {run.slot for run in known.runs.values()}
    assert len(drafter._truths[1]) == len(teller.path) - 1
    teller.begin([1, 2, 3, 4], keep=3)
    new = teller.root
    mirror.tell(drafter, [new])  # a feature of the new turn, before the drafter knows of it
    drafter.draft(segment(teller.part([new])), WIDTH)
    assert sorted(drafter._truths[1]) == [*teller.path[:3], new]
    nothing = np.zeros((1, HIDDEN * len(mirror.head.captures)), np.float32)
    drafter.take_features(1, 0, [999], nothing)  # of the turn before
    assert 999 not in drafter._truths[1]
    drafter.release(Release(request=1))
    drafter.take_features(1, 1, [999], nothing)
    assert (drafter._requests, drafter._truths) == ({}, {})
    many = drafter._truths_max + 50
    drafter.take_features(2, 0, range(many), nothing.repeat(many, 0))
    assert list(drafter._truths[2]) == list(range(50, many))


# ---------------------------------------------------------------------------------------------------- layouts


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, ModelFiles]:
    """Targets by whether their embeddings are tied."""
    folder = tmp_path_factory.mktemp("targets")
    return {
        tied: ModelFiles(
            str(make_checkpoint(folder / str(tied), "llama", {**SMALL, "tie_word_embeddings": tied}))
        )
        for tied in (False, True)
    }


def pickled(folder: Path) -> None:
    """The other kind of file."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def ends_of(target: ModelFiles) -> tuple[torch.Tensor, torch.Tensor]:
    """A target's embedding and `lm_head`."""
    own = load_file(Path(target.model) / "model.safetensors")
    embedding = own["model.embed_tokens.weight"]
    return embedding, own.get("lm_head.weight", embedding)


@pytest.mark.parametrize(
    ("name", "tied"),
    [*((name, False) for name in LAYOUTS), *((name, True) for name in ("eagle", "safeailab"))],
)
def test_a_head_computes_what_its_publisher_does(
    name: str, tied: bool, targets: dict[bool, ModelFiles], tmp_path: Path
) -> None:
    layout, target = LAYOUTS[name], targets[tied]
    w, means = layout.tensors(), layout.means
    files = layout.write(tmp_path / "head", w)
    if tied:
        pickled(tmp_path / "head")
    assert is_eagle(files)
    head = load_eagle(files, target, "float32", "cpu")
    assert (head.captures, head.hidden_size) == (layout.captures, layout.width)
    rng = torch.Generator().manual_seed(3)
    rows = 9
    tokens = torch.randint(0, VOCABULARY, (rows,), generator=rng)
    captured = [torch.randn(rows, HIDDEN, generator=rng) for _ in layout.captures]
    embedding, lm_head = ends_of(target)
    embedding = w.get("embed_tokens.weight", embedding)
    lm_head = w.get("lm_head.weight", lm_head)
    if "draft_vocab_size" in layout.config and not layout.has_lm_head and layout.has_own_embedding:
        lm_head = embedding
    feature = head.project(torch.cat(captured, dim=-1).numpy())
    expected = means.project(w, captured)
    np.testing.assert_allclose(feature, expected, atol=2e-5, rtol=1e-5)
    for _ in range(2):  # the second time from the head's own features, as for guesses
        expected = means.run(w, embedding[tokens], expected)
        batch = chain_batch(head.new_cache(64), 0, rows)
        feature, _ = head.run(tokens.numpy(), feature, batch)
        np.testing.assert_allclose(feature, expected, atol=2e-4, rtol=1e-5)
        found = head.logits(feature)
        np.testing.assert_allclose(found, means.logits(w, expected, lm_head), atol=2e-4, rtol=1e-5)
        assert found.dtype == np.float32
    ids = head.target_ids
    kept = [3 * each + 1 for each in range(DRAFT_VOCABULARY)] if layout.has_lm_head else None
    assert (None if ids is None else ids.tolist()) == kept
    numbers = 2 * means.layers * means.key_heads * means.head_width + layout.width
    assert head.slot_bytes == 4 * numbers


def test_a_folder_of_either_kind_of_file_is_found_by_its_name(tmp_path: Path) -> None:
    layout = LAYOUTS["speculators-qwen3-two-layers"]
    for name in ("safetensors", "bin"):
        layout.write(tmp_path / name)
    count = sum(each.numel() for each in load_file(tmp_path / "safetensors/model.safetensors").values())
    pickled(tmp_path / "bin")
    for name in ("safetensors", "bin"):
        check_drafter(str(tmp_path / name))
        kind = find_drafter(str(tmp_path / name))
        assert isinstance(kind, Eagle)
        assert kind.parameter_count() == count


@pytest.mark.parametrize(
    ("variant", "finish"),
    [
        ("granite", lambda logits: logits / 1.7),
        ("gemma2", lambda logits: 6 * np.tanh(logits / 6)),
        ("gemma3", lambda logits: logits),
    ],
)
def test_an_eagle_head_ranks_by_what_a_target_of_any_family_would(
    variant: str, finish: Callable[[F32], F32], tmp_path: Path
) -> None:
    target = ModelFiles(str(make_variant(tmp_path / "target", variant)))
    head = load_eagle(ModelFiles(str(make_head(tmp_path / "head"))), target, "float32", "cpu")
    count = target.config().num_hidden_layers
    last = Slice.load(target, Span(first=count - 1, end=count, count=count), "float32", "cpu")
    hidden = np.random.default_rng(2).standard_normal((5, head.hidden_size), np.float32)
    lm_head = last.engine.rows(linear=last.parts[LM_HEAD], are_logits=True)
    np.testing.assert_allclose(head.logits(hidden), finish(lm_head(hidden)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["eagle", "safeailab"])
def test_neither_the_kind_of_file_nor_a_targets_experts_change_a_head(
    layout: str, targets: dict[bool, ModelFiles], tmp_path: Path
) -> None:
    tensors = {name: each.bfloat16() for name, each in LAYOUTS[layout].tensors().items()}
    heads = []
    for name, config in (("safetensors", {}), ("bin", {}), ("experts", {"num_experts": 8})):
        files = LAYOUTS[layout].write(tmp_path / name, tensors, **config)
        if name == "bin":
            pickled(tmp_path / name)
        heads.append(load_eagle(files, targets[False], "bfloat16", "cpu"))
    rng, found = np.random.default_rng(4), []
    tokens = rng.integers(VOCABULARY, size=9)
    features = rng.standard_normal((9, HIDDEN * len(heads[0].captures)), np.float32)
    for head in heads:
        batch = chain_batch(head.new_cache(64), 0, 9)
        found.append(head.logits(head.run(tokens, head.project(features), batch)[0]))
    assert np.isfinite(found[0]).all()
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_weights_are_counted_once_and_the_whole_vocabulary_needs_no_ids(
    targets: dict[bool, ModelFiles], tmp_path: Path
) -> None:
    layout = LAYOUTS["eagle"]
    files = layout.write(tmp_path / "head")
    own = sum(tensor.numel() * (1 if tensor.dim() > 1 else 2) for tensor in layout.tensors().values())
    sizes = [load_eagle(files, targets[tied], "bfloat16", "cpu").weight_bytes for tied in (False, True)]
    assert sizes == [2 * (own + 2 * VOCABULARY * HIDDEN), 2 * (own + VOCABULARY * HIDDEN)]
    layout = LAYOUTS["safeailab"]
    whole = {**layout.tensors(), "lm_head.weight": torch.randn(VOCABULARY, HIDDEN)}
    files = layout.write(tmp_path / "head", whole, draft_vocab_size=VOCABULARY)
    path = tmp_path / "head/model.safetensors"
    tensors = {name: each for name, each in load_file(path).items() if name != "d2t"}
    for more in ({}, {"d2t": torch.zeros(VOCABULARY, dtype=torch.long)}):
        save_file({**tensors, **more}, path)
        assert load_eagle(files, targets[False], "float32", "cpu").target_ids is None


def test_what_is_no_eagle_head(tmp_path: Path) -> None:
    head = load_eagle(ModelFiles(str(bundled_folder("eagle"))), ModelFiles("bundled"), "float32", "cpu")
    assert (head.captures, head.hidden_size) == ((8,), 320)
    assert not is_eagle(ModelFiles("bundled"))
    layout, ones = LAYOUTS["modelopt"], torch.ones(HIDDEN)
    for name in ("hidden_norm.weight", "markov_head.w1.weight"):  # of drafters of blocks
        assert not is_eagle(layout.write(tmp_path / name, {**layout.tensors(), name: ones}))


# -------------------------------------------------------------------------------------------------- captures


@pytest.mark.parametrize(("config", "layer_count", "captures"), DATA["captured"])
def test_layers_are_counted_as_their_publisher_does(
    config: dict[str, Any], layer_count: int, captures: list[int]
) -> None:
    """`eagle_aux_hidden_state_layer_ids` beside the other fields are what enters a layer, within
    `eagle_config` what leaves one."""
    assert captures_of(config, layer_count, "head", "target") == tuple(captures)


@pytest.mark.parametrize(("config", "layer_count", "message"), DATA["uncapturable"])
def test_layers_that_cannot_be_captured_are_refused(
    config: dict[str, Any], layer_count: int, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        captures_of(config, layer_count, "head", "target")
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("row", DATA["refused"], ids=lambda row: row["case"])
def test_what_is_not_computed_is_refused_in_one_line(
    row: dict[str, Any], targets: dict[bool, ModelFiles], tmp_path: Path
) -> None:
    written = LAYOUTS[row["of"]].write(tmp_path / "head", **row.get("config", {}))
    path = tmp_path / "head/model.safetensors"
    tensors = load_file(path)
    for name, each in row.get("tensors", {}).items():
        if each is None:
            del tensors[name]
        else:
            dtype = getattr(torch, each.get("dtype", "float32"))
            tensors[name] = torch.full(each["shape"], each.get("fill", 1), dtype=dtype)
    save_file(tensors, path)
    with pytest.raises(InputError, match=row["says"]) as caught:
        load_eagle(written, targets[False], "float32", "cpu")
    assert "\n" not in str(caught.value)
