"""How long a daemon is waited for that tries its kernels first, and what is told of one that lets nobody in
or is not there."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from flowspec.core.protocol.cluster_messages import Hello, Loading, Welcome
from flowspec.core.protocol.device_messages import AskFacts, Facts
from flowspec.core.protocol.types import Message
from flowspec.errors import ClusterError
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device
from flowspec.runtime.connection_limit import ConnectionLimit
from flowspec.runtime.device import links
from flowspec.runtime.device.links import ASKED, Tell, ask
from flowspec.runtime.security.authenticator import Authenticator
from flowspec.runtime.security.keyfiles import device_keyring, head_keyring, make_keys
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.survey import refuse_silent
from flowspec.runtime.transport import Sender, bind_router, split_address
from flowspec.version import __version__
from flowspec.wire.codec import decode
from tests.daemons import DaemonProcess, daemon_process
from tests.runtime.test_doctor import FACTS

WELCOME = Welcome(name="x", version=__version__, device="cpu", pid=1, memory_bytes=1 << 30, count=3)
TRYING = [Loading(doing="trying kernels", share=share) for share in (0.0, 0.5, 0.5)]
POLL_MS = 20


@contextlib.contextmanager
def in_thread(serve: Callable[[threading.Event], None], context: zmq.Context) -> Iterator[None]:
    is_over = threading.Event()
    thread = threading.Thread(target=serve, args=[is_over])
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        context.destroy(linger=0)


@contextlib.contextmanager
def daemon(*answers: Message, forever: Sequence[Message] = ()) -> Iterator[Device]:
    """Welcomes who comes, and gives these answers to a question; then those again and again."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def serve(is_over: threading.Event) -> None:
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

    with in_thread(serve, context):
        yield Device(name="x", address=f"127.0.0.1:{port}")


def told(device: Device, tell: Tell = lambda name, doing, share: None) -> Facts | str:
    (found,) = ask([device], None, lambda _: AskFacts(dtype="bfloat16"), tell=tell)
    if found.failure is not None:
        return str(found.failure)
    assert found.facts is not None
    return found.facts


def test_a_daemon_that_tries_its_kernels_is_waited_for() -> None:
    doing: list[tuple[str, str, float]] = []
    with daemon(*TRYING, FACTS) as device:
        assert told(device, lambda *told: doing.append(told)) == FACTS
    assert doing == [
        ("x", ASKED, 0.0),
        *(("x", "trying kernels", share) for share in (0.0, 0.5, 0.5)),
        ("x", ASKED, 1.0),
    ]


def test_one_that_says_no_more_or_tries_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "TRIED_S", 0.2)
    with daemon(*TRYING) as device:
        assert str(told(device)).startswith("its daemon is there, but did not tell about the device in time")
    monkeypatch.setattr(links, "TRYING_S", 1.0)
    with daemon(forever=TRYING[:1]) as device:
        assert "its daemon is there" in str(told(device))


def test_ctrl_c_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "TRIED_S", 1e6)

    def interrupt(name: str, doing: str, share: float) -> None:
        if doing != ASKED:
            os.kill(os.getpid(), signal.SIGINT)

    with daemon(TRYING[0]) as device, pytest.raises(KeyboardInterrupt):
        told(device, interrupt)


FOREVER_S = 1e6
"""Who waits to the end is not heard of again."""


