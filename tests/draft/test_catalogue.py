"""Published drafters: their table has its form, finds a model whoever packed it, and tells which are here,
which fit, and which one is used."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from flowspec.draft.catalogue import (
    EAGLE_2_LENGTHS,
    EAGLE_2_TREE,
    Candidate,
    best_here,
    chain_length,
    find_candidates,
    find_target,
    published,
    share_right,
)
from flowspec.draft.registry import BY_FILES, FALLBACK
from flowspec.model.files import DEMO_FOLDER, ModelFiles
from flowspec.plan.advice import ModelDoesNotFitError
from flowspec.plan.placement import ClusterPlan
from flowspec.plan.shape import shape_of
from flowspec.runtime import session
from flowspec.runtime.decoding import AUTO, Decoding, choose_drafter
from flowspec.runtime.plan_inputs import drafter_inputs
from flowspec.runtime.session import ClusterOptions, RecoveryOptions
from tests.draft.heads import make_head
from tests.ggufs import convert, make
from tests.model.test_files import put_into_cache

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ROWS = published()
TARGETS = dict.fromkeys(target for row in ROWS for target in row.targets)


def test_no_row_is_there_twice() -> None:
    pairs = [(row.drafter, row.layout, target) for row in ROWS for target in row.targets]
    assert len(set(pairs)) == len(pairs)


def test_rows_say_what_can_be() -> None:
    for row in ROWS:
        assert HUB_ID.fullmatch(row.drafter)
        assert row.targets
        assert row.files in (None, "safetensors", "bin")
        for size in (row.parameters, row.bytes):
            assert size is None or (type(size) is int and 10**7 < size < 10**10)
        assert row.source.startswith("https://")
        for one in row.measured:
            assert one.source.startswith("https://")
            assert one.drafted in (None, EAGLE_2_TREE) or type(one.drafted) is int
            assert one.temperature is None or 0 <= one.temperature <= 1
            assert 1 < one.length < (one.drafted + 1 if isinstance(one.drafted, int) else 8)
            assert (one.share_right is None) == (one.drafted is None)
            assert one.share_right is None or 0.3 < one.share_right < 0.95
    for target in TARGETS:
        assert HUB_ID.fullmatch(target)
        assert find_target(target) == target, "no two targets have one name"
    run = {layout for kind in BY_FILES for layout in kind.layouts}
    assert {"eagle", "eagle3", "language-model"} <= run & {row.layout for row in ROWS}
    assert {row.layout for row in ROWS if row.kind is None} > {"peagle"}


@pytest.mark.parametrize(
    ("model", "target"),
    [
        ("unsloth/Qwen3-8B-GGUF/Qwen3-8B-UD-Q4_K_XL.gguf", "Qwen/Qwen3-8B"),
        ("owner/some-name/Qwen3-8B-Q8_0-00001-of-00002.gguf", "Qwen/Qwen3-8B"),
        ("/models/qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B-Base"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "Qwen/Qwen3-8B"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "meta-llama/Llama-3.1-8B-Instruct"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "meta-llama/Llama-3.1-8B-Instruct"),
        ("TheBloke/Llama-2-7B-Chat-GGUF", "meta-llama/Llama-2-7b-chat-hf"),
        ("google/gemma-4-12B-it-qat-q4_0-gguf", "google/gemma-4-12B-it"),
        ("owner/Qwen3-8B-of-my-own", None),
        ("", None),
    ],
)
def test_a_model_is_known_by_its_name(model: str, target: str | None) -> None:
    assert find_target(model) == target


def test_another_name_is_known_by_what_its_card_or_file_says(tmp_path: Path) -> None:
    def known(path: Path) -> str | None:
        return find_target(str(path), ModelFiles(str(path)))

    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert known(folder) is None
    for text, model in (
        ("---\nbase_model: Qwen/Qwen3-4B\n---\n", "Qwen/Qwen3-4B"),
        ("---\nbase_model:\n- x/y\n- Qwen/Qwen3-4B\n---\nMine.\n", "Qwen/Qwen3-4B"),
        *(
            (text, None)
            for text in ("none", "---\nbase_model: 3\n---\n", "---\n- a\n---\n", "---\n: [\n---\n")
        ),
    ):
        (folder / "README.md").write_text(text)
        assert known(folder) == model
    stated = {"general.base_model.0.repo_url": "https://huggingface.co/Qwen/Qwen3-8B"}
    made = make(tmp_path / "made", "llama")
    assert known(convert(made, tmp_path / "mine.gguf", metadata=stated)) == "Qwen/Qwen3-8B"


# ------------------------------------------------------------------------------------------- accepted lengths

CONCENTRATION = 2.0
"""As `bench.drafters`: the sum of the Beta distribution's parameters."""


