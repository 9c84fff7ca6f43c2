"""What tests do with a page in a browser, and what a page must never do."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Page, Response, ViewportSize, expect

CHROMIUM, FIREFOX = "chromium", "firefox"
NAMES = {CHROMIUM: ("chromium", "chromium-browser", "google-chrome"), FIREFOX: ("firefox-esr",)}
"""As `launch/needs` looks for them."""
WAIT_MS = 120_000

DESKTOP: ViewportSize = {"width": 1280, "height": 800}
TABLET: ViewportSize = {"width": 768, "height": 1024}
PHONE: ViewportSize = {"width": 390, "height": 844}


def installed(browser: str) -> str:
    """The path of a browser. Without it the test fails, unless `launch/needs` said that it cannot be had."""
    names = NAMES[browser]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        missing = f"no {browser} ({', '.join(names)}) is installed; launch/needs installs it"
        if browser in os.environ.get("FLOWSPEC_NO_BROWSER", "").split():
            pytest.skip(missing)
        pytest.fail(missing)
    return found


@dataclass
class Watched:
    """What a page did that it must not do. A test that has a call refused names the status in `expected`."""

    origin: str
    expected: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.wrong.append(f"uncaught: {error}"))
        page.on("request", lambda request: self._asked(request.url))
        page.on("response", self._answered)
        page.on("console", lambda message: self._said(message.type, message.text))

    def _asked(self, url: str) -> None:
        if not url.startswith((f"{self.origin}/", "data:", f"blob:{self.origin}/")):
            self.wrong.append(f"asked for {url}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400 and response.status not in self.expected:
            self.wrong.append(f"{response.url}: {response.status}")

    def _said(self, kind: str, text: str) -> None:
        refused = any(f"the server responded with a status of {status} " in text for status in self.expected)
        if kind in ("error", "warning") and not refused:
            self.wrong.append(f"{kind}: {text}")


def is_live(page: Page) -> None:
    expect(page.locator("#state")).to_have_text("live")


def ask(page: Page, text: str = "Why is the pipeline full?") -> None:
    page.locator("#question").fill(text)
    page.locator("#send").click()


def answered(page: Page, text: str) -> None:
    expect(page.locator(".turn.assistant:not(.running)").last).to_have_text(text, use_inner_text=True)


def replayed(page: Page, found: object, name: str = "answer.json") -> None:
    content = found if isinstance(found, str) else json.dumps(found)
    page.locator("#file").set_input_files(
        {"name": name, "mimeType": "application/json", "buffer": content.encode()}
    )


def picture(page: Page, canvas: str) -> str:
    return str(page.evaluate("id => document.getElementById(id).toDataURL()", canvas))


def until_changed(page: Page, canvas: str, before: str) -> None:
    page.wait_for_function(
        "([id, before]) => document.getElementById(id).toDataURL() !== before", arg=[canvas, before]
    )


def committed(page: Page) -> str:
    return page.locator("#strip-text").text_content() or ""


def until_committed(page: Page, text: str) -> None:
    """Events of the strip and the answer are two streams: either may be the later."""
    page.wait_for_function("text => document.getElementById('strip-text').textContent === text", arg=text)


def scrub(page: Page, share: float) -> None:
    page.locator("#scrub").evaluate(
        "(slider, share) => { slider.value = +slider.min + share * (slider.max - slider.min); "
        "slider.dispatchEvent(new Event('input')); }",
        share,
    )
