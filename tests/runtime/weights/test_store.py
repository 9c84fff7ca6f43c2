"""The daemon's store: limits, what may be thrown away and what not, several daemons in one folder, disks that
refuse."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from flowspec.errors import ClusterError
from flowspec.runtime.weights import store as store_module
from flowspec.runtime.weights.store import WeightStore


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(store: WeightStore, data: bytes, used_s: int) -> str:
    """Stores a tensor that was last used then."""
    digest = digest_of(data)
    with store.reserve({digest: len(data)}):
        partial = store.partial(digest, len(data))
        partial.write(data)
        assert partial.finish()
    os.utime(store.path(digest), (used_s, used_s))
    return digest


A, B, C, D = (bytes([letter]) * 100 for letter in b"abcd")


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, 300)
    old, older, new = put(store, A, 200), put(store, B, 100), put(store, C, 300)
    assert store.check({store.path(older): 100})  # used just now
    put(store, D, 400)
    assert [store.path(each).exists() for each in (old, older, new, digest_of(D))] == [
        False,
        True,
        True,
        True,
    ]


def test_what_is_in_use_stays_and_what_cannot_fit_is_refused(tmp_path: Path) -> None:
    store, other = WeightStore(tmp_path, 300), WeightStore(tmp_path, 300)
    first, second = put(store, A, 1), put(store, B, 2)
    with store.reserve({first: 100, second: 100}):
        with other.reserve({digest_of(C): 100}):
            pass
        with pytest.raises(
            ClusterError,
            match=r"take 0 MiB on disk, but .* may hold 0 MiB, 0 MiB of them for other daemons that load now",
        ):
            other.reserve({digest_of(C): 100, digest_of(D): 101}).__enter__()
        assert store.path(first).exists()
        assert store.path(second).exists()
    with other.reserve({digest_of(C): 100, digest_of(D): 100}):
        assert not store.path(first).exists()
        assert store.path(second).exists(), "no more than need be"
    with pytest.raises(
        ClusterError, match="fewer layers, or its daemon more --cache-limit or another --cache-dir"
    ):
        store.reserve({digest_of(C): 301}).__enter__()
    assert not list((tmp_path / "uses").iterdir())


def test_uses_of_a_daemon_that_died_count_for_nothing(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, 150)
    first = put(store, A, 1)
    (tmp_path / "uses" / "dead").write_text(f"{first} 100\n")
    with store.reserve({digest_of(B): 100}):
        assert not store.path(first).exists()
        assert not (tmp_path / "uses" / "dead").exists()


def test_a_part_counts_and_goes_like_a_whole_one_but_not_for_its_own_tensor(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, 150)
    digest = digest_of(A)
    with store.reserve({digest: 100}):
        partial = store.partial(digest, 100)
        partial.write(A[:60])
        partial.close()
    with store.reserve({digest: 100}):
        again = store.partial(digest, 100)
        assert again.held == 60, "it is gone on with"
        again.close()
    with store.reserve({digest_of(B): 100}):
        assert not list((tmp_path / "tensors").iterdir())


def test_two_daemons_that_want_the_same_tensor_at_once_both_get_it(tmp_path: Path) -> None:
    store, other = WeightStore(tmp_path), WeightStore(tmp_path)
    digest = digest_of(A)
    with store.reserve({digest: 100}), other.reserve({digest: 100}):
        mine, theirs = store.partial(digest, 100), other.partial(digest, 100)
        mine.write(A[:50])
        theirs.write(A)
        assert theirs.finish()
        mine.write(A[50:])
        assert mine.finish()
    assert [path.name for path in (tmp_path / "tensors").iterdir()] == [digest]
    assert store.path(digest).read_bytes() == A


def test_what_is_not_as_its_name_says_is_thrown_away(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    store = WeightStore(tmp_path)
    digest = put(store, A, 1)
    assert store.check({store.path(digest): 100})
    assert not store.check({store.path(digest_of(B)): 100})
    for content in (A[:-1] + b"x", A[:-1], A + b"a", b""):
        store.path(digest).write_bytes(content)
        assert not store.check({store.path(digest): 100})
        assert not store.path(digest).exists()
    os.mkfifo(store.path(digest))
    assert not store.check({store.path(digest): 100})
    os.mkfifo(tmp_path / "uses/a")
    with store.reserve({digest: 100}):
        partial = store.partial(digest, 100)
        partial.write(B)
        assert not partial.finish()
        assert partial.held == 0
        partial.write(A)
        assert partial.finish()


def test_the_disk_itself_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WeightStore(tmp_path, 1 << 40)
    first = put(store, A, 1)
    free = store_module.DISK_SPARED_BYTES + 50
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": free}))
    with store.reserve({digest_of(B): 50}):
        assert store.path(first).exists()
    with store.reserve({digest_of(B): 150}):
        assert not store.path(first).exists()
    with pytest.raises(ClusterError, match="0 MiB are free there"):
        store.reserve({digest_of(B): 51}).__enter__()
    store.limit_bytes = None
    with store.reserve({digest_of(B): 25}):
        pass
    with pytest.raises(ClusterError, match="may hold 0 MiB"):
        store.reserve({digest_of(B): 26}).__enter__()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ClusterError, match=r"cannot store weights in .*file: .*; free some disk there, or .* --cache-dir"
    ):
        WeightStore(tmp_path / "file").reserve({}).__enter__()
