"""More conversations than a daemon has memory for, on real daemons: some wait, all answers are exact, and no
device is counted as lost."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Sampling
from flowspec.core.stage.slots import WORK_BYTES
from flowspec.draft.lookup import LookUpDrafter
from flowspec.model.files import ModelFiles
from flowspec.runtime.head import Head
from flowspec.runtime.heap import give_back
from flowspec.runtime.local import LocalDaemon
from lab.plain_model import PlainModel
from tests.checkpoints import SMALL, make_checkpoint
from tests.runtime.clusters import plan_for, submit, surviving, tokens_of

HEADS, HEAD_DIM = 32, 128
CONTEXT = 400
COUNT = 30
STAGES = 2
CACHE_BYTES = 2 * (8 // STAGES) * HEADS * HEAD_DIM * (CONTEXT + limits.TREE_NODES_MAX) * 4
"""Of one conversation with a full context at one stage: 86 MB, far more than by what a process grows
otherwise."""
PROMPTS = [tuple((7 * user + 3 * place) % 90 + 5 for place in range(CONTEXT - COUNT)) for user in range(4)]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with large caches."""
    shape = {**SMALL, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", shape)


@pytest.fixture(scope="module")
def expected(large: Path) -> list[list[int]]:
    plain = PlainModel(ModelFiles(str(large)), "float32")
    return [plain.generate(prompt, Sampling(), COUNT, frozenset()) for prompt in PROMPTS]


@pytest.fixture
def scarce(large: Path, expected: list[list[int]], alone: Callable[..., LocalDaemon]) -> list[LocalDaemon]:
    """Daemons in this process that may use what it takes by now, the weights, and two and a half
    conversations."""
    del expected  # what it imports counts before
    taken, before = psutil.Process().memory_info().rss, 0
    while taken != before:  # as the daemons do when they load: what earlier tests leave free is not theirs
        before = taken
        gc.collect()
        give_back()
        time.sleep(0.2)
        taken = min(before, psutil.Process().memory_info().rss)
    weight_bytes = sum(file.stat().st_size for file in large.glob("*.safetensors"))  # 34 MB, of both slices
    memory_bytes = taken + WORK_BYTES + weight_bytes + 5 * CACHE_BYTES // 2
    return [
        alone(name=f"scarce-{index}", memory_bytes=memory_bytes, cache_bytes=0) for index in range(STAGES)
    ]


def test_four_at_once_where_two_fit(
    scarce: list[LocalDaemon], large: Path, expected: list[list[int]]
) -> None:
    notes: list[str] = []
    plan = plan_for(large, scarce, context=CONTEXT)
    drafters = (LookUpDrafter(context=CONTEXT),)
    with Head(plan, drafters=drafters, recovery=surviving(plan, notes)) as head:
        numbers = [head.new_request() for _ in PROMPTS]
        answers = [
            submit(head, prompt, COUNT, request=number)
            for prompt, number in zip(PROMPTS, numbers, strict=True)
        ]
        assert [tokens_of(answer) for answer in answers] == expected
        ended = [answer.end.statistics for answer in answers if answer.end is not None]
        assert [statistics["waited_s"] > 0 for statistics in ended] == [False, False, True, True]
        again = submit(head, (*PROMPTS[0][:-2], 11), COUNT, request=numbers[0])
        tokens_of(again)
        assert again.end is not None
        assert again.end.reused == 0, "its cache was given up for those that waited"
        assert {statistics["recoveries"] for statistics in ended} == {0}
    assert notes == []
