"""What heads learnt of the models beside the target, kept between runs: a file for each model, precision,
method, set of drafters and split over devices.

It changes how fast answers are, never which. The files are JSON that a person can read and delete, in
`~/.local/state/flowspec/learnt`, for the user alone; of prompts they hold no text, but how often tokens were
used, by which a prompt of the same kind is known again. Those that were not used for longest go.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from flowspec.core.head.head import HeadState
from flowspec.folders import files_by_age, read_regular, state_folder, write_whole
from flowspec.plan.placement import ClusterPlan
from flowspec.validation import NOTHING, Document, Misfit, decode_json

VERSION = 2
"""Of the file: counts up when a field comes, goes or means something else."""
FILES_MAX = 64
BYTES_MAX = 4 << 20
"""Of a file that is read; what is written is far less."""
WRITE_EVERY_S = 60.0
"""A head that goes on answering writes no more often."""

_LIST = re.compile(rb"\[[^][{}]*\]")
"""Goes into a line of its own."""

log = logging.getLogger("flowspec.learnt")


class _Version(msgspec.Struct):
    version: int


class LearntDocument(Document, frozen=True, kw_only=True):
    version: int = VERSION
    of: dict[str, Any]
    learnt: HeadState


class LearntFile:
    """Where a head with this plan, method and drafters keeps what it learns."""

    def __init__(self, plan: ClusterPlan, method: str, drafters: Sequence[str]) -> None:
        self._of = {
            "model": plan.model,
            "fingerprint": plan.fingerprint,
            "precision": plan.dtype,
            "method": method,
            "drafters": list(drafters),
            "stages": [[stage.name, stage.first, stage.end] for stage in plan.stages],
        }
        digest = hashlib.sha256(msgspec.json.encode(self._of)).hexdigest()[:12]
        name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(plan.model).name)[:40].strip("-.")
        self.path = state_folder() / "learnt" / f"{name or 'model'}-{method}-{digest}.json"

    def read(self) -> HeadState | None:
        """What was kept; None if nothing was, or by another version. Raises `ValueError` with what is wrong
        with the file."""
        try:
            data = read_regular(self.path, BYTES_MAX)
            if (version := decode_json(data, _Version).version) != VERSION:
                log.info("%s is of version %d, not %d, and is not used", self.path, version, VERSION)
                return None
            found = decode_json(data, LearntDocument)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"expected a file that can be read ({error.strerror})") from None
        except (msgspec.DecodeError, RecursionError):
            raise ValueError("expected JSON") from None
        for name, own in self._of.items():
            if (other := found.of.get(name, NOTHING)) != own:
                raise Misfit(("of", name), f"{own!r:.80}", other)
        return found.learnt

    def write(self, learnt: HeadState) -> None:
        """Raises `OSError`."""
        text = msgspec.json.format(msgspec.json.encode(LearntDocument(of=self._of, learnt=learnt)), indent=1)
        write_whole(self.path, _LIST.sub(lambda found: re.sub(rb"\n *", b" ", found[0]), text))
        for path in files_by_age(self.path.parent, ".json")[:-FILES_MAX]:
            with contextlib.suppress(OSError):  # another head may do the same
                path.unlink()
                log.info("%s was removed: only the last %d are kept", path, FILES_MAX)
