"""What the product says of wrong inputs: the exit status, and all that is written."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lab.golden.faces import mask_text, own_place, piped, shipped_models, side_by_side
from lab.golden.place import Place
from lab.golden.recording import Absent, Observation

Content = str | bytes
REFUSED_S = 300.0
"""What no refusal takes, also on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A wrong input: a command line, the files that are there, and what is written to it.

    In words and files `#taken` is a port that a socket listens on, `#closed` one on which none does.
    `bundled`: folders that hold all files of the bundled model, before `files` are written. `gone`: files
    that are removed then. `cut`: files whose end is cut off. `private`: files that only their owner can read.
    """

    name: str
    words: str
    files: Mapping[str, Content] = field(default_factory=dict)
    stdin: bytes = b""
    bundled: str = ""
    gone: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    private: tuple[str, ...] = ()


def weights(header: object, data: bytes = b"", claimed: int | None = None) -> bytes:
    """A safetensors file; `claimed` is how long it says that its header is."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + data


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
ONE_TENSOR = {"model.embed_tokens.weight": {"dtype": "F32", "shape": [64, 32], "data_offsets": [0, 8192]}}
NUMBERS = b"\x3c\x01" * 4096
TOKENIZER: dict[str, Content] = {"tokenizer.json": "{}"}
DEVICE = '{ name = "one", address = "127.0.0.1:#closed" }'
TWO = (
    'device = [{ name = "a", address = "198.51.100.1:7700" }, '
    '{ name = "b", address = "198.51.100.2:7700" }]\n'
)
SETTING = (
    '{"journal":4,"command":"generate","model":"bundled","fingerprint":"0","dtype":"bfloat16","context":1024,'
    '"arithmetic":"lanes16","cache":"auto","line":1,"crc":"00000000"}\n'
)
HI = "generate --local 1 hi"


def llama(tensors: bytes, **config: object) -> dict[str, Content]:
    """Files of a model whose config says something else."""
    return {"config.json": json.dumps({**LLAMA, **config}), "model.safetensors": tensors}


def cluster(name: str, text: str, words: str = "generate --cluster c.toml hi") -> Case:
    return Case(name=f"cluster/{name}", words=words, files={"c.toml": text})


def model(
    name: str, files: Mapping[str, Content], words: str = "generate --local 1 --model m hi", **more: Any
) -> Case:
    return Case(
        name=f"model/{name}",
        words=words,
        files={f"m/{path}": content for path, content in files.items()},
        **more,
    )


def gguf(name: str, content: bytes) -> Case:
    words = "generate --local 1 --model m.gguf hi"
    return Case(name=f"model/gguf-{name}", words=words, files={"m.gguf": content})


def flags(kind: str, *lines: str) -> tuple[Case, ...]:
    return tuple(Case(name=f"{kind}/{line}", words=line) for line in lines)


def prompts(name: str, content: Content, suffix: str = "jsonl") -> Case:
    path = f"p.{suffix}"
    return Case(name=f"prompts/{name}", words=f"generate --local 1 --prompts {path}", files={path: content})


def journal(name: str, content: Content, words: str = "generate --local 1 --resume a.journal") -> Case:
    return Case(name=f"journal/{name}", words=words, files={"a.journal": content})


def experiment(name: str, text: str) -> Case:
    return Case(
        name=f"experiment/{name}", words="bench --no-plots --experiment e.toml", files={"e.toml": text}
    )


def board(name: str, text: str) -> Case:
    return Case(name=f"board/{name}", words="plan --devices 'b.toml,raspberry-pi-5'", files={"b.toml": text})


