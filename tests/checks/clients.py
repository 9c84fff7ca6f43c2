"""Many clients at once against a server: is every answer right, and how long do they take? `python -m
tests.checks.clients`.

Each client asks for streamed answers one after another, first one client alone and then all of them. Every
text is compared: with plain decoding's where the server is one of our own, with the first answer to the same
question where it is somebody else's (`--url`). Who is sent away with 429 comes again after the time that
Retry-After says. The server's memory is what its `/metrics` tell.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

import numpy as np

from flowspec.bench.console import progress, show
from flowspec.child_process import python_module
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError, InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.reference import Reference
from flowspec.model.text import Tokenizer, recommended
from flowspec.runtime import timeouts
from tests.checks.questions import QUESTIONS, SAMPLINGS
from tests.command import Parser, run_command

PERCENTILES = (50, 95, 99)
SAMPLE_EVERY_S = 2.0
ANSWER_S = 300.0
"""A server that says nothing for so long has lost an answer."""
KEY_VARIABLE = "FLOWSPEC_API_KEY"


@dataclass(slots=True)
class Case:
    """A question with its sampling, and what the answer must be once that is known."""

    question: str
    sampling: dict[str, Any]
    expected: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An answer as a client saw it: seconds from the first attempt to the first text, and to the end."""

    first_s: float
    whole_s: float
    tokens: int


@dataclass(slots=True)
class Phase:
    """What so many clients saw."""

    clients: int
    answers: list[Asked] = field(default_factory=list)
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, float]] = field(default_factory=list)
    spent_s: float = 0.0

    def report(self) -> dict[str, Any]:
        """As `--json` prints it; memory in MiB, as (seconds, value)."""
        found: dict[str, Any] = {
            "clients": self.clients,
            "answers": len(self.answers),
            "wrong": self.wrong,
            "lost": dict(self.lost),
            "refused": self.refused,
            "spent_s": round(self.spent_s, 3),
            "tokens_per_s": sum(each.tokens for each in self.answers) / self.spent_s if self.spent_s else 0.0,
            "answers_per_minute": 60 * len(self.answers) / self.spent_s if self.spent_s else 0.0,
        }
        for name, values in (
            ("first_s", [each.first_s for each in self.answers]),
            ("whole_s", [each.whole_s for each in self.answers]),
        ):
            for share in PERCENTILES:
                found[f"{name}_p{share}"] = float(np.percentile(values, share)) if values else None
        found["memory"] = [[round(at_s, 1), round(value, 2)] for at_s, value in self.memory]
        found["memory_per_minute"] = self.growth
        return found

    @property
    def growth(self) -> float | None:
        """MiB that the server's memory grows in a minute, by a straight line through the second half of the
        time."""
        late = [sample for sample in self.memory if sample[0] >= self.spent_s / 2]
        if len(late) < 3:
            return None
        at_s, values = np.array(late).T
        return float(60 * np.polyfit(at_s, values, 1)[0])


class Refused(Exception):
    """The server is busy; come again after `after_s`."""

    def __init__(self, after_s: float) -> None:
        super().__init__(f"busy for {after_s:g} s")
        self.after_s = after_s


class Lost(Exception):
    """An answer did not come as it should."""


class Api:
    """A server's address, and how it is asked."""

    def __init__(self, url: str, key: str = "") -> None:
        found = urllib.parse.urlsplit(url)
        if found.scheme != "http" or not found.hostname:
            raise InputError(f"--url: expected an address such as http://127.0.0.1:8000/v1, got {url!r:.80}")
        self._address = (found.hostname, found.port or 80)
        self._path = found.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str) -> str:
        """A document beside (`/metrics`) or in (`v1/models`) the API; raises `ClusterError`."""
        with self._connection() as connection:
            try:
                connection.request(
                    "GET", path if path.startswith("/") else f"{self._path}/{path}", headers=self._headers
                )
                answer = connection.getresponse()
                text = answer.read().decode()
            except (OSError, http.client.HTTPException) as error:
                raise ClusterError(
                    f"no server answers at {self._address[0]}:{self._address[1]}: {error}"
                ) from None
        if answer.status != 200:
            raise ClusterError(f"{path}: the server says {answer.status}: {text:.200}")
        return text

    def resident_mib(self) -> float:
        for line in self.get("/metrics").splitlines():
            if line.startswith("flowspec_resident_bytes "):
                return float(line.split()[1]) / 2**20
        raise ClusterError("the server's /metrics have no flowspec_resident_bytes")

    def ask(self, fields: dict[str, Any]) -> tuple[str, int, float]:
        """A streamed chat: its text, its tokens, and the instant of its first text. Raises `Refused` or
        `Lost`."""
        body = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}}).encode()
        with self._connection() as connection:
            try:
                connection.request(
                    "POST",
                    f"{self._path}/chat/completions",
                    body,
                    {**self._headers, "Content-Type": "application/json"},
                )
                answer = connection.getresponse()
                if answer.status == 429:
                    raise Refused(float(answer.headers["Retry-After"]))
                if answer.status != 200:
                    raise Lost(f"status {answer.status}: {answer.read().decode():.200}")
                return read_stream(answer)
            except (OSError, http.client.HTTPException) as error:
                raise Lost(f"{type(error).__name__}: {error}") from None

    @contextlib.contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(*self._address, timeout=ANSWER_S)
        try:
            yield connection
        finally:
            connection.close()


