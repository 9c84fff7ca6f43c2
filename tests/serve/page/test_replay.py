"""Recordings in the page: saved, opened, dropped, played, scrubbed, and refused when they are broken."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import Page, expect

from tests.nightly import at_night
from tests.serve.page.pages import (
    answered,
    ask,
    committed,
    is_live,
    picture,
    replayed,
    scrub,
    until_changed,
    until_committed,
)
from tests.serve.page.recordings import devices, document, recording, stages, text_of
from tests.serve.page.scripted import Script
from tests.watch.heads import VirtualHead
from tests.watch.heads import watched as watched_head


def test_a_replay_plays_pauses_and_is_scrubbed_to_its_end_and_back(page: Page, script: Script) -> None:
    script.found = recording(["Yes"])
    whole = recording()
    replayed(page, whole)
    expect(page.locator("#play")).to_have_text("Pause")
    page.locator("#speed").select_option("0.1")
    page.wait_for_function("() => document.getElementById('scrub').value > 0.05")
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("Play")
    at = page.locator("#scrub").input_value()
    still = picture(page, "lanes")
    assert page.locator("#scrub").input_value() == at
    scrub(page, 0.5)
    until_changed(page, "lanes", still)
    half = committed(page)
    assert 0 < len(half) < len(text_of(whole))
    expect(page.locator("#tree")).to_have_attribute("aria-label", re.compile(r"\d guesses, the likeliest: "))
    scrub(page, 1)
    expect(page.locator("#summary")).to_contain_text("of them guessed ahead")
    until_committed(page, text_of(whole))
    scrub(page, 0.5)
    expect(page.locator("#summary")).to_contain_text("guesses in the tree")
    until_committed(page, half)
    page.locator("#speed").select_option("4")
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("Play")  # at its end by itself
    until_committed(page, text_of(whole))
    page.locator("#back").click()
    is_live(page)
    expect(page.locator("#replay")).to_be_hidden()
    expect(page.locator("#strip-text")).to_have_text("")


@at_night
def test_the_last_answer_stands_still_and_is_replayed_slowly_token_by_token(
    page: Page, script: Script
) -> None:
    expect(page.locator("#slowly")).to_be_hidden()
    ask(page)
    answered(page, text_of(script.found))
    page.locator("#slowly").click()
    expect(page.locator("#state")).to_have_text("replay of the last answer")
    expect(page.locator("#play")).to_have_text("Pause")
    page.locator("#play").click()
    scrub(page, 0)
    said = [""]
    page.locator("#scrub").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        expect(page.locator("#strip-text > span")).to_have_count(len(said))
        said.append(committed(page))
    assert said == ["", "The", "The pipeline", "The pipeline stays", "The pipeline stays full"]
    page.locator("#step-back").focus()
    for before in said[-2::-1]:
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#strip-text")).to_have_text(before, use_inner_text=False)
    page.keyboard.press("ArrowRight")
    expect(page.locator("#strip-text .fresh")).to_have_text("The")
    ask(page, "Again?")  # leaves the replay
    expect(page.locator("#replay")).to_be_hidden()
    expect(page.locator(".turn-note")).to_have_count(2)
    expect(page.locator("#slowly")).to_be_visible()
    page.locator("#slowly").click()
    page.locator("#back").click()
    expect(page.locator("#slowly")).to_be_focused()


def test_the_map_shows_a_loss_loading_and_a_return(page: Page) -> None:
    def at(t: float, **changes: Any) -> dict[str, Any]:
        rows = devices(t)
        rows["devices"][2] |= changes
        return rows

    left = [{"name": "jetson-a", "layers": [0, 10]}]
    found = document(
        [
            {"t": 0.0, "kind": "stages", "stages": stages()},
            at(0.0, throttled=True),
            {"t": 10.0, "kind": "lost", "silent_s": 0.4},
            {"t": 10.0, "kind": "note", "text": "device pi-5 is lost (its connection closed)"},
            {"t": 10.0, "kind": "note", "text": "going on with 3 devices"},
            at(10.0, present=False),
            {"t": 20.0, "kind": "stages", "stages": left},
            at(20.0, present=False),
            at(30.0, loading={"doing": "loading weights", "share": 0.5}),
            {"t": 40.0, "kind": "stages", "stages": stages()},
            at(40.0),
            at(50.0),
        ]
    )
    replayed(page, found)
    page.locator("#play").click()
    card = page.locator("#map li").filter(has=page.locator("strong", has_text="pi-5"))
    for share, kind, text in (
        (0.0, "idle", "slowed down"),
        (0.2, "gone", "lost"),
        (0.4, "gone", "lost"),
        (0.6, "loading", "loading weights 50%"),
        (0.8, "back", "back"),
        (1.0, "idle", "idle"),
    ):
        scrub(page, share)
        expect(card).to_have_attribute("data-kind", kind)
        expect(card).to_contain_text(text)
        if share == 0.2:
            expect(page.locator("#sentence")).to_contain_text("Device pi-5 is lost")
            expect(page.locator("#said-state")).to_contain_text("Device pi-5 is lost")


@at_night
def test_that_nothing_is_answered_any_more_is_told(page: Page, script: Script) -> None:
    failed = {"kind": "failed", "text": "no device is left"}
    frames = [frame for frame in recording()["frames"] if frame["t"] < 0.6]
    script.found = document([frames[0], {"t": 0.0, **failed}])
    page.reload()
    expect(page.locator("#state")).to_have_text("failed")
    expect(page.locator("#sentence")).to_have_text(
        "It failed: no device is left. Nothing is answered any more: start flowspec serve again."
    )
    replayed(page, document([*frames, {"t": 1.0, "kind": "lost", "silent_s": 0.4}, {"t": 2.0, **failed}]))
    scrub(page, 1.0)
    expect(page.locator("#sentence")).to_have_text("It failed: no device is left.")


def without(found: dict[str, Any], kind: str, field: str) -> dict[str, Any]:
    frames = [
        {name: value for name, value in frame.items() if (frame["kind"], name) != (kind, field)}
        for frame in found["frames"]
    ]
    return found | {"frames": frames}


LOST = {"kind": "lost", "silent_s": 1}
BROKEN = (
    json.dumps(recording())[:-40],  # no JSON
    "[1, 2]",
    document([], version=2),
    document([]),
    document([{"t": 1, "kind": "<b>new</b>"}]),
    document([], stages=None),
    without(recording(), "trip", "stays"),
    document([{"t": 1, **LOST}, {"t": 0, **LOST}]),  # backwards
)


def test_a_broken_recording_is_refused_with_one_line_and_the_page_stays_live(page: Page) -> None:
    is_live(page)
    seen = {""}
    for number, found in enumerate(BROKEN):
        replayed(page, found, f"broken-{number}.json")
        expect(page.locator("#trouble")).to_contain_text(f"broken-{number}.json: ")
        line = page.locator("#trouble").text_content() or ""
        assert "\n" not in line
        assert line.partition(": ")[2] not in seen, "each has a reason of its own"
        seen.add(line.partition(": ")[2])
        expect(page.locator("#replay")).to_be_hidden()
    is_live(page)
    replayed(page, recording())
    expect(page.locator("#trouble")).to_be_hidden()


def test_a_recording_made_in_virtual_time_replays_to_its_text(page: Page) -> None:
    head = VirtualHead(3)
    watch = watched_head(head, keeps=True)
    watch.join()
    head.run()
    watch.settle()
    made = watch.recording()
    watch.close()
    assert made is not None
    begun = [(at, frame["request"]) for at, frame in enumerate(made["frames"]) if frame["kind"] == "begin"]
    since, last = begun[-1]
    text = text_of({"frames": [frame for frame in made["frames"][since:] if frame.get("request") == last]})
    assert text
    replayed(page, made)
    expect(page.locator("#model")).to_contain_text("simulated (virtual time)")
    scrub(page, 1)
    expect(page.locator("#strip-text")).to_have_text(text)
