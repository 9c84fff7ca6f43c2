"""How much the tests protect: mistakes are planted in the product, one at a time, and the tests run on each.

A sample of places is drawn by a seed, the same number for each of five kinds of mistake and each package. One
run of the whole suite over a copy in which those places write down the test that reaches them tells which
tests to run on each mistake; what no test reaches survives. Each mistake is then made in a copy of its own.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from lab.command import Parser, run_command

PACKAGES = ("core", "model", "wire", "runtime", "serve")
KINDS = ("compare", "boundary", "dropped call", "swapped arguments", "constant")
OPPOSITES: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
NEIGHBOURS: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
REACHED = """
import builtins as _builtins, os as _os
_seen = set()
def _reach(number):
    test = _os.environ.get("PYTEST_CURRENT_TEST", "")
    if (number, test) not in _seen:
        _seen.add((number, test))
        with open(_os.environ["FLOWSPEC_REACHED"], "a") as file:
            file.write(f"{number}\\t{test}\\n")
_builtins._reach = _reach
"""
"""Put before the package's own first line. `_reach` is false, so `_reach(3) or value` is the value."""
UNKNOWN_TEST = 4
"""Exit status of pytest, also where a test's file cannot be imported any more."""
TEST_S = 120
"""Seconds after which a test of a mistake has failed."""
TESTS_S = 150.0
"""Seconds of tests that are run on one mistake, the fastest first, before it counts as survived."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """`before` in the file at `path`, from byte `start` on, becomes `after`."""

    kind: str
    path: str
    line: int
    start: int
    before: str
    after: str

    def overlaps(self, other: Mistake) -> bool:
        """Whether the two are about the same bytes."""
        ends = self.start + len(self.before.encode()), other.start + len(other.before.encode())
        return self.path == other.path and self.start < ends[1] and other.start < ends[0]

    def put(self, folder: Path, text: str) -> None:
        """Replaces what it is about in that copy of the product."""
        file = folder / self.path
        source = file.read_bytes()
        before = self.before.encode()
        assert source[self.start : self.start + len(before)] == before, self
        file.write_bytes(source[: self.start] + text.encode() + source[self.start + len(before) :])


def mistakes_in(folder: Path, path: str) -> Iterator[Mistake]:
    """All that could be made in the functions of a file."""
    source = (folder / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def text(node: ast.expr) -> str:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return source[place(node) : starts[node.end_lineno - 1] + node.end_col_offset].decode()

    def place(node: ast.expr) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def found(kind: str, node: ast.expr, after: str) -> Mistake:
        return Mistake(kind, path, node.lineno, place(node), text(node), after)

    for node in _expressions(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = text(node.left), text(node.comparators[0])
            for kind, known in (("compare", OPPOSITES), ("boundary", NEIGHBOURS)):
                if word := known.get(type(node.ops[0])):
                    yield found(kind, node, f"(({left}) {word} ({right}))")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield found("constant", node, repr(not node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield found("constant", node, repr(node.value + 1))
        elif isinstance(node, ast.Call):
            if len(node.args) >= 2 and not any(isinstance(value, ast.Starred) for value in node.args):
                first, second, *others = (text(value) for value in node.args)
                named = [
                    f"{word.arg}={text(word.value)}" if word.arg else f"**{text(word.value)}"
                    for word in node.keywords
                ]
                if first != second:
                    swapped = ", ".join([second, first, *others, *named])
                    yield found("swapped arguments", node, f"({text(node.func)})({swapped})")
            if getattr(node, "is_statement", False) and not text(node.func).startswith(("log.", "logging.")):
                yield found("dropped call", node, "None")


def _expressions(tree: ast.AST) -> Iterator[ast.expr]:
    """What functions compute: no types, decorators, defaults or parts of texts."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting: list[ast.AST] = list(function.body)
            while waiting:
                node = waiting.pop()
                if isinstance(
                    node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.JoinedStr | ast.Match
                ):
                    continue
                if isinstance(node, ast.AnnAssign):
                    waiting += [node.value] if node.value else []
                    continue
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                    node.value.is_statement = True  # type: ignore[attr-defined]
                if isinstance(node, ast.expr):
                    yield node
                waiting += ast.iter_child_nodes(node)


def draw(folder: Path, seed: int, count: int) -> list[Mistake]:
    """As many of each kind from each package, as far as there are any."""
    chance = random.Random(seed)
    groups = []
    for package in PACKAGES:
        kinds: dict[str, list[Mistake]] = defaultdict(list)
        for file in sorted((folder / "flowspec" / package).rglob("*.py")):
            for mistake in mistakes_in(folder, str(file.relative_to(folder))):
                kinds[mistake.kind].append(mistake)
        groups += [iter(chance.sample(kinds[kind], len(kinds[kind]))) for kind in KINDS]
    drawn: list[Mistake] = []
    for group in islice(cycle(groups), 100 * count):
        found = next(group, None)
        if found and len(drawn) < count and not any(found.overlaps(other) for other in drawn):
            drawn.append(found)
    return drawn


