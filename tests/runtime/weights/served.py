"""A daemon's side and a head's in one process and without sockets, for tests of what they say to each
other."""

from __future__ import annotations

from collections import deque
from typing import Any

from flowspec.core.protocol.cluster_messages import Error
from flowspec.core.protocol.weight_messages import AskBytes, AskModel, WeightQuestion
from flowspec.errors import ClusterError
from flowspec.runtime.weights.offer import Offer


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
