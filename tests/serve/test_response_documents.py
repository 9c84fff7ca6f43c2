"""How answers, streams and metrics are written; requests to `/v1/responses`, their items, how their answers
are written, and what is kept of them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.head.events import PipelineLost, SegmentTimed, TimerFired
from flowspec.core.protocol.messages import Hop, Logprobs, Sampling
from flowspec.model.files import ModelFiles
from flowspec.model.reply.bound import Wanted
from flowspec.model.reply.parts import Part, Tool, ToolCall
from flowspec.model.text import TextStream, Tokenizer
from flowspec.plan.placement import ClusterPlan, StagePlan
from flowspec.runtime.answer import Answer, Piece
from flowspec.runtime.question import Question
from flowspec.runtime.session import Limits
from flowspec.runtime.token_log import TokenLog
from flowspec.runtime.token_stream import Timing
from flowspec.serve.completion_form import Choice, fingerprint_of, token_name, usage_of
from flowspec.serve.completion_request import CompletionRequest
from flowspec.serve.documents import ApiError, frame
from flowspec.serve.metrics import Totals
from flowspec.serve.responses.form import ResponseForm, page_of
from flowspec.serve.responses.request import ResponseBody, messages_of, response_wanted
from flowspec.serve.responses.store import Kept, ResponseStore


def read(store: ResponseStore | None = None, /, **fields: Any) -> CompletionRequest[ResponseBody]:
    return response_wanted(store or ResponseStore(), json.dumps({"input": "hello", **fields}).encode())


def test_items_that_are_kept_may_be_referred_to() -> None:
    store = ResponseStore()
    first = whole(read(store), store, choice(["b"]))
    (item,) = first["output"]
    user = {"role": "user", "content": "c"}
    sent = read(store, input=[item, user])
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        assert read(store, input=[reference, user]).prompts == sent.prompts
    assert store.forget(first["id"])
    for name in (item["id"], 5, None):
        with pytest.raises(ApiError) as caught:
            read(store, input=[{"type": "item_reference", "id": name}, user])
        assert (caught.value.status, caught.value.param) == (404, "input[0].id")


def test_an_item_that_is_referred_to_often_is_read_once() -> None:
    """Reading it takes all of its response, and a request may have thousands of references."""
    store, asked = ResponseStore(), []
    item = {"id": "msg_1", "type": "message", "role": "user", "content": "Hello"}

    def found(name: str) -> dict[str, Any] | None:
        asked.append(name)
        return item if name == "msg_1" else None

    store.item = found  # type: ignore[method-assign]
    wanted = read(store, input=[{"type": "item_reference", "id": "msg_1"}] * 500)
    assert [each["content"] for each in cast(Any, wanted.prompts[0])] == ["Hello"] * 500
    assert asked == ["msg_1"]


def test_tools_and_log_probabilities_do_not_count_again_in_each_turn() -> None:
    store = ResponseStore(bytes_max=200_000)
    tools = [{"type": "function", "name": "f", "description": "x" * 30_000}]
    previous: str | None = None
    for _ in range(12):
        wanted = read(store, tools=tools, tool_choice="none", previous_response_id=previous)
        previous = str(whole(wanted, store, choice(["ok"]))["id"])
    found = store.find(previous or "")
    assert found is not None
    assert len(found.input) < 12 * 600
    assert 30_000 < len(found.document) < 35_000


def test_calls_are_bound_as_in_a_chat() -> None:
    """In the shapes that these requests have."""
    tools = [{"type": "function", "name": name, "parameters": {}, "strict": False} for name in "fg"]
    strict = [tools[0], {**tools[1], "strict": True}]
    f, g = Tool(name="f"), Tool(name="g")
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    for fields, bound in (
        ({"tools": tools}, None),
        ({"tools": strict}, Wanted(tools=(f, g))),
        (
            {"tools": tools, "tool_choice": {"type": "function", "name": "g"}},
            Wanted(tools=(g,), is_required=True, is_single=True),
        ),
        ({"tools": tools, "tool_choice": some}, Wanted(tools=(g,))),
        ({"tools": tools, "text": text}, Wanted(tools=(f, g), answer=("json_schema", '{"type":"object"}'))),
    ):
        store = ResponseStore()
        found = read(**fields)
        assert found.tool_use.bound == bound
        told = whole(found, store, choice(["a"]))
        assert [told[name] for name in fields] == list(fields.values())


def test_items_are_turns_of_a_chat() -> None:
    said = {"type": "output_text", "text": "b", "annotations": [], "logprobs": [], "parsed": {"a": 1}}
    called = {"type": "function_call", "name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "r"}],
        },
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [said]},
        {**called, "id": "fc_1", "call_id": "c1", "parsed_arguments": None},
        {**called, "call_id": "c2", "name": "g", "arguments": "{1}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "o"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "p"}]},
        {"role": "assistant", "content": "e"},
        {"role": "assistant", "content": "f"},
        {"type": "reasoning", "summary": []},
        {"role": "user", "content": "g"},
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{1}"}},
    ]
    assert messages_of(items) == [
        ({"role": "developer", "content": "d"}, "input[0]"),
        ({"role": "user", "content": "a"}, "input[1]"),
        ({"role": "assistant", "reasoning_content": "r", "content": "b", "tool_calls": calls}, "input[2]"),
        ({"role": "tool", "tool_call_id": "c1", "content": "o"}, "input[6]"),
        ({"role": "tool", "tool_call_id": "c2", "content": "p"}, "input[7]"),
        ({"role": "assistant", "content": "e"}, "input[8]"),
        ({"role": "assistant", "content": "f"}, "input[9]"),
        ({"role": "user", "content": "g"}, "input[11]"),
    ]


def kept(size: int, name: str = "") -> Kept:
    return Kept(name.encode(), b" " * (size - len(name)))


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdefgh"), st.sampled_from(["keep", "find", "forget"]), st.integers(10, 120)
        )
    )
)
def test_a_store_never_holds_more_than_it_may(steps: list[tuple[str, str, int]]) -> None:
    store = ResponseStore(responses_max=4, bytes_max=100)
    model: dict[str, int] = {}  # in order of use
    for place, (letter, step, size) in enumerate(steps):
        if step == "keep":
            name = f"{letter}{place}"  # ids are new each time
            store.keep(name, kept(size, name))
            model |= {name: size} if size <= 100 else {}  # one that is too large alone takes no other's place
            while len(model) > 4 or sum(model.values()) > 100:
                del model[next(iter(model))]
        else:
            name = next((each for each in model if each.startswith(letter)), letter)
            if step == "find":
                assert (store.find(name) is not None) == (name in model)
                if name in model:
                    model[name] = model.pop(name)
            else:
                assert store.forget(name) == (model.pop(name, None) is not None)
    for name in list(model):
        found = store.find(name)
        assert found is not None
        assert found.document == name.encode()
    names = [f"{letter}{place}" for place, (letter, step, _) in enumerate(steps) if step == "keep"]
    assert {name for name in names if store.find(name)} == model.keys()


def test_a_dialogue_that_goes_on_counts_whole() -> None:
    store = ResponseStore()
    first = read(store, input="a" * 1000)
    assert 1000 < len(first.items) < 2000
    whole(first, store, choice(["b" * 500]))
    (name,) = store._kept
    second = read(store, previous_response_id=name, input="c")
    assert len(second.items) > len(first.items) + 500
    (dialogue,) = second.prompts
    assert [message["content"][:1] for message in cast(Any, dialogue)] == ["a", "b", "c"]
    assert second.places == ("previous_response_id", "previous_response_id", "input")


QUESTION = Question(prompt=(1,), sampling=Sampling(), limits=Limits(new_tokens_max=1, stop_ids=frozenset()))


def choice(texts: list[str], reason: str = "stop") -> Choice:
    return heard([*(Piece(text=text) for text in texts), answer(reason)])


def heard(events: list[Any]) -> Choice:
    found = Choice(QUESTION)
    for event in events:
        found.add(event)
    return found


def answer(reason: str = "stop") -> Answer:
    return Answer(
        text="", token_ids=(1, 2), finish_reason=reason, prompt_tokens=3, timing=Timing(), statistics={}
    )


def form(wanted: CompletionRequest[ResponseBody], store: ResponseStore) -> ResponseForm:
    return ResponseForm("m", wanted, Sampling(), store.keep)


def whole(wanted: CompletionRequest[ResponseBody], store: ResponseStore, choice: Choice) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(form(wanted, store).whole([choice]))
    return found


def events(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for event in stream.decode().strip("\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "g"]), st.lists(st.sampled_from(['{"a":', " 1}", "}"]))), max_size=3
)


@given(
    st.lists(st.sampled_from(["a", " ", "b\n"])),
    st.lists(st.sampled_from([" ", "\n", "x", "\u2028\U0001f600"])),
    CALLS,
    st.sampled_from(["stop", "length"]),
)
def test_thoughts_text_and_calls_are_an_item_each(
    thoughts: list[str], texts: list[str], calls: list[tuple[str, list[str]]], reason: str
) -> None:
    store = ResponseStore()
    streamed = form(read(store), store)
    choice = Choice(QUESTION)
    parts = [Piece(text="", parts=(Part("thought", text),)) for text in thoughts]
    parts += [Piece(text=text) for text in texts]
    for name, arguments in calls:
        parts.append(Piece(text="", parts=(Part("name", name),)))
        parts += [Piece(text="", parts=(Part("arguments", text),)) for text in arguments]
    frames = [streamed.begin([choice])]
    frames += [streamed.say(choice, piece) for piece in parts]
    ended = replace(
        answer(reason),
        thoughts="".join(thoughts),
        thought_tokens=1,
        calls=tuple(ToolCall(name, "".join(arguments)) for name, arguments in calls),
    )
    choice.add(ended)
    frames += [streamed.end(choice), streamed.finish([choice])]
    found = events(b"".join(frames))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[-1]["type"] == ("response.completed" if reason == "stop" else "response.incomplete")
    last = found[-1]["response"]
    output = last["output"]

    expected: list[dict[str, Any]] = []
    if thoughts:
        content = [{"type": "reasoning_text", "text": "".join(thoughts)}]
        expected.append({"type": "reasoning", "summary": [], "content": content})
    text = "".join(texts)
    if text.strip() or not calls:
        content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
        expected.append({"type": "message", "role": "assistant", "content": content})
    expected += [
        {"type": "function_call", "name": name, "arguments": "".join(arguments)} for name, arguments in calls
    ]
    own = ("id", "call_id", "status")
    assert expected == [{name: of for name, of in item.items() if name not in own} for item in output]
    assert {item["status"] for item in output} <= {"completed", last["status"]}
    assert output[-1]["status"] == last["status"], "what was cut"
    assert len({item["id"] for item in output}) == len(output)

    for place, item in enumerate(output):  # what a client puts together from the events alone
        told = [each for each in found if each.get("output_index") == place]
        assert [each["item"] for each in told if each["type"] == "response.output_item.done"] == [item]
        assert told[0]["type"] == "response.output_item.added"
        said = "".join(each["delta"] for each in told if each["type"].endswith(".delta"))
        assert said == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])

    at_once = whole(read(store), store, heard([*parts, ended]))
    changing = ("id", "created_at", "completed_at", "output")
    assert {**last, **dict.fromkeys(changing)} == {**at_once, **dict.fromkeys(changing)}
    ids = ("id", "call_id")
    assert [{**item, **dict.fromkeys(ids)} for item in at_once["output"]] == [
        {**item, **dict.fromkeys(ids)} for item in output
    ]
    kept_one = store.find(last["id"])
    assert kept_one is not None
    assert json.loads(kept_one.document) == last
    items = [{"role": "user", "content": "hello"}, *output]
    given_back = [message for message, _ in messages_of(items)]
    kept_dialogue = [message for message, _ in messages_of(kept_one.items)]
    assert kept_dialogue == given_back, "as if a client had sent the output again"
    assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}


def test_what_fails_ends_with_why_and_is_not_kept_nor_is_what_is_not_to_be() -> None:
    store = ResponseStore()
    failing = form(read(store), store)
    one = Choice(QUESTION)
    stream = failing.begin([one]) + failing.say(one, Piece(text="a")) + failing.fail(ApiError(503, "lost"))
    last = events(stream)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "lost"}
    assert store.find(last["response"]["id"]) is None
    found = whole(read(store, store=False), store, choice(["a"]))
    assert (found["store"], store.find(found["id"])) == (False, None)


def test_text_behind_a_call_comes_in_the_same_order_at_once_and_streamed() -> None:
    store = ResponseStore()
    call = (Part("name", "f"), Part("arguments", "{}"), Part("end"))
    pieces = [Piece(text="", parts=call), Piece(text="Checking."), Piece(text="", parts=call)]
    ended = replace(answer(), calls=(ToolCall("f", "{}"), ToolCall("f", "{}")))
    at_once = whole(read(store), store, heard([*pieces, ended]))
    streamed, choice = form(read(store), store), heard([ended])
    frames = [streamed.say(choice, piece) for piece in pieces]
    frames += [streamed.end(choice), streamed.finish([choice])]
    output = events(b"".join(frames))[-1]["response"]["output"]
    for found in (at_once["output"], output):
        assert [item["type"] for item in found] == ["function_call", "message", "function_call"]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_and_a_system_message_are_one(role: str) -> None:
    items = [{"role": role, "content": "b"}, {"role": role, "content": "c"}, {"role": "user", "content": "d"}]
    found = read(instructions="a", input=[*items, {"role": "system", "content": "e"}])
    (dialogue,) = found.prompts
    assert [(each["role"], each["content"]) for each in cast(Any, dialogue)] == [
        ("system", "a\n\nb\n\nc"),
        ("user", "d"),
        ("system", "e"),
    ]
    assert found.places == ("instructions", "input[2]", "input[3]")
    (alone,) = read(input=items).prompts
    assert [each["content"] for each in cast(Any, alone)] == ["b", "c", "d"], "a dialogue stays as it is"


def page(items: list[dict[str, Any]], **query: str) -> tuple[list[str], bool]:
    found = page_of(items, list(query.items()))
    names = [item["id"] for item in found["data"]]
    ends = (names[0], names[-1]) if names else (None, None)
    assert (found["object"], found["first_id"], found["last_id"]) == ("list", *ends)
    return names, found["has_more"]


def test_items_are_listed_page_by_page() -> None:
    items = [{"id": f"i{place}"} for place in range(25)]
    names = [item["id"] for item in items]
    assert page(items) == (names[:4:-1], True)
    assert page(items, limit="003") == (names[:21:-1], True)
    assert page(items, after="i5") == (names[4::-1], False)
    assert page(items, order="asc", limit="100") == (names, False)
    assert page(items, order="asc", limit="25") == (names, False)
    assert page(items, order="asc", limit="3", after="i3") == (["i4", "i5", "i6"], True)
    assert page(items, after="i0", include="message.output_text.logprobs") == ([], False)
    wrong = [("limit", value) for value in ("0", "101", "-1", "x", "20\n", "0020")]
    wrong += [("order", "up"), ("after", "i25"), ("include", "all"), ("wibble", "1")]
    for field, value in wrong:
        with pytest.raises(ApiError) as caught:
            page_of(items, [(field, value)])
        assert (caught.value.status, caught.value.param) == (400, field)


def test_the_input_of_a_response_is_its_whole_dialogue() -> None:
    store = ResponseStore()
    first = whole(read(store, input="a", instructions="i"), store, choice(["b"]))
    sent = [
        {"role": "developer", "content": [{"type": "input_text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"type": "item_reference", "id": first["output"][0]["id"]},
    ]
    wanted = read(store, input=sent, previous_response_id=first["id"], store=True)
    assert store.forget(first["id"])
    second = whole(wanted, store, choice(["e"]))
    found = store.find(second["id"])
    assert found is not None
    texts = [
        (item["role"], item["content"][0]["type"], item["content"][0]["text"]) for item in found.input_items
    ]
    assert texts == [
        ("user", "input_text", "a"),
        ("assistant", "output_text", "b"),
        ("developer", "input_text", "c"),
        ("assistant", "output_text", "d"),
        ("assistant", "output_text", "b"),
    ]
    assert all(item["id"].startswith("msg_") and item["type"] == "message" for item in found.input_items)
    assert found.input_items[1]["id"] == first["output"][0]["id"]
    assert len(found.document) + len(found.input) == found.size


TOKENIZER = Tokenizer(ModelFiles("bundled"))
PLAN = ClusterPlan(
    model="bundled",
    fingerprint="abc",
    dtype="float32",
    context=100,
    stages=(StagePlan(name="a", address="127.0.0.1:1", first=0, end=8),),
)


def answer_of(reused: int = 0) -> Answer:
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
    event = frame({"text": "a\n\nb\r\u2028 ü"})
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:])["text"] == "a\n\nb\r\u2028 ü"


def test_a_prompt_counts_once_and_its_choices_each() -> None:
    choices = [Choice(QUESTION, prompt=prompt) for prompt in (0, 0, 1, 1)]
    for choice, reused in zip(choices, (5, 0, 2, 2), strict=True):
        choice.add(Piece(text="x"))
        choice.add(replace(answer_of(reused), prompt_tokens=10 + 10 * choice.prompt))
    assert msgspec.to_builtins(usage_of(choices)) == {
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
