"""`flowspec serve` as people start and stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import httpx
import psutil

from tests import warm
from tests.cli.running import FLOWSPEC


def serve(*flags: str) -> warm.Popen[str]:
    command = [*FLOWSPEC, "serve", "--port=0", "--drafter=ngram", *flags]
    return warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_says_where_it_is_answers_and_ends_with_all_that_it_started() -> None:
    with serve("--local=1", "--json") as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert (ready["model"], ready["needs_key"]) == ("bundled", False)
        asked = {"model": "bundled", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        found = httpx.post(f"{ready['url']}/chat/completions", json=asked, timeout=60).json()
        assert found["choices"][0]["message"]["content"].endswith("42.")
        root = ready["url"].removesuffix("/v1")
        assert ready["page"] == f"{root}/"
        places = ("/", "/page/main.js", "/live/recording")
        assert [httpx.get(f"{root}{path}").status_code for path in places] == [200, 200, 404]
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=60)
        assert (process.returncode, output, error) == (0, "", "")
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_a_server_that_is_stopped_while_it_loads_is_done() -> None:
    with serve("--local=2") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("(starting")
        process.send_signal(signal.SIGTERM)
        output, error = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "")
    assert "interrupted" not in error


def test_a_server_without_a_device_says_so_and_ends_as_failed() -> None:
    with serve("--local=1", "--json", "--no-live") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        ready = json.loads(process.stdout.readline())
        url = ready["url"]
        assert (ready["page"], httpx.get(url.removesuffix("v1")).status_code) == (None, 404)
        for stage in httpx.get(f"{url}/cluster", timeout=60).json()["stages"]:
            os.kill(stage["pid"], signal.SIGKILL)
        told = next(line for line in process.stderr if "failed" in line)
        assert told == (
            "flowspec serve: failed: no device is left; nothing is answered any more, so stop it and start "
            "it again\n"
        )
        asked = {"messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        assert httpx.post(f"{url}/chat/completions", json=asked, timeout=60).status_code == 503
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
