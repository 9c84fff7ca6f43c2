"""The page as one file, which no server serves: its recordings, and nothing else, without any call."""

from __future__ import annotations

from playwright.sync_api import Browser, expect

from tests.launch.scripts import script
from tests.serve.page.pages import PHONE, scrub

recordings = script("recordings")


def test_the_page_shows_its_recordings_as_a_file(browser: Browser) -> None:
    context = browser.new_context(viewport=PHONE)
    page = context.new_page()
    wrong: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(recordings.INDEX.as_uri())
    expect(page.locator("#state")).to_be_hidden()
    expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#recording option")).to_have_text(list(recordings.TITLES.values()))
    expect(page.locator("#play")).to_have_text("Pause")
    scrub(page, 1)
    expect(page.locator("#sentence")).to_contain_text("Done: 96 tokens in 2.6 s, about 10.4 times as fast")
    expect(page.locator("[data-figure=guessed_ahead]")).to_have_text("99%")
    expect(page.locator("[data-figure=times_plain]")).to_contain_text("×")
    page.locator("#recording").select_option(label=recordings.TITLES["plain"])
    expect(page.locator("#model")).to_contain_text("method ar")
    scrub(page, 1)
    expect(page.locator("[data-figure=times_plain]")).to_have_text("1×")
    page.locator("#recording").select_option(label=recordings.TITLES["loss"])
    expect(page.locator("#map li")).to_have_count(6)
    scrub(page, 1)
    expect(page.locator("#sentence")).to_contain_text("Done: ")
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1]
    context.close()
    assert wrong == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
