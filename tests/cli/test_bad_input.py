"""Every wrong input to a command ends with one clear line on standard error, a status and no traceback.

Status 2 is the user's input, 1 a cluster that does not come up. What a line must name is a flag, a value, a
path or a number. Commands run in this process; each way to refuse is also tried in one of its own.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from flowspec import extras
from flowspec.bench.records import RESULTS
from flowspec.errors import InputError
from flowspec.model.files import bundled_folder
from flowspec.model.text import Recommended
from flowspec.runtime import timeouts
from flowspec.runtime.journal.file import Journal
from flowspec.runtime.sampling_params import SamplingParams
from tests import warm
from tests.bench.benches import TOML
from tests.checkpoints import SMALL, make_checkpoint
from tests.cli.journals import ENTRY, setting
from tests.cli.running import FLOWSPEC, Run, real
from tests.ggufs import convert

DEVICE = '[[device]]\naddress = "{}"\n'
FILES = {
    "empty.toml": "",
    "broken.toml": "[[device]",
    "no-port.toml": DEVICE.format("host"),
    "url.toml": DEVICE.format("http://192.0.2.1:7700"),
    "seven.toml": DEVICE.format("a:1") + "layers = [0, 7]",
    "board.toml": DEVICE.format("a:1") + 'name = "pi"\nprofile = "pi5"',
    "suffix.toml": DEVICE.format("127.0.0.1:9") + '[[drafter]]\nmodel = "suffix"\ndevice = "head"\n',
    "pi-9.toml": DEVICE.format("a:1") + '[[drafter]]\nmodel = "mid"\ndevice = "pi-9"\n',
    "empty.jsonl": "",
    "half.jsonl": '{"turns": ["good"]}\n{"turns": [',
    "no-turns.jsonl": '{"turns": []}',
    "list.jsonl": "[]",
    "tiny.toml": TOML,
    "key": "secret-key\n",
    "words.key": "two words here\n",
    "none.journal": "nothing of the kind\n",
}
LONG = {
    "long": "a " * 3000,
    "words": "word " * 12,
    "name": "n" * 201,
    "many": ",".join(f"d{number}" for number in range(17)),
}
TABLE = Path(__file__).parents[1] / "data" / "wrong_input.txt"
ROWS = [line.split(" => ") for line in TABLE.read_text().splitlines() if not line.startswith("#")]


def make_model(folder: Path, cut_bytes: int = 0, **config: object) -> None:
    """The bundled model with another config, or less of its weights."""
    shutil.copytree(bundled_folder("target"), folder)
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**own, **config}))
    if cut_bytes:
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(weights[:-cut_bytes])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the rows name."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, content in FILES.items():
        (folder / name).write_text(content)
    (folder / "key").chmod(0o644)
    (folder / "words.key").chmod(0o600)
    (folder / "no-utf8.jsonl").write_bytes(b"\xff")
    (folder / "text").write_text("no model")
    (folder / "no-config").mkdir()
    make_model(folder / "no-weights")
    (folder / "no-weights/model.safetensors").unlink()
    make_model(folder / "no-tokenizer")
    (folder / "no-tokenizer/tokenizer.json").unlink()
    make_model(folder / "no-template")
    (folder / "no-template/chat_template.jinja").unlink()
    make_model(folder / "cut", cut_bytes=100)
    make_model(folder / "gpt2", model_type="gpt2")
    make_checkpoint(folder / "other", "llama", {**SMALL, "num_hidden_layers": 1})
    packed = bytearray(
        convert(bundled_folder("draft"), folder / "cut.gguf", GGMLQuantizationType.Q8_0).read_bytes()
    )
    (folder / "cut.gguf").write_bytes(packed[:-100])
    tensor = b"blk.0.ffn_up.weight"
    struct.pack_into("<I", packed, packed.index(tensor) + len(tensor) + struct.calcsize("<IQQ"), 99)
    (folder / "new.gguf").write_bytes(packed)
    with Journal.start(folder / "journal", setting(), print) as journal:
        journal.ask(ENTRY)
        journal.tokens([60])
    return folder


@pytest.mark.parametrize(("line", "expected"), ROWS, ids=[line[:50] for line, _ in ROWS])
def test_wrong_input_is_one_line(
    line: str, expected: str, folder: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.delenv("FLOWSPEC_API_KEY", raising=False)
    before = {path.name for path in folder.iterdir()}
    told = refused(*(word.format(**LONG) for word in shlex.split(line)))
    assert expected in told
    assert "two words" not in told, "a key is no part of a message"
    assert {path.name for path in folder.iterdir()} <= before | {"out"}, "nothing was begun"
    assert not (folder / "out" / RESULTS).exists()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("generate hi --layers a", "--layers"),  # the parser
        ("generate hi --local 9", "--local: expected at most 8"),  # the command
    ],
)
def test_a_real_command_refuses_with_a_line_and_a_status(command: str, expected: str, tmp_path: Path) -> None:
    ended = real(*command.split(), status=2, cwd=tmp_path)
    assert ended.out == ""
    (line,) = ended.told
    assert line.startswith(f"flowspec {command.split()[0]}: ")
    assert expected in line


@pytest.mark.parametrize(("prompt", "stdin"), [((b"a\xff",), b""), ((), b"a\xff")])
def test_a_prompt_that_is_not_utf8_is_refused(prompt: tuple[bytes, ...], stdin: bytes) -> None:
    done = warm.run([*FLOWSPEC, "generate", *prompt], input=stdin, capture_output=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert b"UTF-8" in done.stderr


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("hi --model small", "'rms_norm_eps': expected a number above 0"),
        ("--prompt-token-ids 1,4096", "prompt token ids: expected 0 to 4095, got 4096"),
        ("hi --context 1025", "--context: expected 2 to 1024, the model's limit, got 1025"),
        ("--prompts long.txt --json --context 64 --parallel 2", "but the context holds 64"),
        ("--resume journal --model other", "is not the one of the journal ('bundled'"),
        ("hi --drafter eagel3", "did you mean eagle3?"),
        ("hi --drafter other", "expected a vocabulary of 4096 entries, got 300"),
    ],
)
def test_what_is_found_while_devices_come_up_is_one_line(
    flags: str, expected: str, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    if not (folder / "small").exists():
        make_model(folder / "small", rms_norm_eps="small")
        (folder / "long.txt").write_text("What is 2 + 3? " * 40 + "\nhi\n")
    ended = run("generate", "--local=1", *shlex.split(flags), status=2)
    (line,) = ended.told
    assert ended.out == ""
    assert expected in line


def test_a_port_that_is_taken_is_named(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for command in ("daemon", "serve"):
            assert f"port {port} on 127.0.0.1 is taken" in refused(command, "--port", port)


def test_a_daemon_that_is_not_there_is_a_cluster_failure(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "CONNECT_S", 1.0)
    monkeypatch.setattr(timeouts, "ABSENT_S", 1.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets this port
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        (tmp_path / "cluster.toml").write_text(DEVICE.format(address) + 'name = "gone"\n')
        asked = f"--cluster={tmp_path / 'cluster.toml'}"
        (line,) = run("generate", "hi", asked, status=1).told
        assert "gone" in line
        assert address in line
        (line,) = run("profile", asked, f"--out={tmp_path}/x.toml", status=1).told
    assert f"gone at {address}: the machine is there, but nothing listens at" in line
    assert not (tmp_path / "x.toml").exists(), "nothing is measured before"


def test_a_journal_that_is_in_use_is_refused(folder: Path, refused: Callable[..., str]) -> None:
    with Journal.open(folder / "journal", print)[0]:
        assert "is in use by another flowspec" in refused("generate", "--resume", folder / "journal")


def test_a_package_that_is_not_installed_is_named(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Alone: of a package, other tests would find two.
    monkeypatch.delitem(sys.modules, "flowspec.serve.server", raising=False)
    monkeypatch.setattr(extras, "is_installed", lambda package: False)
    for module, command, extra in (("uvicorn", "serve", "serve"), ("zeroconf", "devices", "discovery")):
        monkeypatch.setitem(sys.modules, module, None)
        assert re.search(f"run .*install.* {extra}$", refused(command))


def test_a_temperature_that_no_float_holds_is_refused() -> None:
    with pytest.raises(InputError, match="sampling"):
        SamplingParams().sampling(Recommended(stop_ids=frozenset(), sampling={"temperature": 10**400}))
