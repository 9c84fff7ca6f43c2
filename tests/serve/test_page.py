"""The live view in a headless Chromium, before a server whose API is scripted: a chat, replays, errors, the keyboard, small and dark screens."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from flowspec.serve.page import page_routes
from flowspec.watch.recording import wrong_document
from tests.serve.browsers import WAIT_MS, Watched, browser  # noqa: F401
from tests.serve.recordings import document, recording, text_of
from tests.serve.scripted import Script, serving
from tests.watch.heads import VirtualHead
from tests.watch.heads import watched as watched_head

DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
EVIL = ["<img src=x onerror=alert(1)>", "<script>document.title='owned'</script>", " <b>bold</b>", " &amp;", " \u202eright"]

expect.set_options(timeout=WAIT_MS)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def watched(script: Script) -> Iterator[Watched]:
    with serving(script.app()) as origin:
        yield Watched(origin)


@pytest.fixture
def page(browser: Browser, watched: Watched) -> Iterator[Page]:  # noqa: F811
    """A page at the server, at a desktop's size; a console error, a failed call or a request to anybody else fails its test."""
    context = browser.new_context(viewport=DESKTOP)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    watched.watch(page)
    page.goto(watched.origin)
    yield page
    context.close()
    assert watched.wrong == []


def is_live(page: Page) -> None:
    expect(page.locator("#state")).to_have_text("live")


def ask(page: Page, text: str = "Why is the pipeline full?") -> None:
    page.locator("#question").fill(text)
    page.locator("#send").click()


def answered(page: Page, text: str) -> None:
    expect(page.locator(".turn.assistant:not(.running)").last).to_have_text(text, use_inner_text=False)


def replayed(page: Page, found: object, name: str = "answer.json") -> None:
    content = found if isinstance(found, str) else json.dumps(found)
    page.locator("#file").set_input_files({"name": name, "mimeType": "application/json", "buffer": content.encode()})


def picture(page: Page, canvas: str) -> str:
    return str(page.evaluate("id => document.getElementById(id).toDataURL()", canvas))


def until_changed(page: Page, canvas: str, before: str) -> None:
    page.wait_for_function("([id, before]) => document.getElementById(id).toDataURL() !== before", arg=[canvas, before])


def committed(page: Page) -> str:
    return (page.locator("#strip-text").text_content() or "") + (page.locator("#strip-new").text_content() or "")


def scrub(page: Page, share: float) -> None:
    page.locator("#scrub").evaluate(
        "(slider, share) => { slider.value = +slider.min + share * (slider.max - slider.min); slider.dispatchEvent(new Event('input')); }",
        share,
    )


def test_a_chat_shows_the_answer_and_moves_timeline_tree_and_tiles(page: Page, script: Script) -> None:
    is_live(page)
    before = {canvas: picture(page, canvas) for canvas in ("lanes", "tree")}
    expect(page.locator("[data-figure=tokens_per_s]")).to_have_text("–")
    ask(page)
    for canvas, earlier in before.items():
        until_changed(page, canvas, earlier)
    answered(page, text_of(script.found))
    expect(page.locator("[data-figure=tokens_per_s]")).to_have_text(re.compile(r"^\d+\.\d$"))
    expect(page.locator("[data-figure=rho]")).to_have_text("80%")
    expect(page.locator("#summary")).to_contain_text("tokens, ended by stop")
    assert committed(page) == text_of(script.found)
    expect(page.locator("#rows tr").first).to_contain_text("jetson-a0–21.0 GiB49 °C")
    expect(page.locator("#rows tr").first).to_contain_text("idle")
    expect(page.locator("#lanes")).to_have_attribute("aria-label", re.compile(r"jetson-a \d+% busy"))
    expect(page.locator(".turn-note")).to_contain_text("tokens in")


