"""Answers that a grammar binds, on real processes: each is that of decoding step by step, and a text that the
grammar allows, whatever is guessed and whatever is lost."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

pytest.importorskip("llguidance")

from flowspec import LLM
from flowspec.core.methods import METHODS
from flowspec.core.protocol.messages import Grammar, Sampling
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.errors import ClusterError, InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.grammar import GrammarVocabulary, is_whole, library_version
from flowspec.model.reply.bound import Wanted, bound_reply
from flowspec.model.reply.form import form_of
from flowspec.model.reply.parts import Tool, calls_in
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer, recommended
from flowspec.runtime import head as head_module
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, open_cluster
from tests.nightly import nightly
from tests.runtime.clusters import wait_until
from tests.schemas import allows

NEW_TOKENS_MAX = 60
CALL_TOKENS_MAX = 120
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 999},
        "unit": {"enum": ["none", "apples"]},
        "why": {"type": "string", "maxLength": 12},
        "steps": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["answer", "unit", "why", "steps"],
    "additionalProperties": False,
}
REGEX = r"(yes|no), it is [0-9]{1,3}\."
QUESTION = "What is 17 + 25?"


def check_document(text: str) -> None:
    """That the schema allows it, by what the schema means."""
    found = json.loads(text)
    assert list(found) == ["answer", "unit", "why", "steps"]
    assert type(found["answer"]) is int
    assert 0 <= found["answer"] <= 999
    assert found["unit"] in ("none", "apples")
    assert len(found["why"]) <= 12
    assert len(found["steps"]) <= 3
    assert all(type(step) is bool for step in found["steps"])


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return ModelFiles(BUNDLED)


@pytest.fixture(scope="module")
def tokenizer(files: ModelFiles) -> Tokenizer:
    return Tokenizer(files)


@pytest.fixture(scope="module")
def tokens(files: ModelFiles, tokenizer: Tokenizer) -> TokenBytes:
    config = files.config()
    return tokenizer.token_bytes_of_all(config.vocab_size, recommended(files, config).stop_ids)


@pytest.fixture(scope="module")
def plain(files: ModelFiles, tokens: TokenBytes) -> StepByStep:
    found = StepByStep.load(files, "float32")
    found.grammars = GrammarVocabulary(tokens)
    return found


MARKS = {"<tool_call>": 3, "</tool_call>": 4}
"""Special tokens of the bundled model, in whose place another model has those of calls, or of thoughts."""
THOUGHT_MARKS = {"<think>": 3, "</think>": 4}
NOTE = Tool(
    name="take_note",
    parameters={
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 9}, "lines": {"enum": [1, 2, 3]}},
        "required": ["text", "lines"],
        "additionalProperties": False,
    },
)
FORM = form_of("<tool_call>", MARKS, "", [NOTE])
THINKING = form_of("<think>", (), "", ())


def document(ends: tuple[int, ...], text: str = json.dumps(SCHEMA)) -> Sampling:
    grammar = Grammar(kind="json_schema", text=text, ends=ends)
    return Sampling(temperature=1.0, seed=5, grammar=grammar)


def samplings(ends: tuple[int, ...]) -> dict[str, Sampling]:
    """A grammar of each kind; calls that have to be, and one that the model is biased to begin in its text;
    thoughts that it is biased to begin, and to end."""
    found = {"document": document(ends), "likeliest": structs.replace(document(ends), temperature=0.0)}
    sentence = Grammar(kind="regex", text=REGEX, ends=ends)
    found["sentence"] = Sampling(temperature=1.0, seed=6, top_p=0.8, frequency_penalty=0.5, grammar=sentence)
    assert FORM is not None
    assert THINKING is not None
    for is_required in (True, False):
        wanted = Wanted(tools=(NOTE,), is_required=is_required, is_single=True)
        reply = bound_reply(FORM, wanted, MARKS, may_think=False)
        grammar = Grammar(kind="reply", text=reply.text, ends=ends, marks=reply.marks)
        bias = () if is_required else ((MARKS["<tool_call>"], 18.0),)
        found["call" if is_required else "call in a text"] = Sampling(
            temperature=1.0, seed=5, grammar=grammar, logit_bias=bias
        )
    wanted = Wanted(answer=("json_schema", json.dumps(SCHEMA)))
    reply = bound_reply(THINKING, wanted, THOUGHT_MARKS, may_think=True)
    grammar = Grammar(kind="reply", text=reply.text, ends=ends, marks=reply.marks)
    bias = ((THOUGHT_MARKS["<think>"], 90.0), (THOUGHT_MARKS["</think>"], 16.0))
    found["thoughts"] = Sampling(temperature=1.0, seed=5, grammar=grammar, logit_bias=bias)
    return found


def check(name: str, answer: Sequence[int], tokenizer: Tokenizer) -> None:
    """That a text of this grammar is what was asked for."""
    if name == "sentence":
        assert re.fullmatch(REGEX, tokenizer.decode(answer))
    elif name.startswith("call"):
        assert FORM is not None
        reader, names = FORM.reader(), {token: mark for mark, token in MARKS.items()}
        parts = [
            part for token in answer for part in reader.push(names.get(token) or tokenizer.decode([token]))
        ]
        (call,) = calls_in([*parts, *reader.finish()])
        assert allows(NOTE.parameters, json.loads(call.arguments))
    elif name == "thoughts":
        at = answer.index(THOUGHT_MARKS["</think>"])
        assert answer[0] == THOUGHT_MARKS["<think>"]
        assert at > 1
        check_document(tokenizer.decode(answer[at + 1 :]))
    else:
        check_document(tokenizer.decode(answer))


@pytest.mark.usefixtures("lent")
def test_answers_of_every_method_are_those_of_decoding_step_by_step(
    files: ModelFiles, tokenizer: Tokenizer, tokens: TokenBytes, plain: StepByStep
) -> None:
    """The default method is bound by every grammar, each other one by one of them; at night all by all."""
    stop_ids = recommended(files, files.config()).stop_ids
    limits = Limits(new_tokens_max=CALL_TOKENS_MAX, stop_ids=stop_ids)
    prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": QUESTION}]))
    asked = samplings(tuple(sorted(stop_ids)))
    expected: dict[str, tuple[int, ...]] = {}
    for name, sampling in asked.items():
        *answer, end = plain.generate(prompt, sampling, CALL_TOKENS_MAX, stop_ids)
        assert end in stop_ids, tokenizer.decode(answer)
        assert sampling.grammar is not None
        assert is_whole(sampling.grammar, tokens, tuple(answer))
        check(name, answer, tokenizer)
        expected[name] = tuple(answer)
    with open_cluster(ClusterOptions(model=BUNDLED, dtype="float32", local=2, context=200)) as opened:
        cluster = replace(opened, plan=replace(opened.plan, tokens=tokens))
        for number, method in enumerate(METHODS):
            decoding = Decoding(method=method, drafters=(None if method == "ar" else BUNDLED,))
            one = list(asked)[number % len(asked)]
            names = nightly(asked if method == Decoding().method else [one], asked)
            with cluster.session(decoding, lambda text, share: None) as session:
                assert session.head.stages[-1].ready.grammars == library_version()
                assert session.head.grammar_trouble() == ""
                for name in names:
                    running, timing = session.ask(prompt, asked[name], limits)
                    assert running.end is not None
                    assert running.end.reason == "stop", (method, name)
                    assert tuple(timing.new_tokens) == expected[name], (method, name)


def ask(llm: LLM, **params: Any) -> Any:
    wanted = {"json_schema": SCHEMA, "temperature": 1.0, "seed": 5, "max_new_tokens": NEW_TOKENS_MAX}
    return llm.stream(QUESTION, **{**wanted, **params})


def test_a_lost_device_changes_no_token_and_one_that_cannot_obey_is_never_asked_to(
    files: ModelFiles, plain: StepByStep, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one draws the tokens: the one that takes its place gets the model's tokens, too."""
    stop_ids = recommended(files, files.config()).stop_ids
    text = json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":"))
    prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": QUESTION}]))
    sampling = document(tuple(sorted(stop_ids)), text)
    expected = plain.generate(prompt, sampling, NEW_TOKENS_MAX, stop_ids)[:-1]
    with LLM(BUNDLED, local=3, drafter=BUNDLED, dtype="float32", context=400) as llm:
        stream = ask(llm)
        found = list(next(stream).token_ids)
        os.kill(llm.stages[-1]["pid"], signal.SIGKILL)
        for piece in stream:
            found += piece.token_ids
        answer = stream.answer()
        assert tuple(found) == answer.token_ids == expected
        check_document(answer.text)
        assert answer.statistics["recoveries"] == 1
        assert len(llm.stages) == 2

        stream = ask(llm, json_schema=None, regex="[a-z ]{300}", max_new_tokens=250)
        next(stream)
        monkeypatch.setattr(head_module, "library_version", lambda: "llguidance 99")
        with pytest.raises(InputError, match=r"expected llguidance 99 on device local-1.* got llguidance 1"):
            ask(llm)
        free = llm.generate(QUESTION, max_new_tokens=8).text
        os.kill(llm.stages[-1]["pid"], signal.SIGKILL)
        with pytest.raises(ClusterError, match="expected llguidance 99 on device local-0"):
            stream.answer()
        wait_until(lambda: len(llm.stages) == 1, "it goes on")
        assert llm.generate(QUESTION, max_new_tokens=8).text == free


