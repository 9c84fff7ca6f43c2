"""`flowspec plan`: text within 80 columns, its JSON twin, and refusals."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from flowspec.core.protocol.precision import CACHES
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.slice import Span
from flowspec.model.spec import spec_of
from flowspec.plan.memory import stage_memory
from flowspec.plan.shape import shape_of
from flowspec.rounding import duration, rounded
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.loading import slice_memory
from flowspec.runtime.plan_inputs import counted_weights
from tests.cli.running import Run

FIVE = ["--shape", "llama-2-7b", "--devices", "5x jetson-orin-nano", "--link", "150/0.5"]


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_a_plan_for_people_and_the_same_for_programs(run: Run) -> None:
    text = run("plan", *FIVE, "--layers", "6,6,6,7,7").out
    assert max(map(len, text.splitlines())) <= 80
    for part in ("limited by", "would help", "assumed", "by hand, 6,6,6,7,7"):
        assert part in text
    found = run("plan", *FIVE, "--layers", "6,6,6,7,7", "--json").json
    assert found["fits"]
    assert [stage["layers"][1] for stage in found["stages"]][-1] == 32
    assert all(stage["total_bytes"] <= stage["memory_bytes"] for stage in found["stages"])
    assert found["tokens_per_s"] >= found["by_hand"]["tokens_per_s"]
    assert f"forecast: {found['tokens_per_s']:.3g} tokens/s" in text
    assert found["would_help"][0]["gain"] > 0
    assert [*found["first_token_s"]] == ["512", "4000"], "the context has no room for more"
    assert f"first token of an answer: {duration(found['first_token_s']['512'])} after 512, " in text
    assert found["assumptions"]


def test_a_plan_says_what_the_memory_that_it_needs_is_made_of(run: Run) -> None:
    args = ("--drafter=none", "--devices", "old-laptop")
    (stage,) = run("plan", *args, "--json").json["stages"]
    (told,) = re.findall(r"needs: (.*) for the head, too", run("plan", *args).words)
    sizes = [int(size) << 20 for size in re.findall(r"(\d+) MiB", told)]
    assert stage["total_bytes"] == stage["weight_bytes"] + stage["cache_bytes"] + sum(sizes)


def test_where_guessing_does_not_pay_a_plan_says_what_the_default_method_does(run: Run) -> None:
    args = ("--devices", "old-laptop", "--drafter=ngram", "--acceptance=.01")
    assert not run("plan", *args, "--json").json["guessing_pays"]
    told = run("plan", *args).words
    assert "the forecast is for --method ar; continuous, the default, tries guesses and does without" in told


def test_a_plan_stands_beside_the_best_of_one_device_and_an_eagle_head(run: Run) -> None:
    args = ("--shape", "llama-3-8b", "--dtype", "int4", "--drafter", "ngram")
    found = run("plan", *args, "--devices", "3x raspberry-pi-5", "--json").json
    one = run("plan", *args, "--devices", "raspberry-pi-5", "--json").json
    head = run("plan", *args[:-1], "eagle", "--devices", "3x raspberry-pi-5", "--json").json
    assert (found["alone"]["board"], one["alone"]) == ("raspberry-pi-5", None)
    assert found["alone"]["tokens_per_s"] == one["tokens_per_s"]
    (eagle,) = [each for each in found["would_help"] if each["change"].startswith("--drafter eagle")]
    assert eagle["tokens_per_s"] == pytest.approx(head["tokens_per_s"])
    assert not any("--drafter eagle" in each["change"] for each in head["would_help"])
    text = run("plan", *args, "--devices", "3x raspberry-pi-5").out
    times = rounded(found["tokens_per_s"] / one["tokens_per_s"])
    how = "without guesses" if found["alone"]["drafter"] is None else "with ngram"
    alone = f"alone: one raspberry-pi-5 {how} gives {rounded(one['tokens_per_s'])} tokens/s; the plan is "
    assert f"{alone}{times} times" in " ".join(text.split())
    assert "--drafter eagle, a head that is right at 63.5% " in text
    assert max(map(len, text.splitlines())) <= 80
    large = run("plan", "--shape", "llama-3-8b", "--devices", "4x raspberry-pi-5").out
    assert "\nalone: the model fits none of the devices by itself\n" in large


def test_one_device_alone_guesses_with_what_has_room_there(run: Run) -> None:
    """One Orin Nano holds Llama 3 8B in 4 bits, and no EAGLE head beside it."""
    args = ("--shape", "llama-3-8b", "--dtype", "int4", "--devices")
    five = run("plan", *args, "5x jetson-orin-nano", "--drafter", "eagle", "--json").json
    one = run("plan", *args, "jetson-orin-nano", "--drafter", "ngram", "--json").json
    assert five["alone"]["drafter"] == "ngram"
    assert five["alone"]["no_room_for"] == "eagle-llama-3-8b"
    assert five["alone"]["tokens_per_s"] == one["tokens_per_s"]
    text = run("plan", *args, "5x jetson-orin-nano", "--drafter", "eagle").words
    assert "eagle-llama-3-8b has no room there beside the model" in text
    alone = run("plan", *args, "jetson-orin-nano", "--drafter", "eagle").words
    assert "eagle-llama-3-8b has no room beside the model: the forecast is for --method ar" in alone


def test_a_plan_names_tensor_parallelism_where_it_would_win(run: Run) -> None:
    args = ("--shape", "llama-3-8b", "--devices", "4x raspberry-pi-5", "--drafter", "ngram")
    found = run("plan", *args, "--dtype", "int4", "--json").json
    cut = found["tensor_parallel"]
    assert cut["boards"] == 4
    assert cut["times"] == pytest.approx(cut["tokens_per_s"] / found["tokens_per_s"])
    assert cut["times"] > 1.5
    text = run("plan", *args, "--dtype", "int4").words
    assert f"{rounded(cut['tokens_per_s'])} tokens/s, {rounded(cut['times'])} times the plan's" in text
    slow = (*args, "--dtype", "int4", "--link", "50/20")
    assert run("plan", *slow, "--json").json["tensor_parallel"]["times"] < 1
    assert "tensor parallelism" not in run("plan", *slow).out
    for other in (("--dtype", "float16"), ("--dtype", "int4", "--users", "2")):
        assert run("plan", *args, *other, "--json").json["tensor_parallel"] is None


def test_a_model_that_does_not_fit_is_refused_with_what_would(run: Run) -> None:
    args = ("--shape", "llama-2-13b", "--devices", "jetson-orin-nano,raspberry-pi-5")
    text = run("plan", *args, status=1).out
    assert text.startswith("llama-2-13b does not fit the devices in float16:")
    assert max(map(len, text.splitlines())) <= 80
    found = run("plan", *args, "--json", status=1).json
    assert not found["fits"]
    assert any(each["short_bytes"] > 0 for each in found["devices"])
    changes = [each["change"] for each in found["would_fit"]]
    assert "int4" in changes
    assert all(change in text for change in changes)
    run("plan", *args, "--dtype", "int4")


def test_a_cluster_file_names_boards_memory_and_layers(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    device = '[[device]]\nname = "{0}"\naddress = "{0}:7700"\nprofile = "raspberry-pi-5"\n{1}\n'
    file.write_text(device.format("a", 'memory = "1GiB"') + device.format("b", ""))
    asked = ("plan", "--json", f"--cluster={file}")
    found = run(*asked, "--offline", "--head=a", "--link=a:b=10/3").json
    assert found["model"] == BUNDLED
    assert found["head"]["device"] == "a"
    assert {stage["device"]: stage["memory_bytes"] for stage in found["stages"]}.get("a", 1 << 30) == 1 << 30
    assert run(*asked, "--devices", "2x raspberry-pi-4").json["stages"][0]["board"] == "raspberry-pi-4"
    file.write_text(device.format("a", "layers = [0, 3]") + device.format("b", "layers = [3, 8]"))
    args = ("--cluster", str(file), "--offline")
    found = run("plan", *args, "--json").json
    assert [stage["layers"] for stage in found["by_hand"]["stages"]] == [[0, 3], [3, 8]]
    text = run("plan", *args).out
    assert "\nby hand, 3,5\n" in text
    assert "\nchat runs the layers by hand, which are those of\n" in text
    given = run("plan", *args, "--layers", "4,4", "--json").json
    assert [stage["layers"] for stage in given["by_hand"]["stages"]] == [[0, 4], [4, 8]]
    (line,) = run("plan", *args, "--model", "llama-3.2-1b", status=2).told
    assert "--shape llama-3.2-1b" in line
    (line,) = run("plan", *args, "--shape", "llama-3.2-1b", status=2).told
    assert "the devices hold 8 layers together, but the model has 16" in line


def test_a_plan_of_a_cluster_file_says_what_a_head_does_without_each_device(run: Run, tmp_path: Path) -> None:
    table = '[[device]]\nname = "{}"\naddress = "{}:7700"\nprofile = "raspberry-pi-5"\nmemory = "{}"\n'
    for names, fits in (("abc", True), ("ab", False)):
        file = tmp_path / f"{names}.toml"
        sizes = {**dict.fromkeys(names, "2GiB"), "head": "600MiB"}
        file.write_text("".join(table.format(name, name, size) for name, size in sizes.items()))
        args = ["--shape=llama-3.2-1b", f"--cluster={file}", "--offline", "--context=512", "--head=head"]
        args.append("--drafter=none")
        found = run("plan", *args, "--json").json
        assert [stage["device"] for stage in found["stages"]] == ["a", "b"]
        assert found["absent"]["was_asked"] is False
        without = found["absent"]["without"]
        assert [(each["device"], each["fits"]) for each in without] == [("a", fits), ("b", fits)]
        text = run("plan", *args).out
        assert max(map(len, text.splitlines())) <= 80
        if fits:
            assert without[0]["tokens_per_s"] == pytest.approx(found["tokens_per_s"]), "c does as well"
            expected = f"{without[0]['tokens_per_s']:.3g} tokens/s"
        else:
            expected = f"does not fit: the others lack {without[0]['short_bytes'] / (1 << 20):.0f} MiB"
        assert re.search(rf"^a +{re.escape(expected)}$", text, re.MULTILINE)
    assert run("plan", *FIVE, "--json").json["absent"] is None, "boards are not devices"


def test_memory_of_a_checkpoint_is_what_a_daemon_counts() -> None:
    files = ModelFiles(BUNDLED)
    shape = shape_of(spec_of(files.config()), BUNDLED)
    weights = counted_weights(files, shape)
    for (first, end), dtype, cache in itertools.product(
        ((0, 8), (0, 3), (3, 6), (6, 8)), ("float32", "bfloat16", "int8", "int4"), CACHES
    ):
        place = {"first": first == 0, "last": end == 8}
        ours = stage_memory(shape, weights, dtype, end - first, **place, context=512, users=1, cache=cache)
        daemons = slice_memory(files, Span(first=first, end=end, count=8), dtype, 512, cache=cache)
        if dtype == "float32":
            assert ours == daemons
        else:  # norms are counted among the matrices here
            assert ours.cache_bytes == daemons.cache_bytes
            assert ours.weight_bytes == pytest.approx(daemons.weight_bytes, rel=4e-3)


MIX = ["--shape", "llama-2-7b", "--link", "150/0.5"]


def test_a_device_that_is_left_out_comes_with_the_forecast_with_it(run: Run) -> None:
    devices = ["--devices", "3x jetson-orin-nano, raspberry-pi-5"]
    found = run("plan", *MIX, *devices, "--json").json
    assert found["not_used"] == ["raspberry-pi-5"]
    assert found["why_not_used"]["raspberry-pi-5"].startswith(
        f"the forecast is {rounded(found['tokens_per_s'])} tokens/s, "
    )
    every = run("plan", *MIX, *devices, "--all-devices", "--json").json
    assert every["not_used"] == []
    assert len(every["stages"]) == 4
    assert every["tokens_per_s"] < found["tokens_per_s"]


@pytest.mark.parametrize(
    "typed", [["4xjetson-orin-nano,2xraspberry-pi-5"], ["4x", "jetson-orin-nano,", "2x", "raspberry-pi-5"]]
)
def test_boards_are_counted_as_they_are_printed(typed: list[str], run: Run) -> None:
    text = run("plan", *MIX, "--devices", *typed).out
    assert "\ndevices: 4x jetson-orin-nano, 2x raspberry-pi-5\n" in text
    assert "2x raspberry-pi-5 are left out: " in text


@pytest.mark.parametrize(
    ("links", "told"),
    [
        ((), "links of 1000 Mbit/s and 0.5 ms; else give --link"),
        (("150",), "links of 150 Mbit/s and 0.5 ms; as you say"),
        (("150/2", "old-laptop:phone-arm=10/5"), "links of 150 Mbit/s and 2 ms, and one other; as you say"),
    ],
)
def test_a_plan_says_where_its_links_are_from(links: tuple[str, ...], told: str, run: Run) -> None:
    given = [f"--link={link}" for link in links]
    assert told in run("plan", "--devices", "old-laptop,", "phone-arm", *given).words


def test_what_a_plan_stands_on_is_told(run: Run) -> None:
    named = ("--shape=llama-2-7b", "--dtype=int4", "--devices", "2x jetson-orin-nano, old-laptop")
    assumed = run("plan", *named, "--drafter=eagle", "--all-devices", "--json").json["assumptions"]
    for part in ("int4 on jetson-orin-nano: ", "int4 on old-laptop: not measured", "63.5% of the drafter's"):
        assert any(part in each for each in assumed), part
    given = run("plan", *named, "--drafter=eagle", "--acceptance=0.7").words
    assert "70.0% of the drafter's best guesses are right; as you say" in given
    assert "the bundled toy" in run("plan", "--devices", "old-laptop").words


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--shape", "tinyllama-1.1b"], "drafter ngram, the default, 25.0% "),
        ([], "drafter bundled, the default, 58.0% "),
        (["--drafter", "eagle"], "drafter eagle, 63.5% "),
        (["--drafter", "none"], "drafter none\n"),
    ],
)
def test_the_drafter_is_chats_and_is_told(flags: list[str], expected: str, run: Run) -> None:
    assert f"\n{expected}" in run("plan", "--devices", "raspberry-pi-5", *flags).out
    model = "" if flags[:1] == ["--shape"] else BUNDLED
    names = Decoding(drafters=tuple(flags[1:]) if "--drafter" in flags else ()).drafters_for(model)
    found = run("plan", "--devices", "raspberry-pi-5", *flags, "--json").json
    assert found["drafters"] == list(names)
