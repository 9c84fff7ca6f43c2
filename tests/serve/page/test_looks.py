"""The page on small and dark screens, in a tab that nobody sees, and its files as they are served."""

from __future__ import annotations

import http.client
import re
from importlib import resources

from playwright.sync_api import Page, expect

from flowspec.serve.page import page_routes
from tests.serve.page.pages import (
    DESKTOP,
    PHONE,
    TABLET,
    Watched,
    answered,
    ask,
    picture,
    replayed,
    until_changed,
)
from tests.serve.page.recordings import recording, text_of
from tests.serve.page.scripted import Script


def test_nothing_overflows_sideways(page: Page, script: Script) -> None:
    script.found = recording(["W" * 300, " and", " more", " of", " it"])
    page.set_viewport_size(PHONE)
    ask(page, "w" * 200)
    answered(page, text_of(script.found))
    replayed(page, recording(seed=2), "a-recording-with-a-name-that-is-rather-long-for-a-small-screen.json")
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


CONTRAST = """() => {
  const parse = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(c => c / 255)
      .map(c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
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
        assert (status, headers["content-type"]) == (
            200,
            types[path.rpartition(".")[2] if path != "/" else "html"],
        )
        assert headers["cache-control"] == "no-cache"
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        )
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert called(watched.origin, path, **{"If-None-Match": headers["etag"]})[0] == 304
    for path in [
        "/page/",
        "/page/../page.py",
        "/page/%2e%2e/page.py",
        "/page/..%2fpage.py",
        "/page/none.js",
        "/page/page.py",
        "/page",
    ]:
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
