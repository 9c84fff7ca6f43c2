"""What each command shows a person in a terminal, and gives a program that asks for JSON."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lab.golden.daemons import daemons
from lab.golden.faces import Terminal, mask_json, mask_text, own_place, piped, shipped_models, side_by_side
from lab.golden.place import Place
from lab.golden.recording import Absent, Observation

COMMANDS = (
    *("chat", "generate", "serve", "daemon", "plan", "drafters", "doctor", "bench", "verify"),
    *("fetch", "keygen", "devices", "profile", "completion"),
)
MEASURED = "here.toml"
"""A device profile: all figures in it are measured, and its texts tell the day and the machine."""
NUMBER = re.compile(r'(?<![\w".])\d+(?:\.\d+)?(?:e-?\d+)?|(?<=^description = ).*')
LONG_LINES = 200
"""Of longer scripts a digest is kept."""
ANSWERS = {
    "time_to_first_token_s": "measured",
    "decode_s": "measured",
    "tokens_per_s": "measured",
    "pid": "the system's choice",
    "memory_bytes": "of a process, measured",
    "statistics": "which guesses were there in time, and for how long each waited",
}
VOLATILE: Mapping[str, Mapping[str, str]] = {
    **{name: {} for name in COMMANDS},
    "chat": ANSWERS,
    "generate": ANSWERS,
    "profile": {"profile": "measured", "measured": "measured"},
    "doctor": {
        "trip_s": "measured",
        "clock_s": "the time of day",
        "clock_offset_s": "measured",
        "from_head": "measured",
        "onward": "measured",
        "memory_total_bytes": "the machine's",
        "memory_available_bytes": "measured",
        "resident_bytes": "measured",
        "cores": "the machine's",
        "warnings": "some are of links, which are measured",
    },
}
"""Of each command the keys of numbers that differ from run to run, and why."""
CHAT = "chat --local 1 --seed 1 --max-new-tokens 40"
LONG_CHAT = ("chat", "--local", "1", "--seed", "1", "--max-new-tokens", "300", "--ignore-eos")
SUM, STORY = "What is 17 + 25?", "Tell me a story."
ASK = "generate --max-new-tokens 24 --seed 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One command line, and as what it is seen: `screen` in a terminal, `json` by a program, with `--json`,
    `pipe` by a program, as text.

    `until`: a text on the screen after which Ctrl-C ends it. `files`: of what it has written, those whose
    text is recorded, too.
    """

    name: str
    words: str
    forms: tuple[str, ...] = ("screen", "json")
    until: str = ""
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Calls from one home, one after the other, and the files that are there before.

    `small`: a folder for the smallest model of the package that chats.
    """

    calls: tuple[Call, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    small: str = ""


SCREEN, JSON, PIPE = ("screen",), ("json",), ("pipe",)
PLANS = {
    "jetsons": "--shape llama-2-7b --devices '4x jetson-orin-nano' --drafter eagle",
    "unlike": "--shape llama-2-7b --devices '4x jetson-orin-nano,raspberry-pi-5' --link 150/0.5",
    "pis": "--shape llama-3-8b --devices '4x raspberry-pi-5' --dtype int4",
    "dtypes": "--shape llama-3-8b --devices '4x raspberry-pi-5' --dtype float16,int8,int4 --users 4",
    "too-large": "--shape llama-3-8b --devices '2x raspberry-pi-5'",
    "split": "--shape llama-2-7b --devices '3x jetson-orin-nx' --layers 12,10,10 --all-devices",
    "bundled": "--devices '2x raspberry-pi-4' --context 512 --cache q8_0",
    "head": "--shape llama-2-7b --devices '4x jetson-orin-nano' --head raspberry-pi-5 --acceptance 0.5",
}
VERIFY = "verify --model small --method continuous --drafter ngram --limit 1 --max-new-tokens 12"
CLUSTER = """
device = [
  { name = "kitchen", address = "198.51.100.1:7700", profile = "raspberry-pi-5" },
  { name = "attic", address = "198.51.100.2:7700", profile = "raspberry-pi-4" },
]
"""
REVISION = "0" * 40
CACHED = "cache/huggingface/hub/models--golden--toy"
"""A model of the hub that is here."""
PROMPTS = f"{SUM}\nWhat is 3 * 4?\nSay hello.\n"
QUESTIONS = "".join(
    json.dumps({"question_id": index, "category": kind, "turns": [text]}) + "\n"
    for index, (kind, text) in enumerate((("math", SUM), ("story", STORY)))
)
JOBS: Mapping[str, Job] = {
    "generate": Job(
        calls=(
            Call(name="one-answer", words=f"{ASK} --local 2 '{SUM}'"),
            Call(name="piped", words=f"{ASK} --local 1 '{SUM}'", forms=PIPE),
        )
    ),
    "generate-drawn": Job(
        calls=(
            Call(
                name="sampled",
                words=f"{ASK} --local 1 --temperature 0.8 --top-k 40 --top-p 0.9 --system 'Be brief.' "
                f"-p '{STORY}'",
                forms=JSON,
            ),
            Call(
                name="drawn-seed",
                words="generate --local 1 --max-new-tokens 8 --top-k 1 --temperature 1 Hi",
                forms=SCREEN,
            ),
        )
    ),
    "generate-kept": Job(
        calls=(
            Call(name="journal", words=f"{ASK} --local 1 --journal an.journal '{STORY}'", forms=SCREEN),
            Call(name="resume", words="generate --resume an.journal --local 1"),
        )
    ),
    "generate-files": Job(
        calls=(
            Call(name="prompts", words=f"{ASK} --local 2 --prompts prompts.txt --parallel 2", forms=SCREEN),
            Call(name="questions", words=f"{ASK} --local 1 --prompts questions.jsonl", forms=JSON),
        ),
        files={"prompts.txt": PROMPTS, "questions.jsonl": QUESTIONS},
    ),
    "generate-ways": Job(
        calls=(
            Call(
                name="verbose",
                words=f"{ASK} --local 2 -v --log-file a.log --method ar --layers 3,5 '{STORY}'",
                forms=SCREEN,
            ),
            Call(
                name="team",
                words=f"{ASK} --local 1 --drafter draft,draft-math --no-keep-learnt --record r.json '{SUM}'",
                forms=SCREEN,
            ),
            Call(
                name="stop",
                words=f"{ASK} --local 1 --dtype int8 --stop lived --temperature 0 '{STORY}'",
                forms=JSON,
            ),
        )
    ),
    "serve": Job(
        calls=(
            Call(
                name="start", words="serve --local 2 --port 0", forms=SCREEN, until="serving bundled at http"
            ),
        )
    ),
    "daemon": Job(
        calls=(
            Call(
                name="start",
                words="daemon --port 0 --name golden --device cpu",
                forms=SCREEN,
                until="listens on",
            ),
        )
    ),
    "plan-simulated": Job(
        calls=(
            Call(
                name="simulated",
                words="plan --shape llama-2-7b --devices '4x jetson-orin-nano' --drafter eagle",
                forms=SCREEN,
            ),
        )
    ),
    **{f"plan-{name}": Job(calls=(Call(name=name, words=f"plan {words}"),)) for name, words in PLANS.items()},
    "plan-cluster": Job(
        calls=(Call(name="cluster", words="plan --cluster c.toml --offline"),),
        files={"c.toml": CLUSTER},
    ),
    "drafters": Job(
        calls=(
            Call(name="qwen", words="drafters Qwen/Qwen3-4B"),
            Call(name="unknown", words="drafters somebody/something"),
        )
    ),
    "bench": Job(
        calls=(
            Call(
                name="bundled",
                words="bench --experiment paper-bundled --limit 1 --methods ar,continuous --temperatures 0 "
                "--max-new-tokens 12 --no-plots --jobs 1 --out found",
                files=("found/summary.md",),
            ),
        )
    ),
    "verify": Job(
        calls=(
            Call(name="two-splits", words=f"{VERIFY} --local 1,2", forms=SCREEN),
            Call(name="one", words=f"{VERIFY} --local 1 --temperatures 0", forms=JSON),
        ),
        small="small",
    ),
    "fetch": Job(
        calls=(
            Call(name="listed", words="fetch golden/toy --list"),
            Call(name="there", words="fetch golden/toy", forms=SCREEN),
        ),
        files={f"{CACHED}/refs/main": REVISION},
        small=f"{CACHED}/snapshots/{REVISION}",
    ),
    "keygen": Job(
        calls=(
            Call(name="made", words="keygen --cluster c.toml", forms=SCREEN),
            Call(name="again", words="keygen --cluster c.toml"),
            Call(name="one-more", words="keygen --cluster c.toml --device garage --head laptop"),
            Call(name="revoked", words="keygen --cluster c.toml --revoke attic", forms=SCREEN),
        ),
        files={"c.toml": CLUSTER},
    ),
    "devices": Job(calls=(Call(name="none", words="devices --timeout 1"),)),
    "profile": Job(
        calls=(
            Call(
                name="quick",
                words="profile --quick --dtype float32 --threads 1 --force --out here.toml",
                forms=JSON,
                files=(MEASURED,),
            ),
        )
    ),
    "completion": Job(
        calls=tuple(
            Call(name=shell, words=f"completion {shell}", forms=PIPE) for shell in ("bash", "zsh", "fish")
        )
    ),
    "help": Job(
        calls=tuple(
            Call(name=name, words=words, forms=SCREEN)
            for name, words in (
                ("nothing", ""),
                ("help", "help"),
                ("short", "--help"),
                ("version", "--version"),
                ("of-a-command", "help generate"),
                *((name, f"{name} --help") for name in COMMANDS),
                *((f"{name}-all", f"{name} --help-all") for name in COMMANDS),
            )
        )
    ),
}


def observe(place: Place, name: str) -> Iterator[Observation | Absent]:
    """Sees each command."""
    jobs = [partial(see, place) for see in (chat, chat_interrupted) if place.wants("chat")]
    jobs += [partial(doctor, place)] if place.wants("doctor") else []
    jobs += [
        partial(job_seen, place, key, job) for key, job in JOBS.items() if place.wants(key.partition("-")[0])
    ]
    for found in side_by_side(jobs):
        yield from found


def job_seen(place: Place, key: str, job: Job) -> list[Observation]:
    """Sees the calls of a job."""
    own = own_place(place, key)
    for name, text in job.files.items():
        (own.home / name).parent.mkdir(parents=True, exist_ok=True)
        (own.home / name).write_text(text, "utf-8")
    if job.small:
        shutil.copytree(shipped_models()[0], own.home / job.small)
    return [each for call in job.calls for each in _seen(own, key.partition("-")[0], call)]


def _seen(place: Place, command: str, call: Call) -> Iterator[Observation]:
    words = shlex.split(call.words)
    for form in call.forms:
        value = on_screen(place, words, call.until) if form == "screen" else in_pipe(place, words, form)
        for name in call.files:
            value[name] = mask_text((place.home / name).read_text("utf-8").splitlines(), place)
            if name == MEASURED:
                value[name] = [NUMBER.sub("#", line) for line in value[name]]
        yield Observation(key=f"{command}/{call.name}/{form}", value=value)


def on_screen(place: Place, words: Sequence[str], until: str = "") -> dict[str, Any]:
    """Gives what a command shows in a terminal; Ctrl-C ends it after the text, where there is one."""
    with Terminal(place, *words) as terminal:
        if until:
            terminal.until(lambda lines: any(until in line for line in lines))
            terminal.type("\x03")
        status = terminal.end()
        return {"status": status, "screen": mask_text(terminal.lines, place)}


def in_pipe(place: Place, words: Sequence[str], form: str, stdin: bytes = b"") -> dict[str, Any]:
    """Gives what a command writes into pipes, as JSON or as text; of a long text a digest."""
    done = piped(place, *words, *(["--json"] if form == "json" else []), stdin=stdin)
    err = mask_text(done.stderr.splitlines(), place)
    if form == "json":
        found = [json.loads(line) for line in done.stdout.splitlines()]
        documents = mask_json(rounded(found) if words[0] == "verify" else found, VOLATILE[words[0]], place)
        return {"status": done.returncode, "documents": documents, "stderr": err}
    out = mask_text(done.stdout.splitlines(), place)
    if len(out) > LONG_LINES:
        digest = hashlib.sha256("\n".join(out).encode()).hexdigest()
        return {"status": done.returncode, "lines": len(out), "sha256": digest, "stderr": err}
    return {"status": done.returncode, "stdout": out, "stderr": err}


def rounded(value: Any) -> Any:
    """Gives a value with three digits of each fraction: last ones depend on the number of cores."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


