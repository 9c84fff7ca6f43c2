"""The live view in a terminal: it fits 80 columns whatever is shown, tells what is known, and refuses in one
line."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flowspec.cli import top
from flowspec.cli.live_source import played
from flowspec.cli.screen import level, meter, report, screen, strip_line
from flowspec.watch.figures import Frame
from flowspec.watch.recording import as_text, record_document, write_recording
from flowspec.watch.state import WatchState
from tests.cli.running import Run
from tests.cli.terminal import Window
from tests.serve.page.scripted import serving
from tests.watch.test_recorder import ABOUT, watch_schedule

WIDTH = 80
HOSTILE = "a\x1b[2J\x07\n[red]b[/red]" + "长" * 60


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A schedule with several answers, and what devices said meanwhile."""
    frames = list(watch_schedule(17)[0].frames)
    stages = next(frame["stages"] for frame in frames if frame["kind"] == "stages")
    rows = [device(stage["name"]) for stage in stages]
    return record_document(ABOUT, [frames[0], {"t": 0.0, "kind": "devices", "devices": rows}, *frames[1:]])


def device(name: str, **changes: Any) -> dict[str, Any]:
    plain = {"name": name, "memory_bytes": 5 << 30, "temperature_c": 61.4, "queued": 2, "done": 9}
    return {**plain, "running_s": 0.1, "present": True, "throttled": True, **changes}


def drawn(present: WatchState, about: dict[str, Any], width: int = WIDTH, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, height=24, force_terminal=False, color_system=None)
    console.print(screen(present, about, **options))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def full(stages: int, name: str = "board") -> WatchState:
    """Everything at its widest."""
    present = WatchState()
    present.t = 123456.7
    names = [f"{name}-{index}" for index in range(stages)]
    present.stages = [{"name": each, "layers": [4000 + at, 4001 + at]} for at, each in enumerate(names)]
    rows = [device(each, memory_bytes=1000 << 30, temperature_c=-99.0, queued=1000) for each in names]
    present.devices = {"t": 1.0, "kind": "devices", "devices": [*rows, device("spare")]}
    shares = {"tokens_per_s": 99999.9, "S": 999.99, "rho": 1.0, "acceptance": 999.99}
    present.figures = {"t": 1.0, "kind": "figures", **shares, "busy": [1.0] * stages, "dropped_rows": 1 << 26}
    for number in range(6):
        begin: Frame = {"t": 1.0, "kind": "begin", "request": number, "prompt_tokens": 12, "reused": 0}
        present.take({**begin, "text": ""})
        present.answers[number].text = HOSTILE
    return present


ABOUT_WIDE = {
    "world": "simulated",
    "model": HOSTILE,
    "method": "flowspec-paper",
    "drafters": ["a" * 60, "b" * 60],
    "stages": [],
}


@pytest.mark.parametrize("stages", [1, 24])
@pytest.mark.parametrize("blocks", [True, False])
def test_the_widest_screen_fits_eighty_columns(stages: int, blocks: bool) -> None:
    for name in ("board", HOSTILE):
        text = drawn(full(stages, name), ABOUT_WIDE, blocks=blocks)
        assert [line for line in text.splitlines() if cell_len(line) > WIDTH] == []
        assert not {"\x1b", "\x07"} & set(text)
        assert len(text.splitlines()) == 3 + 1 + stages + 1 + 1 + 5, "no line wraps"
        assert len(strip_line(full(stages, name), 20)) < 20
    few = drawn(full(24), ABOUT_WIDE, rows_max=5)
    assert "and 20 more devices" in few
    assert ("board-4" in few, "board-5" in few) == (True, False)


def test_what_is_known_is_shown() -> None:
    present = full(2)
    present.answers[3].tokens = 45
    text = drawn(present, {**ABOUT_WIDE, "model": "bundled", "drafters": ["draft"]})
    assert "bundled  flowspec-paper, drafter draft, simulated" in text
    assert "99999.9 tokens/s" in text
    assert "answer 3: 45 tokens" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "here" in lines["board-1"]
    assert "unused" in lines["spare"]
    assert strip_line(full(4), 80, blocks=False).startswith("busy 9999  99999.9 tokens/s")
    assert strip_line(None, 80) == ""


def test_what_is_lost_comes_back_or_fails_is_shown() -> None:
    present = full(2)
    present.take({"t": 2.0, "kind": "lost", "silent_s": 1.0})
    gone = [device("board-0", present=False), device("gone", present=False)]
    present.devices = {"t": 1.0, "kind": "devices", "devices": gone}
    text = drawn(present, ABOUT_WIDE)
    assert "the pipeline was lost" in text
    assert "another is being formed" in strip_line(present, 80)
    for name in ("board-0", "gone"):
        assert "lost" in text.split(name)[1].splitlines()[0], "whether or not it had layers at last"
    gone[1]["loading"] = {"doing": "starting", "share": 0.0}
    text = drawn(present, ABOUT_WIDE)
    assert "loads" in text.split("gone")[1].splitlines()[0], "it is back"
    assert "loads" not in text.split("board-0")[1].splitlines()[0]
    rows = [(row["name"], row["lost"]) for row in report(present, ABOUT_WIDE)["devices"]]
    assert rows == [("board-0", True), ("board-1", None), ("gone", True)]
    present.take({"t": 3.0, "kind": "failed", "text": "no device is left"})
    assert report(present, ABOUT_WIDE)["failed"] == "no device is left"
    for text in (strip_line(present, 80), drawn(present, ABOUT_WIDE)):
        assert "it failed: no device is left" in text


