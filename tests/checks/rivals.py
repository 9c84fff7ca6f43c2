"""Other servers' own tests against a running `flowspec serve`: what passes, what is refused by name, and why
the rest fails. `python -m tests.checks.rivals SOURCE --url URL`.

SOURCE is a checkout of llama.cpp or vLLM, or a URL that `git clone` takes; nothing of it is kept. The tests
run on a copy in which only the start of the server and the model's name are others, see `rival_plugins`. Of
vLLM's, those run that ask a server and need nothing of vLLM itself. Tests that compare words of a certain
model cannot pass with another one. The Python that runs them (`--python`) needs pytest, requests and openai,
for vLLM's also pytest-asyncio, httpx, jsonschema and regex.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.errors import InputError
from tests.command import Parser, run_command

PLUGINS = Path(__file__).parent / "rival_plugins"
_MODEL = re.compile(r"""(\bmodel["']?\s*[:=]\s*)(["'])([^"']*)\2""")
_MODEL_NAME = re.compile(r"""^(MODEL(?:_NAME)?\s*=\s*)(["'])([^"'\n]*)\2""", re.MULTILINE)
_ADDRESS = re.compile("0x[0-9a-f]+")
_REASON_CHARS = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Another server's tests. A checkout has them in the `folder` if `mark` is there, and they run in its
    copy, with what is `kept` of the checkout. `files` speak of text and of what this server could have. The
    served model takes the place of those that `model` finds; where a file names its model once, also of that
    name elsewhere in it."""

    mark: str
    folder: str
    kept: tuple[str, ...]
    files: Mapping[str, str]
    model: re.Pattern[str]
    is_named_once: bool = False
    plugin: str

    def copy(self, root: Path, scratch: Path, served: str) -> Path:
        """The folder in which the tests run, with the plugin beside them."""
        for name in self.kept:
            if (root / name).exists():
                copy = shutil.copytree if (root / name).is_dir() else shutil.copyfile
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                copy(root / name, scratch / name)
        suite = scratch / self.folder
        for file in suite.rglob("*.py"):
            text = file.read_text("utf-8")
            theirs = {found[3] for found in self.model.finditer(text)} if self.is_named_once else ()
            text = self.model.sub(lambda found: f"{found[1]}{served!r}", text)
            for name in theirs:
                text = text.replace(f'"{name}"', repr(served))
            file.write_text(text, "utf-8")
        for name in ("records.py", f"{self.plugin}.py"):
            shutil.copyfile(PLUGINS / name, suite / name)
        return suite


def _llama_cpp(folder: str) -> Suite:
    names = (
        *(
            "basic",
            "chat_completion",
            "completion",
            "security",
            "template",
            "tokenize",
            "tool_call",
            "infill",
        ),
        "compat_oai_responses",
    )
    return Suite(
        mark=f"{folder}/utils.py",
        folder=folder,
        kept=(folder, "models/templates"),
        files={name: f"unit/test_{name}.py" for name in names},
        model=_MODEL,
        plugin="llama_cpp_plugin",
    )


def _vllm() -> Suite:
    api = "tests/entrypoints/openai"
    names = {
        "chat_completion": ("chat", "chat_completion", "chat_echo", "chat_logit_bias_validation"),
        "completion": ("completion", "completion_text_offset", "prompt_validation"),
        "models": ("models",),
        "responses": (
            *("basic", "errors", "sampling_params", "simple", "stateful", "streaming_events"),
            *("structured_output", "function_call"),
        ),
        ".": ("chunked_prompt", "return_tokens_as_ids", "return_token_ids", "stop_token_ids"),
    }
    more = {
        "function_calling": f"{api}/chat_completion/test_completion_with_function_calling.py",
        "include_reasoning": f"{api}/chat_completion/test_include_reasoning.py",
        "instrumentator": "tests/entrypoints/serve/instrumentator/test_basic.py",
    }
    files = {
        (name if part != "responses" else f"responses_{name}"): f"{api}/{part}/test_{name}.py"
        for part, each in names.items()
        for name in each
    }
    return Suite(
        mark=f"{api}/chat_completion/test_chat.py",
        folder=".",
        kept=("tests/__init__.py", "tests/entrypoints"),
        files=files | more,
        model=_MODEL_NAME,
        is_named_once=True,
        plugin="vllm_plugin",
    )


SUITES = (_llama_cpp("tools/server/tests"), _llama_cpp("examples/server/tests"), _vllm())


def suite_of(source: str, scratch: Path) -> tuple[Suite, Path]:
    """The suite, and the checkout's root; raises `InputError`."""
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
    for suite in SUITES:
        found = sorted(root.rglob(suite.mark), key=lambda path: len(path.parts))
        if found:
            return suite, found[0].parents[len(Path(suite.mark).parts) - 1]
    marks = " or ".join(suite.mark for suite in SUITES)
    raise InputError(f"{source}: expected llama.cpp or vLLM, with {marks} somewhere in it")


def served(url: str) -> str:
    """The model's name; raises `InputError`."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (urllib.error.URLError, ValueError, KeyError, OSError) as error:
        raise InputError(f"--url: expected flowspec serve at {url}, without a key: {error}") from None


def run_suite(
    suite: Suite, folder: Path, url: str, model: str, files: Sequence[str], python: str
) -> list[dict[str, Any]]:
    """What each test met."""
    results = folder / "results.jsonl"
    environment = {**os.environ, "RIVALS_URL": url, "RIVALS_MODEL": model, "RIVALS_RESULTS": str(results)}
    environment["PYTHONPATH"] = str(folder)
    for mine in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
        environment.pop(mine, None)
    for name in files:
        file = folder / suite.files[name]
        if not file.exists():
            continue
        flags = [
            "-p",
            "records",
            "-p",
            suite.plugin,
            "-q",
            "--no-header",
            "--tb=no",
            "-p",
            "no:cacheprovider",
        ]
        command = [python, "-m", "pytest", *flags, str(file)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 1, 5):  # all passed, some failed, none of them asks a server
            print(f"{name}: pytest ended with {done.returncode}: {_last(done.stdout)}", file=sys.stderr)
    return [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.exists() else []


def _last(text: str) -> str:
    return " ".join(text.split())[-300:]


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
        suite, root = suite_of(args.source, Path(scratch))
        files = tuple(suite.files) if args.files is None else args.files
        if unknown := [name for name in files if name not in suite.files]:
            raise InputError(f"--files: expected some of {','.join(suite.files)}, got {unknown[0]!r}")
        folder = suite.copy(root, Path(scratch) / "suite", model)
        results = run_suite(suite, folder, url, model, files, args.python)
    counts: Counter[str] = Counter()
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for found in results:
        kind, why = kind_of(found)
        counts[kind] += 1
        if why:
            short = _ADDRESS.sub("0x", " ".join(why.split()))[:_REASON_CHARS]
            reasons[kind][short].append(found["test"].rpartition("/")[2])
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
        "source", metavar="SOURCE", help="a checkout of llama.cpp or vLLM, or a URL that git can clone"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server (default: %(default)s)")
    parser.add_argument(
        "--files",
        type=lambda text: tuple(text.split(",")),
        metavar="NAMES",
        help="of the suite, with commas, such as chat,completion (default: all that it has for a server)",
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="that runs the tests (default: this one)"
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
