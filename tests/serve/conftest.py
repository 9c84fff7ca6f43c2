"""One cluster of local processes and one server on it for all tests of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowspec.llm import LLM
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.text import Tokenizer
from flowspec.runtime.session import Session
from flowspec.serve.metrics import Totals
from lab.plain_model import PlainModel
from tests.serve.servers import Running, running


@pytest.fixture(scope="package")
def reference() -> PlainModel:
    return PlainModel(ModelFiles(BUNDLED), "float32")


@pytest.fixture(scope="package")
def totals() -> Totals:
    return Totals()


@pytest.fixture(scope="package")
def llm(totals: Totals) -> Iterator[LLM]:
    with LLM(dtype="float32", local=2, drafter="ngram", on_note=totals.note) as found:
        found.session.head.observe(totals.on_event)
        yield found


@pytest.fixture(scope="package")
def session(llm: LLM) -> Session:
    return llm.session


@pytest.fixture(scope="package")
def tokenizer(llm: LLM) -> Tokenizer:
    assert llm.tokenizer is not None
    return llm.tokenizer


@pytest.fixture(scope="package")
def server(llm: LLM, totals: Totals) -> Iterator[Running]:
    with running(llm, totals=totals) as found:
        yield found