CASES: tuple[Case, ...] = (
    *flags("command", "fly", "genrate hi", "--versio", "help fly", "completion csh", "completion"),
    *flags("command", "drafters", "serve now"),
    *flags(
        "flag",
        "generate --modell x hi",
        "generate --local=2 --threads=1 hi",
        "generate --local 2 --cluster c.toml hi",
        "generate --resume a.journal hi",
        "generate --prompt hi ho",
        "generate What is 17",
        "generate --temperature",
        "generate --method fast hi",
        "generate --dtype int3 hi",
        "generate --cache q4 hi",
        "generate --chain auto --method ar hi",
        "generate --drafter nobody hi",
        "chat --no-journal --resume",
        "chat --good-part",
        "plan --shape gpt-5 --devices raspberry-pi-5",
        "plan",
        "plan --devices raspberry-pi-6",
        "plan --devices '0x raspberry-pi-5'",
        "plan --devices raspberry-pi-5 --link fast",
        "plan --devices raspberry-pi-5 --dtype float8",
        "plan --devices raspberry-pi-5 --layers 3,5",
        "plan --devices raspberry-pi-5 --head nobody",
        "plan --devices raspberry-pi-5 --acceptance 2",
        "verify --method cosine --chain auto",
        "verify --layers 4,4 --local 2,4",
        "devices --timeout 0",
        "keygen",
        "profile --dtype int9",
        "fetch no-owner",
        "fetch golden/nothing --list",
        "bench --world moon",
        "bench --experiment nothing",
        "bench --methods fast",
    ),
    *flags(
        "value",
        "generate --temperature -1 hi",
        "generate --temperature warm hi",
        "generate --top-p 0 hi",
        "generate --top-k -1 hi",
        "generate --min-p 1 hi",
        "generate --seed 1.5 hi",
        "generate --max-new-tokens 0 hi",
        "generate --stop '' hi",
        "generate --layers a hi",
        "generate --layers 4,4 hi",
        "generate --local 9 hi",
        "generate --local 1 --context 1025 hi",
        "generate --local 1 --prompt-token-ids 1,4096",
        "generate --local 1 --log-file no/folder/log hi",
        "generate ''",
        "verify --temperatures 0,nan",
        "verify --parallel 1,0",
        "daemon --port 65536",
        "daemon --threads 0",
        "daemon --memory plenty",
        "daemon --device tpu",
        "daemon --host no.such.host.invalid",
        "daemon --insecure --host 203.0.113.7",
        "daemon --host 203.0.113.7",
        "serve --host 0.0.0.0",
        "serve --queue -1",
        "serve --cors nowhere",
    ),
    Case(name="prompt/none", words="generate"),
    Case(name="prompt/not-text", words="generate", stdin=b"a\xff"),
    Case(name="prompt/too-long", words=f"generate --local 1 '{'a ' * 3000}'"),
    Case(name="prompt/too-long-for-context", words=f"generate --local 1 --context 5 '{'word ' * 12}'"),
    prompts("empty", ""),
    prompts("cut", '{"turns": ["good"]}\n{"turns": ['),
    prompts("no-turns", '{"turns": []}\n'),
    prompts("a-list", "[]\n"),
    prompts("binary", bytes(range(256)), "txt"),
    Case(name="prompts/none", words="generate --local 1 --prompts none.txt"),
    Case(name="port/daemon", words="daemon --device cpu --port #taken"),
    Case(name="port/serve", words="serve --local 1 --port #taken"),
    Case(name="model/none", words="generate --local 1 --model ./none hi"),
    Case(name="model/not-in-cache", words="generate --local 1 --model golden/nothing hi"),
    Case(name="model/a-text", words="generate --local 1 --model m.txt hi", files={"m.txt": "hello"}),
    gguf("of-zeros", bytes(4096)),
    gguf("cut", b"GGUF" + struct.pack("<IQQ", 3, 1000, 1000)),
    gguf("of-the-future", b"GGUF" + struct.pack("<IQQ", 99, 0, 0)),
    model("empty-folder", {"README": "nothing"}),
    model("config-is-no-json", {"config.json": "{"}),
    model("config-is-a-list", {"config.json": "[]"}),
    model("config-lacks-a-family", {"config.json": "{}"}),
    model("config-of-an-unknown-family", {"config.json": json.dumps({**LLAMA, "model_type": "gpt2"})}),
    model("config-with-an-odd-number", llama(weights({}), num_key_value_heads=3) | TOKENIZER),
    model(
        "config-of-an-unknown-scheme",
        llama(weights(ONE_TENSOR, NUMBERS), quantization_config={"quant_method": "bitsandbytes"}) | TOKENIZER,
    ),
    model("without-weights", {"config.json": json.dumps(LLAMA)}),
    model("weights-whose-header-lies", llama(weights(ONE_TENSOR, bytes(8192), 1 << 40))),
    model("weights-of-zeros", llama(bytes(4096))),
    model(
        "weights-that-lack-tensors",
        llama(weights(ONE_TENSOR, NUMBERS)),
        "generate --local 1 --model m --prompt-token-ids 1,5",
    ),
    model("weights-cut-off", llama(weights(ONE_TENSOR, bytes(100)))),
    model("no-tokenizer", {}, bundled="m", gone=("m/tokenizer.json",)),
    model("tokenizer-is-no-json", {"tokenizer.json": "{"}, bundled="m"),
    model("template-is-wrong", {"chat_template.jinja": "{% for %}"}, bundled="m"),
    model("bundled-cut", {}, bundled="m", cut=("m/model.safetensors",)),
    Case(name="cluster/none", words="generate --cluster none.toml hi"),
    Case(name="cluster/a-folder", words="generate --cluster . hi"),
    cluster("no-toml", "[[device]"),
    cluster("empty", ""),
    cluster("no-devices", "device = []\n"),
    cluster("unknown-key", 'device = [{ address = "198.51.100.1:7700", color = "red" }]\n'),
    cluster("unknown-table", f"{TWO}[network]\nspeed = 1\n"),
    cluster("address-without-port", 'device = [{ address = "host" }]\n'),
    cluster("address-is-a-url", 'device = [{ address = "http://198.51.100.1:7700" }]\n'),
    cluster("address-is-a-number", "device = [{ address = 7700 }]\n"),
    cluster("no-address", 'device = [{ name = "a" }]\n'),
    cluster("names-twice", TWO.replace('"b"', '"a"')),
    cluster("addresses-twice", TWO.replace("198.51.100.2", "198.51.100.1")),
    cluster("memory", 'device = [{ address = "198.51.100.1:7700", memory = "lots" }]\n'),
    cluster("layers", 'device = [{ address = "198.51.100.1:7700", layers = [0, 7] }]\n'),
    cluster("link", f'insecure = true\nlinks = ["fast"]\n{TWO}'),
    cluster("link-of-nobody", f'insecure = true\nlinks = ["a:z=100/1"]\n{TWO}'),
    cluster(
        "board",
        'device = [{ address = "198.51.100.1:7700", profile = "raspberry-pi-6" }]\n',
        "plan --cluster c.toml --offline",
    ),
    cluster("no-board", TWO, "plan --cluster c.toml --offline"),
    cluster("drafter-on-nobody", f'{TWO}[[drafter]]\nmodel = "draft"\ndevice = "z"\n'),
    cluster("nobody-there", f"insecure = true\ndevice = [{DEVICE}]\n"),
    cluster("keys-missing", TWO),
    cluster("nobody-to-check", f"insecure = true\ndevice = [{DEVICE}]\n", "doctor --cluster c.toml"),
    cluster("not-toml-for-keys", "device = 3\n", "keygen --cluster c.toml"),
    Case(name="journal/none", words="generate --local 1 --resume none.journal"),
    Case(name="journal/none-of-chat", words="chat --local 1 --resume"),
    journal("empty", ""),
    journal("binary", bytes(range(256))),
    journal("another-kind", '{"hello": 1}\n'),
    journal("wrong-sum", SETTING),
    journal("of-the-future", SETTING.replace('"journal":4', '"journal":99')),
    journal("good-part-of-nothing", SETTING, "generate --local 1 --resume a.journal --good-part"),
    journal("there-already", "hello\n", "generate --local 1 --journal a.journal hi"),
    Case(name="keys/none", words="daemon --port 0 --keys none"),
    Case(name="keys/empty", words="daemon --port 0 --keys k", files={"k/README": ""}),
    Case(
        name="keys/damaged",
        words="daemon --port 0 --name one --keys k",
        files={"k/one.key": 'name = "one"\npublic = "short"\nsecret = "short"\n', "k/allowed.toml": ""},
    ),
    Case(name="keys/no-toml", words="daemon --port 0 --keys k", files={"k/allowed.toml": "[[["}),
    Case(name="keys/api-none", words="serve --local 1 --port 0 --api-key-file none"),
    Case(
        name="keys/api-empty",
        words="serve --local 1 --port 0 --api-key-file k",
        files={"k": "\n"},
        private=("k",),
    ),
    experiment("no-toml", "[[testbed]"),
    experiment("empty", ""),
    experiment("unknown-key", 'name = "e"\nspeed = 1\n'),
    experiment("no-testbed", 'name = "e"\nworld = "simulated"\nmodel = "bundled"\nprompts = ["shipped"]\n'),
    experiment(
        "unknown-board",
        'name = "e"\nworld = "simulated"\nmodel = "bundled"\nprompts = ["shipped"]\n'
        '[[testbed]]\nname = "t"\ndevices = ["2 x raspberry-pi-6"]\n[[method]]\nname = "ar"\n',
    ),
    board("no-toml", "[memory"),
    board("empty", ""),
    board("unknown-key", "[memory]\ngb = 8\ncolor = 1\n"),
    board("a-text-for-a-number", '[memory]\ngb = "many"\ngb_per_s = 1\n'),
    Case(name="board/none", words="plan --devices none.toml"),
    Case(name="out/keygen", words="keygen --cluster c.toml --out c.toml", files={"c.toml": TWO}),
    Case(name="out/profile", words="profile --quick --out here.toml", files={"here.toml": "mine"}),
    Case(name="out/bench", words="bench --no-plots --out f --limit 1", files={"f": "a file"}),
    Case(name="out/record", words=f"{HI} --record no/folder/r.json"),
    Case(name="out/journal", words=f"{HI} --journal no/folder/a.journal"),
)


