"""Which web pages may watch: our own and those whose origin is named. Programs name no origin and may."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from flowspec.errors import InputError
from flowspec.serve.guard import HEADER_BYTES_MAX, Guard, read_keys

OWN = "127.0.0.1:8000"
KEY = {"Authorization": "Bearer sesame-1"}


def asked(path: str, keys: tuple[bytes, ...], **headers: str) -> httpx.Response:
    """What a request gets."""
    app = Guard(PlainTextResponse("in"), keys=keys, names=("127.0.0.1",), origins=("http://page:3000",))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url=f"http://{OWN}"
        ) as client:
            told = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.get(path, headers={**KEY, **told})

    return asyncio.run(ask())


def status(path: str, keys: tuple[bytes, ...], **headers: str) -> int:
    return asked(path, keys, **headers).status_code


@pytest.mark.parametrize("keys", [(), (b"sesame-1",)], ids=["no-key", "key"])
@pytest.mark.parametrize("path", ["/live/events", "/live/recording"])
def test_pages_of_other_origins_do_not_watch(path: str, keys: tuple[bytes, ...]) -> None:
    assert status(path, keys) == 200, "a program"
    assert status(path, keys, Sec_Fetch_Site="same-origin") == 200, "our own page"
    assert status(path, keys, Origin=f"http://{OWN}") == 200
    assert status(path, keys, Origin=f"https://{OWN}") == 200, "behind a proxy that speaks TLS"
    assert status(path, keys, Origin="http://page:3000", Sec_Fetch_Site="cross-site") == 200, "it is named"
    assert status(path, keys, Sec_Fetch_Site="none") == 200, "typed into the browser's line"
    for origin in (
        "http://evil.example",
        "http://127.0.0.1:9000",
        "null",
        "http://page",
        "",
        f"http://evil.example/{OWN}",
    ):
        assert status(path, keys, Origin=origin) == 403, origin
    for site in ("cross-site", "same-site"):
        assert status(path, keys, Sec_Fetch_Site=site) == 403, (
            "an image of another page, say, which names no origin"
        )


@pytest.mark.parametrize(
    ("headers", "page"),
    [
        ({"Origin": "http://evil.example"}, "the web page 'http://evil.example'"),
        ({"Sec_Fetch_Site": "cross-site"}, "a web page of another origin"),
        ({"Origin": ""}, "a web page without an origin"),
    ],
)
def test_the_page_that_may_not_watch_is_told_in_a_sentence(headers: dict[str, str], page: str) -> None:
    error = asked("/live/events", (), **headers).json()["error"]
    assert error["message"] == f"the live view is not for {page}; --cors ORIGIN lets its origin in"
    assert error["code"] == "forbidden"


def test_a_long_header_is_refused_however_it_comes() -> None:
    assert status("/v1/models", (), X_Long="x" * (HEADER_BYTES_MAX - 1000)) == 200
    long = "x" * HEADER_BYTES_MAX
    cases: list[tuple[str, dict[str, str]]] = [("/v1/models", {"X-Long": long}), (f"/{long}", {})]
    for path, headers in cases:
        found = asked(path, (b"sesame-1",), **headers)
        assert (found.status_code, found.json()["error"]["code"]) == (431, "header_too_large")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"X-Api-Key": "sesame-1"}, 200),
        ({"x-api-key": " sesame-1 "}, 200),
        ({"Authorization": "Bearer none", "X-Api-Key": "sesame-1"}, 200),
        ({"Authorization": "Bearer sesame-1", "X-Api-Key": "none"}, 200),
        ({"X-Api-Key": "sesame-2"}, 401),
        ({"X-Api-Key": "Bearer sesame-1"}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"Authorization": "Basic sesame-1"}, 401),
        ({}, 401),
    ],
)
def test_a_key_may_come_in_either_header(headers: dict[str, str], expected: int) -> None:
    app = Guard(PlainTextResponse("in"), keys=(b"sesame-1",))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{OWN}") as client:
            return await client.get("/v1/models", headers=headers)

    found = asyncio.run(ask())
    assert found.status_code == expected
    if expected == 401:
        got = "another one" if headers.get("X-Api-Key") else "none"
        assert found.json()["error"]["message"].endswith(f"or X-Api-Key: KEY, got {got}")


def test_a_pipe_is_no_key_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys", 0o600)
    with pytest.raises(InputError, match=r"--api-key-file: expected a file, got .*, which is none"):
        read_keys(tmp_path / "keys")


def test_other_routes_are_as_they_were() -> None:
    """Browsers keep their answers from other pages, and a POST in JSON is asked for first."""
    assert status("/v1/models", (), Origin="http://evil.example") == 200
