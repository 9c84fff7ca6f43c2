"""What a chat shows while it waits for a line."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest

from flowspec.cli.chat import Chat


def waiting(*, is_json: bool) -> Chat:
    nothing: Any = None
    return Chat(
        connect=nothing,
        llm=None,
        tokenizer=nothing,
        settings=nothing,
        console=nothing,
        system="",
        is_json=is_json,
        request=0,
        diary=nothing,
    )


@pytest.mark.parametrize(("is_json", "shown"), [(False, "you> Hel"), (True, "")])
def test_a_line_that_is_being_typed_stands_there_again_after_a_note(
    is_json: bool, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = waiting(is_json=is_json)

    def typed(prompt: str) -> str:
        one.tell("\n(device b is lost)")
        return "Hello \n"

    monkeypatch.setattr(builtins, "input", typed)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("readline.get_line_buffer", lambda: "Hel")
    assert one.read() == "Hello"
    told = capsys.readouterr()
    assert (told.out, told.err) == (shown, "\n(device b is lost)\n")
    one.tell("(device b is back)")
    assert capsys.readouterr().out == ""
