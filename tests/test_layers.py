"""Imports go downwards only (`docs/architecture.md`), and the pure heart imports no world to depend on."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = (
    "cli __main__",
    "serve",
    "<package> llm",
    "bench runtime sim",
    "watch",
    "draft model plan wire",
    "core",
    "checking extras memory_claims validation",
    "tree noise errors interruption host_memory folders child_process demo plain_json repeats version "
    "rounding",
)
PACKAGE = "<package>"
"""flowspec itself, by which programs import the API."""
DEPTHS = {layer: depth for depth, layers in enumerate(LAYERS) for layer in layers.split()}
SIDEWAYS = {
    ("__main__", "cli"): "it is the command",
    (PACKAGE, "llm"): "programs import the API by the package's name",
    ("bench", "runtime"): "the harness drives the worlds, which know nothing of it",
    ("bench", "sim"): "the harness drives the worlds, which know nothing of it",
    ("draft", "model"): "a drafter is a model or stands on one, and no model knows of drafters",
    ("draft", "plan"): "a drafter says what a planner reckons of it, and no planner knows of drafters",
}
WORLDLY = {"torch", "transformers", "zmq", "time", "datetime", "random", "secrets", "asyncio", "threading"}
WORLDLY |= {"multiprocessing", "socket", "os"}


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


@cache
def modules() -> dict[str, set[str]]:
    """What each module of FlowSpec imports."""
    found = {}
    for path in sorted((ROOT / "flowspec").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        package = module if is_package else module.rpartition(".")[0]
        found[module] = set(imports_of(path.read_text(encoding="utf-8"), package))
    return found


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else PACKAGE


def upward_imports(module: str, names: set[str]) -> list[str]:
    layer, broken = layer_of(module), []
    for name in sorted(name for name in names if name.split(".")[0] == "flowspec"):
        target = layer_of(name)
        downwards = target in DEPTHS and DEPTHS[layer] < DEPTHS[target]
        if not (target == layer or downwards or (layer, target) in SIDEWAYS):
            broken.append(f"{module} imports {name}")
    return broken


def find_circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, by whatever way round; empty where there are none."""
    try:
        TopologicalSorter({module: names & imports.keys() for module, names in imports.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_go_downwards_only() -> None:
    assert len(modules()) > 100
    assert {layer_of(module) for module in modules()} <= DEPTHS.keys()
    assert [broken for module, names in modules().items() for broken in upward_imports(module, names)] == []


def test_no_modules_import_each_other_not_even_for_types_or_inside_functions() -> None:
    # a package that imports itself by its own name asks for what is in it, and is no circle
    assert find_circle({module: names - {module} for module, names in modules().items()}) == []
    line = {"a": {"b"}, "b": {"c"}, "c": set()}
    assert find_circle(line) == []
    assert set(find_circle({**line, "c": {"a", "d"}, "d": set()})) == {"a", "b", "c"}


def test_the_product_needs_no_tests_the_protocol_no_core_and_the_pure_heart_no_world() -> None:
    protocol = "flowspec.core.protocol"
    allowed = sys.stdlib_module_names | {"numpy", "msgspec", "flowspec"}
    for module, names in modules().items():
        roots = {name.split(".")[0] for name in names}
        assert not roots & {"tests", "lab", "pytest"}, module
        if module.startswith(protocol):
            core = {name for name in names if layer_of(name) == "core"}
            assert [name for name in core if not name.startswith(protocol)] == [], module
        if layer_of(module) in ("core", "tree", "noise", "errors"):
            assert (roots & WORLDLY, roots - allowed) == (set(), set()), module


def test_the_package_the_stage_and_the_head_can_be_had_without_torch_or_zmq() -> None:
    code = (
        "import sys, flowspec, flowspec.core.head.head, flowspec.core.stage.stage; "
        "print(flowspec.__version__, flowspec.InputError.__name__, "
        "sorted({'torch', 'transformers', 'zmq', 'msgpack'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith(" InputError []\n")


def test_imports_are_seen_however_they_are_written() -> None:
    for module, source, found in (
        ("core.head.head", "def f():\n    from flowspec.wire.codec import encode", "flowspec.wire.codec"),
        ("core.head.head", "from ...runtime import daemon", "flowspec.runtime.daemon"),
        ("model.slice", "from flowspec import plan", "flowspec.plan"),
        ("bench.live", "from flowspec import LLM", "flowspec"),
        ("cli.main", "from flowspec.version import __version__\nfrom . import chat", None),
    ):
        name = f"flowspec.{module}"
        expected = [] if found is None else [f"{name} imports {found}"]
        assert upward_imports(name, set(imports_of(source, name.rpartition(".")[0]))) == expected
