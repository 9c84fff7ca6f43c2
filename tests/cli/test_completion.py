"""`flowspec completion`: what Tab does, in the shells that are there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flowspec.cli.commands import COMMANDS
from flowspec.cli.completion import SHELLS
from flowspec.cli.main import main

TYPED = {
    "flowspec ge": {"generate"},
    "flowspec generate --max": {"--max-new-tokens"},
    "flowspec chat --method c": {"continuous", "cosine", "chunk-pp"},
    "flowspec help do": {"doctor"},
    "flowspec generate --record recor": {"recording.json"},
    "flowspec plan --sh": {"--shape"},
    "flowspec chat --drafter draft-m": {"draft-math"},
    "flowspec chat --drafter rec": {"recording.json"},
    "flowspec chat --drafter ng": {"ngram"},
}
BASH = """
source "$1"
read -ra COMP_WORDS <<< "$2"
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$2 COMP_POINT=${#2}
_shtab_flowspec flowspec "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'source $argv[1]; complete -C "$argv[2]" | string replace -r "\\t.*" ""'
RUN = {"bash": ["bash", "-c", BASH, "bash"], "fish": ["fish", "--no-config", "-c", FISH]}


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> str:
    """A shell, whose script is in `tmp_path`."""
    assert main(["completion", request.param]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    return str(request.param)


def test_a_script_names_every_command(shell: str, tmp_path: Path) -> None:
    text = (tmp_path / "script").read_text()
    assert all(name in text for name in (*COMMANDS, "max-new-tokens", "ignore-eos"))


def test_tab_completes_commands_flags_choices_and_files(shell: str, tmp_path: Path) -> None:
    if shell == "zsh" or shutil.which(shell) is None:
        pytest.skip("it is not here, or completes only while somebody types")
    (tmp_path / "recording.json").touch()
    for typed, expected in TYPED.items():
        done = subprocess.run(
            [*RUN[shell], "./script", typed],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        assert (set(done.stdout.split()), done.stderr) == (expected, ""), typed
