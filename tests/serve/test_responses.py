"""The Responses API: the official client against a real server, whose answers are those of the same chat."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from flowspec.core.protocol.messages import Sampling
from flowspec.llm import LLM
from flowspec.model.text import Tokenizer
from flowspec.serve.service import ServiceOptions
from lab.plain_model import PlainModel
from tests.runtime.clusters import wait_until
from tests.serve.servers import MODEL, Running, running

SUM = "What is 17 + 25?"
WARM: dict[str, Any] = {"temperature": 1.0, "extra_body": {"seed": 4}}
ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "input": "Tell me a story.",
    "max_output_tokens": 900,
    "extra_body": {"ignore_eos": True},
}


def ask(server: Running, **fields: Any) -> Any:
    with server.client() as client:
        return client.responses.create(**{"model": MODEL, "input": SUM, **fields})


def streamed(server: Running, **fields: Any) -> list[Any]:
    with server.client() as client:
        return list(client.responses.create(**{"model": MODEL, "input": SUM, "stream": True, **fields}))


def test_a_response_says_what_the_plain_model_says(
    server: Running, reference: PlainModel, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode_chat([{"role": "user", "content": SUM}])
    sampling = Sampling(temperature=1.0, seed=4)
    answer = reference.generate(tuple(prompt), sampling, 1024, frozenset([2]))
    tokens = [token for token in answer if token != 2]
    found = ask(server, metadata={"a": "b"}, **WARM)
    assert found.output_text == tokenizer.decode(tokens)
    assert (found.status, found.object) == ("completed", "response")
    assert (found.id[:5], found.output[0].id[:4], found.output[0].role) == ("resp_", "msg_", "assistant")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (len(prompt), len(tokens))
    assert found.usage.total_tokens == len(prompt) + len(tokens)
    assert (found.metadata, found.temperature, found.top_p, found.model) == ({"a": "b"}, 1.0, 1.0, MODEL)
    assert (found.tools, found.tool_choice, found.error, found.incomplete_details) == ([], "auto", None, None)
    assert found.text.format.type == "text"


def test_a_stream_is_typed_events_in_order(server: Running) -> None:
    whole = ask(server, **WARM)
    events = streamed(server, **WARM)
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert len(kinds) == 8 + len(deltas), "each but the pieces once"
    assert len(deltas) > 1
    assert kinds[4 : 4 + len(deltas)] == ["response.output_text.delta"] * len(deltas)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    texts = {"".join(deltas), events[-4].text, events[-3].part.text, events[-2].item.content[0].text}
    assert texts == {last.output_text} == {whole.output_text}
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.id}
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}
    assert last.usage.output_tokens == whole.usage.output_tokens
    with server.client() as client:
        assert client.responses.retrieve(last.id).output_text == whole.output_text, "a stream is kept, too"


def test_a_dialogue_goes_on_from_what_is_kept_as_if_it_were_sent(server: Running) -> None:
    few: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12}
    first = ask(server, instructions="Be short.", **few)
    second = ask(server, input="And 3 + 4?", previous_response_id=first.id, instructions="Be kind.", **few)
    third = ask(server, input="And 5 + 6?", previous_response_id=second.id, **few)
    said = [
        {"role": "user", "content": SUM},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And 3 + 4?"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "And 5 + 6?"},
    ]
    kind = {"role": "system", "content": "Be kind."}
    short = {"role": "system", "content": "Be short."}
    for found, dialogue in ((first, [short, said[0]]), (second, [kind, *said[:3]]), (third, said)):
        chat = server.ask(messages=dialogue, temperature=0, max_tokens=12)
        assert found.output_text == chat.choices[0].message.content
    assert (third.previous_response_id, second.instructions) == (second.id, "Be kind.")
    items: Any = [{"role": "user", "content": SUM}, *first.output, {"role": "user", "content": "And 3 + 4?"}]
    again = ask(server, input=items, instructions="Be kind.", **few)
    assert again.output_text == second.output_text, "items that are given back are the same dialogue"


def test_what_is_kept_can_be_asked_for_and_forgotten(server: Running) -> None:
    first = ask(server, max_output_tokens=4)
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert first.output[0].status == "incomplete"
    with server.client() as client:
        assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
        second = client.responses.create(
            model=MODEL, input="Go on.", previous_response_id=first.id, max_output_tokens=4
        )
        client.responses.delete(first.id)
        for asked in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match=first.id) as caught:
                asked(first.id)
            assert caught.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model=MODEL, input="Go on.", previous_response_id=first.id)
        code, param = "previous_response_not_found", "previous_response_id"
        assert (caught.value.code, caught.value.param) == (code, param)
        third = client.responses.create(
            model=MODEL, input="Go on.", previous_response_id=second.id, store=False, max_output_tokens=4
        )
        assert third.status == "incomplete", "it has the dialogue of the one that was forgotten"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(third.id)
    url = f"{server.url}/responses/{second.id}"
    assert httpx.get(url, params={"stream": "true"}).json()["error"]["param"] == "stream"
    assert httpx.options(url).headers["allow"] == "DELETE, GET, HEAD"


def test_the_items_that_a_response_answers_are_listed(server: Running) -> None:
    first = ask(server, instructions="Be short.", max_output_tokens=4)
    second = ask(server, input="Go on.", previous_response_id=first.id, max_output_tokens=4)
    with server.client() as client:
        listed = list(client.responses.input_items.list(second.id, order="asc", limit=2))
        assert [item.type for item in listed] == ["message"] * 3, "over two pages"
        texts = [item.content[0].text for item in listed]  # type: ignore[union-attr]
        assert texts == [SUM, first.output_text, "Go on."]
        (last,) = client.responses.input_items.list(second.id, limit=1).data
        assert last.id == listed[-1].id
        again: Any = [item.to_dict() for item in listed]
        found = client.responses.create(model=MODEL, input=again, max_output_tokens=4, temperature=0)
        sent = ask(server, input="Go on.", previous_response_id=first.id, max_output_tokens=4, temperature=0)
        assert found.output_text == sent.output_text
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list("resp_x")
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_items.list(second.id, limit=101)
        assert caught.value.param == "limit"
    assert server.count('flowspec_requests_total{route="/v1/responses/{name}/input_items",status="404"}') >= 1


def test_logprobs_come_with_the_text_whole_and_streamed(server: Running) -> None:
    wanted: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    found = ask(server, **wanted)
    told = [(each.token, len(each.top_logprobs)) for each in found.output[0].content[0].logprobs]
    assert "".join(token for token, _ in told) == found.output_text
    assert {count for _, count in told} == {2}
    deltas = [each for each in streamed(server, **wanted) if each.type == "response.output_text.delta"]
    assert [(each.token, len(each.top_logprobs)) for delta in deltas for each in delta.logprobs] == told


def test_a_client_that_goes_away_ends_its_response_and_it_is_not_kept(server: Running) -> None:
    before = server.count('flowspec_answers_total{reason="cancelled"}')
    with server.client() as client:
        stream = client.responses.create(stream=True, **ENDLESS)
        name = ""
        for event in stream:
            name = name or event.response.id
            if event.type == "response.output_text.delta":
                break
        stream.close()
        server.wait_idle()
        assert server.count('flowspec_answers_total{reason="cancelled"}') == before + 1
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)


def test_a_response_that_cannot_go_on_fails_with_an_event(llm: LLM) -> None:
    with running(llm, options=ServiceOptions()) as server, server.client() as client:
        stream = client.responses.create(stream=True, **ENDLESS)
        assert next(iter(stream)).type == "response.created"
        wait_until(lambda: server.service.gate.running, "it is being answered")
        server.stop()
        last = list(stream)[-1]
        assert (last.type, last.response.status) == ("response.failed", "failed")
        assert last.response.error.message == "the server is stopping"
