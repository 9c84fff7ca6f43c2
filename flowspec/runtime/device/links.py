"""Asks daemons what they are, over connections of no head and no cluster, and measures how far away they are.

Hello is answered with Welcome at once, which is a round trip through the daemon's loop. To measure the rate a
segment with a payload follows, which a daemon drops that this connection does not hold, and then a second
Hello, which it refuses: connections keep their order, so the refusal proves that all of the payload has come.
Whoever uses the daemon meanwhile loses nothing but the time of the bytes.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import shlex
import socket as sockets
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from msgspec import structs

from flowspec.core.protocol.cluster_messages import Error, Hello, Loading, Welcome
from flowspec.core.protocol.device_messages import AskFacts, Facts, Interface, LinkFacts
from flowspec.core.protocol.messages import Commit, Segment, SegmentPart
from flowspec.core.protocol.types import Message
from flowspec.errors import ClusterError, FlowSpecError, InputError, PeerError
from flowspec.folders import keys_folder
from flowspec.runtime import timeouts
from flowspec.runtime.addresses import ADDRESSES
from flowspec.runtime.cluster import Device
from flowspec.runtime.device.board import interface_of
from flowspec.runtime.monitor import Monitor
from flowspec.runtime.security.keyfiles import SUFFIX
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Receiver, Sender, dial, end_context, split_address
from flowspec.version import __version__
from flowspec.wire.codec import Tensor, decode

HERE = "this machine"
NAME = "a head or device without keys"
ASK, MEASURE = "head-control", "measure"
"""The roles (`Hello.role`) of connections that ask for facts and of those that measure a link."""
ASKED = "telling what it can do"
"""What a device does that is asked."""
REFUSED_S = 2.0
"""How long it is dialled where the machine refuses all connections: a daemon may be starting again."""
REFUSAL_S = 0.25
"""How long a machine may then take to refuse one more."""
FACTS_S, TRIED_S = 30.0, 120.0
"""How long it may take to tell its facts, and what it may have to try first: how fast it is or a link, which
kernels are right. The first time, it may have to import transformers, or torch for a GPU, on a small board
from an SD card. ..."""
TRYING_S = 900.0
"""... Where it tells how far it has come, it may take so long as a whole."""
ASKED_AT_ONCE = 128
ANSWER_SHARE = 0.9
"""Of the time that there is; in the rest it is found out why there is no answer."""
LOOK_EVERY_S = 0.25
"""How often those that wait for an answer look whether who asks has given up."""
REACHABLE = "reachable"
"""The `check` that a device fails which cannot be had now, and may be later."""


class Failure(ClusterError):
    """Why a device told nothing: `check` is `reachable`, `keys` or `version`."""

    def __init__(self, check: str, text: str, advice: str) -> None:
        super().__init__(f"{text}; {advice}")
        self.check, self.text, self.advice = check, text, advice


@dataclass(slots=True, kw_only=True)
class DeviceReport:
    """A device and what was found out about it; without `facts` that were asked for there is a `failure`.

    `own` is the interface of this machine on the way there. The clock's offset is positive where its clock is
    ahead; it is known to within half a round trip, `trip_s`. `from_head` and `onward` are its links: from
    here, and to the next device.
    """

    device: Device
    welcome: Welcome | None = None
    facts: Facts | None = None
    failure: Failure | None = None
    own: Interface | None = None
    trip_s: float = 0.0
    clock_offset_s: float = 0.0
    from_head: LinkFacts | None = None
    onward: LinkFacts | None = None

    @property
    def machine(self) -> str:
        return machine_of(self.device.address)


class LinkEffort(NamedTuple):
    """Latency is the median of `looks`; then payloads of `sizes` bytes are sent until one takes long enough,
    `transfer_s` each at most."""

    sizes: tuple[int, ...]
    long_enough_s: float
    looks: int
    transfer_s: float


BRIEF = LinkEffort((1 << 18, 1 << 20, 1 << 22, 1 << 24), long_enough_s=0.1, looks=9, transfer_s=60.0)
"""To see what is wrong with a link: a second at most, but for links slower than 2 Mbit/s."""
GLANCE = LinkEffort((1 << 16, 1 << 19, 1 << 21), long_enough_s=0.02, looks=3, transfer_s=3.0)
"""To plan by: a gigabit link takes 30 ms, one of 10 Mbit/s 60 ms."""
Question = Callable[[Device], AskFacts]
"""What a device is asked."""
Tell = Callable[[str, str, float], None]
"""Called with a device's name, what it does before it answers, and a share of that from 0 to 1."""


