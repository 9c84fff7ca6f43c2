"""Asks every daemon of a cluster for its facts and measures its links, as far as each of them answers.

Devices are asked at the same time; links are measured one after another, so that they do not share a wire.
Nothing is judged here.
"""

from __future__ import annotations

import math
import secrets
import shlex
import socket as sockets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from msgspec import structs

from flowspec.core.protocol.cluster_messages import Error, Hello, Loading, Welcome
from flowspec.core.protocol.device_messages import AskFacts, Facts, Interface, LinkFacts
from flowspec.core.protocol.types import Message
from flowspec.errors import FlowSpecError, PeerError
from flowspec.folders import keys_folder
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device
from flowspec.runtime.health.gather import link_facts
from flowspec.runtime.health.interfaces import interface_of, own_address, resolve
from flowspec.runtime.monitor import Monitor
from flowspec.runtime.pipeline_connections import Progress, told_of
from flowspec.runtime.security.keyfiles import SUFFIX
from flowspec.runtime.security.keyring import Keyring, UnlistedError
from flowspec.runtime.transport import Receiver, Sender, dial, end_context, split_address
from flowspec.version import __version__
from flowspec.wire.codec import decode

NAME = "flowspec doctor"
_START = "start its daemon, with your other flags: flowspec daemon"
HELLO_S = timeouts.CONNECT_S
"""How long a daemon may take to say Welcome; a head has as much patience."""
REFUSED_S = 2.0
"""How long it is dialled where the machine refuses all connections: a daemon may be starting again."""
REFUSAL_S = 0.25
"""How long a machine may then take to refuse one more."""
HANGS_UP_S = 1.0
"""How soon a daemon hangs up that has no room for a connection; any other waits for what is said to it."""
FACTS_S, TRIED_S = 30.0, 120.0
"""How long it may take to tell its facts, and what it may have to try first: how fast it is, which kernels
are right. The first time, it may have to import transformers, or torch for a GPU, on a small board from an SD
card. ..."""
TRYING_S = 900.0
"""... Where it tells how far it has come, it may take so long as a whole."""
LINK_S = 75.0
"""How long to measure a link to the next device; longer than its time-outs."""
ASKED_AT_ONCE = 16
ANSWER_SHARE = 0.9
HURRIED_AT_ONCE = 128
"""Where there is a time for all of them: those that do not answer then keep few others waiting."""

REACHABLE = "reachable"
"""The `check` that a device fails which cannot be had now, and may be later."""
LOOK_EVERY_S = 0.25
"""How often those that wait for an answer look whether who asks has given up."""

Step = Callable[[str], None]
FACTS_ALONE = AskFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamineTimeouts:
    """How long a daemon may take to say Welcome, and how long finding out why it did not; how many are asked
    at once."""

    hello_s: float = HELLO_S
    why_s: float = HELLO_S
    at_once: int = ASKED_AT_ONCE


EXAMINE_TIMEOUTS = ExamineTimeouts()


class Failure(NamedTuple):
    """Why a device told nothing: `check` is `reachable`, `keys` or `version`."""

    check: str
    text: str
    advice: str