@pytest.mark.parametrize("guesses", [1, 2, 3, 7])
@pytest.mark.parametrize("share", [0.2, 0.635, 0.9])
def test_a_share_is_that_of_the_chain_that_accepts_so_much(share: float, guesses: int) -> None:
    """Rounds are drawn: each guess is right by chance, and a wrong one ends its round."""
    assert share_right(chain_length(share, guesses), guesses) == pytest.approx(share, abs=1e-9)
    right = np.random.default_rng(guesses).random((40_000, guesses)) < share
    accepted = 1 + np.logical_and.accumulate(right, axis=1).sum(axis=1)
    assert share_right(float(accepted.mean()), guesses) == pytest.approx(share, abs=0.01)


def test_what_cannot_be_told_is_none() -> None:
    assert share_right(2.0, None) is None
    assert share_right(2.0, "a tree of some other kind") is None
    for length, guesses in ((1.0, 3), (4.0, 3), (4.5, 3)):
        assert share_right(length, guesses) is None, "no chain of three accepts that"
    assert share_right(7.0, EAGLE_2_TREE) is None
    assert share_right(1.5, EAGLE_2_TREE) is None


def tree_length(chance: np.random.Generator, share: float) -> float:
    """What EAGLE-2's tree of a synthetic drafter accepts: the values of its nodes, and the target's token."""
    beam, values = np.ones(1), []
    for _ in range(6):
        sure = chance.beta(CONCENTRATION * share, CONCENTRATION * (1 - share), len(beam)).clip(0.005, 0.995)
        children = (beam * sure)[:, None] * (1 - sure)[:, None] ** np.arange(10)
        values.append(children.ravel())
        beam = np.sort(children.ravel())[-10:]
    return 1 + float(np.sort(np.concatenate(values))[-59:].sum())


@pytest.mark.parametrize(("share", "length"), EAGLE_2_LENGTHS)
def test_the_lengths_of_eagle_2s_tree_are_those_of_trees_that_are_drawn(share: float, length: float) -> None:
    chance = np.random.default_rng(7)
    drawn = [tree_length(chance, share) for _ in range(3000)]
    assert length == pytest.approx(np.mean(drawn), abs=0.01 + 4 * np.std(drawn) / len(drawn) ** 0.5)
    assert share_right(length, EAGLE_2_TREE) == pytest.approx(share)


def test_what_eagle_2_publishes_gives_the_share_that_its_testbed_was_set_to() -> None:
    """Of Llama-2-chat-7B; see configs/experiments/paper.toml."""
    assert share_right(4.6, EAGLE_2_TREE) == pytest.approx(0.635, abs=0.01)


# -------------------------------------------------------------------------------------- what is here and used

TARGET = "meta-llama/Llama-2-7b-chat-hf"
HEAD = "yuhuili/EAGLE-llama2-chat-7B"
SMALL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def put(hub_cache: Path, repository: str, files: dict[str, bytes]) -> None:
    owner, name = repository.split("/")
    put_into_cache(hub_cache, name, "1" * 40, files, owner)


def of(found: list[Candidate], name: str) -> Candidate:
    return next(each for each in found if each.row.name == name)


def test_what_is_in_the_cache_and_fits_is_taken(hub_cache: Path, known_model: str) -> None:
    put(hub_cache, SMALL, content(DEMO_FOLDER / "draft"))
    target, found = find_candidates(known_model)
    assert target == TARGET
    assert [each.row.name for each in found if each.is_here] == [SMALL]
    assert best_here(found) == SMALL
    put(hub_cache, HEAD, content(DEMO_FOLDER / "eagle"))
    _, found = find_candidates(known_model)
    assert best_here(found) == HEAD, "it costs less and is right more often"
    assert of(found, HEAD).row.acceptance == pytest.approx(0.63, abs=0.01)
    used = choose_drafter(Decoding(), known_model, None)
    assert (used.drafters, used.is_default) == ((HEAD, FALLBACK), True)
    alone = choose_drafter(Decoding(method="tree-sd"), known_model, None)
    assert alone.drafters == (HEAD,), "it makes use of one"