def ask(
    devices: Sequence[Device],
    keys: Keyring | None,
    question: Question | None = None,
    *,
    hello_s: float = timeouts.CONNECT_S,
    within_s: float = math.inf,
    tell: Tell = lambda device, doing, share: None,
) -> list[DeviceReport]:
    """Asks devices at the same time, each of which may take `hello_s` to say Welcome, and all of them
    `within_s`; without a question no more is waited for. Several threads `tell`."""
    within_s /= max(1, math.ceil(len(devices) / ASKED_AT_ONCE))
    hosts = Counter(split_address(device.address)[0] for device in devices)
    is_over = threading.Event()

    def ask_one(device: Device) -> DeviceReport:
        report, host = DeviceReport(device=device), split_address(device.address)[0]
        try:
            address = ADDRESSES.wait_for(host)
            report.own = interface_of(own_address(address))
            with Talk(context, device, keys, ASK, hello_s, within_s, hosts[host] == 1, is_over) as talk:
                report.welcome, round_trip_s = talk.greet()
                report.trip_s = round_trip_s / 2
                if question is not None:
                    report.facts = talk.facts(structs.replace(question(device), address=address), tell)
                    report.clock_offset_s = report.facts.clock_s + report.trip_s - time.time()
        except Failure as failure:
            report.failure = failure.with_traceback(None)
        except FlowSpecError as error:  # a device without a key here, a host whose name is not found
            text, _, advice = str(error).partition("; ")
            report.failure = Failure(REACHABLE, text, advice or "correct its address in the cluster file")
        tell(device.name, ASKED, 1.0)
        return report

    for device in devices:
        tell(device.name, ASKED, 0.0)
    with _connections() as context, ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        run = (
            map if len(devices) == 1 else threads.map
        )  # a thread of the pool would hold up the end of a process
        try:
            return list(run(ask_one, devices))
        finally:
            is_over.set()  # Ctrl-C: some may wait for minutes


def measure_link(device: Device, keys: Keyring | None, effort: LinkEffort = BRIEF) -> LinkFacts:
    """The link from here to a daemon: half a round trip, and the rate of a payload, or what keeps it from
    being measured."""

    def look(size: int) -> float:
        with Talk(context, device, keys, MEASURE) as talk:
            _, trip_s = talk.greet()
            return talk.transfer(size, effort.transfer_s) if size else trip_s

    try:
        with _connections() as context:
            round_trip_s = statistics.median(look(0) for _ in range(effort.looks))
            for size in effort.sizes:
                if (spent_s := look(size) - round_trip_s) > effort.long_enough_s:
                    break
    except FlowSpecError as error:
        said = "".join(letter if letter.isprintable() else " " for letter in str(error))
        return LinkFacts(problem=said[:1000])
    return LinkFacts(latency_s=round_trip_s / 2, bandwidth_mbps=8e-6 * size / max(1e-6, spent_s))


def measure_onward(
    pairs: Sequence[tuple[Device, Device]], keys: Keyring | None, *, is_brief: bool = False
) -> list[LinkFacts]:
    """The links of pairs of devices, each measured by its first, at the same time."""
    following = {one.name: other for one, other in pairs}

    def question(device: Device) -> AskFacts:
        other = following[device.name]
        return AskFacts(next_hop=other.address, next_name=other.name, is_brief=is_brief)

    return [
        (each.facts and each.facts.link) or LinkFacts(problem=str(each.failure))
        for each in ask([one for one, _ in pairs], keys, question)
    ]


@contextlib.contextmanager
def _connections() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    context.setsockopt(zmq.IMMEDIATE, 1)  # of its sockets: nothing can be sent before the connection stands
    try:
        yield context
    finally:
        end_context(context)


