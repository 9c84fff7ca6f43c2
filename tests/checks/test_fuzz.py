"""A small hunt with a fixed seed; that a defect is found, written down and replayed; and that a world follows
from its genome."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from flowspec.core.head.request import Request
from flowspec.core.head.statistics import Statistics
from flowspec.wire.codec import KINDS, decode
from lab.fuzz import hunt
from lab.fuzz.__main__ import main
from lab.fuzz.mutate import mutated, nudged
from lab.fuzz.samples import sample_envelopes, sample_frames
from lab.fuzz.world import World
from tests.broken_builds import keeps_the_flights, sends_only_the_root_again

pytestmark = pytest.mark.slow
FRAMES = "2500"
"""With the seed below some of the few cases that are traced are clusters."""
WORLDS_TO_FIND = 60


def test_the_samples_are_valid_and_of_every_kind() -> None:
    assert {type(envelope.message) for envelope in sample_envelopes()} == set(KINDS)
    assert [decode(frames) for frames in sample_frames()] == sample_envelopes()


def test_a_few_thousand_frames_bring_nothing_unexpected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--frames", FRAMES, "--seed", "14", "--folder", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["findings"] == [] == list(tmp_path.iterdir())
    assert found["frames"] >= int(FRAMES)
    assert found["valid"] + found["refused"] == found["frames"]
    assert found["worlds"] > 10
    assert found["pipelines_lost"] > 10
    assert found["arcs"] > 500
    assert found["parents"] > len(sample_frames()) + 1, "cases that reached new code are kept"


def test_a_defect_of_the_codec_is_found_and_its_frames_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(frames: Any) -> Any:
        envelope = decode(frames)
        # Not one kind alone: which the hunt comes to first depends on its seed.
        if type(envelope.message).__name__ != "Segment":
            raise KeyError("no such thing")
        return envelope

    monkeypatch.setattr(hunt, "decode", broken)
    tally = hunt.Hunt(1, tmp_path).run(3000, 60)
    (finding,) = tally.findings
    assert finding["error"] == "KeyError: 'no such thing'"
    with pytest.raises(KeyError, match="no such thing"):
        main(["--replay", finding["file"]])
    monkeypatch.undo()
    assert main(["--replay", finding["file"]]) == 0


def test_a_defect_of_a_core_is_found_and_its_genome_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(Statistics, "emitted", broken)
    assert main(["--frames", "2000", "--folder", str(tmp_path)]) == 1
    assert "1 unexpected" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    with pytest.raises(IndexError):
        main(["--replay", str(path)])
    monkeypatch.undo()
    assert main(["--replay", str(path), "--json"]) == 0
    assert "frames" in json.loads(capsys.readouterr().out)["outcome"]


def test_a_world_follows_from_its_genome_and_answers_where_nobody_tampers() -> None:
    chance = random.Random(3)
    genomes = [tuple(chance.getrandbits(32) for _ in range(12)) for _ in range(12)]
    first = [World(genome).run() for genome in genomes]
    assert first == [World(genome).run() for genome in genomes]
    assert any(ending.error for ending in first)
    assert any(not ending.error and ending.frames > 40 for ending in first)
    assert any(ending.pipelines > 1 for ending in first)


def emits_again(patch: pytest.MonkeyPatch) -> None:
    """What is known of an answer is taken for something new."""
    reopen = Request.reopen

    def broken(self: Request) -> None:
        self.tree.rewind(max(self.opening.answer_start, self.tree.committed_length - 1))
        reopen(self)

    patch.setattr(Request, "reopen", broken)


@pytest.mark.parametrize("mutation", [keeps_the_flights, sends_only_the_root_again, emits_again])
def test_a_head_that_takes_a_loss_wrongly_is_found(
    mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    chance = random.Random(4)
    genomes = [tuple(chance.getrandbits(32) for _ in range(24)) for _ in range(WORLDS_TO_FIND)]
    with pytest.raises(AssertionError):
        [World(genome).run() for genome in genomes]


def test_nudges_most_often_leave_a_message_valid_and_mutation_reaches_into_the_header() -> None:
    chance, frames = random.Random(1), sample_frames()
    assert sum(hunt.try_frames(nudged(each, chance)) for each in frames * 10) > 5 * len(frames)
    changed = [mutated(chance.choice(frames), chance.choice(frames), chance) for _ in range(400)]
    headers = [unpacked(each[0]) for each in changed if each]
    whole = [header for header in headers if isinstance(header, list) and len(header) == 7]
    assert len(whole) > 150, "most are still a header of seven entries"


def unpacked(frame: bytes) -> Any:
    try:
        return msgpack.unpackb(frame, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        return None
