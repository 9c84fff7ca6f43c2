"""What a head gives: tensors of its own model, in one state of the files, hashed once for as long as these
stay as they are."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from flowspec.core.protocol.weight_messages import AskBytes, AskModel, AskTensors, TensorEntry
from flowspec.errors import InputError, PeerError
from flowspec.runtime.weights import digests
from flowspec.runtime.weights.offer import Offer
from tests.runtime.weights.test_receive import make_model, offer_of


def entries(offer: Offer, *names: str) -> tuple[TensorEntry, ...]:
    offer.begin()
    return offer.answer(AskTensors(names=names))[0].entries  # type: ignore[union-attr]


def test_entries_say_what_is_in_the_file(tmp_path: Path) -> None:
    data = make_model(tmp_path, [40, 80])
    for name, entry in zip(("t1", "t0"), entries(offer_of(tmp_path), "t1", "t0"), strict=True):
        assert (entry.name, entry.dtype, entry.size_bytes) == (name, "F32", len(data[name]))
        assert entry.shape == (len(data[name]) // 4,)
        assert entry.digest == hashlib.sha256(data[name]).hexdigest()


def test_bytes_are_given_of_tensors_that_were_offered_and_within_them(tmp_path: Path) -> None:
    data = make_model(tmp_path, [40, 80])
    offer = offer_of(tmp_path)
    (entry,) = entries(offer, "t1")
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
    with pytest.raises(PeerError, match="control connection"):
        offer.answer(AskModel())
    with pytest.raises(InputError, match="has no tensor nothing"):
        offer.answer(AskTensors(names=("nothing",)))


def test_digests_are_computed_once_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path, [40, 80])
    plain, hashed = digests.hash_range, []

    def counted(descriptor: int, offset: int, size: int, step: object) -> object:
        hashed.append(size)
        return plain(descriptor, offset, size)

    monkeypatch.setattr(digests, "hash_range", counted)
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
        offer.begin,
    ):
        with pytest.raises(InputError, match="changed on the head since it connected; start again"):
            ask()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"cannot be sent: .*No such file"):
        offer.answer(AskBytes(digest=entry.digest, offset=0, size=4))


def test_a_cache_folder_that_cannot_be_written_costs_nothing_but_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(tmp_path, [40, 80])
    (tmp_path / "cache").write_text("a file")
    assert len(entries(offer_of(tmp_path), "t0")) == 1
    assert "cannot keep the digests" in caplog.text


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
