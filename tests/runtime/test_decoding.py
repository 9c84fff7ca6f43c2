"""Which models stand beside the target: what the flags and the cluster file mean together, and where each
runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.core.protocol import limits
from flowspec.draft.registry import FALLBACK, NONE
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles, bundled_models
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.runtime.cluster import Device
from flowspec.runtime.decoding import Decoding, method_for
from flowspec.runtime.drafters import PlacedDrafter
from flowspec.runtime.placing import assign_devices, open_drafters, own_devices
from tests.checkpoints import SMALL, make_checkpoint


def test_what_drafts_where_nothing_is_said() -> None:
    assert Decoding().drafters_for(BUNDLED) == (BUNDLED, FALLBACK)
    assert Decoding(drafters=(BUNDLED,)).drafters_for(BUNDLED) == (BUNDLED,), "what is named, and no more"
    assert Decoding(method="pipedec").drafters_for(BUNDLED) == (BUNDLED,), "it makes use of one"
    assert Decoding(method="specrouter").drafters_for(BUNDLED) == (BUNDLED,), "look-ups verify nothing"
    assert Decoding().drafters_for("some/model") == (FALLBACK,)
    assert Decoding().drafters_for(BUNDLED, ("draft-math", "mid")) == ("draft-math", "mid"), (
        "what the cluster file has devices for"
    )
    assert Decoding(drafters=("mid",)).drafters_for(BUNDLED, ("draft-math",)) == ("mid",)
    assert Decoding(method="ar", drafters=("mid",)).drafters_for(BUNDLED) == ()
    assert Decoding(drafters=(NONE,)).drafters_for(BUNDLED, ("draft-math",)) == ()
    for alone in ((), ("draft",), ("draft", "ngram", "suffix")):
        assert method_for(alone, None) == Decoding().method
    assert method_for(("draft", "ngram", "mid"), None) == "cosine", "it chooses between models"


def test_a_chain_is_in_the_order_given_or_by_size() -> None:
    chained = Decoding(method=method_for((), "auto"), chain="mid,draft")
    assert chained.drafters_for(BUNDLED) == ("mid", "draft")
    assert chained.levels(("mid", "draft")) == (0, 1)
    assert chained.method_options(("mid", "draft"))["chain"] == (0, 1)
    automatic = Decoding(method=chained.method, chain="auto")
    assert automatic.drafters_for(BUNDLED) == ("draft", "mid")
    assert "chain" not in automatic.method_options(("draft", "mid"))
    several = Decoding(method=chained.method, chain="auto", drafters=("mid", "ngram", "draft"))
    assert several.drafters_for(BUNDLED) == ("ngram", "draft", "mid"), "n-grams have no parameters"
    assert Decoding(chain="").drafters_for(BUNDLED) == (), "plain decoding"
    assert Decoding(drafters=("mid", "draft")).levels(("mid", "draft")) == (0, 0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Decoding(drafters=("draft", "bundled")), "'bundled' twice"),
        (Decoding(drafters=(NONE, "draft")), "drafters or none, got both"),
        (
            Decoding(drafters=tuple(f"d{each}" for each in range(limits.DRAFTERS_MAX + 1))),
            "at most 16 drafters",
        ),
        (Decoding(chain="draft,mid"), "--chain goes with method specrouter"),
        (Decoding(method="specrouter", chain="draft,mid", drafters=("draft",)), "leave out --drafter"),
    ],
    ids=range(5),
)
def test_names_that_do_not_go_together_are_one_line(wrong: Decoding, said: str) -> None:
    with pytest.raises(InputError, match=said):
        wrong.check(BUNDLED)


def test_models_that_are_shipped_have_bare_names_and_folders_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {"draft", "mid", "draft-math", "draft-code", "draft-plays"} <= set(bundled_models())
    shipped = ModelFiles("draft").fingerprint()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft").mkdir()
    make_checkpoint(tmp_path / "draft", "llama", {**SMALL, "num_hidden_layers": 2})
    assert ModelFiles("draft").fingerprint() != shipped
    with pytest.raises(InputError, match="no folder 'recipe'"):
        ModelFiles("recipe")


def test_several_models_have_local_daemons_of_their_own() -> None:
    spare = [Device(name=f"local-{number}", address="") for number in (2, 3)]
    assert [own_devices(names) for names in (("ngram", "draft"), ("draft", "ngram", "mid"))] == [0, 2]
    assert assign_devices(("draft", "ngram", "mid"), spare) == {"draft": spare[0], "mid": spare[1]}
    assert assign_devices(("draft",), spare) == {}, "daemons that are for another session's drafters"
    fixed = [Device(name="pi", address="", drafter="bundled")]
    assert assign_devices(("mid", "draft"), fixed) == {"draft": fixed[0]}


def plan() -> ClusterPlan:
    stage = StagePlan(name="a", address="h:1", first=0, end=8)
    vocabulary = ModelFiles(BUNDLED).config().vocab_size
    return ClusterPlan(
        model=BUNDLED, fingerprint="f", dtype="bfloat16", context=200, stages=(stage,), vocabulary=vocabulary
    )


def test_a_drafter_with_a_device_is_planned_for_it_and_not_loaded() -> None:
    pi = Device(name="pi", address="10.0.0.3:7700", drafter="draft-math")
    (drafter, here) = open_drafters(
        ("draft-math", "ngram"), ModelFiles(BUNDLED), plan(), Decoding(coupled=False), {"draft-math": pi}
    )
    assert isinstance(drafter, PlacedDrafter)
    assert not isinstance(here, PlacedDrafter)
    found = drafter.plan
    assert (found.model, found.context, found.dtype) == ("draft-math", 200, "bfloat16")
    assert found.stages == (StagePlan(name="pi", address="10.0.0.3:7700", first=0, end=found.layer_count),)
    assert found.drafting is not None
    assert (found.drafting.vocabulary, found.drafting.coupled) == (plan().vocabulary, False)


def test_a_drafter_that_cannot_run_on_a_device_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", SMALL)
    for name, said in (
        ("ngram", "ngram cannot run on pi"),
        ("eagle", "eagle cannot run on pi"),
        (str(tmp_path), "has another tokenizer than model 'bundled'"),
    ):
        pi = Device(name="pi", address="10.0.0.3:7700", drafter=name)
        with pytest.raises(InputError, match=said):
            open_drafters((name,), ModelFiles(BUNDLED), plan(), Decoding(), {name: pi})
