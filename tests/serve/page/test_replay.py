"""Recordings in the page: saved, opened, dropped, played, scrubbed, and refused when they are broken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from flowspec.watch.recording import wrong_document
from tests.serve.page.pages import (
    answered,
    ask,
    committed,
    in_both,
    is_live,
    picture,
    replayed,
    scrub,
    until_changed,
)
from tests.serve.page.recordings import STAGES, devices, document, recording, stages, text_of
from tests.serve.page.scripted import Script
from tests.watch.heads import VirtualHead
from tests.watch.heads import watched as watched_head


def test_a_saved_recording_replays_to_the_same_text(page: Page, script: Script) -> None:
    is_live(page)
    with page.expect_download() as started:
        page.locator("#save").click()
    path = Path(started.value.path())
    assert started.value.suggested_filename.startswith("flowspec-bundled-")
    assert json.loads(path.read_text()) == script.found
    replayed(page, path.read_text(), "sent.json")
    expect(page.locator("#state")).to_have_text("replay of sent.json")
    scrub(page, 1)
    expect(page.locator("#strip-text")).to_have_text(text_of(script.found), use_inner_text=False)


@in_both
def test_a_replay_plays_pauses_and_is_scrubbed_to_its_end_and_back(page: Page, script: Script) -> None:
    script.found = recording(["Yes"])
    whole = recording(seed=3)
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
    assert text_of(whole).startswith(half)
    assert 0 < len(half) < len(text_of(whole))
    expect(page.locator("#tree")).to_have_attribute("aria-label", re.compile(r"\d guesses, the likeliest: "))
    scrub(page, 1)
    expect(page.locator("#summary")).to_contain_text("of them guessed ahead")
    assert committed(page) == text_of(whole)
    scrub(page, 0.5)
    expect(page.locator("#summary")).to_contain_text("guesses in the tree")
    assert committed(page) == half
    page.locator("#speed").select_option("4")
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("Play")  # at its end by itself
    assert committed(page) == text_of(whole)
    page.locator("#back").click()
    is_live(page)
    expect(page.locator("#replay")).to_be_hidden()
    expect(page.locator("#strip-text")).to_have_text("")


@in_both
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


def test_a_slow_replay_takes_twelve_seconds_at_least_and_a_long_answer_no_minute_more(page: Page) -> None:
    speeds = page.evaluate(
        """async () => {
          const { Replay } = await import("/page/replay.js");
          const of = seconds => ({ stages: [], drafters: [], frames: [
            { t: 0, kind: "lost", silent_s: 0 }, { t: seconds - .2, kind: "lost", silent_s: 0 }] });
          return [1, 3, 10, 30, 200].map(seconds => seconds / new Replay(of(seconds)).slow);
        }"""
    )
    assert [round(each, 6) for each in speeds] == [12, 12, 40, 60, 200]


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
    assert wrong_document(found) == ""
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
            expect(page.locator("#sentence")).to_contain_text("Device pi-5 is lost (its connection closed).")
            expect(page.locator("#said-state")).to_contain_text("Device pi-5 is lost")


def test_who_is_lost_is_told_also_where_it_is_more_than_one(page: Page) -> None:
    frames = [frame for frame in recording()["frames"] if frame["t"] < 0.6]

    def gone(t: float, *names: str) -> dict[str, Any]:
        rows = devices(t)
        return rows | {"devices": [each | {"present": each["name"] not in names} for each in rows["devices"]]}

    found = document(
        [
            *frames,
            {"t": 1.0, "kind": "lost", "silent_s": 0.4},
            {"t": 1.0, "kind": "note", "text": "device pi-5 is lost (its connection closed)"},
            gone(2.0, "pi-5", "laptop"),
            gone(4.0, *STAGES),
        ]
    )
    replayed(page, found)
    for share, told in (
        (0.3, "Device pi-5 is lost (its connection closed). The answer waits until all layers"),
        (0.6, "Lost: pi-5, laptop. The answer waits until all layers are there again"),
        (1.0, "All devices are lost. The answer waits until one comes back"),
    ):
        scrub(page, share)
        expect(page.locator("#sentence")).to_contain_text(told)


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


def test_lanes_are_of_those_who_computed_also_after_others_took_their_layers(page: Page) -> None:
    is_live(page)
    lanes, empty = page.evaluate(
        """async trips => {
          const { Timeline } = await import("/page/model.js");
          const { lanesOf } = await import("/page/lanes.js");
          const names = ["jetson-a", "jetson-b", "pi-5", "laptop"];
          const left = [{ name: "jetson-a", layers: [0, 1] }, { name: "laptop", layers: [1, 10] }];
          const timeline = new Timeline(names.map(name => ({ name, layers: [0, 1] })));
          timeline.add(trips[0]);
          timeline.add({ t: trips[0].t, kind: "stages", stages: left });
          timeline.add(trips[1]);
          const world = { stages: left, devices: [{ name: "pi-5", present: false }] };
          return [lanesOf(world, timeline.trips), lanesOf(world, [])];
        }""",
        [frame for frame in recording()["frames"] if frame["kind"] == "trip"][:2],
    )
    now = [("jetson-a", "layer 0"), ("laptop", "layers 1–9")]
    assert [(each["name"], each["more"]) for each in empty] == now
    before = [("jetson-b", "no layers"), ("pi-5", "lost")]
    assert [(each["name"], each["more"]) for each in lanes] == [now[0], *before, now[1]]


def test_without_guesses_for_a_while_the_page_says_why(page: Page) -> None:
    frames = [frame for frame in recording()["frames"] if frame["kind"] not in ("nodes", "sent", "end")]
    replayed(page, document(frames))
    scrub(page, 1)
    expect(page.locator("#sentence")).to_contain_text("No guesses at the moment")


def test_a_size_that_changes_and_changes_back_leaves_no_empty_picture(page: Page) -> None:
    replayed(page, recording())
    scrub(page, 1)
    page.wait_for_function("() => document.getElementById('tree').width > 300")
    page.evaluate("new Promise(done => setTimeout(done, 700))")  # nothing moves any more
    is_drawn = page.evaluate(
        """async () => {
          const tree = document.getElementById("tree");
          for (const width of ["50%", ""]) {
            tree.style.width = width;
            for (const _ of [1, 2]) await new Promise(done => requestAnimationFrame(done));
          }
          await new Promise(done => setTimeout(done, 300));
          const { data } = tree.getContext("2d").getImageData(0, 0, tree.width, tree.height);
          return data.some(each => each > 0);
        }"""
    )
    assert is_drawn


def test_a_recording_can_be_dropped_on_the_page(page: Page) -> None:
    found = recording(seed=5)
    dropped = page.evaluate_handle(
        "text => { const all = new DataTransfer(); all.items.add(new File([text], 'dropped.json')); return "
        "all; }",
        json.dumps(found),
    )
    page.dispatch_event("body", "dragenter", {"dataTransfer": dropped})
    expect(page.locator("#drop")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": dropped})
    expect(page.locator("#state")).to_have_text("replay of dropped.json")
    expect(page.locator("#drop")).to_be_hidden()


def without(found: dict[str, Any], kind: str, field: str) -> dict[str, Any]:
    frames = [
        {name: value for name, value in frame.items() if (frame["kind"], name) != (kind, field)}
        for frame in found["frames"]
    ]
    return found | {"frames": frames}


BROKEN = {
    "no JSON": (json.dumps(recording())[:-40], "which is JSON; this is not"),
    "another JSON": ("[1, 2]", "this is another JSON file"),
    "another version": (document([], version=2), "expected a recording of version 1, got 2"),
    "no frames": (document([]), "there is nothing in this recording"),
    "an unknown kind": (
        document([{"t": 1, "kind": "<b>new</b>"}]),
        'frame 0 is of the unknown kind "<b>new</b>"',
    ),
    "no stages": (document([], stages=None), '"stages" is missing or wrong'),
    "a trip without stays": (without(recording(), "trip", "stays"), '(trip) has no right "stays"'),
    "backwards": (
        document([{"t": 1, "kind": "lost", "silent_s": 1}, {"t": 0, "kind": "lost", "silent_s": 1}]),
        "frame 1 is earlier",
    ),
}


def test_a_broken_recording_is_refused_with_one_line_and_the_page_stays_live(page: Page) -> None:
    is_live(page)
    for found, said in BROKEN.values():
        replayed(page, found, "broken.json")
        expect(page.locator("#trouble")).to_contain_text(said)
        line = page.locator("#trouble").text_content() or ""
        assert line.startswith("broken.json: ")
        assert "\n" not in line
        expect(page.locator("#replay")).to_be_hidden()
    is_live(page)
    replayed(page, recording())
    expect(page.locator("#trouble")).to_be_hidden()


def merged(*all_frames: list[dict[str, Any]]) -> dict[str, Any]:
    return document(
        sorted((frame for frames in all_frames for frame in frames), key=lambda frame: frame["t"])
    )


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


def test_the_recordings_of_these_tests_are_such_as_flowspec_reads() -> None:
    assert [wrong_document(recording(seed=seed, request=seed)) for seed in range(4)] == [""] * 4


def test_of_several_answers_the_chosen_one_is_shown(page: Page) -> None:
    one, other = recording(["Red"] * 6, request=4), recording(["Green"] * 9, request=7, seed=2)
    replayed(page, merged(one["frames"], other["frames"]))
    scrub(page, 1)
    expect(page.locator("#request option")).to_have_text(
        ["auto", "4: Why is the pipeline full…", "7: Why is the pipeline full…"]
    )
    for value, found in (("4", one), ("7", other)):
        page.locator("#request").select_option(value=value)
        expect(page.locator("#strip-text")).to_have_text(text_of(found))


def test_a_lost_stage_and_a_watcher_that_came_too_late_are_told(page: Page) -> None:
    frames = recording(request=4)["frames"]
    half_s = frames[-1]["t"] / 2
    before = [frame for frame in frames if frame["t"] <= half_s]
    replayed(page, document([*before, {"t": half_s, "kind": "lost", "silent_s": 0.4}]))
    scrub(page, 1)
    expect(page.locator("#summary")).to_contain_text("A device is lost")
    expect(page.locator("#map .state").nth(1)).to_have_text("waits")
    replayed(page, document([*before, {"t": half_s, "kind": "missed"}]))
    scrub(page, 1)
    expect(page.locator("#summary")).to_have_text("No answer has run yet.")
    expect(page.locator("#strip-text")).to_have_text("")


def test_with_little_motion_wanted_a_replay_still_ends_at_its_text(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    found = recording(seed=4)
    replayed(page, found)
    scrub(page, 1)
    expect(page.locator("#strip-text")).to_have_text(text_of(found), use_inner_text=False)


def test_what_was_known_before_it_was_sent_was_no_guess_and_a_loss_says_whose_it_was(page: Page) -> None:
    is_live(page)
    sent, losses = page.evaluate(
        """async frames => {
          const { Timeline, World } = await import("/page/model.js");
          const world = new World({ stages: [], drafters: [] });
          const timeline = new Timeline();
          for (const frame of frames) {
            world.apply(frame);
            timeline.add(frame);
          }
          const sent = [...world.shown.nodes.values()].map(node => node.sent);
          return [sent, timeline.losses.map(each => each.text)];
        }""",
        [
            {"t": 0, "kind": "root", "request": 1, "node": 1, "token": "\n", "position": 1},
            {"t": 1, "kind": "tokens", "request": 1, "nodes": [[2, "So"]]},
            {"t": 1, "kind": "nodes", "request": 1, "nodes": [[3, 2, " it", 0.5]]},
            {"t": 1, "kind": "sent", "segment": 1, "parts": [[1, [2, 3]]], "prompt_rows": 0},
            {"t": 2, "kind": "lost", "silent_s": 5.0},
            {"t": 2, "kind": "note", "text": "device pi-5 is lost (no sign of life for 5 s)"},
            {"t": 2, "kind": "note", "text": "going on with 3 devices"},
            {"t": 3, "kind": "lost", "silent_s": 0.0},
        ],
    )
    assert sent == [False, False, True]
    assert losses == ["pi-5 is lost", "layers shared out anew"]
