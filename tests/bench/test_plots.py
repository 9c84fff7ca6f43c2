"""Figures of summaries: they are PNGs with something on them, whatever was run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from flowspec.bench import plots, report
from flowspec.bench.outcome import Record
from flowspec.bench.summary import summarise
from flowspec.core.methods import METHODS
from flowspec.errors import InputError
from tests.bench.records import record

pytest.importorskip("matplotlib")
SECONDS = {"ar": 10.0, "chunk-pp (published)": 6.0, "tree-sd tuned": 4.0, "continuous": 2.0}


def records(testbeds: int, methods: dict[str, float] = SECONDS) -> list[Record]:
    return [
        record(
            name,
            prompt,
            10,
            seconds + 0.1 * int(prompt),
            testbed=f"{testbed + 2} boards",
            domain=domain,
            temperature=temperature,
        )
        for testbed in range(testbeds)
        for temperature in (0.0, 1.0)
        for domain in ("chat", "sums")
        for prompt in ("1", "2")
        for name, seconds in methods.items()
    ]


def assert_is_drawn(path: Path, width: int, height_min: int) -> None:
    """A PNG of that size with more than one colour on it."""
    from matplotlib.image import imread

    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = imread(path)  # [height, width, channels]
    assert pixels.shape[1] == width
    assert pixels.shape[0] >= height_min
    assert pixels[..., :3].var() > 0.005


@pytest.mark.parametrize("testbeds", [1, 3, 4, 6])
def test_speed_ups_are_drawn_by_domain_or_else_by_testbed(tmp_path: Path, testbeds: int) -> None:
    plots.speedup(summarise("by hand", "simulated", records(testbeds)), tmp_path / "speedup.png")
    assert_is_drawn(tmp_path / "speedup.png", 1600, 900)


def drawn_texts(summary: dict[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All that a figure of speed-ups says."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    drawings: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda drawing, to: (drawings.append(drawing), save(drawing, to)))
    plots.speedup(summary, path)
    (drawing,) = drawings
    return [each.get_text() for each in drawing.findobj(Text) if each.get_text()]


def test_plots_speak_plainly_and_every_bar_has_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = summarise("by hand", "simulated", records(1))
    texts = drawn_texts(summary, tmp_path / "speedup.png", monkeypatch)
    title = next(text for text in texts if text.startswith("by hand: speed-up over plain decoding"))
    assert "not measured on such devices" in title
    assert "95% intervals" in title
    assert "ar" not in texts
    assert {"plain decoding = 1", "times as fast as plain decoding", "all domains"} <= set(texts)
    bars = len(summary["tables"]) * (len(SECONDS) - 1) * len(("chat", "sums", "all domains"))
    ratios = [
        report.rate(each["ratio"])
        for table in summary["tables"]
        for method, each_domain in table["speed_up"]["ar"].items()
        for each in each_domain.values()
        if method != "ar"
    ]
    assert len(ratios) == bars
    assert all(texts.count(ratio) >= ratios.count(ratio) for ratio in ratios)


def test_one_prompt_has_no_interval_on_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single = [each for each in records(1) if each.prompt_id == "1"]
    texts = drawn_texts(summarise("by hand", "simulated", single), tmp_path / "speedup.png", monkeypatch)
    assert not any("interval" in text for text in texts)


@pytest.mark.parametrize("methods", [{"continuous": 2.0}, {"chunk-pp": 3.0, "continuous": 2.0}, {}])
def test_without_ar_there_is_a_figure_too(tmp_path: Path, methods: dict[str, float]) -> None:
    plots.speedup(summarise("by hand", "cluster", records(1, methods)), tmp_path / "speedup.png")
    assert (tmp_path / "speedup.png").stat().st_size > 1000


def test_every_method_has_a_colour_of_its_own_and_its_variants_are_hatched() -> None:
    assert set(plots.COLOURS) == set(METHODS)
    assert len({*plots.COLOURS.values(), plots.OTHER_COLOUR}) == len(METHODS) + 1
    looks = list(
        plots.looks(["tree-sd", "tree-sd tuned", "tree-sd (published)", "tree-sd of another kind"]).values()
    )
    assert len({look["facecolor"] for look in looks}) == 1
    assert len({look["hatch"] for look in looks}) == 4
    assert [look["facecolor"] for look in plots.looks(["something", "else"]).values()] == list(
        plots.OTHER_COLOURS[:2]
    )


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="run launch/install plots"):
        plots.speedup(summarise("by hand", "simulated", records(1)), tmp_path / "speedup.png")
