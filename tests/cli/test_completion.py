"""`flowspec completion`: what Tab does, in the shells that are there."""

from __future__ import annotations

import re
import shutil
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
ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'unsetopt PROMPT_SP; fpath=($PWD $fpath); autoload -U compinit; compinit -u -D; LISTMAX=1000'
told='told() { print "<en""d>" }; zle -N told; bindkey "^I" list-choices "^T" told'
zpty -w shell "$told; PS1='<rea''dy>'"
zpty -r shell said '*<ready>*'
zpty -w -n shell "$1"$'\t'$'\x14'
zpty -r shell said '*<end>*'
print -rn -- "$said"
zpty -d shell
"""
"""Completion works only where somebody types: here, in a terminal of its own."""
FISH = 'source $argv[1]; complete -C "$argv[2]" | string replace -r "\\t.*" ""; true'
RUN = {"bash": ["bash", "-c", BASH, "bash"], "fish": ["fish", "--no-config", "-c", FISH]}


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, run: Run, tmp_path: Path) -> str:
    """A shell, whose script is in `tmp_path`."""
    (tmp_path / "script").write_text(run("completion", request.param).out)
    return str(request.param)


def offered(shell: str, typed: str, folder: Path) -> tuple[set[str], str]:
    """What Tab offers behind what was typed, and what it complains of."""
    if shell == "zsh":
        (folder / "_flowspec").write_text((folder / "script").read_text())
        run = ["zsh", "-f", "-c", ZSH, "zsh", typed]
    else:
        run = [*RUN[shell], "./script", typed]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    if shell != "zsh":
        return set(done.stdout.split()), done.stderr
    lines = re.sub(
        r"\x1b\[[0-9;?]*[A-Za-z]|\r|<end>|<ready>", "\n", done.stdout.partition(typed)[2]
    ).splitlines()
    found = [line.partition("  -- ")[0] for line in lines if typed not in line]
    return set(" ".join(found).split()), done.stderr


def test_a_script_names_every_command_and_says_where_it_goes_as_the_document_does(
    shell: str, tmp_path: Path
) -> None:
    text = (tmp_path / "script").read_text()
    assert all(name in text for name in (*COMMANDS, "max-new-tokens", "ignore-eos"))
    (usage,) = [line for line in text.splitlines() if line.startswith("# Usage:")]
    document = (Path(__file__).parents[2] / "docs" / "install.md").read_text("utf-8")
    assert usage.removeprefix("# Usage: ") in document.splitlines()


def test_tab_completes_commands_flags_choices_and_files(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "recording.json").touch()
    for typed, expected in TYPED.items():
        assert offered(shell, typed, tmp_path) == (expected, ""), typed