def test_the_next_question_carries_the_dialogue_and_a_new_dialogue_does_not(page: Page, script: Script) -> None:
    script.found = recording(["Yes", "."])
    ask(page, "Is it exact?")
    answered(page, "Yes.")
    ask(page, "Really?")
    expect(page.locator(".turn.assistant:not(.running)")).to_have_count(2)
    said = [("user", "Is it exact?"), ("assistant", "Yes."), ("user", "Really?")]
    assert script.asked[1]["messages"] == [{"role": role, "content": content} for role, content in said]
    assert script.asked[1]["model"] == "bundled"
    page.locator("#new").click()
    expect(page.locator(".turn")).to_have_count(0)
    ask(page, "Hello")
    answered(page, "Yes.")
    assert script.asked[2]["messages"] == [{"role": "user", "content": "Hello"}]


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
    expect(page.locator("#summary")).to_contain_text("ended by stop")
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


def test_a_recording_can_be_dropped_on_the_page(page: Page) -> None:
    found = recording(seed=5)
    dropped = page.evaluate_handle(
        "text => { const all = new DataTransfer(); all.items.add(new File([text], 'dropped.json')); return all; }", json.dumps(found)
    )
    page.dispatch_event("body", "dragenter", {"dataTransfer": dropped})
    expect(page.locator("#drop")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": dropped})
    expect(page.locator("#state")).to_have_text("replay of dropped.json")
    expect(page.locator("#drop")).to_be_hidden()


def without(found: dict[str, Any], kind: str, field: str) -> dict[str, Any]:
    frames = [{name: value for name, value in frame.items() if (frame["kind"], name) != (kind, field)} for frame in found["frames"]]
    return found | {"frames": frames}


BROKEN = {
    "no JSON": (json.dumps(recording())[:-40], "which is JSON; this is not"),
    "another JSON": ("[1, 2]", "this is another JSON file"),
    "another version": (document([], version=2), "expected a recording of version 1, got 2"),
    "no frames": (document([]), "there is nothing in this recording"),
    "an unknown kind": (document([{"t": 1, "kind": "<b>new</b>"}]), 'frame 0 is of the unknown kind "<b>new</b>"'),
    "no stages": (document([], stages=None), '"stages" is missing or wrong'),
    "a trip without stays": (without(recording(), "trip", "stays"), '(trip) has no right "stays"'),
    "backwards": (document([{"t": 1, "kind": "lost", "silent_s": 1}, {"t": 0, "kind": "lost", "silent_s": 1}]), "frame 1 is earlier"),
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
    return document(sorted((frame for frames in all_frames for frame in frames), key=lambda frame: frame["t"]))


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
    expect(page.locator("#request option")).to_have_text(["the newest", "4", "7"])
    for label, found in (("4", one), ("7", other)):
        page.locator("#request").select_option(label=label)
        expect(page.locator("#strip-text")).to_have_text(text_of(found))


def test_a_lost_stage_and_a_watcher_that_came_too_late_are_told(page: Page) -> None:
    frames = recording(request=4)["frames"]
    half_s = frames[-1]["t"] / 2
    before = [frame for frame in frames if frame["t"] <= half_s]
    replayed(page, document([*before, {"t": half_s, "kind": "lost", "silent_s": 0.4}]))
    scrub(page, 1)
    expect(page.locator("#summary")).to_contain_text("A stage is lost")
    expect(page.locator("#rows td:last-child").first).to_have_text("waiting")
    replayed(page, document([*before, {"t": half_s, "kind": "missed"}]))
    scrub(page, 1)
    expect(page.locator("#summary")).to_have_text("No answer has run yet.")
    expect(page.locator("#strip-text")).to_have_text("")


def test_markup_in_tokens_and_answers_stays_text(page: Page, script: Script) -> None:
    script.found = recording(EVIL)
    ask(page, "<i>hello</i>")
    answered(page, "".join(EVIL))
    assert committed(page) == "".join(EVIL)
    expect(page.locator(".turn.user")).to_have_text("<i>hello</i>")
    assert page.locator("#dialogue img, #dialogue script, #dialogue b, #dialogue i, #strip img, #strip script").count() == 0
    assert page.title() == "FlowSpec"


def test_refusals_are_one_readable_line_and_the_question_is_not_lost(page: Page, script: Script, watched: Watched) -> None:
    watched.expected = {400, 429}
    script.refusals = [
        (400, "This model's maximum context length is 512 tokens.\nYour messages have 900.", {}),
        (429, "The server is busy.", {"Retry-After": "7"}),
    ]
    trouble = page.locator("#chat-trouble")
    ask(page, "A long question")
    expect(trouble).to_have_text("This model's maximum context length is 512 tokens. Your messages have 900.")
    expect(page.locator("#question")).to_have_value("A long question")
    expect(page.locator(".turn")).to_have_count(0)
    page.locator("#send").click()
    expect(trouble).to_have_text("The server is busy. Try again in 7 s.")
    page.locator("#send").click()
    answered(page, text_of(script.found))
    expect(trouble).to_be_hidden()
    assert [each["messages"] for each in script.asked] == [[{"role": "user", "content": "A long question"}]] * 3


def test_a_key_is_asked_for_and_a_wrong_one_again(page: Page, script: Script, watched: Watched) -> None:
    is_live(page)
    watched.expected = {401}
    script.key = "sesame"
    page.reload()
    dialog, value = page.locator("#key"), page.locator("#key-value")
    expect(page.locator("#key-reason")).to_have_text("This server asks for a key.")
    value.fill("wrong")
    value.press("Enter")
    expect(page.locator("#key-reason")).to_have_text("This key was refused: Incorrect API key provided.")
    value.fill("söme")
    value.press("Enter")
    expect(page.locator("#key-reason")).to_contain_text("ASCII")
    value.fill("sesame")
    value.press("Enter")
    expect(dialog).to_be_hidden()
    is_live(page)
    ask(page)
    answered(page, text_of(script.found))
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


def test_without_a_key_the_page_says_so_and_asks_again_for_a_chat(page: Page, script: Script, watched: Watched) -> None:
    is_live(page)
    watched.expected = {401}
    script.key = "sesame"
    page.reload()
    expect(page.locator("#key")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#state")).to_have_text("no key")
    ask(page)
    page.locator("#key-value").fill("sesame")
    page.locator("#key-form button[type=submit]").click()
    answered(page, text_of(script.found))
    is_live(page)


def test_an_answer_is_stopped_and_what_came_is_kept(page: Page, script: Script) -> None:
    script.hold = True
    ask(page)
    expect(page.locator(".turn.assistant.running")).to_contain_text("The")
    page.locator("#stop").click()
    expect(page.locator(".turn-note")).to_have_text("stopped")
    expect(page.locator(".turn.assistant")).to_contain_text("The")
    expect(page.locator("#send")).to_be_visible()
    page.wait_for_timeout(50)
    assert script.gone == 1  # the server was told


def test_everything_can_be_done_with_the_keyboard(page: Page, script: Script) -> None:
    is_live(page)
    seen: list[str] = []
    while "send" not in seen:
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", seen[-1]
    assert [each for each in seen if each in ("skip", "save", "open", "window", "new", "question", "send")] == [
        "skip",
        "save",
        "open",
        "window",
        "new",
        "question",
        "send",
    ]
    script.hold = True
    page.locator("#question").focus()
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two three")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.user")).to_have_text("One\ntwo three", use_inner_text=True)
    expect(page.locator(".turn.assistant.running")).to_contain_text("The")
    page.keyboard.press("Escape")
    expect(page.locator(".turn-note")).to_have_text("stopped")
    replayed(page, recording())
    expect(page.locator("#play")).to_be_focused()
    page.keyboard.press("Space")
    expect(page.locator("#play")).to_have_text("Play")
    page.locator("#scrub").focus()
    page.keyboard.press("Space")
    expect(page.locator("#play")).to_have_text("Pause")
    page.locator("#scrub").focus()
    page.keyboard.press("End")
    expect(page.locator("#summary")).to_contain_text("ended by stop")
    page.locator("#question").focus()
    page.keyboard.type(" ")
    expect(page.locator("#play")).to_have_text("Play")


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP, {"width": 768, "height": 1024}], ids=["phone", "desktop", "tablet"])
def test_nothing_overflows_sideways(page: Page, script: Script, viewport: dict[str, int]) -> None:
    page.set_viewport_size(viewport)  # type: ignore[arg-type]
    script.found = recording(["W" * 300, " and", " more", " of", " it"])
    ask(page, "w" * 200)
    answered(page, text_of(script.found))
    replayed(page, recording(seed=2), "a-recording-with-a-name-that-is-rather-long-for-a-small-screen.json")
    expect(page.locator("#replay")).to_be_visible()
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1] == viewport["width"]
    outside = "[...document.querySelectorAll('main *, header *, #replay *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
    assert page.evaluate(f"{outside}.map(e => e.tagName + '#' + e.id + '.' + e.className)") == []


