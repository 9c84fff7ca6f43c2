"""What a head and a device that mean harm can do where they are let in: tried on real daemons and a real head
on loopback.

Beside `intrusion`, which tries to get in. These have valid keys, or there are none. Each attempt says what
came of it and whether that is as `docs/security.md` promises: nobody else gets other answers, no daemon ends,
a head ends in a line.

    python -m lab.checks.hostile [--minutes 30] [--seed N] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import zmq
from msgspec import structs
from safetensors.torch import load_file, save_file

from flowspec import __version__
from flowspec.core.protocol.cluster_messages import Assign, Error, Hello, Ping, Ready, Reset, Welcome
from flowspec.core.protocol.device_messages import AskModel, AskNames, ModelOffer, NameList, WeightQuestion
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.types import Message
from flowspec.errors import FlowSpecError, PeerError
from flowspec.model.files import ModelFiles
from flowspec.plan.memory import mib
from flowspec.plan.placement import StagePlan
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster, LocalDaemon
from flowspec.runtime.transport import Sender, bind_router, dial
from flowspec.runtime.weights.transfer import Offer
from flowspec.wire.codec import BYTES, Tensor, decode
from lab.checks.intrusion import Attempt, report
from lab.command import Parser, run_command
from lab.fuzz.samples import MESSAGES
from lab.plain_model import PlainModel
from tests.checkpoints import SMALL, make_checkpoint
from tests.runtime.clusters import PROMPT, plan_for, submit, tokens_of, whole_model

LAYERS = 8
NEW_TOKENS = 20
WAIT_S = 30.0
"""How long a daemon may take to answer what it is told."""
LOOK_EVERY_S = 20.0
"""Between two looks whether daemons that are told anything still serve others."""
GROWTH_BYTES = 200 << 20
"""By how much a daemon's memory may grow meanwhile: caches, the slices of two models, what the allocator
keeps."""
ROLES = ("head-control", "head-control", "head-data", "head-weights", "stage")


class Offers(Protocol):
    """What a head says of its model; `Offer`, or a lie."""

    def answer(self, question: WeightQuestion) -> tuple[Any, Tensor | None]: ...


class BadConfig:
    """A model of one tensor, with a config that means harm."""

    def __init__(self, **config: Any) -> None:
        sizes = {"hidden_size": 8, "num_attention_heads": 1, "vocab_size": 16, "intermediate_size": 8}
        self._config = json.dumps({"num_hidden_layers": LAYERS, **sizes, **config})

    def answer(self, question: WeightQuestion) -> tuple[Any, Tensor | None]:
        if isinstance(question, AskModel):
            return ModelOffer(config=self._config, gguf="", tensor_count=1), None
        if isinstance(question, AskNames):
            return NameList(names=("model.norm.weight",)), None
        return Error.saying("that was all"), None


class Stranger:
    """A hand-made connection to a daemon; a context manager."""

    def __init__(self, context: zmq.Context[Any], address: str, role: str, incarnation: int) -> None:
        self.socket = dial(context, address, "", None)
        self.link = Sender(self.socket, incarnation=incarnation, sender="stranger")
        self._role = role

    def __enter__(self) -> Stranger:
        self.link.send(Hello(name="stranger", version=__version__, role=self._role))
        welcome = self.hear(WAIT_S)
        assert isinstance(welcome, Welcome), f"a daemon said {welcome} to Hello"
        self.link.count_from(welcome.count)
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(linger=100)

    def hear(self, timeout_s: float) -> Message | None:
        """The next message; None if none comes."""
        is_there = self.socket.poll(int(timeout_s * 1000))
        return decode(self.socket.recv_multipart()).message if is_there else None


class Site:
    """Local daemons without keys, and a model that they do not find: `folder` in the folder where the head
    runs."""

    def __init__(self, daemons: Sequence[LocalDaemon], folder: Path, seed: int) -> None:
        self.daemons = daemons
        self.folder = folder
        self.draw = random.Random(seed)
        self.context: zmq.Context[Any] = zmq.Context()
        self.files = ModelFiles(folder.name)
        self.fingerprint, plain = self.files.fingerprint(), PlainModel(self.files, "float32")
        self.expected = plain.generate(PROMPT, Sampling(), NEW_TOKENS, frozenset())

    def close(self) -> None:
        self.context.destroy(linger=0)

    @property
    def daemon(self) -> LocalDaemon:
        return self.daemons[0]

    def assign(self, model: str) -> Assign:
        return whole_model(model, self.fingerprint, self.files.spec)

    def hand_out(self, assign: Assign, offers: Offers) -> Message | None:
        """Has the daemon load what this head offers, and leaves; its last word: Ready, Error, or None."""
        address, incarnation = self.daemon.address, self.draw.randrange(1 << 60)
        last_s = time.monotonic() + WAIT_S
        with Stranger(self.context, address, "head-control", incarnation) as control:
            control.link.send(assign)
            weights: Stranger | None = None
            said: Message | None = None
            while time.monotonic() < last_s and not isinstance(said, Ready | Error):
                said = control.hear(0.05)
                control.link.send(Ping())
                if isinstance(said, AskModel):
                    weights = Stranger(self.context, address, "head-weights", incarnation).__enter__()
                    weights.link.send(*offers.answer(said))
                while weights is not None and (question := weights.hear(0)) is not None:
                    if not isinstance(question, Error):
                        weights.link.send(*offers.answer(question))  # type: ignore[arg-type]
            control.link.send(Reset())
            if weights is not None:
                weights.socket.close(linger=0)
            return said

    def answer(self, stages: Sequence[StagePlan] | None = None) -> list[int]:
        """What an honest head's user gets, of the first daemon alone or these stages."""
        plan = plan_for(Path(self.folder.name), [self.daemon], 100)
        with Head(replace(plan, stages=tuple(stages)) if stages else plan) as head:
            return tokens_of(submit(head, PROMPT, NEW_TOKENS))

    def serves(self) -> str:
        """Why it does not serve an honest head as ever; empty if it does."""
        try:
            return "" if self.answer() == self.expected else "an honest head gets other answers"
        except FlowSpecError as error:
            return f"an honest head gets: {error}"

    def memory(self) -> int:
        return int(psutil.Process(self.daemon.pid).memory_info().rss)


