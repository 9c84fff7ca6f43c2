"""Kernels are tried before they are used: what is wrong, dies or hangs is noticed, and the next one takes its
place."""

from __future__ import annotations

import ast
import ctypes
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowspec.child_process import python_module
from flowspec.errors import InputError
from flowspec.folders import locked, write_own
from flowspec.model import kernel_checks, kernels, trials
from flowspec.model.arithmetic import build, plain
from flowspec.model.arithmetic.operations import Sight
from flowspec.model.attention import TreeRows
from flowspec.model.kernels import DIGITS, Kernel, kernels_of, packing_of
from flowspec.model.products import row_by_row
from flowspec.model.program import CODES
from flowspec.model.quantised import QuantisedLinear
from flowspec.model.trials import ATTENTION, COMPILED, Trial, TrialVerdict, run_trial
from tests import warm
from tests.model.broken_kernels import (
    OffInOneScale,
    RightForTheFirstRowCount,
    RowsTogether,
    WithoutSecondDigit,
)
from tests.model.slices import CPU

DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
NEVER = ["/does/not/exist"]
"""A command that nobody starts."""


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without one: nothing is built of `canonical.c`, and what was is not used."""
    monkeypatch.setattr(build, "build", lambda *_: None)
    monkeypatch.setattr(build, "_allowed", None)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found here of broken kernels is not for other tests. Children that are modules start warm."""

    def start(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        is_module = words[1:2] == ["-m"]
        return (warm.Popen if is_module else subprocess.Popen)(words, **options)

    names = {"Popen": start, "DEVNULL": subprocess.DEVNULL, "PIPE": subprocess.PIPE}
    monkeypatch.setattr(trials, "subprocess", SimpleNamespace(**names))
    monkeypatch.setattr(trials, "CHILD", (sys.executable, "-m", "flowspec.model.kernel_checks"))
    monkeypatch.setattr(trials, "_found", {})


without_compiler = pytest.mark.usefixtures("no_compiler")


@pytest.mark.arm
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_each_arithmetic_a_right_kernel_is_found_and_named(dtype: str) -> None:
    found = run_trial(dtype, "cpu")
    stated = {kernel.name: kernel for kernel in kernels_of(dtype, CPU)}
    judged = [verdict for verdict in found.verdicts if verdict.kernel in (ATTENTION, COMPILED)]
    assert judged[-1] == TrialVerdict(kernel=ATTENTION, fault="")
    assert not any(verdict.fault for verdict in judged)
    assert found.right[0].kernel == found.kernel
    assert packing_of(dtype, CPU) is stated[found.kernel].linear
    right = [verdict.kernel for verdict in found.right]
    assert len({stated[name].arithmetic for name in right}) == len(right), "one of each is enough"
    for verdict in found.right:
        name, rest = verdict.arithmetic, stated[verdict.kernel].arithmetic
        assert name == rest if "@" not in name else re.fullmatch(re.escape(rest) + "-[0-9a-f]{8}", name)
        assert packing_of(dtype, CPU, name) is stated[verdict.kernel].linear
    if dtype == "int8":
        assert {kernel.arithmetic for kernel in stated.values()} == {*found.arithmetics} == {DIGITS}
    with pytest.raises(InputError, match=f"the arithmetic other of {dtype}, .* has {found.arithmetics[0]}"):
        packing_of(dtype, CPU, "other")


@without_compiler
@pytest.mark.arm
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_kernels_which_need_least_are_right(dtype: str) -> None:
    kernel, signs = kernels_of(dtype, CPU)[-1], list[None]()
    assert kernel_checks.linear_fault(dtype, kernel, CPU, lambda: signs.append(None)) == ""
    assert len(signs) == kernel_checks.linear_steps(kernel, CPU), "how far it is is told by that"


@without_compiler
@pytest.mark.arm
def test_float32_is_right_in_a_process_that_may_use_all_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenBLAS on ARM gives a row other bits then; tests have one thread else. It starts cold, as in use."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = python_module("flowspec.model.kernel_checks")
    assert run_trial("float32", "cpu", folder=tmp_path, command=command).kernel in (
        "torch",
        "torch-row-by-row",
    )


@pytest.mark.arm
@pytest.mark.parametrize(
    ("linear", "fault"),
    [
        (RightForTheFirstRowCount, "computes something else than it should for 32 rows of 64 x 48"),
        (
            OffInOneScale,
            "computes something else than it should for 32 rows of 64 x 48 with 1 threads: off by",
        ),
        (WithoutSecondDigit, "computes something else than it should for 32 rows of 64 x 48"),
        (RowsTogether, "makes a row depend on the rows beside it for 1 rows of 64 x 48"),
    ],
)
def test_what_is_wrong_with_a_kernel_is_found(linear: type[QuantisedLinear], fault: str) -> None:
    found = kernel_checks.linear_fault("int8", Kernel(name="broken", linear=linear, arithmetic=DIGITS), CPU)
    assert found.startswith(fault), found


@pytest.mark.arm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_that_adds_up_many_rows_in_another_order_is_found(dtype: str) -> None:
    """As oneDNN's do in tiles of AMX, where rounding to bfloat16 hides it nearly always."""

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x, weight = (each.flip(1) if len(x) > 32 else each for each in (x.float(), weight.float()))
        return row_by_row(x, weight, bias).to(getattr(torch, dtype))

    found = kernel_checks.linear_fault(dtype, Kernel(name="tiles", product=product, arithmetic="tiles"), CPU)
    assert found == "makes a row depend on 129 that run, 1536 x 576, with 1 threads"


@without_compiler
@pytest.mark.parametrize("digits", [10, 7])
def test_float32_that_is_computed_with_fewer_digits_is_found(
    digits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TF32 (10 digits) does on GPUs, and oneDNN with bfloat16 (7) on some ARM processors, where they are
    switched on."""
    kernels = kernels_of("float32", CPU)
    right = torch.nn.functional.linear

    def cut(values: torch.Tensor) -> torch.Tensor:
        return (values.view(torch.int32) & -(1 << (23 - digits))).view(torch.float32)

    monkeypatch.setattr(
        "torch.nn.functional.linear", lambda rows, weight, bias: right(cut(rows), cut(weight), bias)
    )
    for kernel in kernels:
        found = kernel_checks.linear_fault("float32", kernel, CPU)
        assert found.startswith("computes something else than it should for 32 rows of 64 x 48"), found


def test_attention_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    signs: list[None] = []
    assert kernel_checks.attention_fault("bfloat16", CPU, lambda: signs.append(None)) == ""
    assert len(signs) == kernel_checks.attention_steps(CPU)

    def all_of_it(rows: TreeRows, window: int | None) -> Sight:
        return Sight(torch.ones_like(rows.visible), rows.key_positions)

    monkeypatch.setattr(TreeRows, "sight", all_of_it)
    assert kernel_checks.attention_fault("bfloat16", CPU).startswith("is wrong for")


LASTING = {
    "wrong": "computes something else than it should for 32 rows of 64 x 48",
    "sigill": "ran an instruction that this processor does not have",
    "sigsegv": "ended by SIGSEGV",
    "raise": "fails: unknown architecure",
    "exit": "ended with status 3",
}
PASSING = {
    "hang": "gave no sign of life for 5 s",
    "memory": "fails: CUDA out of memory",
    "sigkill": "ended by SIGKILL, as where memory runs out",
}
"""A machine that is busy, or has no memory left, must not cost the better kernel for good."""


@without_compiler
@pytest.mark.parametrize("faults", [LASTING, PASSING], ids=["lasting", "passing"])
def test_the_next_kernel_takes_the_place_of_one_that_is_broken(
    faults: dict[str, str], tmp_path: Path
) -> None:
    shares: list[float] = []
    command = [sys.executable, "-m", "tests.model.broken_kernels", ",".join(faults)]
    found = run_trial("int8", "cpu", shares.append, folder=tmp_path, command=command, limit_s=5)
    assert [verdict.kernel for verdict in found.verdicts] == [ATTENTION, *faults, "plain"]
    assert found.kernel == "plain"
    assert found.detour.startswith("int8 with torch ")
    for how, verdict in zip(faults, found.verdicts[1:], strict=False):
        assert verdict.fault.startswith(faults[how])
        assert f"{how} {faults[how]}" in found.detour
    assert len(list((tmp_path / "kernels").glob("*.json"))) == (faults is LASTING)
    assert shares == sorted(shares), "it never goes back"
    assert len(set(shares)) > 10, "it goes on within a kernel"
    core = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    if core.exists():  # as in torch's own builds
        assert found.libraries[str(core.resolve())] == [core.stat().st_size, core.stat().st_mtime_ns]


def script(*lines: str) -> list[str]:
    """A child that says what these lines do; `judged` is what it is told of kernels before."""
    say = "def say(**word): print(json.dumps(word), flush=True)"
    return [sys.executable, "-c", "\n".join(["import json, os, sys", say, "judged = sys.argv[3:]", *lines])]


RIGHT = script("say(at='first', share=0.2)", "say(fault='', arithmetic='a')", "say(done=True, libraries={})")


@without_compiler
def test_after_an_error_of_cuda_a_new_process_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(dtype: str, device: torch.device, progress: Callable[[], None]) -> str:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(kernel_checks, "attention_fault", fail)
    for device, words in (
        ("cpu", ["at", "fault", "at", "fault", "at", "fault", "done"]),
        ("meta", ["at", "fault", "again"]),
    ):
        monkeypatch.setattr(sys, "argv", ["checks", "float32", device])
        kernel_checks.main()
        lines = map(json.loads, capsys.readouterr().out.splitlines())
        said = [word for word in lines if word.keys() != {"share"}]  # a sign of life alone
        assert [next(iter(word)) for word in said] == words
        assert said[1]["fault"].startswith("fails: CUDA error: an illegal")


@without_compiler
def test_bits_of_another_processor_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is computed differs, the name does, though processor and torch call themselves the same."""
    kernel = kernels_of("float32", CPU)[-1]  # right on every processor
    right = torch.nn.functional.linear
    names = []
    for change in (lambda found: found, lambda found: found, lambda found: torch.nextafter(found, found + 1)):
        monkeypatch.setattr("torch.nn.functional.linear", lambda *given, change=change: change(right(*given)))
        bits = hashlib.sha256()
        assert kernel_checks.linear_fault("float32", kernel, CPU, bits=bits) == ""
        names.append(kernel_checks.named(kernel, bits))
    assert names[0] == names[1] != names[2]


GOES_ON = script(
    "print('onednn_verbose,info,cpu')",  # as libraries do that are asked to
    "print(7)",
    "for name, arithmetic in (('first', 'a'), ('second', 'b'), ('third', 'a'), ('fourth', 'c')):",
    "    if f'--skip={name}' in judged or f'--right={name}' in judged:",
    "        continue",
    "    if arithmetic == 'a' and '--right=first' in judged:",
    "        continue",
    "    say(at=name, share=0.2)",
    "    if name == 'second':",
    "        sys.exit(3)",
    "    say(fault='', arithmetic=arithmetic)",
    "    if name == 'first':",
    "        say(again=True)",
    "        sys.exit()",
    "say(done=True)",
)


@without_compiler
def test_what_a_child_found_right_before_another_died_still_counts(tmp_path: Path) -> None:
    found = run_trial("int8", "cpu", folder=tmp_path, command=GOES_ON)
    assert [(verdict.kernel, verdict.fault) for verdict in found.verdicts] == [
        ("first", ""),
        ("second", "ended with status 3"),
        ("fourth", ""),
    ]
    assert (found.kernel, found.arithmetics, found.faults) == ("first", ("a", "c"), "")
    assert found.kernel_of("c") == "fourth"
    assert run_trial("int8", "cpu", folder=tmp_path, command=NEVER) == found


@without_compiler
def test_who_waits_sees_what_is_tried_and_what_names_no_kernel_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "build", lambda tell: tell(0.0))
    seen: list[tuple[str, float]] = []
    with trials.shown_to(lambda *word: seen.append(word)):
        run_trial("int8", "cpu", command=RIGHT)
    assert (seen[0], seen[-1]) == (("compiling kernels", 0.0), ("trying kernels", 1.0))
    monkeypatch.setattr(trials, "CHILD", script("say(at='plain')", "say(fault='')", "say(done=True)"))
    assert packing_of("int8", CPU) is kernels_of("int8", CPU)[-1].linear
    assert "(it is damaged), and is made anew" in caplog.text


@without_compiler
def test_what_was_found_is_kept_for_this_processor_and_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_trial("int8", "cpu", folder=tmp_path, command=RIGHT)
    assert run_trial("int8", "cpu", folder=tmp_path, command=NEVER) == first
    (path,) = (tmp_path / "kernels").glob("int8-*.json")
    kept = path.read_text()
    for damaged in (
        "{",
        kept.replace('"first"', '"other"'),
        kept.replace("lib", "li\\u0000", 1),
        "[" * 100_000,
    ):
        assert damaged != kept
        path.write_text(damaged)
        with pytest.raises(FileNotFoundError):
            run_trial("int8", "cpu", folder=tmp_path, command=NEVER)
    write_own(path, {**json.loads(kept)["content"], "libraries": {"a\0b": []}})
    with pytest.raises(FileNotFoundError):
        run_trial("int8", "cpu", folder=tmp_path, command=NEVER)
    path.unlink()
    os.mkfifo(path)
    run_trial("int8", "cpu", folder=tmp_path, command=RIGHT)
    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        *(
            lambda patch, name=name: patch.setattr(trials, name, lambda: "another")
            for name in ("_processor_block", "_torch_build", "_code")
        ),
        *(
            lambda patch, name=name: patch.setenv(name, "another")
            for name in ("ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE", "LD_LIBRARY_PATH")
        ),
    ]
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(FileNotFoundError):
                run_trial("int8", "cpu", folder=tmp_path, command=NEVER)
    assert run_trial("int8", "cpu", folder=tmp_path, command=NEVER) == first
    # A torch of a Jetson computes with libraries of the system, which an upgrade replaces.
    library = tmp_path / "libblas.so.3"
    library.write_text("one")
    content = json.loads(path.read_text())["content"]
    for stamp, is_found in ((trials._stamp(str(library)), True), ([2, 0], False)):
        write_own(path, {**content, "libraries": {str(library): stamp}})
        assert (trials._kept(path, "int8", "cpu") is not None) == is_found
    library.unlink()
    assert trials._kept(path, "int8", "cpu") is None


