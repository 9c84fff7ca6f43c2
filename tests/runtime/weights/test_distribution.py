"""Real daemons without the model: each gets exactly its slice from the head, whatever is killed, damaged or
changed on the way.

The model goes by a name under which the head alone finds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error, Hello, Ping
from flowspec.core.protocol.device_messages import (
    AskBytes,
    AskModel,
    AskNames,
    ModelOffer,
    NameList,
    TensorBytes,
    WeightQuestion,
)
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster, LocalDaemon
from flowspec.runtime.weights import transfer
from flowspec.runtime.weights.transfer import Offer
from flowspec.wire.codec import BYTES, Tensor
from tests.caches import make_cache
from tests.checkpoints import SMALL, make_checkpoint
from tests.runtime.clusters import Peer, plan_for, submit, tokens_of, whole_model
from tests.runtime.weights.served import SAMPLING, expected

Model = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Makes a small checkpoint in the head's folder, where heads of this process and nobody else find it."""
    monkeypatch.setattr(transfer, "ModelFiles", lambda name: ModelFiles(str(tmp_path / name)))
    monkeypatch.setenv("XDG_CACHE_HOME", make_cache(tmp_path / "head-cache"))

    def make(seed: int, family: str = "llama", **shape: Any) -> Path:
        return make_checkpoint(tmp_path / f"model-{seed}", family, {**SMALL, **shape}, seed=seed)

    return make


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def daemons(stores: Path) -> Iterator[list[LocalDaemon]]:
    """Each with a store of its own."""
    with LocalCluster(4, log_level="CRITICAL", cache_dir=stores) as started:
        yield started.wait()


def hidden_plan(folder: Path, daemons: Sequence[LocalDaemon]) -> ClusterPlan:
    """A plan that names the model so that no daemon finds it."""
    return replace(plan_for(folder, daemons), model=folder.name)


def received(head: Head) -> list[int]:
    return [stage.ready.received_bytes for stage in head.stages if stage.ready is not None]


def slice_tensors(folder: Path, first: int, end: int) -> dict[str, bytes]:
    """What the slice is made of, by digest; read by other code than FlowSpec's."""
    layers = tuple(f"model.layers.{index}." for index in range(first, end))
    outside = ("model.embed_tokens",) * (first == 0) + ("model.norm", "lm_head") * (end == 8)
    data = {
        name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith(layers + outside)
    }
    return {hashlib.sha256(each).hexdigest(): each for each in data.values()}


def stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "tensors").glob("*")}


def exact(head: Head, folder: Path) -> None:
    assert tokens_of(submit(head, count=12, sampling=SAMPLING)) == expected(folder)


def test_four_empty_daemons_get_their_slices_and_later_load_them_from_the_store(
    daemons: list[LocalDaemon], stores: Path, model: Model
) -> None:
    folder = model(1, num_key_value_heads=2)
    wanted = [slice_tensors(folder, index * 2, index * 2 + 2) for index in range(4)]
    before = [stored(stores / f"local-{index}") for index in range(4)]
    progress: list[str] = []
    with Head(hidden_plan(folder, daemons), lambda text, share: progress.append(text)) as head:
        assert received(head) == [sum(map(len, tensors.values())) for tensors in wanted]
        exact(head, folder)
    for index in range(4):
        assert stored(stores / f"local-{index}") == before[index] | wanted[index], (
            "exactly the slice, and nothing in parts"
        )
    with Head(hidden_plan(folder, daemons)) as head:
        assert received(head) == [0] * 4
    doings = ("asking for weights", "receiving", "loading", "ready")
    assert {f"local-{index}: {doing}" for index in range(4) for doing in doings} <= set(progress)
    victim = stores / "local-2" / "tensors" / max(wanted[2], key=lambda digest: len(wanted[2][digest]))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with (
        LocalCluster(4, log_level="CRITICAL", cache_dir=stores) as restarted,
        Head(hidden_plan(folder, restarted.wait())) as head,
    ):
        assert received(head) == [0, 0, len(content), 0], (
            "one flipped bit is found, and that tensor alone sent again"
        )
        exact(head, folder)
    assert victim.read_bytes() == wanted[2][victim.name]


