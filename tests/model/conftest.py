from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowspec.model.arithmetic import build, compiled
from flowspec.model.arithmetic.compiled import Library


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    """What is built of `canonical.c`, which a module's tests use."""
    before = build.allowed()
    build.allow(build.build())
    found = compiled.library()
    assert found is not None, "the suite needs a C compiler, and that it ends in time"
    yield found
    build.allow(before)
