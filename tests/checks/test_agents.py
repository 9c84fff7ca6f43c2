"""The check of other people's clients, with the one that is here: the official client's tasks, all of them,
and a program that makes a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.checks import agents
from tests.checks.agents import CLIENTS, CONTENT, FILE, Client, main, stand_in

AGENT = f"""
import json, sys, urllib.request

url = sys.argv[1]
tool = {{"type": "function", "function": {{"name": "write", "parameters": {{"type": "object"}}}}}}
asked = {{"messages": [{{"role": "user", "content": "x " * 3000}}], "tools": [tool]}}
request = urllib.request.Request(
    url + "/chat/completions", json.dumps(asked).encode(), {{"Content-Type": "application/json"}}
)
message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
assert arguments["filePath"].endswith({FILE!r})
if len(sys.argv) == 2:
    open(arguments["filePath"], "w").write(arguments["content"])
"""


def test_each_task_is_told_with_what_it_came_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "openai" / "bin").mkdir(parents=True)
    python = tmp_path / "openai" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    for name, more in (("good", []), ("lazy", ["nothing"])):
        made = Client(
            packages=(),
            command=lambda home, url, work, more=more: ([str(python), str(script), url, *more], {}),
        )
        monkeypatch.setattr(agents, "CLIENTS", {**agents.CLIENTS, name: made})
    args = agents.argparse.Namespace(
        folder=tmp_path, install=False, clients=("openai", "good", "lazy"), json=True
    )
    assert agents.command(args) == 1, "the lazy one makes no file"
    found = json.loads(capsys.readouterr().out)
    assert [each for each in found["openai"] if not each["right"]] == []
    assert len(found["openai"]) >= 20
    assert {each["task"].partition("_")[0] for each in found["openai"]} == {"text", "tools", "forced"}
    assert found["good"] == [{"task": "tools_make_a_file", "right": True, "got": CONTENT}]
    assert [each["right"] for each in found["lazy"]] == [False]


def test_the_stand_in_calls_what_is_offered_and_ends(tmp_path: Path) -> None:
    offered = '<tools>\n{"type": "function", "function": {"name": "exec_command"}}\n</tools>'
    assert '"cmd": "printf hi > hello.txt"' in stand_in(offered, tmp_path)
    assert "<tool_call>" not in stand_in(f"{offered}\n<tool_response>\ndone\n</tool_response>", tmp_path)
    assert "<<<<<<< SEARCH" in stand_in("no tools", tmp_path)


def test_a_client_that_is_not_installed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--clients", "llm"]) == 2
    assert "is it installed?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--clients", "nobody"])
    assert f"expected all, or some of {','.join(CLIENTS)}" in capsys.readouterr().err