def test_a_daemon_with_another_model_of_that_name_gets_the_heads(
    alone: Callable[..., LocalDaemon], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = model(13), model(14)
    monkeypatch.setattr(transfer, "ModelFiles", lambda name: ModelFiles(str(folder)))
    with Head(replace(plan_for(folder, [alone()]), model=str(other))) as head:
        exact(head, folder)
        assert received(head) == [sum(map(len, slice_tensors(folder, 0, 8).values()))]


@contextlib.contextmanager
def at_question(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Has the head do something when it is asked for bytes for the `number`-th time."""
    asked = 0
    plain = Offer.answer

    def answer(offer: Offer, question: WeightQuestion) -> Any:
        nonlocal asked
        asked += isinstance(question, AskBytes)
        if asked == number and isinstance(question, AskBytes):
            act()
        return plain(offer, question)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Offer, "answer", answer)
        yield


def test_a_daemon_that_is_killed_in_the_middle_goes_on_where_it_was(
    alone: Callable[..., LocalDaemon], model: Model, tmp_path: Path
) -> None:
    folder = model(3, vocab_size=10_000)  # an embedding of three chunks
    whole = slice_tensors(folder, 0, 8)
    with LocalCluster(1, log_level="CRITICAL", cache_dir=tmp_path) as cluster:
        (daemon,) = cluster.wait()
        kill = at_question(40, lambda: os.kill(daemon.pid, signal.SIGKILL))
        with kill, pytest.raises(ClusterError, match=r"local-0 .* was lost while"):
            Head(hidden_plan(folder, [daemon]))
    kept = sum(map(len, stored(tmp_path / "local-0").values()))
    assert kept > 0, "question 40 was asked when more than thirty had been answered and written"
    with Head(hidden_plan(folder, [alone("local-0")])) as head:
        assert received(head) == [sum(map(len, whole.values())) - kept]
        exact(head, folder)
    assert stored(tmp_path / "local-0") == whole


def test_ctrl_c_in_the_middle_leaves_daemons_that_the_next_head_completes(
    daemons: list[LocalDaemon], model: Model
) -> None:
    folder = model(5)

    def interrupt(text: str, share: float) -> None:
        if text.endswith("receiving"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Head(hidden_plan(folder, daemons), interrupt)
    assert "weights" not in {thread.name for thread in threading.enumerate()}
    with Head(hidden_plan(folder, daemons)) as head:
        exact(head, folder)


@pytest.mark.parametrize("always", [False, True])
def test_what_is_damaged_on_the_way_is_sent_again_once(
    daemons: list[LocalDaemon], model: Model, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    folder = model(6 + always)
    plain, done = Offer._bytes, 0

    def damaged(offer: Offer, question: AskBytes) -> Tensor:
        nonlocal done
        done += 1
        found = plain(offer, question)
        return structs.replace(found, data=bytes(found.width)) if always or done == 2 else found

    monkeypatch.setattr(Offer, "_bytes", damaged)
    if always:
        with pytest.raises(ClusterError, match=r"local-0.*damaged from the head twice"):
            Head(hidden_plan(folder, daemons[:1]))
    else:
        with Head(hidden_plan(folder, daemons[:1])) as head:
            exact(head, folder)
            assert sum(received(head)) > sum(map(len, slice_tensors(folder, 0, 8).values()))


def test_a_checkpoint_that_changes_while_it_is_sent_ends_it_with_one_line(
    daemons: list[LocalDaemon], model: Model
) -> None:
    folder = model(8)
    weights = folder / "model.safetensors"
    touch = at_question(20, lambda: os.utime(weights, (1, 1)))
    with (
        touch,
        pytest.raises(ClusterError, match=r"local-.*cannot send the weights: model .* changed on the head"),
    ):
        Head(hidden_plan(folder, daemons))
    with Head(hidden_plan(folder, daemons)) as head:
        exact(head, folder)


@pytest.mark.parametrize(
    ("allowed", "said"),
    [
        ({"cache_bytes": 100_000}, "take 1 MiB on disk, but .*store may hold 0 MiB .*--cache-limit"),
        ({"memory_bytes": 1 << 20}, "layers 0 to 7 need .* free here"),
    ],
)
def test_a_slice_that_a_daemon_may_not_take_is_refused_before_anything_is_sent(
    alone: Callable[..., LocalDaemon], model: Model, tmp_path: Path, allowed: dict[str, int], said: str
) -> None:
    with pytest.raises(ClusterError, match=f"alone.*{said}"):
        Head(hidden_plan(model(9), [alone(**allowed)]))
    assert stored(tmp_path / "store") == {}


CONFIG = (
    '{"model_type": "llama", "num_hidden_layers": %s, "hidden_size": 64, "num_attention_heads": 4, '
    '"vocab_size": 99, "intermediate_size": 8%s}'
)


def test_a_head_that_answers_something_else_is_let_go_and_the_daemon_serves_the_next(
    alone: Callable[..., LocalDaemon], model: Model
) -> None:
    daemon, spec = alone(), ModelFiles(str(model(12))).spec
    junk = Tensor(rows=1, width=3, dtype=BYTES, data=b"abc")
    offer = ModelOffer(config=CONFIG % (8, ""), gguf="", tensor_count=2)
    configs = (
        ("[" * 100_000, "expected JSON"),
        (CONFIG % (7, ""), "has 7 layers, the head expects 8"),
        (CONFIG % (10**9, ""), "'num_hidden_layers': expected a whole number from 1 to 1024"),
    )
    for answers, wanted in (
        (
            [(TensorBytes(digest="0" * 64, offset=0), junk)],
            "expected ModelOffer from the head, got TensorBytes",
        ),
        ([(offer, None), (offer, None)], "expected NameList from the head, got ModelOffer"),
        ([(Ping(), None)], "carries no Ping"),
        ([(Hello(name="x", version="y", role="stage"), None)], "Hello came twice"),
        ([(offer, None), (NameList(names=()), None)], "expected the names of 2 tensors, got 0"),
        ([(Error.saying("the disk is on fire"), None)], "cannot send the weights: the disk is on fire"),
        ([(Error(text="x" * limits.TEXT_CHARS_MAX), None)], "cannot send the weights: xxx"),
        *(
            ([(structs.replace(offer, config=config), None), (NameList(names=("a", "b")), None)], wanted)
            for config, wanted in configs
        ),
    ):
        with Peer(daemon.address) as control, Peer(daemon.address, "head-weights") as weights:
            control.greet()
            control.link.send(whole_model("nowhere", "0" * 32, spec))
            control.until(AskModel)
            weights.greet()
            for number, (message, tensor) in enumerate(answers):
                if number and not isinstance(weights.answer(), AskNames):
                    break
                weights.link.send(message, tensor)
            said = control.until(Error).text
            assert wanted in said
            assert len(said) <= limits.TEXT_CHARS_MAX
    with Head(hidden_plan(model(12), [daemon])) as head:
        assert len(tokens_of(submit(head))) == 20