@dataclass(slots=True, kw_only=True)
class Examined:
    """A device of the cluster and what was found; without `facts` there is a `failure`.

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


class _ExamineError(FlowSpecError):
    def __init__(self, check: str, text: str, advice: str) -> None:
        super().__init__(text)
        self.failure = Failure(check, text, advice)


def explain(found: Examined) -> str:
    """Why a device told nothing, in one line with what to do; for devices with a `failure`."""
    assert found.failure is not None
    return (
        f"device {found.device.name} at {found.device.address}: {found.failure.text}; {found.failure.advice}"
    )


def examine(
    devices: Sequence[Device],
    question: AskFacts,
    *,
    step: Step = lambda done: None,
    tell: Progress = lambda text, share: None,
    keys: Keyring | None = None,
) -> list[Examined]:
    """Everything that can be found out about these devices, in their order; a device that does not answer has
    a `failure`. `step` is called for each device, its link from here, and its link to the next one; `tell` by
    several threads, with what keeps a device from answering."""
    found = ask_all(devices, question, step=step, tell=tell, keys=keys)
    context: zmq.Context[Any] = zmq.Context()
    try:
        for each, following in zip(found, [*found[1:], None], strict=True):
            if each.facts is not None:
                each.from_head = link_facts(each.device, keys)
            step(f"link to {each.device.name}")
            if following is None:
                break
            if each.facts is not None and following.facts is not None:
                each.onward = onward(context, each.device, following.device, keys)
            step(f"link from {each.device.name} to {following.device.name}")
    finally:
        end_context(context)
    return found


def ask_all(
    devices: Sequence[Device],
    question: AskFacts = FACTS_ALONE,
    *,
    speed: Collection[str] = (),
    step: Step = lambda done: None,
    tell: Progress = lambda text, share: None,
    keys: Keyring | None = None,
    within_s: float = math.inf,
    examine_timeouts: ExamineTimeouts = EXAMINE_TIMEOUTS,
    cluster: Sequence[Device] = (),
) -> list[Examined]:
    """The answers of all devices to a question, links left out; those named in `speed` are asked how fast
    they are, too. `cluster`: all its devices, where `devices` are only some of them.

    All together take `within_s` at most, of which each has an equal share. `examine_timeouts` is for each.
    """
    context: zmq.Context[Any] = zmq.Context()
    at_once = examine_timeouts.at_once if within_s == math.inf else HURRIED_AT_ONCE
    share_s = within_s / max(1, math.ceil(len(devices) / at_once))
    machines = Counter(split_address(device.address)[0] for device in cluster or devices)
    is_over = threading.Event()

    def ask(device: Device) -> Examined:
        found, deadline_s = Examined(device=device), time.monotonic() + share_s
        host = split_address(device.address)[0]
        try:
            address = resolve(host)
            own = own_address(address)
            found.own = interface_of(own) if own else None
            asked = structs.replace(question, address=address, speed=device.name in speed)
            limit_s = TRIED_S if asked.speed or asked.dtype else FACTS_S
            with _Talk(context, device, keys, deadline_s, examine_timeouts, is_over) as talk:
                started_s = time.perf_counter()
                found.welcome = talk.hello()
                found.trip_s = (time.perf_counter() - started_s) / 2
                found.facts = talk.facts(asked, limit_s, tell)
                found.clock_offset_s = found.facts.clock_s + found.trip_s - time.time()
        except FlowSpecError as error:
            found.failure = _to_start(_failure(error), device, keys, is_alone=machines[host] == 1)
        step(device.name)
        return found

    try:
        with ThreadPoolExecutor(at_once) as threads:
            try:
                return list(threads.map(ask, devices))
            finally:
                is_over.set()  # Ctrl-C: some may wait for minutes
    finally:
        end_context(context)


def greet(
    context: zmq.Context[Any], device: Device, keys: Keyring | None, limit_s: float = HELLO_S
) -> Welcome | Failure:
    """What a device says to Hello, or why it does not answer in time, or refuses it; what else may be wrong
    with it is found when it is asked more."""
    brief = ExamineTimeouts(hello_s=limit_s, why_s=0.0)
    try:
        with _Talk(context, device, keys, examine_timeouts=brief) as talk:
            return talk.hello()
    except FlowSpecError as error:
        return _failure(error)


def onward(
    context: zmq.Context[Any],
    device: Device,
    following: Device,
    keys: Keyring | None,
    *,
    is_brief: bool = False,
) -> LinkFacts:
    """The link between two devices, as the first of them measures it."""
    try:
        with _Talk(context, device, keys) as talk:
            talk.hello()
            question = AskFacts(next_hop=following.address, next_name=following.name, is_brief=is_brief)
            return talk.facts(question, LINK_S).link or LinkFacts(problem="it was not measured")
    except _ExamineError as error:
        return LinkFacts(problem=error.failure.text)


class _Talk:
    """One connection to a daemon, of no head and no cluster; raises `_ExamineError` when the daemon does not
    play its part."""

    def __init__(
        self,
        context: zmq.Context[Any],
        device: Device,
        keys: Keyring | None,
        deadline_s: float = math.inf,
        examine_timeouts: ExamineTimeouts = EXAMINE_TIMEOUTS,
        is_over: threading.Event | None = None,
    ) -> None:
        """`is_over` is set where who asks has given up."""
        self._device = device
        self._is_over = is_over or threading.Event()
        self._timeouts = examine_timeouts
        self._deadline_s = deadline_s
        self._keys = keys
        self._name = NAME if keys is None else keys.name
        self._socket = dial(context, device.address, device.name, keys)
        self._monitor = Monitor(self._socket)
        self._link = Sender(self._socket, incarnation=secrets.randbits(48), sender=self._name)
        self._receiver = Receiver(self._link.incarnation)
        self._is_there = False

    def __enter__(self) -> _Talk:
        return self

    def __exit__(self, *error: object) -> None:
        self._monitor.close()
        self._socket.close(linger=0)

    def hello(self) -> Welcome:
        self._link.send(Hello(name=self._name, version=__version__, role="head-control"))
        patience_s = self._within(min(REFUSED_S, self._timeouts.hello_s))
        is_waited_for = self._timeouts.hello_s > REFUSED_S and not self._monitor.await_ready(patience_s)
        if is_waited_for and self._monitor.refusal is None and _is_refused(self._device):
            raise _nothing_listens(self._device)
        answer = self._answer(self._timeouts.hello_s)
        if not isinstance(answer, Welcome):
            raise _wrong(answer)
        self._link.count_from(answer.count)
        self._is_there = True
        return answer

    def facts(self, question: AskFacts, limit_s: float, tell: Progress = lambda text, share: None) -> Facts:
        self._link.send(question)
        self._deadline_s = min(self._deadline_s, time.monotonic() + TRYING_S)
        while isinstance(answer := self._answer(limit_s), Loading):
            tell(told_of(self._device.name, answer.doing), answer.share)
        if isinstance(answer, Facts):
            return answer
        if isinstance(answer, Error) and answer.retry_after_s > 0:
            raise _ExamineError(REACHABLE, answer.text, "run the doctor again")
        raise _wrong(answer)

    def _answer(self, limit_s: float) -> Message:
        limit_s = self._within(limit_s)
        if not self._speaks(limit_s):
            raise self._why_silent(limit_s)
        try:
            envelope = decode(self._socket.recv_multipart())
            self._receiver.check(envelope)
            return envelope.message
        except PeerError as error:
            raise _other_version(str(error)) from None

    def _speaks(self, limit_s: float) -> bool:
        """Waits for a word of the daemon's; False when the time is up, or it is refused."""
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0 and not self._is_over.is_set():
            if self._monitor.await_ready(min(LOOK_EVERY_S, left_s)):
                return True
            if self._monitor.is_refused:
                break
        return False

    def _why_silent(self, limit_s: float) -> _ExamineError:
        if (refusal := self._monitor.refusal) is not None:
            if not refusal.is_final and _hangs_up(self._device, self._within(HANGS_UP_S)):
                why = "it has no room for another connection, as its log tells, or it is no FlowSpec daemon"
                advice = "end what holds so many connections to it, or start it again, or correct the port"
                return _ExamineError(REACHABLE, f"it hangs up on whoever calls: {why}", advice)
            text, _, advice = refusal.told(self._keys).partition(": ")
            return _ExamineError("keys", text, advice)
        if self._is_there:
            text = "its daemon is there, but did not tell about the device in time"
            advice = "a machine that is busy needs longer; if that does not help, look at its log"
            return _ExamineError(REACHABLE, text, f"ask again: {advice}")
        return _why_not_there(self._device, limit_s, self._within(self._timeouts.why_s))

    def _within(self, limit_s: float) -> float:
        """As much of it as there is left; a little stays, to find out why there is no answer."""
        return max(0.0, min(limit_s, ANSWER_SHARE * (self._deadline_s - time.monotonic())))


