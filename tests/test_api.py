"""The API for programs: examples that run as they are written, and what they do not show."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import flowspec
import flowspec.llm
from flowspec import LLM, AnswerStream, Cluster, ClusterError, Device, InputError, SamplingParams
from flowspec.runtime import cluster_text, sampling_params
from flowspec.runtime.local import LocalCluster
from tests import warm
from tests.runtime.clusters import wait_until

SUM = "What is 1 + 2?"
STORY = [{"role": "user", "content": "Tell me a story."}]
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_new_tokens": 2000}
EXAMPLES = re.findall(r"```python\n(.*?)```", Path("docs/api.md").read_text("utf-8"), re.DOTALL)
SHOWN = ("So 17 + 25 = 42.", "[0, 8]", "cancelled", "1 + 2 = 3.", "b'4'", "{'result': ")
"""What each of them prints, among else."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(local=1, drafter="ngram") as found:
        yield found


def test_every_name_is_there() -> None:
    assert {name for name in flowspec.__all__ if getattr(flowspec, name) is None} == set()
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = flowspec.Nothing


class Same:
    """Opens the shared model, whatever example opens one."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.opened = 0

    def __call__(self, *arguments: object, **named: object) -> contextlib.nullcontext[LLM]:
        self.opened += 1
        return contextlib.nullcontext(self.llm)


def test_the_docstrings_examples_are_true(llm: LLM) -> None:
    for each, names in (
        (flowspec.llm, {"LLM": Same(llm), "llm": llm}),
        (sampling_params, {}),
        (cluster_text, {}),
    ):
        found = doctest.testmod(each, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
        assert (found.failed, found.attempted > 0) == (0, True)


def test_the_documents_examples_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for example, shown in zip(EXAMPLES, SHOWN, strict=True):
        monkeypatch.setattr(flowspec, "LLM", same := Same(llm))
        exec(compile(example, "docs/api.md", "exec"), {"__name__": "__main__"})
        assert same.opened == 1
        assert shown in capsys.readouterr().out


def test_a_list_of_prompts_has_a_list_of_answers(llm: LLM) -> None:
    texts = [f"What is {number} + 1?" for number in range(6)]
    answers = llm.generate(texts, parallel=4)
    assert [answer.text for answer in answers] == [llm.generate(text).text for text in texts]
    of_ids = llm.generate([llm.encode(text) for text in texts])
    assert [answer.token_ids for answer in of_ids] == [answer.token_ids for answer in answers]


def test_pieces_are_the_answer(llm: LLM) -> None:
    whole = llm.generate(STORY, temperature=1.0, seed=3, max_new_tokens=60, logprobs=1)
    pieces = list(llm.stream(STORY, SamplingParams(temperature=1.0, seed=3, max_new_tokens=60), logprobs=1))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids
    assert tuple(entry for piece in pieces for entry in piece.logprobs) == whole.logprobs
    assert (whole.seed, whole.prompt_tokens) == (3, len(llm.encode(STORY)))
    assert whole.new_tokens == len(whole.logprobs or ()) <= 60
    assert whole.statistics["segments"] > 0
    assert 0 < whole.timing.first_s <= whole.timing.last_s
    drawn = llm.generate(STORY, temperature=1.0, max_new_tokens=12)
    assert llm.generate(STORY, temperature=1.0, max_new_tokens=12, seed=drawn.seed).text == drawn.text


def test_stops_and_lengths(llm: LLM) -> None:
    cut = llm.generate(SUM, stop="3", logprobs=0)
    assert (cut.text, cut.finish_reason) == ("1 + 2 = ", "stop")
    assert len(cut.logprobs or ()) == cut.new_tokens
    assert llm.generate(SUM, stop_token_ids=cut.token_ids[-1:]).token_ids == cut.token_ids[:-1]
    assert llm.generate(SUM, max_new_tokens=2).finish_reason == "length"
    assert llm.generate(SUM, ignore_eos=True, max_new_tokens=20).new_tokens == 20
    assert llm.generate(SUM, raw=True, max_new_tokens=1).prompt_tokens < cut.prompt_tokens


def test_the_next_turn_computes_only_what_is_new(llm: LLM) -> None:
    dialogue = [{"role": "user", "content": "What is 1 + 1?"}]
    first = llm.generate(dialogue)
    dialogue += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And 2 + 2?"}]
    assert llm.generate(dialogue, max_new_tokens=4).reused_tokens >= first.prompt_tokens


def idle(llm: LLM) -> bool:
    return not llm.session.head._answers


def test_an_answer_that_nobody_wants_is_cancelled(llm: LLM) -> None:
    stream = llm.stream(STORY, **ENDLESS)
    next(stream)
    stream.cancel()
    answer = stream.answer()
    assert answer.finish_reason == "cancelled"
    assert answer.new_tokens < 2000
    with llm.stream(STORY, **ENDLESS) as stream:
        next(stream)
    with pytest.raises(ClusterError, match="was closed before its end"):
        stream.answer()
    wait_until(lambda: idle(llm), "the closed one is over")
    next(llm.stream(STORY, **ENDLESS))
    wait_until(lambda: idle(llm), "the forgotten one is over")


def test_streams_are_interleaved_in_threads_and_loops(llm: LLM) -> None:
    streams = [llm.stream(STORY, temperature=1.0, seed=seed, max_new_tokens=30) for seed in range(3)]
    expected = [stream.answer().text for stream in reversed(streams)][::-1]

    async def ask() -> list[str]:
        async def read(seed: int) -> str:
            stream = llm.astream(STORY, temperature=1.0, seed=seed, max_new_tokens=30)
            return "".join([piece.text async for piece in stream])

        return await asyncio.gather(*map(read, range(3)))

    assert asyncio.run(ask()) == expected


def test_a_task_that_is_cancelled_cancels_its_answer(llm: LLM) -> None:
    async def ask() -> None:
        task = asyncio.create_task(llm.agenerate(STORY, **ENDLESS))
        await asyncio.sleep(0.2)
        assert not idle(llm)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(InputError, match="shorten the prompt"):
            await llm.agenerate([5] * 5000)

    asyncio.run(ask())
    wait_until(lambda: idle(llm), "it is over")


def test_what_cannot_be_is_one_line(llm: LLM) -> None:
    tool = [{"role": "user", "content": SUM}, {"role": "tool", "content": "42"}]
    for prompt, named, said in (
        (SUM, {"temperature": -1}, "sampling: temperature"),
        (SUM, {"stop": ["a", ""]}, "stop:"),
        (SUM, {"max_new_tokens": 0}, "max_new_tokens:"),
        (SUM, {"logprobs": 21}, "logprobs:"),
        ([SUM, SUM], {"parallel": 0}, "parallel:"),
        ([1 << 30], {}, "prompt token ids:"),
        (tool, {}, "role:"),
        *((prompt, {}, "prompt") for prompt in ([], " \n", None, 3, tool[0], ["hi", 3], [{"role": "user"}])),
    ):
        with pytest.raises(InputError, match=said) as refused:
            llm.generate(prompt, **named)
        assert "\n" not in str(refused.value)
    for named, meant in (("max_tokens", "max_new_tokens"), ("lark", "grammar")):
        with pytest.raises(TypeError, match=f"'{named}'; did you mean {meant}"):
            llm.generate(SUM, **{named: 1})
    for named, said in (
        ({"cluster": "a.toml", "local": 2}, "got both"),
        ({"local": 0}, "local:"),
        ({"dtype": "float8"}, "dtype:"),
        ({"method": "magic"}, "method magic"),
        ({"context": 1 << 20}, "context:"),
        ({"cluster": "/nowhere.toml"}, "/nowhere.toml:"),
        ({"cluster": Cluster([Device(name="a", address="127.0.0.1:1")], keys="/none")}, "keys: expected"),
        ({"cluster": Cluster(["127.0.0.1:1", "127.0.0.1:1"])}, "address: expected each device once"),
    ):
        with pytest.raises(InputError, match=said):
            LLM(**named)
    assert llm.generate(SUM).text == "1 + 2 = 3.", "and it goes on"


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_closing_leaves_no_process_however_it_is_done() -> None:
    before = children()
    streams: list[AnswerStream] = []

    def fail() -> None:
        with LLM(local=1, drafter="none", wait_s=0.1) as llm:
            streams.append(llm.stream(STORY, **ENDLESS))
            next(streams[0])
            assert children() > before
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    wait_until(lambda: children() <= before, "its processes have ended")
    with pytest.raises(ClusterError, match="the head is closed"):
        streams[0].answer()


def test_a_cluster_is_a_file_and_a_closed_model_says_so() -> None:
    with LocalCluster(2) as local:
        boards = Cluster([daemon.address for daemon in local.wait()], links=["1000/0.5"])
        with LLM(cluster=boards, drafter="none") as llm:
            assert llm.generate(SUM).text == "1 + 2 = 3."
        with pytest.raises(InputError, match="the LLM is closed"):
            llm.generate(SUM)
        llm.close()


PROGRAM = """
import gc, psutil
from flowspec import LLM
def pids(): return {each.pid for each in psutil.Process().children(recursive=True)}
llm = LLM(local=1, drafter="none")
first = pids()
del llm
gc.collect()
llm = LLM(local=1, drafter="none")
stream = llm.stream("Tell me a story.", ignore_eos=True, max_new_tokens=2000)
next(stream)
print(*first, "|", *pids(), "|", *(first & pids()))
"""


def test_a_program_that_just_ends_or_forgets_leaves_no_process() -> None:
    done = warm.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, both = (part.split() for part in done.stdout.split("|"))
    assert first
    assert second
    assert not both, "what nobody refers to is closed"
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in first + second), "all have ended")
