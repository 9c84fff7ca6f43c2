"""Each command of the laboratory tells how it is used."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "lab").rglob("*.py"))
    if "\ndef main(" in path.read_text("utf-8")
]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_tells_how_it_is_used(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