def _to_start(failure: Failure, device: Device, keys: Keyring | None, *, is_alone: bool) -> Failure:
    """With the flags that its daemon needs whose keys lie elsewhere on this machine than where it looks for
    them, or that is not the only one of its machine."""
    if not failure.advice.startswith(_START):
        return failure
    folder = _keys_elsewhere(device, keys)
    flags = f" --keys {shlex.quote(str(folder))}" if folder else ""
    flags += f" --name {shlex.quote(device.name)}" if folder or not is_alone else ""
    return failure._replace(advice=f"{failure.advice}{flags}{'' if is_alone else ' --threads 1'}")


def _keys_elsewhere(device: Device, keys: Keyring | None) -> Path | None:
    """Where the keys of a device of this machine lie, if it would not find them by itself."""
    if keys is None:
        return None
    address, name = resolve(split_address(device.address)[0]), f"{device.name}{SUFFIX}"
    folder = Path(keys.where).absolute().parent
    is_here = own_address(address) == address
    return folder if is_here and (folder / name).is_file() and not (keys_folder() / name).is_file() else None


def _failure(error: FlowSpecError) -> Failure:
    """Of a talk, or of a device without a key here, or of a host whose name is not found."""
    if isinstance(error, _ExamineError):
        return error.failure
    text, _, advice = str(error).partition("; ") if isinstance(error, UnlistedError) else (str(error), "", "")
    return Failure(REACHABLE, text, advice or "correct its address in the cluster file")


