"""Imports go downwards only (`docs/architecture.md`), and the pure heart imports no world to depend on."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "flowspec").rglob("*.py"))
LAYERS = [
    {"cli", "__main__"},
    {"serve"},
    {"", "llm"},
    {"bench", "runtime", "sim"},
    {"watch"},
    {"draft", "model", "plan", "wire"},
    {"core"},
    {"checking", "memory_claims"},
    {
        *(
            "tree",
            "noise",
            "errors",
            "interruption",
            "host_memory",
            "folders",
            "child_process",
            "demo",
            "extras",
            "plain_json",
            "repeats",
        ),
        *("version", "rounding", "extras"),
    },
]
DEPTHS = {package: depth for depth, packages in enumerate(LAYERS) for package in packages}
SIDEWAYS = {
    ("__main__", "cli"): "it is the command",
    ("", "llm"): "programs import the API by the package's name",
    ("bench", "runtime"): "the harness drives the worlds, which know nothing of it",
    ("bench", "sim"): "the harness drives the worlds, which know nothing of it",
    ("draft", "model"): "a drafter is a model or stands on one, and no model knows of drafters",
    ("draft", "plan"): "a drafter says what a planner reckons of it, and no planner knows of drafters",
}
WORLDLY = {
    "torch",
    "transformers",
    "zmq",
    "time",
    "datetime",
    "random",
    "secrets",
    "asyncio",
    "threading",
    "multiprocessing",
    "socket",
    "os",
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports_of(source: str, package: str) -> Iterator[str]:
    """Every module that `source` imports, at its top or inside its functions, by full name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{name}.{alias.name}"
                yield inner if name.startswith("flowspec") and is_module(inner) else name


def imported(path: Path) -> set[str]:
    module = module_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return set(imports_of(path.read_text(encoding="utf-8"), package))


def layer_of(module: str) -> str:
    """The part of the house that a module is in; '' for the package itself, by which programs import the
    API."""
    return module.split(".")[1] if "." in module else ""


def upward_imports(module: str, names: set[str]) -> list[str]:
    layer = layer_of(module)
    broken = []
    for name in sorted(name for name in names if name.split(".")[0] == "flowspec"):
        target = layer_of(name)
        downwards = target in DEPTHS and DEPTHS[layer] < DEPTHS[target]
        if not (target == layer or downwards or (layer, target) in SIDEWAYS):
            broken.append(f"{module} imports {name}")
    return broken


def test_every_module_has_its_place_in_the_layers() -> None:
    assert len(FILES) > 20
    assert {layer_of(module_of(path)) for path in FILES} <= DEPTHS.keys()


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_downwards_only(path: Path) -> None:
    assert upward_imports(module_of(path), imported(path)) == []


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_the_product_needs_nothing_of_the_laboratory(path: Path) -> None:
    assert {name for name in imported(path) if name.split(".")[0] in ("tests", "pytest")} == set()


@pytest.mark.parametrize("path", [p for p in FILES if "protocol" in p.parts], ids=module_of)
def test_what_is_said_stands_on_nothing_of_those_who_say_it(path: Path) -> None:
    cores = {name for name in imported(path) if layer_of(name) == "core"}
    assert {name for name in cores if not name.startswith("flowspec.core.protocol")} == set()


def circles(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Modules that import each other, by whatever way round (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        path.append(module)
        for target in imports[module] & imports.keys():
            if target not in index:
                visit(target)
            if target in path:
                low[module] = min(low[module], low[target])
        if low[module] == index[module]:
            place = path.index(module)
            if len(path) > place + 1:
                found.append(set(path[place:]))
            del path[place:]

    for module in imports:
        if module not in index:
            visit(module)
    return found


def test_no_modules_import_each_other_not_even_for_types_or_inside_functions() -> None:
    assert circles({module_of(path): imported(path) for path in FILES}) == []


def test_this_test_sees_circles() -> None:
    line = {"a": {"b"}, "b": {"c"}, "c": set()}
    assert circles(line) == []
    assert circles({**line, "c": {"a", "d"}, "d": set()}) == [{"a", "b", "c"}]


@pytest.mark.parametrize(
    "path", [p for p in FILES if layer_of(module_of(p)) in ("core", "tree", "noise", "errors")], ids=module_of
)
def test_the_pure_heart_imports_no_clock_no_chance_no_threads_and_no_tensors(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert roots & WORLDLY == set()
    assert roots <= sys.stdlib_module_names | {"numpy", "flowspec"}


def test_a_stage_and_a_head_can_be_had_without_torch_or_zmq() -> None:
    code = (
        "import sys, flowspec.core.head.head, flowspec.core.stage.stage; "
        "print(sorted({'torch', 'transformers', 'zmq', 'msgpack'} & sys.modules.keys()))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        (
            "flowspec.core.head.head",
            "def f():\n    from flowspec.wire.codec import encode",
            ["flowspec.core.head.head imports flowspec.wire.codec"],
        ),
        (
            "flowspec.core.head.head",
            "from ...runtime import daemon",
            ["flowspec.core.head.head imports flowspec.runtime.daemon"],
        ),
        ("flowspec.model.slice", "from flowspec import plan", ["flowspec.model.slice imports flowspec.plan"]),
        (
            "flowspec.runtime.head",
            "import flowspec.bench.plain",
            ["flowspec.runtime.head imports flowspec.bench.plain"],
        ),
        ("flowspec.bench.live", "from flowspec import LLM", ["flowspec.bench.live imports flowspec"]),
        ("flowspec.runtime.head", "import flowspec.llm", ["flowspec.runtime.head imports flowspec.llm"]),
        (
            "flowspec.cli.main",
            "from flowspec.version import __version__\nfrom . import chat\nimport flowspec.core.head.head",
            [],
        ),
    ],
)
def test_this_test_sees_imports_however_they_are_written(
    module: str, source: str, expected: list[str]
) -> None:
    assert upward_imports(module, set(imports_of(source, module.rpartition(".")[0]))) == expected