# ------------------------------------------------------------------------------------------------------ chat


def chat(place: Place) -> list[Observation]:
    """Sees a chat of two questions and of commands, and the same as JSON."""
    own = own_place(place, "chat")
    with Terminal(own, *shlex.split(CHAT)) as terminal:
        for typed in (SUM, "/help", "/nothing", "/system Be brief.", "/stats", "What is 3 * 4?", "/reset"):
            prompt_again(terminal)
            terminal.type(f"{typed}\r")
        prompt_again(terminal)
        terminal.type("/quit\r")
        value = {"status": terminal.end(), "screen": mask_text(terminal.lines, own)}
    said = f"{SUM}\n/system Be brief.\n/stats\nWhat is 3 * 4?\n".encode()
    told = in_pipe(own, shlex.split(CHAT), "json", said)
    return [Observation(key="chat/dialogue/screen", value=value), Observation(key="chat/json", value=told)]


def chat_interrupted(place: Place) -> list[Observation]:
    """Sees an answer that Ctrl-C stops, and the answer to a chat that was killed, with which another goes on.

    How much of an answer was there is up to time.
    """
    own = own_place(place, "chat-interrupted")
    with Terminal(own, *LONG_CHAT) as terminal:
        begin_story(terminal)
        terminal.type("\x03")
        prompt_again(terminal)
        terminal.type("\x04")
        stopped = {"status": terminal.end(), "screen": mask_text(_short_story(terminal.lines), own)}
    with Terminal(own, *LONG_CHAT) as terminal:
        begin_story(terminal)
    with Terminal(own, *shlex.split("chat --resume --local 1")) as terminal:
        prompt_again(terminal)
        terminal.type("\x04")
        resumed = {"status": terminal.end(), "screen": mask_text(terminal.lines, own)}
    return [
        Observation(key="chat/interrupted/screen", value=stopped),
        Observation(key="chat/resume/screen", value=resumed),
    ]


