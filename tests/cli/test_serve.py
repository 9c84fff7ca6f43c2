"""`flowspec serve` as people start and stop it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from flowspec.cli.commands import build_parser
from flowspec.cli.main import main
from flowspec.model.files import TOY_TOLD
from tests import warm

SERVE = [sys.executable, "-m", "flowspec.cli.main", "serve"]


@pytest.mark.parametrize(("number", "more"), [(signal.SIGINT, []), (signal.SIGTERM, ["--no-live"])])
def test_it_says_where_it_is_answers_and_ends_with_all_that_it_started(
    number: signal.Signals, more: list[str]
) -> None:
    flags = ["--port", "0", "--local", "1", "--drafter", "ngram", "--json", *more]
    with warm.Popen([*SERVE, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert (ready["model"], ready["needs_key"]) == ("bundled", False)
        asked = {"model": "bundled", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        found = httpx.post(f"{ready['url']}/chat/completions", json=asked, timeout=60).json()
        assert found["choices"][0]["message"]["content"].endswith("42.")
        root = ready["url"].removesuffix("/v1")
        assert ready["page"] == (None if more else f"{root}/")
        statuses = [
            httpx.get(f"{root}{path}").status_code for path in ("/", "/page/main.js", "/live/recording")
        ]
        assert statuses == ([404] * 3 if more else [200, 200, 404])
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(number)
        output, error = process.communicate(timeout=60)
        assert (process.returncode, output, error) == (0, "", "")
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_a_server_that_is_stopped_while_it_loads_is_done() -> None:
    flags = ["--port", "0", "--local", "4", "--drafter", "ngram"]
    with warm.Popen([*SERVE, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("(starting")
        process.send_signal(signal.SIGTERM)
        output, error = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "")
    assert "interrupted" not in error


def test_a_server_without_a_device_says_so_and_ends_as_failed() -> None:
    flags = ["--port", "0", "--local", "2", "--drafter", "ngram", "--json"]
    with warm.Popen([*SERVE, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = json.loads(process.stdout.readline())["url"]
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


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that the command is refused with."""
    try:
        status: object = main(["serve", *flags])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.count("\n") == 1
    return error


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert (
            f"port {port} on 127.0.0.1 is taken; stop what uses it or choose another with --port"
            in refused(capsys, "--port", port)
        )


def test_what_the_flags_are_refused_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLOWSPEC_API_KEY", raising=False)
    key = tmp_path / "key"
    assert (
        "beyond this machine others could use the model: give --api-key-file or FLOWSPEC_API_KEY"
        in refused(capsys, "--host", "0.0.0.0")
    )
    assert "cannot read" in refused(capsys, "--api-key-file", str(key))
    key.write_text("secret-key\n")
    key.chmod(0o644)
    assert "run chmod 600 on it" in refused(capsys, "--api-key-file", str(key))
    key.chmod(0o600)
    key.write_text("two words here\n")
    line = refused(capsys, "--api-key-file", str(key))
    assert "expected keys of at least 8 characters without spaces" in line
    assert "two words" not in line
    assert "--parallel: expected at most 64, got 65" in refused(capsys, "--parallel", "65")
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        '[[device]]\naddress = "127.0.0.1:9"\n[[drafter]]\nmodel = "suffix"\ndevice = "head"\n'
    )
    for flags in (["--drafter", "bundled,suffix"], ["--cluster", str(cluster)]):
        line = refused(capsys, *flags)
        assert "drafter suffix remembers what all users ask and are answered" in line
        assert "add --share-texts to allow that, or take --drafter ngram" in line
    # Where it is allowed, the next thing is looked at.
    assert "cannot find the host" in refused(
        capsys, "--drafter", "suffix", "--share-texts", "--host", "no.such.host.invalid"
    )
    assert "expected a port from 0 to 65535" in refused(capsys, "--port", "70000")
    assert "expected an origin such as http://localhost:3000" in refused(capsys, "--cors", "*")
    assert "cannot find the host 'no.such.host.invalid'" in refused(capsys, "--host", "no.such.host.invalid")


def test_what_is_not_installed_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(
        sys.modules, "flowspec.serve.server", raising=False
    )  # alone: of a package, other tests would find two
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "needs packages that are not installed (uvicorn): run launch/install serve\n" in refused(capsys)


def test_that_the_model_is_a_toy_and_that_there_are_tools_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with warm.Popen([*SERVE, "--port=0", "--local=1"], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert f"({TOY_TOLD})\n" in process.communicate(timeout=60)[1]
    with pytest.raises(SystemExit):
        build_parser(["serve"]).parse_args(["serve", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "with tools (function calls) and answers by a schema" in told


def test_the_help_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        build_parser(["serve"]).parse_args(["serve", "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
