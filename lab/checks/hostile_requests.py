"""Requests that mean harm against `flowspec serve`: `python -m lab.checks.hostile_requests`.

Schemas of a megabyte, that hold themselves or contradict themselves, expressions that grow, thousands of
biases, tools with names of every character: each is sent to a server of our own, of the bundled model with a
template that calls tools. It must be answered, or refused with status 400 in one line, and the server's
processes must not keep much memory for it. Another client asks a small question again and again meanwhile,
and must get its answer as ever; how long that took beside each of them is told.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import string
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

import psutil

from flowspec.bench.console import progress
from flowspec.child_process import python_module
from flowspec.errors import ClusterError, FlowSpecError
from flowspec.runtime import timeouts
from lab.command import Parser, run_command, show
from tests.serve.scripted_model import PLAIN, QWEN3
from tests.serve.templated_model import folder_of

ANSWER_S = 120.0
"""A request without any answer for so long is lost."""
LINE_CHARS_MAX = 600
GROWTH_BYTES = 768 << 20
"""What all processes of the server may keep of everything together; most of it are the caches of
conversations, of which 96 are kept."""
ALONE = 10
NEW_TOKENS_MAX = 40
SUM: list[dict[str, str]] = [{"role": "user", "content": "What is 17 + 25?"}]
LETTERS = string.ascii_letters + string.digits + "_-"
"""That names of functions have in the API."""
OTHERS = [chr(code) for code in range(128) if chr(code) not in LETTERS] + list("é漢😀\u2028\ufeff\ud800")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What came of some requests alike: their `outcome`, the longest that one took, what memory grew by while
    they ran, and the longest that the other client waited for its answer beside them."""

    name: str
    requests: int
    outcome: str
    seconds: float
    grown_bytes: int
    beside_s: float
    as_promised: bool


# ------------------------------------------------------------------------------------------- the requests


def a_schema(document: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "asked", "schema": document}}}


def a_regex(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": text}}


def tools(names: Sequence[str], parameters: Any = None, **more: Any) -> dict[str, Any]:
    """A call of one of these has to be made."""
    found = [
        {"name": name, "parameters": parameters or {"type": "object", "properties": {}}} for name in names
    ]
    return {
        "tools": [{"type": "function", "function": each} for each in found],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "enable_thinking": False,
        **more,
    }


def nested(depth: int) -> dict[str, Any]:
    """As text that is put together: a document so deep cannot be written by `json`."""
    return {"raw": '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth}


def all_of(count: int) -> list[dict[str, Any]]:
    return [{"anyOf": [{"required": ["a"]}, {"required": [f"b{number}"]}]} for number in range(count)]


TEXT = {"type": "string"}
SELF: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
DEFINED = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
IN_TURN: dict[str, Any] = {"$ref": "#/$defs/a", "$defs": DEFINED}
CONTRADICTIONS: Sequence[dict[str, Any]] = (
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"type": "string", "minLength": 5, "maxLength": 3},
    {"enum": []},
    {"type": "string", "const": 1},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"type": "array", "minItems": 2, "maxItems": 1},
)
ATTEMPTS: dict[str, Sequence[dict[str, Any]]] = {
    "a schema of 1 MB: one long text": [a_schema({"enum": ["x" * 1_000_000]})],
    "a schema of 1 MB: 20,000 properties": [
        a_schema({"type": "object", "properties": {f"property {n}": TEXT for n in range(20_000)}})
    ],
    "a schema of 1 MB: 28,000 schemas in schemas": [nested(28_000)],
    "a schema of 60 KiB: 1,700 schemas in schemas": [nested(1_700)],
    "a schema of 64 KiB: 4,000 texts": [a_schema({"enum": [f"value {n}" for n in range(4000)]})],
    "a schema of 900 slow patterns": [
        a_schema({"properties": {f"p{n}": {**TEXT, "pattern": "^(a|b)*a(a|b){9}$"} for n in range(900)}})
    ],
    "a schema of 900 choices at once": [a_schema({"allOf": all_of(900)})],
    "schemas that hold themselves": [
        a_schema(each) for each in ({"$ref": "#"}, SELF, {"type": "array", "items": {"$ref": "#"}}, IN_TURN)
    ],
    "schemas that contradict themselves": [a_schema(each) for each in CONTRADICTIONS],
    "expressions that grow": [
        a_regex(text) for text in ("(a|b)*a(a|b){24}", "a{1000000}", "((a{99}){99}){99}")
    ],
    "10,000 biases": [{"logit_bias": {str(token): 1 for token in range(10_000)}}],
    "10,000 tools": [tools([f"f{number}" for number in range(10_000)])],
    "128 tools with schemas of 1 MB together": [
        tools([f"f{n}" for n in range(128)], {"type": "object", "properties": {"a": {"enum": ["x" * 8000]}}})
    ],
    "a tool whose schema holds itself": [tools(["f"], SELF)],
    "tools whose schemas contradict themselves": [
        tools(["f"], {"type": "object", "properties": {"a": each}, "required": ["a"]})
        for each in CONTRADICTIONS
    ],
    "as many tools, of which none has to be called": [
        {**tools([f"{letter}{letter}"]), "tool_choice": "auto"} for letter in LETTERS
    ],
    "tools with a name of each character that is one": [tools([letter]) for letter in LETTERS],
    "a tool with a name of all of them": [tools([LETTERS])],
    "tools with a name of each other character": [tools([f"a{other}b"]) for other in OTHERS],
}


def body_of(fields: dict[str, Any]) -> bytes:
    asked = {"messages": SUM, "max_tokens": NEW_TOKENS_MAX, **fields}
    raw = asked.pop("raw", None)
    if raw is None:
        return json.dumps(asked).encode()
    hole = json.dumps({**asked, **a_schema("HERE")})
    return hole.replace('"HERE"', raw).encode()


