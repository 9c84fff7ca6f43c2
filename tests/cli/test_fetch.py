"""`flowspec fetch`: what a repository has, and the download, from a hub on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from huggingface_hub import constants

from flowspec.errors import InputError
from flowspec.model.files import ModelFiles
from flowspec.model.hub import CHECKPOINT, choices_of, chosen
from tests.checkpoints import make_variant
from tests.cli.running import Ended, Run
from tests.ggufs import convert, make
from tests.hub import MODEL, FakeHub


def test_choices_are_named_as_people_name_them() -> None:
    sizes = {
        **dict.fromkeys(
            ("m-Q4_K_M.gguf", "m.q8_0.gguf", "M-IQ4_NL.gguf", "x/m-BF16.gguf", "mmproj-F16.gguf"), 5
        ),
        **dict.fromkeys(("m-Q6_K-00001-of-00002.gguf", "m-Q6_K-00002-of-00002.gguf"), 4),
        "m-Q5_K_M-00001-of-00002.gguf": 9,
        **{"odd.gguf": 1, "config.json": 1, "model.safetensors": 50, "original/model.safetensors": 50},
        **{"tokenizer.json": 2, "README.md": 7, "consolidated.safetensors": 60, "huge.json": 1 << 40},
    }
    found = choices_of(MODEL, sizes)
    assert [choice.name for choice in found] == [
        *("odd", "IQ4_NL", "Q4_K_M", "Q8_0", "BF16", "Q6_K"),
        CHECKPOINT,
    ]
    assert found[-1].model == MODEL
    assert found[-1].sizes == {"config.json": 1, "tokenizer.json": 2, "model.safetensors": 50}
    assert found[5].model == f"{MODEL}/m-Q6_K-00001-of-00002.gguf"
    assert (found[5].size_bytes, found[4].model) == (8, f"{MODEL}/x/m-BF16.gguf")
    assert chosen(found, None, MODEL).name == "Q4_K_M"
    assert chosen(found, "q6_k", MODEL) is found[5]
    assert chosen(found, "checkpoint", MODEL) is found[-1]
    for quant, given, expected in (
        ("Q2_K", found, "has no Q2_K; expected --quant with one of odd, IQ4_NL, Q4_K_M"),
        (None, found[3:5], "expected --quant with one of Q8_0, BF16"),
        ("Q8_0", [found[3], found[3]], f"several files of Q8_0: give one of {MODEL}/m.q8_0.gguf"),
    ):
        with pytest.raises(InputError) as caught:
            chosen(given, quant, MODEL)
        assert expected in str(caught.value)
    assert chosen(found[3:4], None, MODEL) is found[3]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    (tmp_path / "served").mkdir()
    hub = FakeHub(tmp_path / "served")
    yield hub
    hub.close()


@pytest.fixture
def fetch(hub: FakeHub, hub_cache: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, for which the hub is the one that serves."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    set_hub(monkeypatch, hub.address)

    def fetch(*words: str, status: int = 0, offline: bool = False) -> Ended:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        return run("fetch", *words, status=status)

    return fetch


def set_hub(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    place = address + constants.HUGGINGFACE_CO_URL_TEMPLATE.partition(".co")[2]
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)


def test_a_gguf_file_is_looked_at_chosen_and_fetched(
    hub: FakeHub, fetch: Run, hub_cache: Path, tmp_path: Path
) -> None:
    folder, asked = hub.folder, hub.asked
    checkpoint = make(tmp_path / "checkpoint", "llama-tied")
    for kind in (GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_0):
        convert(checkpoint, folder / f"small-{kind.name}.gguf", kind)
    listed = fetch(MODEL, "--list")
    assert listed.err == ""
    rows = [line.split() for line in listed.out.splitlines()[3:]]
    assert [row[:2] for row in rows] == [["Q4_0", "1"], ["Q8_0", "1"]]
    listed = fetch(MODEL, "--list", "--json").json
    assert [choice["name"] for choice in listed["choices"]] == ["Q4_0", "Q8_0"]
    assert listed["choices"][0]["size_bytes"] == (folder / "small-Q4_0.gguf").stat().st_size
    assert (listed["chosen"], asked) == (None, [])
    found = fetch(MODEL, "--json").json
    assert (found["chosen"], found["model"]) == ("Q4_0", f"{MODEL}/small-Q4_0.gguf")
    cached = list(hub_cache.glob("models--owner--name/snapshots/*/*.gguf"))
    assert [path.name for path in cached] == ["small-Q4_0.gguf"]
    assert cached[0].read_bytes() == (folder / "small-Q4_0.gguf").read_bytes()
    before = len(asked)
    again = fetch(f"{MODEL}/small-Q4_0.gguf")
    assert again.out.endswith(f"here; use it with --model {MODEL}/small-Q4_0.gguf\n")
    assert asked[before:] == [], "it was here"
    fetch(f"{MODEL}/small-Q4_0.gguf", offline=True)
    lacking = fetch(f"{MODEL}/small-Q8_0.gguf", offline=True, status=1)
    assert lacking.out == ""
    assert "there is no small-Q8_0.gguf in" in lacking.err
    assert fetch(MODEL, offline=True).out == f"here; use it with --model {MODEL}/small-Q4_0.gguf\n"
    told = fetch(MODEL, "--quant", "Q8_0", "--json", offline=True, status=1).json
    assert (told["models"], told["missing"]) == ([], ["GGUF file of Q8_0"])


def test_a_checkpoint_is_fetched_without_what_no_model_needs(
    hub: FakeHub, fetch: Run, hub_cache: Path
) -> None:
    folder, asked = hub.folder, hub.asked
    make_variant(folder, "llama-grouped")
    (folder / "README.md").write_text("no")
    fetch(MODEL)
    assert "README.md" not in asked
    (snapshot,) = hub_cache.glob("models--owner--name/snapshots/*")
    assert len(set(ModelFiles(str(snapshot)).tensors())) > 10
    assert fetch(MODEL, offline=True).out == f"here; use it with --model {MODEL}\n"


def test_what_does_not_fit_the_disk_is_refused_before_anything_is_fetched(
    hub: FakeHub, fetch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_variant(hub.folder, "llama-grouped")
    little = shutil.disk_usage("/")._replace(free=1 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: little)
    refused = fetch(MODEL, status=2)
    assert "0 MiB may be used on the disk of" in refused.err
    assert "set HF_HOME to another disk" in refused.err
    assert not [name for name in hub.asked if name.endswith(".safetensors")]


def test_what_the_hub_does_not_have_or_a_hub_that_is_not_reached_is_named(
    fetch: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {
        ("owner/other",): "there is no model 'owner/other' on the hub",
        (f"{MODEL}/x.gguf",): f"'{MODEL}' on the hub has no x.gguf, or not all parts of it",
        (MODEL, "--list"): f"if it is an EAGLE head in .bin, --drafter {MODEL} downloads it",
        (MODEL, "--quant", "Q4_0"): "has no safetensors and no GGUF files",
    }
    for words, expected in wanted.items():
        ended = fetch(*words, status=2)
        (line,) = ended.told
        assert (ended.out, expected in line) == ("", True)
    set_hub(monkeypatch, "http://127.0.0.1:9")
    (line,) = fetch(MODEL, status=2).told
    assert f"cannot ask the hub for '{MODEL}': " in line
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)  # it tries for half a minute
    with pytest.raises(InputError, match="hub cannot be reached; connect this machine, or give a model"):
        ModelFiles(MODEL).raw_config()
