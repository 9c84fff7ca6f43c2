"""Which published drafters go with a model, which are in the cache, which fit, and which one is taken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from flowspec.draft.choosing import (
    Candidate,
    Candidates,
    best_download,
    best_here,
    candidates,
    on_equal_devices,
    without_model,
)
from flowspec.draft.kinds import FALLBACK
from flowspec.model.files import DEMO_FOLDER
from flowspec.plan.placement import ClusterPlan
from flowspec.plan.refusal import ModelDoesNotFitError
from flowspec.runtime import session
from flowspec.runtime.decoding import AUTO, Decoding
from flowspec.runtime.default_drafter import taken_for
from flowspec.runtime.planning.plan_inputs import drafter_inputs
from flowspec.runtime.session import ClusterOptions, RecoveryOptions
from tests.draft.heads import make_head
from tests.model.test_files import put_into_cache

TARGET = "meta-llama/Llama-2-7b-chat-hf"
HEAD = "yuhuili/EAGLE-llama2-chat-7B"
SMALL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def put(hub_cache: Path, repository: str, files: dict[str, bytes]) -> None:
    owner, name = repository.split("/")
    put_into_cache(hub_cache, name, "1" * 40, files, owner)


def of(found: Candidates, name: str) -> Candidate:
    return next(each for each in found.found if each.name == name)


def test_what_is_in_the_cache_and_fits_is_taken(hub_cache: Path, known_model: str) -> None:
    put(hub_cache, SMALL, content(DEMO_FOLDER / "draft"))
    found = candidates(known_model)
    assert found.target is not None
    assert found.target.model == TARGET
    assert found.shape is not None
    assert found.shape.layers == 8, "the model's own, not that of the one it is named after"
    assert [each.name for each in found.found if each.is_here] == [SMALL]
    assert best_here(found) == of(found, SMALL)
    put(hub_cache, HEAD, content(DEMO_FOLDER / "eagle"))
    found = candidates(known_model)
    assert best_here(found) == of(found, HEAD), "it costs less and is right more often"
    planned = of(found, HEAD).planned
    assert planned is not None
    assert planned.acceptance == of(found, HEAD).row.acceptance == pytest.approx(0.63, abs=0.01)
    taken = taken_for(Decoding(), known_model, None)
    assert taken.drafter == of(found, HEAD)
    assert (taken.decoding.drafters, taken.decoding.is_default) == ((HEAD, FALLBACK), True)
    alone = taken_for(Decoding(method="tree-sd"), known_model, None).decoding
    assert alone.drafters == (HEAD,), "it makes use of one"


def test_what_does_not_fit_is_left_out_with_a_reason(
    hub_cache: Path, known_model: str, tmp_path: Path
) -> None:
    put(hub_cache, HEAD, content(make_head(tmp_path / "head")))
    drafter = content(DEMO_FOLDER / "draft")
    drafter["tokenizer.json"] = drafter["tokenizer.json"].replace(b'"the"', b'"eht"')
    assert drafter["tokenizer.json"] != content(DEMO_FOLDER / "draft")["tokenizer.json"]
    put(hub_cache, SMALL, drafter)
    found = candidates(known_model)
    assert f"EAGLE head {HEAD!r} is for another model: expected " in of(found, HEAD).refusal
    assert "has another tokenizer than model" in of(found, SMALL).refusal
    assert best_here(found) is None
    assert taken_for(Decoding(), known_model, None).decoding == Decoding()


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
        taken = taken_for(decoding, known_model, path)
        assert (taken.decoding, taken.drafter, taken.candidates.found) == (decoding, None, ())


def test_the_download_that_would_help_is_one_that_runs_and_of_which_something_is_published(
    hub_cache: Path,
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
    put(hub_cache, best.name, {"config.json": b"{}"})
    other = best_download(candidates("Qwen/Qwen3-4B"), rate, now)
    assert other is None or other[0].name != best.name, "it is here, whatever it is"


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
    decoding = taken_for(Decoding(), known_model, None).decoding
    decoding.check(known_model)
    shape = candidates(known_model).shape
    assert shape is not None
    planned = drafter_inputs(decoding.drafters, {}, shape, may_fetch=decoding.may_fetch).planned
    assert planned is not None
    assert asked == []
    Decoding(drafters=(HEAD,)).check(known_model)
    assert {*asked} == {"config.json"}
