"""Parts of FlowSpec that not every machine needs: packages by extra, as in `setup.cfg`; how to get them."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType

from flowspec.errors import InputError

EXTRAS = {
    "hub": ("huggingface_hub",),
    "head": ("jinja2", "prompt_toolkit", "rich", "shtab", "tokenizers", "transformers"),
    "serve": ("h11", "prometheus_client", "starlette", "uvicorn"),
    "gpu": ("torch",),
    "grammars": ("llguidance",),
    "plots": ("matplotlib",),
    "discovery": ("zeroconf",),
}
"""Modules by the extra that brings them; a package has its module's name."""
ROOT = Path(__file__).resolve().parents[1]


class MissingPartError(InputError):
    """A module of an extra is not installed."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module} is not installed; it is of the extra {extra}: {how_to_get(extra)}")


def how_to_get(extra: str) -> str:
    """What to run for the packages of an extra, into the environment of this process."""
    if not (install := ROOT / "launch" / "install").is_file():
        return f"run {sys.executable} -m pip install 'flowspec[{extra}]'"
    if Path(sys.prefix) == ROOT / ".venv":
        here = Path("launch/install")
        return f"run {here if here.exists() and here.samefile(install) else install} {extra}"
    return f"run FLOWSPEC_VENV={sys.prefix} {install} {extra}"


def is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def missing_part(error: ModuleNotFoundError, command: str = "") -> MissingPartError | None:
    """What to say of an import that failed, if the module is one of an extra that is not installed; a command
    may have an extra of its name, which brings others."""
    module = error.name or ""
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if extra is None or is_installed(module):
        return None
    return MissingPartError(module, command if command in EXTRAS else extra)


def imported(name: str) -> ModuleType:
    """A module of an extra. Raises `MissingPartError` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (missing := missing_part(error)) is None:
            raise
        raise missing from None
