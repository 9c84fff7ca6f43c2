"""The official client against a real server over real stages."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from flowspec.core.protocol.limits import TOP_LOGPROBS_MAX
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import InputError
from flowspec.llm import LLM
from flowspec.model.text import Tokenizer
from flowspec.runtime.session import Limits, Session
from flowspec.serve.guard import BODY_BYTES_MAX, AccessRules
from flowspec.serve.service import ServiceOptions
from lab.plain_model import PlainModel
from tests.runtime.clusters import wait_until
from tests.serve.servers import ENDLESS, MODEL, STORY, SUM, Running, running

JSON = {"Content-Type": "application/json"}
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 4}


def plain(
    reference: PlainModel, tokenizer: Tokenizer, prompt: list[int], sampling: Sampling, count: int = 1024
) -> tuple[str, int]:
    """What the plain model says, and in how many tokens."""
    tokens = [
        token for token in reference.generate(tuple(prompt), sampling, count, frozenset([2])) if token != 2
    ]
    return tokenizer.decode(tokens), len(tokens)


def ask_raw(server: Running, **fields: Any) -> Any:
    with server.client() as client:
        return client.completions.create(**{"model": MODEL, "prompt": "The cat", "max_tokens": 12, **fields})


def test_a_chat_says_what_the_plain_model_says(
    server: Running, reference: PlainModel, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode_chat(SUM)
    text, count = plain(reference, tokenizer, prompt, Sampling(temperature=1.0, seed=4))
    found = server.ask(**WARM)
    choice = found.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.message.role) == (text, "stop", "assistant")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(prompt), count)
    assert (found.model, found.object) == (MODEL, "chat.completion")
    assert found.id.startswith("chatcmpl-")
    again = server.ask(**WARM)
    assert (again.choices[0].message.content, again.system_fingerprint) == (text, found.system_fingerprint)
    assert again.id != found.id


def test_biases_and_penalties_are_obeyed_as_by_plain_decoding(
    server: Running, reference: PlainModel, tokenizer: Tokenizer
) -> None:
    prompt, (banned, *_) = tokenizer.encode_chat(SUM), tokenizer.encode("1")
    asked = {"presence_penalty": 0.5, "frequency_penalty": 0.4}
    bias = tuple(sorted({banned: -100.0, 300: 3.0}.items()))
    wanted = Sampling(temperature=1.0, seed=4, logit_bias=bias, repetition_penalty=1.2, **asked)
    text, _ = plain(reference, tokenizer, prompt, wanted, 24)
    biased = {"logit_bias": {str(token): value for token, value in bias}}
    found = server.ask(**WARM, **asked, **biased, max_tokens=24, extra_body={"repetition_penalty": 1.2})
    others = [server.ask(**WARM, max_tokens=24, **some) for some in ({}, asked, biased)]
    assert found.choices[0].message.content == text
    assert text not in [other.choices[0].message.content for other in others]


def test_an_answer_goes_on_in_the_assistants_last_message(
    server: Running, reference: PlainModel, tokenizer: Tokenizer
) -> None:
    messages = [*SUM, {"role": "assistant", "content": "17 + 25 is "}]
    text = tokenizer._tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    prompt = tokenizer._tokenizer(text, add_special_tokens=False)["input_ids"]
    expected, _ = plain(reference, tokenizer, prompt, Sampling())
    body = {"continue_final_message": True, "add_generation_prompt": False}
    found = server.ask(messages=messages, temperature=0, extra_body=body)
    assert (found.choices[0].message.content, found.usage.prompt_tokens) == (expected, len(prompt))
    assert server.ask(messages=messages, temperature=0).usage.prompt_tokens > len(prompt)


@pytest.mark.parametrize(("is_streamed", "is_text"), [(False, False), (True, True)])
def test_a_completion_that_echoes_begins_with_its_prompt(
    server: Running, tokenizer: Tokenizer, is_streamed: bool, is_text: bool
) -> None:
    ids = tokenizer._tokenizer("The cat", add_special_tokens=False)["input_ids"]
    prompt = "The cat" if is_text else ids
    expected = [f"The cat{choice.text}" for choice in ask_raw(server, prompt=prompt, n=2, **WARM).choices]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "echo": True, "n": 2, **WARM}
    texts = ["", ""]
    with server.client() as client:
        found = client.completions.create(**body, stream=is_streamed)
        for document in found if is_streamed else [found]:
            for choice in document.choices:
                texts[choice.index] += choice.text
    assert texts == expected


def test_an_answer_ends_at_the_stop_tokens_of_its_request(server: Running, tokenizer: Tokenizer) -> None:
    whole = server.ask(**WARM).choices[0].message.content
    tokens = tokenizer._tokenizer(whole, add_special_tokens=False)["input_ids"]
    found = server.ask(**WARM, extra_body={"stop_token_ids": [tokens[-1]]}).choices[0]
    assert found.finish_reason == "stop"
    assert whole.startswith(found.message.content)
    assert len(found.message.content) < len(whole)
    assert server.ask(messages=STORY, max_completion_tokens=5).choices[0].finish_reason == "length"


def test_a_stream_is_the_same_in_pieces(server: Running) -> None:
    whole = server.ask(**WARM)
    chunks = server.streamed(stream_options={"include_usage": True}, **WARM)
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        == whole.choices[0].message.content
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(chunk.usage is None for chunk in server.streamed(max_tokens=3)), "usage comes when asked for"


def test_choices_are_drawn_with_seeds_of_their_own(server: Running) -> None:
    several = server.ask(n=2, **WARM)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[0].message.content != several.choices[1].message.content
    assert (
        several.choices[1].message.content == server.ask(temperature=1.0, seed=5).choices[0].message.content
    )
    chunks = server.streamed(n=2, **WARM)
    for place in range(2):
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices[0].index == place)
        assert text == several.choices[place].message.content


def test_completions_of_texts_and_of_token_ids(
    server: Running, reference: PlainModel, tokenizer: Tokenizer
) -> None:
    prompts = ["The cat", "Once upon"]
    expected = [
        plain(reference, tokenizer, tokenizer.encode(prompt), Sampling(), 12)[0] for prompt in prompts
    ]
    assert ask_raw(server, temperature=0).choices[0].text == expected[0]
    assert ask_raw(server, temperature=0, prompt=tokenizer.encode(prompts[0])).choices[0].text == expected[0]
    assert [choice.text for choice in ask_raw(server, temperature=0, prompt=prompts).choices] == expected
    found = ask_raw(server, temperature=0, prompt=[tokenizer.encode(prompt) for prompt in prompts], n=2)
    assert [choice.text for choice in found.choices] == [expected[0]] * 2 + [expected[1]] * 2
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    asked: dict[str, Any] = {"model": MODEL, "prompt": prompts[0], "max_tokens": 12, "temperature": 0}
    with server.client() as client:
        chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[0]
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_stop_string_that_spans_tokens_ends_the_answer_before_it(
    server: Running, tokenizer: Tokenizer
) -> None:
    whole = server.ask().choices[0].message.content
    at = len(whole) // 2
    stop = whole[at - 4 : at + 4]
    assert len(tokenizer.encode(stop)) > 2
    found = server.ask(stop=[stop, "never said"])
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == (
        whole[: whole.index(stop)],
        "stop",
    )
    chunks = server.streamed(stop=stop)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole[: whole.index(stop)]


def test_more_than_the_context_holds_is_cut_and_a_longer_prompt_refused(server: Running) -> None:
    context = server.service.context
    prompt = [50] * (context - 4)
    found = ask_raw(server, prompt=prompt, max_tokens=100, extra_body={"ignore_eos": True})
    assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 4)
    with pytest.raises(openai.BadRequestError) as caught:
        ask_raw(server, prompt=[50] * context)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="got 4096"):
        ask_raw(server, prompt=[4096])


def test_the_next_turn_of_a_dialogue_finds_what_was_computed(server: Running) -> None:
    for _ in range(5):  # answers of clients that have just left may still take the room of the first
        first = server.ask(temperature=0)
        turn = [*SUM, {"role": "assistant", "content": first.choices[0].message.content}, *SUM]
        second = server.ask(messages=turn, temperature=0)
        cached = second.usage.prompt_tokens_details.cached_tokens
        if cached:
            break
    assert first.usage.prompt_tokens < cached < second.usage.prompt_tokens


def test_http_errors_have_the_same_form(server: Running) -> None:
    url = f"{server.url}/chat/completions"
    lone = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "\ud800"}]})
    found = [
        (httpx.get(url), 405),
        (httpx.get(f"{server.url}/nothing"), 404),
        (httpx.get(f"{server.url}/models/gpt-4"), 404),
        (httpx.post(url, json={"model": MODEL, "messages": "x" * BODY_BYTES_MAX}), 413),
    ]
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    largest = json.dumps({"model": MODEL, "messages": SUM, "max_tokens": 1}).ljust(BODY_BYTES_MAX)
    assert httpx.post(url, content=largest, headers=JSON).status_code == 200
    for headers, content, status in (
        ({"Content-Type": "text/plain"}, "{", 415),
        ({"Origin": server.url.removesuffix("/v1")}, "{", 415),
        ({"Sec-Fetch-Site": "cross-site"}, "{", 415),
        ({}, "{", 400),
        (form, "{", 400),
        ({**JSON, "Content-Encoding": "gzip"}, "{}", 415),
        (JSON, lone, 400),
        (JSON, json.dumps({"model": MODEL, "messages": SUM, "\ud800": 1}), 400),
    ):
        found.append((httpx.post(url, content=content, headers=headers), status))
    for answer, status in found:
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"]
    assert found[0][0].headers["allow"] == "POST"


def test_a_path_that_is_not_there_is_told_what_is_closest_and_a_slash_at_the_end_makes_no_other(
    server: Running,
) -> None:
    root = server.url.removesuffix("/v1")
    for path, closest in (
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1//models", "/v1/models"),
        ("/v1/metrics", "/metrics"),
    ):
        found = httpx.post(f"{root}{path}", json={})
        told = found.json()["error"]["message"]
        assert (found.status_code, f"did you mean {closest}?" in told) == (404, True)
    for path in ("/", "/api/generate", "/v1/embeddings", "/nonsense/" * 50):
        told = httpx.post(f"{root}{path}", json={}).json()["error"]["message"]
        assert "there is /v1/models, /v1/models/NAME, /v1/chat/completions," in told
    url = f"{server.url}/chat/completions"
    assert httpx.post(f"{url}/", json={"messages": SUM, "max_tokens": 2}).status_code == 200
    assert httpx.get(f"{server.url}/models/{MODEL}/").json()["id"] == MODEL
    assert httpx.get(f"{root}/health/").status_code == 200
    counted = 'flowspec_requests_total{route="/health",status="200"}'  # once the answer is on its way
    wait_until(lambda: counted in server.service.metrics.text().decode(), "it counts as that path")
    head, options = httpx.head(f"{server.url}/models"), httpx.options(url)
    assert (head.status_code, head.content, httpx.head(url).status_code) == (200, b"", 405)
    assert (options.status_code, options.headers["allow"], options.content) == (204, "POST", b"")
    assert httpx.options(f"{server.url}/models").headers["allow"] == "GET, HEAD"
    assert httpx.options(f"{server.url}/nothing").status_code == 404


def test_a_field_that_does_nothing_is_named_once_in_the_log(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    with running(llm) as server:
        texts = {
            server.ask(user="SECRET", extra_body={"keep_alive": "5m"}, **WARM).choices[0].message.content
            for _ in range(2)
        }
        texts.add(server.ask(**WARM).choices[0].message.content)
        server.ask(store=True, max_tokens=2)
    assert len(texts) == 1
    named = [record.args[0] for record in caplog.records if "does nothing" in record.msg]
    assert named == ["user", "keep_alive", "store"]
    assert "SECRET" not in caplog.text


def test_models_health_cluster_and_metrics(server: Running, session: Session) -> None:
    with server.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).created > 0
    root = server.url.removesuffix("/v1")
    health = httpx.get(f"{root}/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok", "reason": None})
    cluster = httpx.get(f"{server.url}/cluster").json()
    assert [stage["layers"] for stage in cluster["stages"]] == [
        stage["layers"] for stage in session.stages_report()
    ]
    assert (cluster["state"], cluster["drafters"][0]["name"]) == ("ok", "ngram")
    before = server.count("flowspec_generated_tokens_total")
    found = server.ask()
    assert server.count("flowspec_generated_tokens_total") == before + found.usage.completion_tokens
    metrics = httpx.get(f"{root}/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'flowspec_requests_total{route="/v1/chat/completions",status="200"}' in metrics.text
    assert 'flowspec_stage_compute_seconds_total{stage="1"}' in metrics.text
    assert 'route="other",status="404"' in metrics.text or "/nothing" not in metrics.text


def test_a_client_that_goes_away_ends_its_answer(server: Running) -> None:
    before = server.count('flowspec_answers_total{reason="cancelled"}')
    with server.client() as client:
        stream = client.chat.completions.create(stream=True, n=2, **ENDLESS)
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert server.service.gate.running == 2
        stream.close()
        server.wait_idle()
    with server.connect() as raw:  # before its answer is whole, too
        raw.sendall(request(b'{"model": "bundled", "prompt": "a", "max_tokens": 900, "ignore_eos": true}'))
        wait_until(lambda: server.service.gate.running, "it is being answered")
    server.wait_idle()
    assert server.count('flowspec_answers_total{reason="cancelled"}') == before + 3
    assert server.ask().choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"extra_body": {"wibble": 1}}, 400, "wibble"),
        ({"model": "gpt-4"}, 404, "model"),
        ({"extra_body": {"stop_token_ids": [4096]}}, 400, "stop_token_ids"),
        ({"extra_body": {"logit_bias": {"4096": 1}}}, 400, "logit_bias"),
        ({"messages": [{"role": "user", "content": "a b " * 5000}]}, 400, "messages"),
    ],
)
def test_what_is_refused(server: Running, fields: dict[str, Any], status: int, param: str) -> None:
    """By the official client's errors, and as a response, too."""
    messages = fields.get("messages")
    as_response = {**fields, "input": messages[0]["content"]} if messages else {"input": "hi", **fields}
    as_response.pop("messages", None)
    with server.client() as client:
        for call in (
            lambda: server.ask(**fields),
            lambda: client.responses.create(**{"model": MODEL, **as_response}),
        ):
            with pytest.raises(openai.APIStatusError) as caught:
                call()
            expected = (status, "invalid_request_error")
            assert (caught.value.status_code, caught.value.type) == expected
            assert caught.value.param in (param, "input")


