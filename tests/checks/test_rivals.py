"""A suite that is laid out as llama.cpp's, against a server that takes some of what it asks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.checks.rivals import kind_of, main

UTILS = """
import requests

class ServerProcess:
    server_host, server_port, model_alias = "nowhere", 1, "theirs"

    def start(self, timeout_seconds=1):
        raise RuntimeError("their own server")

    def make_request(self, path, data):
        return requests.post(f"http://{self.server_host}:{self.server_port}{path}", json=data)
"""
TESTS = """
from utils import *

def asked(path, **data):
    server = ServerProcess()
    server.start()
    return server.make_request(path, {"model": "theirs", **data})

def test_passes():
    assert asked("/chat/completions").json()["model"] == "ours"

def test_is_refused():
    assert asked("/v1/completions", wibble=1).status_code == 200

def test_fails():
    assert asked("/chat/completions").json()["model"] == "theirs"

def test_breaks_the_server():
    assert asked("/broken").status_code == 200
"""


class Handler(BaseHTTPRequestHandler):
    """Takes chats for its own model."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": "ours"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/broken":
            self._say(500, {"error": {"message": "broken"}})
        elif "wibble" in body or self.path == "/chat/completions":
            self._say(400, {"error": {"message": f"{self.path}: unknown field wibble"}})
        else:
            self._say(200, {"model": body["model"]})

    def _say(self, status: int, document: object) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


def test_each_test_is_counted_with_its_reason(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("requests")
    unit = tmp_path / "tools" / "server" / "tests" / "unit"
    unit.mkdir(parents=True)
    (unit.parent / "utils.py").write_text(UTILS)
    (unit / "test_basic.py").write_text(TESTS)
    assert main([str(tmp_path), "--url", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"passed": 1, "refused": 1, "failed": 2}
    assert found["reasons"]["refused"] == {
        "400 /v1/completions: unknown field wibble": ["test_basic.py::test_is_refused"]
    }
    assert found["reasons"]["failed"]["500 broken"] == ["test_basic.py::test_breaks_the_server"]
    assert (unit / "test_basic.py").read_text() == TESTS, "the checkout is as it was"


THEIRS = """
import openai
import pytest
from tests.utils import FLAGS_ARGS, RemoteOpenAIServer, only_on_gpus
from vllm.sampling_params import SamplingParams
from vllm.repo import fetch

MODEL_NAME = "somebody/theirs"

class Own(SamplingParams):
    pass

@pytest.fixture
def server():
    with RemoteOpenAIServer(MODEL_NAME, [*FLAGS_ARGS, f"--adapter={fetch().path}"]) as found:
        yield found

@pytest.fixture
def client(server):
    with server.get_client() as found:
        yield found

@pytest.mark.parametrize("name", [MODEL_NAME, "somebody/theirs"])
@only_on_gpus
def test_is_refused(client, name):
    assert name == "ours"
    client.chat.completions.create(model=name, messages=[], extra_body={"wibble": 1})

def test_passes(client):
    assert client.models.list().data[0].id == MODEL_NAME

def test_needs_their_own_code(server):
    fetch(server.url_for("v1"))

def test_asks_nobody():
    assert SamplingParams() is None
"""


def test_vllms_tests_are_read_without_it(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tests" / "entrypoints" / "openai" / "chat_completion"
    folder.mkdir(parents=True)
    for package in (tmp_path / "tests", folder.parents[1], folder.parent, folder):
        (package / "__init__.py").write_text("")
    (tmp_path / "tests" / "conftest.py").write_text("import vllm_that_is_not_there")
    (folder / "test_chat.py").write_text(THEIRS)
    assert main([str(tmp_path), "--url", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"refused": 2, "passed": 1, "skipped": 1}
    assert found["reasons"]["refused"] == {
        "400 /v1/chat/completions: unknown field wibble": [
            "test_chat.py::test_is_refused[ours0]",
            "test_chat.py::test_is_refused[ours1]",
        ]
    }
    assert main([str(tmp_path), "--url", url, "--files", "chat,nothing"]) == 2
    assert "--files: expected some of chat," in capsys.readouterr().err


def test_what_is_no_checkout_or_no_server_is_told(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--url", url]) == 2
    assert "expected llama.cpp" in capsys.readouterr().err
    assert main([str(tmp_path), "--url", "http://127.0.0.1:1/v1"]) == 2
    assert "expected flowspec serve at" in capsys.readouterr().err


def test_a_refusal_without_words_is_a_failure() -> None:
    met = {"outcome": "failed", "refusals": [[400, None]], "why": "x"}
    assert kind_of(met)[0] == "failed"
    assert kind_of({**met, "refusals": [[400, "seed: expected a whole number"]]})[0] == "refused"
    assert kind_of({**met, "refusals": []}) == ("failed", "x")