CONTRAST = """() => {
  const parse = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(c => c / 255).map(c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return .2126 * x + .7152 * y + .0722 * z;
  };
  const ground = element => {
    for (let each = element; each; each = each.parentElement) {
      const found = parse(getComputedStyle(each).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll('body *')) {
    const text = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!text || !element.checkVisibility() || element.matches('option, i, noscript *, :disabled')) continue;
    const [one, other] = [parse(getComputedStyle(element).color), ground(element)].map(light);
    const ratio = (Math.max(one, other) + .05) / (Math.min(one, other) + .05);
    if (ratio < 4.5) poor.push(`${element.tagName} ${element.id} ${element.className}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""


def test_texts_have_enough_contrast_in_light_and_in_dark(page: Page, script: Script) -> None:
    grounds = []
    ask(page)
    answered(page, text_of(script.found))
    replayed(page, "no recording")
    expect(page.locator("#trouble")).to_be_visible()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.evaluate(CONTRAST) == []
        page.wait_for_function("() => document.getElementById('lanes').width > 300")
    assert grounds[0] != grounds[1]
    dark = picture(page, "lanes")
    page.emulate_media(color_scheme="light")
    until_changed(page, "lanes", dark)


def test_with_little_motion_wanted_a_replay_still_ends_at_its_text(page: Page) -> None:
    page.emulate_media(reduced_motion="reduce")
    found = recording(seed=4)
    replayed(page, found)
    scrub(page, 1)
    expect(page.locator("#strip-text")).to_have_text(text_of(found), use_inner_text=False)


def test_a_hidden_tab_draws_nothing(page: Page) -> None:
    replayed(page, recording())
    page.wait_for_function("() => document.getElementById('scrub').value > 0.05")
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.evaluate("new Promise(done => setTimeout(done, 100))")
    at, seen = page.locator("#scrub").input_value(), picture(page, "lanes")
    page.evaluate("new Promise(done => setTimeout(done, 200))")
    assert (page.locator("#scrub").input_value(), picture(page, "lanes")) == (at, seen)
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_function("at => document.getElementById('scrub').value > at", arg=float(at))


def called(origin: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str]]:
    """A response's status and headers, of a path that no client has tidied up."""
    line = http.client.HTTPConnection(origin.removeprefix("http://"), timeout=60)
    try:
        line.request(method, path, headers=headers)
        found = line.getresponse()
        found.read()
        return found.status, {name.lower(): value for name, value in found.getheaders()}
    finally:
        line.close()


