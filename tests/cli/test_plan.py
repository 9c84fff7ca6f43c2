"""`flowspec plan`: text within 80 columns, its JSON twin, refusals, and wrong input in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flowspec.cli.main import main
from flowspec.core.protocol.precision import CACHES
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.slice import Span
from flowspec.plan.memory import stage_memory
from flowspec.plan.shape import shape_of
from flowspec.rounding import duration, rounded
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.loading import slice_memory
from flowspec.runtime.planning.plan_inputs import counted_weights

FIVE = ["--shape", "llama-2-7b", "--devices", "5x jetson-orin-nano", "--link", "150/0.5"]


def plan(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = main(["plan", *args])
    found = capsys.readouterr()
    return status, found.out, found.err


def test_a_plan_for_people_and_the_same_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, _ = plan(capsys, *FIVE, "--layers", "6,6,6,7,7")
    assert status == 0
    assert max(map(len, text.splitlines())) <= 80
    for part in ("forecast", "limited by", "would help", "assumed", "by hand, 6,6,6,7,7", "gigabit links"):
        assert part in text
    found = json.loads(plan(capsys, *FIVE, "--layers", "6,6,6,7,7", "--json")[1])
    assert found["fits"]
    assert [stage["layers"][1] for stage in found["stages"]][-1] == 32
    assert all(stage["total_bytes"] <= stage["memory_bytes"] for stage in found["stages"])
    assert found["tokens_per_s"] >= found["by_hand"]["tokens_per_s"]
    assert f"forecast: {found['tokens_per_s']:.3g} tokens/s" in text
    assert found["would_help"][0]["gain"] > 0
    assert [*found["first_token_s"]] == ["512", "4000"], "the context has no room for more"
    assert f"first token of an answer: {duration(found['first_token_s']['512'])} after 512, " in text
    assert found["assumptions"]


@pytest.mark.parametrize(
    ("links", "told"),
    [
        ((), "links of 1000 Mbit/s and 0.5 ms; else give --link"),
        (("150/2",), "links of 150 Mbit/s and 2 ms; as you say"),
        (("150",), "links of 150 Mbit/s, as you say, and 0.5 ms; else give --link MBIT/MS"),
        (
            ("old-laptop:phone-arm=10/5",),
            "links of 1000 Mbit/s and 0.5 ms; else give --link; one other as you say",
        ),
        (
            ("150/2", "old-laptop:phone-arm=10/5"),
            "links of 150 Mbit/s and 2 ms, and one other; as you say",
        ),
    ],
)
def test_a_plan_says_where_its_links_are_from(
    links: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"--link={link}" for link in links]
    assert told in " ".join(plan(capsys, "--devices", "old-laptop,", "phone-arm", *given)[1].split())


def test_a_plan_says_what_the_memory_that_it_needs_is_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--drafter=none", "--devices", "old-laptop")
    (stage,) = json.loads(plan(capsys, *args, "--json")[1])["stages"]
    told = " ".join(plan(capsys, *args)[1].split())
    parts = re.search(
        r"needs: weights, cache, (\d+) MiB to work in, (\d+) MiB for the daemon, .*; on old-laptop (\d+) MiB "
        r"for the head, too",
        told,
    )
    assert parts is not None
    sizes = [int(size) << 20 for size in parts.groups()]
    assert stage["total_bytes"] == stage["weight_bytes"] + stage["cache_bytes"] + sum(sizes)


def test_where_guessing_does_not_pay_a_plan_says_what_the_default_method_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ("--devices", "old-laptop", "--drafter=ngram", "--acceptance=.01")
    assert not json.loads(plan(capsys, *args, "--json")[1])["guessing_pays"]
    told = " ".join(plan(capsys, *args)[1].split())
    assert "the forecast is for --method ar; continuous, the default, tries guesses and does without" in told


def test_a_plan_stands_beside_the_best_of_one_device_and_an_eagle_head(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ("--shape", "llama-3-8b", "--dtype", "int4", "--drafter", "ngram")
    found = json.loads(plan(capsys, *args, "--devices", "3x raspberry-pi-5", "--json")[1])
    one = json.loads(plan(capsys, *args, "--devices", "raspberry-pi-5", "--json")[1])
    head = json.loads(plan(capsys, *args[:-1], "eagle", "--devices", "3x raspberry-pi-5", "--json")[1])
    assert (found["alone"]["board"], one["alone"]) == ("raspberry-pi-5", None)
    assert found["alone"]["tokens_per_s"] == one["tokens_per_s"]
    (eagle,) = [each for each in found["would_help"] if each["change"].startswith("--drafter eagle")]
    assert eagle["tokens_per_s"] == pytest.approx(head["tokens_per_s"])
    assert not any("--drafter eagle" in each["change"] for each in head["would_help"])
    text = plan(capsys, *args, "--devices", "3x raspberry-pi-5")[1]
    times = rounded(found["tokens_per_s"] / one["tokens_per_s"])
    how = "without guesses" if found["alone"]["drafter"] is None else "with ngram"
    alone = f"alone: one raspberry-pi-5 {how} gives {rounded(one['tokens_per_s'])} tokens/s; the plan is "
    assert f"{alone}{times} times" in " ".join(text.split())
    assert "--drafter eagle, a head that is right at 63.5% " in text
    assert max(map(len, text.splitlines())) <= 80
    large = plan(capsys, "--shape", "llama-3-8b", "--devices", "4x raspberry-pi-5")[1]
    assert "\nalone: the model fits none of the devices by itself\n" in large


def test_one_device_alone_guesses_with_what_has_room_there(capsys: pytest.CaptureFixture[str]) -> None:
    """One Orin Nano holds Llama 3 8B in 4 bits, and no EAGLE head beside it."""
    args = ("--shape", "llama-3-8b", "--dtype", "int4", "--devices")
    five = json.loads(plan(capsys, *args, "5x jetson-orin-nano", "--drafter", "eagle", "--json")[1])
    one = json.loads(plan(capsys, *args, "jetson-orin-nano", "--drafter", "ngram", "--json")[1])
    assert five["alone"]["drafter"] == "ngram"
    assert five["alone"]["no_room_for"] == "eagle-llama-3-8b"
    assert five["alone"]["tokens_per_s"] == one["tokens_per_s"]
    text = " ".join(plan(capsys, *args, "5x jetson-orin-nano", "--drafter", "eagle")[1].split())
    assert "alone: one jetson-orin-nano with ngram gives" in text
    assert "times as fast; eagle-llama-3-8b has no room there beside the model" in text
    alone = plan(capsys, *args, "jetson-orin-nano", "--drafter", "eagle")[1]
    assert "eagle-llama-3-8b has no room beside the model: the forecast is for --method ar" in " ".join(
        alone.split()
    )


def test_a_plan_names_tensor_parallelism_where_it_would_win(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--shape", "llama-3-8b", "--devices", "4x raspberry-pi-5", "--drafter", "ngram")
    found = json.loads(plan(capsys, *args, "--dtype", "int4", "--json")[1])
    cut = found["tensor_parallel"]
    assert cut["boards"] == 4
    assert cut["times"] == pytest.approx(cut["tokens_per_s"] / found["tokens_per_s"])
    assert cut["times"] > 1.5
    text = plan(capsys, *args, "--dtype", "int4")[1]
    said = (
        "tensor parallelism: distributed-llama on 4 of the boards would give "
        f"{rounded(cut['tokens_per_s'])} tokens/s, {rounded(cut['times'])} times the plan's"
    )
    assert said in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    slow = (*args, "--dtype", "int4", "--link", "50/20")
    assert json.loads(plan(capsys, *slow, "--json")[1])["tensor_parallel"]["times"] < 1
    assert "tensor parallelism" not in plan(capsys, *slow)[1]
    for other in (("--dtype", "float16"), ("--dtype", "int4", "--users", "2")):
        assert json.loads(plan(capsys, *args, *other, "--json")[1])["tensor_parallel"] is None


def test_a_plan_tells_of_a_board_that_flowspec_may_not_run_on(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--shape", "tinyllama-1.1b", "--devices")
    assert (
        "  jetson-xavier-nx: no torch that FlowSpec runs with" in plan(capsys, *args, "jetson-xavier-nx")[1]
    )
    assert "no torch" not in plan(capsys, *args, "jetson-orin-nx")[1]


def test_a_plan_tells_what_the_times_of_packed_weights_stand_on(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--shape", "tinyllama-1.1b", "--dtype", "int4", "--json", "--devices")
    (told,) = [
        each
        for each in json.loads(plan(capsys, *args, "jetson-orin-nano, old-laptop", "--all-devices")[1])[
            "assumptions"
        ]
        if each.startswith("int4 on jetson-orin-nano: ")
    ]
    assert "never run on this board" in told
    assumed = json.loads(plan(capsys, *args, "2x old-laptop", "--all-devices")[1])["assumptions"]
    assert any(each.startswith("int4 on old-laptop: not measured; ") for each in assumed)
    assert not any("on old-laptop:" in each for each in assumed if not each.startswith("int4"))


def test_a_model_that_does_not_fit_is_refused_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--shape", "llama-2-13b", "--devices", "jetson-orin-nano,raspberry-pi-5")
    status, text, _ = plan(capsys, *args)
    assert status == 1
    assert text.startswith("llama-2-13b does not fit the devices in float16:")
    assert max(map(len, text.splitlines())) <= 80
    found = json.loads(plan(capsys, *args, "--json")[1])
    assert not found["fits"]
    assert any(each["short_bytes"] > 0 for each in found["devices"])
    changes = [each["change"] for each in found["would_fit"]]
    assert "int4" in changes
    assert all(change in text for change in changes)
    assert plan(capsys, *args, "--dtype", "int4")[0] == 0


def test_a_cluster_file_names_boards_memory_and_layers(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[[device]]\nname = "a"\naddress = "a:7700"\nprofile = "raspberry-pi-5"\nmemory = "1GiB"\n'
        '[[device]]\nname = "b"\naddress = "b:7700"\nprofile = "raspberry-pi-5"\n'
    )
    found = json.loads(
        plan(
            capsys,
            "--cluster",
            str(file),
            "--offline",
            "--head",
            "a",
            "--link",
            "a:b=10/3",
            "--json",
        )[1]
    )
    assert found["model"] == BUNDLED
    assert found["head"]["device"] == "a"
    assert {stage["device"]: stage["memory_bytes"] for stage in found["stages"]}.get("a", 1 << 30) == 1 << 30
    assert (
        json.loads(plan(capsys, "--cluster", str(file), "--devices", "2x raspberry-pi-4", "--json")[1])[
            "stages"
        ][0]["board"]
        == "raspberry-pi-4"
    )


def test_layers_of_a_cluster_file_stand_beside_the_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.toml"
    device = '[[device]]\nname = "{0}"\naddress = "{0}:7700"\nprofile = "raspberry-pi-5"\nlayers = [{1}]\n'
    file.write_text(device.format("a", "0, 3") + device.format("b", "3, 8"))
    args = ("--cluster", str(file), "--offline")
    found = json.loads(plan(capsys, *args, "--json")[1])
    assert [stage["layers"] for stage in found["by_hand"]["stages"]] == [[0, 3], [3, 8]]
    text = plan(capsys, *args)[1]
    assert "\nby hand, 3,5\n" in text
    assert "\nchat runs the layers by hand, which are those of\n" in text
    given = json.loads(plan(capsys, *args, "--layers", "4,4", "--json")[1])
    assert [stage["layers"] for stage in given["by_hand"]["stages"]] == [[0, 4], [4, 8]]
    status, _, error = plan(capsys, *args, "--shape", "llama-3.2-1b")
    assert (status, error.count("\n")) == (2, 1)
    assert "the devices hold 8 layers together, but the model has 16" in error


def test_a_plan_of_a_cluster_file_says_what_a_head_does_without_each_device(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    table = '[[device]]\nname = "{}"\naddress = "{}:7700"\nprofile = "raspberry-pi-5"\nmemory = "{}"\n'
    for names, fits in (("abc", True), ("ab", False)):
        file = tmp_path / f"{names}.toml"
        sizes = {**dict.fromkeys(names, "2GiB"), "head": "600MiB"}
        file.write_text("".join(table.format(name, name, size) for name, size in sizes.items()))
        args = [
            "--shape=llama-3.2-1b",
            f"--cluster={file}",
            "--offline",
            "--context=512",
            "--drafter=none",
            "--head=head",
        ]
        found = json.loads(plan(capsys, *args, "--json")[1])
        assert [stage["device"] for stage in found["stages"]] == ["a", "b"]
        assert found["absent"]["was_asked"] is False
        without = found["absent"]["without"]
        assert [(each["device"], each["fits"]) for each in without] == [("a", fits), ("b", fits)]
        text = plan(capsys, *args)[1]
        assert max(map(len, text.splitlines())) <= 80
        if fits:
            assert without[0]["tokens_per_s"] == pytest.approx(found["tokens_per_s"]), "c does as well"
            expected = f"{without[0]['tokens_per_s']:.3g} tokens/s"
        else:
            expected = f"does not fit: the others lack {without[0]['short_bytes'] / (1 << 20):.0f} MiB"
        assert f"  without {'a':<24}{expected}\n" in text
        assert "a head begins without one if the model fits the others, and takes it in later\n" in text
    assert json.loads(plan(capsys, *FIVE, "--json")[1])["absent"] is None, "boards are not devices"


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("first", "end"), [(0, 8), (0, 3), (3, 6), (6, 8)])
def test_memory_of_a_checkpoint_is_what_a_daemon_counts(dtype: str, first: int, end: int, cache: str) -> None:
    files = ModelFiles(BUNDLED)
    shape = shape_of(files.config(), BUNDLED)
    weights = counted_weights(files, shape)
    ours = stage_memory(
        *(shape, weights, dtype, end - first),
        first=first == 0,
        last=end == 8,
        context=512,
        users=1,
        cache=cache,
    )
    assert ours == slice_memory(files, Span(first=first, end=end, count=8), dtype, 512, cache=cache)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize(("first", "end"), [(0, 8), (0, 3), (3, 6), (6, 8)])
def test_memory_of_packed_weights_is_what_a_daemon_counts(dtype: str, first: int, end: int) -> None:
    """But for norms, which are counted among the matrices here."""
    files = ModelFiles(BUNDLED)
    shape = shape_of(files.config(), BUNDLED)
    ours = stage_memory(
        shape,
        counted_weights(files, shape),
        dtype,
        end - first,
        first=first == 0,
        last=end == 8,
        context=512,
        users=1,
    )
    daemons = slice_memory(files, Span(first=first, end=end, count=8), dtype, 512)
    assert ours.cache_bytes == daemons.cache_bytes
    assert ours.weight_bytes == pytest.approx(daemons.weight_bytes, rel=2e-3)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "expected --devices or --cluster"),
        (["--devices", "3x pi5"], "got 'pi5'; did you mean raspberry-pi-5?"),
        (["--devices", "4x rasberry-pi-5"], "got 'rasberry-pi-5'; did you mean raspberry-pi-5?"),
        (["--devices", "raspberry-pi-5", "--shape", "llama2-7b"], "; did you mean llama-2-7b?"),
        (["--devices", "toaster"], "--devices: expected a .toml file or one of"),
        (["--devices", "4x"], "such as 2x raspberry-pi-5, got '4x'"),
        (["--devices", "four raspberry-pi-5"], "such as 2x raspberry-pi-5, got 'four raspberry-pi-5'"),
        (["--devices", "raspberry-pi-5", "--shape", "gpt-5"], "shape: expected one of"),
        (["--devices", "raspberry-pi-5", "--dtype", "int3"], "--dtype: expected float32"),
        (["--devices", "jetson-orin-nano", "--dtype", "float64"], "--dtype: expected float32"),
        (["--devices", "raspberry-pi-5", "--link", "fast"], "--link: expected Mbit/s and ms"),
        (["--devices", "raspberry-pi-5", "--link", "0/1"], "--link: expected Mbit/s and ms"),
        (
            ["--devices", "2x raspberry-pi-5", "--link", "a:b=10/1"],
            "--link: expected two of raspberry-pi-5-1",
        ),
        (["--devices", "raspberry-pi-5", "--acceptance", "1"], "--acceptance: expected a share above 0"),
        (["--devices", "raspberry-pi-5", "--layers", "3,3"], "--layers: expected 1 number,"),
        (
            ["--devices", "raspberry-pi-5", "--shape", "llama-2-7b", "--drafter", "qwen3-0.6b"],
            "--drafter: expected the model's vocabulary",
        ),
        (["--devices", "raspberry-pi-5", "--users", "1000"], "--users: expected at most"),
        (["--devices", "0x raspberry-pi-5"], "--devices: expected boards with commas, one or more of each"),
        (
            ["--devices", "2x raspberry-pi-5 1x jetson-orin-nano"],
            "--devices: expected a comma between boards, such as raspberry-pi-5, 1x jetson-orin-nano, got",
        ),
        (["--devices", "4 raspberry-pi-5"], "--devices: expected 4x raspberry-pi-5 for so many boards"),
        (["--devices", "raspberry-pi-5", "--context", "5000"], "--context: expected 2 to 1024"),
    ],
)
def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], args: list[str], expected: str) -> None:
    status, out, err = plan(capsys, *args)
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert expected in line


def test_what_would_help_stands_in_columns_whatever_the_boards_are_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = tmp_path / f"{'a-board-with-a-long-name' * 2}.toml"
    board.write_text(
        "[memory]\ngb = 8\ngb_per_s = 10\nefficiency = 1\n[compute]\nfloat16 = 0.1\nefficiency = 1\n"
    )
    text = plan(capsys, "--shape=tinyllama-1.1b", "--devices", f"2x {board}")[1]
    rows = text.partition("would help\n")[2].partition("\n\n")[0].splitlines()
    assert any(board.stem in row for row in rows)
    assert len({row.rindex("%") for row in rows}) == len({len(row) for row in rows}) == 1


MIX = ["--shape", "llama-2-7b", "--link", "150/0.5"]


@pytest.mark.parametrize(
    "typed",
    [
        ["4x jetson-orin-nano, 2x raspberry-pi-5"],
        ["4xjetson-orin-nano,2xraspberry-pi-5"],
        ["4 x jetson-orin-nano, 2 x raspberry-pi-5"],
        ["4x", "jetson-orin-nano,", "2x", "raspberry-pi-5"],
    ],
)
def test_boards_are_counted_as_they_are_printed(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, *MIX, "--devices", *typed)[1]
    assert "\ndevices: 4x jetson-orin-nano, 2x raspberry-pi-5\n" in text
    assert "2x raspberry-pi-5 are left out: " in text


def test_a_device_that_is_left_out_comes_with_the_forecast_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    devices = ["--devices", "3x jetson-orin-nano, raspberry-pi-5"]
    found = json.loads(plan(capsys, *MIX, *devices, "--json")[1])
    assert found["not_used"] == ["raspberry-pi-5"]
    assert found["why_not_used"]["raspberry-pi-5"].startswith(
        f"the forecast is {rounded(found['tokens_per_s'])} tokens/s, "
    )
    every = json.loads(plan(capsys, *MIX, *devices, "--all-devices", "--json")[1])
    assert every["not_used"] == []
    assert len(every["stages"]) == 4
    assert every["tokens_per_s"] < found["tokens_per_s"]
    small = ["--devices", "3x jetson-orin-nano, raspberry-pi-5", "--context", "4096"]
    assert plan(capsys, *MIX, *small, "--all-devices")[0] == 0


def test_all_devices_must_have_a_layer_each(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = plan(capsys, "--devices", "9x raspberry-pi-5", "--all-devices")
    assert status == 2
    assert "--all-devices: expected at most 8 devices for the 8 layers of bundled, got 9" in err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--shape", "tinyllama-1.1b"], "drafter ngram, the default, 25.0% of its best guesses right"),
        (
            [],
            "drafter bundled, the default, 58.0% of its best guesses right; what ngram beside it will guess "
            "is not reckoned with",
        ),
        (["--drafter", "draft-math"], "drafter draft-math, 58.0% of its best guesses right"),
        (["--drafter", "eagle"], "drafter eagle, 63.5% of its best guesses right"),
        (["--drafter", "none"], "drafter none"),
    ],
)
def test_the_drafter_is_chats_and_is_told(
    flags: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = plan(capsys, "--devices", "raspberry-pi-5", *flags)[1]
    assert max(map(len, text.splitlines())) <= 80
    assert f"\n{expected}\n" in text.replace("\n  ", " ")
    model = "" if flags[:1] == ["--shape"] else BUNDLED
    names = Decoding(drafters=tuple(flags[1:]) if "--drafter" in flags else ()).drafters_for(model)
    found = json.loads(plan(capsys, "--devices", "raspberry-pi-5", *flags, "--json")[1])
    assert found["drafters"] == list(names)


def test_that_the_model_is_a_toy_and_what_is_assumed_of_the_drafter_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    toy = "the bundled toy of 11 million parameters; name another: --model or --shape"
    text = plan(capsys, "--devices", "2x raspberry-pi-5")[1]
    assert toy in text.splitlines()
    assert len(toy) <= 80
    named = ("--shape", "llama-2-7b", "--devices", "3x jetson-orin-nano", "--dtype", "int4")
    text = plan(capsys, *named, "--drafter", "eagle")[1]
    assert "toy" not in text
    assumed = text.partition("assumed\n")[2]
    assert "63.5% of the drafter's best guesses are right; else give --acceptance" in assumed
    given = plan(capsys, *named, "--drafter", "eagle", "--acceptance", "0.7")[1]
    assert "70.0% of the drafter's best guesses are right; as you say" in given.partition("assumed\n")[2]
    assert max(map(len, text.splitlines())) <= 80


def test_slow_boards_are_told_without_exponents(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--shape", "llama-2-70b", "--devices", "24x old-laptop", "--dtype", "int4", "--link", "10/20"]
    status, text, _ = plan(capsys, *slow)
    assert status == 0
    assert re.search(r"\de[+-]\d", text) is None
    assert re.search(r"a trip \d+(\.\d+)? s\n", text), "seconds, for so many milliseconds are hard to read"