def begin_story(terminal: Terminal) -> None:
    """Asks for a story and waits for its first words."""
    prompt_again(terminal)
    terminal.type(f"{STORY}\r")
    terminal.until(lambda lines: any(line.startswith("Once upon") for line in lines))


def prompt_again(terminal: Terminal) -> None:
    """Waits until the chat asks for the next line."""
    terminal.until(lambda lines: lines[-1:] == ["you>"])


def _short_story(lines: Sequence[str]) -> list[str]:
    """Gives the lines with the first words only of the answer that was stopped."""
    begin = next(at for at, line in enumerate(lines) if line.startswith("Once upon"))
    end = next(at for at in range(begin, len(lines)) if not lines[at] or lines[at].startswith("("))
    return [*lines[:begin], "Once upon#", *lines[end:]]


# ---------------------------------------------------------------------------------------------------- doctor


LINK_CHECKS = ("latency", "link")
"""How fast links are depends on what else this machine does."""


def doctor(place: Place) -> list[Observation]:
    """Sees a check of two daemons on this machine, and another when they have gone."""
    own = own_place(place, "doctor")
    with daemons(own, 2) as two:
        rows = [f'{{ name = "{each.name}", address = "{each.address}" }}' for each in two]
        (own.home / "c.toml").write_text(f"device = [{', '.join(rows)}]\ninsecure = true\n", "utf-8")
        words = ("doctor", "--cluster", "c.toml", "--layers", "4,4")
        text, told = in_pipe(own, words, "pipe"), in_pipe(own, words, "json")
    text["stdout"] = [re.sub(" {2,}", "  ", line) for line in text["stdout"]]  # as wide as what is measured
    for document in told["documents"]:
        document["findings"] = [each for each in document["findings"] if each["check"] not in LINK_CHECKS]
        for device in document["devices"]:
            device["facts"]["board"] = sorted(device["facts"]["board"])  # what a machine tells of its heat
    gone = on_screen(own, words)
    return [
        Observation(key="doctor/cluster/pipe", value=text),
        Observation(key="doctor/cluster/json", value=told),
        Observation(key="doctor/gone/screen", value=gone),
    ]
