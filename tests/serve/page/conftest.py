"""One headless browser of a kind for all tests of the page; each has a context of its own in it, and what the
page must never do is looked for in all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.nightly import nightly
from tests.serve.page.pages import CHROMIUM, DESKTOP, FIREFOX, WAIT_MS, Watched, installed
from tests.serve.page.scripted import Script, serving

expect.set_options(timeout=WAIT_MS)


Browsers = Callable[[str], Browser]


# No longer: while it is there, no other test of its process can run an event loop.
@pytest.fixture(scope="package")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browsers]:
    """The browser of a name, begun when the first test asks for it."""
    begun: dict[str, Browser] = {}
    folder = tmp_path_factory.getbasetemp() / "downloads"
    folder.mkdir(exist_ok=True)  # tests of other folders may run between those of this one
    with sync_playwright() as playwright:

        def of(name: str) -> Browser:
            if name not in begun:
                options = {"executable_path": installed(name), "downloads_path": folder}
                # By the standard protocol; Playwright 1.65 asks for more than Debian's has.
                if name == FIREFOX:
                    begun[name] = playwright.firefox.launch(**options, channel="moz-firefox")
                else:
                    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
                    begun[name] = playwright.chromium.launch(**options, args=flags)
            return begun[name]

        yield of
        for each in begun.values():
            each.close()


@pytest.fixture(params=nightly((CHROMIUM,), (CHROMIUM, FIREFOX)))
def browser_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def browser(browsers: Browsers, browser_name: str) -> Browser:
    return browsers(browser_name)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def watched(script: Script) -> Iterator[Watched]:
    with serving(script.app()) as origin:
        yield Watched(origin)


@pytest.fixture
def page(browser: Browser, watched: Watched) -> Iterator[Page]:
    """A page at the server, at a desktop's size; a console error, a failed call or a request to anybody else
    fails its test."""
    context = browser.new_context(viewport=DESKTOP)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    watched.watch(page)
    page.goto(watched.origin)
    yield page
    context.close()
    assert watched.wrong == []
