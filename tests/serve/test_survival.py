"""A stage that is killed in the middle of a stream costs a pause: the text is whole, and the same."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from flowspec.llm import LLM
from flowspec.serve.metrics import Totals
from flowspec.serve.service import ServiceOptions
from tests.runtime.clusters import wait_until
from tests.serve.servers import ENDLESS, MODEL, STORY, Running, running

ASKED: dict[str, Any] = {"model": MODEL, "messages": STORY, "temperature": 1.0, "seed": 11}
LONG: dict[str, Any] = {**ENDLESS, "max_tokens": 100, "temperature": 1.0, "seed": 11}
"""An answer that is far from its end when its first pieces are read."""


@pytest.fixture(scope="module")
def own() -> Iterator[tuple[LLM, Running, Totals]]:
    """A cluster that may lose a stage."""
    totals = Totals()
    with LLM(dtype="float32", local=2, drafter="ngram", on_note=totals.note) as llm:
        llm.session.head.observe(totals.on_event)
        with running(llm, totals=totals) as server:
            yield llm, server, totals


def test_a_stage_that_is_killed_in_mid_stream_costs_a_pause(
    own: tuple[LLM, Running, Totals], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowspec.serve.app.KEEP_ALIVE_S", 0.05)
    llm, server, totals = own
    with server.client() as client:
        expected = client.chat.completions.create(**LONG).choices[0].message.content
        pieces: list[str] = []
        for chunk in client.chat.completions.create(stream=True, **LONG):
            pieces.append(chunk.choices[0].delta.content or "")
            if len(pieces) == 5:
                os.kill(llm.stages[1]["pid"], signal.SIGKILL)
    assert "".join(pieces) == expected
    assert (totals.losses, len(llm.session.head.stages)) == (1, 1)
    assert server.count("flowspec_answer_recoveries_total") == 1
    health = f"{server.url.removesuffix('/v1')}/health"
    wait_until(lambda: httpx.get(health).json()["status"] == "ok", "it is well again")
    assert "device local-1 is lost" in httpx.get(f"{server.url}/cluster").json()["notes"][0]


def test_a_stream_without_a_word_is_kept_alive(
    own: tuple[LLM, Running, Totals], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage is stopped for a moment."""
    monkeypatch.setattr("flowspec.serve.app.KEEP_ALIVE_S", 0.05)
    llm, server, _ = own
    pid = llm.stages[-1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    lines: list[str] = []
    try:
        asked = {**ASKED, "stream": True}
        with httpx.stream("POST", f"{server.url}/chat/completions", json=asked, timeout=60) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 3:
                    os.kill(pid, signal.SIGCONT)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert lines.count(": keep-alive") >= 3
    assert [line for line in lines if line][-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[: lines.index(": keep-alive")] if line]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}], "nothing was said before"


def test_a_stream_that_waits_for_its_turn_is_kept_alive(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.serve.app.KEEP_ALIVE_S", 0.05)
    with (
        running(llm, options=ServiceOptions(parallel=1, queue=1)) as server,
        server.client() as client,
    ):
        first = client.chat.completions.create(stream=True, **ENDLESS)
        next(iter(first))
        asked = {"model": MODEL, "prompt": "a", "max_tokens": 3, "stream": True}
        with httpx.stream("POST", f"{server.url}/completions", json=asked, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": keep-alive"
            assert server.service.gate.waiting == 1
            first.close()
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_cluster_that_failed_is_told_to_all() -> None:
    """Its only stage is killed, and nobody waits for another one for long."""
    with (
        LLM(local=1, method="ar", wait_s=0.5) as llm,
        running(llm) as server,
        server.client() as client,
    ):
        stream = client.chat.completions.create(stream=True, **ENDLESS)
        next(iter(stream))
        os.kill(llm.stages[0]["pid"], signal.SIGKILL)
        with pytest.raises(openai.APIError, match="no device is left"):
            for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(**ENDLESS)
        assert (caught.value.status_code, caught.value.type) == (503, "server_error")
        health = httpx.get(f"{server.url.removesuffix('/v1')}/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert health.json()["reason"] == "the cluster has failed; /v1/cluster tells why"
        assert "no device is left" in httpx.get(f"{server.url}/cluster").json()["failure"]
        assert server.count('flowspec_answers_total{reason="error"}') == 1


def test_a_mistake_of_ours_is_logged_and_takes_no_place(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Any, tokens: Any) -> str:
        raise ZeroDivisionError

    before = server.count('flowspec_answers_total{reason="error"}')
    with server.client() as client:
        with monkeypatch.context() as patch:
            patch.setattr("flowspec.runtime.answer.TextStream.push", broken)
            with pytest.raises(openai.InternalServerError):
                client.chat.completions.create(**ENDLESS)
        server.wait_idle()
        assert server.count('flowspec_answers_total{reason="error"}') == before + 1
        assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).usage.completion_tokens == 2
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.setattr(server.service, "listing", lambda: 1 // 0)
    assert httpx.get(f"{server.url}/models").status_code == 500
    # once the response is whole, which the client may know before
    told = 'flowspec_requests_total{route="/v1/models",status="500"} 1.0'
    wait_until(lambda: told in server.service.metrics.text().decode(), "the failure is counted")