def test_what_does_not_fit_is_left_out_with_a_reason(
    hub_cache: Path, known_model: str, tmp_path: Path
) -> None:
    put(hub_cache, HEAD, content(make_head(tmp_path / "head")))
    drafter = content(DEMO_FOLDER / "draft")
    drafter["tokenizer.json"] = drafter["tokenizer.json"].replace(b'"the"', b'"eht"')
    assert drafter["tokenizer.json"] != content(DEMO_FOLDER / "draft")["tokenizer.json"]
    put(hub_cache, SMALL, drafter)
    _, found = find_candidates(known_model)
    assert f"EAGLE head {HEAD!r} is for another model: expected " in of(found, HEAD).refusal
    assert "has another tokenizer than model" in of(found, SMALL).refusal
    assert best_here(found) is None
    assert choose_drafter(Decoding(), known_model, None) == Decoding()


def test_what_is_given_counts_more(hub_cache: Path, known_model: str, tmp_path: Path) -> None:
    put(hub_cache, HEAD, content(DEMO_FOLDER / "eagle"))
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        'device = [{ address = "127.0.0.1:1" }]\ndrafter = [{ model = "ngram", device = "head" }]\n'
    )
    for decoding, path in (
        (Decoding(drafters=("ngram",)), None),
        (Decoding(drafters=("none",)), None),
        (Decoding(method="ar"), None),
        (Decoding(method="specrouter", chain=AUTO), None),
        (Decoding(), cluster),
    ):
        assert choose_drafter(decoding, known_model, path) == decoding


@dataclass(frozen=True)
class Opened:
    """What is asked here of a cluster: a session, which is its decoding."""

    plan: ClusterPlan
    files: None = None
    config: None = None

    def session(self, own: Decoding, *_: Any, **__: Any) -> contextlib.AbstractContextManager[Decoding]:
        return contextlib.nullcontext(own)


def test_n_grams_stand_in_where_the_model_does_not_fit_beside_one(
    hub_cache: Path, known_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only there: what the user named is refused with the model."""
    put(hub_cache, SMALL, content(DEMO_FOLDER / "draft"))
    opened: list[tuple[str, ...]] = []

    @contextlib.contextmanager
    def open_cluster(
        options: ClusterOptions, check: object, meanwhile: object, decoding: Decoding, *_: Any, **__: Any
    ) -> Iterator[Any]:
        opened.append(decoding.drafters)
        if SMALL in decoding.drafters:
            raise ModelDoesNotFitError("too large", [], [])
        yield Opened(ClusterPlan(model="m", fingerprint="", dtype="float32", context=8, stages=()))

    monkeypatch.setattr(session, "open_cluster", open_cluster)
    options = ClusterOptions(model=known_model, local=1)
    told: list[str] = []
    recovery = RecoveryOptions(on_note=told.append)
    taken = Decoding(drafters=(SMALL, FALLBACK), is_default=True)
    with session.open_session(options, taken, lambda *_: None, recovery_options=recovery) as own:
        assert own == Decoding(drafters=("ngram",))
    assert opened == [(SMALL, "ngram"), ("ngram",)]
    assert told == [f"drafter {SMALL} is left out: with it the model does not fit"]
    given = Decoding(drafters=(SMALL,))
    with (
        pytest.raises(ModelDoesNotFitError),
        session.open_session(options, given, lambda *_: None, recovery_options=recovery),
    ):
        pass


def test_the_hub_is_not_asked_for_what_nobody_named(
    hub_cache: Path, known_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub_cache, HEAD, content(DEMO_FOLDER / "eagle"))
    asked: list[str] = []
    download = huggingface_hub.hf_hub_download

    def watched(repository: str, name: str, *, local_files_only: bool) -> str:
        asked.extend([] if local_files_only else [name])
        return download(repository, name, local_files_only=True)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", watched)
    decoding = choose_drafter(Decoding(), known_model, None)
    decoding.check(known_model)
    shape = shape_of(ModelFiles(known_model).spec, known_model)
    planned = drafter_inputs(decoding.drafters, {}, shape, may_fetch=decoding.may_fetch).planned
    assert planned is not None
    assert asked == []
    Decoding(drafters=(HEAD,)).check(known_model)
    assert {*asked} == {"config.json"}
