"""A compute thread without a daemon, and what a head answers it."""

from __future__ import annotations

import select
from pathlib import Path
from typing import Any

from msgspec import structs

from flowspec.core.cluster.daemon import Loaded
from flowspec.core.protocol.cluster_messages import Assign, Loading
from flowspec.core.protocol.device_messages import WeightQuestion
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.runtime.compute import ComputeThread
from flowspec.runtime.machine import Machine
from flowspec.runtime.transport import Wake
from flowspec.runtime.weights.transfer import Offer
from tests.runtime.clusters import WAIT_S, whole_model

CONTEXT = 60


class Bench:
    def __init__(self, folder: Path) -> None:
        self.files = ModelFiles(str(folder))
        self.wake = Wake()
        self.compute = ComputeThread(Machine(device="cpu", threads=1), self.wake)
        self.offer = Offer(self.files, self.files.fingerprint())
        self.progress: list[str] = []

    def close(self) -> None:
        self.compute.stop(WAIT_S)
        assert not self.compute._thread.is_alive()
        self.offer.close()
        self.wake.close()

    def assign(self, bounds: tuple[int, int], *, is_beside: bool = False) -> Assign:
        first, end = bounds
        return structs.replace(
            whole_model(self.files.model, self.files.fingerprint(), self.files.spec),
            stages=2,
            first_layer=first,
            end_layer=end,
            next_hop="127.0.0.1:1",
            next_name="next",
            context=CONTEXT,
            is_beside=is_beside,
        )

    def result(self, assignment_id: int) -> Any:
        """What comes for an assignment; questions are answered on the way."""
        while True:
            while not self.compute.results:
                assert select.select([self.wake.read_fd], [], [], WAIT_S)[0], "nothing came of it"
                self.wake.clear()
            of, found = self.compute.results.popleft()
            assert of == assignment_id
            if isinstance(found, WeightQuestion):
                self.compute.deliver(assignment_id, self.offer.answer(found)[0], b"")
            elif isinstance(found, Loading):
                self.progress.append(found.doing)
            else:
                return found

    def load(self, assignment_id: int, bounds: tuple[int, int]) -> Loaded:
        self.compute.post(assignment_id, self.assign(bounds))
        found = self.result(assignment_id)
        assert isinstance(found, Loaded), found
        return found

    def slice(self) -> Slice:
        assert self.compute._held is not None
        return self.compute._held.part
