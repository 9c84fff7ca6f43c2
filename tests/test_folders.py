"""Files that FlowSpec keeps for itself, its locks, and folders that others may write."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from flowspec import folders
from flowspec.folders import is_own, locked, private_folder, read_own, read_text, temporary_folder, write_own

LOCK = "import sys, time; from pathlib import Path; from flowspec.folders import locked\n"
LOCK += "with locked(Path(sys.argv[1])): print('locked', flush=True); time.sleep(60)"


def test_what_was_kept_is_read_again_and_a_bit_that_changed_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, kept = tmp_path / "new" / "kept.json", {"b": [1, 2.5, None], "a": "\u00e4" * 20}
    assert read_own(path, dict) is None
    write_own(path, kept)
    whole = path.read_bytes()
    assert read_own(path, dict) == kept
    assert not caplog.records
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        caplog.clear()
        found = read_own(path, dict)
        assert found in (None, kept), "but for white space"
        assert (found is None) == bool(caplog.records)


def test_only_regular_files_of_bounded_size_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    write_own(tmp_path / "large", "x" * 1000)
    monkeypatch.setattr(folders, "OWN_BYTES_MAX", 500)
    for name in ("pipe", "folder", "large", "/dev/zero"):
        assert read_own(tmp_path / name, str) is None
    assert ["is made anew" in line.message for line in caplog.records] == [True, False, True, True]
    assert caplog.messages[1].endswith("is a folder; it is not used, and cannot be replaced: remove it")


def test_a_mark_at_the_beginning_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\ufeff".encode())
    assert read_text(tmp_path / "a.txt") == "one\ntwo\ufeff"


def test_a_process_that_was_stopped_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "work"
    with subprocess.Popen([sys.executable, "-c", LOCK, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        waits: list[float] = []

        def meanwhile() -> None:
            waits.append(time.monotonic())
            if len(waits) == 3:
                holder.send_signal(signal.SIGSTOP)

        with locked(path, meanwhile):
            assert len(waits) >= 3, "one that works is waited for"
        holder.kill()
    assert f"process {holder.pid} is at work and was stopped" in caplog.text


def test_a_lock_that_is_held_for_ever_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LOCK_MAX_S", 0.3)
    with locked(tmp_path / "work"), locked(tmp_path / "work"):
        pass


@pytest.mark.parametrize("level", range(3))
def test_a_folder_that_others_may_write_is_not_used(
    level: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = tmp_path / "cache" / "flowspec" / "arithmetic"
    assert private_folder(folder) == folder
    assert not caplog.records
    (folder, *folder.parents)[level].chmod(0o777)
    other = private_folder(folder)
    assert other == temporary_folder() / "arithmetic"
    assert other.is_relative_to(tmp_path / "temporary")
    assert "may be written by others; it is not used" in caplog.text
    (tmp_path / "temporary").chmod(0o1777)
    assert private_folder(folder) == other, "as /tmp is, where nobody can replace the files of others"
    other.parent.chmod(0o777)
    with pytest.raises(OSError, match="set XDG_CACHE_HOME to a folder of your own"):
        private_folder(folder)


def test_a_file_of_another_user_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.touch(mode=0o600)
    assert is_own(path)
    path.chmod(0o666)
    assert not is_own(path)
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    assert not is_own(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        assert not is_own(path)