def read_stream(lines: Any) -> tuple[str, int, float]:
    """The text, tokens and first instant of a stream whose chunks are whole and in order; raises `Lost`."""
    texts: list[str] = []
    ids: set[str] = set()
    first_s, tokens, reason, is_done = 0.0, -1, None, False
    while line := lines.readline():
        if not line.startswith(b"data: "):
            continue
        if is_done:
            raise Lost("something came behind the end")
        if line.strip() == b"data: [DONE]":
            is_done = True
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise Lost(str(chunk["error"]["message"]))
        ids.add(chunk["id"])
        for choice in chunk["choices"]:
            if reason is not None:
                raise Lost("text came behind the answer's end")
            text = choice["delta"].get("content") or ""
            if text and not texts:
                first_s = time.monotonic()
            texts += [text] if text else []
            reason = choice["finish_reason"]
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
    if not is_done or reason not in ("stop", "length") or len(ids) != 1 or tokens < 0:
        raise Lost(f"the stream broke off after {len(texts)} pieces")
    return "".join(texts), tokens, first_s or time.monotonic()


class Load:
    """Clients that ask these cases, of at most so many tokens each."""

    def __init__(self, api: Api, cases: Sequence[Case], tokens: int, seed: int) -> None:
        self._api = api
        self._cases = cases
        self._tokens = tokens
        self._seed = seed
        self._model = json.loads(api.get("models"))["data"][0]["id"]
        self._lock = threading.Lock()
        self._is_over = threading.Event()

    def run(self, clients: int, seconds: float) -> Phase:
        """So many clients for so long; each finishes what it has begun."""
        phase = Phase(clients)
        began_s = time.monotonic()
        self._is_over.clear()
        with ThreadPoolExecutor(clients + 1) as pool:
            watching = pool.submit(self._watch, phase, began_s)
            asking = [
                pool.submit(self._client, phase, random.Random(f"{self._seed} {number}"), began_s + seconds)
                for number in range(clients)
            ]
            try:
                for future in asking:
                    future.result()
            finally:
                phase.spent_s = time.monotonic() - began_s
                self._is_over.set()
            watching.result()
        return phase

    def _watch(self, phase: Phase, began_s: float) -> None:
        while True:
            phase.memory.append((time.monotonic() - began_s, self._api.resident_mib()))
            if self._is_over.wait(SAMPLE_EVERY_S):
                return

    def _client(self, phase: Phase, rng: random.Random, until_s: float) -> None:
        while time.monotonic() < until_s and not self._is_over.is_set():
            self._one(phase, rng.choice(self._cases))

    def _one(self, phase: Phase, case: Case) -> None:
        fields = {
            "model": self._model,
            "messages": [{"role": "user", "content": case.question}],
            "max_tokens": self._tokens,
            **case.sampling,
        }
        began_s = time.monotonic()
        while not self._is_over.is_set():
            try:
                text, tokens, first_s = self._api.ask(fields)
            except Refused as refused:
                with self._lock:
                    phase.refused += 1
                self._is_over.wait(refused.after_s)
                continue
            except Lost as lost:
                with self._lock:
                    phase.lost[str(lost)] += 1
                return
            now_s = time.monotonic()
            with self._lock:
                case.expected = text if case.expected is None else case.expected
                if text != case.expected:
                    phase.wrong.append(
                        f"{case.question} {json.dumps(case.sampling)}: expected {case.expected!r}, got "
                        f"{text!r}"
                    )
                phase.answers.append(Asked(first_s=first_s - began_s, whole_s=now_s - began_s, tokens=tokens))
            return


