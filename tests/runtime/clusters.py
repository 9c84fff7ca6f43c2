"""Real clusters of local processes for the tests of this folder: what to ask of them, and how to wait."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import zmq

from flowspec import __version__
from flowspec.core.head.events import Submit
from flowspec.core.protocol.cluster_messages import (
    Assign,
    Drafting,
    Error,
    Hello,
    Loading,
    Ping,
    Pong,
    Ready,
    Welcome,
)
from flowspec.core.protocol.device_messages import AskModel
from flowspec.core.protocol.messages import Commit, Open, Sampling, SegmentPart
from flowspec.core.protocol.model_spec import ModelSpec
from flowspec.core.protocol.types import Message
from flowspec.model.files import ModelFiles
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.runtime import timeouts
from flowspec.runtime.cluster import Device, split_layers
from flowspec.runtime.drafters import PlacedDrafter
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalDaemon
from flowspec.runtime.pipelines import Recovery
from flowspec.runtime.planning import Replanner
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.token_stream import TokenStream
from flowspec.runtime.transport import Sender, Wake, dial
from flowspec.runtime.weights.transfer import WeightServer
from flowspec.wire.codec import decode
from lab.plain_model import PlainModel
from tests.checkpoints import VOCABULARY_SIZE
from tests.daemons import DaemonProcess

WAIT_S = 60.0
_M = TypeVar("_M", bound=Message)
PROMPT = tuple(range(5, 45))


def plan_for(folder: Path, daemons: Sequence[LocalDaemon | Device], context: int = 300) -> ClusterPlan:
    files = ModelFiles(str(folder))
    devices = [Device(name=daemon.name, address=daemon.address) for daemon in daemons]
    return ClusterPlan(
        model=str(folder),
        fingerprint=files.fingerprint(),
        dtype="float32",
        context=context,
        stages=tuple(split_layers(devices, 8, None)),
        spec=files.spec,
    )


def whole_model(model: str, fingerprint: str, spec: ModelSpec | None = None) -> Assign:
    """All layers for one daemon, of a model that is there or of this `spec`."""
    if spec is None and Path(model).is_dir():
        spec = ModelFiles(model).spec
    return Assign(
        model=model,
        fingerprint=fingerprint,
        end_layer=8,
        layer_count=8,
        dtype="float32",
        context=100,
        spec=spec,
    )


def drafter_for(folder: Path, daemon: LocalDaemon, context: int = 300) -> PlacedDrafter:
    """A drafter that is planned for a daemon."""
    files = ModelFiles(str(folder))
    stage = StagePlan(
        name=daemon.name, address=daemon.address, first=0, end=files.raw_config()["num_hidden_layers"]
    )
    plan = ClusterPlan(
        model=str(folder),
        fingerprint=files.fingerprint(),
        dtype="float32",
        context=context,
        stages=(stage,),
        vocabulary=VOCABULARY_SIZE,
        drafting=Drafting(vocabulary=VOCABULARY_SIZE, coupled=True),
        spec=files.spec,
    )
    return PlacedDrafter(name=folder.name, plan=plan)


def submit(
    head: Head,
    prompt: Sequence[int] = PROMPT,
    count: int = 20,
    sampling: Sampling | None = None,
    request: int | None = None,
) -> TokenStream:
    number = head.new_request() if request is None else request
    event = Submit(
        request=number,
        prompt=tuple(prompt),
        new_tokens_max=count,
        sampling=sampling or Sampling(),
        stop_ids=frozenset(),
    )
    return head.submit(event)


def prompt_part(request: int, tokens: Sequence[int], slots: int = 300) -> SegmentPart:
    """What opens a conversation and asks what follows these tokens."""
    length = len(tokens)
    opening = Open(
        request=request,
        epoch=0,
        keep=0,
        length=length,
        root=length - 1,
        slots=slots,
        sampling=Sampling(),
        answer_start=length,
    )
    return SegmentPart(
        commit=Commit(request=request, epoch=0, base=length, path=()),
        opening=opening,
        ids=tuple(range(length)),
        parents=tuple(range(-1, length - 1)),
        tokens=tuple(tokens),
        positions=tuple(range(length)),
        committed=(True,) * (length - 1) + (False,),
    )


def tokens_of(answer: TokenStream) -> list[int]:
    return [token for batch in answer for token in batch.tokens]


def plain(
    reference: PlainModel, count: int = 20, sampling: Sampling | None = None, prompt: Sequence[int] = PROMPT
) -> list[int]:
    """The tokens that `submit` should bring."""
    return reference.generate(tuple(prompt), sampling or Sampling(), count, frozenset())


def listening(process: DaemonProcess) -> LocalDaemon:
    port = int(process.address.rpartition(":")[2])
    return LocalDaemon(name=process.name, port=port, pid=process.process.pid)


def wait_until(is_done: object, what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_done():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, f"waited {WAIT_S:.0f} s until {what}"
        time.sleep(0.02)


class Peer:
    """A hand-made connection to a daemon."""

    def __init__(
        self,
        address: str,
        role: str = "head-control",
        *,
        version: str = __version__,
        incarnation: int = 5,
        name: str = "test",
        keys: Keyring | None = None,
        device: str = "",
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = dial(self.context, address, device, keys)
        self.link = Sender(self.socket, incarnation=incarnation, sender=name)
        self.hello = Hello(name=name, version=version, role=role)
        self.pinged_s = -math.inf

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def raw(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def answer(self, is_holding: bool = False) -> Message:
        """What the daemon says next, but that it is alive; a head that is holding it pings it meanwhile."""
        deadline_s = time.monotonic() + WAIT_S
        while (now_s := time.monotonic()) < deadline_s:
            if is_holding and now_s - self.pinged_s >= timeouts.PING_EVERY_S:
                self.link.send(Ping())
                self.pinged_s = now_s
            if self.socket.poll(int(timeouts.PING_EVERY_S * 1000)):
                said = decode(self.socket.recv_multipart()).message
                if not isinstance(said, Pong):
                    return said
        raise AssertionError("the daemon said nothing")

    def answers(self) -> Iterator[Message]:
        """All that the daemon says while this head holds it; of a loading one it may be much."""
        while True:
            yield self.answer(is_holding=True)

    def until(self, kind: type[_M]) -> _M:
        """The first message of this kind."""
        return next(said for said in self.answers() if isinstance(said, kind))

    def greet(self) -> None:
        self.link.send(self.hello)
        welcome = self.answer()
        assert isinstance(welcome, Welcome)
        self.link.count_from(welcome.count)

    def assign(self, address: str, assign: Assign, until: str = "") -> Message:
        """Hands out layers and serves their weights; the word with which the daemon is done, or at the step
        `until`."""
        self.link.send(assign)
        wake, weights = Wake(), None
        try:
            for said in self.answers():
                if isinstance(said, Ready | Error) or (isinstance(said, Loading) and said.doing == until):
                    return said
                if isinstance(said, AskModel):
                    weights = WeightServer(
                        self.context,
                        wake,
                        model=assign.model,
                        fingerprint=assign.fingerprint,
                        incarnation=self.link.incarnation,
                        sender=self.hello.name,
                    )
                    weights.serve(
                        StagePlan(name="", address=address, first=assign.first_layer, end=assign.end_layer)
                    )
            raise AssertionError("a daemon's messages have no end")
        finally:
            if weights is not None:
                weights.close()
            wake.close()


def surviving(plan: ClusterPlan, notes: list[str], wait_s: float | None = 60.0) -> Recovery:
    """A recovery among a plan's own devices."""
    devices = [Device(name=stage.name, address=stage.address) for stage in plan.stages]
    return Recovery(replan=Replanner(plan, devices).plan_of, on_note=notes.append, wait_s=wait_s)