def request(body: bytes, route: str = "/v1/completions") -> bytes:
    lines = [
        f"POST {route} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def test_who_is_too_many_is_told_to_come_again_and_who_waits_may_leave(llm: LLM) -> None:
    with (
        running(llm, options=ServiceOptions(parallel=1, queue=1)) as server,
        server.client() as client,
    ):
        gate = server.service.gate
        stream = client.chat.completions.create(stream=True, **ENDLESS)
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        with server.connect() as raw:
            raw.sendall(request(b'{"model": "bundled", "prompt": "a"}'))
            wait_until(lambda: gate.waiting == 1, "it waits")
            with pytest.raises(openai.RateLimitError) as caught:
                server.ask()
            assert int(caught.value.response.headers["Retry-After"]) >= 1
            assert caught.value.code == "rate_limit_exceeded"
            with pytest.raises(openai.BadRequestError):
                server.ask(n=2)
        wait_until(lambda: gate.waiting == 0, "it left")
        texts: list[str] = []
        waiting = threading.Thread(target=lambda: texts.append(server.ask().choices[0].message.content))
        waiting.start()
        wait_until(lambda: gate.waiting == 1, "another one waits")
        stream.close()
        waiting.join()
        assert texts[0].endswith("So 17 + 25 = 42.")


def test_who_waits_when_the_server_stops_is_told_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowspec.serve.server.GRACE_S", 60.0)
    found: list[int] = []

    def wait() -> None:
        with pytest.raises(openai.InternalServerError, match="the server is stopping") as caught:
            server.ask()
        found.append(caught.value.status_code)

    with (
        running(llm, options=ServiceOptions(parallel=1, queue=8)) as server,
        server.client() as client,
    ):
        stream = client.chat.completions.create(stream=True, **ENDLESS)
        next(iter(stream))
        waiting = [threading.Thread(target=wait) for _ in range(3)]
        for thread in waiting:
            thread.start()
        wait_until(lambda: server.service.gate.waiting == 3, "they wait")
        server.stop()
        for thread in waiting:
            thread.join()
        assert found == [503] * 3
        assert server.service.gate.running == 1, "nobody waited for the answer under way"
        server.stop()
        with pytest.raises(openai.APIError, match="the server is stopping"):
            for _ in stream:
                pass
    assert server.count('flowspec_answers_total{reason="cancelled"}') == 1, "no other began"


def test_keys(llm: LLM) -> None:
    with running(
        llm,
        access=AccessRules(keys=(b"sesame-1", b"sesame-2"), origins=("http://page",), free=("/", "/page/")),
    ) as server:
        for key in ("sesame-1", "sesame-2"):
            with server.client(key) as client:
                assert client.models.list().data[0].id == MODEL
        with server.client("sesame-3") as client, pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert (caught.value.code, caught.value.response.headers["www-authenticate"]) == (
            "invalid_api_key",
            "Bearer",
        )
        root = server.url.removesuffix("/v1")
        paths = ("/health", "/metrics", "/v1/cluster", "/", "/page/x", "/page")
        expected = [200, 401, 401, 404, 404, 401]
        assert [httpx.get(f"{root}{path}").status_code for path in paths] == expected
        asked = {
            "Origin": "http://page",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        allowed = httpx.options(f"{server.url}/models", headers=asked)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "http://page")
        refused = httpx.get(f"{server.url}/models", headers={"Origin": "http://page"})
        assert (refused.status_code, refused.headers["access-control-expose-headers"]) == (401, "Retry-After")
        other = httpx.get(
            f"{server.url}/models", headers={"Origin": "http://elsewhere", "Authorization": "Bearer sesame-1"}
        )
        assert "access-control-allow-origin" not in other.headers


def test_logprobs_are_those_of_transformers_logits(
    server: Running, session: Session, reference: PlainModel, tokenizer: Tokenizer
) -> None:
    prompt = tuple(tokenizer.encode_chat(SUM))
    answer = reference.generate(prompt, Sampling(temperature=1.0, seed=4), 1024, frozenset([2]))
    tokens = [token for token in answer if token != 2]
    assert server.ask(**WARM).choices[0].logprobs is None
    found = server.ask(logprobs=True, top_logprobs=TOP_LOGPROBS_MAX, **WARM).choices[0]
    assert len(found.logprobs.content) == len(tokens)
    for entry, token, logits in zip(
        found.logprobs.content, tokens, reference.forced_logits(prompt, tokens[:-1]), strict=True
    ):
        own = logits - np.logaddexp.reduce(logits.astype(np.float64))
        assert (bytes(entry.bytes), entry.token.encode()) == (tokenizer.token_bytes(token),) * 2
        assert entry.logprob == pytest.approx(own[token], abs=1e-3)
        likeliest = np.argsort(-own)[: 2 * TOP_LOGPROBS_MAX]  # some are alike
        known = {tokenizer.token_bytes(int(each)): own[each] for each in likeliest}
        told = [other.logprob for other in entry.top_logprobs]
        assert told == pytest.approx(own[likeliest[:TOP_LOGPROBS_MAX]], abs=1e-3)
        assert told == pytest.approx([known[bytes(other.bytes)] for other in entry.top_logprobs], abs=1e-3)
    assert "".join(entry.token for entry in found.logprobs.content) == found.message.content
    chunks = server.streamed(logprobs=True, top_logprobs=3, **WARM)
    entries = [
        entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in entries] == [entry.token for entry in found.logprobs.content]
    assert [entry.logprob for entry in entries] == pytest.approx(
        [entry.logprob for entry in found.logprobs.content], abs=1e-3
    )
    limits = Limits(new_tokens_max=1, stop_ids=frozenset())
    for wrong in (-2, TOP_LOGPROBS_MAX + 1):
        with pytest.raises(InputError, match=f"expected -1 .none. to {TOP_LOGPROBS_MAX}, got {wrong}"):
            session.submit(prompt, Sampling(), limits, request=1 << 30, top_logprobs=wrong)


def test_logprobs_of_a_completion(server: Running) -> None:
    found = ask_raw(server, temperature=0, logprobs=2).choices[0]
    offsets = [sum(map(len, found.logprobs.tokens[:place])) for place in range(len(found.logprobs.tokens))]
    assert ("".join(found.logprobs.tokens), found.logprobs.text_offset) == (found.text, offsets)
    for token, logprob, top in zip(
        found.logprobs.tokens, found.logprobs.token_logprobs, found.logprobs.top_logprobs, strict=True
    ):
        assert (len(top), max(top.values()), top[token]) == (2, logprob, logprob)
    stop = found.text[offsets[len(offsets) // 2] :]
    at = found.text.index(stop)
    cut = ask_raw(server, temperature=0, logprobs=2, stop=stop).choices[0]
    assert (cut.text, cut.logprobs.text_offset) == (
        found.text[:at],
        [offset for offset in offsets if offset < at],
    )
