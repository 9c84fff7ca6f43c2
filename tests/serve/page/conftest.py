"""One headless Chromium for all tests of the page; each has a context of its own in it, and what the page
must never do is looked for in all."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.serve.page.pages import DESKTOP, WAIT_MS, Watched, installed
from tests.serve.page.scripted import Script, serving

expect.set_options(timeout=WAIT_MS)


@pytest.fixture(
    scope="package"
)  # no longer: while it is there, no other test of its process can run an event loop
def browser() -> Iterator[Browser]:
    path = installed()
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()


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