# --------------------------------------------------------------------------------------------- the clients


class Site:
    """The server's address, and its processes, which are those that this one started."""

    def __init__(self, url: str) -> None:
        found = urllib.parse.urlsplit(url)
        self._address = (found.hostname or "", found.port or 80)
        self._path = f"{found.path}/chat/completions"

    def ask(self, body: bytes) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(*self._address, timeout=ANSWER_S)
        with contextlib.closing(connection):
            connection.request("POST", self._path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.load(answer)

    def small(self) -> tuple[float, str]:
        """Seconds of the small question, and its answer."""
        began_s = time.monotonic()
        status, answer = self.ask(body_of({"temperature": 0}))
        text = answer["choices"][0]["message"]["content"] if status == 200 else f"status {status}: {answer}"
        return time.monotonic() - began_s, text

    @staticmethod
    def memory() -> int:
        """Of all processes of the server, in bytes."""
        total = 0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total


class Beside(threading.Thread):
    """The other client: asks the small question until it is told to stop."""

    def __init__(self, site: Site, expected: str) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self.wrong: list[str] = []
        self._site, self._expected, self._is_over = site, expected, threading.Event()

    def __enter__(self) -> Beside:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        while not self._is_over.is_set():
            try:
                seconds, text = self._site.small()
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                return
            self.longest_s = max(self.longest_s, seconds)
            if text != self._expected:
                self.wrong.append(text)


def outcome_of(status: int, answer: dict[str, Any]) -> tuple[str, bool]:
    """What came of a request in words, and whether that may be."""
    if status == 200:
        (choice,) = answer["choices"]
        return str(choice["finish_reason"]), True
    line = str(answer["error"]["message"])
    return f"{status} {line}", status == 400 and "\n" not in line and len(line) < LINE_CHARS_MAX


def tried(site: Site, name: str, requests: Sequence[dict[str, Any]], expected: str) -> Attempt:
    found: Counter[str] = Counter()
    longest_s, is_right, before = 0.0, True, site.memory()
    with Beside(site, expected) as beside:
        for fields in requests:
            began_s = time.monotonic()
            try:
                said, may_be = outcome_of(*site.ask(body_of(fields)))
            except (OSError, http.client.HTTPException) as error:
                said, may_be = f"lost: {type(error).__name__}", False
            longest_s, is_right = max(longest_s, time.monotonic() - began_s), is_right and may_be
            found[said] += 1
    told = "; ".join(f"{count} x {said:.110}" for said, count in found.most_common())
    return Attempt(
        name=name,
        requests=len(requests),
        outcome=f"{told}{'; the other client got ' * bool(beside.wrong)}{'; '.join(beside.wrong[:2])}",
        seconds=longest_s,
        grown_bytes=site.memory() - before,
        beside_s=beside.longest_s,
        as_promised=is_right and not beside.wrong,
    )


@contextlib.contextmanager
def own_server(flags: Sequence[str]) -> Iterator[str]:
    """A `flowspec serve` of the bundled model in float32; yields its address. Raises `ClusterError`."""
    words = ("serve", "--json", "--port", "0", "--dtype", "float32")
    command = python_module("flowspec.cli.main", *words, *flags)
    with Popen(command, stdout=PIPE, text=True, env={**os.environ, "FLOWSPEC_API_KEY": ""}) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise ClusterError(f"the server did not start: status {process.wait()}")
            yield json.loads(line)["url"]
        finally:
            process.terminate()
            try:
                process.wait(4 * timeouts.STOP_S)
            except TimeoutExpired:
                process.kill()


def try_everything(
    folder: Path, attempts: dict[str, Sequence[dict[str, Any]]], step: Callable[[str], None]
) -> Iterator[Attempt]:
    """The small question alone, all attempts one after another, and the memory at the end."""
    folder_of(folder / "model", QWEN3, PLAIN[QWEN3])
    flags = ["--model", str(folder / "model"), "--local", "2", "--no-live"]
    with own_server(flags) as url:
        site = Site(url)
        alone = [site.small() for _ in range(ALONE)]
        (expected,) = {text for _, text in alone}
        times = [seconds for seconds, _ in alone]
        before = site.memory()
        yield Attempt(
            name="the small question alone",
            requests=ALONE,
            outcome=f"{statistics.median(times):.2f} s in the middle",
            seconds=max(times),
            grown_bytes=0,
            beside_s=max(times),
            as_promised=True,
        )
        for name, requests in attempts.items():
            step(name)
            yield tried(site, name, requests, expected)
        grown, (seconds, text) = site.memory() - before, site.small()
        yield Attempt(
            name="the small question at the end",
            requests=1,
            outcome="the same answer" if text == expected else text,
            seconds=seconds,
            grown_bytes=grown,
            beside_s=seconds,
            as_promised=text == expected and grown < GROWTH_BYTES,
        )


def command(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder, progress("starting", len(ATTEMPTS)) as step:
        attempts = list(try_everything(Path(folder), ATTEMPTS, step))
    if args.json:
        print(json.dumps([asdict(each) for each in attempts]))
    else:
        rows: list[list[object]] = []
        for each in attempts:
            mib, promised = each.grown_bytes / 2**20, "yes" if each.as_promised else "NO"
            rows.append([each.name, str(each.requests), each.seconds, mib, each.beside_s, promised])
        show("requests that mean harm", ["request", "n", "longest s", "MiB", "beside s", "as promised"], rows)
        for each in attempts:
            print(f"{each.name}: {each.outcome}")
    return 0 if all(each.as_promised for each in attempts) else FlowSpecError.exit_status


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(Parser("lab.checks.hostile_requests", __doc__), command, argv)


if __name__ == "__main__":
    sys.exit(main())
