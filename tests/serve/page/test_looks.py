"""The page on small screens, in a tab that nobody sees, and its files as they are served."""

from __future__ import annotations

import http.client
import re
from importlib import resources

from playwright.sync_api import Page, expect

from flowspec.serve.live import page_routes
from tests.nightly import at_night
from tests.serve.page.pages import DESKTOP, PHONE, TABLET, Watched, answered, ask, picture, replayed
from tests.serve.page.recordings import recording, text_of
from tests.serve.page.scripted import Script


def test_nothing_overflows_sideways(page: Page, script: Script) -> None:
    script.found = recording(["W" * 300, " and", " more", " of", " it"])
    page.set_viewport_size(PHONE)
    ask(page, "w" * 200)
    answered(page, text_of(script.found))
    replayed(page, recording(), "a-recording-with-a-name-that-is-rather-long-for-a-small-screen.json")
    expect(page.locator("#replay")).to_be_visible()
    outside = (
        "[...document.querySelectorAll('main *, header *, #replay *')].filter(e => "
        "e.getBoundingClientRect().right > innerWidth + 1)"
    )
    for size in (PHONE, TABLET, DESKTOP):
        page.set_viewport_size(size)
        width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1] == size["width"]
        assert page.evaluate(f"{outside}.map(e => e.tagName + '#' + e.id + '.' + e.className)") == []


@at_night
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
        "txt": "text/plain; charset=utf-8",
    }
    for path in ["/", *(f"/page/{name}" for name in names)]:
        status, headers = called(watched.origin, path)
        kind = path.rpartition(".")[2] if path != "/" else "html"
        assert (status, headers["content-type"]) == (200, types[kind])
        assert headers["cache-control"] == "no-cache"
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        )
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert called(watched.origin, path, **{"If-None-Match": headers["etag"]})[0] == 304
    for path in ("/page/", "/page/../page.py", "/page/%2e%2e/page.py", "/page/..%2fpage.py", "/page/none.js"):
        assert called(watched.origin, path)[0] == 404
    assert called(watched.origin, "/", "POST")[0] == 405


def test_the_page_names_no_other_place_and_writes_no_markup() -> None:
    assert page_routes()
    for each in resources.files("flowspec.serve").joinpath("page").iterdir():
        if each.name.startswith("marked"):
            continue  # others' code, whose maker is named in it
        text = each.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text
        ), each.name
        assert not re.search(r"\sstyle=|\son\w+=", text), each.name
