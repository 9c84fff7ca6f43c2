"""A cluster of local processes that the tests of a module share, and a server on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowspec.llm import LLM
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.reference import Reference
from flowspec.model.text import Tokenizer
from flowspec.runtime.session import Session
from flowspec.serve.totals import Totals
from tests.serve.servers import Running, running


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(ModelFiles(BUNDLED), "float32")


@pytest.fixture(scope="module")
def totals() -> Totals:
    return Totals()


@pytest.fixture(scope="module")
def llm(totals: Totals) -> Iterator[LLM]:
    with LLM(dtype="float32", local=2, drafter="ngram", on_note=totals.note) as found:
        found.session.head.observe(totals.on_event)
        yield found


@pytest.fixture(scope="module")
def session(llm: LLM) -> Session:
    return llm.session


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Tokenizer:
    assert llm.tokenizer is not None
    return llm.tokenizer


@pytest.fixture(scope="module")
def server(llm: LLM, totals: Totals) -> Iterator[Running]:
    with running(llm, totals=totals) as found:
        yield found
