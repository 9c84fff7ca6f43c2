"""A port takes so many connections and no more; those that leave make room."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from flowspec.runtime.connection_limit import ConnectionChanges, ConnectionLimit, connections_most
from flowspec.runtime.security.authenticator import Authenticator
from flowspec.runtime.security.keyfiles import device_keyring, head_keyring, make_keys
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import bind_router, dial, end_context, receive

WAIT_S = 20.0


def is_shut(connection: socket.socket) -> bool:
    """Whether the other end has closed; what it sent before (ZeroMQ's greeting) is read away."""
    connection.settimeout(0.02)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_the_limit_holds_in_front_of_keys(tmp_path: Path) -> None:
    """Strangers cost a connection each before the gate is asked; whom it refuses, and who leaves, makes room
    again."""
    for folder in ("keys", "strangers"):
        make_keys(tmp_path / folder, ["head"], ["pi-1", "pi-2"], force=False)
    ours, theirs = tmp_path / "keys", tmp_path / "strangers"
    daemon = device_keyring(ours, "pi-1")
    context: zmq.Context[Any] = zmq.Context()
    gate = Authenticator(context, daemon)
    router, port = bind_router(context, "127.0.0.1", 0, daemon)
    doorman = ConnectionLimit(router, connections_max=3)
    heard: list[bytes] = []
    seen = ConnectionChanges()
    clients: zmq.Context[Any] = zmq.Context()
    raw: list[socket.socket] = []

    def turn_until(is_done: Callable[[], bool]) -> None:
        """The daemon's turns, as its poller makes them."""
        deadline_s = time.monotonic() + WAIT_S
        while not is_done():
            assert time.monotonic() < deadline_s
            doorman.socket.poll(20)
            found = doorman.drain()
            seen.surplus += found.surplus
            seen.failed += found.failed
            gate.answer()
            while (frames := receive(router)) is not None:
                heard.append(frames[-1])

    def caller(keys: Keyring, word: bytes) -> zmq.Socket[bytes]:
        made = dial(clients, f"127.0.0.1:{port}", "pi-1", keys)
        made.send(word)
        return made

    try:
        wrong = caller(replace(head_keyring(theirs), devices=daemon.devices), b"wrong key")
        turn_until(lambda: len(seen.failed) > 0)
        wrong.close(linger=0)
        head = caller(head_keyring(ours), b"head")
        turn_until(lambda: heard == [b"head"])
        assert seen.surplus == 0, "a refused key keeps no connection"
        raw += [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        turn_until(lambda: sum(map(is_shut, raw)) == 3)
        late = caller(device_keyring(ours, "pi-2"), b"listed, and late")
        turn_until(lambda: seen.surplus > 3)
        head.send(b"head again")
        turn_until(lambda: heard == [b"head", b"head again"])
        for connection in raw:
            connection.close()
        turn_until(lambda: heard[2:] == [b"listed, and late"])
        late.close(linger=0)
    finally:
        for connection in raw:
            connection.close()
        clients.destroy(linger=0)
        router.disable_monitor()
        doorman.socket.close()
        context.destroy(linger=0)


def test_connections_leave_half_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (64, 64))
    assert (connections_most(512), connections_most(8), connections_most(512, 4)) == (32, 8, 16)


@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore:Unclosed socket:ResourceWarning")
def test_a_context_ends_though_ctrl_c_came_while_a_socket_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = zmq.Socket.__init__

    def begin_and_interrupt(socket: zmq.Socket[bytes], *args: object, **more: object) -> None:
        begin(socket, *args, **more)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(zmq.Socket, "__init__", begin_and_interrupt)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def connect() -> None:
        try:
            context.socket(zmq.DEALER)
        finally:
            end_context(context)

    with pytest.raises(KeyboardInterrupt):
        connect()