def test_bars_and_levels() -> None:
    assert [meter(share, 2) for share in (-1, 0, 0.5, 0.75, 1, 7)] == ["  ", "  ", "█ ", "█▌", "██", "██"]
    assert meter(0.5, 4, blocks=False) == "##.."
    assert [level(share) for share in (0, 0.5, 0.999, 1)] == ["▁", "▅", "█", "█"]
    assert [level(share, blocks=False) for share in (0, 0.55, 1)] == ["0", "5", "9"]


def test_a_recording_is_shown_at_once_or_played(
    document: dict[str, Any], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "answer.json"
    write_recording(path, document)
    asked = ("top", "--replay", path)
    last = run(*asked, "--once", "--json").json
    present = WatchState()
    for frame in document["frames"]:
        present.take(frame)
    assert last == report(present, document)
    assert "no answer is under way" in run(*asked, "--once").out
    assert run(*asked, "--json", "--speed", "1000").answers[-1] == last
    steps = list(played(document, 1000.0))
    assert [frame for _, frames in steps for frame in frames] == document["frames"]

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "lines", interrupt)
    run(*asked)  # Ctrl-C is how it ends


class Server:
    """Answers every request with what is prepared."""

    status, kind, body, url = 200, "text/event-stream", b"", ""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []

    async def answer(self, request: Request) -> Response:
        self.asked.append((request.url.path, request.headers.get("Authorization")))
        return Response(self.body, self.status, media_type=self.kind)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    with serving(Starlette(routes=[Route("/{path:path}", found.answer)])) as found.url:
        yield found


def stream(document: dict[str, Any]) -> str:
    hello = {name: value for name, value in document.items() if name != "frames"} | {"live": True}
    halves = document["frames"][:20], document["frames"][20:]
    events = [("hello", hello), *(("frames", frames) for frames in halves)]
    return ": hello\n\n" + "".join(f"event: {name}\ndata: {as_text(value)}\n\n" for name, value in events)


def test_a_server_is_shown(
    document: dict[str, Any], server: Server, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.body = stream(document).encode()
    monkeypatch.setenv("FLOWSPEC_API_KEY", "secret")
    shown = run("top", "--url", server.url, "--json").answers
    present = WatchState()
    for frame in document["frames"]:
        present.take(frame)
    assert shown[-1] == report(present, document)
    assert server.asked == [("/live/events", "Bearer secret")]
    monkeypatch.setenv("FLOWSPEC_API_KEY", "\nfirst-key \nsecond-key\n")
    assert "stage-0" in run("top", "--url", server.url + "/v1/", "--once").out
    assert server.asked[-1] == ("/live/events", "Bearer first-key")
    monkeypatch.setenv("FLOWSPEC_API_KEY", "a\x01b")
    (line,) = run("top", "--url", server.url, status=2).told
    assert "FLOWSPEC_API_KEY: expected a key" in line


SSE = "text/event-stream"
UNKNOWN = "what this FlowSpec does not know"
OTHERS = (
    ("", 401, "application/json", "FLOWSPEC_API_KEY"),
    ("<html>\x1b[2J", 200, "text/html", "got status 200: <html>[2J"),
    ("gone", 404, SSE, "got status 404: gone"),
    ("", 200, SSE, "ended the stream before it said anything"),
    ('event: loading\ndata: {"steps": []}\n\n', 200, SSE, "still loads its model"),
    ("event: hello\ndata: {\n\n", 200, SSE, "an event that is no JSON"),
    ("event: hello\ndata: []\n\n", 200, SSE, UNKNOWN),
    ('event: frames\ndata: [{"t": 1, "kind": "else"}]\n\n', 200, SSE, UNKNOWN),
    ("event: frames\ndata: 7\n\n", 200, SSE, UNKNOWN),
)


def test_other_servers_or_none_are_one_line(server: Server, run: Run) -> None:
    for body, server.status, server.kind, message in OTHERS:
        server.body = body.encode()
        (line,) = run("top", "--url", server.url, "--json", status=1).told
        assert message in line
        assert "\x1b" not in line
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    (line,) = run("top", "--url", url, status=1).told
    assert "nothing answers there" in line


def test_q_leaves_and_the_last_line_says_so(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    write_recording(path, document)
    with Window("top", "--replay", str(path), "--speed=1000") as window:
        window.until(lambda screen: screen.rows[-1] == top.LEAVES)
        window.type("xq")
        assert window.ended() == 0
