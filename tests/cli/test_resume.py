"""The head is killed in the middle of an answer, and another one goes on with it: real processes, the bundled
model."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from flowspec.cli import answer, chat
from flowspec.core.protocol.precision import CACHE_AUTO
from flowspec.runtime.journal.file import Journal
from flowspec.runtime.session import Session
from tests import warm
from tests.cli.journals import ENTRY, setting
from tests.cli.running import FLOWSPEC, Run

STORY = "Tell me a story about a lighthouse."
WAIT_S = 60.0


def kill_at(command: Sequence[str], journal: Path, lines: int) -> None:
    """Runs a command and kills it (-9) once its journal has so many lines of tokens."""
    with warm.Popen([*FLOWSPEC, *command], stdout=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + WAIT_S
        while not journal.exists() or journal.read_bytes().count(b'{"tokens"') < lines:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline_s, "the answer does not come"
            time.sleep(0.002)
        process.kill()


@pytest.mark.usefixtures("shared")
def test_an_answer_survives_its_head_and_what_is_whole_of_a_damaged_journal_goes_on(
    tmp_path: Path, run: Run
) -> None:
    kept = ("--dtype=float32", "--cache=q8_0", "--temperature=1", "--seed=7")
    asked = (*kept, "--max-new-tokens=90", "--stop", "best of friends", STORY)
    resumed = ("generate", "--json", "--local=2", "--resume")
    whole = run("generate", "--json", "--local=2", *asked).json
    journal = tmp_path / "answer"
    kill_at(["generate", "--local=1", f"--journal={journal}", *asked], journal, 8)
    with journal.open("ab") as file:
        file.write(b'{"tokens":[1')  # as if the last line had been under way
    found = run(*resumed, journal).json
    assert 8 <= found["resumed"] < len(whole["token_ids"])
    assert (whole["cache"], bool(whole["arithmetic"])) == ("q8_0", True)
    same = "token_ids text finish_reason prompt_tokens new_tokens seed temperature context dtype arithmetic"
    for name in (*same.split(), "cache"):
        assert found[name] == whole[name], name
    again = run("generate", "--json", "--resume", journal).json
    for name, expected in (("text", whole["text"]), ("resumed", len(whole["token_ids"]))):
        assert again[name] == expected
    assert again["token_ids"] == whole["token_ids"]
    assert run("generate", "--resume", journal).out == whole["text"] + "\n"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:5], lines[5].replace(b"[", b"[1", 1), *lines[6:]]))
    (line,) = run(*resumed, journal, status=2).told
    assert "line 6 is damaged" in line
    found = run(*resumed, journal, "--good-part").json
    assert found["token_ids"] == whole["token_ids"]
    assert 0 < found["resumed"] < len(whole["token_ids"])


@pytest.mark.usefixtures("shared")
def test_a_chat_goes_on_with_its_last_dialogue(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its journal the beginning is left, as if it had been killed in its second answer."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    lines = f"What is 17 + 25?\n{STORY}\nWhat is 3 + 4?\n"
    chat = ["chat", "--json", "--local=2", "--dtype=float32", "--temperature=1", "--seed=3"]
    whole = run(*chat, "--no-journal", stdin=lines).answers
    folder = tmp_path / "flowspec" / "journals"
    assert not folder.exists()
    run(*chat, stdin=lines.rpartition("What")[0])
    (journal,) = folder.iterdir()
    written = journal.read_bytes().splitlines(keepends=True)
    (_, asked) = [place for place, line in enumerate(written) if line.startswith(b'{"ask"')]
    journal.write_bytes(b"".join(written[: asked + 7]))
    story, last = run("chat", "--json", "--resume", "--local=1", stdin="What is 3 + 4?\n").answers
    assert story["resumed"] >= 6
    assert last["resumed"] == 0
    for name in ("token_ids", "text", "prompt_tokens", "finish_reason"):
        assert [story[name], last[name]] == [each[name] for each in whole[1:]]
    assert list(folder.iterdir()) == [journal], "it goes on in the same file"
    saved = tmp_path / "saved.json"
    typed = f"/save {saved}\n/reset\nWhat is 2 + 2?\n"
    assert run("chat", "--json", "--resume", journal, "--local=1", stdin=typed).answers
    contents = [message["content"] for message in json.loads(saved.read_text())["messages"]]
    assert contents[1::2] == [each["text"] for each in whole]
    assert len(list(folder.iterdir())) == 2, "a new dialogue has a new file"


def test_what_was_computed_elsewhere_is_refused(tmp_path: Path, run: Run) -> None:
    """The journal's arithmetic is one that this machine lacks."""
    path = tmp_path / "answer"
    with Journal.start(path, setting(dtype="int8", arithmetic="elsewhere"), print) as begun:
        begun.ask(ENTRY)
        begun.tokens([60])
    (line,) = run("generate", "--resume", path, "--json", "--local=1", status=1).told
    assert "expected the arithmetic elsewhere, which this began with, got groups32; use devices" in line


CLUSTER, TWO = ["--cluster", "b.toml"], ["--local", "2"]


@pytest.mark.parametrize(
    ("began", "given", "runs_on", "told"),
    [
        (CLUSTER, [], CLUSTER, "the devices of "),
        (TWO, [], TWO, "2 local processes; --cluster or --local"),
        (TWO, ["--local", "3"], ["--local", "3"], ""),
        (CLUSTER, TWO, TWO, ""),
        ([], [], ["--local", "4"], ""),
    ],
)
def test_a_dialogue_goes_on_where_it_was_unless_a_flag_says_where(
    began: list[str],
    given: list[str],
    runs_on: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def parsed(*flags: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        chat.add_arguments(parser)
        parser.set_defaults(command="chat")
        return parser.parse_args(flags)

    plan = SimpleNamespace(model="bundled", fingerprint="f", dtype="float32", cache=CACHE_AUTO, context=100)
    session = cast(Session, SimpleNamespace(head=SimpleNamespace(plan=plan, arithmetic="")))
    with Journal.start(tmp_path / "chat", answer.setting_of(parsed(*began), session), print):
        pass
    args = parsed(*given)
    args.resume = tmp_path / "chat"
    opened = answer.open_journal(args, print)
    assert opened is not None
    opened[0].close()
    expected = parsed(*runs_on)
    path = None if expected.cluster is None else expected.cluster.absolute()
    assert (args.cluster and args.cluster.absolute(), args.local) == (path, expected.local)
    line = capsys.readouterr().err
    assert (told in line) if told else not line
