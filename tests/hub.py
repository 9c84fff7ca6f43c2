"""A hub of models on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c" * 40
MODEL = "owner/name"


class FakeHub(ThreadingHTTPServer):
    """Has the files of one folder as `owner/name`. `asked` are those that were read; what is in them waits
    for `may_go`."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.may_go = threading.Event()
        self.may_go.set()
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.may_go.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET(has_body=False)

    def do_GET(self, *, has_body: bool = True) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        if path == f"/api/models/{MODEL}":
            siblings = [
                {"rfilename": each.name, "size": each.stat().st_size} for each in hub.folder.iterdir()
            ]
            self.answer(200, json.dumps({"id": MODEL, "siblings": siblings}).encode(), has_body=has_body)
            return
        file = hub.folder / path.rpartition("/")[2]
        if f"/{MODEL}/resolve/" not in path or not file.is_file():
            code = "EntryNotFound" if MODEL in path else "RepoNotFound"
            self.answer(404, b"", {"X-Error-Code": code}, has_body=has_body)
            return
        content = file.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if has_body:
            hub.asked.append(file.name)
            hub.may_go.wait(60)
        if (wanted := self.headers.get("Range")) is None:
            self.answer(200, content, headers, has_body=has_body)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        end = int(first) + len(part) - 1
        self.answer(206, part, {**headers, "Content-Range": f"bytes {first}-{end}/{len(content)}"})

    def answer(self, status: int, body: bytes, headers: Any = None, *, has_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""
