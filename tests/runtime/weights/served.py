"""A daemon's side and a head's in one process and without sockets, for tests of what they say to each
other; and an answer of real ones."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from flowspec.core.protocol.cluster_messages import Error
from flowspec.core.protocol.device_messages import AskBytes, AskModel, WeightQuestion
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.head import Head
from flowspec.runtime.weights.offer import Offer
from lab.plain_model import PlainModel
from tests.runtime.clusters import PROMPT, submit, tokens_of


class Direct:
    """A `HeadChannel` that asks an `Offer` at once; after `patience` answers with bytes the head is gone."""

    def __init__(self, offer: Offer, patience: int = 1 << 30) -> None:
        self.asked: list[WeightQuestion] = []
        self.told: list[tuple[str, float]] = []
        self.open_most = 0
        self._offer = offer
        self._patience = patience
        self._open: deque[WeightQuestion] = deque()

    def ask(self, question: WeightQuestion) -> None:
        self.asked.append(question)
        self._open.append(question)
        self.open_most = max(self.open_most, len(self._open))

    def answer(self) -> tuple[Any, Any]:
        question = self._open.popleft()
        if isinstance(question, AskModel):
            return self._offer.begin(), b""
        if isinstance(question, AskBytes):
            self._patience -= 1
            if self._patience < 0:
                raise ClusterError("the head is gone")
        found, tensor = self._offer.answer(question)
        assert not isinstance(found, Error)
        return found, b"" if tensor is None else tensor.data

    def tell(self, doing: str, share: float) -> None:
        assert 0 <= share <= 1
        self.told.append((doing, share))

    @property
    def ranges(self) -> list[AskBytes]:
        return [question for question in self.asked if isinstance(question, AskBytes)]


SAMPLING = Sampling(temperature=1.0, seed=3)


def answer(plan: ClusterPlan) -> tuple[list[int], int]:
    """The answer's tokens, and how many bytes of weights the head sent to the first device."""
    with Head(plan) as head:
        ready = head.stages[0].ready
        assert ready is not None
        return tokens_of(submit(head, count=12, sampling=SAMPLING)), ready.received_bytes


def expected(folder: Path) -> list[int]:
    """The tokens of `answer`."""
    return PlainModel(ModelFiles(str(folder)), "float32").generate(PROMPT, SAMPLING, 12, frozenset())
