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
    before = build.allowed()
    build.allow(build.build())
    found = compiled.library()
    assert found is not None, "the suite needs a C compiler, and that it ends in time"
    yield found
    if before is not None:  # what a test has tried stays the process's own
        build.allow(before)


@pytest.fixture(scope="session")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a variant, for all tests that change nothing in it."""
    return functools.cache(lambda name: make_variant(tmp_path_factory.mktemp(name), name))
