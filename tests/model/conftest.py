from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowspec.model.arithmetic import compiled
from flowspec.model.arithmetic.compiled import Library
from flowspec.model.gpu import SOURCE
from tests.checkpoints import make_variant
from tests.model.fake_gpu import OnHost


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[Library]:
    """What is built of `canonical.c`, which a module's tests use."""
    before, found = compiled.library(), Library(compiled.build())
    compiled.use(found)
    yield found
    if before is not None:  # what a test has tried stays the process's own
        compiled.use(before)


@pytest.fixture(scope="session")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a variant, for all tests that change nothing in it."""
    return functools.cache(lambda name: make_variant(tmp_path_factory.mktemp(name), name))


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> OnHost:
    """`canonical.cu` as C."""
    made = tmp_path_factory.mktemp("cuda") / "canonical_cu.so"
    flags = ["-std=gnu11", "-O2", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    words = ["cc", *flags, "-DFLOWSPEC_HOST", "-shared", "-x", "c", str(SOURCE), "-lm", "-o", str(made)]
    subprocess.run(words, check=True)
    return OnHost(made)
