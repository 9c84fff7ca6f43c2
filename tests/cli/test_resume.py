"""The head is killed in the middle of an answer, and another one goes on with it: real processes, the bundled
model."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flowspec.bench.checkpoints import make_variant
from flowspec.cli import chat, resume
from flowspec.cli.main import main
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.runtime.journal.file import Journal
from flowspec.runtime.journal.lines import Entry, Setting
from flowspec.runtime.session import Session
from tests import warm
from tests.cli.starting import without_starting
from tests.cli.test_commands import FLOWSPEC, flowspec, generate

STORY = "Tell me a story about a lighthouse."
WAIT_S = 60.0


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Runs a command in this process, which must refuse its input in one line."""

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        told = capsys.readouterr()
        assert told.out == ""
        (line,) = without_starting(told.err)
        return line

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def kill_at(command: Sequence[str], folder: Path, question: int, lines: int, stdin: str = "") -> Path:
    """Runs a command and kills it (-9) once the journal in a folder has so many lines of tokens after its
    n-th question."""
    with warm.Popen(
        [*FLOWSPEC, *command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None
        process.stdin.write(stdin)
        process.stdin.flush()
        deadline_s = time.monotonic() + WAIT_S
        while not (found := list(folder.iterdir())) or count(found[0], question) < lines:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline_s, "the answer does not come"
            time.sleep(0.002)
        process.kill()
    return found[0]


def count(journal: Path, question: int) -> int:
    """Lines of tokens that follow a question in a journal; -1 before it is asked."""
    parts = journal.read_bytes().split(b'{"ask"')
    return parts[question].count(b'{"tokens"') if len(parts) > question else -1


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_an_answer_survives_its_head(tmp_path: Path, temperature: str) -> None:
    asked = (
        "--temperature",
        temperature,
        "--seed",
        "7",
        "--dtype",
        "float32",
        "--max-new-tokens",
        "90",
        "--stop",
        "best of friends",
        STORY,
    )
    whole = generate("--local", "2", *asked, drafter="bundled")
    journal = kill_at(
        ["generate", "--local", "3", "--journal", str(tmp_path / "answer"), *asked], tmp_path, 1, 8
    )
    with journal.open("ab") as file:
        file.write(b'{"tokens":[1')  # as if the last line had been under way
    found = generate("--local", "2", "--resume", str(journal))
    assert 8 <= found["resumed"] < len(whole["token_ids"])
    same = (
        "token_ids",
        "text",
        "finish_reason",
        "prompt_tokens",
        "new_tokens",
        "seed",
        "temperature",
        "context",
        "dtype",
    )
    same += ("arithmetic", "arithmetic_changes")
    assert whole["arithmetic"]
    assert {name: found[name] for name in same} == {name: whole[name] for name in same}
    again = generate("--resume", str(journal))
    assert (again["text"], again["token_ids"], again["resumed"]) == (
        whole["text"],
        whole["token_ids"],
        len(whole["token_ids"]),
    )
    assert flowspec("generate", "--resume", str(journal)) == whole["text"] + "\n"


def test_what_is_whole_of_a_damaged_journal_goes_on(tmp_path: Path, refusal: Callable[..., str]) -> None:
    asked = ("--temperature", "0", "--dtype", "float32", "--max-new-tokens", "40", STORY)
    journal = tmp_path / "answer"
    whole = generate("--local", "1", "--journal", str(journal), *asked)
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > 6, "a setting, a question, tokens, an end"
    damaged = lines[5].replace(b"[", b"[1", 1)
    journal.write_bytes(b"".join([*lines[:5], damaged, *lines[6:]]))
    line = refusal("generate", "--resume", str(journal), "--local", "1")
    assert (
        "line 6 is damaged: its checksum does not fit; the 5 lines before it are whole: --good-part" in line
    )
    found = generate("--local", "1", "--resume", str(journal), "--good-part")
    assert found["token_ids"] == whole["token_ids"]
    assert 0 < found["resumed"] < len(whole["token_ids"])
    assert "give both or neither" in refusal("generate", "--good-part", "Hi")


def test_a_chat_goes_on_with_its_last_dialogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    lines = f"What is 17 + 25?\n{STORY}\nWhat is 3 + 4?\n"
    chat = ["chat", "--json", "--local", "2", "--dtype", "float32", "--temperature", "1", "--seed", "3"]

    def answers(*arguments: str, stdin: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in flowspec(*arguments, stdin=stdin).splitlines()]

    whole = answers(*chat, "--no-journal", stdin=lines)
    folder = tmp_path / "flowspec" / "journals"
    assert not folder.exists()
    folder.mkdir(parents=True)
    journal = kill_at(chat, folder, 2, 6, stdin=lines.rpartition("What")[0])
    story, last = answers("chat", "--json", "--resume", "--local", "1", stdin="What is 3 + 4?\n")
    assert story["resumed"] >= 6
    assert last["resumed"] == 0
    for name in ("token_ids", "text", "prompt_tokens", "finish_reason"):
        assert [story[name], last[name]] == [each[name] for each in whole[1:]]
    assert list(folder.iterdir()) == [journal], "it goes on in the same file"
    saved = tmp_path / "saved.json"
    assert answers(
        "chat",
        "--json",
        "--resume",
        str(journal),
        "--local",
        "1",
        stdin=f"/save {saved}\n/reset\nWhat is 2 + 2?\n",
    )
    assert [message["content"] for message in json.loads(saved.read_text())["messages"]][1::2] == [
        each["text"] for each in whole
    ]
    assert len(list(folder.iterdir())) == 2, "a new dialogue has a new file"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Of an answer of the bundled model that was interrupted after one token."""
    path = tmp_path / "answer.jsonl"
    setting = Setting(
        command="generate",
        model=BUNDLED,
        fingerprint=ModelFiles(BUNDLED).fingerprint(),
        dtype="float32",
        context=100,
    )
    with Journal.start(path, setting, print) as begun:
        begun.ask(Entry(prompt=(1, 5, 9), sampling=Sampling(), new_tokens_max=4, stop_ids=frozenset([2])))
        begun.tokens([60])
    return path


def test_what_was_computed_elsewhere_is_refused_or_goes_on_from_a_token_that_is_named(tmp_path: Path) -> None:
    """The journal's arithmetic is one that this machine lacks."""
    path = tmp_path / "answer"
    setting = Setting(
        command="generate",
        model=BUNDLED,
        fingerprint=ModelFiles(BUNDLED).fingerprint(),
        dtype="int8",
        context=100,
        arithmetic="elsewhere",
    )
    with Journal.start(path, setting, print) as begun:
        begun.ask(Entry(prompt=(1, 5, 9), sampling=Sampling(), new_tokens_max=4, stop_ids=frozenset([2])))
        begun.tokens([60])
    command = [*FLOWSPEC, "generate", "--resume", str(path), "--local", "1"]
    done = warm.run(command, capture_output=True, text=True, timeout=120, check=False)
    (line,) = without_starting(done.stderr)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        "it lacks the arithmetic elsewhere, which is kept, and has digits; --allow-arithmetic-change" in line
    )
    found = generate("--resume", str(path), "--local", "1", "--allow-arithmetic-change")
    assert found["token_ids"][0] == 60
    changes = [{"token": 1, "arithmetic": "digits"}]
    assert (found["arithmetic"], found["arithmetic_changes"]) == ("elsewhere", changes)
    again = generate("--resume", str(path))  # of the journal alone
    assert {name: again[name] for name in again} == {name: found[name] for name in again} | {
        "resumed": again["new_tokens"]
    }


def test_keys_and_values_are_held_as_they_were(tmp_path: Path) -> None:
    path, files = tmp_path / "answer", ModelFiles(BUNDLED)
    prompt, sampling = (1, 5, 9), Sampling(temperature=1.0, seed=5)
    plain = StepByStep.load(files, "float32", cache="q8_0")
    expected = plain.generate(prompt, sampling, 12, frozenset([2]))
    setting = Setting(
        command="generate",
        model=BUNDLED,
        fingerprint=files.fingerprint(),
        dtype="float32",
        context=100,
        cache="q8_0",
    )
    with Journal.start(path, setting, print) as begun:
        begun.ask(Entry(prompt=prompt, sampling=sampling, new_tokens_max=12, stop_ids=frozenset([2])))
        begun.tokens(expected[:4])
    found = generate("--resume", str(path), "--local", "2")
    assert (found["cache"], found["token_ids"]) == ("q8_0", list(expected))


@pytest.mark.parametrize(
    ("began", "given", "runs_on", "told"),
    [
        (["--cluster", "b.toml"], [], ["--cluster", "b.toml"], "the devices of "),
        (["--local", "2"], [], ["--local", "2"], "2 local processes; --cluster or --local"),
        (["--local", "2"], ["--local", "3"], ["--local", "3"], ""),
        (["--cluster", "b.toml"], ["--local", "2"], ["--local", "2"], ""),
        ([], ["--cluster", "b.toml"], ["--cluster", "b.toml"], ""),
        ([], [], ["--local", "4"], ""),
    ],
)
def test_a_dialogue_goes_on_where_it_was_unless_a_flag_says_where(
    began: list[str], given: list[str], runs_on: list[str], told: str
) -> None:
    def parsed(*flags: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        chat.add_arguments(parser)
        parser.set_defaults(command="chat")
        return parser.parse_args(flags)

    plan = SimpleNamespace(model="bundled", fingerprint="f", dtype="float32", cache=CACHE_AUTO, context=100)
    session = cast(Session, SimpleNamespace(head=SimpleNamespace(plan=plan, arithmetic="")))
    setting = resume.setting_of(parsed(*began), session)
    args = parsed(*given)
    resume.follow_setting(args, setting)
    expected = parsed(*runs_on)
    path = None if expected.cluster is None else expected.cluster.absolute()
    assert (args.cluster and args.cluster.absolute(), args.local) == (path, expected.local)
    line = resume.place_told(args, setting)
    assert (told in line) if told else not line


def test_another_model_is_refused_before_it_is_loaded(
    journal: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    folder = make_variant(tmp_path / "model", "llama-grouped")
    line = refusal("generate", "--resume", str(journal), "--model", str(folder), "--local", "1")
    assert "is not the one of the journal ('bundled'" in line
    assert journal.read_bytes().count(b"\n") == 3, "nothing was written"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--temperature", "0"], "--resume goes on as the journal says; leave out --temperature"),
        (["--seed", "0"], "--resume goes on as the journal says; leave out --seed"),
        (["--dtype", "float32"], "--resume goes on as the journal says; leave out --dtype"),
        (["--cache", "q8_0"], "--resume goes on as the journal says; leave out --cache"),
        (["--max-new-tokens", "256"], "--resume goes on as the journal says; leave out --max-new-tokens"),
        (["What?"], "--resume goes on as the journal says; leave out a prompt"),
        (["--parallel", "2"], "--resume goes on as the journal says; leave out --parallel"),
        (["--stop", "x"], "--resume goes on as the journal says; leave out --stop"),
        (["--journal", "other"], "--resume goes on as the journal says; leave out --journal"),
    ],
)
def test_flags_that_the_journal_fixes_are_refused(
    journal: Path, flags: list[str], expected: str, refusal: Callable[..., str]
) -> None:
    assert refusal("generate", "--resume", str(journal), *flags) == f"flowspec generate: {expected}"


def test_journals_that_cannot_be_gone_on_with_are_refused(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    assert "that is a journal of flowspec generate; resume it there" in refusal(
        "chat", "--resume", str(journal)
    )
    assert "exists; --resume goes on with it" in refusal("generate", "--journal", str(journal), "Hi")
    assert "is in no folder that can be written" in refusal(
        "generate", "--journal", str(tmp_path / "no" / "journal"), "Hi"
    )
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hi\n")
    assert "--journal holds one answer" in refusal(
        "generate", "--journal", str(tmp_path / "new"), "--prompts", str(prompts)
    )
    with Journal.open(journal, print)[0]:
        assert "is in use by another flowspec" in refusal("generate", "--resume", str(journal))
    journal.write_text("nothing of the kind\n")
    assert "line 1: expected a journal of flowspec" in refusal("generate", "--resume", str(journal))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert "holds no dialogue that could go on" in refusal("chat", "--resume")
    assert "leave out --no-journal" in refusal("chat", "--resume", "--no-journal")
    assert {path.name for path in tmp_path.iterdir()} == {"answer.jsonl", "prompts.txt"}, "nothing was begun"