@pytest.mark.usefixtures("lent")
def test_what_cannot_be_obeyed_is_refused_and_biases_never_lead_out_of_a_grammar(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(BUNDLED, local=1, dtype="float32", context=400) as llm:
        own = llm.question(QUESTION, regex="yes|no", temperature=0.0, max_new_tokens=9)
        every = structs.replace(own.sampling, suppress_tokens=tuple(range(1024)))
        assert llm.submit(replace(own, sampling=every)).answer().text in ("yes", "no"), "the grammar wins"
        likely = ask(llm, json_schema=None, regex="[ab]{3}", logit_bias={tokenizer.encode("b")[0]: 90.0})
        assert "b" in likely.answer().text
        for params, text in (
            ({"json_schema": {"not": {}}}, "not"),
            ({"regex": "a"}, "^regex: "),
            ({"ignore_eos": True}, "^ignore_eos: "),
            ({"json_schema": 5}, "^json_schema: "),
            ({"json_schema": {"enum": ["x" * 70_000]}}, "^json_schema: expected at most 65536 bytes"),
        ):
            with pytest.raises(InputError, match=text):
                ask(llm, **params)
        monkeypatch.setattr(llm, "recommended", replace(llm.recommended, stop_ids=frozenset()))
        monkeypatch.setattr(type(llm.tokenizer), "eos_id", None)
        with pytest.raises(InputError, match="expected a token that ends answers"):
            ask(llm)
