"""Programs that people use with such servers, each with a task, against ours: what is right, and why the rest
fails. `python -m tests.checks.agents FOLDER --install` first, which needs the network, then without.

FOLDER holds each client in an environment of its own: those in Python by pip, those in JavaScript by npm.
Tasks of text are asked of the bundled model, over a real cluster. It has no template for tools, so those that
call some are answered by a stand-in, whose answers are written down beforehand and whose chat template is
Qwen3's (`tests/serve/scripted_model.py`): all between its tokens and the client is real. Where a client has
calls bound (the tasks `forced_...`), what is written down must be what the grammar allows, or the server says
that the answer cannot go on.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowspec.errors import InputError
from flowspec.llm import LLM
from tests.checks.client_tasks.tasks import ANSWER
from tests.command import Parser, chosen, run_command
from tests.serve.scripted_model import PLAIN, QWEN3, ScriptedModel
from tests.serve.servers import MODEL, Running, running
from tests.serve.templated_model import folder_of

TASKS = Path(__file__).parent / "client_tasks"
PARTS = ("text", "tools", "forced")
TASK_S = 400.0
CONTEXT = 1 << 17
"""Tokens that the stand-in takes: prompts of coding agents are long."""
FILE, CONTENT = "hello.txt", "hi"
REQUEST = f"Create the file {FILE} with the text {CONTENT} in it."
DONE = "It is there."
FORMS = ("Form", "final_result")
"""What clients call the tool that stands for a form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A program: how it is installed, and either a module of tasks, or a command that is to make a file."""

    packages: tuple[str, ...]
    module: str = ""
    command: Callable[[Path, str, Path], tuple[list[str], Mapping[str, str]]] | None = None
    is_node: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS if self.command is None else ("tools",)


# ------------------------------------------------------------------------------------------ coding agents


def _aider(home: Path, url: str, work: Path) -> tuple[list[str], Mapping[str, str]]:
    flags = ["--yes-always", "--no-git", "--no-check-update", "--no-analytics", "--no-show-model-warnings"]
    asked = ["--model", f"openai/{MODEL}", "--edit-format", "diff", "--message", REQUEST]
    return [str(home / "bin" / "aider"), *flags, *asked], {"OPENAI_API_BASE": url, "OPENAI_API_KEY": "none"}


def _llm(home: Path, url: str, work: Path) -> tuple[list[str], Mapping[str, str]]:
    settings = work / ".llm"
    settings.mkdir()
    model = {"model_id": "ours", "model_name": MODEL, "api_base": url, "supports_tools": True}
    (settings / "extra-openai-models.yaml").write_text(json.dumps([model]), "utf-8")  # JSON is YAML, too
    tool = (
        f"def write(filePath: str, content: str) -> str:\n    return str(open({FILE!r}, 'w').write(content))"
    )
    asked = ["-m", "ours", "--functions", tool, REQUEST]
    return [str(home / "bin" / "llm"), *asked], {"LLM_USER_PATH": str(settings), "OPENAI_API_KEY": "none"}


def _opencode(home: Path, url: str, work: Path) -> tuple[list[str], Mapping[str, str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": url, "apiKey": "none"},
        "models": {MODEL: {"limit": {"context": CONTEXT, "output": 1024}}},
    }
    (work / "opencode.json").write_text(json.dumps({"provider": {"ours": provider}, "autoupdate": False}))
    return [str(_bin(home, "opencode")), "run", "--print-logs", "-m", f"ours/{MODEL}", REQUEST], {}


def _codex(home: Path, url: str, work: Path) -> tuple[list[str], Mapping[str, str]]:
    settings = {
        "model": MODEL,
        "model_provider": "ours",
        "model_providers.ours.name": "ours",
        "model_providers.ours.base_url": url,
        "model_providers.ours.wire_api": "responses",
    }
    flags = [flag for name, value in settings.items() for flag in ("-c", f"{name}={json.dumps(value)}")]
    flags += ["-c", 'web_search="disabled"', "-c", "features.multi_agent=false"]
    flags += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [str(_bin(home, "codex")), "exec", *flags, REQUEST], {}


def _qwen(home: Path, url: str, work: Path) -> tuple[list[str], Mapping[str, str]]:
    own = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}
    return [str(_bin(home, "qwen")), "--auth-type", "openai", "--yolo", "-p", REQUEST], own


def _continue(home: Path, url: str, work: Path) -> tuple[list[str], Mapping[str, str]]:
    model = {
        "name": "ours",
        "provider": "openai",
        "model": MODEL,
        "apiBase": url,
        "apiKey": "none",
        "roles": ["chat"],
        "capabilities": ["tool_use"],
    }
    config = work / "config.yaml"
    config.write_text(json.dumps({"name": "a", "version": "1.0.0", "schema": "v1", "models": [model]}))
    return [str(_bin(home, "cn")), "--config", str(config), "--auto", "-p", REQUEST], {}


def _bin(home: Path, name: str) -> Path:
    return home / "node_modules" / ".bin" / name


CLIENTS: Mapping[str, Client] = {
    "openai": Client(packages=("openai",), module="with_openai"),
    "litellm": Client(packages=("litellm",), module="with_litellm"),
    "langchain": Client(packages=("langchain-openai",), module="with_langchain"),
    "pydantic-ai": Client(packages=("pydantic-ai-slim[openai]",), module="with_pydantic_ai"),
    "agents-sdk": Client(packages=("openai-agents",), module="with_agents"),
    "instructor": Client(packages=("instructor",), module="with_instructor"),
    "ai-sdk": Client(
        packages=("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod"),
        module="with_ai_sdk.mjs",
        is_node=True,
    ),
    "aider": Client(packages=("aider-chat",), command=_aider),
    "llm": Client(packages=("llm",), command=_llm),
    "opencode": Client(packages=("opencode-ai",), command=_opencode, is_node=True),
    "codex": Client(packages=("@openai/codex",), command=_codex, is_node=True),
    "qwen-code": Client(packages=("@qwen-code/qwen-code",), command=_qwen, is_node=True),
    "continue": Client(packages=("@continuedev/cli",), command=_continue, is_node=True),
}


def install(name: str, folder: Path) -> None:
    """Brings a client into its folder; raises `InputError` with what the installer said."""
    client, home = CLIENTS[name], folder / name
    home.mkdir(parents=True, exist_ok=True)
    if client.is_node:
        (home / "package.json").write_text('{"private": true}')
        commands = [["npm", "install", "--no-audit", "--no-fund", *client.packages]]
        if name == "opencode":  # brings its program by a script of its own, which npm may leave out
            commands.append(["node", "node_modules/opencode-ai/postinstall.mjs"])
    else:
        commands = [
            [sys.executable, "-m", "venv", str(home)],
            [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--upgrade", *client.packages],
        ]
    for command in commands:
        done = subprocess.run(command, cwd=home, capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"{name}: {' '.join(command)} failed: {done.stderr.strip()[-400:]}")


# ------------------------------------------------------------------------------------------- the stand-in


def stand_in(prompt: str, work: Path) -> str:
    """What the stand-in says: it calls the first tool that it knows, or writes the edit that aider reads, and
    says what came of it when it is told."""
    path = str(work / FILE)
    if "<tool_response>" in prompt:
        return ANSWER if "get_weather" in prompt else DONE
    offered = {name for name in re.findall(r'"name": ?"([\w.-]+)"', prompt)}
    shell = f"printf {CONTENT} > {FILE}"
    calls: dict[str, dict[str, Any]] = {
        "get_weather": {"city": "Paris"},
        **{name: {"first": 17, "result": 42} for name in FORMS},
        "write": {"filePath": path, "content": CONTENT},
        "write_file": {"file_path": path, "content": CONTENT},
        "Write": {"filepath": path, "content": CONTENT},
        "exec_command": {"cmd": shell},
        "shell_command": {"command": shell},
        "shell": {"command": ["bash", "-lc", shell]},
    }
    for name, arguments in calls.items():
        if name in offered:
            call = json.dumps({"name": name, "arguments": arguments})
            return f"<tool_call>\n{call}\n</tool_call>"
    return f"{FILE}\n```\n<<<<<<< SEARCH\n=======\n{CONTENT}\n>>>>>>> REPLACE\n```\n"


@contextlib.contextmanager
def standing_in(folder: Path, work: Path) -> Iterator[Running]:
    """A server of the stand-in, with the bundled model's name; its files are made anew in the folder."""
    model = folder / MODEL
    shutil.rmtree(model, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    folder_of(model, QWEN3, PLAIN[QWEN3])
    with LLM(str(model), dtype="float32", local=2) as llm, pytest.MonkeyPatch.context() as patch:
        assert llm.tokenizer is not None
        said = ScriptedModel(llm.tokenizer, lambda prompt: stand_in(prompt, work))
        patch.setattr(llm.session, "submit", said.submit)
        with running(llm) as server:
            server.service.context = CONTEXT
            yield server


@contextlib.contextmanager
def bundled() -> Iterator[Running]:
    with LLM(dtype="float32", local=2) as llm, running(llm) as server:
        yield server


# ---------------------------------------------------------------------------------------------- the tasks


def tasks_of(name: str, folder: Path, part: str, url: str) -> list[dict[str, Any]]:
    """What the client's tasks of this part came to."""
    client, home = CLIENTS[name], (folder / name).absolute()
    if client.is_node:
        script = home / client.module  # where its packages are found
        shutil.copyfile(TASKS / client.module, script)
        command = ["node", str(script), part, url, MODEL]
    else:
        command = [str(home / "bin" / "python"), str(TASKS / "run.py"), client.module, part, url, MODEL]
    done = _ran(command, home, {})
    found = [json.loads(line) for line in done[1].splitlines() if line.startswith('{"task"')]
    if done[0]:
        found.append({"task": f"{part}_all", "right": False, "got": f"status {done[0]}: {done[2][-400:]}"})
    return found


def file_of(name: str, folder: Path, url: str, work: Path) -> dict[str, Any]:
    """Whether the file that a coding agent was asked for is there."""
    client = CLIENTS[name]
    assert client.command is not None
    command, own = client.command((folder / name).absolute(), url, work)
    status, said, wrong = _ran(command, work, own)
    path = work / FILE
    is_right = path.is_file() and path.read_text("utf-8").strip() == CONTENT
    got = path.read_text("utf-8") if path.is_file() else f"status {status}: {(said + wrong).strip()[-900:]}"
    return {"task": "tools_make_a_file", "right": is_right, "got": got}


def _ran(command: list[str], folder: Path, own: Mapping[str, str]) -> tuple[int, str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**environment, "HOME": str(folder), "PWD": str(folder), **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TASK_S,
        )
    except subprocess.TimeoutExpired as late:
        return 124, "", f"not finished in {TASK_S:g} s: {str(late.stdout or late.stderr)[-200:]}"
    except OSError as error:
        raise InputError(f"{command[0]}: cannot be run ({error.strerror}); is it installed?") from None
    return done.returncode, done.stdout, done.stderr


def command(args: argparse.Namespace) -> int:
    folder: Path = args.folder.absolute()
    if args.install:
        for name in args.clients:
            install(name, folder)
            print(f"{name}: installed")
        return 0
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in args.clients}
    work = folder / "work"
    for parts in (("text",), ("tools", "forced")):
        with bundled() if parts == ("text",) else standing_in(folder / "stand-in", work) as server:
            for part, name in itertools.product(parts, args.clients):
                if part not in CLIENTS[name].parts:
                    continue
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)
                if CLIENTS[name].command is None:
                    results[name] += tasks_of(name, folder, part, server.url)
                else:
                    results[name].append(file_of(name, folder, server.url, work))
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        tell(results)
    every = [each for found in results.values() for each in found]
    return 0 if every and all(each["right"] for each in every) else 1


def tell(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for name, found in results.items():
        print(f"{name}: {sum(each['right'] for each in found)} of {len(found)} right")
        for each in found:
            if not each["right"]:
                print(f"  {each['task']}: {' '.join(str(each['got']).split())}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.checks.agents", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the clients are")
    parser.add_argument("--install", action="store_true", help="bring them there, and nothing else")
    parser.add_argument(
        "--clients",
        type=chosen(tuple(CLIENTS)),
        default=tuple(CLIENTS),
        metavar="NAMES",
        help=f"with commas, of {','.join(CLIENTS)} (default: all)",
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
