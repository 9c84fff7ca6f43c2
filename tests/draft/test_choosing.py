"""Which published drafters go with a model, which are in the cache, which fit, and which one is taken."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from flowspec.draft.choosing import (
    Candidate,
    Candidates,
    best_download,
    best_here,
    candidates,
    on_equal_devices,
    published_acceptance,
    without_model,
)
from flowspec.model.files import BUNDLED, DEMO_FOLDER, bundled_models
from flowspec.plan.refusal import ModelDoesNotFitError
from flowspec.runtime import session
from flowspec.runtime.decoding import AUTO, Decoding
from flowspec.runtime.default_drafter import taken_for
from flowspec.runtime.planning.plan_inputs import drafter_inputs
from flowspec.runtime.session import ClusterOptions, RecoveryOptions
from tests.draft.heads import make_head
from tests.model.test_hub import put_into_cache

TARGET = "meta-llama/Llama-2-7b-chat-hf"
HEAD = "yuhuili/EAGLE-llama2-chat-7B"
SMALL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def target(tmp_path: Path) -> str:
    """The bundled model under the name of one that drafters are published for."""
    return str(shutil.copytree(DEMO_FOLDER / "target", tmp_path / "Llama-2-7b-chat-hf"))


def put(cache: Path, repository: str, files: dict[str, bytes]) -> None:
    owner, name = repository.split("/")
    put_into_cache(cache, name, "1" * 40, files, owner)


def of(found: Candidates, name: str) -> Candidate:
    return next(each for each in found.found if each.name == name)


def test_what_is_in_the_cache_and_fits_is_taken(cache: Path, target: str) -> None:
    put(cache, SMALL, content(DEMO_FOLDER / "draft"))
    found = candidates(target)
    assert found.target is not None
    assert found.target.model == TARGET
    assert found.shape is not None
    assert found.shape.layers == 8, "the model's own, not that of the one it is named after"
    assert [each.name for each in found.found if each.is_here] == [SMALL]
    assert best_here(found) == of(found, SMALL)
    put(cache, HEAD, content(DEMO_FOLDER / "eagle"))
    found = candidates(target)
    assert best_here(found) == of(found, HEAD), "it costs less and is right more often"
    planned = of(found, HEAD).planned
    assert planned is not None
    assert planned.acceptance == of(found, HEAD).row.acceptance == pytest.approx(0.63, abs=0.01)
    taken = taken_for(Decoding(), target, None)
    assert taken.drafter == of(found, HEAD)
    assert (taken.decoding.drafters, taken.decoding.is_default) == ((HEAD,), True)


def test_what_does_not_fit_is_left_out_with_a_reason(cache: Path, target: str, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    put(cache, HEAD, content(make_head(tmp_path / "head", "eagle")))
    drafter = content(DEMO_FOLDER / "draft")
    drafter["tokenizer.json"] = drafter["tokenizer.json"].replace(b'"the"', b'"eht"')
    assert drafter["tokenizer.json"] != content(DEMO_FOLDER / "draft")["tokenizer.json"]
    put(cache, SMALL, drafter)
    found = candidates(target)
    assert f"EAGLE head {HEAD!r} is for another model: expected " in of(found, HEAD).refusal
    assert "has another tokenizer than model" in of(found, SMALL).refusal
    assert best_here(found) is None
    assert taken_for(Decoding(), target, None).decoding == Decoding()


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
def test_half_a_drafter_is_none(cache: Path, target: str, missing: str) -> None:
    files = content(DEMO_FOLDER / "eagle")
    del files[missing]
    put(cache, HEAD, files)
    found = candidates(target)
    assert of(found, HEAD).is_here == (missing != "config.json")
    assert best_here(found) is None


def test_a_layout_that_no_kind_runs_is_told(cache: Path) -> None:
    found = candidates("Qwen/Qwen3-8B")
    assert of(found, "RedHatAI/Qwen3-8B-speculator.peagle").refusal == "FlowSpec does not run peagle yet"
    assert of(found, "RedHatAI/Qwen3-8B-speculator.peagle").planned is None


def test_what_is_given_counts_more(cache: Path, target: str, tmp_path: Path) -> None:
    put(cache, HEAD, content(DEMO_FOLDER / "eagle"))
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
        taken = taken_for(decoding, target, path)
        assert (taken.decoding, taken.drafter, taken.candidates.found) == (decoding, None, ())


@pytest.mark.parametrize("model", [BUNDLED, *bundled_models(), "owner/unknown", "/no/such/folder", "x.gguf"])
def test_other_models_have_what_they_had(cache: Path, model: str) -> None:
    assert candidates(model) == Candidates()
    assert taken_for(Decoding(), model, None).decoding == Decoding()


def test_the_download_that_would_help_is_one_that_runs_and_of_which_something_is_published(
    cache: Path,
) -> None:
    found = candidates("Qwen/Qwen3-4B")
    assert found.shape is not None
    rate, now = on_equal_devices(found.shape), without_model(found.shape)
    download = best_download(found, rate, now)
    assert download is not None
    best, gain = download
    assert best.name == "AngelSlim/Qwen3-4B_eagle3"
    assert rate(best.planned) / rate(now) == pytest.approx(1 + gain)
    assert rate(now) > rate(None), "n-grams beside plain decoding"
    assert best_download(found, rate, best.planned) is None, "no gain beside itself"
    put(cache, best.name, {"config.json": b"{}"})
    other = best_download(candidates("Qwen/Qwen3-4B"), rate, now)
    assert other is None or other[0].name != best.name, "it is here, whatever it is"


def test_a_plan_reckons_with_what_is_published() -> None:
    assert published_acceptance(HEAD, "owner/Llama-2-7B-Chat-GGUF") == pytest.approx(0.63, abs=0.01)
    assert published_acceptance(SMALL, TARGET) is None
    assert published_acceptance(HEAD, "owner/unknown") is None
    assert published_acceptance("ngram", TARGET) is None


def test_n_grams_stand_in_where_the_model_does_not_fit_beside_one(
    cache: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only there: what the user named is refused with the model."""
    put(cache, SMALL, content(DEMO_FOLDER / "draft"))
    opened: list[tuple[str, ...]] = []

    @contextlib.contextmanager
    def open_cluster(
        options: ClusterOptions, meanwhile: object, decoding: Decoding, **_: object
    ) -> Iterator[Any]:
        opened.append(decoding.drafters)
        if decoding.drafters == (SMALL,):
            raise ModelDoesNotFitError("too large", [], [])
        yield SimpleNamespace(session=lambda own, *_, **__: contextlib.nullcontext(own))

    monkeypatch.setattr(session, "open_cluster", open_cluster)
    options = ClusterOptions(model=target, local=1)
    told: list[str] = []
    recovery = RecoveryOptions(on_note=told.append)
    taken = Decoding(drafters=(SMALL,), is_default=True)
    with session.open_session(options, taken, lambda *_: None, recovery_options=recovery) as own:
        assert own == Decoding(drafters=("ngram",))
    assert opened == [(SMALL,), ("ngram",)]
    assert told == [f"drafter {SMALL} is left out: with it the model does not fit"]
    given = Decoding(drafters=(SMALL,))
    with (
        pytest.raises(ModelDoesNotFitError),
        session.open_session(options, given, lambda *_: None, recovery_options=recovery),
    ):
        pass


def test_the_hub_is_not_asked_for_what_nobody_named(
    cache: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, HEAD, content(DEMO_FOLDER / "eagle"))
    asked: list[str] = []
    download = huggingface_hub.hf_hub_download

    def watched(repository: str, name: str, *, local_files_only: bool) -> str:
        asked.extend([] if local_files_only else [name])
        return download(repository, name, local_files_only=True)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", watched)
    decoding = taken_for(Decoding(), target, None).decoding
    decoding.check(target)
    shape = candidates(target).shape
    assert shape is not None
    planned = drafter_inputs(decoding.drafters, {}, shape, may_fetch=decoding.may_fetch).planned
    assert planned is not None
    assert asked == []
    Decoding(drafters=(HEAD,)).check(target)
    assert {*asked} == {"config.json"}
