"""A cluster of local processes that the tests of a module share, and a server on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.reference import Reference
from flowspec.model.text import Tokenizer
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Session, Survival, open_session
from flowspec.serve.tally import Tally
from tests.serve.servers import Running, running


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(ModelFiles(BUNDLED))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(ModelFiles(BUNDLED), "float32")


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.fixture(scope="module")
def session(tally: Tally) -> Iterator[Session]:
    options = ClusterOptions(model=BUNDLED, dtype="float32", local=2, log_level="CRITICAL")
    survival = Survival(on_note=tally.note)
    with open_session(
        options, Decoding(drafters=("ngram",)), lambda text, share: None, survival=survival
    ) as found:
        found.head.observe(tally.on_event)
        yield found


@pytest.fixture(scope="module")
def server(session: Session, tokenizer: Tokenizer, tally: Tally) -> Iterator[Running]:
    with running(session, tokenizer, tally=tally) as found:
        yield found
