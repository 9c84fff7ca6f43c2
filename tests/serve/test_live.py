"""The live view over HTTP: a real server and plain clients at its stream; nothing is left when they go."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from flowspec.runtime.watching import WATCHERS_MAX, Watch
from flowspec.serve import live
from flowspec.watch.state import WatchState
from tests.runtime.clusters import wait_until
from tests.watch.heads import VirtualHead, watched
from tests.watch.test_watching import shown


class Served:
    """A server over a virtual head, in a thread of its own."""

    def __init__(self) -> None:
        self.head = VirtualHead(12)
        self.watch: Watch = watched(self.head, keeps=True)
        app = Starlette(routes=live.live_routes(self.watch, lambda: self.server.should_exit))
        self.server = uvicorn.Server(
            uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="none")
        )
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        wait_until(lambda: self.server.started, "the server is there")
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.watch.close()

    def watched(self) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", "/live/events")
        return connection, connection.getresponse()


def events(response: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    """The name and the document of each event of a stream."""
    name = ""
    for line in response:
        key, _, value = line.decode().strip().partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value)


@pytest.fixture
def running() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


def test_a_stream_tells_all_of_an_answer_and_its_place_is_free_again(running: Served) -> None:
    assert running.head.observers == []
    connection, response = running.watched()
    assert response.getheader("Content-Type", "").startswith("text/event-stream")
    assert response.getheader("Cache-Control") == "no-store"
    steps = events(response)
    name, hello = next(steps)
    assert name == "hello"
    assert (hello["format"], hello["world"]) == ("flowspec-recording", "simulated")
    assert (hello["live"], "frames" in hello) == (True, False)
    assert len(running.head.observers) == 1
    running.head.run()
    present, ended = WatchState(), 0
    kinds = set()
    for _, frames in steps:
        for frame in frames:
            present.take(frame)
            kinds.add(frame["kind"])
            ended += frame["kind"] == "end"
        if ended and not present.answers:
            break
    assert kinds >= {"stages", "devices", "begin", "root", "sent", "trip", "tokens", "end", "figures"}
    assert shown(present) == {}
    response.close()
    connection.close()
    wait_until(lambda: running.head.observers == [], "its place is free")


def test_the_last_answer_is_downloaded_as_a_recording(running: Served) -> None:
    response = httpx.get(f"{running.url}/live/recording")
    assert response.status_code == 404
    assert "while somebody watches" in response.json()["error"]["message"]
    watcher = running.watch.join()
    running.head.run()
    running.watch.settle()
    response = httpx.get(f"{running.url}/live/recording")
    assert response.status_code == 200
    assert response.headers["Content-Disposition"] == 'attachment; filename="flowspec-recording.json"'
    assert response.json()["frames"][-1]["kind"] == "end"
    running.watch.leave(watcher)
    assert httpx.get(f"{running.url}/live/recording").status_code == 200, "it is there still"


def test_no_more_than_so_many_may_watch(running: Served) -> None:
    for _ in range(WATCHERS_MAX):
        running.watch.join()
    response = httpx.get(f"{running.url}/live/events")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "10")
    assert response.json()["error"]["code"] == "too_many_watchers"


def test_who_leaves_waits_for_nobody(running: Served) -> None:
    """While the watch is busy the event loop serves others, also when a stream ends."""
    connection, response = running.watched()
    response.readline()
    with running.watch._lock:
        response.close()
        connection.close()
        time.sleep(0.5)  # the stream notices that its client is gone
        found = httpx.head(f"{running.url}/live/events", timeout=20)  # which takes no place
        assert (found.status_code, found.content) == (200, b"")
    wait_until(lambda: running.head.observers == [], "its place is free")


def test_a_quiet_stream_says_that_it_is_there(running: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.0)
    connection, response = running.watched()
    lines = [response.readline() for _ in range(40)]
    assert b": here\n" in lines
    connection.close()


def test_a_server_that_ends_ends_its_streams(running: Served) -> None:
    connection, response = running.watched()
    response.readline()
    running.server.should_exit = True
    response.read()
    connection.close()
    running.thread.join(10)
    assert not running.thread.is_alive()
