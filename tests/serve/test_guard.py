"""Which web pages may watch: our own and those whose origin is named. Programs name no origin and may."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from flowspec.errors import InputError
from flowspec.serve.guard import HEADER_BYTES_MAX, Guard, read_keys

OWN = "127.0.0.1:8000"
KEY = {"Authorization": "Bearer sesame-1"}


def asked(path: str, keys: tuple[bytes, ...], headers: Mapping[str, str]) -> httpx.Response:
    """What a request gets."""
    app = Guard(PlainTextResponse("in"), keys=keys, names=("127.0.0.1",), origins=("http://page:3000",))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{OWN}") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def status(path: str, keys: tuple[bytes, ...], **headers: str) -> int:
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
    assert [status(path, keys, **headers) for headers in allowed] == [200] * 6
    evil = ["http://evil.example", "http://127.0.0.1:9000", "null", "http://page", ""]
    evil.append(f"http://evil.example/{OWN}")
    refused = [{"Origin": origin} for origin in evil]
    # an image of another page, say, which names no origin
    refused += [{"Sec_Fetch_Site": site} for site in ("cross-site", "same-site")]
    for headers in refused:
        found = known(path, keys, **headers)
        assert (found.status_code, found.json()["error"]["code"]) == (403, "forbidden"), headers
    assert status("/v1/models", (), Origin="http://evil.example") == 200, (
        "browsers keep other answers from pages"
    )


def test_a_long_header_is_refused_however_it_comes() -> None:
    assert status("/v1/models", (), X_Long="x" * (HEADER_BYTES_MAX - 1000)) == 200
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
