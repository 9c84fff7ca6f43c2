"""A head that is closed: what it held goes, though it is a part of reference cycles, and its thread may leave
before it is told to."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest

from flowspec.core.protocol.messages import Sampling
from flowspec.runtime.session import ClusterOptions, Decoding, Limits, open_cluster
from flowspec.runtime.transport import Wake
from tests.runtime.clusters import PROMPT, WAIT_S


@pytest.mark.usefixtures("lent")
def test_the_drafters_weights_go_with_the_session_and_the_rest_with_the_next_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the second one sees that it is to stop, and is through, before `close` gets to wake it,
    which closes it all the same."""
    options = ClusterOptions(model=str(folder), dtype="float32", local=1, context=300)
    with open_cluster(options) as cluster:
        gc.collect()
        gc.disable()
        try:
            with cluster.session(Decoding(drafters=(str(folder),)), lambda text, share: None) as session:
                session.ask(PROMPT, Sampling(), Limits(new_tokens_max=4, stop_ids=frozenset()))
                assert session.head.drafters
                drafter = weakref.ref(session.head.drafters[0].drafter)
                first = weakref.ref(session.head)
            del session
            assert drafter() is None
            with cluster.session(Decoding(drafters=("none",)), lambda text, share: None) as session:
                assert first() is None
                head = session.head
                wake = head._wake.set

                def too_late() -> None:
                    head._thread.join(WAIT_S)
                    wake()

                monkeypatch.setattr(head._wake, "set", too_late)
            assert not head._thread.is_alive()
        finally:
            gc.enable()


def test_a_wake_that_is_closed_writes_into_nobodys_pipe() -> None:
    wake = Wake()
    wake.close()
    read, write = os.pipe()  # of the same numbers
    try:
        wake.set()
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    finally:
        os.close(read)
        os.close(write)
