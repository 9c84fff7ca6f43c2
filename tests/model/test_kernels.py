"""Kernels are tried before they are used: what is wrong, dies or hangs is noticed, and a build of the same
bits takes its place."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flowspec.core.protocol.precision import PRECISIONS, is_packed
from flowspec.errors import InputError
from flowspec.folders import locked
from flowspec.model import engines
from flowspec.model.arithmetic import cases, compiled
from flowspec.model.cpu import Cpu
from flowspec.model.engines import (
    GROUPS32,
    LANES16,
    PAIRS16,
    NoRightKernelError,
    engine_of,
    prepare,
    run_trial,
)
from tests import warm
from tests.model import definition

RIGHT = compiled.build()


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is found here of broken kernels is not for other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(engines, "_found", {})
    monkeypatch.setattr(engines, "_slowed_by", None)
    monkeypatch.setattr(compiled, "_library", None)
    builds(monkeypatch, RIGHT)


def builds(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """What is built, level by level."""
    by_level = {(f"-march={place}",): path for place, path in enumerate(paths)}
    monkeypatch.setattr(compiled, "levels", lambda: iter(by_level))
    monkeypatch.setattr(compiled, "build", lambda level=("-march=0",), *_: by_level[level])


@pytest.mark.arm
def test_what_is_built_has_the_bits_of_the_definition() -> None:
    """Which made what it is tried by: this has no kernel."""
    assert definition.golden() == json.loads(cases.GOLDEN.read_text("utf-8"))
    names = [case.name for case in cases.cases()]
    assert len({*names}) == len(names) > 55, "all are different"
    assert prepare() == ""


def test_the_definition_is_frozen() -> None:
    """Answers of a released version depend on it: with other bits an answer that was recorded could not be
    computed again, and a device of another version would break one that others have begun."""
    found = hashlib.sha256(cases.GOLDEN.read_bytes()).hexdigest()
    assert found == "9f01271a190f48426a62c684d589604236d7435eec83054796145f0b8acc7f06"


@pytest.mark.arm
def test_each_precision_has_its_arithmetic() -> None:
    for dtype in PRECISIONS:
        expected = GROUPS32 if is_packed(dtype) else PAIRS16 if dtype == "bfloat16" else LANES16
        found = run_trial(dtype, "cpu")
        assert (found.arithmetics, found.kernel, found.slowed_by) == ((expected,), expected, "")
        for name in ("", expected):
            assert isinstance(engine_of(dtype, "cpu", "weights", name), Cpu)
        with pytest.raises(InputError, match=f"the arithmetic other of {dtype}, .* has {expected}"):
            engine_of(dtype, "cpu", "weights", "other")


FAULTS = {
    "found = next(program, call); ((char *)call->hidden)[5] ^= call->rows == 3;": "differs from its defin",
    "__builtin_trap();": "ran an instruction that this processor does not have",
    "raise(11);": "ended by SIGSEGV",
    "exit(3);": "ended with status 3",
    "raise(9);": "ended by SIGKILL, as where memory runs out",
    "for (;;) sleep(1);": "gave no sign of life for 5 s",
}
PASSING = ("ended by SIGKILL", "gave no sign")
"""A machine that is busy, or has no memory left, must not cost the better kernel for good."""


def shim(does: str, folder: Path) -> Path:
    """A library that does this in the place of running a program, and has all else of the right one."""
    source, made = folder / "shim.c", folder / f"canonical-{abs(hash(does))}.so"
    head = "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <signal.h>\n#include <stdint.h>\n"
    head += "#include <stdlib.h>\n#include <unistd.h>\ntypedef struct { void *hidden; "
    head += "void *others[7]; int64_t rows; } Call;\n"
    body = 'int64_t (*next)(const void *, Call *) = dlsym(RTLD_NEXT, "flowspec_run");\nint64_t found = 0;\n'
    run = f"int64_t flowspec_run(const void *program, Call *call) {{\n{body}{does}\nreturn found;\n}}\n"
    source.write_text(head + run)
    words = ["cc", "-shared", "-fPIC", "-Wl,--no-as-needed", str(source), str(RIGHT), "-o", str(made)]
    subprocess.run(words, check=True)
    return made


@pytest.mark.parametrize("does", FAULTS)
def test_a_build_for_less_of_the_processor_takes_the_place_of_one_that_is_broken(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert [each[0] for each in compiled.Call._fields_].index("rows") == 8, "the shim reads it there"
    broken, shares = shim(does, tmp_path), list[float]()
    builds(monkeypatch, broken, RIGHT)
    if "no sign" in FAULTS[does]:
        monkeypatch.setattr(engines, "CHILD_S", 5.0)
    with engines.shown_to(lambda doing, share: shares.append(share)):
        found = run_trial("int8", "cpu")
    library = compiled.library()
    assert library is not None
    assert library.path == RIGHT
    assert found.arithmetics == (GROUPS32,)
    assert found.slowed_by.startswith(f"kernels that were compiled with -march=0: {FAULTS[does]}")
    assert f"may be slow, for {found.slowed_by}" in caplog.text
    kept = [path.name for path in (tmp_path / "cache/flowspec/kernels").glob("*.json")]
    is_kept = not FAULTS[does].startswith(PASSING)
    assert any(name.startswith(broken.stem) for name in kept) == is_kept
    if is_kept:  # and is not tried again
        monkeypatch.setattr(engines, "_slowed_by", None)
        monkeypatch.setattr(engines, "CHILD", ("/does/not/exist",))
        assert prepare() == found.slowed_by
    if "differs" in FAULTS[does]:
        assert "linear float32 3, with 1 threads" in found.slowed_by
        assert shares == sorted(shares[: shares.index(1.0) + 1]) + shares[shares.index(1.0) + 1 :]


def test_where_nothing_is_right_a_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "canonical-0.so"
    text.write_text("no library")
    builds(monkeypatch, text, shim("exit(3);", tmp_path))
    told = (
        r"do not run right on .*: kernels .* -march=0: cannot be loaded: .*; kernels .* install another gcc"
    )
    with pytest.raises(NoRightKernelError, match=told) as refusal:
        prepare()
    assert "\n" not in str(refusal.value)


def test_what_was_found_is_kept_for_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float]] = []
    with engines.shown_to(lambda *word: seen.append(word)):
        first = run_trial("int8", "cpu")
    assert (seen[0], seen[-1]) == (("trying kernels", 0.0), ("trying kernels", 1.0))
    assert seen == sorted(seen)
    monkeypatch.setattr(engines, "CHILD", ("/does/not/exist",))

    def again() -> engines.Trial:
        monkeypatch.setattr(engines, "_slowed_by", None)
        monkeypatch.setattr(engines, "_found", {})
        return run_trial("int8", "cpu")

    assert again() == first
    (path,) = (Path(os.environ["XDG_CACHE_HOME"]) / "flowspec/kernels").glob("*.json")
    kept = path.read_text()
    for damaged in ("{", kept.replace("fault", "vault"), "[" * 100_000):
        path.write_text(damaged)
        with pytest.raises(FileNotFoundError):
            again()
    path.write_text(kept)
    with monkeypatch.context() as patch:
        patch.setattr(engines, "_processor_block", lambda: "another")
        with pytest.raises(FileNotFoundError):
            again()
    assert again() == first
    path.unlink()

    def look(doing: str, share: float) -> None:
        raise KeyError(doing)

    with locked(path), engines.shown_to(look), pytest.raises(KeyError, match="trying kernels"):
        again()  # and tells that it waits for another process's trial


def test_what_was_found_on_a_gpu_is_of_that_gpu_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    information.parent.mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: 540.3.0\n")
    told = set()
    for text in ("Model: Orin\nIRQ: 7\n", "Model: Orin\nIRQ: 8\n", "Model: Thor\n"):
        information.write_text(text)
        told.add(engines._driver(tmp_path))
        assert engines._driver(tmp_path).startswith("NVRM version: 540.3.0\nModel: ")
    assert len(told) == 2
    say = "import json; print(7); print(json.dumps(dict(fault={!r}, arithmetics=['a@sm87', 'b'])))"
    monkeypatch.setattr(engines, "GPU_CHILD", (sys.executable, "-c", say.format("")))
    assert run_trial("bfloat16", "cuda:0").arithmetics == ("a@sm87", "b")
    monkeypatch.setattr(engines, "GPU_CHILD", (sys.executable, "-c", say.format("it fails")))
    with pytest.raises(
        NoRightKernelError, match=r"int4 does not run right on cuda:0 .*: it fails; use another"
    ):
        run_trial("int4", "cuda:0")


def test_a_child_whose_parent_is_gone_does_not_hang_for_ever() -> None:
    code = "from flowspec.model.arithmetic import cases; import time; "
    code += "cases.ORPHAN_S = 1; cases.say(at=''); time.sleep(600)"
    done = warm.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=120)
    assert done.returncode == -signal.SIGALRM


# ------------------------------------------------------------------------------ what is built of canonical.c


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Builds a small source instead, in an empty cache."""
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "SOURCE", tmp_path / "small.c")
    compiled.SOURCE.write_text("int seven(void) { return 7; }")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return compiled.build()


