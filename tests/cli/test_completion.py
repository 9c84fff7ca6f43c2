"""`flowspec completion`: what Tab does in bash; scripts for other shells."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flowspec.cli.commands import COMMANDS
from flowspec.cli.completion import SHELLS
from tests.cli.running import Run

TYPED = {
    "flowspec ge": {"generate"},
    "flowspec generate --max": {"--max-new-tokens"},
    "flowspec chat --method c": {"continuous", "cosine", "chunk-pp"},
    "flowspec help do": {"doctor"},
    "flowspec generate --record recor": {"recording.json"},
    "flowspec chat --drafter draft-m": {"draft-math"},
    "flowspec chat --drafter rec": {"recording.json"},
}
BASH = """
source "$1"
read -ra COMP_WORDS <<< "$2"
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$2 COMP_POINT=${#2}
_shtab_flowspec flowspec "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_names_every_command_and_says_where_it_goes_as_the_document_does(
    shell: str, run: Run
) -> None:
    text = run("completion", shell).out
    assert all(name in text for name in (*COMMANDS, "max-new-tokens", "ignore-eos"))
    (usage,) = [line for line in text.splitlines() if line.startswith("# Usage:")]
    document = (Path(__file__).parents[2] / "docs" / "install.md").read_text("utf-8")
    assert usage.removeprefix("# Usage: ") in document.splitlines()


def test_tab_completes_commands_flags_choices_and_files(run: Run, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(run("completion", "bash").out)
    (tmp_path / "recording.json").touch()
    for typed, expected in TYPED.items():
        command = ["bash", "-c", BASH, "bash", "./script", typed]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
        assert (set(done.stdout.split()), done.stderr) == (expected, ""), typed
