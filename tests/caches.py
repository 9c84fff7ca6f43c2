"""Cache folders of tests, which are not the user's: all but what is built for this processor and known of
its kernels, which takes long to find out."""

from __future__ import annotations

from pathlib import Path

from flowspec.folders import cache_folder

BUILT, KNOWN = "arithmetic", "kernels"
SHARED = {name: cache_folder() / name for name in (BUILT, KNOWN)}
"""As they were when this was imported: the user's, or ones that link to them."""


def make_cache(home: Path, *names: str) -> str:
    """A cache home under which nothing else is there than what is shared, or these names of it: what
    `XDG_CACHE_HOME` is to be."""
    folder = home / "flowspec"
    folder.mkdir(parents=True)
    for name in names or SHARED:
        SHARED[name].mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / name).symlink_to(SHARED[name])
    return str(home)