class Talk:
    """One connection to a daemon, which may take `hello_s` to say Welcome and `within_s` for all; raises
    `Failure` when it does not play its part. It may be the only one of its machine (`is_alone`); `is_over` is
    set where who asks has given up."""

    def __init__(
        self,
        context: zmq.Context[Any],
        device: Device,
        keys: Keyring | None,
        role: str,
        hello_s: float = timeouts.CONNECT_S,
        within_s: float = math.inf,
        is_alone: bool = True,
        is_over: threading.Event | None = None,
    ) -> None:
        self._device, self._keys = device, keys
        self._is_alone, self._is_over = is_alone, is_over or threading.Event()
        self._hello_s, self._end_s = hello_s, time.monotonic() + within_s
        self._hello = Hello(name=NAME if keys is None else keys.name, version=__version__, role=role)
        self._socket = dial(context, device.address, device.name, keys)
        self._monitor = Monitor(self._socket)
        self._link = Sender(self._socket, incarnation=secrets.randbits(48), sender=self._hello.name)
        self._receiver = Receiver(self._link.incarnation)
        self._is_welcome = False

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *error: object) -> None:
        self._monitor.close()
        self._socket.close(linger=0)

    def greet(self) -> tuple[Welcome, float]:
        """The daemon's Welcome, and the seconds of the round trip once the connection stands."""
        brief_s = self._within(min(REFUSED_S, self._hello_s))
        if not self._monitor.await_ready(brief_s, zmq.POLLOUT):
            is_refused = isinstance(_dial_plainly(self._device, REFUSAL_S), ConnectionRefusedError)
            if self._monitor.refusal is None and is_refused:
                raise self._nothing_listens()
            self._wait(self._hello_s - brief_s, zmq.POLLOUT)
        started_s = time.perf_counter()
        self._link.send(self._hello)
        answer = self._answer(self._hello_s)
        if not isinstance(answer, Welcome):
            raise _wrong(answer)
        self._link.count_from(answer.count)
        self._is_welcome = True
        return answer, time.perf_counter() - started_s

    def facts(self, question: AskFacts, tell: Tell) -> Facts:
        self._link.send(question)
        limit_s = TRIED_S if question.speed or question.dtype or question.next_hop else FACTS_S
        self._end_s = min(self._end_s, time.monotonic() + TRYING_S)
        while isinstance(answer := self._answer(limit_s), Loading):
            tell(self._device.name, answer.doing, answer.share)
        if isinstance(answer, Facts):
            return answer
        if isinstance(answer, Error) and answer.retry_after_s > 0:
            raise Failure(REACHABLE, answer.text, "run the doctor again")
        raise _wrong(answer)

    def transfer(self, size: int, limit_s: float) -> float:
        """Seconds until so many bytes have come and the refusal of what follows them is back."""
        part = SegmentPart(
            commit=Commit(request=0, epoch=0, base=1, path=()),
            opening=None,
            ids=(0,),
            parents=(-1,),
            tokens=(0,),
            positions=(0,),
            committed=(False,),
        )
        payload = Tensor(rows=1, width=size // 4, dtype="float32", data=bytes(size))
        started_s = time.perf_counter()
        self._link.send(Segment(segment=0, parts=(part,)), payload)
        self._link.send(self._hello)
        answer = self._answer(limit_s)
        if not isinstance(answer, Error) or "Hello" not in answer.text:
            raise _wrong(answer)
        return time.perf_counter() - started_s

    def _answer(self, limit_s: float) -> Message:
        self._wait(limit_s, zmq.POLLIN)
        try:
            envelope = decode(self._socket.recv_multipart())
            self._receiver.check(envelope)
            return envelope.message
        except PeerError as error:
            raise _wrong(error) from None

    def _wait(self, limit_s: float, events: int) -> None:
        limit_s = self._within(limit_s)
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0 and not self._is_over.is_set():
            if self._monitor.await_ready(min(LOOK_EVERY_S, left_s), events):
                return
            if self._monitor.is_refused:
                break
        raise self._why_silent()

    def _within(self, limit_s: float) -> float:
        return max(0.0, min(limit_s, ANSWER_SHARE * (self._end_s - time.monotonic())))

    def _why_silent(self) -> Failure:
        """A connection of our own tells a stopped daemon from a device that is off and from a program that is
        not ours, and, as ZeroMQ does not, a handshake that was cut off from one with the wrong keys."""
        address, refusal = self._device.address, self._monitor.refusal
        if refusal is None and self._is_welcome:
            text = "its daemon is there, but did not tell about the device in time"
            advice = "a machine that is busy needs longer; if that does not help, look at its log"
            return Failure(REACHABLE, text, f"ask again: {advice}")
        limit_s = max(0.05, self._within(timeouts.WHY_S))
        error = _dial_plainly(self._device, limit_s, reads=refusal is not None)
        if refusal is not None and (refusal.is_final or isinstance(error, TimeoutError)):
            text, _, advice = refusal.told(self._keys).partition(": ")
            return Failure("keys", text, advice)
        if refusal is not None:
            why = "it has no room for another connection, as its log tells, or it is no FlowSpec daemon"
            advice = "end what holds so many connections to it, or start it again, or correct the port"
            return Failure(REACHABLE, f"it hangs up on whoever calls: {why}", advice)
        if isinstance(error, ConnectionRefusedError):
            return self._nothing_listens()
        if error is None:
            silent = f"takes connections, but did not answer as a FlowSpec daemon within {self._hello_s:g} s"
            advice = "look at its log; start its daemon again, or correct the port"
            return Failure(REACHABLE, f"something at {address} {silent}", advice)
        why, advice = (
            error.strerror or str(error),
            "is it on and in this network? check its address and its firewall",
        )
        if isinstance(error, TimeoutError):  # as of a daemon that cannot take those that wait already
            why, advice = "no answer", f"{advice}; or it has too many connections: look at its log"
        return Failure(REACHABLE, f"cannot reach {address} ({why})", advice)

    def _nothing_listens(self) -> Failure:
        """With the flags that its daemon needs whose keys lie elsewhere on this machine than where it looks
        for them, or that is not the only one of its machine."""
        name, (host, port) = self._device.name, split_address(self._device.address)
        usual, file, flags = keys_folder(), f"{name}{SUFFIX}", ""
        folder = usual if self._keys is None else Path(self._keys.where).absolute().parent
        if (
            machine_of(self._device.address) == HERE
            and (folder / file).is_file()
            and not (usual / file).is_file()
        ):
            flags = f" --keys {shlex.quote(str(folder))}"
        flags += f" --name {shlex.quote(name)}" if flags or not self._is_alone else ""
        flags += "" if self._is_alone else " --threads 1"
        text = f"the machine is there, but nothing listens at {self._device.address}"
        start = f"flowspec daemon --host {host} --port {port}{flags}"
        return Failure(REACHABLE, text, f"start its daemon, with your other flags: {start}")


def is_here(address: str) -> bool:
    """Whether an IP address is one of this machine's own."""
    return address.startswith("127.") or interface_of(address) is not None


def machine_of(address: str) -> str:
    """Where a device is: its host's IP address, or else its name; `HERE` for any of this machine."""
    host = split_address(address)[0]
    with contextlib.suppress(InputError):
        host = ADDRESSES.wait_for(host)
    return HERE if is_here(host) else host


def own_address(towards: str) -> str:
    """This machine's address on the way to an IP address; empty when there is no way. Sends nothing."""
    family = sockets.AF_INET6 if ":" in towards else sockets.AF_INET
    with sockets.socket(family, sockets.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])
    return ""


def _dial_plainly(device: Device, limit_s: float, *, reads: bool = False) -> OSError | None:
    """What becomes of a connection without ZeroMQ: None if it stands. One that `reads` looks whether it is
    closed while nothing is said, too, and runs out of time if it is not."""
    host, port = split_address(device.address)
    end_s = time.monotonic() + limit_s
    try:
        with sockets.create_connection((ADDRESSES.wait_for(host), port), timeout=limit_s) as connection:
            while reads:
                connection.settimeout(max(1e-3, end_s - time.monotonic()))
                if not connection.recv(64):  # but for ZeroMQ's greeting, which may come before the end
                    return ConnectionResetError()
    except OSError as error:
        return error
    return None


def _wrong(answer: Message | PeerError) -> Failure:
    text = answer.text if isinstance(answer, Error) else f"it answered with a {type(answer).__name__}"
    text = str(answer) if isinstance(answer, PeerError) else text
    advice = "install the same version on all devices (launch/boards install) and start its daemon again"
    return Failure("version", f"its FlowSpec is not this one ({__version__}): {text}", advice)
