"""A journal of an answer of the bundled model for tests."""

from __future__ import annotations

from typing import Any

from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.runtime.journal.lines import Entry, Setting
from flowspec.runtime.question import Question
from flowspec.runtime.session import Limits

LIMITS = Limits(new_tokens_max=4, stop_ids=frozenset([2]))
ENTRY = Entry(question=Question(prompt=(1, 5, 9), sampling=Sampling(), limits=LIMITS))


def setting(**changes: Any) -> Setting:
    plain: dict[str, Any] = {
        "command": "generate",
        "model": BUNDLED,
        "fingerprint": ModelFiles(BUNDLED).fingerprint(),
        "dtype": "float32",
        "context": 100,
    }
    return Setting(**(plain | changes))
