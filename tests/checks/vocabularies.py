"""Tokenizers of GGUF files beside the ids that llama.cpp publishes: `python -m tests.checks.vocabularies
FOLDER`.

The folder holds vocabularies as `models/` of llama.cpp's repository does: NAME.gguf, with texts in
NAME.gguf.inp and their ids in NAME.gguf.out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowspec.errors import InputError
from flowspec.model.gguf.file import GgufFile
from flowspec.model.gguf.tokenizer import load
from tests.command import Parser, run_command
from tests.vocabularies import expected


def _compare(path: Path) -> dict[str, Any]:
    """How many texts have the expected ids, and those that have others."""
    try:
        tokenizer = load(GgufFile.read(path))
    except InputError as error:
        return {"right": 0, "refused": str(error)}
    right, wrong = 0, []
    for text, ids in expected(path.with_name(f"{path.name}.inp"), path.with_name(f"{path.name}.out")):
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        if found == ids:
            right += 1
        else:
            wrong.append({"text": text, "expected": ids, "got": found})
    return {"right": right, "wrong": wrong}


def command(args: argparse.Namespace) -> int:
    paths = [path.with_suffix("") for path in sorted(args.folder.glob("*.gguf.out"))]
    if not paths:
        raise InputError(f"{args.folder}: expected NAME.gguf with NAME.gguf.inp and NAME.gguf.out, got none")
    found = {path.name: _compare(path) for path in paths}
    if args.json:
        print(json.dumps(found))
    else:
        for name, compared in found.items():
            wrong = compared.get("wrong")
            print(
                f"{name}: {compared['refused']}"
                if wrong is None
                else f"{name}: {compared['right']} texts right, {len(wrong)} wrong"
            )
            for each in wrong or ():
                print(f"  {each}")
    return 0 if all(compared.get("wrong") == [] for compared in found.values()) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.checks.vocabularies", __doc__)
    parser.add_argument("folder", type=Path)
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