def _wrong(answer: Message) -> _ExamineError:
    return _other_version(
        answer.text if isinstance(answer, Error) else f"it answered with a {type(answer).__name__}"
    )


def _other_version(text: str) -> _ExamineError:
    advice = "install the same version on all devices (launch/boards install) and start its daemon again"
    return _ExamineError("version", f"its FlowSpec is not this one ({__version__}): {text}", advice)


def _is_refused(device: Device) -> bool:
    """Whether a machine says at once that nothing listens there."""
    host, port = split_address(device.address)
    try:
        sockets.create_connection((resolve(host), port), timeout=REFUSAL_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _hangs_up(device: Device, limit_s: float) -> bool:
    """Whether a connection over which nothing is said is closed at once. ZeroMQ tells a handshake that was
    cut off from one with the wrong keys to nobody."""
    host, port = split_address(device.address)
    end_s = time.monotonic() + limit_s
    try:
        with sockets.create_connection((resolve(host), port), timeout=limit_s) as connection:
            while (left_s := end_s - time.monotonic()) > 0:
                connection.settimeout(left_s)
                if not connection.recv(64):  # but for ZeroMQ's greeting, which may come before the end
                    return True
    except OSError as error:
        return not isinstance(error, TimeoutError)
    return False


def _nothing_listens(device: Device) -> _ExamineError:
    host, port = split_address(device.address)
    text = f"the machine is there, but nothing listens at {device.address}"
    return _ExamineError(REACHABLE, text, f"{_START} --host {host} --port {port}")


def _why_not_there(device: Device, limit_s: float, left_s: float) -> _ExamineError:
    """A connection of our own tells a stopped daemon from a device that is off, and from a program that is
    not ours.

    Where no time is left for it, that is all there is to tell.
    """
    host, port = split_address(device.address)
    if left_s <= 0:
        text = f"{device.address} did not answer within {limit_s:.2g} s"
        return _ExamineError(REACHABLE, text, "give it more time, or look whether it is on")
    try:
        sockets.create_connection((resolve(host), port), timeout=left_s).close()
    except ConnectionRefusedError:
        return _nothing_listens(device)
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        advice = "is it on and in this network? check its address and its firewall"
        if isinstance(error, TimeoutError):  # as of a daemon that cannot take those that wait already
            advice += "; or it has too many connections: look at its log"
        return _ExamineError(REACHABLE, f"cannot reach {device.address} ({why})", advice)
    silent = f"takes connections, but did not answer as a FlowSpec daemon within {limit_s:g} s"
    advice = "look at its log; start its daemon again, or correct the port"
    return _ExamineError(REACHABLE, f"something at {device.address} {silent}", advice)
