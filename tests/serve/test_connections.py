"""Who may come in: connections that are held without a use, how many there may be, and how long; which web
pages may watch, our own and those whose origin is named. Programs name no origin and may.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from flowspec.errors import InputError
from flowspec.llm import LLM
from flowspec.model.text import Bound, Tokenizer
from flowspec.serve.guard import HEADER_BYTES_MAX, AccessRules, Guard, read_keys
from tests.runtime.clusters import wait_until
from tests.serve.servers import MODEL, Running, running

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def status(raw: socket.socket) -> int:
    """Reads a whole answer."""
    found = http.client.HTTPResponse(raw)
    found.begin()
    found.read()
    return found.status


def is_closed(raw: socket.socket) -> bool:
    """Waits for the server's next word; True where there is none."""
    raw.settimeout(20)
    try:
        return raw.recv(1 << 16) == b""
    except ConnectionError:
        return True


def test_a_header_that_never_ends_is_not_waited_for(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.serve.server.HEADER_S", 0.2)
    with server.connect() as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: local")
        assert is_closed(raw)


def test_the_rest_of_a_body_that_was_refused_is_not_waited_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.serve.server.REST_S", 0.2)
    with running(llm, access=AccessRules(keys=(b"sesame-1",))) as server, server.connect() as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        assert status(raw) == 401
        raw.sendall(b"x")
        assert is_closed(raw)


def test_a_connection_whose_body_was_refused_and_came_takes_another_request(llm: LLM) -> None:
    with running(llm, access=AccessRules(keys=(b"sesame-1",))) as server, server.connect() as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nx")
        assert status(raw) == 401
        raw.sendall(b"xxx" + HEALTH)
        assert status(raw) == 200


def test_a_client_that_reads_nothing_is_hung_up_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.serve.server.STALL_S", 0.2)
    ended = threading.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1 << 20)
                await asyncio.sleep(0)
        finally:
            ended.set()

    async def flood(request: Request) -> Response:
        return StreamingResponse(endless())

    with (
        running(llm, more=lambda service: [Route("/flood", flood)]) as server,
        server.connect() as raw,
    ):
        raw.sendall(b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ended.wait(20)


def test_more_connections_than_there_may_be_are_closed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.serve.server.CONNECTIONS_MAX", 2)
    with running(llm) as server, server.connect() as first, server.connect() as second:
        for raw in (first, second):
            raw.sendall(HEALTH)
            assert status(raw) == 200, "also with all places taken"
        with server.connect() as third:
            assert is_closed(third)
        first.close()
        while True:
            with server.connect() as third:
                third.sendall(HEALTH)
                if not is_closed(third):
                    break


def test_a_server_without_descriptors_says_so_in_a_line(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, refusals = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def accept(bound: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            raise refusals.pop()
        return whole(bound)

    monkeypatch.setattr(socket.socket, "accept", accept)
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.01)
    with running(llm) as server, server.connect() as raw:
        raw.sendall(HEALTH)
        assert status(raw) == 200
    assert [each.exc_info for each in caplog.records if "Too many open files" in each.getMessage()] == [None]


def long_request(text: str) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": text, "max_tokens": 1}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
        f"application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def test_long_prompts_keep_no_short_one_waiting_and_end_with_their_clients(
    llm: LLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of two long prompts take for ever; their clients then leave."""
    bounds: list[Bound] = []
    ended = threading.Semaphore(0)
    real = tokenizer.encode

    def encode(text: str, bound: Bound) -> list[int]:
        if not text.startswith("slow"):
            return real(text, bound)
        bounds.append(bound)
        while bound.is_wanted():
            time.sleep(0.01)
        ended.release()
        raise InputError("nobody waits")

    monkeypatch.setattr(tokenizer, "encode", encode)
    slow = long_request("slow " * 20_000)
    with running(llm) as server:
        with server.connect() as first, server.connect() as second:
            first.sendall(slow)
            second.sendall(slow)
            wait_until(lambda: len(bounds) == 2, "both are at work")
            with server.connect() as third:
                third.sendall(long_request("The cat"))
                assert status(third) == 200
            assert all(bound.is_wanted() for bound in bounds)
        assert all(ended.acquire(timeout=20) for _ in range(2))


def test_a_prompt_of_megabytes_for_a_short_context_is_refused_at_once(server: Running) -> None:
    with server.connect() as raw:
        raw.settimeout(50)  # its tokens alone would take a minute
        raw.sendall(long_request("word " * 1_500_000))
        assert status(raw) == 400


OWN = "127.0.0.1:8000"
KEY = {"Authorization": "Bearer sesame-1"}


def asked(path: str, keys: tuple[bytes, ...], headers: Mapping[str, str]) -> httpx.Response:
    """What a request gets."""
    app = Guard(
        PlainTextResponse("in"), AccessRules(keys=keys, names=("127.0.0.1",), origins=("http://page:3000",))
    )

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{OWN}") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def status_of(path: str, keys: tuple[bytes, ...], **headers: str) -> int:
    return known(path, keys, **headers).status_code


def known(path: str, keys: tuple[bytes, ...], **headers: str) -> httpx.Response:
    """What a request with the key gets."""
    return asked(path, keys, KEY | {name.replace("_", "-"): value for name, value in headers.items()})


@pytest.mark.parametrize("keys", [(), (b"sesame-1",)], ids=["no-key", "key"])
@pytest.mark.parametrize("path", ["/live/events", "/live/recording"])
def test_pages_of_other_origins_do_not_watch(path: str, keys: tuple[bytes, ...]) -> None:
    allowed: list[dict[str, str]] = [
        {},  # a program
        {"Sec_Fetch_Site": "same-origin"},
        {"Origin": f"http://{OWN}"},
        {"Origin": f"https://{OWN}"},  # behind a proxy that speaks TLS
        {"Origin": "http://page:3000", "Sec_Fetch_Site": "cross-site"},  # it is named
        {"Sec_Fetch_Site": "none"},  # typed into the browser's line
    ]
    assert [status_of(path, keys, **headers) for headers in allowed] == [200] * 6
    evil = ["http://evil.example", "http://127.0.0.1:9000", "null", "http://page", ""]
    evil.append(f"http://evil.example/{OWN}")
    refused = [{"Origin": origin} for origin in evil]
    # an image of another page, say, which names no origin
    refused += [{"Sec_Fetch_Site": site} for site in ("cross-site", "same-site")]
    for headers in refused:
        found = known(path, keys, **headers)
        assert (found.status_code, found.json()["error"]["code"]) == (403, "forbidden"), headers
    assert status_of("/v1/models", (), Origin="http://evil.example") == 200, (
        "browsers keep other answers from pages"
    )


def test_a_long_header_is_refused_however_it_comes() -> None:
    assert status_of("/v1/models", (), X_Long="x" * (HEADER_BYTES_MAX - 1000)) == 200
    long = "x" * HEADER_BYTES_MAX
    cases: list[tuple[str, dict[str, str]]] = [("/v1/models", {"X-Long": long}), (f"/{long}", {})]
    for path, headers in cases:
        found = known(path, (b"sesame-1",), **headers)
        assert (found.status_code, found.json()["error"]["code"]) == (431, "header_too_large")


def test_a_key_may_come_in_either_header() -> None:
    cases: list[tuple[dict[str, str], int]] = [
        ({"X-Api-Key": "sesame-1"}, 200),
        ({"x-api-key": " sesame-1 "}, 200),
        ({"Authorization": "Bearer none", "X-Api-Key": "sesame-1"}, 200),
        ({"Authorization": "Bearer sesame-1", "X-Api-Key": "none"}, 200),
        ({"X-Api-Key": "sesame-2"}, 401),
        ({"X-Api-Key": "Bearer sesame-1"}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"Authorization": "Basic sesame-1"}, 401),
        ({}, 401),
    ]
    for headers, expected in cases:
        assert asked("/v1/models", (b"sesame-1",), headers).status_code == expected, headers


def test_without_a_key_only_this_machines_names_are_answered() -> None:
    hosts = ("127.0.0.1", "127.0.0.1:8000", "evil.example:8000", "127.0.0.1.evil.example")
    assert [asked("/v1/models", (), {"Host": host}).status_code for host in hosts] == [200, 200, 403, 403]


def test_a_pipe_is_no_key_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys", 0o600)
    with pytest.raises(InputError, match="--api-key-file"):
        read_keys(tmp_path / "keys")
