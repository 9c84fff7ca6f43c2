"""Many clients at once: what counts as lost or wrong, and a short run against a real server that sends some
of them away."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests import warm
from tests.checks import clients
from tests.checks.clients import Asked, Lost, Phase, main, read_stream


def frame(
    text: str | None = None, reason: str | None = None, usage: int | None = None, name: str = "a"
) -> bytes:
    delta = {} if text is None else {"content": text}
    chunk: dict[str, Any] = {
        "id": name,
        "choices": [{"delta": delta, "finish_reason": reason}],
        "usage": None,
    }
    if usage is not None:
        chunk.update(choices=[], usage={"completion_tokens": usage})
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


END = [frame(reason="stop"), frame(usage=2), b"data: [DONE]\n\n"]


def test_a_whole_stream_is_read() -> None:
    text, tokens, _ = read_stream(
        io.BytesIO(b"".join([frame(""), b": keep-alive\n\n", frame("a"), frame("b"), *END]))
    )
    assert (text, tokens) == ("ab", 2)


@pytest.mark.parametrize(
    "frames",
    [
        [frame("a"), *END[:-1]],
        [frame("a"), *END[1:]],
        [frame("a"), frame("b", name="other"), *END],
        [*END, frame("a")],
        [END[0], frame("late"), *END[1:]],
        [frame("a"), END[0], END[2]],
        [frame("a"), b'data: {"error": {"message": "the cluster failed"}}\n\n'],
        [],
    ],
)
def test_a_stream_that_is_not_whole_is_lost(frames: list[bytes]) -> None:
    with pytest.raises(Lost):
        read_stream(io.BytesIO(b"".join(frames)))


def test_the_report_of_a_phase() -> None:
    phase = Phase(2, spent_s=60.0)
    phase.answers = [Asked(first_s=at / 10, whole_s=float(at), tokens=6) for at in range(1, 101)]
    phase.memory = [(float(at), 100.0 + max(0, at - 30) / 10) for at in range(61)]
    found = phase.report()
    assert (found["answers"], found["tokens_per_s"], found["answers_per_minute"]) == (100, 10.0, 100.0)
    assert found["whole_s_p50"] == pytest.approx(50.5)
    assert found["first_s_p95"] == pytest.approx(9.505)
    assert found["memory_per_minute"] == pytest.approx(6.0)


def test_an_address_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "ftp://x"]) == 2
    assert "expected an address such as http://127.0.0.1:8000/v1" in capsys.readouterr().err


def test_four_clients_of_a_server_with_room_for_two(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "Popen", warm.Popen)
    monkeypatch.setattr(clients, "QUESTIONS", ("What is 3 + 4?", "Who are you?"))
    flags = [
        "--clients",
        "4",
        "--minutes",
        "0.1",
        "--alone",
        "1",
        "--tokens",
        "12",
        "--local",
        "1",
        "--drafter",
        "ngram",
        "--json",
    ]
    assert main([*flags, "--parallel", "1", "--queue", "1"]) == 0
    alone, many = json.loads(capsys.readouterr().out)["phases"]
    assert (alone["refused"], alone["wrong"], alone["lost"]) == (0, [], {})
    assert (many["clients"], many["wrong"], many["lost"]) == (4, [], {})
    assert many["refused"] > 0
    assert many["answers"] > 0
    assert many["memory"][0][1] > 50