@contextlib.contextmanager
def port(keys: Keyring | None = None, connections_max: int = 99) -> Iterator[Device]:
    """A daemon's, which lets in whom it knows and has room for, and says nothing."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = None if keys is None else Authenticator(context, keys)
    router, number = bind_router(context, "127.0.0.1", 0, keys)
    limit = ConnectionLimit(router, connections_max)

    def serve(is_over: threading.Event) -> None:
        while not is_over.is_set():
            limit.socket.poll(POLL_MS)
            limit.drain()
            if gate is not None:
                gate.answer()

    with in_thread(serve, context):
        yield Device(name="pi-1", address=f"127.0.0.1:{number}")


def trouble(device: Device, keys: Keyring | None = None) -> tuple[str, str]:
    """What is wrong with one, and what to do."""
    (found,) = ask([device], keys, hello_s=FOREVER_S)
    assert found.failure is not None
    return found.failure.text, found.failure.advice


def test_wrong_keys_are_told_of_at_once(tmp_path: Path) -> None:
    for folder in ("ours", "theirs"):
        make_keys(tmp_path / folder, ["head"], ["pi-1"], force=False)
    head = head_keyring(tmp_path / "ours")
    with port(device_keyring(tmp_path / "theirs", "pi-1")) as device:
        text, advice = trouble(device, head)
        assert text == f"it has no keys, or not the one that {head.where} has for it"
        assert advice.endswith("(launch/boards start does both), or correct its address")
        stranger = replace(head, devices=device_keyring(tmp_path / "theirs", "pi-1").devices)
        assert trouble(device, stranger)[0] == "it does not know the key of head"
        with pytest.raises(ClusterError, match=r"pi-1 at .*: it has no keys, or not the one"):
            refuse_silent([device, replace(device, address="127.0.0.1:9")], head, needs_all=False)


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_daemon_without_room_is_told_from_one_with_other_keys(has_keys: bool, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["head"], ["pi-1"], force=False)
    ring, head = (
        (device_keyring(tmp_path / "keys", "pi-1"), head_keyring(tmp_path / "keys"))
        if has_keys
        else (None, None)
    )
    with port(ring, connections_max=1) as device, dialled(device):
        text, advice = trouble(device, head)
        assert text.startswith("it hangs up on whoever calls: it has no room for another connection")
        assert advice.count(", or ") == 2, "any of these helps"


@contextlib.contextmanager
def dialled(device: Device) -> Iterator[None]:
    """A connection to it over which nothing is said, and which it has seen."""
    host, number = split_address(device.address)
    with socket.create_connection((host, number)) as connection:
        assert connection.recv(1), "ZeroMQ's greeting"
        yield


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for as a slow board would have to be."""
    monkeypatch.setattr(links, "REFUSED_S", 0.2)
    monkeypatch.setattr(timeouts, "ABSENT_S", 0.6)


@pytest.fixture(scope="module")
def real() -> Iterator[DaemonProcess]:
    with daemon_process("there", "--threads=1") as found:
        yield found


@pytest.fixture
def there(real: DaemonProcess) -> Device:
    return Device(name="there", address=real.address)


def silent() -> Device:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Device(name="gone", address=f"127.0.0.1:{server.getsockname()[1]}")


def test_a_machine_that_refuses_is_not_waited_for_longer() -> None:
    one, other = silent(), replace(silent(), name="too")
    (found,) = ask([one], None)
    assert found.failure is not None
    port = one.address.rpartition(":")[2]
    start = f"start its daemon, with your other flags: flowspec daemon --host 127.0.0.1 --port {port}"
    assert (found.failure.check, found.failure.advice) == ("reachable", start)
    assert "nothing listens" in found.failure.text
    both = ask([one, other], None)
    advice = [each.failure.advice for each in both if each.failure is not None]
    assert advice[0] == f"{start} --name gone --threads 1", "they share a machine's cores"
    assert advice[1].endswith(" --name too --threads 1")


def test_one_that_answers_is_enough_unless_all_are_needed(there: Device) -> None:
    refuse_silent([silent(), there], None, needs_all=False)
    refuse_silent([there], None, needs_all=True)
    with pytest.raises(ClusterError, match=r"gone at .* --name gone --threads 1"):
        refuse_silent([silent(), there], None, needs_all=True)
    with pytest.raises(ClusterError, match=r"gone at 127\.0\.0\.1:\d+: .*start its daemon"):
        refuse_silent([silent()], None, needs_all=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = Device(name="other", address=f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ClusterError, match="did not answer as a FlowSpec daemon"):
            refuse_silent([other], None, needs_all=False)


def test_a_daemon_that_is_looked_at_has_nothing_to_complain_of(real: DaemonProcess, there: Device) -> None:
    before = len(real.lines)
    refuse_silent([there], None, needs_all=True)
    time.sleep(1.0)  # what it complains of it says within half a second
    assert real.lines[before:] == []
