"""Cache folders of tests, which are not the user's: all but what is known of kernels, which takes seconds to
find out."""

from __future__ import annotations

from pathlib import Path

from flowspec.folders import cache_folder

KERNELS = cache_folder() / "kernels"
"""As it was when this was imported: the user's, or one that links to it."""


def make_cache(home: Path) -> str:
    """A cache home under which nothing is known but kernels: what `XDG_CACHE_HOME` is to be."""
    KERNELS.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = home / "flowspec"
    folder.mkdir(parents=True)
    (folder / "kernels").symlink_to(KERNELS)
    return str(home)