def test_the_pages_files_and_no_others_are_served_with_what_keeps_them_safe(watched: Watched) -> None:
    names = sorted(each.name for each in resources.files("flowspec.serve").joinpath("page").iterdir())
    assert {"index.html", "style.css", "main.js"} <= set(names)
    types = {
        "html": "text/html; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "svg": "image/svg+xml",
    }
    for path in ["/", *(f"/page/{name}" for name in names)]:
        status, headers = called(watched.origin, path)
        assert (status, headers["content-type"]) == (200, types[path.rpartition(".")[2] if path != "/" else "html"])
        assert headers["cache-control"] == "no-cache"
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';")
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert called(watched.origin, path, **{"If-None-Match": headers["etag"]})[0] == 304
    for path in ["/page/", "/page/../page.py", "/page/%2e%2e/page.py", "/page/..%2fpage.py", "/page/none.js", "/page/page.py", "/page"]:
        assert called(watched.origin, path)[0] == 404
    assert called(watched.origin, "/", "POST")[0] == 405


def test_the_page_names_no_other_place_and_writes_no_markup() -> None:
    assert page_routes()
    for each in resources.files("flowspec.serve").joinpath("page").iterdir():
        text = each.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), each.name
        assert not re.search(r"\sstyle=|\son\w+=", text), each.name
