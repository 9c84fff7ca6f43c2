"""The page of a server that loads its model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from threading import Thread

import pytest
from playwright.sync_api import Page, expect

from flowspec.serve.guard import AccessRules
from flowspec.serve.server import Loading, bind, loading_server, server_of
from tests.serve.page.pages import DESKTOP, PHONE, Watched, answered, ask, is_live
from tests.serve.page.recordings import text_of
from tests.serve.page.scripted import Script


class Beginning:
    """A server that loads until it is told to go on."""

    def __init__(self, script: Script) -> None:
        self.loading = Loading("bundled")
        self.bound = bind("127.0.0.1", 0)
        self._first = loading_server(self.bound, self.loading, AccessRules(), has_page=True)
        self._first.__enter__()
        self._server = server_of(script.app())
        self._thread = Thread(target=lambda: asyncio.run(self._server.serve(sockets=[self.bound])))

    def go_on(self) -> None:
        self._first.__exit__(None, None, None)
        self._thread.start()

    def end(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self.bound.close()


@pytest.fixture
def beginning(script: Script) -> Iterator[Beginning]:
    found = Beginning(script)
    yield found
    found.end()


@pytest.fixture
def watched(beginning: Beginning) -> Watched:
    return Watched(f"http://127.0.0.1:{beginning.bound.getsockname()[1]}", expected={503})


def test_the_page_shows_how_far_loading_is_and_goes_on_by_itself(
    page: Page, beginning: Beginning, script: Script
) -> None:
    expect(page.locator("#state")).to_have_text("loading")
    expect(page.locator("#sentence")).to_contain_text("The server loads the model bundled.")
    expect(page.locator("#model")).to_have_text("model bundled")
    beginning.loading.take("pi-a: ready", 1)
    beginning.loading.take("pi-b: loading", 0.25)
    expect(page.locator("#sentence")).to_contain_text("the model bundled (1 of 2 devices ready).")
    cards = page.locator("#map li")
    expect(cards).to_have_count(2)
    expect(cards.nth(0)).to_have_text(re.compile(r"^pi-aready100%\s*$"))
    expect(cards.nth(1)).to_contain_text("pi-b")
    expect(cards.nth(1)).to_contain_text("loading")
    expect(cards.nth(1)).to_contain_text("25%")
    for size in (PHONE, DESKTOP):
        page.set_viewport_size(size)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    ask(page)
    expect(page.locator("#chat-trouble")).to_contain_text("The model is being loaded (pi-a: ready 100%, pi-b")
    beginning.go_on()
    is_live(page)
    expect(page.locator("#chat-trouble")).to_be_hidden()
    expect(page.locator("#map li")).to_have_count(6)
    page.locator("#send").click()
    answered(page, text_of(script.found))
