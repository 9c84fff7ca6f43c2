"""A wire that is listened to: forwards TCP connections, keeps what went over them, and can play it again.

For showing what an eavesdropper reads of a link and what a replay of it does, and for links that are slow.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from flowspec.errors import PeerError
from flowspec.wire.codec import Envelope, decode

GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_CHUNK_BYTES = 16384


@dataclass(slots=True)
class Recording:
    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)


class Wiretap:
    """Stands before the daemon at `target` (`host:port`) while the context lasts; dial `address` instead.
    `mbps` slows what is sent."""

    def __init__(self, target: str, *, mbps: float = float("inf")) -> None:
        self._target = target
        self._pace_s = 8e-6 / mbps
        self.recordings: list[Recording] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self._carriers: list[threading.Thread] = []
        self._over = False
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Wiretap:
        self._acceptor.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._shut(self._server)
        self._acceptor.join()
        for end in self._ends:
            self._shut(end)
        for thread in self._carriers:
            thread.join()
        for end in (self._server, *self._ends):
            end.close()

    def _accept(self) -> None:
        host, _, port = self._target.rpartition(":")
        with contextlib.suppress(OSError):
            while not self._over:
                near = self._server.accept()[0]
                far = socket.create_connection((host, int(port)))
                recording = Recording()
                self.recordings.append(recording)
                self._ends += [near, far]
                for source, goal, record, pace_s in (
                    (near, far, recording.sent, self._pace_s),
                    (far, near, recording.received, 0.0),
                ):
                    carrier = threading.Thread(
                        target=self._carry, args=(source, goal, record, pace_s), daemon=True
                    )
                    self._carriers.append(carrier)
                    carrier.start()

    def _carry(self, source: socket.socket, goal: socket.socket, record: bytearray, pace_s: float) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                record += chunk
                time.sleep(len(chunk) * pace_s)
                goal.sendall(chunk)
        for end in (source, goal):
            self._shut(end)

    @staticmethod
    def _shut(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _frames(stream: bytes) -> Iterator[tuple[int, int, int]]:
    """(flags, where its body starts, where it ends) of each whole frame after the greeting (ZMTP 3, RFC
    23)."""
    at = GREETING_BYTES
    while at + 2 <= len(stream):
        flags = stream[at]
        start = at + (9 if flags & _LONG else 2)
        at = start + int.from_bytes(stream[at + 1 : start], "big")
        if at > len(stream):
            return
        yield flags, start, at


def messages(stream: bytes) -> Iterator[Envelope]:
    """What an eavesdropper can decode of one direction of a connection."""
    frames: list[bytes] = []
    for flags, start, end in _frames(stream):
        if not flags & _COMMAND:
            frames.append(stream[start:end])
            if not flags & _MORE:
                with contextlib.suppress(PeerError):
                    yield decode(frames)
                frames = []


def replay(recording: Recording, address: str, patience_s: float) -> bytes:
    """Plays what was once sent to the daemon at `address` again; returns its answer, as far as it came until
    it was quiet for so long."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=patience_s) as raw:
        return play(bytes(recording.sent), raw)


def play(stream: bytes, raw: socket.socket) -> bytes:
    """Plays one direction of a recorded connection to who is at the other end of `raw`; returns the answer.

    The greeting and each command of the handshake wait for one, as they did then.
    """
    ends = [GREETING_BYTES]
    for flags, _, end in _frames(stream):
        if not flags & _COMMAND:
            break
        ends.append(end)
    answer = bytearray()
    with contextlib.suppress(OSError):
        for step, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
            raw.sendall(stream[begin:end])
            while len(answer) < GREETING_BYTES or sum(1 for _ in _frames(bytes(answer))) < step:
                if not (chunk := raw.recv(_CHUNK_BYTES)):
                    return bytes(answer)
                answer += chunk
        raw.sendall(stream[ends[-1] :])
        while chunk := raw.recv(_CHUNK_BYTES):
            answer += chunk
    return bytes(answer)
