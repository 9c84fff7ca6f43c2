"""Tensors that a daemon pulls from a head into a store: whatever breaks off, is damaged or lies there, in the
end all is there and nothing came twice. A head gives those of its own model, in one state of the files."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from safetensors.torch import save_file

from flowspec.core.protocol import limits
from flowspec.core.protocol.cluster_messages import Error, Loading
from flowspec.core.protocol.device_messages import (
    AskBytes,
    AskModel,
    AskTensors,
    AskTokens,
    ModelOffer,
    TensorBytes,
    TensorEntry,
)
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.errors import ClusterError, InputError, PeerError
from flowspec.model.files import ModelFiles
from flowspec.runtime.weights import store as store_module
from flowspec.runtime.weights.sources import HeadSource
from flowspec.runtime.weights.store import WeightStore
from flowspec.runtime.weights.transfer import HeadChannel, Manifest, Offer
from tests.runtime.clusters import whole_model
from tests.runtime.weights.served import Direct

CONFIG = json.dumps(
    {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 16,
    }
)
ASSIGN = structs.replace(whole_model("m", "f"), end_layer=2, layer_count=2)


def make_model(folder: Path, sizes: list[int]) -> dict[str, bytes]:
    """A folder with one byte-sized tensor for each of `sizes` (multiples of 4); returns their bytes by
    name."""
    tensors = {
        f"t{number}": torch.arange(size // 4, dtype=torch.float32) + number
        for number, size in enumerate(sizes)
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(CONFIG)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def offer_of(folder: Path) -> Offer:
    files = ModelFiles(str(folder))
    return Offer(files, files.fingerprint(), folder=folder / "cache")


def described(channel: HeadChannel, store: WeightStore, names: list[str]) -> HeadSource:
    source = HeadSource(ASSIGN.model, channel, channel.ask_manifest(), store)
    source.learn(channel.ask_entries(names))
    return source


def assert_stored(store: WeightStore, data: dict[str, bytes]) -> None:
    contents = {path.name: path.read_bytes() for path in (store.folder / "tensors").iterdir()}
    assert contents == {hashlib.sha256(each).hexdigest(): each for each in data.values()}


@given(
    sizes=st.lists(st.sampled_from([0, 4, 12, 16, 20, 64, 200, 400]), min_size=1, max_size=6),
    breaks=st.lists(st.integers(0, 30), max_size=4),
    harms=st.lists(
        st.tuples(st.sampled_from(["cut", "flip", "grow", "drop"]), st.integers(0, 1000)), max_size=4
    ),
)
def test_after_any_interruptions_and_damage_all_is_there(
    sizes: list[int], breaks: list[int], harms: list[tuple[str, int]]
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "WEIGHT_CHUNK_BYTES", 16)
        head, store = Path(folder), WeightStore(Path(folder) / "store")
        data = make_model(head, sizes)
        offer = offer_of(head)
        came = 0
        for patience in breaks:
            channel = Direct(offer, patience)
            source = described(channel, store, sorted(data))
            try:
                with source.ready({*data}) as received:
                    came += received
            except ClusterError:
                came += sum(question.size for question in channel.ranges[:patience])
        assert came <= sum(map(len, set(data.values()))), "nothing comes twice"
        for (harm, where), path in zip(harms, sorted((store.folder / "tensors").glob("*")), strict=False):
            content = bytearray(path.read_bytes())
            if harm == "drop":
                path.unlink()
                continue
            if harm == "flip" and content:
                content[where % len(content)] ^= 1
            elif harm == "cut":
                del content[where % (len(content) + 1) :]
            elif harm == "grow":
                content += b"x"
            path.write_bytes(content)
        channel = Direct(offer)
        source = described(channel, store, sorted(data))
        with source.ready({*data}):
            assert_stored(store, data)
            assert channel.open_most <= limits.WEIGHT_WINDOW
        with source.ready({*data}) as received:
            assert received == 0
        offer.close()


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F4"},
        {"dtype": "I64", "size_bytes": 16},
        {"shape": (3,)},
        {"size_bytes": 12},
        {"size_bytes": 0},
        {"shape": (2**61, 8), "size_bytes": 8},
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(tmp_path: Path, entry: dict[str, object]) -> None:
    source = HeadSource("m", Direct(), Manifest(CONFIG, "", frozenset("t")), WeightStore(tmp_path))
    right = {"name": "t", "dtype": "F32", "shape": (2,), "size_bytes": 8, "digest": "0" * 64}
    source.learn([TensorEntry(**right)])
    with pytest.raises(PeerError, match="the head offers t as"):
        source.learn([TensorEntry(**{**right, **entry})])


TOKENS = TokenBytes(tuple(bytes([97 + token % 26]) * (token % 5) for token in range(1, 300)))


def head_that_says(*answers: tuple[TensorBytes | Error | ModelOffer, bytes]) -> tuple[HeadChannel, list[Any]]:
    """One that answers by what it is given, and what it is asked and told."""
    told: list[Any] = []
    channel = HeadChannel(told.append)
    for answer in answers:
        channel.deliver(*answer)
    return channel, told


def part(offset: int, size: int, digest: str = TOKENS.digest) -> tuple[TensorBytes, bytes]:
    return TensorBytes(digest=digest, offset=offset), TOKENS.packed[offset : offset + size]


def test_the_bytes_of_tokens_come_in_as_many_parts_as_the_head_likes() -> None:
    size = len(TOKENS.packed)
    for cuts in ([size], [1, size - 1], [700, 2, size - 702]):
        offsets = [sum(cuts[:place]) for place in range(len(cuts))]
        head, told = head_that_says(*(part(offset, cut) for offset, cut in zip(offsets, cuts, strict=True)))
        assert head.ask_tokens(TOKENS.digest, size) == TOKENS
        assert told[0] == Loading(doing="receiving", share=0)
        assert told[1:] == [AskTokens(offset=offset) for offset in offsets]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([part(0, 9), part(0, 9)], "expected tokens from 9 on"),
        ([part(0, 9), (part(9, 1)[0], b"")], "expected tokens from 9 on, got 0 bytes"),
        ([part(0, 9, "0" * 64)], "expected tokens from 0 on"),
        ([(part(0, 9)[0], TOKENS.packed + b"x")], "expected tokens from 0 on"),
        ([(part(0, 9)[0], bytes(len(TOKENS.packed)))], "expected the tokens that were named"),
        ([(ModelOffer(config="{}", gguf="", tensor_count=1), b"")], "expected TensorBytes"),
        ([(Error.saying("tokens were not offered"), b"")], "not offered"),
    ],
    ids=range(7),
)
def test_other_tokens_than_were_named_are_refused(
    answers: list[tuple[TensorBytes, bytes]], expected: str
) -> None:
    with pytest.raises((PeerError, ClusterError), match=expected):
        head_that_says(*answers)[0].ask_tokens(TOKENS.digest, len(TOKENS.packed))
    junk = b"\xff" * 40
    digest = hashlib.sha256(junk).hexdigest()
    with pytest.raises(PeerError, match="tokens: expected"):  # what is no table of tokens
        head_that_says((TensorBytes(digest=digest, offset=0), junk))[0].ask_tokens(digest, len(junk))


def test_whoever_waits_for_a_head_that_lets_go_is_woken() -> None:
    head, told = head_that_says()
    head.ask(AskModel())
    assert told == [AskModel()]
    found: list[str] = []

    def wait() -> None:
        with pytest.raises(ClusterError) as caught:
            head.answer(ModelOffer)
        found.append(str(caught.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    head.hang_up()
    waiting.join(30)
    assert found == ["the head let go before all weights were there"]
    for act in (lambda: head.answer(ModelOffer), lambda: head.show("checking", 0.5)):
        with pytest.raises(ClusterError, match="let go before all weights were there"):
            act()


def entries(offer: Offer, *names: str) -> tuple[TensorEntry, ...]:
    offer.answer(AskModel())
    return offer.answer(AskTensors(names=names))[0].entries  # type: ignore[union-attr]


def test_bytes_are_given_of_tensors_that_were_offered_and_within_them(tmp_path: Path) -> None:
    data = make_model(tmp_path, [40, 80])
    offer = offer_of(tmp_path)
    (entry,) = entries(offer, "t1")
    assert (entry.name, entry.dtype, entry.shape, entry.size_bytes) == ("t1", "F32", (20,), 80)
    assert entry.digest == hashlib.sha256(data["t1"]).hexdigest()
    _, tensor = offer.answer(AskBytes(digest=entry.digest, offset=8, size=72))
    assert tensor is not None
    assert bytes(tensor.data) == data["t1"][8:]
    other = hashlib.sha256(data["t0"]).hexdigest()
    for question in (
        AskBytes(digest=entry.digest, offset=8, size=73),
        AskBytes(digest=other, offset=0, size=4),
    ):
        with pytest.raises(PeerError, match="that was not offered"):
            offer.answer(question)
    with pytest.raises(InputError, match="has no tensor nothing"):
        offer.answer(AskTensors(names=("nothing",)))


def test_digests_are_computed_once_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, [40, 80])
    plain, hashed = store_module.hash_range, []

    def counted(descriptor: int, offset: int, size: int, step: object) -> object:
        hashed.append(size)
        return plain(descriptor, offset, size)

    monkeypatch.setattr(store_module, "hash_range", counted)
    first = entries(offer_of(tmp_path), "t0", "t1")
    assert hashed == [40, 80]
    assert entries(offer_of(tmp_path), "t0", "t1") == first
    assert hashed == [40, 80], "from the cache folder"
    weights = tmp_path / "model.safetensors"
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = entries(offer_of(tmp_path), "t0", "t1")
    assert hashed == [40, 80, 40, 80], "the date was put back, and yet it shows"
    assert [one == other for one, other in zip(first, changed, strict=True)] == [True, False]
    for broken in ("{", "[]", '{"stamp": 3, "tensors": 4}', '{"stamp": [], "tensors": {"0+1": 5}}'):
        (kept,) = (tmp_path / "cache" / "digests").iterdir()
        kept.write_text(broken)
        assert entries(offer_of(tmp_path), "t0", "t1") == changed


def test_a_change_shows_at_the_next_question(tmp_path: Path) -> None:
    make_model(tmp_path, [40, 80])
    offer = offer_of(tmp_path)
    (entry,) = entries(offer, "t1")
    make_model(tmp_path, [44, 80])
    for ask in (
        lambda: offer.answer(AskBytes(digest=entry.digest, offset=0, size=4)),
        lambda: offer.answer(AskTensors(names=("t1",))),
        lambda: offer.answer(AskModel()),
    ):
        with pytest.raises(InputError, match="changed on the head since it connected; start again"):
            ask()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"cannot be sent: .*No such file"):
        offer.answer(AskBytes(digest=entry.digest, offset=0, size=4))


def test_work_ends_when_the_head_does(tmp_path: Path) -> None:
    make_model(tmp_path, [40, 80])
    stopped = threading.Event()

    class Stopped(Exception):
        pass

    def step() -> None:
        if stopped.is_set():
            raise Stopped

    files = offer_of(tmp_path)._files
    offer = Offer(files, files.fingerprint(), folder=tmp_path / "cache", step=step)
    entries(offer, "t0")
    stopped.set()
    with pytest.raises(Stopped):
        entries(offer, "t1")
