"""A port takes so many connections and no more; those that leave make room."""

from __future__ import annotations

import socket
import time
from typing import Any

import zmq

from flowspec.runtime.doorman import Doorman
from flowspec.runtime.transport import bind_router

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


def wait_until(doorman: Doorman, is_done: Any) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < deadline_s
        doorman.socket.poll(20)
        doorman.drain()


def test_connections_above_the_limit_are_shut_down_and_others_stay() -> None:
    context: zmq.Context[Any] = zmq.Context()
    router, port = bind_router(context, "127.0.0.1", 0)
    doorman = Doorman(router, connections_max=3)
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    try:
        wait_until(doorman, lambda: sum(map(is_shut, connections)) == 2)
        staying = [each for each in connections if not is_shut(each)]
        assert len(staying) == 3
        staying[0].close()
        late: list[socket.socket] = []

        def is_in() -> bool:
            """Another one gets in once the first has left."""
            late.append(socket.create_connection(("127.0.0.1", port)))
            connections.append(late[-1])
            doorman.socket.poll(50)
            doorman.drain()
            return not is_shut(late[-1])

        wait_until(doorman, is_in)
        assert sum(not is_shut(each) for each in staying[1:]) == 2
    finally:
        for connection in connections:
            connection.close()
        router.disable_monitor()
        doorman.socket.close()
        context.destroy(linger=0)
