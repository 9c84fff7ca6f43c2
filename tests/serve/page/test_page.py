"""The live view in a headless Chromium, before a server whose API is scripted: a chat, refusals, keys, and
the keyboard alone."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.nightly import at_night
from tests.runtime.clusters import wait_until
from tests.serve.page.pages import (
    Watched,
    answered,
    ask,
    is_live,
    picture,
    replayed,
    until_changed,
    until_committed,
)
from tests.serve.page.recordings import recording, text_of
from tests.serve.page.scripted import Script

EVIL = [
    "<img src=x onerror=alert(1)>",
    "<script>document.title='owned'</script>",
    " <b>bold</b>",
    " &amp;",
    " \u202eright",
]


def test_a_chat_shows_the_answer_and_moves_timeline_tree_and_tiles(page: Page, script: Script) -> None:
    is_live(page)
    before = {canvas: picture(page, canvas) for canvas in ("lanes", "tree")}
    expect(page.locator("[data-figure=tokens_per_s]")).to_have_text("–")
    ask(page)
    for canvas, earlier in before.items():
        until_changed(page, canvas, earlier)
    answered(page, text_of(script.found))
    expect(page.locator("[data-figure=tokens_per_s]")).to_have_text(re.compile(r"^\d+\.\d$"))
    expect(page.locator("#tiles .tile:has([data-figure=times_plain])")).to_have_text(
        re.compile(r"^Speed-up\d+\.\d×over \d+\.\d tokens/s without guesses$")
    )
    expect(page.locator("[data-figure=guessed_ahead]")).to_have_text("96%")
    expect(page.locator("#details [data-figure=rho]")).to_have_text("80%")
    expect(page.locator("#summary")).to_contain_text("tokens, 23 of them guessed ahead. ")
    until_committed(page, text_of(script.found))
    card = page.locator("#map li").nth(1)
    expect(card).to_have_text(re.compile(r"^4 msjetson-aidlelayers 0–21\.0 GiB49 °C\d+% busy$"))
    expect(page.locator("#sentence")).to_have_text(
        re.compile(r"^Done: 24 tokens in \d\.\d s, about \d\.\d times as fast .* 23 of them")
    )
    expect(page.locator("#lanes")).to_have_attribute("aria-label", re.compile(r"jetson-a \d+% busy"))
    expect(page.locator(".turn-note")).to_have_text("24 tokens")


@at_night
def test_the_next_question_carries_the_dialogue_without_its_thoughts_and_a_new_dialogue_does_not(
    page: Page, script: Script
) -> None:
    script.found = recording(["Yes", "."])
    script.thoughts = "<b>Hm.</b>"
    ask(page, "Is it exact?")
    answered(page, "Yes.")
    thoughts = page.locator(".thoughts")
    expect(thoughts.locator("div")).to_have_text("<b>Hm.</b>")
    expect(thoughts.locator("div")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator("div")).to_be_visible()
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


def test_markup_in_tokens_and_answers_stays_text(page: Page, script: Script) -> None:
    script.found = recording(EVIL)
    ask(page, "<i>hello</i>")
    turn = page.locator(".turn.assistant:not(.running)")
    expect(turn).to_have_text("".join(EVIL), use_inner_text=False)  # inner text has no marks of direction
    until_committed(page, "".join(EVIL))
    expect(page.locator(".turn.user")).to_have_text("<i>hello</i>")
    alive = "#dialogue img, #dialogue script, #dialogue b, #dialogue i, #strip img, #strip script"
    assert page.locator(alive).count() == 0
    assert page.title() == "FlowSpec"


MARKDOWN = (
    "# Title\n\nSome **bold**, *soft* and `a < b` text.\n\n- one\n- two\n\n1. first\n\n"
    "```py\nx = 1 < 2\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> said\n\nA [link](javascript:alert(1)) and ![p](http://x.y/z.png)"
    " <a href=x onclick=alert(1)>no</a>\n\n<iframe src=x></iframe>"
)


def test_an_answers_markdown_is_shown_and_nothing_in_it_is_alive(page: Page, script: Script) -> None:
    script.found = recording([MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)])
    ask(page)
    turn = page.locator(".turn.assistant:not(.running)")
    expect(turn.locator("h3")).to_have_text("Title")
    expect(turn.locator("strong")).to_have_text("bold")
    expect(turn.locator("em")).to_have_text("soft")
    expect(turn.locator("p code")).to_have_text("a < b")
    expect(turn.locator("ul > li")).to_have_text(["one", "two"])
    expect(turn.locator("ol > li")).to_have_text("first")
    expect(turn.locator("pre code")).to_have_text("x = 1 < 2")
    expect(turn.locator("td")).to_have_text(["1", "2"])
    expect(turn.locator("blockquote")).to_have_text("said")
    expect(turn).to_contain_text("link (javascript:alert(1))")
    expect(turn).to_contain_text("![p](http://x.y/z.png) <a href=x onclick=alert(1)>no</a>")
    expect(turn).to_contain_text("<iframe src=x></iframe>")
    known = {"H3", "P", "STRONG", "EM", "CODE", "UL", "OL", "LI", "PRE", "DIV", "SPAN", "BR", "BLOCKQUOTE"}
    known |= {"TABLE", "THEAD", "TBODY", "TR", "TH", "TD"}
    found = turn.evaluate(
        "turn => [...turn.querySelectorAll('*')].map(e => [e.tagName, e.attributes.length])"
    )
    assert {tag for tag, _ in found} <= known
    assert {tag for tag, attributes in found if attributes} <= {"DIV", "OL"}, (
        "a table's frame, a list's start"
    )
    # what comes in pieces is in the end as if it had come at once
    said = f"{MARKDOWN}\n\n- a\n\n  b\n\nUnder\n===\n\n    code\n\n\n[far][x] `\r\nlast\n\n[x]: http://x.y"
    parts = page.evaluate(
        """async (text) => {
          const { Markdown } = await import("/page/markdown.js");
          const shown = (ends) => {
            const element = document.createElement("div");
            const markdown = new Markdown(element);
            for (const end of ends) markdown.show(text.slice(0, end), end === text.length);
            return element.innerHTML;
          };
          return [shown([text.length]), shown([...text].map((_, at) => at + 1))];
        }""",
        said,
    )
    assert "far (http://x.y)" in parts[0]
    assert parts[0] == parts[1]


def test_an_answer_that_markdown_is_not_made_for_is_shown_as_it_is(page: Page, script: Script) -> None:
    for text in (">" * 15_000 + "a", "_a*" * 2_000, "[" * 5_000):
        script.found = recording([text])
        ask(page)
        answered(page, text)


def test_refusals_are_one_readable_line_and_the_question_is_not_lost(
    page: Page, script: Script, watched: Watched
) -> None:
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
    expect(page.locator(".example")).to_have_count(3)
    page.locator("#send").click()
    expect(trouble).to_have_text("The server is busy. Try again in 7 s.")
    page.locator("#send").click()
    answered(page, text_of(script.found))
    expect(trouble).to_be_hidden()
    assert [each["messages"] for each in script.asked] == [
        [{"role": "user", "content": "A long question"}]
    ] * 3


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


def test_an_answer_is_stopped_and_what_came_is_kept(page: Page, script: Script) -> None:
    script.hold = True
    ask(page)
    expect(page.locator(".turn.assistant.running")).to_contain_text("The")
    page.locator("#stop").click()
    expect(page.locator(".turn-note")).to_have_text("stopped")
    expect(page.locator(".turn.assistant")).to_contain_text("The")
    expect(page.locator("#send")).to_be_visible()
    wait_until(lambda: script.gone == 1, "the server is told")


def test_everything_can_be_done_with_the_keyboard(page: Page, script: Script) -> None:
    is_live(page)
    seen: list[str] = []
    while "send" not in seen:
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", seen[-1]
    stops = ["to-chat", "save", "open", "strip", "window", "new", "question", "send"]
    assert [each for each in seen if each in stops] == stops
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
    expect(page.locator("#summary")).to_contain_text("of them guessed ahead")
    page.locator("#question").focus()
    page.keyboard.type(" ")
    expect(page.locator("#play")).to_have_text("Play")
