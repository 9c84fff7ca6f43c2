"""How long a daemon is waited for that tries its kernels first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence

import pytest
import zmq

from flowspec.core.protocol.cluster_messages import Hello, Loading, Welcome
from flowspec.core.protocol.facts import AskFacts, Facts
from flowspec.core.protocol.messages import Message
from flowspec.runtime.cluster import Device
from flowspec.runtime.health import examine
from flowspec.runtime.pipeline_connections import Progress
from flowspec.runtime.transport import Sender
from flowspec.version import __version__
from flowspec.wire.codec import decode
from tests.runtime.health.test_diagnose import FACTS

WELCOME = Welcome(name="x", version=__version__, device="cpu", pid=1, memory_bytes=1 << 30, count=3)
TRYING = [Loading(doing="trying kernels", share=share) for share in (0.0, 0.5, 0.5)]
POLL_MS = 20


@contextlib.contextmanager
def daemon(*answers: Message, forever: Sequence[Message] = ()) -> Iterator[Device]:
    """Welcomes who comes, and gives these answers to a question; then those again and again."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    is_over = threading.Event()

    def serve() -> None:
        links: dict[bytes, Sender] = {}
        asked: list[Sender] = []
        while not is_over.is_set():
            if router.poll(POLL_MS):
                identity, *frames = router.recv_multipart()
                envelope = decode(frames)
                sender = Sender(router, incarnation=envelope.incarnation, sender="x", identity=identity)
                link = links.setdefault(identity, sender)
                message = envelope.message
                if isinstance(message, Hello):
                    link.send(WELCOME)
                if isinstance(message, AskFacts):
                    asked.append(link)
                    for answer in answers:
                        link.send(answer)
            for link in asked:
                for answer in forever:
                    link.send(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Device(name="x", address=f"127.0.0.1:{port}")
    finally:
        is_over.set()
        thread.join()
        context.destroy(linger=0)


def told(device: Device, tell: Progress = lambda text, share: None) -> Facts | str:
    (found,) = examine.ask_all([device], dtype="bfloat16", tell=tell)
    if found.failure is not None:
        return f"{found.failure.text}; {found.failure.advice}"
    assert found.facts is not None
    return found.facts


def test_a_daemon_that_tries_its_kernels_is_waited_for() -> None:
    doing: list[tuple[str, float]] = []
    with daemon(*TRYING, FACTS) as device:
        assert told(device, lambda text, share: doing.append((text, share))) == FACTS
    assert doing == [("x: trying kernels, once", share) for share in (0.0, 0.5, 0.5)]


def test_one_that_says_no_more_is_there_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "TRIED_S", 0.2)
    with daemon(*TRYING) as device:
        assert told(device) == (
            "its daemon is there, but did not tell about the device in time; ask again: a machine that is "
            "busy needs longer; if that does not help, look at its log"
        )


def test_one_that_tries_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "TRYING_S", 1.0)
    with daemon(forever=TRYING[:1]) as device:
        assert "its daemon is there" in str(told(device))


def test_ctrl_c_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "TRIED_S", 1e6)
    with daemon(TRYING[0]) as device, pytest.raises(KeyboardInterrupt):
        told(device, lambda text, share: os.kill(os.getpid(), signal.SIGINT))
