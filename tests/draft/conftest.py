from __future__ import annotations

import pytest

from flowspec.model.engines import prepare


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """What computes here is tried."""
    prepare()
