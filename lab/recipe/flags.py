"""The flags that commands of the recipe share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowspec.model.files import bundled_folder

FLAGS: Mapping[str, dict[str, Any]] = {
    "--target": {
        "type": Path,
        "default": bundled_folder("target"),
        "help": "folder of the model to draft for (the bundled one)",
    },
    "--out": {"type": Path},
    "--measure": {"type": Path, "metavar": "FOLDER"},
    "--problems": {"type": Path, "help": "jsonl of word problems (question, answer)"},
    "--plays": {"type": Path, "help": "text file of plays, speeches separated by blank lines"},
    "--mix": {"help": "share of each domain (%(default)s)"},
    "--steps": {"type": int},
    "--rows": {"type": int, "help": "windows per step (%(default)s)"},
    "--length": {"type": int, "help": "tokens per window (%(default)s)"},
    "--rate": {"type": float, "default": 1e-3, "help": "peak learning rate (%(default)s)"},
    "--dtype": {"choices": ("float32", "bfloat16"), "default": "bfloat16"},
    "--save-every": {"type": int, "default": 250},
    "--threads": {"type": int, "default": 2},
    "--seed": {"type": int, "default": 0},
    "--device": {"default": "cpu", "help": "cpu or cuda (%(default)s)"},
}


class RecipeParser(argparse.ArgumentParser):
    """For `python -m lab.recipe.NAME`."""

    def __init__(self, name: str, doc: str | None) -> None:
        description = (doc or "").partition("\n\n")[0]
        super().__init__(prog=f"python -m lab.recipe.{name}", description=description)

    def share(self, *flags: str, **changed: Any) -> None:
        """Takes some of `FLAGS`, of which something is `changed`."""
        for flag in flags:
            self.add_argument(flag, **{**FLAGS[flag], **changed})
