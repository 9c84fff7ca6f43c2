"""Turns text sources into token streams, one per domain, and draws training windows from them.

Four domains: `talk` (written by talk.py), `problems` (grade-school word problems, a jsonl of question and
answer), `code` (top-level definitions of the running Python's standard library) and `plays` (scenes of a
plain text file). The two files are given by the caller; nothing of them is part of the project.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from lab.recipe.talk import draw_dialogue

Messages = list[dict[str, str]]
DOMAINS = ("talk", "problems", "code", "plays")
VALIDATION_ONE_IN = 50


def problem_documents(path: Path) -> Iterator[Messages]:
    """Word problems with their worked answers, calculator marks stripped."""
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        yield _pair(row["question"], re.sub(r"<<.*?>>", "", row["answer"]))


def play_documents(path: Path, speeches_per_scene: int = 8) -> Iterator[Messages]:
    """Scenes of a play file in which speeches are separated by blank lines; the first speech is the
    question."""
    speeches = path.read_text("utf-8").split("\n\n")
    for i in range(0, len(speeches) - speeches_per_scene, speeches_per_scene):
        yield _pair(
            "Continue the play:\n" + speeches[i], "\n\n".join(speeches[i + 1 : i + speeches_per_scene])
        )


def code_documents(chars_max: int = 2400) -> Iterator[Messages]:
    """Top-level functions and classes of the standard library, asked for by their first line."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            source = path.read_text("utf-8")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # a file for another Python version
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = ast.get_source_segment(source, node) or ""
                first, _, rest = text.partition("\n")
                if len(rest) > 40:
                    yield _pair("Complete this Python code:\n" + first, rest[:chars_max])


def talk_documents(count: int, seed: int) -> Iterator[Messages]:
    rng = random.Random(seed)
    for _ in range(count):
        yield draw_dialogue(rng)


def _pair(ask: str, say: str) -> Messages:
    return [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]


def documents(problems: Path, plays: Path, dialogues: int = 100_000) -> dict[str, Iterator[Messages]]:
    return {
        "talk": talk_documents(dialogues, seed=1),
        "problems": problem_documents(problems),
        "code": code_documents(),
        "plays": play_documents(plays),
    }


def split(found: Iterable[Messages]) -> tuple[list[Messages], list[Messages]]:
    """A domain's documents as those held out for validation and those to train on, in random order."""
    shuffled = list(found)
    random.Random(0).shuffle(shuffled)
    held = max(2, len(shuffled) // VALIDATION_ONE_IN)
    return shuffled[:held], shuffled[held:]


def parse_mix(mix: str) -> dict[str, float]:
    """`talk=.55,plays=.45` as shares of the domains."""
    return {name: float(value) for name, value in (pair.split("=") for pair in mix.split(","))}


class Corpus:
    """Token streams by domain, each split into training and validation documents."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, problems: Path, plays: Path, dialogues: int = 100_000
    ) -> None:
        self.train: dict[str, np.ndarray] = {}
        self.validation: dict[str, np.ndarray] = {}
        for domain, found in documents(problems, plays, dialogues).items():
            held_out, trained = split(found)
            self.validation[domain] = _encode(tokenizer, held_out)
            self.train[domain] = _encode(tokenizer, trained)

    def draw(self, rng: np.random.Generator, weights: dict[str, float], rows: int, length: int) -> np.ndarray:
        """Random windows `[rows, length + 1]` int64; each row's domain is drawn by weight."""
        names = list(weights)
        share = np.array([weights[name] for name in names]) / sum(weights.values())
        return np.stack(
            [
                _window(rng, self.train[names[i]], length + 1)
                for i in rng.choice(len(names), size=rows, p=share)
            ]
        )

    def validation_rows(self, domain: str, rows: int, length: int) -> np.ndarray:
        """The first windows of a domain's validation stream, `[<=rows, length + 1]` int64."""
        stream = self.validation[domain]
        count = min(rows, len(stream) // (length + 1))
        return stream[: count * (length + 1)].reshape(count, length + 1).astype(np.int64)


def _encode(tokenizer: PreTrainedTokenizerBase, dialogues: list[Messages]) -> np.ndarray:
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in dialogues]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return np.concatenate([np.array(ids, dtype=np.uint16) for ids in encoded])


def _window(rng: np.random.Generator, stream: np.ndarray, length: int) -> np.ndarray:
    start = int(rng.integers(0, len(stream) - length))
    return stream[start : start + length].astype(np.int64)
