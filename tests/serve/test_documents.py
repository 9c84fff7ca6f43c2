"""How answers, streams and metrics are written."""

from __future__ import annotations

import json
from dataclasses import replace

from flowspec.core.head.events import PipelineLost, SegmentTimed, TimerFired
from flowspec.core.protocol.messages import Hop, Logprobs
from flowspec.model.files import ModelFiles
from flowspec.model.text import TextStream, Tokenizer
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.runtime.answer import Answer, Piece
from flowspec.runtime.token_log import TokenLog
from flowspec.runtime.token_stream import Timing
from flowspec.serve import sse
from flowspec.serve.documents import Choice, fingerprint_of, usage_of
from flowspec.serve.tokens import name_of as token_name
from flowspec.serve.totals import Totals

TOKENIZER = Tokenizer(ModelFiles("bundled"))
PLAN = ClusterPlan(
    model="bundled",
    fingerprint="abc",
    dtype="float32",
    context=100,
    stages=(StagePlan(name="a", address="127.0.0.1:1", first=0, end=8),),
)


def answer(reused: int = 0) -> Answer:
    return Answer(
        text="",
        token_ids=(1, 2, 3),
        finish_reason="stop",
        prompt_tokens=10,
        reused_tokens=reused,
        timing=Timing(),
        statistics={},
    )


def test_an_event_is_one_line_whatever_is_in_it() -> None:
    frame = sse.data({"text": "a\n\nb\r\u2028 ü \ud800"})
    assert frame.startswith(b"data: {")
    assert frame.endswith(b"}\n\n")
    assert frame.count(b"\n") == 2
    assert json.loads(frame[6:].decode("utf-8", "surrogatepass"))["text"] == "a\n\nb\r\u2028 ü \ud800"


def test_a_prompt_counts_once_and_its_choices_each() -> None:
    choices = [Choice(0), Choice(0), Choice(1), Choice(1)]
    for choice, reused in zip(choices, (5, 0, 2, 2), strict=True):
        choice.add(Piece(text="x"))
        choice.add(answer(reused))
    assert usage_of([10, 20], choices).document == {
        "prompt_tokens": 30,
        "completion_tokens": 12,
        "total_tokens": 42,
        "prompt_tokens_details": {"cached_tokens": 7},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_fingerprint_is_of_what_answers_depend_on() -> None:
    other_split = replace(PLAN, stages=(replace(PLAN.stages[0], name="b", address="127.0.0.1:2"),))
    assert fingerprint_of(PLAN, "x") == fingerprint_of(other_split, "x")
    assert fingerprint_of(PLAN, "x") != fingerprint_of(replace(PLAN, dtype="bfloat16"), "x")
    assert fingerprint_of(PLAN, "x") != fingerprint_of(PLAN, "y")
    assert fingerprint_of(PLAN, "x", "masks 1") != fingerprint_of(PLAN, "x", "masks 2")


def logged(text: str, stops: tuple[str, ...] = ()) -> tuple[TokenLog, TextStream, str]:
    tokens = TOKENIZER.encode(text)
    stream = TextStream(TOKENIZER, stops)
    log = TokenLog(TOKENIZER, stream)
    found = [Logprobs(chosen=-0.5, ids=(token, 2), values=(-0.5, -2.0)) for token in tokens]
    return log, stream, log.push(tokens, found)


def test_tokens_are_told_with_the_text_that_they_made() -> None:
    text = "What is 17 + 25? \u20ac \U0001f600"
    log, stream, shown = logged(text)
    entries = [*log.up_to(len(shown)), *log.rest()]
    assert b"".join(entry.content for entry in entries) == text.encode()
    assert shown + stream.finish() == text
    for entry in entries:
        assert text[entry.offset :].encode().startswith(entry.content) or token_name(
            entry.content
        ).startswith("bytes:")
        assert [(other.content, other.logprob) for other in entry.top] == [
            (entry.content, -0.5),
            (b"<|end|>", -2.0),
        ]


def test_tokens_of_a_stop_string_are_not_told() -> None:
    log, stream, shown = logged("one two three", (" two",))
    assert stream.is_stopped
    entries = [*log.up_to(len(shown)), *log.rest()]
    assert b"".join(entry.content for entry in entries) == b"one"


def test_the_tally_counts_what_came_back() -> None:
    totals = Totals()
    dead = {"dead_in_queue": 3, "dead_between_layers": 2, "dead_late": 1}
    hop = Hop(received_s=0, queued_s=0, compute_s=0.5, own_s=0, rows=4, **dead)
    timed = SegmentTimed(segment=1, rows=4, sent_s=0.0, hops=(hop, hop))
    totals.on_event(TimerFired(), [timed], 0.0)
    totals.on_event(PipelineLost(silent_s=1.0), [], 0.0)
    totals.on_event(TimerFired(), [replace(timed, hops=(hop,))], 0.0)
    assert (totals.hops.by_stage("compute_s"), totals.segments, totals.losses) == ([1.0, 0.5], 2, 1)
    assert [totals.hops.total(name) for name in ("rows", *dead)] == [12, 9, 6, 3]
