"""What a head held goes when it is closed, though heads are parts of reference cycles, which Python looks for very seldom."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from flowspec.core.messages import Sampling
from flowspec.runtime.session import ClusterOptions, Decoding, Limits, open_cluster
from tests.runtime.clusters import PROMPT


def test_the_drafters_weights_go_with_the_session_and_the_rest_with_the_next_one(folder: Path) -> None:
    options = ClusterOptions(model=str(folder), dtype="float32", local=1, context=300, log_level="CRITICAL")
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
            with cluster.session(Decoding(drafters=("none",)), lambda text, share: None):
                assert first() is None
        finally:
            gc.enable()