def observe(place: Place, name: str) -> Iterator[Observation | Absent]:
    """Sees what is said of each wrong input."""
    with ExitStack() as stack:
        taken, closed = (stack.enter_context(socket.socket()) for _ in range(2))
        for port in (taken, closed):
            port.bind(("127.0.0.1", 0))  # nobody else gets a port that is bound
        taken.listen()
        ports = {"#taken": str(taken.getsockname()[1]), "#closed": str(closed.getsockname()[1])}
        jobs = [
            partial(refused, place, index, case, ports)
            for index, case in enumerate(CASES)
            if place.wants(case.name)
        ]
        yield from side_by_side(jobs)


def refused(place: Place, index: int, case: Case, ports: Mapping[str, str]) -> Observation:
    """Gives how a command ends, and what it writes."""
    own = own_place(place, f"case-{index:03}")
    if case.bundled:
        shutil.copytree(shipped_models()[-1], own.home / case.bundled)
    for path, content in case.files.items():
        file = own.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else with_ports(content, ports).encode())
    for path in case.gone:
        (own.home / path).unlink()
    for path in case.cut:
        content = (own.home / path).read_bytes()
        (own.home / path).write_bytes(content[:-100])
    for path in case.private:
        (own.home / path).chmod(0o600)
    try:
        done = piped(own, *shlex.split(with_ports(case.words, ports)), stdin=case.stdin, timeout_s=REFUSED_S)
    except subprocess.TimeoutExpired:
        return Observation(key=case.name, value={"status": "not refused in time"})
    out, err = (text.splitlines() for text in (done.stdout, done.stderr))
    value = {"status": done.returncode, "stderr": without_ports(mask_text(err, own), ports)}
    value["stdout"] = without_ports(mask_text(out, own), ports)
    return Observation(key=case.name, value=value)


def with_ports(text: str, ports: Mapping[str, str]) -> str:
    for name, port in ports.items():
        text = text.replace(name, port)
    return text


def without_ports(lines: list[str], ports: Mapping[str, str]) -> list[str]:
    for name, port in ports.items():
        lines = [line.replace(port, name) for line in lines]
    return lines
