from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowspec.bench.checkpoints import make_variant
from flowspec.model.arithmetic import build, compiled
from flowspec.model.arithmetic.compiled import Library


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[Library]:
    """What is built of `canonical.c`, which a module's tests use."""
    before, found = compiled.library(), Library(build.build())
    compiled.use(found)
    yield found
    if before is not None:  # what a test has tried stays the process's own
        compiled.use(before)


@pytest.fixture(scope="session")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a variant, for all tests that change nothing in it."""
    return functools.cache(lambda name: make_variant(tmp_path_factory.mktemp(name), name))