@pytest.mark.parametrize(
    ("has", "names"),
    [
        ("", "torch plain"),
        ("fbgemm", "fbgemm torch plain"),
        ("fbgemm instructions", "torch plain"),
        ("fbgemm instructions products", "torch plain"),
        ("library fbgemm", "lanes16 fbgemm torch plain"),
        ("library pairs", "lanes16 torch plain"),
        ("library instructions products", "torch lanes16 plain"),
        ("library pairs instructions products", "pairs16 torch lanes16 plain"),
        ("library pairs instructions products tiles", "pairs16 lanes16 plain"),
    ],
)
def test_the_order_in_which_kernels_are_tried(has: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the processor, torch and the compiler have."""
    there = has.split()
    library = SimpleNamespace(has_pairs="pairs" in there) if "library" in there else None
    monkeypatch.setattr("flowspec.model.kernels.compiled.library", lambda: library)
    monkeypatch.setattr(kernels, "_engines", lambda: there)
    for name in ("tiles", "products", "instructions"):
        monkeypatch.setattr(kernels, f"has_{name}", lambda dtype, is_there=name in there: is_there)
    assert [kernel.name for kernel in kernels_of("bfloat16", CPU)] == names.split()
    assert "pairs16" not in [kernel.name for kernel in kernels_of("float16", CPU)]
    assert kernels_of("float32", CPU)[0].name == ("lanes16" if library else "torch")


def test_all_code_that_is_tried_counts() -> None:
    """`trials.CODE` names what the checks import of the model, but for what gives them names alone."""
    imported = {"trials"}
    for module in (kernel_checks, kernels):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flowspec.model."):
                last = str(node.module).rpartition(".")[2]
                imported |= {name.name for name in node.names} if last == "arithmetic" else {last}
    code = {name.rpartition("/")[2] for name in trials.CODE}
    assert imported ^ code == {"device_errors", "kernel_checks", "arrays"}


@without_compiler
def test_whoever_waits_for_a_trial_of_another_process_says_so(tmp_path: Path) -> None:
    class Ended(Exception):
        pass

    def tell(share: float) -> None:
        raise Ended

    path = tmp_path / "kernels" / f"{trials._key('int8', 'cpu', None)}.json"
    with locked(path), pytest.raises(Ended):
        run_trial("int8", "cpu", tell, folder=tmp_path, command=NEVER)


def test_what_was_found_on_a_gpu_is_of_that_gpu_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    information.parent.mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: 540.3.0\n")
    keys = set()
    for text in ("Model: Orin\nIRQ: 7\n", "Model: Orin\nIRQ: 8\n", "Model: Thor\n"):
        information.write_text(text)
        told = trials._driver(tmp_path)
        assert told.startswith("NVRM version: 540.3.0\nModel: ")
        monkeypatch.setattr(trials, "_driver", lambda told=told: told)
        keys |= {trials._key("int8", "cuda:0", None), trials._key("int8", "cpu", None)}
        monkeypatch.undo()
    assert len(keys) == 3, "two GPUs, and the CPU, which has no driver"


@without_compiler
def test_a_precision_without_a_right_kernel_is_refused_in_a_line(tmp_path: Path) -> None:
    wrong = script("say(at='wrong')", "say(fault='computes something else')", "say(done=True)")
    told = r"int8 does not run right on cpu with torch .*: wrong computes .*; use another --dtype"
    with pytest.raises(InputError, match=told) as refusal:
        run_trial("int8", "cpu", folder=tmp_path, command=wrong)
    assert "\n" not in str(refusal.value)
    trial = Trial(
        dtype="int8",
        device="cpu",
        verdicts=(TrialVerdict(kernel=ATTENTION, fault="is wrong"), TrialVerdict(kernel="plain", fault="")),
    )
    assert trial.kernel == "", "nothing takes attention's place"


DIED = "os.kill(os.getpid(), {})"
FAILS = "raise ImportError('libcudnn.so.9: cannot open shared object file')"


@without_compiler
@pytest.mark.parametrize(
    ("code", "told"),
    [
        (DIED.format(int(signal.SIGILL)), "instruction that this processor does not have; install"),
        (DIED.format(int(signal.SIGKILL)), "memory: free some"),
        ("raise MemoryError", "memory: free some"),
        (FAILS, r"status 1: ImportError: libcudnn\.so\.9: cannot open .*; install"),
    ],
)
def test_why_torch_cannot_be_imported_is_told(
    code: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=rf"torch .* cannot be imported on .*: .* {told}"):
        run_trial("float32", "cpu", folder=tmp_path, command=script(code))
    assert capfd.readouterr().err == "", "a line is enough"


def test_a_child_whose_parent_is_gone_does_not_hang_for_ever() -> None:
    code = "from flowspec.model import kernel_checks as checks; import time; "
    code += "checks.TRIAL_S = 0.5; checks._say(at=''); time.sleep(600)"
    done = warm.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=120)
    assert done.returncode == -signal.SIGALRM


def test_a_machine_that_is_too_slow_to_import_torch_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "IMPORT_S", 0.6)
    monkeypatch.setattr(trials, "TELL_S", 0.1)
    told = r"gave no sign of life for 1 s, while it imported torch .*; try again when it is less busy"
    with pytest.raises(InputError, match=told):
        run_trial("float32", "cpu", folder=tmp_path, command=script("import time; time.sleep(60)"))


# ------------------------------------------------------------------------------ what is built of canonical.c


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was built of it, which is used."""
    found = build.build()
    assert found is not None, "the suite needs a C compiler, and that it ends in time"
    monkeypatch.setattr(build, "_allowed", found)
    return found


def test_what_is_built_gives_the_bits_of_the_definitions(built: Path) -> None:
    signs: list[None] = []
    assert kernel_checks.compiled_fault(lambda: signs.append(None)) == ""
    assert len(signs) == kernel_checks.compiled_steps()


@pytest.mark.parametrize(
    "name", ["exp", "halves_sum", "tanh", "delta_rule", "product", "softmax", "over_their_sum"]
)
def test_what_is_built_of_another_definition_is_found(
    name: str, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(plain, name)
    monkeypatch.setattr(plain, name, lambda *x: torch.nextafter(right(*x), torch.ones(())))
    assert kernel_checks.compiled_fault().startswith("differs from the definition of")


def test_rare_numbers_are_tried_where_vectors_are_computed_together(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = plain.FUNCTIONS["silu"]
    for number in (-0.0, 1e-40, -86.1, 89.0, float("inf"), float("nan")):

        def other(x: torch.Tensor, number: float = number) -> torch.Tensor:
            found, rare = right(x), torch.tensor(number)
            is_it = x.isnan() if number != number else x.view(torch.int32) == rare.view(torch.int32)
            is_it[64:] = False
            return torch.where(is_it, 7.0, found)

        monkeypatch.setitem(plain.FUNCTIONS, "silu", other)
        assert kernel_checks.compiled_fault() == "differs from the definition of silu in float32", number


def test_attention_is_tried_with_more_rows_than_share_what_they_see(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = plain.attention

    def other(*given: Any) -> torch.Tensor:
        found = right(*given)
        found[16:] = torch.nextafter(found[16:], torch.ones(()))
        return found

    monkeypatch.setattr(plain, "attention", other)
    assert kernel_checks.compiled_fault().startswith("differs from the definition of attention")
    monkeypatch.undo()
    broken = {**CODES, "gate": CODES["copy"]}
    monkeypatch.setattr("flowspec.model.program.CODES", broken)
    assert kernel_checks.compiled_fault().startswith("differs from the definition of a layer of 1 rows")


ILLEGAL = """
#if defined(__x86_64__)
__attribute__((constructor)) static void f(void) { __asm__("ud2"); }
#else
__attribute__((constructor)) static void f(void) { __asm__(".inst 0"); }
#endif
"""
"""An instruction that no processor has."""


@pytest.mark.parametrize(
    ("source", "fault"),
    [("", "cannot be loaded"), (ILLEGAL, "ran an instruction that this processor does not have")],
)
def test_what_does_not_run_here_is_left_and_told(
    source: str, fault: str, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "canonical-0.so"
    broken.write_text("no library")
    if source:
        broken = small_build(source, tmp_path, monkeypatch)
    monkeypatch.setattr(build, "build", lambda *_: broken)
    monkeypatch.setattr(build, "_allowed", None)
    found = run_trial("int8", "cpu", folder=tmp_path)
    assert found.verdicts[0].kernel == COMPILED
    assert found.verdicts[0].fault.startswith(fault)
    assert found.detour
    assert build.allowed() is None


def small_build(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Builds this source instead, in an empty cache."""
    monkeypatch.setattr(build, "SOURCE", folder / "small.c")
    build.SOURCE.write_text(source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    found = build.build()
    assert found is not None
    return found


@pytest.mark.parametrize("kept", [0, 0.5, 1])
def test_what_was_damaged_in_the_cache_is_built_again(
    kept: float, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a power cut: nothing, a part, or as many bytes as before, of which one is another."""
    whole = small_build("int seven(void) { return 7; }", tmp_path, monkeypatch)
    written = whole.stat()
    assert build.build() == whole, "what is whole stays"
    assert whole.stat().st_mtime_ns == written.st_mtime_ns
    content = whole.read_bytes()
    damaged = bytearray(content[: int(len(content) * kept)])
    damaged[-1:] = b"" if not damaged else bytes([damaged[-1] ^ 1])
    whole.write_bytes(damaged)
    again = build.build()
    assert again is not None
    assert again.read_bytes() != bytes(damaged)
    assert again.stat().st_size == written.st_size, "before it is loaded: a part of a library ends a process"
    assert ctypes.CDLL(str(again)).seven() == 7
    assert len(list(again.parent.glob("*.so"))) == 1


@without_compiler
def test_without_what_is_built_a_line_says_what_is_missing(tmp_path: Path) -> None:
    found = run_trial("int8", "cpu", folder=tmp_path, command=RIGHT)
    assert found.detour.endswith(f"is used, for the faster library is not built ({build.why_not()})")
    assert run_trial("int8", "cpu", folder=tmp_path, command=NEVER).detour == found.detour, (
        "and when it is known already"
    )


def test_without_a_compiler_nothing_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build._compiler.cache_clear()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        assert build.build() is None
    finally:
        build._compiler.cache_clear()
