"""A daemon's side and a head's in one process and without sockets, for tests of what they say to each
other; and an answer of real ones."""

from __future__ import annotations

from pathlib import Path

from flowspec.core.protocol.cluster_messages import Loading
from flowspec.core.protocol.device_messages import AskBytes, WeightQuestion
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError
from flowspec.model.files import ModelFiles
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.head import Head
from flowspec.runtime.weights.transfer import Answer, HeadChannel, Offer
from lab.plain_model import PlainModel
from tests.runtime.clusters import PROMPT, submit, tokens_of


class Direct(HeadChannel):
    """Asks an `Offer`, without sockets; after `patience` answers with bytes the head is gone."""

    def __init__(self, offer: Offer | None = None, patience: int = 1 << 30) -> None:
        super().__init__(self._take)
        self.asked: list[WeightQuestion] = []
        self.open_most = 0
        self._offer, self._patience, self._answered = offer, patience, 0

    def _take(self, message: WeightQuestion | Loading) -> None:
        if isinstance(message, Loading):
            assert 0 <= message.share <= 1
            return
        self.asked.append(message)
        self.open_most = max(self.open_most, len(self.asked) - self._answered)

    def answer(self, kind: type[Answer]) -> tuple[Answer, bytes | memoryview]:
        question = self.asked[self._answered]
        self._answered += 1
        self._patience -= isinstance(question, AskBytes)
        if self._patience < 0:
            raise ClusterError("the head is gone")
        assert self._offer is not None, "a daemon that has nothing to ask"
        found, tensor = self._offer.answer(question)
        self.deliver(found, b"" if tensor is None else tensor.data)
        return super().answer(kind)

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
