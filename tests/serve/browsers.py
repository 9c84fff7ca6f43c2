"""One headless Chromium for all tests of the page; each has a context of its own in it, and what the page must never do is looked for in all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, Page, Response, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
"""As `launch/browser` looks for them."""
WAIT_MS = 15_000


def installed() -> str:
    """The path of a Chromium. Skips without one, but fails where the project's own checks run: there it is part of them."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        missing = f"no browser ({', '.join(NAMES)}) is installed; launch/browser installs one"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
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


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = installed()
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()
