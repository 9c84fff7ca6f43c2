"""What the server says while its model is loaded."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from flowspec.serve.guard import AccessRules
from flowspec.serve.live import PATHS
from flowspec.serve.server import RETRY_S, Loading, bind, loading_server

KEY = "sesame-1"


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    with bind("127.0.0.1", 0) as found:
        yield found


def url_at(bound: socket.socket) -> str:
    return f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_everything_is_refused_with_how_far_it_is_and_when_to_come_again(bound: socket.socket) -> None:
    loading = Loading("bundled")
    with (
        loading_server(bound, loading, AccessRules(), has_page=True),
        httpx.Client(base_url=url_at(bound)) as client,
    ):
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        loading.take("pi-a: asking for weights", 0)
        loading.take("pi-a: loading", 0.4)
        loading.take("pi-b: ready", 1)
        for found in (
            client.get("/v1/models"),
            client.post("/v1/chat/completions", json={"model": "bundled"}),
            client.get("/metrics"),
            client.get("/live/recording"),
        ):
            assert (found.status_code, found.headers["retry-after"]) == (503, str(RETRY_S))
            error = found.json()["error"]
            assert (error["code"], error["type"]) == ("loading", "server_error")
            assert error["message"] == (
                "the model is being loaded (pi-a: loading 40%, pi-b: ready 100%); try again in 5 s"
            )
        page = client.get("/")
        assert (page.status_code, "<title>FlowSpec</title>" in page.text) == (200, True)


def test_whoever_watches_is_told_each_step_and_the_stream_ends_with_the_loading(
    bound: socket.socket,
) -> None:
    loading = Loading("bundled")
    reports = []
    with (
        loading_server(bound, loading, AccessRules(), has_page=True),
        httpx.stream("GET", f"{url_at(bound)}/live/events", timeout=30) as found,
    ):
        for line in found.iter_lines():
            if not line.startswith("data: "):
                continue
            reports.append(json.loads(line.removeprefix("data: ")))
            if len(reports) == 1:
                loading.take("pi-a: loading", 0.5)
            else:
                loading.is_over = True
    step = {"device": "pi-a", "doing": "loading", "share": 0.5}
    assert reports == [{"model": "bundled", "steps": []}, {"model": "bundled", "steps": [step]}]


def test_who_may_come_in_is_as_later(bound: socket.socket) -> None:
    keyed = AccessRules(keys=(KEY.encode(),), free=PATHS)
    with loading_server(bound, Loading("bundled"), keyed, has_page=True):
        url = url_at(bound)
        paths = ("/", "/health", "/v1/models", "/live/events")
        assert [httpx.get(f"{url}{path}").status_code for path in paths] == [200, 503, 401, 401]
        known = {"Authorization": f"Bearer {KEY}"}
        assert httpx.get(f"{url}/v1/models", headers=known).status_code == 503
    named = AccessRules(names=("localhost",))
    with loading_server(bound, Loading("bundled"), named, has_page=False):
        assert httpx.get(f"{url}/health").status_code == 403
        here = {"Host": "localhost"}
        assert [httpx.get(f"{url}{path}", headers=here).status_code for path in paths] == [503] * 4


def test_a_call_in_between_waits_for_the_server_that_comes_next(bound: socket.socket) -> None:
    with loading_server(bound, Loading("bundled"), AccessRules(), has_page=True):
        pass
    host, port = bound.getsockname()
    with socket.create_connection((host, port), timeout=10) as waiting:
        waiting.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        with loading_server(bound, Loading("bundled"), AccessRules(), has_page=True):
            assert waiting.recv(64).startswith(b"HTTP/1.1 503 ")