def plain_cases(tokens: int) -> list[Case]:
    """The cases for the bundled model in float32, with what plain decoding says."""
    files = ModelFiles(BUNDLED)
    tokenizer, reference = Tokenizer(files), Reference(files, "float32")
    stops = recommended(files, files.config()).stop_ids
    found = cases()
    for case in found:
        prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": case.question}]))
        said = reference.generate(prompt, Sampling(**case.sampling), tokens, stops)
        case.expected = tokenizer.decode(said[:-1] if said and said[-1] in stops else said)
    return found


def cases() -> list[Case]:
    return [Case(question, sampling) for question in QUESTIONS for sampling in SAMPLINGS]


@contextlib.contextmanager
def own_server(flags: Sequence[str]) -> Iterator[str]:
    """A `flowspec serve` of the bundled model in float32; yields its address. Raises `ClusterError`."""
    command = python_module(
        "flowspec.cli.main", "serve", "--json", "--port", "0", "--dtype", "float32", *flags
    )
    with Popen(command, stdout=PIPE, text=True, env={**os.environ, KEY_VARIABLE: ""}) as process:
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


def command(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        if args.url is None:
            found = plain_cases(args.tokens)
            flags = ["--local", str(args.local), "--parallel", str(args.parallel), "--queue", str(args.queue)]
            url, key = (
                stack.enter_context(
                    own_server([*flags, *(["--drafter", args.drafter] if args.drafter else [])])
                ),
                "",
            )
        else:
            found, url, key = cases(), args.url, os.environ.get(KEY_VARIABLE, "")
        load = Load(Api(url, key), found, args.tokens, args.seed)
        with progress("one client", 2) as step:
            phases = [load.run(1, args.alone)]
            step(f"{args.clients} clients")
            phases.append(load.run(args.clients, 60 * args.minutes))
            step("done")
    reports = [phase.report() for phase in phases]
    if args.json:
        print(json.dumps({"url": args.url, "phases": reports}))
    else:
        tell(reports)
    return 1 if any(report["wrong"] or report["lost"] or not report["answers"] for report in reports) else 0


def tell(reports: Sequence[dict[str, Any]]) -> None:
    columns = ["clients", "answers", "answers/min", "tokens/s", "wrong", "lost", "429", "MiB", "MiB/min"]
    rows = [
        [
            str(report["clients"]),
            report["answers"],
            report["answers_per_minute"],
            report["tokens_per_s"],
            len(report["wrong"]),
            sum(report["lost"].values()),
            report["refused"],
            report["memory"][-1][1],
            report["memory_per_minute"],
        ]
        for report in reports
    ]
    show("answers", columns, rows)
    names = [f"{name}_p{share}" for name in ("first_s", "whole_s") for share in PERCENTILES]
    titles = [f"{title} p{share}" for title in ("first", "whole") for share in PERCENTILES]
    show(
        "seconds to the first text, and to the end",
        ["clients", *titles],
        [[str(r["clients"]), *(r[name] for name in names)] for r in reports],
    )
    for report in reports:
        for line in [*report["wrong"], *(f"{text} ({count})" for text, count in report["lost"].items())][:10]:
            print(f"{report['clients']} clients: {line}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.checks.clients", __doc__)
    parser.whole("--clients", 32)
    parser.add_argument(
        "--minutes", type=float, default=3.0, metavar="M", help="how long they ask (default: %(default)s)"
    )
    parser.add_argument(
        "--alone",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds of one client before (default: %(default)s)",
    )
    parser.add_argument(
        "--url", help=f"a server that runs already, its key in {KEY_VARIABLE} (default: one of our own)"
    )
    parser.whole("--tokens", 64, "longest answer")
    parser.add_argument("--seed", type=int, default=0, help="of who asks what (default: %(default)s)")
    parser.whole("--local", 4, "stages of our own server")
    parser.whole("--parallel", 8, "of our own server")
    parser.whole("--queue", 32, "of our own server")
    parser.add_argument("--drafter", metavar="NAME", help="of our own server (default: the bundled one)")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
