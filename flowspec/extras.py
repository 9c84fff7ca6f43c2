"""Packages that not everybody needs, and how to get them.

From a checkout that is the launcher, with the versions that are locked. Elsewhere it is the packages
themselves: an extra of the name `flowspec` would be asked of PyPI, where it is not ours.
"""

from __future__ import annotations

from pathlib import Path

EXTRAS = {
    "discovery": ("zeroconf",),
    "grammars": ("llguidance",),
    "plots": ("matplotlib",),
    "serve": ("h11", "llguidance", "prometheus_client", "starlette", "uvicorn"),
}
"""As in `setup.cfg`."""
ROOT = Path(__file__).resolve().parents[1]


def how_to_get(extra: str) -> str:
    """What to run for the packages of an extra."""
    if (ROOT / "launch" / "install").is_file():
        return f"run launch/install {extra}"
    return f"run pip install {' '.join(EXTRAS[extra])}"
