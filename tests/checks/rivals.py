"""llama.cpp's own tests of its server against a running `flowspec serve`: what passes, what is refused by
name, and why the rest fails. `python -m tests.checks.rivals SOURCE --url URL`.

SOURCE is a checkout of llama.cpp, or a URL that `git clone` takes; nothing of it is kept. The tests run on a
copy in which only the start of the server and the model's name are others: `start` finds the server there,
paths that llama.cpp has with and without `/v1` get it, and names of models in requests become the served one.
Tests that compare words of its own tiny models cannot pass with another one. They need pytest, requests
and openai.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowspec.errors import InputError
from tests.command import Parser, run_command

LAYOUT = "server/tests/utils.py"
"""Where a checkout has the tests."""
FILES = ("basic", "chat_completion", "completion", "security", "template", "tokenize", "tool_call", "infill")
"""Of the suite what speaks of text; the rest starts servers with other models or on files of llama.cpp's."""
_MODEL = re.compile(r"""(\bmodel["']?\s*[:=]\s*)(["'])[^"']*\2""")
_ADDRESS = re.compile("0x[0-9a-f]+")
_REASON_CHARS = 110
PLUGIN = """
import json, os, sys, types
import pytest, requests

sys.modules.setdefault("wget", types.ModuleType("wget"))
import utils

URL, MODEL, RESULTS = (os.environ[name] for name in ("RIVALS_URL", "RIVALS_MODEL", "RIVALS_RESULTS"))
HOST, _, PORT = URL.removesuffix("/v1").rpartition("://")[2].partition(":")
SHORT = ("/chat/completions", "/completions", "/models", "/embeddings", "/responses")
refusals = []


def send(session, request, _send=requests.Session.send, **options):
    for path in SHORT:
        if request.path_url == path:
            request.url = URL + path
    response = _send(session, request, **options)
    if response.status_code >= 400:
        try:
            refusals.append([response.status_code, response.json()["error"]["message"]])
        except (ValueError, KeyError, TypeError):
            refusals.append([response.status_code, None])
    return response


def start(server, timeout_seconds=None):
    server.server_host, server.server_port, server.model_alias = HOST, int(PORT), MODEL


requests.Session.send = send
utils.ServerProcess.start = start
utils.ServerProcess.stop = lambda server: None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if call.when == "setup":
        refusals.clear()
    if call.when == "call" or report.outcome != "passed" and call.when == "setup":
        error = None if call.excinfo is None else call.excinfo.value
        status = getattr(error, "status_code", None)
        if status is not None:
            body = getattr(error, "body", None)
            refusals.append([status, body.get("message") if isinstance(body, dict) else None])
        found = {"test": item.nodeid, "outcome": report.outcome, "refusals": list(refusals)}
        found["why"] = "" if error is None else type(error).__name__ + ": " + str(error)[:400]
        with open(RESULTS, "a") as file:
            file.write(json.dumps(found) + "\\n")
"""
"""What stands between the tests and the server; it tells what each test met."""


def suite_of(source: str, scratch: Path) -> Path:
    """A copy of the suite's folder; raises `InputError`."""
    root = Path(source)
    if not root.is_dir():
        root = scratch / "clone"
        done = subprocess.run(
            ["git", "clone", "--quiet", "--depth", "1", source, str(root)], capture_output=True, text=True
        )
        if done.returncode:
            raise InputError(
                f"expected a checkout or a URL for git, got {source!r}: {done.stderr.strip()[:200]}"
            )
    found = sorted(root.rglob(LAYOUT), key=lambda path: len(path.parts))
    if not found:
        raise InputError(f"{source}: expected llama.cpp, with {LAYOUT} somewhere in it")
    copy = scratch / "suite"
    shutil.copytree(found[0].parent, copy)
    return copy


def adapt(suite: Path, model: str) -> None:
    """Has requests name the served model, and puts the plugin beside the tests."""
    for file in suite.glob("unit/*.py"):
        text = file.read_text("utf-8")
        file.write_text(_MODEL.sub(lambda found: f"{found[1]}{model!r}", text), "utf-8")
    (suite / "rivals_plugin.py").write_text(PLUGIN, "utf-8")


def served(url: str) -> str:
    """The model's name; raises `InputError`."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (urllib.error.URLError, ValueError, KeyError, OSError) as error:
        raise InputError(f"--url: expected flowspec serve at {url}, without a key: {error}") from None


def run_suite(suite: Path, url: str, model: str, files: Sequence[str]) -> list[dict[str, Any]]:
    """What each test met."""
    results = suite / "results.jsonl"
    environment = {**os.environ, "RIVALS_URL": url, "RIVALS_MODEL": model, "RIVALS_RESULTS": str(results)}
    environment["PYTHONPATH"] = os.pathsep.join([str(suite), os.environ.get("PYTHONPATH", "")])
    for name in files:
        file = suite / "unit" / f"test_{name}.py"
        if not file.exists():
            continue
        flags = ["-p", "rivals_plugin", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *flags, str(file)]
        subprocess.run(command, cwd=suite, env=environment, stdout=subprocess.DEVNULL, check=False)
    return [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.exists() else []


def kind_of(found: dict[str, Any]) -> tuple[str, str]:
    """How a test ended, and why: `passed`, `skipped`, `refused` (the last error that the server told said in
    words what it does not take), or `failed`."""
    if found["outcome"] in ("passed", "skipped"):
        return found["outcome"], ""
    if found["refusals"]:
        status, message = found["refusals"][-1]
        if status < 500 and message:
            return "refused", f"{status} {message}"
        return "failed", f"{status} {message}"
    return "failed", found["why"]


def command(args: argparse.Namespace) -> int:
    url = args.url.rstrip("/")
    model = served(url)
    with tempfile.TemporaryDirectory(prefix="rivals-") as scratch:
        suite = suite_of(args.source, Path(scratch))
        adapt(suite, model)
        results = run_suite(suite, url, model, args.files)
    counts: Counter[str] = Counter()
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for found in results:
        kind, why = kind_of(found)
        counts[kind] += 1
        if why:
            short = _ADDRESS.sub("0x", " ".join(why.split()))[:_REASON_CHARS]
            reasons[kind][short].append(found["test"].partition("unit/")[2])
    if args.json:
        print(json.dumps({"counts": counts, "reasons": reasons}, indent=2))
        return 0
    for kind, found_reasons in reasons.items():
        print(f"{kind}:")
        for why, tests in sorted(found_reasons.items(), key=lambda each: -len(each[1])):
            print(f"  {len(tests)}  {why}  ({tests[0]})")
    kinds = ("passed", "refused", "failed", "skipped")
    print(", ".join(f"{counts[kind]} {kind}" for kind in kinds) + f" of {len(results)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.checks.rivals", __doc__)
    parser.add_argument(
        "source", metavar="SOURCE", help="a checkout of llama.cpp, or a URL that git can clone"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server (default: %(default)s)")
    parser.add_argument(
        "--files",
        type=lambda text: tuple(text.split(",")),
        default=FILES,
        metavar="NAMES",
        help=f"of the suite, with commas (default: {','.join(FILES)})",
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
