"""Every wrong input to the command ends with one clear line on standard error, an exit status, and no
traceback.

Status 2 is the user's input, 1 a cluster that does not come up. Usage errors of argparse show the usage
before the line. Flags are tried in this process, which spares fifty starts; each way in which a command can
refuse is also tried in a real one.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from gguf import GGMLQuantizationType

from flowspec.cli.main import main
from flowspec.errors import InputError
from flowspec.model.files import bundled_folder
from flowspec.model.text import Recommended
from flowspec.runtime import local
from flowspec.runtime.sampling_params import SamplingParams
from tests import warm
from tests.cli.starting import without_starting
from tests.ggufs import convert

NO_MODEL = "expected a model folder, a GGUF file or a hub id such as Qwen/Qwen3-0.6B, but the file"
COMMAND = [sys.executable, "-m", "flowspec.cli.main"]


def refusal(*args: str | bytes, status: int = 2, stdin: bytes = b"", home: Path | None = None) -> str:
    """Runs the command, which must fail with `status`; returns its one line."""
    if home is None:
        done = warm.run([*COMMAND, *args], input=stdin, capture_output=True, timeout=120)
    else:  # which huggingface_hub reads when it is imported
        environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_CACHE": str(home)}
        done = subprocess.run(
            [*COMMAND, *args], input=stdin, capture_output=True, timeout=120, env=environment, check=False
        )
    assert done.returncode == status, done.stderr.decode()
    assert done.stdout == b""
    return only_line(done.stderr.decode(), args[0] if isinstance(args[0], str) else args[0].decode())


def only_line(text: str, command: str) -> str:
    """The one line that a command has told, without the usage and its own name before it, and that it has
    begun, for what only the loaded model can tell."""
    lines = without_starting(text)
    if lines and lines[0].startswith("usage: "):
        while lines[0].startswith(("usage: ", " ")):
            lines.pop(0)
    assert len(lines) == 1, "\n".join(lines)
    assert lines[0].startswith(f"flowspec {command}: ")
    return lines[0].removeprefix(f"flowspec {command}: ").removeprefix("error: ")


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """As `refusal`, in this process and at the user's input; fails when the command starts a process."""

    def start(*args: object, **options: object) -> NoReturn:
        raise AssertionError(f"a process was started: {args}")

    def refusal(*args: str) -> str:
        try:
            status = main(list(args))
        except SystemExit as end:  # how argparse ends
            status = end.code
        told = capsys.readouterr()
        assert status == 2, told.err
        assert told.out == ""
        return only_line(told.err, args[0])

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(local, "start_pool", start)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield refusal
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["generate", "hi", "--layers", "4,4"], "--layers: expected 4 numbers, one for each device, got 2"),
        (["generate", "hi", "--layers", "3,1,2,1"], "--layers: 3+1+2+1 is 7, but the model has 8 layers"),
        (
            ["generate", "hi", "--layers", "8,0", "--local", "2"],
            "--layers: expected at least one layer for each device, got 8,0",
        ),
        (
            ["generate", "hi", "--layers", "a"],
            "argument --layers: expected numbers with commas, such as 3,1,2,2, got 'a'",
        ),
        (
            ["generate", "hi", "--local", "9"],
            "9 devices but only 8 layers: each device needs at least one; use fewer devices",
        ),
        (["generate", "hi", "--local", "0"], "argument --local: expected a whole number from 1, got '0'"),
        (
            ["generate", "hi", "--cluster", "x.toml", "--local", "2"],
            "argument --local: not allowed with argument --cluster",
        ),
        (
            ["generate", "hi", "--cluster", "/no/cluster.toml"],
            "/no/cluster.toml: expected a cluster file, but it cannot be read",
        ),
        (["generate", ""], "expected a prompt, got an empty one"),
        (["generate"], "expected a prompt, got an empty one"),
        (
            ["generate", "hi", "--prompt-token-ids", "1"],
            "expected one of PROMPT, --prompt, --prompt-token-ids and --prompts, got several",
        ),
        (
            ["generate", "hi", "--prompt", "hi"],
            "expected one of PROMPT, --prompt, --prompt-token-ids and --prompts, got several",
        ),
        (["generate", "-p", " "], "expected a prompt, got an empty one"),
        (["generate", "--prompt-token-ids", ""], "argument --prompt-token-ids: expected numbers with commas"),
        (["generate", "--prompt-token-ids", "1", "--stop", "x"], "--stop and --system need text"),
        (["generate", "hi", "--stop", ""], "--stop: expected a text, got an empty one"),
        (["generate", "hi", "--top-p", "0"], "--top-p: expected above 0 and at most 1, got 0.0"),
        (["generate", "hi", "--top-k", "-1"], "--top-k: expected 0 to"),
        (["generate", "hi", "--min-p", "1"], "--min-p: expected 0 or more and below 1, got 1.0"),
        (
            ["generate", "hi", "--temperature", "-1"],
            "--temperature: expected 0, or 0.001 to 100.0, got -1.0",
        ),
        (
            ["generate", "hi", "--temperature", "nan"],
            "--temperature: expected 0, or 0.001 to 100.0, got nan",
        ),
        *(
            (
                ["generate", "hi", "--seed", seed],
                "argument --seed: expected a whole number from -9223372036854775808 to 9223372036854775807, "
                f"got '{seed}'",
            )
            for seed in ("abc", "1.5", str(1 << 63))
        ),
        (
            ["generate", "hi", "--temperature", "warm"],
            "argument --temperature: expected a number, got 'warm'",
        ),
        (["generate", "What", "is", "17"], "expected one prompt, got 3 words; quote them: 'What is 17'"),
        (
            ["generate", "hi", "--max-new-tokens", "0"],
            "argument --max-new-tokens: expected a whole number from 1, got '0'",
        ),
        (
            ["generate", "hi", "--context", "-5"],
            "argument --context: expected a whole number from 1, got '-5'",
        ),
        (
            ["generate", "hi", "--dtype", "int3"],
            "argument --dtype: expected one of float32, ",
        ),
        (["chat", "--temperature", "inf"], "--temperature: expected 0, or 0.001 to 100.0, got inf"),
        (
            ["chat", "--model", "/no/model"],
            "expected a model folder, a GGUF file or a hub id such as Qwen/Qwen3-0.6B, but there is no "
            "folder '/no/model'",
        ),
        (["verify", "--local", "2,0"], "--local: expected whole numbers from 1"),
        (["verify", "--parallel", "1,0"], "--parallel: expected whole numbers from 1 to"),
        (
            ["verify", "--method", "cosine", "--chain", "auto"],
            "--chain goes with method specrouter, got cosine",
        ),
        (
            ["verify", "--layers", "4,4", "--local", "2,4"],
            "--layers forces the split of one cluster; expected one number for --local",
        ),
        (
            ["verify", "--temperatures", "0,nan"],
            "--temperatures: expected 0, or 0.001 to 100.0, got nan",
        ),
        (
            ["verify", "--prompts", "/no/prompts.jsonl"],
            "/no/prompts.jsonl: expected a file of prompts, but it cannot be read (No such file",
        ),
        (["daemon", "--device", "nonsense"], "--device: expected auto, cpu or cuda:N, got 'nonsense'"),
        (
            ["daemon", "--memory", "nonsense"],
            "--memory: expected a size such as 4GiB or 512MiB, got 'nonsense'",
        ),
        (
            ["daemon", "--cache-limit", "plenty"],
            "--cache-limit: expected a size such as 4GiB or 512MiB, got 'plenty'",
        ),
        (["daemon", "--cache-dir", __file__], f"--cache-dir: expected a folder, got the file {__file__}"),
        (["daemon", "--port", "65536"], "--port: expected 0 to 65535, got 65536"),
        (["daemon", "--threads", "0"], "--threads: expected 1 or more, got 0"),
        (["daemon", "--name", "n" * 201], "--name: expected 1 to 200 characters, got 201"),
        (
            ["generate", "--modell", "x", "hi"],
            "unrecognized argument --modell; did you mean --model? (see flowspec generate --help)",
        ),
        (
            ["generate", "--local=2", "--threads=1", "hi"],
            "unrecognized argument --threads: flowspec daemon has it; each process of --local has one thread",
        ),
        (
            ["generate", "a", "prompt"],
            "expected one prompt, got 2 words; quote them: 'a prompt' (see flowspec generate --help)",
        ),
        (
            ["generate", "--model", __file__, "hi"],
            f"{NO_MODEL} {__file__!r} is no model",
        ),
        (
            ["plan", "--model", __file__, "--devices", "raspberry-pi-5"],
            f"{NO_MODEL} {__file__!r} is no model",
        ),
        (
            ["generate", "--drafter", __file__, "--local=1", "hi"],
            "--drafter: expected bundled, ",
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_refused_before_anything_is_started(
    refused: Callable[..., str], args: list[str], expected: str
) -> None:
    assert refused(*args).startswith(expected)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["generate", "hi", "--layers", "a"],
            "argument --layers: expected numbers with commas, such as 3,1,2,2, got 'a'",
        ),
        (["generate"], "expected a prompt, got an empty one"),
        (
            ["generate", "hi", "--local", "9"],
            "9 devices but only 8 layers: each device needs at least one; use fewer devices",
        ),
        (
            ["generate", "hi", "--log-file", "/no/folder/log"],
            "--log-file: expected a file that can be written, got /no/folder/log",
        ),
        (["chat", "--temperature", "inf"], "--temperature: expected 0, or 0.001 to 100.0, got inf"),
        (["verify", "--local", "2,0"], "--local: expected whole numbers from 1"),
        (
            ["daemon", "--host", "no.such.host.invalid"],
            "--host: expected an address of this machine, got 'no.such.host.invalid'",
        ),
        (["daemon", "--host", ""], "--host: expected an address of this machine, got an empty one"),
        (["daemon", "--threads", "0"], "--threads: expected 1 or more, got 0"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_real_command_refuses_with_a_line_and_a_status(args: list[str], expected: str) -> None:
    assert refusal(*args).startswith(expected)


def test_a_command_that_is_none_is_refused() -> None:
    done = subprocess.run([*COMMAND, "fly"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("flowspec: there is no command 'fly'")


@pytest.mark.parametrize(
    ("args", "stdin"),
    [((b"a\xff",), b""), ((), b"a\xff"), ((b"-",), b"a\xff")],
    ids=["argument", "stdin", "dash"],
)
def test_a_prompt_that_is_not_utf8_is_refused(args: tuple[bytes, ...], stdin: bytes) -> None:
    assert refusal("generate", *args, stdin=stdin) == "expected text in UTF-8, got bytes that are none"


def make_model(folder: Path, **config: object) -> Path:
    """The bundled model with another config."""
    folder.mkdir()
    for path in bundled_folder("target").iterdir():
        if path.name != "config.json":
            shutil.copy(path, folder)
    own = json.loads((bundled_folder("target") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, **config}))
    return folder


def test_a_model_that_cannot_be_used_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    half = make_model(tmp_path / "half")
    (half / "model.safetensors").unlink()
    cut = make_model(tmp_path / "cut")
    (cut / "model.safetensors").unlink()
    (cut / "model.safetensors").write_bytes(
        (bundled_folder("target") / "model.safetensors").read_bytes()[:-100]
    )
    strange = make_model(tmp_path / "strange", model_type="gpt2")
    file = convert(bundled_folder("draft"), tmp_path / "file.gguf", GGMLQuantizationType.Q8_0)
    content = bytearray(file.read_bytes())
    (tmp_path / "cut.gguf").write_bytes(content[:-100])
    name = b"blk.0.ffn_up.weight"
    struct.pack_into("<I", content, content.index(name) + len(name) + struct.calcsize("<IQQ"), 99)
    (tmp_path / "new.gguf").write_bytes(content)
    for model, expected in (
        (str(tmp_path / "absent"), "expected a model folder, a GGUF file or a hub id"),
        (str(empty), "has no config.json"),
        (str(half), "has no model.safetensors"),
        (str(cut), "is incomplete: expected"),
        (str(strange), "is of the family 'gpt2', but FlowSpec runs gemma2"),
        (str(tmp_path / "cut.gguf"), "is incomplete: expected"),
        (str(tmp_path / "new.gguf"), "tensor blk.0.ffn_up.weight is of type 99, which the gguf package"),
        (
            "owner/absent",
            "config.json of 'owner/absent' is not in the Hugging Face cache, and offline mode is on",
        ),
    ):
        assert expected in refusal("generate", "hi", "--model", model, home=tmp_path / "home")


def test_a_model_that_transformers_refuses_is_one_line(tmp_path: Path) -> None:
    """Found while the local processes come up, which end with the command."""
    model = make_model(tmp_path / "odd", rms_norm_eps="small")
    assert "cannot read the config.json of" in refusal(
        "generate", "hi", "--local", "1", "--model", str(model)
    )


def test_a_broken_cluster_file_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    for content, expected in (
        ("[[device]", "expected TOML, got "),
        (
            '[[device]]\naddress = "host"',
            "device 1: address: expected an address host:port with a port from 1 to 65535, as in "
            "192.168.1.21:7700, got 'host'",
        ),
        (
            '[[device]]\naddress = "http://192.0.2.1:7700"',
            "expected an address host:port with a port from 1 to 65535, as in 192.168.1.21:7700, got "
            "'http://192.0.2.1:7700'",
        ),
        (
            '[[device]]\naddress = "a:1"\nlayers = [0, 7]',
            "the devices hold 7 layers together, but the model has 8",
        ),
    ):
        path.write_text(content)
        assert expected in refused("generate", "hi", "--cluster", str(path))


def test_broken_prompt_files_are_named_with_their_line(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for content, expected in (
        ("", f"{path}: expected at least one prompt, got an empty file"),
        ('{"turns": ["good"]}\n{"turns": [', f'{path} line 2: expected {{"turns": ["..."]}}'),
        ('{"turns": []}', f"{path} line 1: "),
        ("[]", f"{path} line 1: "),
    ):
        path.write_text(content)
        assert refused("verify", "--prompts", str(path)).startswith(expected)
    path.write_bytes(b"\xff")
    assert "cannot be read" in refused("verify", "--prompts", str(path))


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refusal("daemon", "--port", str(port)) == (
            f"port {port} on 127.0.0.1 is taken; stop what uses it or choose another with --port"
        )


def test_an_address_of_another_machine_is_refused_with_those_of_this_one() -> None:
    assert refusal("daemon", "--keys=/no/keys", "--host", "203.0.113.7").startswith("--host: ")
    told = refusal("daemon", "--insecure", "--host", "203.0.113.7")
    assert told.startswith("--host: 203.0.113.7 is no address of this machine, which has 127.0.0.1")


def test_a_prompt_or_context_that_does_not_fit_the_model() -> None:
    local = ("--local", "1")
    assert (
        refusal("generate", "--prompt-token-ids", "1,4096", *local)
        == "prompt token ids: expected 0 to 4095, got 4096"
    )
    assert "the prompt has 5 tokens, but the context holds 5" in refusal(
        "generate", "--prompt-token-ids", "1,5,6,7,8", "--context", "5", *local
    )
    assert (
        refusal("generate", "hi", "--context", "1025", *local)
        == "--context: expected 2 to 1024, the model's limit, got 1025"
    )


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        (["a " * 3000], ": the model has no more"),
        (["word " * 12, "--context=5"], ", or raise --context, to 1024 at most"),
        (["--prompt-token-ids=1,5,6", "--context=3"], ", or raise --context, to 1024 at most"),
    ],
    ids=range(3),
)
def test_a_prompt_that_is_too_long_is_refused_before_anything_starts(
    refused: Callable[..., str], flags: list[str], more: str
) -> None:
    told = refused("generate", *flags)
    expected = r"the prompt has \d+ tokens, but the context holds \d+ with the answer; shorten the prompt"
    assert re.fullmatch(expected + re.escape(more), told)


def test_a_daemon_that_is_not_there_is_a_cluster_failure(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets this port
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        path = tmp_path / "cluster.toml"
        path.write_text(f'[[device]]\nname = "gone"\naddress = "{address}"\n')
        line = refusal("generate", "hi", "--cluster", str(path), status=1)
    assert "gone" in line
    assert address in line


def test_a_temperature_that_no_float_holds_is_one_line() -> None:
    with pytest.raises(InputError, match="sampling: int too large"):
        SamplingParams().sampling(Recommended(stop_ids=frozenset(), sampling={"temperature": 10**400}))