def copy_of(tree: Path, folder: Path) -> Path:
    """The files that git knows, without its history."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, check=True, capture_output=True).stdout
    for name in listed.decode().split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, folder / name)
    return folder


def run_tests(folder: Path, words: Sequence[str], limit_s: float, **variables: str) -> tuple[int, str]:
    """The exit status of pytest, or 124 after `limit_s`; and what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder), **variables}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    return done.returncode, done.stdout


def tests_that_reach(tree: Path, mistakes: Sequence[Mistake], folder: Path) -> list[list[tuple[float, str]]]:
    """Of each mistake, the tests that come by, with their seconds, the fastest first; as found earlier if
    they were looked for in this folder."""
    reached, log = folder / "reached.txt", folder / "printed.txt"
    if not log.exists():
        copy_of(tree, folder)
        for number, mistake in sorted(enumerate(mistakes), key=lambda pair: -pair[1].start):
            mistake.put(folder, f"(_reach({number}) or ({mistake.before}))")
        first = folder / "flowspec" / "__init__.py"
        first.write_text(REACHED + first.read_text("utf-8"), "utf-8")
        words = ["-n", str(os.cpu_count()), "--dist", "worksteal", "--durations", "0", "--durations-min", "0"]
        log.write_text(run_tests(folder, words, 7200.0, FLOWSPEC_REACHED=str(reached))[1], "utf-8")
    printed = log.read_text("utf-8")
    failed = set(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.M))  # without mistakes, too
    seconds: dict[str, float] = defaultdict(float)
    for line in printed.splitlines():
        match line.split(maxsplit=2):
            case [spent, ("call" | "setup" | "teardown"), name] if spent.endswith("s"):
                seconds[name] += float(spent[:-1])
    found: list[set[str]] = [set() for _ in mistakes]
    for line in reached.read_text("utf-8").splitlines():
        place, _, test = line.partition("\t")
        if (name := test.rpartition(" ")[0]) and name not in failed:
            found[int(place)].add(name)
    return [sorted((seconds[name], name) for name in names) for names in found]


def survives(folder: Path, mistake: Mistake, tests: Sequence[tuple[float, str]]) -> bool:
    """Whether tests pass all the same; `folder` is as it was before."""
    chosen: list[str] = []
    spent_s = 0.0
    for seconds, name in tests:
        spent_s += seconds
        if not chosen or spent_s <= TESTS_S:
            chosen.append(name)
    if not chosen:
        return True
    source = (folder / mistake.path).read_bytes()
    mistake.put(folder, mistake.after)
    try:
        status, printed = run_tests(folder, ["-x", "-n", "0", "--timeout", str(TEST_S), *chosen], 3 * TESTS_S)
    finally:
        (folder / mistake.path).write_bytes(source)
    assert status != UNKNOWN_TEST or "ERRORS" in printed or "loading conftest" in printed, (mistake, printed)
    return status == 0


def measure(options: argparse.Namespace) -> int:
    tree = Path(options.tree)
    mistakes = draw(tree, options.seed, options.count)
    with tempfile.TemporaryDirectory(prefix="flowspec-mutants-") as name:
        folder = Path(options.folder or f"{name}/reached")
        reached = tests_that_reach(tree, mistakes, folder)
        copies = [copy_of(tree, Path(name) / str(number)) for number in range(options.jobs)]
        free = list(copies)

        def judge(number: int) -> bool:
            folder = free.pop()
            try:
                return survives(folder, mistakes[number], reached[number])
            finally:
                free.append(folder)

        survivors = []
        with ThreadPoolExecutor(options.jobs) as threads:
            numbers = range(options.first - 1, len(mistakes))
            for number, is_left in zip(numbers, threads.map(judge, numbers), strict=True):
                mistake = mistakes[number]
                fate = "SURVIVES" if is_left else "caught"
                print(
                    f"{number + 1} of {len(mistakes)}: {fate}: {mistake.kind}, "
                    f"{mistake.path}:{mistake.line}, {len(reached[number])} tests: "
                    f"{mistake.before!r:.80} -> {mistake.after!r:.80}",
                    file=sys.stderr,
                    flush=True,
                )
                if is_left:
                    survivors.append(number)
    if options.json:
        print(json.dumps({"mutants": len(mistakes), "survivors": survivors}))
    else:
        print(f"{len(survivors)} of {len(mistakes)} mistakes survive")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.mutants", __doc__)
    parser.whole("--seed", 53)
    parser.whole("--count", 120, "mistakes to make")
    parser.whole("--jobs", os.cpu_count() or 1, "mistakes that are judged side by side")
    parser.whole("--first", 1, "the mistake to begin with")
    parser.add_argument("--tree", default=".", help="folder of the product and its tests (default: here)")
    parser.add_argument("--folder", help="to keep in it which tests come by (default: not kept)")
    return run_command(parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
