"""The head's thread that serves weights: dials the daemons that asked for them, and answers their questions
from the checkpoint's files.

It has connections of its own and hashes and reads in its own time, so that pings and set-up go on beside it.
What is wrong with the checkpoint is told to the daemon, which gives up and says so on its control connection
like any other failure.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import zmq

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error, Hello, Welcome
from flowspec.core.protocol.device_messages import AskBytes, AskModel, AskNames, AskTensors
from flowspec.core.protocol.types import Message
from flowspec.errors import ClusterError, FlowSpecError, InputError, PeerError
from flowspec.model.files import ModelFiles
from flowspec.plan.placement import StagePlan
from flowspec.runtime.monitor import Monitor
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.transport import Receiver, Sender, Wake, dial, ready_sources, receive
from flowspec.runtime.weights.offer import Offer
from flowspec.version import __version__
from flowspec.wire.codec import Tensor, decode

QUEUED_MAX = 2 * limits.WEIGHT_WINDOW
"""Answers that may wait to leave for one daemon; one that asks for more without reading breaks the protocol.
"""
STOP_S = 5.0

log = logging.getLogger("flowspec.head")


class _Stopped(Exception):
    """The head closes: ends work that would take long."""


@dataclass(slots=True)
class _Customer:
    """A daemon that is served."""

    device: str
    link: Sender
    monitor: Monitor
    receiver: Receiver
    welcomed: bool = False


class WeightServer:
    """Serves one model to any number of daemons until `close`. `error` is set, and the head woken, when a
    daemon cannot be served."""

    def __init__(
        self,
        context: zmq.Context[Any],
        wake_head: Wake,
        *,
        model: str,
        fingerprint: str,
        incarnation: int,
        sender: str,
        keys: Keyring | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self._context = context
        self._wake_head = wake_head
        self._incarnation = incarnation
        self._sender = sender
        self._keys = keys
        self._wake = Wake()
        self._wanted: deque[StagePlan] = deque()
        self._stopping = False
        self._customers: list[_Customer] = []
        self._offer = Offer(ModelFiles(model), fingerprint, step=self._check_stopping)
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def serve(self, stage: StagePlan) -> None:
        self._wanted.append(stage)
        self._wake.set()

    def close(self) -> None:
        self._stopping = True
        self._wake.set()
        self._thread.join(STOP_S)
        self._wake.close()

    def _check_stopping(self) -> None:
        if self._stopping:
            raise _Stopped

    def _run(self) -> None:
        try:
            while True:
                self._turn()
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the top of a thread: the head's thread raises it
            self.error = error
            self._wake_head.set()
        finally:
            for customer in self._customers:
                customer.monitor.close()
                customer.link.socket.close(linger=0)
            self._offer.close()

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake.read_fd, zmq.POLLIN)
        for customer in self._customers:
            poller.register(customer.link.socket, zmq.POLLIN)
            poller.register(customer.monitor.socket, zmq.POLLIN)
        ready = ready_sources(poller.poll())
        self._check_stopping()
        if self._wake.read_fd in ready:
            self._wake.clear()
        while self._wanted:
            self._dial(self._wanted.popleft())
        for customer in self._customers:
            if customer.monitor.socket in ready and customer.monitor.drain()[0]:
                raise ClusterError(
                    f"{customer.device} was lost while it received weights: its connection closed; see the "
                    "daemon's log there"
                )
            if customer.link.socket in ready:
                self._serve_next(customer)

    def _dial(self, stage: StagePlan) -> None:
        socket = dial(
            self._context, stage.address, stage.name, self._keys, queued_max=QUEUED_MAX, has_pulse=False
        )
        link = Sender(socket, incarnation=self._incarnation, sender=self._sender)
        customer = _Customer(
            f"device {stage.name} at {stage.address}", link, Monitor(socket), Receiver(self._incarnation)
        )
        self._customers.append(customer)
        customer.link.send(Hello(name=self._sender, version=__version__, role="head-weights"))

    def _serve_next(self, customer: _Customer) -> None:
        """One message of each daemon at a time: none waits for another's whole slice."""
        frames = receive(customer.link.socket)
        if frames is None:
            return
        try:
            envelope = decode(frames)
            customer.receiver.check(envelope)
            answer, tensor = self._answer(customer, envelope.message)
        except InputError as error:
            log.error("%s", error)
            answer, tensor = Error.saying(str(error)), None
        except FlowSpecError as error:
            raise type(error)(f"{customer.device}: {error}") from None
        if not customer.link.send(answer, tensor):
            raise PeerError(f"{customer.device} asks for weights faster than it takes them")

    def _answer(self, customer: _Customer, message: Message) -> tuple[Message, Tensor | None]:
        if isinstance(message, Welcome) and not customer.welcomed:
            customer.welcomed = True
            customer.link.count_from(message.count)
            log.info("serving weights to %s", customer.device)
            return self._offer.begin(), None
        if isinstance(message, Error):
            raise ClusterError(f"refuses weights: {message.text}")
        if not isinstance(message, AskModel | AskNames | AskTensors | AskBytes):
            raise PeerError(f"sent an unexpected {type(message).__name__}")
        return self._offer.answer(message)
