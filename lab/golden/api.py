"""What clients and watchers of `flowspec serve` see: documents, streams, refusals, the page's routes, and
what recordings of answers hold. The product is seen as processes, sockets and files.

What differs from run to run is masked: ids (`#resp_1` is the first of its kind in an observation), instants,
addresses, how much memory a process has, and how many tokens of a prompt were cached: what the stages hold of
an answer that has just ended is up to time. So is how a text is cut into a stream's pieces: they are joined,
and the rest of each event stays as it is.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.golden import api_requests as requests
from lab.golden.api_requests import Ask
from lab.golden.faces import mask_json, shipped_models
from lab.golden.place import Place
from lab.golden.recording import Absent, Observation

START_S = 180.0
"""How long a server may take until it answers prompts."""
ANSWER_S = 120.0
"""How long it may be silent in the middle of an answer."""
END_S = 30.0
PART_S = 1200.0
"""How long a server is asked at most."""
SETTLED_S = 0.5
EVERY_S = 0.05
LOST = (OSError, http.client.HTTPException)
UNLIKE = (LookupError, TypeError, ValueError, AttributeError, StopIteration)
"""What comes of documents that are not as they were."""

NUMBERS = frozenset({"created", "created_at", "completed_at", "pid", "memory_bytes"})
"""Keys of instants, and of what a process is given by its system."""
CACHED = "cached_tokens"
TEXTS = frozenset({"address", "url", "page", "version", "created"})
"""Keys of addresses with their ports, of what changes with each release, and of an instant."""
UNRECORDED = frozenset({"date", "content-length", "transfer-encoding", "connection", "server"})
"""Headers of the transport."""
ID = re.compile(r"\b(chatcmpl|cmpl|resp|msg|rs|fco|fc|call|fp)([_-])[0-9A-Za-z]{8,}\b")
CLOCK = re.compile(r"^\d\d:\d\d:\d\d")
AGAIN = re.compile(r"(?: \([^()]*\))?; try again in \d+ s")
"""How long a refused request should wait goes by how long answers took, how far loading is by time."""

JOINED = frozenset({"content", "reasoning_content", "text", "delta", "arguments"})
"""Keys of texts that a stream tells in pieces."""
ON_DEMAND = frozenset({"draft", "nodes", "dead", "note", "missed", "lost", "failed"})
"""Kinds of frames that an answer in real time may not have: nobody guesses where that does not pay."""
MACHINE = frozenset({"temperature_c", "throttled", "loading"})
"""Fields of frames that some machines know and others do not."""
BENCH = ("ar", "chunk-pp", "continuous")
RECORDED_BYTES_MAX = 100_000


def observe(place: Place, name: str) -> Iterator[Observation | Absent]:
    """Sees two servers, the second with keys and a model that calls tools, and recordings of answers."""
    yield from _guarded("recording", _recordings(place))
    with _serving(place, "open", "--local", "2") as server:
        yield from _of_first_server(server)
    yield _end_of(server)
    keys = place.home / "keys"
    keys.write_text(f"{requests.KEY}\ngolden-key-2\n", "utf-8")
    keys.chmod(0o600)
    said = ("--api-key-file", str(keys), "--cors", requests.ORIGIN, "--parallel", "2", "--queue", "0")
    model = ("--model", str(_model_with_tools(place)), "--model-name", "toy")
    with _serving(place, "keyed", "--local", "2", *model, *said, key=requests.BEARER) as server:
        yield from _of_second_server(server)
    yield _end_of(server)


def _guarded(
    key: str, observations: Iterator[Observation | Absent] | Iterator[Observation]
) -> Iterator[Observation | Absent]:
    """The observations; where a document is not as it was, so that they cannot go on, one that says so."""
    try:
        yield from observations
    except (*LOST, *UNLIKE) as error:
        yield Observation(key=key, value={"unexpected": f"{type(error).__name__}: {error}"})


# ------------------------------------------------------------------------------------------------- servers


@dataclass(slots=True)
class Server:
    """A `flowspec serve`; `answered` are its documents as they came, by the requests' names, `children` the
    processes that it started, and `left` how many of them were there when it had ended."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    out: Path
    err: Path
    key: Mapping[str, str]
    until_s: float
    answered: dict[str, Any] = field(default_factory=dict)
    children: list[int] = field(default_factory=list)
    left: int = 0

    def call(self, ask: Ask, *, has_key: bool = True) -> Reply:
        """Sends a request and reads its whole answer; this server's earlier answers fill its gaps."""
        with contextlib.closing(self.connect()) as connection:
            self.send(connection, ask, has_key=has_key)
            answer = connection.getresponse()
            reply = Reply(answer.status, _headers(answer.headers.items()), answer.read())
        self.answered[ask.name] = {"events": reply.events} if reply.is_stream else reply.document
        return reply

    def connect(self) -> http.client.HTTPConnection:
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise RuntimeError(f"expected to have asked everything within {PART_S:g} s")
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=min(ANSWER_S, left_s))

    def send(self, connection: http.client.HTTPConnection, ask: Ask, *, has_key: bool = True) -> None:
        filled = Ask(
            name=ask.name,
            method=ask.method,
            path=self._filled(ask.path),
            body=self._filled(ask.body),
            raw=ask.raw,
        )
        content = filled.content
        said = {"Content-Type": "application/json"} if content is not None else {}
        said |= self.key if has_key else {}
        connection.request(ask.method, filled.path, content, {**said, **ask.headers})

    def _filled(self, value: Any) -> Any:
        """The value with what it takes over of earlier answers."""
        if isinstance(value, dict):
            return {key: self._filled(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._filled(each) for each in value]
        if not isinstance(value, str):
            return value
        if found := re.fullmatch(r"{{(\S+) (\S+)}}", value):
            return self._found(found[1], found[2])
        return re.sub(r"{{(\S+) (\S+)}}", lambda found: str(self._found(found[1], found[2])), value)

    def _found(self, name: str, path: str) -> Any:
        """A value of an earlier answer; a name that nothing has where that answer lacks it."""
        value = self.answered[name]
        try:
            for step in path.split("."):
                value = value[int(step) if isinstance(value, list) else step]
        except (KeyError, IndexError, TypeError):
            return "nothing"
        return value

    def await_loading(self) -> bool:
        """Waits until it listens; says whether it still loads its model then."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and self.process.poll() is None:
            try:
                return self.call(requests.get("health", "/health")).status == 503
            except OSError:
                time.sleep(EVERY_S)
        raise RuntimeError(
            f"expected a server that listens within {START_S:g} s; it said {self._last_words()}"
        )

    def await_ready(self) -> Any:
        """Waits for the address that it prints when prompts can be answered, and gives that document."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and self.process.poll() is None:
            if (text := self.out.read_text("utf-8")).endswith("\n"):
                found = self.call(requests.get("cluster", "/v1/cluster")).document
                self.children = [stage["pid"] for stage in found.get("stages", ())]
                return json.loads(text)
            time.sleep(EVERY_S)
        raise RuntimeError(f"expected an address within {START_S:g} s; the server said {self._last_words()}")

    def await_idle(self) -> int:
        """Waits until no answer runs; gives how many do."""
        until_s, running = time.monotonic() + END_S, -1
        while running and time.monotonic() < until_s:
            time.sleep(EVERY_S)
            running = self.call(requests.get("idle", "/v1/cluster")).document["running"]
        return running

    def end(self) -> None:
        """Asks it to end, and ends it if it does not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_S)
        until_s = time.monotonic() + END_S
        while (left := [pid for pid in self.children if _is_there(pid)]) and time.monotonic() < until_s:
            time.sleep(EVERY_S)
        self.left = len(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _last_words(self) -> str:
        return (self.err.read_text("utf-8").strip().splitlines() or ["nothing"])[-1]


def _is_there(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not asked for its status does not."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text("utf-8")
    except OSError:
        return False


@contextlib.contextmanager
def _serving(
    place: Place, name: str, *arguments: str, key: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server that has been started and may not listen yet; in the end it is gone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out, err = place.home / f"{name}.out", place.home / f"{name}.err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        command = place.flowspec("serve", "--port", str(port), "--json", *arguments)
        process = place.start(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    server = Server(name, port, process, out, err, key or {}, time.monotonic() + PART_S)
    try:
        yield server
    finally:
        server.end()


def _end_of(server: Server) -> Observation:
    """How a server ended, what it had logged, and by how many names it had called its arithmetic."""
    told = server.err.read_text("utf-8").splitlines()
    fingerprints = {
        document["system_fingerprint"]
        for document in server.answered.values()
        if isinstance(document, dict) and "system_fingerprint" in document
    }
    value = {
        "status": server.process.returncode,
        "processes_left": server.left,
        "log": [CLOCK.sub("#time", line) for line in told],
        "fingerprints": len(fingerprints),
    }
    return Observation(key=f"server/{server.name}/end", value=value)


def _model_with_tools(place: Place) -> Path:
    """The bundled model, the largest of the package that chats, with a template that has tools."""
    folder = place.home / "toy-with-tools"
    shutil.copytree(shipped_models()[-1], folder)
    (folder / "chat_template.jinja").write_text(requests.TEMPLATE, "utf-8")
    return folder


def _of_first_server(server: Server) -> Iterator[Observation | Absent]:
    yield from _while_loading(server)
    yield Observation(key="server/open/ready", value=_masked(server.await_ready()))
    for ask in (*requests.ANSWERS, *requests.WRONG):
        yield _asked(server, ask)
    yield from _guarded("cached", _cached(server))
    yield from _guarded("wrong/http", _nonsense(server))
    yield from _guarded("page/files", _page(server))
    yield from _guarded("live", _live(server))
    with ThreadPoolExecutor(len(requests.PARALLEL)) as pool:
        yield from pool.map(lambda ask: _asked(server, ask), requests.PARALLEL)
    yield from _guarded("cancel", _cancelled(server))
    text = server.call(requests.get("metrics", "/metrics"))
    yield Observation(key="metrics", value={**text.outside, "metrics": _metrics(text.content.decode())})


def _of_second_server(server: Server) -> Iterator[Observation | Absent]:
    server.await_loading()
    yield Observation(key="server/keyed/ready", value=_masked(server.await_ready()))
    for ask in requests.KEYS:
        yield _asked(server, ask, has_key=False)
    for ask in requests.CALLS:
        yield _asked(server, ask)
    yield from _guarded("busy", _busy(server))


def _asked(server: Server, ask: Ask, *, has_key: bool = True, is_settled: bool = False) -> Observation:
    """What is answered to a request, or how the connection was lost; `is_settled` as of `_masked`."""
    try:
        return _seen(ask, server.call(ask, has_key=has_key), is_settled=is_settled)
    except LOST as error:
        return Observation(key=ask.name, value={"lost": type(error).__name__})


def _cached(server: Server) -> Iterator[Observation]:
    """How many tokens of a prompt were cached when nothing has been under way for a while."""
    for ask in requests.CACHED:
        server.await_idle()
        time.sleep(SETTLED_S)
        yield _asked(server, ask, is_settled=True)


def _busy(server: Server) -> Iterator[Observation]:
    """All places are taken, and nobody may wait."""
    with contextlib.closing(server.connect()) as connection:
        server.send(connection, requests.BUSY)
        connection.getresponse().readline()
        for ask in requests.WHILE_BUSY:
            yield _asked(server, ask)
    yield Observation(key="busy/left-running", value=server.await_idle())
    yield _asked(server, requests.AFTER_BUSY)


def _while_loading(server: Server) -> Iterator[Observation | Absent]:
    if not server.await_loading():
        yield Absent(key="loading", why="the model was loaded before the first request came")
        return
    for ask in (
        requests.get("loading/health", "/health"),
        requests.get("loading/models", "/v1/models"),
        requests.chat("loading/chat"),
        requests.get("loading/page", "/"),
    ):
        yield _asked(server, ask)
    with _watching(server) as (answer, events):
        first = next(events)
        value = {
            "headers": _headers(answer.headers.items()),
            "name": first.name,
            "keys": sorted(first.document),
        }
    yield Observation(key="loading/live", value=value)


def _nonsense(server: Server) -> Iterator[Observation]:
    """What is answered to something that is not HTTP."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=ANSWER_S) as connection:
        connection.sendall(b"NONSENSE\r\n\r\n")
        said = b""
        while piece := connection.recv(65536):
            said += piece
    head, _, body = said.decode("latin-1").partition("\r\n\r\n")
    status, *headers = head.split("\r\n")
    pairs = [(name, value) for name, _, value in (line.partition(": ") for line in headers)]
    yield Observation(key="wrong/http", value={"status": status, "headers": _headers(pairs), "body": body})


def _cancelled(server: Server) -> Iterator[Observation]:
    """A client goes away in the middle of its answer; others are answered as ever."""
    with contextlib.closing(server.connect()) as connection:
        server.send(connection, requests.LONG)
        events = _events_in(_lines(connection.getresponse(), server.until_s))
        begun = "".join(next(events).document["choices"][0]["delta"].get("content", "") for _ in range(3))
    running = server.await_idle()
    counted = server.call(requests.get("counted", "/metrics")).content.decode()
    (ended,) = re.findall(r'answers_total{reason="cancelled"} ([\d.]+)', counted)
    for ask in requests.AFTER_LONG:
        reply = server.call(ask)
        yield _seen(ask, reply)
        if ask is requests.AFTER_LONG[0]:
            text = reply.document["choices"][0]["message"]["content"]
            value = {"running": running, "cancelled": float(ended), "is_beginning": text.startswith(begun)}
            yield Observation(key="cancel/gone", value=value)


# ------------------------------------------------------------------------------------ answers and streams


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event; `document` is its text where that is no JSON."""

    name: str
    document: Any


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def outside(self) -> dict[str, Any]:
        headers = dict(self.headers)
        if self.status == 429:
            headers["retry-after"] = "#number"
        return {"status": self.status, "headers": headers}

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def document(self) -> Any:
        """The JSON that it holds, else its text."""
        text = self.content.decode("utf-8", "replace")
        if self.headers.get("content-type") != "application/json":
            return text
        try:
            return json.loads(text)
        except ValueError:
            return {"no_json": text}

    @property
    def events(self) -> list[Any]:
        """A stream's documents, each with its event's name where it has one."""
        found = _events_in(self.content.splitlines(keepends=True))
        return [{"event": each.name, **each.document} if each.name else each.document for each in found]


def _lines(answer: http.client.HTTPResponse, until_s: float) -> Iterator[bytes]:
    """The lines of a stream; raises TimeoutError at the end of the server's time."""
    while time.monotonic() < until_s:
        if not (line := answer.readline()):
            return
        yield line
    raise TimeoutError(f"expected the end of a stream within {PART_S:g} s")


def _events_in(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events of a stream, without comments."""
    name, data = "", ""
    for line in lines:
        text = line.decode().rstrip("\n")
        kind, _, rest = text.partition(": ")
        if kind == "event":
            name = rest
        elif kind == "data":
            data += rest
        elif not text and data:
            yield Event(name, json.loads(data) if data.startswith(("{", "[{")) else data)
            name, data = "", ""


def _headers(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    found = {name.lower(): value for name, value in pairs if name.lower() not in UNRECORDED}
    return {name: "#text" if name == "etag" else value for name, value in sorted(found.items())}


def _seen(ask: Ask, reply: Reply, *, is_settled: bool = False) -> Observation:
    """What came; of what the page is made of no content, for that changes on purpose."""
    value = reply.outside
    if reply.is_stream:
        documents = reply.events
        numbers = [
            each.pop("sequence_number")
            for each in documents
            if isinstance(each, dict) and "sequence_number" in each
        ]
        if numbers:
            value["is_numbered"] = numbers == list(range(len(documents)))
        value["events"] = _masked(_joined(documents), is_settled=is_settled)
    elif reply.content and not (ask.path.startswith("/page/") or (ask.path == "/" and reply.status == 200)):
        value["document"] = _masked(reply.document, is_settled=is_settled)
    return Observation(key=ask.name, value=value)


class _ApartError(Exception):
    """Two events that are no pieces of one text."""


def _joined(documents: Iterable[Any]) -> list[Any]:
    """A stream's documents with pieces that follow each other joined, and choices one after the other."""
    found: list[Any] = []
    atoms = [atom for document in documents for atom in _atoms(document)]
    for atom in sorted(atoms, key=_choice_of):  # keeps the order within a choice
        try:
            found[-1:] = [_merged(found[-1], atom, "")] if found else [atom]
        except _ApartError:
            found.append(atom)
    return found


def _choice_of(document: Any) -> int:
    """What a stream ends with belongs to no choice, and comes last."""
    choices = document.get("choices") if isinstance(document, dict) else None
    if choices:
        return int(choices[0]["index"])
    return 1 << 30 if choices == [] or isinstance(document, str) else 0


def _atoms(document: Any) -> list[Any]:
    """A chunk that tells text, thoughts and calls at once, as one that tells one after the other: what comes
    together is up to time. Of a call its name comes before its arguments."""
    if not isinstance(document, dict) or not document.get("choices"):
        return [document]
    choice = document["choices"][0]
    delta = choice.get("delta")
    if delta is None or choice.get("finish_reason") is not None or "role" in delta:
        return [document]
    parts: list[dict[str, Any]] = []
    for key in ("reasoning_content", "content"):
        if key in delta and (delta[key] or choice.get("logprobs")):
            parts.append({key: delta[key]})
    for call in delta.get("tool_calls", ()):
        parts.append({"tool_calls": [call]})
        arguments = call["function"]["arguments"]
        if "name" in call["function"] and arguments:
            parts[-1] = {"tool_calls": [{**call, "function": {**call["function"], "arguments": ""}}]}
            parts.append({"tool_calls": [{"index": call["index"], "function": {"arguments": arguments}}]})
    unknown = {key: value for key, value in delta.items() if key not in (*JOINED, "tool_calls")}
    parts += [unknown] if unknown else []
    return [{**document, "choices": [{**choice, "delta": part}]} for part in parts]


def _merged(first: Any, then: Any, key: str) -> Any:
    """Two pieces as one: texts and lists behind each other, all else as both have it."""
    if isinstance(first, dict) and isinstance(then, dict):
        if first.keys() != then.keys():
            raise _ApartError
        return {name: _merged(first[name], then[name], name) for name in first}
    if isinstance(first, list) and isinstance(then, list):
        if all(isinstance(each, dict) and "index" in each for each in (*first, *then)) and first and then:
            if [each["index"] for each in first] != [each["index"] for each in then]:
                raise _ApartError
            return [_merged(old, new, "") for old, new in zip(first, then, strict=True)]
        return first + then
    if isinstance(first, str) and isinstance(then, str) and key in JOINED:
        return first + then
    if type(first) is not type(then) or first != then:
        raise _ApartError
    return first


def _masked(value: Any, *, is_settled: bool = False) -> Any:
    """The value without what differs from run to run. What was cached differs, but if all is settled: nothing
    was under way for a while when the request came."""
    return _with_texts_masked(mask_json(value, NUMBERS if is_settled else NUMBERS | {CACHED}), {})


def _with_texts_masked(value: Any, ids: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            key: "#text"
            if key in TEXTS and isinstance(each, str) and each not in ("", "#number")
            else _with_texts_masked(each, ids)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_with_texts_masked(each, ids) for each in value]
    return (
        AGAIN.sub("; try again in #number s", _without_ids(value, ids)) if isinstance(value, str) else value
    )


def _without_ids(text: str, ids: dict[str, str]) -> str:
    """The text with a name in the place of each id: the same id has the same name."""

    def name_of(found: re.Match[str]) -> str:
        known = sum(each.startswith(f"#{found[1]}{found[2]}") for each in ids.values())
        return ids.setdefault(found[0], f"#{found[1]}{found[2]}{known + 1}")

    return ID.sub(name_of, text)


def _metrics(text: str) -> list[str]:
    """Names, types and labels of metrics, without their values."""
    found: dict[str, None] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            keys = re.findall(r'(\w+)="', labels)
            line = f"{name}{{{', '.join(keys)}}}" if keys else name
        found[line] = None
    return list(found)


# ------------------------------------------------------------------------------------ the page and watching


def _page(server: Server) -> Iterator[Observation]:
    """Which files the page is made of, found as a browser finds them, and how each is sent."""
    files: dict[str, Any] = {}
    left = ["/"]
    while left:
        path = left.pop()
        if path in files:
            continue
        reply = server.call(requests.get("file", path))
        files[path] = {"status": reply.status, "type": reply.headers.get("content-type")}
        text = reply.content.decode()
        left += re.findall(r'(?:src|href)="(/[^"#]+)"', text)
        left += [f"/page/{name}" for name in re.findall(r'(?:from|import) "\./([^"]+)"', text)]
    yield Observation(key="page/files", value=dict(sorted(files.items())))
    with contextlib.closing(server.connect()) as connection:
        connection.request("GET", "/")
        answer = connection.getresponse()
        tag = answer.headers["etag"]
        answer.read()
        connection.request("GET", "/", headers={"If-None-Match": tag})
        answer = connection.getresponse()
        value = {
            "status": answer.status,
            "headers": _headers(answer.headers.items()),
            "bytes": len(answer.read()),
        }
    yield Observation(key="page/unchanged", value=value)


@contextlib.contextmanager
def _watching(server: Server) -> Iterator[tuple[http.client.HTTPResponse, Iterator[Event]]]:
    with contextlib.closing(server.connect()) as connection:
        connection.request("GET", "/live/events", headers=dict(server.key))
        answer = connection.getresponse()
        yield answer, _events_in(_lines(answer, server.until_s))


def _live(server: Server) -> Iterator[Observation]:
    """What a watcher is told of an answer, and the recording of it."""
    with _watching(server) as (answer, events):
        headers = _headers(answer.headers.items())
        hello = next(events)
        ask = requests.chat("live/chat", requests.STORY, max_tokens=60)
        yield _asked(server, ask)
        frames: list[dict[str, Any]] = []
        names = {hello.name}
        while not {"end", "figures"} <= {frame["kind"] for frame in frames}:
            event = next(events)
            names.add(event.name)
            frames += event.document
    value = {
        "status": answer.status,
        "headers": headers,
        "names": sorted(names),
        "hello": _masked(hello.document),
        "told": _told(frames),
    }
    yield Observation(key="live/events", value=value)
    reply = server.call(requests.get("live/recording", "/live/recording"))
    outline = _outline(reply.document)
    outline["told"]["kinds"] = list(outline["told"]["kinds"])  # of the forms that they have above
    value = {**reply.outside, "recording": outline}
    yield Observation(key="live/recording", value=value)


def _recordings(place: Place) -> Iterator[Observation]:
    """An answer in real time, and of each of some methods one in virtual time, which is the same to the
    microsecond every time."""
    path = place.home / "recording.json"
    said = ("--local", "2", "--temperature", "0", "--max-new-tokens", "40", "--record", str(path))
    done = place.run("generate", *said, requests.SUM)
    if done.returncode:
        raise RuntimeError(f"flowspec generate --record: {done.stderr.strip()[-200:]}")
    yield Observation(key="recording/real", value=_outline(json.loads(path.read_text("utf-8"))))
    out = place.home / "bench"
    few = ("--temperatures", "0", "--limit", "1", "--max-new-tokens", "10")
    kinds = ("--experiment", "paper-bundled", "--methods", ",".join(BENCH), "--nothing-learnt")
    command = [sys.executable, "-m", "lab.bench", *kinds, *few, "--out", str(out), "--json"]
    bench = place.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _, errors = bench.communicate()
    if bench.returncode:
        raise RuntimeError(f"lab.bench: {errors.strip()[-200:]}")
    names = sorted(file.name for file in out.glob("recording-*"))
    yield Observation(key="recording/virtual", value=names)
    for name in names:
        content = (out / name).read_bytes()
        document = json.loads(content)
        if len(content) > RECORDED_BYTES_MAX:
            raise RuntimeError(f"{name}: expected at most {RECORDED_BYTES_MAX} bytes, got {len(content)}")
        lines = [json.dumps(frame, ensure_ascii=False) for frame in document.pop("frames")]
        key = f"recording/virtual/{name.removesuffix('.json')}"
        yield Observation(key=key, value={**document, "frames": lines})


def _outline(document: dict[str, Any]) -> dict[str, Any]:
    """A recording in real time without what time makes of it."""
    frames = document["frames"]
    instants = [frame["t"] for frame in frames]
    return {
        **_masked({key: value for key, value in document.items() if key != "frames"}),
        "begins_at_0": bool(instants) and instants[0] == 0,
        "is_in_order": instants == sorted(instants),
        "told": _told(frames),
    }


def _told(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """What frames say of one answer, and of which form they are, by kind."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for frame in frames:
        by_kind.setdefault(frame["kind"], []).append(frame)
    begin, root, end = (by_kind[kind][0] for kind in ("begin", "root", "end"))
    return {
        "begin": {key: value for key, value in begin.items() if key not in ("t", "request")},
        "root": {key: root[key] for key in ("token", "position")},
        "stages": by_kind["stages"][-1]["stages"],
        "tokens": [text for frame in by_kind["tokens"] for _, text in frame["nodes"]],
        "reason": end["reason"],
        "kinds": {
            kind: _merged_forms([_form(frame) for frame in found])
            for kind, found in sorted(by_kind.items())
            if kind not in ON_DEMAND
        },
    }


def _form(value: Any, key: str = "") -> Any:
    """Of which form a value is: names of types in the place of what holds no other values."""
    if key in MACHINE:
        return "anything"
    if isinstance(value, dict):
        return {name: _form(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_merged_forms([_form(each) for each in value])] if value else []
    kinds: Mapping[type, str] = {bool: "flag", int: "number", float: "number", str: "text"}
    return kinds.get(type(value), "null")


def _merged_forms(forms: list[Any]) -> Any:
    """The forms of several values as one: each of them, where they differ."""
    if all(isinstance(form, dict) for form in forms):
        keys = sorted({key for form in forms for key in form})
        return {key: _merged_forms([form.get(key, "absent") for form in forms]) for key in keys}
    inner = [each for form in forms if isinstance(form, list) for each in form]
    simple = {each for form in forms if isinstance(form, str) for each in form.split(" or ")}
    listed = any(isinstance(form, list) for form in forms)
    if listed and not simple:
        return [_merged_forms(inner)] if inner else []
    text = " or ".join(sorted(simple))
    return text if not listed else {"value": text, "list": [_merged_forms(inner)] if inner else []}