def said_of(message: Message | None) -> str:
    if isinstance(message, Error):
        return f"Error: {message.text}"
    return "nothing" if message is None else type(message).__name__


def attempt(site: Site, name: str, outcome: str, *, is_right: bool) -> Attempt:
    """What came of it, and whether the daemon serves an honest head after it."""
    failed = site.serves()
    return Attempt(
        name=name,
        outcome=f"{outcome}; {failed or 'an honest head gets its answer'}",
        logged="",
        as_promised=is_right and not failed,
    )


def poison(site: Site) -> Attempt:
    """Altered weights under the fingerprint of somebody else's model."""
    altered = site.folder.with_name("altered")
    shutil.copytree(site.folder, altered)
    weights = load_file(altered / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"] *= -1
    save_file(weights, altered / "model.safetensors", metadata={"format": "pt"})
    files = ModelFiles(altered.name)
    offer = Offer(files, files.fingerprint())
    said = site.hand_out(site.assign(site.folder.name), offer)
    offer.close()
    name, outcome = "altered weights under another's fingerprint", f"the daemon said {said_of(said)}"
    return attempt(site, name, outcome, is_right=isinstance(said, Ready))


def fewer_layers(site: Site) -> Attempt:
    """The first layers of a model, and then the same as all of one that has no more."""
    files = ModelFiles(site.folder.name)
    offer = Offer(files, files.fingerprint())
    whole = site.assign(site.folder.name)
    other = site.daemons[1]
    first = structs.replace(whole, stages=2, end_layer=2, next_hop=other.address, next_name=other.name)
    begun = site.hand_out(first, offer)
    fewer = structs.replace(site.files.spec, layers=site.files.spec.layers[:2])
    said = site.hand_out(structs.replace(whole, end_layer=2, layer_count=2, spec=fewer), offer)
    offer.close()
    is_right = isinstance(begun, Ready) and isinstance(said, Error)
    name, outcome = "a kept slice as one of a model with fewer layers", f"the daemon said {said_of(said)}"
    return attempt(site, name, outcome, is_right=is_right)


def bad_config(site: Site, name: str, **config: Any) -> Attempt:
    """A config that breaks or grows what is built of it."""
    before, started_s = site.memory(), time.monotonic()
    said = site.hand_out(site.assign("nowhere"), BadConfig(**config))
    grown, spent_s = site.memory() - before, time.monotonic() - started_s
    outcome = f"the daemon said {said_of(said)} after {spent_s:.1f} s and grew by {mib(max(0, grown))}"
    return attempt(site, name, outcome, is_right=isinstance(said, Error) and grown < GROWTH_BYTES)


def any_order(site: Site, seconds: float) -> Attempt:
    """Messages of all kinds in any order, on connections of all roles; real Assigns among them, so that some
    get far."""
    before, count, ended_s, failed = site.memory(), 0, time.monotonic() + seconds, ""
    look_s = time.monotonic() + LOOK_EVERY_S
    real = (site.assign(site.folder.name), site.assign(str(site.folder)), Ping(), Ping())
    while time.monotonic() < ended_s and not failed:
        role, incarnation = site.draw.choice(ROLES), site.draw.randrange(3)
        with Stranger(site.context, site.daemon.address, role, incarnation) as stranger:
            for _ in range(site.draw.randrange(1, 20)):
                data = Tensor(rows=1, width=3, dtype=BYTES, data=b"abc") if site.draw.random() < 0.2 else None
                message = site.draw.choice(real if site.draw.random() < 0.3 else MESSAGES)
                count += stranger.link.send(message, data)
                if site.draw.random() < 0.2:
                    stranger.hear(0.1)
        if time.monotonic() > look_s:
            failed, look_s = site.serves(), time.monotonic() + LOOK_EVERY_S
    grown = max(0, site.memory() - before)
    outcome = f"{count} messages; the daemon grew by {mib(grown)}{'; ' * bool(failed)}{failed}"
    return attempt(
        site, "messages of all kinds in any order", outcome, is_right=not failed and grown < GROWTH_BYTES
    )


class HostileDevice(threading.Thread):
    """Welcomes a head, and answers everything with messages of all kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__(daemon=True)
        self._draw = random.Random(seed)
        self._context: zmq.Context[Any] = zmq.Context()
        self._router, port = bind_router(self._context, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{port}"
        self.said = 0
        self._stopping = threading.Event()
        self.start()

    def run(self) -> None:
        links: dict[bytes, Sender] = {}
        while not self._stopping.is_set():
            if not self._router.poll(50):
                continue
            identity, *frames = self._router.recv_multipart()
            try:
                envelope = decode(frames)
            except PeerError:
                continue
            if identity not in links:
                links[identity] = Sender(
                    self._router, incarnation=envelope.incarnation, sender="device", identity=identity
                )
                links[identity].send(
                    Welcome(name="device", version=__version__, device="cpu", pid=1, memory_bytes=1, count=5)
                )
                continue
            for _ in range(self._draw.randrange(3)):
                self.said += links[identity].send(self._draw.choice(MESSAGES))
        self._context.destroy(linger=0)

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def device(site: Site, seconds: float) -> Attempt:
    """A device that says anything: the head ends in one line, and soon."""
    ended_s, count, said, longest_s, wrong = time.monotonic() + seconds, 0, 0, 0.0, ""
    while time.monotonic() < ended_s and not wrong:
        hostile, started_s = HostileDevice(site.draw.randrange(1 << 30)), time.monotonic()
        stages = [
            StagePlan(name="device", address=hostile.address, first=0, end=4),
            StagePlan(name=site.daemon.name, address=site.daemon.address, first=4, end=LAYERS),
        ]
        try:
            site.answer(stages)
            wrong = "it got an answer"
        except FlowSpecError as error:
            wrong = "" if len(str(error).splitlines()) == 1 else f"not one line: {error!r:.200}"
        except Exception as error:  # noqa: BLE001 - what must not be is what is looked for
            wrong = f"not an expected error: {error!r:.200}"
        hostile.stop()
        count, said, longest_s = count + 1, said + hostile.said, max(longest_s, time.monotonic() - started_s)
    outcome = (
        f"{count} heads heard {said} messages and ended in a line, after {longest_s:.1f} s at most; "
        f"{wrong or 'nothing else'}"
    )
    return attempt(site, "a device that says anything", outcome, is_right=not wrong)


def try_everything(folder: Path, minutes: float, seed: int) -> Iterator[Attempt]:
    """All attempts, one after another; the current folder becomes `folder`, where the model is, which daemons
    do not find there."""
    model = make_checkpoint(folder / "model", "llama", SMALL)
    with LocalCluster(2, log_level="CRITICAL", cache_dir=folder / "stores") as cluster:
        daemons = cluster.wait()
        os.chdir(folder)
        with contextlib.closing(Site(daemons, model, seed)) as site:
            yield poison(site)
            yield fewer_layers(site)
            vision = {"model_type": "gemma3", "tie_word_embeddings": None}
            yield bad_config(site, "a config that breaks a class of transformers", **vision)
            experts = {"model_type": "qwen3_moe", "num_local_experts": 1 << 20}
            yield bad_config(site, "a config of a million experts", **experts)
            layers = {"model_type": "llama", "num_hidden_layers": 1 << 20}
            yield bad_config(site, "a config of a million layers", **layers)
            yield any_order(site, 40 * minutes)
            yield device(site, 20 * minutes)


def command(args: argparse.Namespace) -> int:
    os.environ["HF_HUB_OFFLINE"] = "1"  # daemons are told to load models of all kinds of names
    with tempfile.TemporaryDirectory() as folder:
        status = report(try_everything(Path(folder), args.minutes, args.seed), is_json=args.json)
        os.chdir("/")
    return status


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.checks.hostile", __doc__)
    minutes = "how long to say anything in any order (default: %(default)s)"
    parser.add_argument("--minutes", type=float, default=1.0, help=minutes)
    parser.add_argument("--seed", type=int, default=0, help="what is said, and when (default: %(default)s)")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