@pytest.mark.parametrize("kept", [0, 0.5, 1])
def test_what_was_damaged_in_the_cache_is_built_again(kept: float, small: Path) -> None:
    """As after a power cut: nothing, a part, or as many bytes as before, of which one is another."""
    written = small.stat()
    assert compiled.build() == small, "what is whole stays"
    assert small.stat().st_mtime_ns == written.st_mtime_ns
    content = small.read_bytes()
    damaged = bytearray(content[: int(len(content) * kept)])
    damaged[-1:] = b"" if not damaged else bytes([damaged[-1] ^ 1])
    small.write_bytes(damaged)
    again = compiled.build()
    assert again.read_bytes() != bytes(damaged)
    assert again.stat().st_size == written.st_size, "before it is loaded: a part of a library ends a process"
    assert ctypes.CDLL(str(again)).seven() == 7
    assert len(list(again.parent.glob("*.so"))) == 1


def test_without_a_compiler_or_room_nothing_is_built(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len([*compiled.levels()]) > 1
    monkeypatch.setenv("FLOWSPEC_CFLAGS", "-march=native -O1")
    assert [*compiled.levels()] == [("-march=native", "-O1")]
    monkeypatch.setattr(compiled, "ROOM_BYTES", 1 << 60)
    small.unlink()
    with pytest.raises(InputError, match=f"{small.parent} has room for "):
        compiled.build()
    compiled._compiler.cache_clear()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(InputError, match="once, and cannot here: no C compiler works there; install gcc"):
            compiled.build()
    finally:
        compiled._compiler.cache_clear()


# -------------------------------------------------------------------------------------- what a wheel brings


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Libraries as in a wheel, for a level that this processor lacks and for one that it has; nothing can be
    compiled."""
    folder = tmp_path / "built"
    monkeypatch.setattr(compiled, "WHEEL_FOLDER", folder)
    monkeypatch.setattr(compiled, "WHEEL", {platform.machine(): {"best": (), "least": ()}})
    monkeypatch.setattr(compiled, "levels", lambda: iter([("-march=0",)]))
    monkeypatch.setattr(compiled, "build", no_compiler)
    monkeypatch.delenv("FLOWSPEC_CFLAGS", raising=False)
    monkeypatch.setattr(engines, "_slowed_by", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder.mkdir()
    (folder / compiled.OPENMP).write_bytes(b"OpenMP")
    for level, made in (("best", shim("__builtin_trap();", tmp_path)), ("least", RIGHT)):
        shutil.copy(made, folder / "made.so")
        (folder / "made.so").rename(folder / f"{level}-{compiled._wheel_hash(folder / 'made.so')}.so")
    return folder


def no_compiler(*_unused: object) -> Path:
    raise InputError("no C compiler works there; install gcc")


def test_the_best_library_of_a_wheel_that_runs_here_is_used_without_a_compiler(
    wheel: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert prepare() == ""
    library = compiled.library()
    assert library is not None
    assert library.path.parent == wheel
    assert library.path.name.startswith("least-")
    assert caplog.text == "", "a level that is of other processors is no fault"


@pytest.mark.parametrize("name", ["least-*.so", compiled.OPENMP, "source"])
def test_a_damaged_or_old_wheel_is_named_and_not_loaded_until_it_is_installed_again(
    name: str, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "source":
        damaged = tmp_path / "canonical.c"
        shutil.copy(compiled.SOURCE, damaged)
        monkeypatch.setattr(compiled, "SOURCE", damaged)
    else:
        (damaged,) = wheel.glob(name)
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + b"?")
    told = r"least-\w+.so is damaged, or of another version; install FlowSpec's wheel again; no C compiler"
    with pytest.raises(InputError, match=told):
        prepare()
    damaged.write_bytes(whole)
    assert prepare() == ""


def test_where_flags_are_given_no_library_of_a_wheel_counts(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWSPEC_CFLAGS", "-O1")
    assert [name for name, *_ in compiled.libraries(lambda share: None)] == ["-march=0"]


def test_libraries_of_a_wheel_are_built_for_each_level_and_find_openmp_beside_them(
    small: Path, tmp_path: Path
) -> None:
    compiled.build_wheel(platform.machine(), folder := tmp_path / "made")
    names = {path.name.rpartition("-")[0] for path in folder.glob("*-*.so")}
    assert names == compiled.WHEEL[platform.machine()].keys()
    assert (folder / compiled.OPENMP).is_file()
    assert "GCC" in (folder / "LICENSE.libgomp").read_text("utf-8")
    for path in folder.glob("*-*.so"):
        assert path.stem.endswith(compiled._wheel_hash(path))
        assert b"$ORIGIN" in path.read_bytes()
