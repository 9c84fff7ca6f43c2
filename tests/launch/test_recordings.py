"""`docs/recordings`: small, and the page beside them is of today's files."""

from __future__ import annotations

import json

from tests.launch.scripts import script

recordings = script("recordings")


def test_recordings_are_small_and_that_of_a_loss_shows_it_and_a_return() -> None:
    for name in recordings.TITLES:
        text = (recordings.FOLDER / f"{name}.json").read_text("utf-8")
        assert len(text) <= recordings.BYTES_MAX
    frames = json.loads((recordings.FOLDER / "loss.json").read_text("utf-8"))["frames"]
    here = [[row["present"] for row in frame["devices"]] for frame in frames if frame["kind"] == "devices"]
    gone = next(at for at, row in enumerate(here) if not all(row))
    assert all(here[0])
    assert any(all(row) and len(row) == 4 for row in here[gone:])
    assert len([frame for frame in frames if frame["kind"] == "stages"]) >= 3


def test_the_page_is_of_todays_files() -> None:
    assert recordings.unpacked(recordings.INDEX.read_text("utf-8")) == recordings.unpacked(recordings.page())
