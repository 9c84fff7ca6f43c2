"""The page before the real server with four local stages: a chat whose answer is the model's own, and that
answer's recording replayed."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from flowspec.llm import LLM
from flowspec.runtime.watching import watch_session
from flowspec.serve.guard import AccessRules
from flowspec.serve.live import PATHS, live_routes, page_routes
from tests.serve.page.pages import (
    WAIT_MS,
    Watched,
    answered,
    ask,
    committed,
    is_live,
    picture,
    replayed,
    scrub,
    until_changed,
    until_committed,
)
from tests.serve.servers import MODEL, Running, running

KEY = "sesame-1"
QUESTION = "What is 17 + 25?"


@pytest.fixture
def real() -> Iterator[Running]:
    with LLM(dtype="float32", local=4, drafter="bundled") as llm:
        assert llm.tokenizer is not None
        watch = watch_session(llm.session, llm.tokenizer.decode, keeps=True)
        with running(
            llm,
            access=AccessRules(keys=(KEY.encode(),), free=PATHS),
            more=lambda service: [*page_routes(), *live_routes(watch, service.stopping.is_set)],
        ) as found:
            yield found
        watch.close()


@pytest.fixture
def watched(real: Running) -> Watched:
    return Watched(real.url.removesuffix("/v1"), expected={401, 404})


def saved(page: Page, folder: Path) -> str:
    """What comes to lie there, once it is whole. Playwright does not hear of Firefox's downloads."""
    for _ in range(WAIT_MS // 100):
        for path in folder.iterdir():
            with contextlib.suppress(ValueError):
                recording = json.loads(path.read_text("utf-8"))
                path.unlink()
                return json.dumps(recording)
        page.wait_for_timeout(100)
    raise AssertionError(f"nothing whole was saved in {folder}")


def test_a_chat_on_four_stages_and_its_replay(
    page: Page, real: Running, tmp_path_factory: pytest.TempPathFactory
) -> None:
    page.locator("#key-value").fill(KEY)
    page.locator("#key-value").press("Enter")
    is_live(page)
    expect(page.locator("#map li")).to_have_count(6)  # the head, four devices, and back to the head
    page.locator("#save").click()
    expect(page.locator("#trouble")).to_contain_text("there is no recording")
    before = {canvas: picture(page, canvas) for canvas in ("lanes", "tree")}
    ask(page, QUESTION)
    for canvas, earlier in before.items():
        until_changed(page, canvas, earlier)
    with real.client(KEY) as client:
        wanted = (
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": QUESTION}])
            .choices[0]
            .message.content
        )
    assert wanted
    answered(page, wanted)
    expect(page.locator("#request option")).to_have_count(3)  # the newest, the page's and the other client's
    expect(page.locator("#request")).not_to_contain_text("running")
    expect(page.locator("#summary")).to_contain_text("of them guessed ahead")
    expect(page.locator("[data-figure=tokens_per_s]")).to_have_text(re.compile(r"^\d+(\.\d)?$"))
    expect(page.locator("#map li").nth(1)).to_contain_text("local-0")
    expect(page.locator("#map li").nth(1)).to_contain_text("MiB")
    said = committed(page)
    page.locator("#save").click()
    replayed(page, saved(page, tmp_path_factory.getbasetemp() / "downloads"))
    expect(page.locator("#state")).to_contain_text("replay of")
    scrub(page, 0)
    expect(page.locator("#summary")).not_to_contain_text("of them guessed ahead")
    at_first = committed(page)
    scrub(page, 1)
    expect(page.locator("#summary")).to_contain_text("of them guessed ahead")
    until_committed(page, said)
    assert len(at_first) < len(said)
    assert said.startswith(wanted)
    page.locator("#back").click()
    is_live(page)
